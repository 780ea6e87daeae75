"""Commands of the service to the dispatcher and of the dispatcher to the engine, and the replies to queries.

All are plain values that msgspec can encode, so that the engine can run in a process of its own. `Submit` is
answered by the events of `llamaslot.base.events`; a `Query` by one `Reply` with the struct that the docstring of
its body names.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from llamaslot.base.generation.replies import ChatTurn
from llamaslot.base.generation.request_context import ReplyOptions, RequestContext
from llamaslot.base.generation.responses import EarlierItems, ListItems, References
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.tools import ReasoningBudget, ReasoningDefaults
from llamaslot.base.prompt import TokenizedPrompt
from llamaslot.base.text_records import TextRecord

N_SEEDS = 2**32 - 1
"""Seeds are 32 bits wide; the highest one means "random" to llama.cpp and is never passed on."""

BodyKind: TypeAlias = Literal["chat", "responses", "compact", "messages", "text", "native", "infill", "probe"]
SlotVerb: TypeAlias = Literal["save", "restore", "erase"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Prompt text. With `special` false, control tokens written out in it stay plain text."""

    text: str
    special: bool = True


class TokensPart(msgspec.Struct, frozen=True, tag="tokens"):
    """Prompt given as token ids."""

    tokens: tuple[int, ...]


PromptPart: TypeAlias = TextPart | TokensPart


class Constraint(msgspec.Struct, frozen=True):
    """A grammar that the text of a reply must match, in one normal form whatever the client sent.

    `text/grammars/` makes and checks it in the prompt worker, `backend/constraints/` follows it in the engine.
    """

    grammar: str
    """llguidance's JSON form of a grammar."""
    param: str
    """The request field that it comes from, for errors."""
    seconds: float = 0.0
    """CPU time that it took to compile when it was checked."""
    n_bytes: int = 0
    """Memory that it took then; 0 if that is not known."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A request for `n` completions of one prompt, which is tokenized and computed once for all of them."""

    request_id: str
    prompt: tuple[PromptPart, ...]
    chat: ChatTurn | None = None
    """Of a chat whose reply may be remembered."""
    rest: tuple[TextPart, ...] = ()
    """The prompt after the tokens that `chat` restores; `prompt` is the same conversation without them."""
    add_special: bool = True
    """Put the model's BOS before a prompt that starts with text."""
    sampling: Sampling = Sampling()
    max_tokens: int = -1
    """Tokens to generate: -1 up to the end of the slot's context, 0 none (the prompt is evaluated)."""
    stop: tuple[str, ...] = ()
    n_indent: int = 0
    """Spaces and tabs that each line but the first must begin with, or the text ends before it."""
    t_max_predict_ms: int = -1
    """Time after the first token from which on the end of a line ends the text; not positive for none."""
    return_progress: bool = False
    """Send an `Output` with `prefill` before the first and after each step that computes the prompt."""
    constraint: Constraint | None = None
    """The grammar that the reply must match."""
    reasoning_budget: ReasoningBudget | None = None
    """The limit of reasoning, if there is one."""
    preserved_tokens: tuple[int, ...] = ()
    """Control tokens that are kept in the reply's text, for the parser of its format (llama.cpp's name)."""
    cache_prompt: bool = True
    cache_salt: str = ""
    """Namespace: only requests with the same salt share KV."""
    group: str = ""
    """Shared by the completions of one prompt; set by `completions`."""
    id_slot: int = -1
    """The slot to run in, or -1 for the best one."""
    return_tokens: bool = False
    """Make `Accepted` carry the prompt's token ids."""
    client_request_id: str = ""
    """The client's `X-Request-Id`, used in the log only."""
    session_id: str = ""
    """The client's name for the conversation; empty for none."""
    session_branch: str = ""
    """Tells apart conversations of one session, such as those of sub-agents, by what they begin with."""
    owner: str = ""
    """The `Sender.owner` whose share of memory is charged for the remembered reply."""
    client: str = ""
    """A digest that tells clients apart: of the API key, else of the session, else of the address.

    Clients take turns in queues (`base/turns.py`).
    """
    n: int = 1
    prompt_probs: int = -1
    """Score the prompt's tokens, each with so many of the most likely ones; -1 for not.

    Such a prompt is computed in full, without the cache.
    """

    def without_prompt(self) -> Submit:
        """Return the request without its prompt, as the engine gets it beside the tokens."""
        return msgspec.structs.replace(self, prompt=(), chat=None, rest=())

    @property
    def ends_by_text(self) -> bool:
        """True if the generated text may end the generation."""
        return bool(self.stop) or self.n_indent > 0 or self.t_max_predict_ms > 0

    def completions(self) -> list[Submit]:
        """Return a request for each completion, with its own id and the seeds that follow the first one's."""
        if self.n == 1:
            return [self]
        return [
            msgspec.structs.replace(
                self,
                request_id=f"{self.request_id}-{i}",
                sampling=msgspec.structs.replace(self.sampling, seed=(self.sampling.seed + i) % N_SEEDS),
                group=self.request_id,
                n=1,
            )
            for i in range(self.n)
        ]


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """One completion of a tokenized prompt."""

    submit: Submit
    """Without its prompt, for one completion."""
    prompt: TokenizedPrompt
    waited_s: float = 0.0
    """Seconds since the request was submitted."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop one completion, queued or running, or a query that the prompt worker has; others are ignored."""

    request_id: str


class Detokenize(msgspec.Struct, frozen=True, tag="detokenize"):
    """Turn token ids into text; answered by `Detokenized`."""

    tokens: tuple[int, ...]
    client: str = ""
    """As in `Submit`."""


class Detokenized(msgspec.Struct, frozen=True, tag="detokenized"):
    """The text of token ids."""

    content: str


class ParseBody(msgspec.Struct, frozen=True, tag="parse_body"):
    """Read the body of a request for completions; answered by `ParsedBody`.

    It has a conversation in the format of OpenAI's chats (`chat`), of its Responses API (`responses`) or of
    Anthropic's Messages API (`messages`), or prompts in OpenAI's format (`text`) or llama-server's (`native`,
    `infill`). `probe` is a chat if it has messages, else a text completion.
    """

    kind: BodyKind
    body: bytes
    """JSON."""
    context: RequestContext
    is_run: bool = True
    """False if only the prompt is wanted, to count its tokens or to probe the cache: the reply then needs no
    constraint, not even a valid one.
    """
    earlier: EarlierItems | None = None
    """The `references` of this body, which an earlier `ParsedBody` has named."""
    may_compile: bool = False
    """True if a grammar may be compiled to check it, which may take seconds; otherwise a body is deferred unless
    its grammar is known to be valid.
    """


class ParsedBody(msgspec.Struct, frozen=True, tag="parsed_body"):
    """The requests of a body, one for each prompt."""

    submits: tuple[Submit, ...]
    options: ReplyOptions
    references: References | None = None
    """Earlier items without which the body cannot be read; there are no `submits` then."""
    is_deferred: bool = False
    """True if the body must be read again with `may_compile`; there are no `submits` then."""


class AnswerBody(msgspec.Struct, frozen=True, tag="answer_body"):
    """Answer a request body that needs only the chat template or the vocabulary; answered by `JsonReply`."""

    kind: Literal["apply_template", "tokenize", "detokenize"]
    body: bytes
    """JSON."""
    client: str = ""
    reasoning: ReasoningDefaults = ReasoningDefaults()

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return len(self.body)


class JsonReply(msgspec.Struct, frozen=True, tag="json_reply"):
    """The body of a reply."""

    data: bytes


PromptQuery: TypeAlias = Detokenize | ParseBody | AnswerBody | ListItems
"""Queries that only the prompt worker answers."""


class InspectEngine(msgspec.Struct, frozen=True, tag="inspect_engine"):
    """Ask for the state of slots, queue and cache; answered by `EngineState`."""


class InspectCache(msgspec.Struct, frozen=True, tag="inspect_cache"):
    """Ask for the cache's statistics and its radix tree; answered by `CacheState`."""

    top: int
    """Number of prefixes to list, those with the most hits first."""
    text: bool = False
    """Show the prefixes' text, which is what users wrote."""
    tenants: bool = False
    """List the tenants."""


class ProbeCache(msgspec.Struct, frozen=True, tag="probe_cache"):
    """Ask what is cached of the prompt of a request, which is not run; answered by `CacheProbe`."""

    submit: Submit


class CountTokens(msgspec.Struct, frozen=True, tag="count_tokens"):
    """Count the tokens of the prompt of a request, which is not run; answered by `CountedTokens`."""

    submit: Submit


class ProbePrompt(msgspec.Struct, frozen=True, tag="probe_prompt"):
    """Ask what is cached of a tokenized prompt, which is not run; answered by `CacheProbe`."""

    submit: Submit
    """Without its prompt."""
    prompt: TokenizedPrompt


class DropSession(msgspec.Struct, frozen=True, tag="drop_session"):
    """Drop a session, and the KV that only it uses; answered by `CacheCleared`, or `NotFoundError`."""

    session_id: str
    cache_salt: str = ""


class DropPaths(msgspec.Struct, frozen=True, tag="drop_paths"):
    """Drop a session's record from the disk, and KV that nothing else uses; answered by `CacheCleared`, or by
    `NotFoundError` if there are no paths.
    """

    namespace: str
    paths: tuple[bytes, ...]
    """The tokens of the session's sequences, packed."""
    session: bytes
    """The digest of its record."""


class WriteTexts(msgspec.Struct, frozen=True, tag="write_texts"):
    """Write records to disk, if there is one; not answered."""

    records: tuple[TextRecord, ...]


class SlotAction(msgspec.Struct, frozen=True, tag="slot_action"):
    """Save a slot to a file, restore it from one, or erase it, once no request runs in it; answered by
    `SlotActionDone`.
    """

    slot: int
    action: SlotVerb
    filename: str = ""


class SlotActionDone(msgspec.Struct, frozen=True):
    """Size and duration of a slot action."""

    n_tokens: int
    """Tokens that were saved, restored or erased."""
    n_bytes: int = 0
    """Bytes of the file."""
    ms: float = 0.0
    """Duration of file access and KV transfer, without the wait for an idle slot."""


class ClearCache(msgspec.Struct, frozen=True, tag="clear_cache"):
    """Drop every prefix that no running request uses; answered by `CacheCleared`."""


class CacheCleared(msgspec.Struct, frozen=True):
    """Tokens that were dropped; the reply to `POST /cache/clear` as JSON."""

    cleared_tokens: int
    """Tokens dropped from the pool."""
    cleared_ram_tokens: int = 0
    cleared_disk_tokens: int = 0


EngineQuery: TypeAlias = InspectEngine | InspectCache | ProbePrompt | DropPaths | SlotAction | ClearCache
QueryBody: TypeAlias = PromptQuery | ProbeCache | CountTokens | DropSession | EngineQuery


class Query(msgspec.Struct, frozen=True, tag="query"):
    """Ask the prompt worker, the engine or both; answered by one `Reply` with the same id."""

    request_id: str
    body: QueryBody


Command: TypeAlias = Submit | Cancel | Query
"""Commands to the dispatcher."""
EngineCommand: TypeAlias = Generate | Cancel | Query | WriteTexts
"""Commands to the engine; a query's body is an `EngineQuery`."""
