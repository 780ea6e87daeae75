"""OpenAI's Responses API: fields of its request bodies, and their conversion to a `ChatBody`.

The reply repeats some of the fields; these and others that it depends on are its `ResponseFields`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from llamaslot.base.errors import InvalidRequestError, NotSupportedError
from llamaslot.base.generation.request_context import EarlierItems, References, ResponseFields
from llamaslot.base.generation.tools import ReasoningFormat
from llamaslot.protocol.bodies import (
    ChatBody,
    Count,
    FieldNames,
    Metadata,
    Options,
    ResponseFormat,
    options_of,
    whole,
)
from llamaslot.protocol.response_items import Item, Toolbox, Turns, chat_choice, with_ids

REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
_INCLUDES = frozenset(
    {
        REASONING,
        LOGPROBS,
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
"""Values of `include`. Except for the first two, they concern items that replies of this server never have."""
_HINTS = {
    "background": "the reply is returned by the request itself; stream it if it takes long",
    "conversation": "continue a response with 'previous_response_id', or send its items as 'input'",
    "prompt": "the server has no stored prompts; send 'instructions' and 'input'",
    "context_management": "the server does not compact conversations",
    "moderation": "the server does not moderate",
}
_SAME_AS_CHAT = (
    "parallel_tool_calls", "chat_template_kwargs", "reasoning_format", "reasoning_budget_tokens",
    "thinking_budget_tokens",
)  # fmt: skip
MAX_REPEATED_BYTES = 2**18
"""Most bytes of each field that the reply repeats. No schema that can be enforced is longer."""
_IN_PROMPT = ("instructions", "tools")
"""Fields that are part of the prompt, so that their length is limited already."""
_FIELD_NAMES: FieldNames = (
    (r"response_format\.json_schema\.schema", "text.format.schema"),
    (r"response_format\.schema", "text.format"),
    (whole("messages"), "input"),
    (r"\bmax_tokens\b", "max_output_tokens"),
)
"""Renamed fields of all requests."""
SUMMARIZE = (
    "Summarize our conversation so far, for a reader who continues it and has not seen it: what was asked, what "
    "was found and done, names and values that matter, and what is still to be done. Answer with the summary alone."
)
"""Prompt of a compaction, added after the conversation."""
Converted: TypeAlias = tuple[ChatBody, ResponseFields, FieldNames]
"""A request as a chat, the fields that its reply depends on, and the names here of fields that errors may name."""


class ReasoningOptions(msgspec.Struct):
    """OpenAI's `reasoning`. There are no summaries: the reasoning itself is returned."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed", "none"] | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    """OpenAI's `text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """OpenAI's `text`. The verbosity has no effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(Options, kw_only=True):
    """`POST /v1/responses` and `POST /v1/responses/input_tokens`.

    As in OpenAI's API `input` may be absent, and it may be empty if something else makes a prompt.
    """

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_format: ReasoningFormat | None = None
    reasoning_budget_tokens: Count | None = None
    thinking_budget_tokens: Count | None = None

    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None


def _refuse(body: ResponsesBody) -> None:
    """Raise an error for the first field that asks for an unsupported feature."""
    for name, hint in _HINTS.items():
        if getattr(body, name):
            raise NotSupportedError(f"'{name}' is not supported: {hint}", param=name)
    if body.truncation == "auto":
        message = "'truncation': 'auto' is not supported: shorten the input, or raise --ctx-size"
        raise NotSupportedError(message, param="truncation")
    for name in ("n", "n_cmpl"):
        if (getattr(body, name) or 1) > 1:
            raise InvalidRequestError(f"'{name}' must be 1: a response has only one choice", param=name)
    for index, value in enumerate(body.include or ()):
        if value not in _INCLUDES:
            where = f"include[{index}]"
            raise InvalidRequestError(f"'{where}' must be one of {', '.join(sorted(_INCLUDES))}", param=where)


def references(body: ResponsesBody) -> References | None:
    """Return a body's references to earlier responses; None if it has none."""
    items = body.input if isinstance(body.input, list) else []
    named = tuple(str(item.get("id")) for item in items if _is_reference(item))
    return References(body.previous_response_id or "", named) if body.previous_response_id or named else None


def read_response(body: ResponsesBody, earlier: EarlierItems, request_id: str) -> Converted:
    """Read a body with the items to which it refers; raises `InvalidRequestError`.

    Ids of new items are derived from `request_id`.
    """
    _refuse(body)
    items, turns = _items_and_turns(body, earlier)
    toolbox = Toolbox(body.tools or ())
    store = body.store is not False
    fields = ResponseFields(
        echo=msgspec.json.encode(_echo(body, toolbox)),
        input=msgspec.json.encode(with_ids(items, request_id)) if store else b"[]",
        store=store,
        previous=body.previous_response_id or "",
        returns_reasoning=REASONING in (body.include or ()),
        forms=toolbox.forms,
    )
    return _chat(body, turns, toolbox), fields, _field_names(toolbox)


def read_compaction(body: ResponsesBody, earlier: EarlierItems, request_id: str) -> Converted:
    """Read a body that asks for a summary of its conversation; raises `InvalidRequestError`."""
    _refuse(body)
    if body.stream:
        raise NotSupportedError("'stream': a compaction is returned as a whole", param="stream")
    _, turns = _items_and_turns(body, earlier)
    fields = ResponseFields(store=False, user_texts=tuple(turns.user_texts))
    turns.add(_user(SUMMARIZE), "input")
    toolbox = Toolbox(body.tools or ())
    chat = _chat(body, turns, toolbox)
    chat.tool_choice = "none"
    return chat, fields, _field_names(toolbox)


def _items_and_turns(body: ResponsesBody, earlier: EarlierItems) -> tuple[list[Item], Turns]:
    """Return the items of a request, and the messages of its whole conversation."""
    is_text = isinstance(body.input, str)
    given: Sequence[Item] = [_user(body.input)] if isinstance(body.input, str) else body.input or []
    items = [_referenced(item, index, earlier) for index, item in enumerate(given)]
    turns = Turns()
    if body.instructions:
        turns.add({"role": "system", "content": body.instructions}, "instructions")
    for raw in earlier.history:
        for each in msgspec.json.decode(raw, type=list[dict[str, Any]]):
            turns.add(each, "previous_response_id")
    for index, item in enumerate(items):
        turns.add(item, "input" if is_text else f"input[{index}]")
    if body.input == [] and not body.instructions and not earlier.history:
        message = "'input' is empty: add an item, or continue a response with 'previous_response_id'"
        raise InvalidRequestError(message, param="input")
    if not items and not earlier.history:
        # Templates need at least one message.
        turns.add(_user(""), "input")
    return items, turns


def _field_names(toolbox: Toolbox) -> FieldNames:
    tool_names = [(rf"tools\[{i}\]\.function", place) for i, place in enumerate(toolbox.places)]
    return (*tool_names, *_FIELD_NAMES)


def _user(text: str) -> Item:
    return {"role": "user", "content": text}


def _is_reference(item: Item) -> bool:
    """Return True for an item that has only an id, with or without the type `item_reference`."""
    return item.get("type") == "item_reference" or (
        "id" in item and all(item[key] is None for key in item if key != "id")
    )


def _referenced(item: Item, index: int, earlier: EarlierItems) -> Item:
    if not _is_reference(item):
        return item
    found: dict[str, Any] = msgspec.json.decode(earlier.items[str(item.get("id"))])
    return found


def _chat(body: ResponsesBody, turns: Turns, toolbox: Toolbox) -> ChatBody:
    same = options_of(body)
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        same |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    else:
        same["top_logprobs"] = None
    same["max_tokens"] = body.max_output_tokens if body.max_output_tokens is not None else body.max_tokens
    form = _response_format(body.text)
    if form is not None and body.response_format is not None:
        raise InvalidRequestError("'text.format' and 'response_format' exclude each other", param="text.format")
    same["response_format"] = form or body.response_format
    return ChatBody(
        **same,
        **{name: getattr(body, name) for name in _SAME_AS_CHAT},
        messages=turns.messages(),
        tools=toolbox.functions or None,
        tool_choice=chat_choice(body.tool_choice),
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
    )


def _response_format(text: TextOptions | None) -> Any:
    form = text.format if text is not None else None
    if form is None or form.type == "text":
        return None
    fields = {"name": form.name, "description": form.description, "schema": form.schema, "strict": form.strict}
    own: Mapping[str, Any] = {"json_schema": fields} if form.type == "json_schema" else {"schema": form.schema}
    return msgspec.convert({"type": form.type, **own}, ResponseFormat)


def _echo(body: ResponsesBody, toolbox: Toolbox) -> dict[str, Any]:
    """Return the fields that the reply repeats, with OpenAI's defaults."""
    reasoning, text = body.reasoning, body.text or TextOptions()
    form = text.format or TextFormat("text")
    echo = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning is not None else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "text": {"format": form, **({"verbosity": text.verbosity} if text.verbosity else {})},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": toolbox.shown,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
    }
    for name, value in echo.items():
        if name not in _IN_PROMPT and len(msgspec.json.encode(value)) > MAX_REPEATED_BYTES:
            raise InvalidRequestError(f"'{name}' is longer than {MAX_REPEATED_BYTES} bytes", param=name)
    return echo
