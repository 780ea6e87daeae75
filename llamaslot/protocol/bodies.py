"""Request bodies: their fields with types and bounds, decoding, and errors that name the field at fault.

As in llama-server, null counts as absent, unknown fields are ignored, and 2.0 is an integer. Fields of the wrong
type or out of range are refused by name. The meaning of values is decided elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from llamaslot.base.adapters import MAX_ADAPTERS, MAX_SCALE
from llamaslot.base.errors import InvalidRequestError, LlamaslotError
from llamaslot.base.generation.tools import ReasoningFormat

INT32_MAX = 2**31 - 1
MAX_SESSION_ID_CHARS = 256
"""Most characters of a session id."""
MAX_FIELDS = 256
"""Most `response_fields`: each is looked up for each completion, on the event loop."""

MAX_BREAKERS = 16
"""Most sequence breakers for DRY: each costs a search of the vocabulary, on the model thread."""
MAX_BREAKER_CHARS = 256
"""Most characters of a sequence breaker. llama.cpp uses the first 40 bytes."""
MAX_PROBS = 128
"""Most alternatives with probabilities for each token."""
MAX_TOP_LOGPROBS = 20
"""OpenAI's limit of alternatives in a chat, and llama-server's default there."""
MAX_SAMPLERS = 32
"""Most samplers that a request may name."""

Token: TypeAlias = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Count: TypeAlias = Annotated[int, Meta(ge=-1, le=INT32_MAX)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Bias: TypeAlias = Annotated[float, Meta(ge=-1e6, le=1e6)] | bool
Factor: TypeAlias = Annotated[float, Meta(ge=0, le=100)]
Parts: TypeAlias = list[str | Token]
Breaker: TypeAlias = Annotated[str, Meta(max_length=MAX_BREAKER_CHARS)]
Samplers: TypeAlias = (
    Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=MAX_SAMPLERS)]
    | Annotated[str, Meta(max_length=MAX_SAMPLERS)]
)
"""Names, or a string of llama-server's abbreviations, one letter each."""
Salt: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
SessionId: TypeAlias = Annotated[str, Meta(max_length=MAX_SESSION_ID_CHARS)]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
"""OpenAI's `metadata` of stored chats and responses."""
Choices: TypeAlias = Annotated[list[str], Meta(min_length=1)]
B = TypeVar("B")
FieldNames: TypeAlias = Sequence[tuple[str, str]]
"""Regular expressions for chat fields, and the names of these fields in another API."""
_BOM = b"\xef\xbb\xbf"
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_MISSING = re.compile(r"Object missing required field `(\w+)`")


class JsonSchemaFormat(msgspec.Struct):
    """OpenAI's `response_format.json_schema`. Replies follow the schema whether or not it is `strict`."""

    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """OpenAI's `response_format`, and llama-server's `schema` with `json_object`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None
    schema: Any = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of the first five."""

    json: Any = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None


class PromptObject(msgspec.Struct):
    """llama-server's object form of a prompt."""

    prompt_string: str | Parts
    multimodal_data: Any = None


class AdapterScale(msgspec.Struct):
    """A LoRA adapter, by its place among those of the flags, and how strongly it is applied."""

    id: Annotated[int, Meta(ge=0, le=INT32_MAX)]
    scale: Annotated[float, Meta(ge=-MAX_SCALE, le=MAX_SCALE)] = 0.0


AdapterScales: TypeAlias = Annotated[list[AdapterScale], Meta(max_length=MAX_ADAPTERS)]


class SamplingOptions(msgspec.Struct, kw_only=True):
    """Fields for sampling, for the end of text and context, for the cache, for adapters, and for drafts."""

    stop: str | list[str] | None = None
    n_indent: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    t_max_predict_ms: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None

    temperature: Factor | None = None
    dynatemp_range: Factor | None = None
    dynatemp_exponent: Factor | None = None
    top_k: Count | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    top_n_sigma: Annotated[float, Meta(ge=-100, le=100)] | None = None
    xtc_probability: Fraction | None = None
    xtc_threshold: Fraction | None = None
    typical_p: Fraction | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repeat_last_n: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    dry_multiplier: Factor | None = None
    dry_base: Factor | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    dry_penalty_last_n: Count | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Meta(min_length=1, max_length=MAX_BREAKERS)] | None = None
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = None
    mirostat_tau: Factor | None = None
    mirostat_eta: Factor | None = None
    adaptive_target: Annotated[float, Meta(ge=-1, le=1)] | None = None
    adaptive_decay: Annotated[float, Meta(ge=0, le=0.99)] | None = None
    min_keep: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    samplers: Samplers | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: list[tuple[Token | str, Bias]] | dict[str, Bias] | None = None
    ignore_eos: bool | None = None
    n_keep: Count | None = None
    n_discard: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None

    cache_prompt: bool | None = None
    cache_salt: Salt | None = None
    cache_public: bool | None = None
    session_id: SessionId | None = None
    prompt_cache_key: SessionId | None = None
    id_slot: Count | None = None
    lora: AdapterScales | None = None
    speculate: bool | None = None


class Options(SamplingOptions, kw_only=True):
    """Fields of all endpoints that generate, but for those of Ollama's API."""

    functions: Any = None
    """Like the next three not supported: refused unless the value leaves the feature off (`refuse_missing`)."""
    function_call: Any = None
    modalities: list[str] | None = None
    moderation: Any = None

    response_format: ResponseFormat | None = None
    """Like the next seven a constraint of the reply; at most one may be present."""
    json_schema: Any = None
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    n_cmpl: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    n_predict: Count | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    return_progress: bool | None = None
    logprobs: bool | Annotated[int, Meta(ge=0, le=MAX_PROBS)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_PROBS)] | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    verbose: bool | None = None
    sse_ping_interval: Count | None = None
    best_of: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    echo: bool | None = None
    suffix: str | None = None


def options_of(body: Options) -> dict[str, Any]:
    """Return the values of the fields of `Options`, by name."""
    return {name: getattr(body, name) for name in Options.__struct_fields__}


class ChatBody(Options, kw_only=True):
    """`POST /v1/chat/completions`, and `POST /apply-template`, which only renders the prompt."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning_format: ReasoningFormat | None = None
    reasoning_budget_tokens: Count | None = None
    thinking_budget_tokens: Count | None = None
    store: bool | None = None
    metadata: Any = None
    """Metadata of a stored completion."""


class CompletionBody(Options, kw_only=True):
    """`POST /v1/completions`, and `POST /completion`, which replies in llama-server's own form."""

    prompt: str | list[str | Token | Parts | PromptObject] | PromptObject
    response_fields: Annotated[list[str], Meta(max_length=MAX_FIELDS)] | None = None


class ContentPart(msgspec.Struct):
    """A part of an input in OpenAI's form of messages; only those of type `text` are supported."""

    type: str
    text: str | None = None


class InputObject(msgspec.Struct):
    """An input as an object: llama-server's form of a prompt, or the content of a message."""

    prompt_string: str | Parts | None = None
    multimodal_data: Any = None
    content: list[ContentPart] | None = None


Inputs: TypeAlias = str | list[str | Token | Parts | InputObject] | InputObject


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """`POST /v1/embeddings`, and `POST /embedding`, which replies in llama-server's own form."""

    input: Inputs | None = None
    content: Inputs | None = None
    """llama-server's name of it; the reply then has llama-server's form."""
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    embd_normalize: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    cache_prompt: bool | None = None
    cache_salt: Salt | None = None


class RerankBody(msgspec.Struct, kw_only=True):
    """`POST /rerank`, in Jina's form (`documents`) or in that of Hugging Face's TEI (`texts`)."""

    query: str | None = None
    documents: list[str] | None = None
    texts: list[str] | None = None
    model: str | None = None
    top_n: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    return_text: bool | None = None
    cache_prompt: bool | None = None
    cache_salt: Salt | None = None


class AnyBody(msgspec.Struct, kw_only=True):
    """`POST /cache/warm`: the body of a chat, a message, a response or a text completion, and `pin`.

    Also the fields by which such bodies are told apart.
    """

    messages: Any = msgspec.UNSET
    system: Any = msgspec.UNSET
    input: Any = msgspec.UNSET
    tools: Any = None
    pin: bool | None = None


class FileExtract(msgspec.Struct):
    """A part of another file, in `POST /infill`."""

    text: str
    filename: str | None = None


class InfillBody(Options, kw_only=True):
    """`POST /infill`: generates the text between a prefix and a suffix, which begins with `prompt`."""

    input_prefix: str | Parts
    input_suffix: str | Parts
    input_extra: list[FileExtract] | None = None
    prompt: str | None = None
    response_fields: Annotated[list[str], Meta(max_length=MAX_FIELDS)] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`, in llama-server's form (`content`) or vLLM's (`prompt` or `messages`)."""

    prompt: str | None = None
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Messages of a chat. The body is then decoded as a chat, and may have its other fields, such as `tools`."""
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    content: str | Parts | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class SlotBody(msgspec.Struct, kw_only=True):
    """`POST /slots/{id}?action=save` and `restore`."""

    filename: str


class StoredChatBody(msgspec.Struct, kw_only=True):
    """`POST /v1/chat/completions/{id}`."""

    metadata: Metadata | None


class SessionBody(msgspec.Struct, kw_only=True):
    """`DELETE /sessions/{id}`."""

    cache_salt: Salt | None = None
    cache_public: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[Token] | None = None


def decode(raw: bytes, kind: type[B]) -> B:
    """Decode a body; raises an `InvalidRequestError` that names the field at fault."""
    try:
        # Clients on Windows may write a byte order mark before UTF-8.
        return _decoded(raw.removeprefix(_BOM), kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error
    except RecursionError as error:
        raise too_deep() from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error


def too_deep() -> InvalidRequestError:
    """Return the error for a body with too many nested lists and objects."""
    return InvalidRequestError("the body is nested too deeply")


def _decoded(raw: bytes, kind: type[B]) -> B:
    """Decode a body in which integers may be written as 2.0."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error) or not raw.lstrip().startswith(b"{"):
            raise
    fields = _with_integers(msgspec.json.decode(raw, type=dict[str, Any]))
    if isinstance(options := fields.get("options"), dict):
        # Ollama's fields for sampling.
        fields["options"] = _with_integers(options)
    return msgspec.convert(fields, kind)


def _with_integers(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in fields.items()
    }


def whole(field: str) -> str:
    """Return a regular expression that matches only the whole field, in a `param` or quoted in a message."""
    return rf"(?<![^']){field}(?![^'])"


def renamed(error: LlamaslotError, names: FieldNames) -> LlamaslotError:
    """Return an error about a chat with the field names of the API whose body was converted to that chat."""
    message, param = error.message, error.param
    for pattern, name in names:
        message = re.sub(pattern, name, message)
        param = re.sub(pattern, name, param) if param else param
    return msgspec.structs.replace(error.info(), message=message, param=param).exception()


def _named(message: str) -> InvalidRequestError:
    """Convert msgspec's message to an error about a field, with that field as `param`."""
    complaint, *where = re.split(r" - at (?:`key` in )?`\$", message, maxsplit=1)
    param = "".join(where).rstrip("`").removeprefix(".").partition("[...]")[0]
    if missing := _MISSING.match(complaint):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return InvalidRequestError(f"'{param}' is required", param=param)
    sentence = re.sub(r"`([^`]+)`", lambda types: _in_words(types[1]), complaint)
    sentence = sentence[:1].lower() + sentence[1:]
    return InvalidRequestError(f"'{param}': {sentence}" if param else f"the body: {sentence}", param=param or None)


def _in_words(types: str) -> str:
    """Convert `int | null` to "an integer or null"; other names are unchanged."""
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | "))
