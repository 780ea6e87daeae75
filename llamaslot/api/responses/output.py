"""Output items of a response, made of the parts of a message, and the events that report them.

Each part is an item: when the model reasons, writes and calls in turns, so do the items. An item is open until a
part of another kind, or another call, begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, structs

from llamaslot.api.generation.reply_parts import Prob
from llamaslot.api.responses import bodies
from llamaslot.api.responses.bodies import (
    CustomCall,
    FunctionCall,
    Item,
    ItemEvent,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ShellAction,
    ShellCall,
    Status,
)
from llamaslot.base.prompt_jobs import CallForm, ResponseFields
from llamaslot.formats.calls import Delta, ToolCallDelta
from llamaslot.protocol.responses import encoded_reasoning

_FUNCTION = CallForm()


class ShellArguments(msgspec.Struct):
    """Arguments of the function that stands for `local_shell`."""

    command: list[str] | str
    working_directory: str | None = None
    timeout_ms: int | None = None


def item_events(item: Item, index: int) -> Iterator[ItemEvent]:
    """Yield the events of a complete item, with all of its text in one."""
    text, probs, empty = "", list[Prob](), dict[str, Any]()
    match item:
        case MessageItem(content=[part]):
            text, probs, empty = part.text, part.logprobs, {"content": []}
        case ReasoningItem(content=[reasoning]):
            text, empty = reasoning.text, {"content": [], "encrypted_content": UNSET}
        case FunctionCall():
            text, empty = item.arguments, {"arguments": ""}
        case CustomCall():
            empty = {"input": ""}
        case ShellCall():
            empty = {"action": ShellAction()}
    yield from _begin(structs.replace(item, status="in_progress", **empty), index)
    if text:
        yield from _added(item, index, text, probs)
    yield from _end(item, index)


def _begin(item: Item, index: int) -> Iterator[ItemEvent]:
    """Yield the events of the beginning of an item, which has no text yet."""
    yield bodies.ItemAdded(output_index=index, item=item)
    if isinstance(item, MessageItem | ReasoningItem):
        part = OutputText(text="") if isinstance(item, MessageItem) else ReasoningText("")
        yield bodies.PartAdded(item_id=item.id, output_index=index, part=part)


def _added(item: Item, index: int, text: str, probs: Sequence[Prob]) -> Iterator[ItemEvent]:
    """Yield the event of more text, or arguments; those of other calls are known when they are complete."""
    place: dict[str, Any] = {"item_id": item.id, "output_index": index}
    match item:
        case MessageItem():
            yield bodies.TextDelta(**place, delta=text, logprobs=list(probs))
        case ReasoningItem():
            yield bodies.ReasoningDelta(**place, delta=text)
        case FunctionCall():
            yield bodies.ArgumentsDelta(**place, delta=text)


def _end(item: Item, index: int) -> Iterator[ItemEvent]:
    """Yield the events of the end of an item, which is complete."""
    place: dict[str, Any] = {"item_id": item.id, "output_index": index}
    match item:
        case MessageItem(content=[part]):
            yield bodies.TextDone(**place, text=part.text, logprobs=part.logprobs)
            yield bodies.PartDone(**place, part=part)
        case ReasoningItem(content=[reasoning]):
            yield bodies.ReasoningDone(**place, text=reasoning.text)
            yield bodies.PartDone(**place, part=reasoning)
        case FunctionCall():
            yield bodies.ArgumentsDone(**place, name=item.name, arguments=item.arguments)
        case CustomCall():
            yield bodies.InputDelta(**place, delta=item.input)
            yield bodies.InputDone(**place, input=item.input)
    yield bodies.ItemDone(output_index=index, item=item)


def _custom_input(arguments: str) -> str:
    """Return the text in the arguments of a custom tool; all of the arguments if they are not that JSON."""
    try:
        text = json.loads(arguments)["input"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def _shell_action(arguments: str) -> ShellAction:
    try:
        action = msgspec.json.decode(arguments, type=ShellArguments)
    except msgspec.MsgspecError:
        action = ShellArguments(arguments or [])
    return ShellAction(
        command=[action.command] if isinstance(action.command, str) else action.command,
        timeout_ms=action.timeout_ms,
        working_directory=action.working_directory,
    )


class OutputItems:
    """The items of a response; their ids are made of `unique_id`."""

    def __init__(self, unique_id: str, fields: ResponseFields) -> None:
        self.items: list[Item] = []
        """Complete items."""
        self._unique_id = unique_id
        self._fields = fields
        self._open: Item | None = None
        """The last item, without the text and the probabilities that were added to it."""
        self._texts: list[str] = []
        self._probs: list[Prob] = []
        self._has_answer = False

    def add(self, part: Delta, probs: Sequence[Prob] = ()) -> Iterator[ItemEvent]:
        """Add content, reasoning or calls; yield the events that report it."""
        if part.content:
            if not isinstance(self._open, MessageItem):
                yield from self._begin(MessageItem(id=self._next_id("msg")))
            yield from self._added(part.content, probs)
        if part.reasoning:
            text = part.reasoning
            if not isinstance(self._open, ReasoningItem):
                text = text.lstrip("\n")
                yield from self._begin(ReasoningItem(id=self._next_id("rs")))
            yield from self._added(text)
        for call in part.tool_calls:
            if call.name is not None:
                yield from self._begin(self._call(call, call.name))
            yield from self._added(call.arguments)

    def end(self, status: Status, *, cuts_call: bool) -> Iterator[ItemEvent]:
        """Yield the events of the end; a complete response without text and calls gets an empty message.

        A call that a stop string cuts is incomplete, although the response is not.
        """
        if status == "completed" and not self._has_answer:
            yield from self._begin(MessageItem(id=self._next_id("msg")))
        yield from self._close("incomplete" if cuts_call else status)

    def _call(self, call: ToolCallDelta, function: str) -> Item:
        """Return a call without arguments, in the form in which the client knows its tool."""
        form, call_id = self._fields.forms.get(function, _FUNCTION), call.id or ""
        if form.kind == "local_shell":
            return ShellCall(id=self._next_id("lsh"), call_id=call_id)
        kind, prefix = (CustomCall, "ctc") if form.kind == "custom" else (FunctionCall, "fc")
        namespace = form.namespace or UNSET
        return kind(id=self._next_id(prefix), call_id=call_id, name=form.name or function, namespace=namespace)

    def _begin(self, item: Item) -> Iterator[ItemEvent]:
        yield from self._close("completed")
        self._open, self._texts, self._probs = item, [], []
        self._has_answer |= not isinstance(item, ReasoningItem)
        yield from _begin(item, len(self.items))

    def _added(self, text: str, probs: Sequence[Prob] = ()) -> Iterator[ItemEvent]:
        if text and self._open is not None:
            self._texts.append(text)
            self._probs += probs
            yield from _added(self._open, len(self.items), text, probs)

    def _close(self, status: Status) -> Iterator[ItemEvent]:
        if self._open is not None:
            item, self._open = self._completed(self._open, "".join(self._texts), status), None
            yield from _end(item, len(self.items))
            self.items.append(item)

    def _completed(self, item: Item, text: str, status: Status) -> Item:
        """Return the open item with all of its text."""
        match item:
            case MessageItem():
                fields: dict[str, Any] = {"content": [OutputText(text=text, logprobs=self._probs)]}
            case ReasoningItem():
                encoded = encoded_reasoning(text) if self._fields.returns_reasoning else UNSET
                fields = {"content": [ReasoningText(text)], "encrypted_content": encoded}
            case FunctionCall():
                fields = {"arguments": text}
            case CustomCall():
                fields = {"input": _custom_input(text)}
            case ShellCall():
                fields = {"action": _shell_action(text)}
        return structs.replace(item, status=status, **fields)

    def _next_id(self, prefix: str) -> str:
        """Return the id of the item after the open one."""
        return f"{prefix}_{self._unique_id}_{len(self.items) + (self._open is not None)}"
