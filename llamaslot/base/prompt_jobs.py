"""Jobs of the prompt worker, and their results: bodies of requests to read, replies to remember, and questions.

All are plain values that msgspec can encode, since the worker is a process of its own. `prompts/lanes.py`
decides their order. Earlier items, and the fields of a reply that repeat those of its request, are those of the
Responses API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from llamaslot.base.advice import Divergence
from llamaslot.base.callers import Caller
from llamaslot.base.commands import ContextShift, DropPaths, Generate
from llamaslot.base.errors import ErrorInfo
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.tools import ParserOptions, ReasoningFormat
from llamaslot.base.images import ImageLayout, ImageSize
from llamaslot.base.text_records import TextRecord

BodyKind: TypeAlias = Literal[
    "chat",
    "responses",
    "compact",
    "messages",
    "ollama_chat",
    "text",
    "native",
    "infill",
    "ollama_generate",
    "any",
    "embedding",
    "embeddings",
    "rerank",
    "ollama_embed",
    "ollama_embeddings",
]
Purpose: TypeAlias = Literal["run", "inspect", "warm"]
"""Purpose of a prepared prompt: to generate a reply; to count its tokens, or to look up what is cached of it; or
to compute it for later prompts, so that it is cut where these may differ (`TextRequest.others`). Only a reply needs
a constraint: the others accept an invalid one.
"""
CallKind: TypeAlias = Literal["function", "custom", "local_shell"]


class RequestPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of all requests, and defaults for the fields of their bodies."""

    max_prompts: int
    max_choices: int
    """Completions of all prompts together."""
    max_logit_bias_entries: int
    max_stop_strings: int
    max_stop_chars: int
    """Characters of all stop strings together."""
    sampling: Sampling
    """A `seed` of -1 stands for a new one each time."""
    max_tokens: int
    """Limit of new tokens."""
    shift: ContextShift = ContextShift()
    cache_prompt: bool
    verbose: bool
    reasoning: bool
    """True if the model reasons before it answers; only for chat templates that leave the choice."""
    reasoning_budget: int
    """Tokens that the model may reason; -1 for no limit."""
    reasoning_format: ReasoningFormat
    template_kwargs: dict[str, Any] = {}
    """Variables of the chat template."""
    embd_normalize: int = 2
    """`VectorParams.normalize` of a vector."""
    max_draft: int = 0
    """`GenerateParams.max_draft` of a request that does not turn drafts off."""


class RequestContext(msgspec.Struct, frozen=True):
    """Inputs of the prompt worker other than a request's body, from its HTTP headers and its endpoint."""

    request_id: str
    caller: Caller = Caller()
    key_secret: str = ""
    """`key_secret` of the API key where each key has namespaces of its own; empty where not."""
    is_admin: bool = False
    """True if the API key is an administrator's, who may share KV with all keys."""
    shows_prompt: bool = False
    """The reply shows the prompt's text."""
    counts_tokens: bool = False
    """Every event of a stream has the number of tokens so far."""
    adapter_scales: tuple[float, ...] = ()
    """Scale of each adapter for a request that names none."""


class References(msgspec.Struct, frozen=True):
    """References of a request to earlier responses: the one that it continues, and items by their ids."""

    previous: str = ""
    items: tuple[str, ...] = ()


class EarlierItems(msgspec.Struct, frozen=True):
    """The items that `References` stand for."""

    history: tuple[bytes, ...] = ()
    """JSON lists of items, in the order of the conversation."""
    items: Mapping[str, bytes] = {}
    """JSON objects by id."""

    @property
    def size(self) -> int:
        """Bytes of all items."""
        return sum(map(len, self.history)) + sum(map(len, self.items.values()))


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Read the body of a request for completions, render its template and tokenize its prompts.

    Answered by `Prepared`, `BadBody`, or `Needs`: then it is sent again with what is missing. The worker keeps the
    prompts' texts for `Remember` and `Locate` until `Release`.

    The body has a conversation in the format of OpenAI's chats (`chat`), of its Responses API (`responses`), of
    Anthropic's Messages API (`messages`) or of Ollama's API (`ollama_chat`), or prompts in the format of OpenAI
    (`text`), llama-server (`native`, `infill`) or Ollama (`ollama_generate`). `any` is a body that `/cache/probe`
    or `/cache/warm` got, in the format of any API but Ollama's. Inputs to embed are in OpenAI's format
    (`embeddings`), llama-server's (`embedding`) or one of Ollama's (`ollama_embed`, `ollama_embeddings`); documents
    to be scored for a query are `rerank`.
    """

    kind: BodyKind
    body: bytes
    """JSON."""
    context: RequestContext
    purpose: Purpose = "run"
    reply: bytes = b""
    """The reply to a chat, a message as JSON: what is warmed has it as the last one."""
    earlier: EarlierItems | None = None
    """The `references` that `Needs` named."""
    layouts: Mapping[ImageSize, ImageLayout] = {}
    """The `layouts` that `Needs` named."""
    may_compile: bool = False
    """True if a grammar may be compiled to check it, which may take seconds; otherwise a grammar that is not known
    to be valid is answered by `Needs`.
    """


class CallForm(msgspec.Struct, frozen=True):
    """Form in which calls of a tool are reported to the client; to the model every tool is a function."""

    kind: CallKind = "function"
    name: str = ""
    """The client's name of the tool."""
    namespace: str = ""


class ResponseFields(msgspec.Struct, frozen=True):
    """Fields of a Responses request that its reply repeats or depends on."""

    echo: bytes = b"{}"
    """A JSON object of the request's fields that the reply repeats."""
    input: bytes = b"[]"
    """The request's own input items, a JSON list; each has an id. Empty if the response is not to be stored."""
    store: bool = True
    previous: str = ""
    """Id of the response that this one continues."""
    user_texts: tuple[str, ...] = ()
    """All that the user wrote, for a compaction."""
    returns_reasoning: bool = False
    """Reasoning items have `encrypted_content`."""
    forms: Mapping[str, CallForm] = {}
    """By the name of the model's function; without functions that the request declares in the same form."""


class ChatToStore(msgspec.Struct, frozen=True):
    """The fields of a stored chat that its reply does not have."""

    messages: bytes
    """The request's messages, each with an id, as a JSON list."""
    metadata: Mapping[str, str] = {}


class VectorReply(msgspec.Struct, frozen=True):
    """Form of a reply with vectors or scores."""

    form: Literal["openai", "native", "rerank", "tei"]
    """`openai` and `native` (llama-server's own) have vectors, `rerank` and `tei` (Hugging Face's) have scores.

    Ollama's endpoints have one form each, whatever this is.
    """
    model: str = ""
    """The model's name in the request; empty for the server's own."""
    base64: bool = False
    top_n: int = 0
    """Most documents in the reply, those with the highest scores."""
    texts: tuple[str, ...] = ()
    """The documents, if the reply repeats them."""


class ReplyOptions(msgspec.Struct, frozen=True):
    """Fields of a request that shape its reply, and not what is generated."""

    model: str = ""
    """The client's name of the model, for replies that repeat it; empty if it gave none."""
    generates: bool = True
    """False for a request that only asks for the model to be loaded: it has a prompt, which is not run."""
    is_text: bool = False
    """The reply is a text, and not parsed as the message of a chat; only for APIs in which it may be either."""
    stream: bool = False
    include_usage: bool = False
    """The last event of a stream has the usage."""
    timings_per_token: bool = False
    return_tokens: bool = False
    verbose: bool = False
    """The reply includes llama-server's reply, with the prompt."""
    echo: bool = False
    """Texts begin with their prompts."""
    n_best: int = 0
    """Completions of each prompt that are in the reply, the most likely ones; 0 for all."""
    hides_logprobs: bool = False
    """Probabilities are computed only to find the best completions, and are not returned."""
    response_fields: tuple[str, ...] = ()
    """Fields that llama-server's reply is reduced to; empty for all."""
    parser: ParserOptions = ParserOptions()
    """For the message of a chat's reply."""
    omit_reasoning: bool = False
    """The text of the reasoning is left out of the reply."""
    sse_ping_interval: int | None = None
    response: ResponseFields = ResponseFields()
    """Further fields of a Responses request."""
    chat: ChatToStore | None = None
    """A chat that is to be stored."""
    vectors: VectorReply | None = None
    """None for a reply of text."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the parts of the body that are kept for the reply, or to be stored with it."""
        chat = len(self.chat.messages) if self.chat is not None else 0
        texts = sum(map(len, (self.vectors.model, *self.vectors.texts))) if self.vectors is not None else 0
        return len(self.response.echo) + len(self.response.input) + chat + texts


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The prompts of a body, and the options of its reply."""

    prompts: tuple[Generate, ...]
    texts: tuple[str, ...]
    """The text of each prompt as the model sees it; empty if the reply does not show it."""
    echoes: tuple[str, ...]
    """The text of each prompt as the client gave it; empty if the reply does not begin with it."""
    options: ReplyOptions


class Needs(msgspec.Struct, frozen=True, tag="needs"):
    """A body cannot be read yet: it needs one of these."""

    references: References = References()
    """Items of earlier responses."""
    may_compile: bool = False
    """`Prepare.may_compile`."""
    layouts: tuple[ImageSize, ...] = ()
    """The tokens of images of these sizes, which the engine knows."""


class BadBody(msgspec.Struct, frozen=True, tag="bad_body"):
    """The body is invalid: its client gets a 400, and it is neither counted as a request nor logged."""

    error: ErrorInfo


class Remember(msgspec.Struct, frozen=True, tag="remember"):
    """Remember a reply to a prompt that was prepared; answered by the new records, to be written to disk.

    The request is known until it is released, or the worker's process ends; otherwise nothing is remembered.
    """

    request_id: str
    """That of the `Prepare`, as in `Release` and `Locate`."""
    generated: bytes
    """Packed tokens."""
    n_sent: int
    """Characters that the client was sent."""
    completion_id: str = ""
    """The completion whose reply it is, if it was sent to its end."""
    prompt: int = 0
    """The number of the prompt, if there are several."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Release what is kept of a request: no reply to it will be remembered any more."""

    request_id: str


class NextTurn(msgspec.Struct, frozen=True, tag="next_turn"):
    """Find the prompt with which the turn after a reply will begin, and release the request.

    Answered by `PredictedPrompt`; or by None if the conversation never came back with a reply of this server, if
    this reply cannot be sent back, or if too few tokens of the prompt are new to be worth computing ahead, or too
    many.
    """

    request_id: str
    generated: bytes
    n_sent: int
    completion_id: str
    """As in `Remember`, which goes before it."""
    max_new: int
    """Most new tokens."""


class PredictedPrompt(msgspec.Struct, frozen=True, tag="predicted_prompt"):
    """The beginning of a conversation's next prompt, to be computed in the background."""

    generate: Generate
    n_new: int
    """Its tokens after those with which the last prompt and its reply begin."""
    records: tuple[TextRecord, ...] = ()
    """The session, with which this prompt is dropped."""


class Locate(msgspec.Struct, frozen=True, tag="locate"):
    """Count the characters that the first tokens of a request's prompt stand for; answered by `Located`."""

    request_id: str
    n_tokens: int
    prompt: int = 0
    explains: bool = False
    """True to also find the earlier prompt that this one diverges from there, and why."""


class Located(msgspec.Struct, frozen=True, tag="located"):
    """The place in a prompt after its first tokens."""

    n_characters: int
    """-1 if the request is not known."""
    divergence: Divergence | None = None


class AnswerBody(msgspec.Struct, frozen=True, tag="answer_body"):
    """Answer a body that needs only the chat template or the vocabulary; answered by the JSON of the reply."""

    kind: Literal["apply_template", "tokenize", "detokenize"]
    body: bytes
    """JSON."""
    client: str = ""

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return len(self.body)


class ListItems(msgspec.Struct, frozen=True, tag="list_items"):
    """List some items or messages of a conversation, which may be long; answered by the JSON of the reply."""

    lists: tuple[bytes, ...]
    """JSON lists of items, in the order of the conversation."""
    limit: int
    is_descending: bool
    after: str = ""
    """The id of the item before the first one; empty for all."""
    client: str = ""

    @property
    def size(self) -> int:
        """Bytes of all items."""
        return sum(map(len, self.lists))


class DropSession(msgspec.Struct, frozen=True, tag="drop_session"):
    """Drop what is remembered of a session; a job of the prompt worker, answered by `DropPaths` for the engine."""

    session_id: str
    cache_salt: str = ""


class ClearTexts(msgspec.Struct, frozen=True, tag="clear_texts"):
    """Drop all records of the token memory."""


Job: TypeAlias = (
    Prepare | Remember | NextTurn | Release | Locate | DropSession | ClearTexts | AnswerBody | ListItems
)
JobResult: TypeAlias = (
    Prepared | Needs | BadBody | PredictedPrompt | DropPaths | Located | bytes | tuple[TextRecord, ...] | None
)
