"""Commands to the engine: completions to generate, and queries with their replies.

All are plain values that msgspec can encode, since the engine is a process of its own. `Generate` is answered by
the events of `llamaslot.base.events`, a `Query` by one `Reply` with the struct that the docstring of its body
names.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from llamaslot.base.adapters import Adapters, adapters_key
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.tools import ReasoningBudget
from llamaslot.base.images import ImageLayout, ImageSize
from llamaslot.base.namespaces import salt_namespace
from llamaslot.base.text_records import TextRecord
from llamaslot.base.tokens import TokenizedPrompt

N_SEEDS = 2**32 - 1
"""Seeds are 32 bits wide; the highest one means "random" to llama.cpp and is never passed on."""

SlotVerb: TypeAlias = Literal["save", "restore", "erase"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Prompt text. With `special` false, control tokens written out in it stay plain text."""

    text: str
    special: bool = True


class TokensPart(msgspec.Struct, frozen=True, tag="tokens"):
    """Prompt given as token ids."""

    tokens: tuple[int, ...]


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """An image in a prompt."""

    data: bytes
    """Its file, as the client sent it."""
    digest: bytes
    """Digest of its pixels and of the projector."""
    layout: ImageLayout


PromptPart: TypeAlias = TextPart | TokensPart | ImagePart


class Constraint(msgspec.Struct, frozen=True):
    """A grammar that the text of a reply must match, in one normal form whatever the client sent.

    `text/grammars/` makes and checks it in the prompt worker, `backend/constraints.py` follows it in the engine.
    """

    grammar: str
    """llguidance's JSON form of a grammar."""
    param: str
    """The request field that it comes from, for errors."""
    seconds: float = 0.0
    """CPU time to compile it, measured when it was checked."""
    n_bytes: int = 0
    """Memory of the compiled grammar, measured then; 0 if unknown."""


class VectorParams(msgspec.Struct, frozen=True):
    """Form of the vector of a prompt; scores are returned as they are."""

    normalize: int = -1
    """-1: not at all, 0: to a greatest absolute value of 32,760, p: by the p-norm."""
    dimensions: int = 0
    """Leading numbers to keep, before they are normalized; 0 for all."""


class ContextShift(msgspec.Struct, frozen=True):
    """Form of a context shift, by which a reply continues when its context is full: a part of that is discarded."""

    is_on: bool = False
    """False if a full context ends the reply."""
    n_keep: int = 0
    """First tokens to keep, besides a BOS; -1 for the whole prompt."""
    n_discard: int = 0
    """Tokens after these to discard; 0 for half of all that follow."""


class GenerateParams(msgspec.Struct, frozen=True):
    """Generation parameters of the `n` completions of a prompt."""

    completion_id: str
    """If `n` is not 1, the ids of the completions begin with it (`completions`)."""
    sampling: Sampling = Sampling()
    max_tokens: int = -1
    """Tokens to generate: 0 none (the prompt is evaluated), -1 up to the end of the slot's context, or without end
    if that is shifted.
    """
    shift: ContextShift = ContextShift()
    stop: tuple[str, ...] = ()
    n_indent: int = 0
    """Minimum indentation (spaces and tabs) of all lines but the first; a line with less ends the text."""
    t_max_predict_ms: int = -1
    """Time after the first token from which the end of a line ends the text; off if not positive."""
    return_progress: bool = False
    """Send an `Output` with `prefill` before the first and after each step that computes the prompt."""
    reports_progress: bool = False
    """Each `Output` has a `Progress`, not only the first one."""
    max_draft: int = 0
    """Most tokens to draft at once; 0: none."""
    constraint: Constraint | None = None
    """The grammar that the reply must match."""
    reasoning_budget: ReasoningBudget | None = None
    """The limit of reasoning, if there is one."""
    preserved_tokens: tuple[int, ...] = ()
    """Control tokens that are kept in the reply's text, for the parser of its format (llama.cpp's name)."""
    cache_prompt: bool = True
    cache_salt: str = ""
    """Only requests with the same salt share KV."""
    adapters: Adapters = ()
    """LoRA adapters that it applies. Requests share KV and steps as far as the same ones are active."""
    group: str = ""
    """Id shared by the `n` completions of one prompt; empty if `n` is 1."""
    id_slot: int = -1
    """The slot to run in, or -1 for the best one."""
    client: str = ""
    """A digest that identifies the client: of the API key, else of the session, else of the address.

    Clients take turns in queues (`base/callers.py`).
    """
    n: int = 1
    prompt_probs: int = -1
    """Score the prompt's tokens, each with this many of the most likely tokens; -1 for no scores.

    Such a prompt is computed in full, without the cache.
    """
    is_background: bool = False
    """Compute the prompt for a later request, only while nothing else runs or waits. Nobody waits for its end."""
    pin: bool | None = None
    """Pin the prompt in the cache once it is computed, or unpin it; None leaves it as it is."""
    vector: VectorParams | None = None
    """Return the vector of the prompt, or its scores; `max_tokens` is 0 then."""

    @property
    def namespace(self) -> str:
        """The namespace in which its texts may be reused; its KV, unless `CacheIds.key` is a part of the name."""
        return self.namespace_with("")

    def namespace_with(self, key: str) -> str:
        """Return the namespace of its KV, by the `CacheIds.key` of its prompt."""
        return salt_namespace(self.cache_salt, adapters_key(self.adapters) + key)

    @property
    def ends_by_text(self) -> bool:
        """True if the generated text may end the generation."""
        return bool(self.stop) or self.n_indent > 0 or self.t_max_predict_ms > 0

    def completions(self) -> list[GenerateParams]:
        """Return the parameters of each completion, with its own id and the seed that follows the one before."""
        if self.n == 1:
            return [self]
        return [
            msgspec.structs.replace(
                self,
                completion_id=f"{self.completion_id}-{i}",
                sampling=msgspec.structs.replace(self.sampling, seed=(self.sampling.seed + i) % N_SEEDS),
                group=self.completion_id,
                n=1,
            )
            for i in range(self.n)
        ]


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """One completion of a tokenized prompt; in `Prepared` all `n` of them."""

    params: GenerateParams
    prompt: TokenizedPrompt
    waited_s: float = 0.0
    """Seconds since the request was prepared, when the engine gets it."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop one completion, queued or running; others are ignored."""

    completion_id: str


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


class ProbePrompt(msgspec.Struct, frozen=True, tag="probe_prompt"):
    """Ask what is cached of a tokenized prompt, which is not run; answered by `CacheProbe`."""

    generate: Generate


class InspectHitCurve(msgspec.Struct, frozen=True, tag="inspect_hit_curve"):
    """Ask for the hit rates with other sizes of the cache; answered by `HitCurve` of `base/advice.py`."""


class LayOutImages(msgspec.Struct, frozen=True, tag="lay_out_images"):
    """Ask for the tokens of images of these sizes; answered by `ImageLayouts`."""

    sizes: tuple[ImageSize, ...]


class ImageLayouts(msgspec.Struct, frozen=True):
    """Layouts in the order of their sizes."""

    layouts: tuple[ImageLayout, ...]


class DropPaths(msgspec.Struct, frozen=True, tag="drop_paths"):
    """Drop a session's record from the disk, and KV that nothing else uses; answered by `CacheCleared`, or by
    `NotFoundError` if there are no paths.
    """

    paths: tuple[tuple[str, bytes], ...]
    """Namespace and packed tokens of each of the session's sequences."""
    session: bytes
    """The digest of its record."""


class WriteTexts(msgspec.Struct, frozen=True, tag="write_texts"):
    """Write records to disk, if there is one; not answered."""

    records: tuple[TextRecord, ...]


class Unload(msgspec.Struct, frozen=True, tag="unload"):
    """Free the model and its pool, whose KV goes to RAM, unless it is needed; answered by `ModelLoaded`."""

    is_urgent: bool = False
    """Also while costs are about to be measured: another model needs the room."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load the model again; answered by `ModelLoaded`. `Generate` and `SlotAction` come only after that."""


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


LocalTier: TypeAlias = Literal["pool", "ram", "disk"]


class ClearCache(msgspec.Struct, frozen=True, tag="clear_cache"):
    """Drop every prefix that no running request uses; answered by `CacheCleared`."""

    tier: LocalTier | None = None
    """Drop only what this tier has; other tiers keep their copies."""


class CacheCleared(msgspec.Struct, frozen=True):
    """Tokens that were dropped; the reply to `POST /cache/clear` as JSON."""

    cleared_tokens: int
    """Tokens dropped from the pool."""
    cleared_ram_tokens: int = 0
    cleared_disk_tokens: int = 0


ReadOnlyQuery: TypeAlias = InspectEngine | InspectCache | ProbePrompt | InspectHitCurve | LayOutImages
EngineQuery: TypeAlias = ReadOnlyQuery | DropPaths | SlotAction | ClearCache


class Query(msgspec.Struct, frozen=True, tag="query"):
    """Ask the engine; answered by one `Reply` with the same id."""

    query_id: str
    body: EngineQuery


EngineCommand: TypeAlias = Generate | Cancel | Query | WriteTexts | Unload | Load
