"""Types of the replies, for `/openapi.json`.

Where an endpoint encodes a struct, that struct is used. The types here stand for replies that are put together as
mappings; a test decodes real replies with them, and unknown fields are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from llamaslot.api.completions.native_completion import generation_settings
from llamaslot.api.completions.openai_completions import ChatChoice, ChatChunkChoice, Envelope, TextChoice
from llamaslot.api.generation.logprobs import Prob
from llamaslot.api.generation.reply_stats import CacheUse, PromptProgress, Timings
from llamaslot.base.events import FinishReason
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.model import Capabilities, SelfTestOutcome


class ChatReply(Envelope, kw_only=True):
    """A chat completion."""

    choices: Sequence[ChatChoice]


class StoredChatReply(ChatReply, kw_only=True):
    """A stored chat completion."""

    metadata: dict[str, str]


class ChatChunk(Envelope, kw_only=True):
    """An event of a streamed chat completion."""

    choices: Sequence[ChatChunkChoice]


class TextReply(Envelope, kw_only=True):
    """A text completion in OpenAI's format, or an event of a streamed one."""

    choices: Sequence[TextChoice]


_SETTINGS = [(name, type(value)) for name, value in generation_settings(Sampling(), -1).items()]
GenerationSettings = msgspec.defstruct("GenerationSettings", _SETTINGS, kw_only=True, forbid_unknown_fields=True)
"""Settings of a request that reveal nothing of its text."""
DefaultParams = msgspec.defstruct(
    "DefaultParams", [("stream", bool)], bases=(GenerationSettings,), kw_only=True, forbid_unknown_fields=True
)


class TokenBias(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of `logit_bias`; a bias of minus infinity is null."""

    token: int
    bias: float | None


RequestSettings = msgspec.defstruct(
    "RequestSettings",
    [
        ("stop", list[str]),
        ("logit_bias", list[TokenBias]),
        ("grammar", str),
        ("dry_sequence_breakers", list[str]),
        ("stream", bool),
        ("timings_per_token", bool),
    ],
    bases=(GenerationSettings,),
    kw_only=True,
    forbid_unknown_fields=True,
)
"""The settings of a request as its own client sees them."""


class NativeReply(msgspec.Struct, forbid_unknown_fields=True):
    """A text completion in llama-server's format, or the last event of a streamed one."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: RequestSettings  # type: ignore[valid-type]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: FinishReason
    stopping_word: str
    tokens_cached: int
    timings: Timings
    cache: CacheUse
    completion_probabilities: list[Prob] | UnsetType = UNSET


class NativeChunk(msgspec.Struct, forbid_unknown_fields=True):
    """An event of a streamed text completion in llama-server's format."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[False]
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    completion_probabilities: list[Prob] | UnsetType = UNSET


class Health(msgspec.Struct, forbid_unknown_fields=True):
    """The reply of a server that is ready."""

    status: Literal["ok"]


class ModelMeta(msgspec.Struct, forbid_unknown_fields=True):
    """llama-server's facts about a model."""

    vocab_type: int
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int


class Model(msgspec.Struct, forbid_unknown_fields=True):
    """The model in OpenAI's format."""

    id: str
    aliases: list[str]
    tags: list[str]
    object: Literal["model"]
    created: int
    owned_by: str
    meta: ModelMeta


class OllamaModel(msgspec.Struct, forbid_unknown_fields=True):
    """The model in Ollama's format."""

    name: str
    model: str
    type: str
    description: str
    capabilities: list[str]
    details: dict[str, str]


class Models(msgspec.Struct, forbid_unknown_fields=True):
    """The list of models, which has one."""

    object: Literal["list"]
    data: list[Model]
    models: list[OllamaModel]


class DefaultSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a request that names none."""

    n_ctx: int
    params: DefaultParams  # type: ignore[valid-type]


class CheckpointProps(msgspec.Struct, forbid_unknown_fields=True):
    """Checkpoints, by which prefixes of a model with a partial state are reused."""

    checkpoint_bytes: int
    """Bytes of the largest one."""
    total_bytes: int
    """Bytes of RAM for all of them."""
    max_per_path: int
    """Checkpoints of one conversation at most."""
    interval_tokens: int
    """Tokens between two of a long prompt."""


class PrefixReuse(msgspec.Struct, forbid_unknown_fields=True):
    """Reuse of prefixes by this model."""

    enabled: bool
    reason: str
    """Why every prompt is computed whole; empty if `enabled`."""
    self_test: SelfTestOutcome
    """Outcome of the self-test of reuse; empty for models that need none."""
    state: Capabilities
    checkpoints: CheckpointProps | None
    """None where none are taken."""


class Props(msgspec.Struct, forbid_unknown_fields=True):
    """The server's properties."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    endpoint_slots: bool
    endpoint_props: bool
    endpoint_metrics: bool
    chat_template: str
    chat_format: str
    """Name of the form in which the model writes reasoning and tool calls."""
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool
    prefix_reuse: PrefixReuse


class NextToken(msgspec.Struct, forbid_unknown_fields=True):
    """Progress of a slot's request."""

    has_next_token: bool
    n_remain: int
    n_decoded: int


class Slot(msgspec.Struct, forbid_unknown_fields=True):
    """State of a slot; the last fields are those of its request."""

    id: int
    n_ctx: int
    n_held: int
    speculative: bool
    is_processing: bool
    next_token: list[NextToken]
    request_id: str | UnsetType = UNSET
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_processed: int | UnsetType = UNSET
    params: GenerationSettings | UnsetType = UNSET  # type: ignore[valid-type]


class SlotActionReply(msgspec.Struct, forbid_unknown_fields=True):
    """Result of a slot action, with the fields of its kind."""

    id_slot: int
    filename: str | UnsetType = UNSET
    n_saved: int | UnsetType = UNSET
    n_written: int | UnsetType = UNSET
    n_restored: int | UnsetType = UNSET
    n_read: int | UnsetType = UNSET
    n_erased: int | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET


class SessionDropped(msgspec.Struct, forbid_unknown_fields=True):
    """Result of dropping a session."""

    id: str
    deleted: Literal[True]
    dropped_tokens: int
    dropped_ram_tokens: int
    dropped_disk_tokens: int


class TokenPiece(msgspec.Struct, forbid_unknown_fields=True):
    """A token with its text, or with its bytes if they are not valid UTF-8."""

    id: int
    piece: str | list[int]


class TokenizeReply(msgspec.Struct, forbid_unknown_fields=True):
    """The tokens of a text."""

    tokens: list[int | TokenPiece]
    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    """In vLLM's form."""
    token_strs: list[str] | UnsetType = UNSET
    """The text of each token, if `return_token_strs` asks for it."""


class DetokenizeReply(msgspec.Struct, forbid_unknown_fields=True):
    """The text of tokens, by llama-server's name and by vLLM's."""

    content: str
    prompt: str


class TemplateReply(msgspec.Struct, forbid_unknown_fields=True):
    """The prompt of a conversation."""

    prompt: str


PickedFields: TypeAlias = dict[str, Any]
"""A reply of `/completion` that has the fields of `response_fields` only."""
