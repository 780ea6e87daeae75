"""OpenAI's Responses API: fields of its request bodies, and their conversion to a `ChatBody`.

The reply repeats some of the fields; these and others that it depends on are its `ResponseFields`.

The reasoning, the text and the calls of one turn are separate items here, but one message by the assistant in a
chat. Functions are the only tools that models know. Calls of other tools are converted back to items of their type.
Tools that OpenAI runs itself are refused, except for web search: agents always offer it, so it is just not shown to
the model.

Items of a stored response, and messages of a stored chat, are listed in pages.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal, NoReturn, TypeAlias

import msgspec
from msgspec import Meta

from llamaslot.base.errors import NotSupportedError
from llamaslot.base.generation.tools import ReasoningFormat
from llamaslot.base.prompt_jobs import CallForm, EarlierItems, ListItems, References, ResponseFields
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
from llamaslot.protocol.images import image_part
from llamaslot.text.conversation import (
    SYSTEM_ROLES,
    Message,
    checked_list,
    checked_object,
    joined,
    object_of,
    refuse_field,
    text_of,
)

Item = Mapping[str, Any]

_MARK = "llamaslot:"
"""Prefix of encoded reasoning, to tell it from that of other servers, which cannot be decoded."""
_PREFIXES = {"message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_MAX_PAGE_BYTES = 4 * 2**20
"""Most bytes of a page of items, unless it has only one. If it ends early, `has_more` is true."""
_LEFT_OUT = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
"""Types of tools that are not shown to the model."""
_HOSTED = {
    "file_search": "let the client search, in a function",
    "code_interpreter": "let the client run code, in a function",
    "image_generation": "this server generates text only",
    "mcp": "let the client call the MCP server, and offer its tools as functions",
    "computer": "offer a function",
    "computer_use_preview": "offer a function",
    "shell": "offer a function",
    "apply_patch": "offer a function, or a tool of type 'custom'",
    "tool_search": "offer all tools",
    "programmatic_tool_calling": "offer functions",
}
LOCAL_SHELL = "local_shell"
_LOCAL_SHELL_FUNCTION = {
    "name": LOCAL_SHELL,
    "description": "Runs a command, a program and its arguments, on the user's machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
}  # fmt: skip
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
            refuse_field(name, f"is not supported: {hint}", NotSupportedError)
    if body.truncation == "auto":
        hint = "shorten the input, or raise --ctx-size"
        refuse_field("truncation", f": 'auto' is not supported: {hint}", NotSupportedError)
    for name in ("n", "n_cmpl"):
        if (getattr(body, name) or 1) > 1:
            refuse_field(name, "must be 1: a response has only one choice")
    for index, value in enumerate(body.include or ()):
        if value not in _INCLUDES:
            refuse_field(f"include[{index}]", f"must be one of {', '.join(sorted(_INCLUDES))}")


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
    items, messages = _read_items(body, earlier)
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
    return _chat(body, messages, toolbox), fields, _field_names(toolbox)


def read_compaction(body: ResponsesBody, earlier: EarlierItems, request_id: str) -> Converted:
    """Read a body that asks for a summary of its conversation; raises `InvalidRequestError`."""
    _refuse(body)
    if body.stream:
        refuse_field("stream", ": a compaction is returned as a whole", NotSupportedError)
    _, messages = _read_items(body, earlier)
    fields = ResponseFields(store=False, user_texts=tuple(messages.user_texts))
    messages.add(_user(SUMMARIZE), "input")
    toolbox = Toolbox(body.tools or ())
    chat = _chat(body, messages, toolbox)
    chat.tool_choice = "none"
    return chat, fields, _field_names(toolbox)


def _read_items(body: ResponsesBody, earlier: EarlierItems) -> tuple[list[Item], ItemReader]:
    """Return the items of a request, and the messages of its whole conversation."""
    given: Sequence[Item] = [_user(body.input)] if isinstance(body.input, str) else body.input or []
    items = [
        msgspec.json.decode(earlier.items[str(item.get("id"))]) if _is_reference(item) else item for item in given
    ]
    messages = ItemReader()
    if body.instructions:
        messages.add({"role": "system", "content": body.instructions}, "instructions")
    for raw in earlier.history:
        for each in msgspec.json.decode(raw, type=list[dict[str, Any]]):
            messages.add(each, "previous_response_id")
    for index, item in enumerate(items):
        messages.add(item, "input" if isinstance(body.input, str) else f"input[{index}]")
    if body.input == [] and not body.instructions and not earlier.history:
        refuse_field("input", "is empty: add an item, or continue a response with 'previous_response_id'")
    if not items and not earlier.history:
        # Templates need at least one message.
        messages.add(_user(""), "input")
    return items, messages


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


def _chat(body: ResponsesBody, messages: ItemReader, toolbox: Toolbox) -> ChatBody:
    same = options_of(body)
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        same |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    else:
        same["top_logprobs"] = None
    same["max_tokens"] = body.max_output_tokens if body.max_output_tokens is not None else body.max_tokens
    form = _response_format(body.text)
    if form is not None and body.response_format is not None:
        refuse_field("text.format", "and 'response_format' exclude each other")
    same["response_format"] = form or body.response_format
    return ChatBody(
        **same,
        **{name: getattr(body, name) for name in _SAME_AS_CHAT},
        messages=messages.messages(),
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
            refuse_field(name, f"is longer than {MAX_REPEATED_BYTES} bytes")
    return echo


def encoded_reasoning(text: str) -> str:
    """Return reasoning as `encrypted_content`, which some clients send back alone. It is not encrypted."""
    return _MARK + base64.b64encode(text.encode(errors="surrogatepass")).decode()


def decoded_reasoning(text: object) -> str:
    """Return the reasoning in an `encrypted_content`; empty if it is not from this server."""
    if not isinstance(text, str) or not text.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_MARK), validate=True).decode(errors="replace")
    except (binascii.Error, ValueError):
        return ""


def encoded_compaction(user_texts: Iterable[str], summary: str) -> str:
    """Return a compacted conversation as the `encrypted_content` of the item that replaces it."""
    return encoded_reasoning(json.dumps({"user": list(user_texts), "summary": summary}, ensure_ascii=False))


def _compaction(item: Item, where: str) -> tuple[list[str], str]:
    """Return the user's texts in a compacted conversation, and its summary."""
    try:
        content = json.loads(decoded_reasoning(item.get("encrypted_content")))
        return [str(text) for text in content["user"]], str(content["summary"])
    except (ValueError, KeyError, TypeError, RecursionError):
        refuse_field(f"{where}.encrypted_content", "must be what this server returned")


def with_ids(items: Iterable[Item], new_id: str) -> list[Item]:
    """Return items as the API lists them, each with a type and an id; new ids contain `new_id`."""
    found: list[Item] = []
    for index, item in enumerate(items):
        kind = item.get("type") or "message"
        complete = {"type": kind, **item}
        complete["type"] = kind
        if kind == "message" and isinstance(content := item.get("content"), str):
            is_reply = item.get("role") == "assistant"
            part = {"type": "output_text", "annotations": []} if is_reply else {"type": "input_text"}
            complete["content"] = [{**part, "text": content}]
        if kind == "message":
            complete.setdefault("status", "completed")
        if not isinstance(item.get("id"), str):
            complete["id"] = f"{_PREFIXES.get(kind, 'item')}_{new_id}_i{index}"
        found.append(complete)
    return found


class ItemReader:
    """Collects the messages of a conversation from items, which are added in order."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._instructions: list[str] = []
        """Texts of system messages at the start. They become one message, because most templates read only one."""
        self.user_texts: list[str] = []
        """All texts of the user, including those before compactions."""
        self._is_open = False
        """True if the last message is one by the assistant to which items may be added."""

    def messages(self) -> list[Message]:
        """Return all messages."""
        if len(self._instructions) > 1:
            self._messages[0]["content"] = "\n\n".join(self._instructions)
        return self._messages

    def add(self, item: Item, where: str) -> None:
        """Add an item; raises `InvalidRequestError`. `where` is the item's path in error messages."""
        match kind := item.get("type") or "message":
            case "message":
                self._add_message(item, where)
            case "reasoning":
                self._add_reasoning(item, where)
            case "function_call":
                name = function_name(text_of(item, "name", where), item.get("namespace"))
                self._add_call(item, name, text_of(item, "arguments", where), where)
            case "custom_tool_call":
                name = function_name(text_of(item, "name", where), item.get("namespace"))
                self._add_call(item, name, custom_arguments(text_of(item, "input", where)), where)
            case "local_shell_call":
                self._add_call(item, LOCAL_SHELL, _shell_arguments(item, where), where)
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self._add_output(item, where)
            case "compaction" | "compaction_summary":
                self._add_compaction(item, where)
            case _:
                refuse_field(where, f"is of type '{kind}', which is not supported", NotSupportedError)

    def _add_message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", *SYSTEM_ROLES):
            refuse_field(f"{where}.role", "must be user, assistant, system or developer")
        content = _content(item.get("content"), f"{where}.content", may_have_images=role == "user")
        if role == "assistant":
            self._reply(fits=lambda reply: not reply["content"] and "tool_calls" not in reply)["content"] = content
            return
        self._is_open = False
        if role == "user":
            parts = content if isinstance(content, list) else ()
            self.user_texts.append(
                "\n".join(part["text"] for part in parts if "text" in part) if parts else joined(content, "\n")
            )
        if role in SYSTEM_ROLES and len(self._messages) == min(len(self._instructions), 1):
            self._instructions.append(joined(content, "\n"))
            if self._messages:
                return
        self._messages.append({"role": role, "content": content})

    def _add_reasoning(self, item: Item, where: str) -> None:
        content, summary = (_optional_text(item.get(key), f"{where}.{key}") for key in ("content", "summary"))
        reasoning = content or decoded_reasoning(item.get("encrypted_content")) or summary
        if reasoning:
            reply = self._reply(fits=lambda reply: len(reply) == 2 and not reply["content"])
            reply["reasoning_content"] = reasoning

    def _add_call(self, item: Item, name: str, arguments: str, where: str) -> None:
        call = {"type": "function", "id": _call_id(item, where), "function": {"name": name, "arguments": arguments}}
        self._reply(fits=lambda _: True).setdefault("tool_calls", []).append(call)

    def _add_output(self, item: Item, where: str) -> None:
        call_id = _call_id(item, where)
        self._is_open = False
        content = _content(item.get("output"), f"{where}.output", may_have_images=True)
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _add_compaction(self, item: Item, where: str) -> None:
        user_texts, summary = _compaction(item, where)
        self._is_open = False
        self.user_texts += user_texts
        written = "".join(f"<message>\n{text}\n</message>\n" for text in user_texts)
        content = f"What I wrote before:\n{written}\nA summary of our conversation until now:\n{summary}"
        self._messages.append({"role": "user", "content": content})

    def _reply(self, *, fits: Callable[[Message], bool]) -> Message:
        """Return the assistant's message to which an item belongs: the open one if it `fits`, else a new one."""
        if not (self._is_open and fits(self._messages[-1])):
            self._messages.append({"role": "assistant", "content": ""})
            self._is_open = True
        return self._messages[-1]


def _content(content: Any, where: str, *, may_have_images: bool = False) -> str | list[Message]:
    """Return content as a text or as parts of a chat."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse_field(where, "must be text or a list of parts")
    parts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        checked_object(part, place)
        kind = part.get("type")
        if kind == "refusal":
            parts.append({"type": "text", "text": text_of(part, "refusal", place)})
        elif kind in _TEXT_PARTS:
            parts.append({"type": "text", "text": text_of(part, "text", place)})
        elif kind == "input_image" and may_have_images:
            parts.append(_image(part, place))
        else:
            known = "text and images are" if may_have_images else "text is"
            refuse_field(place, f"is of type '{kind}': only {known} supported here", NotSupportedError)
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _image(part: Item, where: str) -> Message:
    """Return an image as a part of a chat."""
    if part.get("image_url") is None and part.get("file_id") is not None:
        refuse_field(f"{where}.file_id", "is not supported: send the image as a data: URL", NotSupportedError)
    return image_part(part.get("image_url"), f"{where}.image_url")


def _optional_text(parts: Any, where: str) -> str:
    return joined(_content(parts, where), "\n") if isinstance(parts, list) else ""


def _shell_arguments(item: Item, where: str) -> str:
    action = object_of(item, "action", where)
    known = ("command", "working_directory", "timeout_ms")
    return json.dumps({key: action[key] for key in known if action.get(key) is not None}, ensure_ascii=False)


def _call_id(item: Item, where: str) -> str:
    call_id = item.get("call_id") or item.get("id")
    if not isinstance(call_id, str):
        refuse_field(f"{where}.call_id", "must be text")
    return call_id


class Toolbox:
    """The tools of a request, as functions in the form of chats."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.places: list[str] = []
        """Field of the request from which each function comes."""
        self._names: set[str] = set()
        self.forms: dict[str, CallForm] = {}
        """Conversion of calls of functions that for the client are other tools, or have another name."""
        self.shown: list[Mapping[str, Any]] = []
        """The client's tools without those that are not shown to the model."""
        for index, tool in enumerate(tools):
            self._add(tool, f"tools[{index}]")

    def _add(self, tool: Mapping[str, Any], where: str, namespace: str = "") -> None:
        match kind := tool.get("type"):
            case "function":
                self._add_function({"parameters": None, **tool}, where, namespace)
            case "custom":
                self._add_function(_custom(tool), where, namespace, "custom")
            case "local_shell":
                self._add_function(_LOCAL_SHELL_FUNCTION, where, namespace, "local_shell")
            case "namespace" if not namespace:
                self._add_namespace(tool, where)
            case str() if kind in _LEFT_OUT:
                return
            case _:
                _refuse_type(kind, where)
        if not namespace:
            self.shown.append({"strict": False, **tool} if kind == "function" else tool)

    def _add_namespace(self, tool: Mapping[str, Any], where: str) -> None:
        name = _tool_name(tool, where)
        for index, each in enumerate(checked_list(tool.get("tools"), f"{where}.tools")):
            place = f"{where}.tools[{index}]"
            self._add(checked_object(each, place), place, name)

    def _add_function(self, tool: Mapping[str, Any], where: str, namespace: str, kind: Any = "function") -> None:
        name = _tool_name(tool, where)
        known = function_name(name, namespace)
        if known in self._names:
            refuse_field(where, f": there are two tools called '{known}'")
        self._names.add(known)
        fields = ("description", "parameters", "strict")
        function = {"name": known, **{key: tool[key] for key in fields if key in tool}}
        self.functions.append({"type": "function", "function": function})
        self.places.append(where)
        if kind != "function" or namespace:
            self.forms[known] = CallForm(kind, name, namespace)


def _tool_name(tool: Mapping[str, Any], where: str) -> str:
    return text_of(tool, "name", where) or refuse_field(f"{where}.name", "must be text")


def function_name(name: str, namespace: object = "") -> str:
    """Return the name of a tool as the model sees it; the tool may be in a namespace."""
    return f"{namespace.removesuffix('__')}__{name}" if isinstance(namespace, str) and namespace else name


def chat_choice(choice: Any) -> Any:
    """Convert a `tool_choice` to that of a chat; raises `NotSupportedError` for a tool that is not supported."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "local_shell":
        return {"type": "function", "name": LOCAL_SHELL}
    if isinstance(kind, str) and (kind in _LEFT_OUT or kind in _HOSTED):
        _refuse_type(kind, "tool_choice")
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        kept = [each for each in choice["tools"] if not (isinstance(each, dict) and each.get("type") in _LEFT_OUT)]
        return {**choice, "tools": [chat_choice(each) for each in kept]}
    if isinstance(choice.get("name"), str):
        return {**choice, "name": function_name(choice["name"], choice.get("namespace"))}
    return choice


def custom_arguments(text: object) -> str:
    """Return the arguments of the function that represents a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


def _custom(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a custom tool, whose input is a text, to a function. Its grammar is described but not enforced."""
    lines = [tool.get("description") or "", "The tool takes one text, the argument 'input'."]
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        definition = form.get("definition")
        if not isinstance(definition, str):
            grammar = form.get("grammar")
            definition = grammar.get("definition") if isinstance(grammar, dict) else ""
        lines.append(f"It must match this grammar ({form.get('syntax') or 'lark'}):\n{definition}")
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"name": tool.get("name"), "description": "\n".join(filter(None, lines)), "parameters": parameters}


def _refuse_type(kind: object, where: str) -> NoReturn:
    if not isinstance(kind, str):
        refuse_field(f"{where}.type", "must be text")
    hint = _HOSTED.get(kind, "offer a function")
    refuse_field(where, f": tools of type '{kind}' are not supported: {hint}", NotSupportedError)


class _Identified(msgspec.Struct):
    """The id of an item. The rest may be large, and is passed on without decoding."""

    id: Any = None


_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_identified = msgspec.json.Decoder(_Identified).decode


def list_items(job: ListItems) -> bytes:
    """Return a page of items; raises `InvalidRequestError` if there is no item `after`."""
    items = [item for each in job.lists for item in _items(each)]
    if job.is_descending:
        items.reverse()
    if job.after:
        place = next((i for i, item in enumerate(items) if _identified(item).id == job.after), None)
        if place is None:
            refuse_field("after", f": there is no item '{job.after}'")
        items = items[place + 1 :]
    page = items[: job.limit]
    sizes = accumulate(len(bytes(item)) for item in page)
    page = page[: max(1, sum(size <= _MAX_PAGE_BYTES for size in sizes))]
    first, last = (_identified(page[0]).id, _identified(page[-1]).id) if page else (None, None)
    has_more = len(items) > len(page)
    body = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}
    return msgspec.json.encode(body)
