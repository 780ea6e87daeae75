"""Conversion of a Responses request's body to a chat body, and to the fields that its reply repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from llamaslot.base.errors import InvalidRequestError, NotSupportedError
from llamaslot.base.generation.responses import EarlierItems, References, ResponseFields
from llamaslot.protocol.bodies import ChatBody, options_of
from llamaslot.protocol.decoding import FieldNames, whole
from llamaslot.protocol.responses.bodies import LOGPROBS, REASONING, ResponsesBody, TextFormat, TextOptions, refuse
from llamaslot.protocol.responses.items import Item, Turns, with_ids
from llamaslot.protocol.responses.tools import Toolbox, chat_choice
from llamaslot.protocol.structured_options import ResponseFormat

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


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request converted to a chat."""

    chat: ChatBody
    fields: ResponseFields
    field_names: FieldNames
    """Chat fields that errors may name, with this API's names."""


def references(body: ResponsesBody) -> References | None:
    """Return a body's references to earlier responses; None if it has none."""
    items = body.input if isinstance(body.input, list) else []
    named = tuple(str(item.get("id")) for item in items if _is_reference(item))
    return References(body.previous_response_id or "", named) if body.previous_response_id or named else None


def read_request(body: ResponsesBody, earlier: EarlierItems, request_id: str) -> ResponsesRequest:
    """Read a body with the items to which it refers; raises `InvalidRequestError`.

    Ids of new items are derived from `request_id`.
    """
    refuse(body)
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
    return _request(body, turns, toolbox, fields)


def read_compaction(body: ResponsesBody, earlier: EarlierItems, request_id: str) -> ResponsesRequest:
    """Read a body that asks for a summary of its conversation; raises `InvalidRequestError`."""
    refuse(body)
    if body.stream:
        raise NotSupportedError("'stream': a compaction is returned as a whole", param="stream")
    _, turns = _items_and_turns(body, earlier)
    fields = ResponseFields(store=False, user_texts=tuple(turns.user_texts))
    turns.add(_user(SUMMARIZE), "input")
    request = _request(body, turns, Toolbox(body.tools or ()), fields)
    request.chat.tool_choice = "none"
    return request


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


def _request(body: ResponsesBody, turns: Turns, toolbox: Toolbox, fields: ResponseFields) -> ResponsesRequest:
    tool_names = [(rf"tools\[{i}\]\.function", place) for i, place in enumerate(toolbox.places)]
    return ResponsesRequest(_chat(body, turns.messages(), toolbox), fields, (*tool_names, *_FIELD_NAMES))


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


def _chat(body: ResponsesBody, messages: list[dict[str, Any]], toolbox: Toolbox) -> ChatBody:
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
        messages=messages,
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
