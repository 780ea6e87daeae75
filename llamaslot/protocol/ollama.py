"""Ollama's API: fields of its request bodies, and their conversion to the bodies of chats and of texts.

`POST /api/chat` has a conversation. `POST /api/generate` has one question, a text that the chat template is not
applied to (`raw`), or one with a gap to fill (`suffix`). `POST /api/embed` has texts to embed, and
`POST /api/embeddings` one. A body with nothing of this only asks for the model to be loaded, as any body does.
Fields for sampling and for the cache are in `options`, whose unknown ones are ignored, as by Ollama: most of them
set up a model before it is loaded.

Ollama's clients do not keep the ids of calls, so calls have none here. A reply is recognised without when it comes
back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from llamaslot.base.errors import NotSupportedError
from llamaslot.protocol.bodies import (
    INT32_MAX,
    MAX_TOP_LOGPROBS,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    FieldNames,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingOptions,
    Token,
    whole,
)
from llamaslot.protocol.images import image_part
from llamaslot.text.conversation import Message, checked_list, checked_object, object_of, refuse_field, text_of

MAX_NAME_CHARS = 256
"""Most characters of a model's name: each part of a stream repeats it."""
_SAMPLING = SamplingOptions.__struct_fields__
FIELD_NAMES: FieldNames = (
    (whole(f"({'|'.join(_SAMPLING)})"), r"options.\1"),
    (whole(r"response_format[\w.]*"), "format"),
)
"""Fields that errors may name, with their names in these bodies."""
GENERATE_FIELD_NAMES: FieldNames = (*FIELD_NAMES, (whole(r"messages[\w.\[\]]*"), "prompt"))
Think: TypeAlias = bool | Literal["low", "medium", "high", "max"]


class OllamaOptions(SamplingOptions, kw_only=True):
    """Ollama's `options`: its own and this server's fields for sampling, and those for the cache."""

    num_predict: Annotated[int, Meta(ge=-2, le=INT32_MAX)] | None = None
    """Most tokens to generate; no limit if it is negative."""
    num_keep: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    """Ollama's name of `n_keep`."""
    num_ctx: int | None = None
    """Without effect: the server's flags set the size of the context."""


class OllamaBody(msgspec.Struct, kw_only=True):
    """Fields of both endpoints."""

    model: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    """Repeated in the reply; the server has one model, whatever its name."""
    stream: bool | None = None
    """Unlike in other APIs, true if it is absent."""
    format: Any = None
    """`json`, or a JSON schema."""
    options: OllamaOptions | None = None
    think: Think | None = None
    keep_alive: float | str | None = None
    """Without effect: the server's flags decide when the model is unloaded."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """`POST /api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """`POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    context: list[Token] | None = None
    """The tokens of an earlier turn and its reply, as that returned them."""
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[Any] | None = None


class OllamaEmbedBody(msgspec.Struct, kw_only=True):
    """`POST /api/embed`."""

    model: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    input: str | list[str] | None = None
    truncate: bool | None = None
    """Unlike in other APIs, an input that is too long is cut unless this is false."""
    dimensions: int | None = None
    """Without effect unless it is less than the vector has."""
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
    """As in `OllamaBody`."""


class OllamaEmbeddingsBody(msgspec.Struct, kw_only=True):
    """`POST /api/embeddings`, the older form."""

    model: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    prompt: str | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
    """As in `OllamaBody`."""


def embedding_of(body: OllamaEmbedBody | OllamaEmbeddingsBody, n_vector: int) -> EmbeddingBody | None:
    """Convert a body to that of an embedding; None if it only asks for the model to be loaded.

    Vectors have length 1, but in the older form they are as the model gives them, as by Ollama.
    """
    inputs: str | list[Any] | None = body.input if isinstance(body, OllamaEmbedBody) else body.prompt
    if not inputs:
        return None
    options, dimensions, normalize = body.options or OllamaOptions(), None, -1
    if isinstance(body, OllamaEmbedBody):
        normalize = 2
        dimensions = body.dimensions if 0 < (body.dimensions or 0) < n_vector else None
    return EmbeddingBody(
        input=inputs,
        model=body.model,
        dimensions=dimensions,
        embd_normalize=normalize,
        cache_prompt=options.cache_prompt,
        cache_salt=options.cache_salt,
    )


def converted(body: OllamaChatBody | OllamaGenerateBody) -> ChatBody | CompletionBody | None:
    """Convert a body to that of a chat or of a text; None if it only asks for the model to be loaded.

    Raises `InvalidRequestError` and `NotSupportedError`.
    """
    if isinstance(body, OllamaChatBody):
        conversation = [_message(each, f"messages[{i}]") for i, each in enumerate(body.messages or ())]
        tools = [{"type": "function", **tool} for tool in body.tools or ()]
        return _chat(body, conversation, tools) if conversation else None
    if body.template:
        why = ": templates of requests are not supported, the server's own is used (--chat-template)"
        refuse_field("template", why, NotSupportedError)
    if not (body.prompt or body.suffix or body.images):
        return None
    if body.raw or body.suffix:
        for name in ("system", "context", "images"):
            if getattr(body, name):
                refuse_field(name, f"cannot be combined with '{'raw' if body.raw else 'suffix'}'")
        # A number asks for probabilities in a text, and 0 for those of its own tokens alone.
        logprobs = body.top_logprobs or 0 if body.logprobs else None
        return CompletionBody(**_shared(body), prompt=body.prompt or "", suffix=body.suffix, logprobs=logprobs)
    conversation = [{"role": "system", "content": body.system}] if body.system else []
    return _chat(
        body, [*conversation, {"role": "user", "content": _content(body.prompt or "", body.images, "images")}]
    )


def _chat(body: OllamaBody, conversation: list[Message], tools: list[Message] | None = None) -> ChatBody:
    effort = body.think if isinstance(body.think, str) else None
    return ChatBody(
        **_shared(body),
        messages=conversation,
        tools=tools or None,
        chat_template_kwargs=None if body.think is None else {"enable_thinking": body.think is not False},
        # Templates do not know `max`.
        reasoning_effort="high" if effort == "max" else effort,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs or 0 if body.logprobs else None,
    )


def _shared(body: OllamaBody) -> dict[str, Any]:
    """Return the fields that chats and texts have in common."""
    options = body.options or OllamaOptions()
    n_predict = options.num_predict
    return {
        **{name: getattr(options, name) for name in _SAMPLING},
        "n_keep": options.num_keep if options.n_keep is None else options.n_keep,
        "n_predict": n_predict if n_predict is None else max(n_predict, -1),
        "stream": body.stream is not False,
        "response_format": _format(body.format),
    }


def _format(value: Any) -> ResponseFormat | None:
    if value is None or value == "":
        return None
    if value == "json":
        return ResponseFormat("json_object")
    if not isinstance(value, dict):
        refuse_field("format", "must be 'json' or a JSON schema, an object")
    return ResponseFormat("json_schema", JsonSchemaFormat(schema=value))


def _message(message: Mapping[str, Any], where: str) -> Message:
    """Return a message as chats have it."""
    found: Message = {"role": text_of(message, "role", where).lower(), "content": ""}
    for name, key in (("content", "content"), ("thinking", "reasoning_content"), ("tool_name", "name")):
        if message.get(name) is not None:
            found[key] = text_of(message, name, where)
    found["content"] = _content(found["content"], message.get("images"), f"{where}.images")
    calls = checked_list(message.get("tool_calls") or (), f"{where}.tool_calls")
    if calls:
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return found


def _call(call: Any, where: str) -> Message:
    function = object_of(checked_object(call, where), "function", where)
    arguments = object_of({"arguments": {}, **function}, "arguments", f"{where}.function")
    return {
        "type": "function",
        "function": {
            "name": text_of(function, "name", f"{where}.function"),
            "arguments": json.dumps(arguments, ensure_ascii=False),
        },
    }


def _content(text: str, images: Any, where: str) -> str | list[Message]:
    """Return a content with its images before the text, as Ollama has them."""
    parts = [image_part(each, f"{where}[{i}]") for i, each in enumerate(checked_list(images or (), where))]
    return [*parts, {"type": "text", "text": text}] if parts else text
