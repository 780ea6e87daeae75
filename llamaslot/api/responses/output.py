"""Output items of a response, made of the parts of a message, and the events that report them.

Each part is an item: when the model reasons, writes and calls in turns, so do the items. An item is open until a
part of another kind, or another call, begins.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from llamaslot.api.generation.logprobs import Prob
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
from llamaslot.base.generation.request_context import CallForm, ResponseFields
from llamaslot.formats.calls import Delta, ToolCallDelta
from llamaslot.protocol.responses import custom_arguments, encoded_reasoning

_FUNCTION = CallForm()


class _OpenItem(ABC):
    """The last item, to which text may be added."""

    def __init__(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._index = index
        self._texts: list[str] = []

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index}

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def begin(self) -> Iterator[ItemEvent]:
        """Yield the events of its beginning."""

    @abstractmethod
    def add(self, text: str, probs: Sequence[Prob]) -> Iterator[ItemEvent]:
        """Add text, or arguments; yield the events of that."""

    @abstractmethod
    def end(self, status: Status) -> Iterator[ItemEvent]:
        """Yield the events of its end."""

    @abstractmethod
    def item(self, status: Status) -> Item:
        """Return the item as it is now."""

    def _added(self, item: Item) -> ItemEvent:
        return bodies.ItemAdded(output_index=self._index, item=item)

    def _done(self, status: Status) -> ItemEvent:
        return bodies.ItemDone(output_index=self._index, item=self.item(status))


class _Message(_OpenItem):
    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index)
        self._probs: list[Prob] = []

    def begin(self) -> Iterator[ItemEvent]:
        yield self._added(MessageItem(id=self._id))
        yield bodies.PartAdded(**self._place, part=OutputText(text=""))

    def add(self, text: str, probs: Sequence[Prob]) -> Iterator[ItemEvent]:
        self._texts.append(text)
        self._probs += probs
        yield bodies.TextDelta(**self._place, delta=text, logprobs=list(probs))

    def end(self, status: Status) -> Iterator[ItemEvent]:
        part = self._part()
        yield bodies.TextDone(**self._place, text=part.text, logprobs=part.logprobs)
        yield bodies.PartDone(**self._place, part=part)
        yield self._done(status)

    def item(self, status: Status) -> Item:
        return MessageItem(id=self._id, status=status, content=[self._part()])

    def _part(self) -> OutputText:
        return OutputText(text=self._text, logprobs=self._probs)


class _Reasoning(_OpenItem):
    def __init__(self, item_id: str, index: int, *, encoded: bool) -> None:
        super().__init__(item_id, index)
        self._encoded = encoded

    def begin(self) -> Iterator[ItemEvent]:
        yield self._added(ReasoningItem(id=self._id))
        yield bodies.PartAdded(**self._place, part=ReasoningText(""))

    def add(self, text: str, probs: Sequence[Prob]) -> Iterator[ItemEvent]:
        self._texts.append(text)
        yield bodies.ReasoningDelta(**self._place, delta=text)

    def end(self, status: Status) -> Iterator[ItemEvent]:
        yield bodies.ReasoningDone(**self._place, text=self._text)
        yield bodies.PartDone(**self._place, part=ReasoningText(self._text))
        yield self._done(status)

    def item(self, status: Status) -> Item:
        encoded = encoded_reasoning(self._text) if self._encoded else UNSET
        return ReasoningItem(
            id=self._id, status=status, content=[ReasoningText(self._text)], encrypted_content=encoded
        )


class _Function(_OpenItem):
    def __init__(self, item_id: str, index: int, call: ToolCallDelta, form: CallForm) -> None:
        super().__init__(item_id, index)
        self._call_id = call.id or ""
        self._name = form.name or call.name or ""
        self._namespace = form.namespace or UNSET

    @property
    def _named(self) -> dict[str, Any]:
        return {"id": self._id, "call_id": self._call_id, "name": self._name, "namespace": self._namespace}

    def begin(self) -> Iterator[ItemEvent]:
        yield self._added(self.item("in_progress"))

    def add(self, text: str, probs: Sequence[Prob]) -> Iterator[ItemEvent]:
        self._texts.append(text)
        yield bodies.ArgumentsDelta(**self._place, delta=text)

    def end(self, status: Status) -> Iterator[ItemEvent]:
        yield bodies.ArgumentsDone(**self._place, name=self._name, arguments=self._text)
        yield self._done(status)

    def item(self, status: Status) -> Item:
        return FunctionCall(**self._named, status=status, arguments=self._text)


class _Custom(_Function):
    """A call whose input is in the arguments: it is known when these are complete."""

    def begin(self) -> Iterator[ItemEvent]:
        yield self._added(CustomCall(**self._named))

    def add(self, text: str, probs: Sequence[Prob]) -> Iterator[ItemEvent]:
        self._texts.append(text)
        yield from ()

    def end(self, status: Status) -> Iterator[ItemEvent]:
        text = self._input()
        yield bodies.InputDelta(**self._place, delta=text)
        yield bodies.InputDone(**self._place, input=text)
        yield self._done(status)

    def item(self, status: Status) -> Item:
        return CustomCall(**self._named, status=status, input=self._input())

    def _input(self) -> str:
        """Return the text in the arguments; all of the arguments if they are not that JSON."""
        try:
            text = json.loads(self._text)["input"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return self._text
        return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


class _Shell(_Custom):
    """A call whose action is known when the arguments are complete."""

    def begin(self) -> Iterator[ItemEvent]:
        yield self._added(ShellCall(id=self._id, call_id=self._call_id))

    def end(self, status: Status) -> Iterator[ItemEvent]:
        yield self._done(status)

    def item(self, status: Status) -> Item:
        try:
            action = msgspec.json.decode(self._text, type=ShellArguments)
        except msgspec.MsgspecError:
            action = ShellArguments([self._text] if self._text else [])
        return ShellCall(
            id=self._id,
            status=status,
            call_id=self._call_id,
            action=ShellAction(
                command=[action.command] if isinstance(action.command, str) else action.command,
                timeout_ms=action.timeout_ms,
                working_directory=action.working_directory,
            ),
        )


class ShellArguments(msgspec.Struct):
    """Arguments of the function that stands for `local_shell`."""

    command: list[str] | str
    working_directory: str | None = None
    timeout_ms: int | None = None


_KINDS = {"function": (_Function, "fc"), "custom": (_Custom, "ctc"), "local_shell": (_Shell, "lsh")}


def item_events(item: Item, index: int) -> Iterator[ItemEvent]:
    """Yield the events of a complete item, with all of its text in one."""
    opened, text, probs = _opened(item, index)
    yield from opened.begin()
    if text:
        yield from opened.add(text, probs)
    yield from opened.end(item.status)


def _opened(item: Item, index: int) -> tuple[_OpenItem, str, Sequence[Prob]]:
    """Return a complete item as an empty open one, and the text and probabilities to add to it."""
    if isinstance(item, MessageItem):
        (part,) = item.content
        return _Message(item.id, index), part.text, part.logprobs
    if isinstance(item, ReasoningItem):
        encoded = item.encrypted_content is not UNSET
        return _Reasoning(item.id, index, encoded=encoded), item.content[0].text, ()
    call = ToolCallDelta(0, id=item.call_id)
    if isinstance(item, ShellCall):
        action = item.action
        arguments = ShellArguments(action.command, action.working_directory, action.timeout_ms)
        return _Shell(item.id, index, call, _FUNCTION), msgspec.json.encode(arguments).decode(), ()
    form = CallForm(name=item.name, namespace=item.namespace or "")
    if isinstance(item, FunctionCall):
        return _Function(item.id, index, call, form), item.arguments, ()
    return _Custom(item.id, index, call, form), custom_arguments(item.input), ()


class OutputItems:
    """The items of a response; their ids are made of `unique_id`."""

    def __init__(self, unique_id: str, fields: ResponseFields) -> None:
        self.items: list[Item] = []
        """Complete items."""
        self._unique_id = unique_id
        self._fields = fields
        self._open: _OpenItem | None = None
        self._has_answer = False

    def add(self, part: Delta, probs: Sequence[Prob] = ()) -> Iterator[ItemEvent]:
        """Add content, reasoning or calls; yield the events of that."""
        if part.content:
            if not isinstance(self._open, _Message):
                yield from self._begin(_Message(*self._next("msg")))
            yield from self._added(part.content, probs)
        if part.reasoning:
            text = part.reasoning
            if not isinstance(self._open, _Reasoning):
                text = text.lstrip("\n")
                item_id, index = self._next("rs")
                yield from self._begin(_Reasoning(item_id, index, encoded=self._fields.returns_reasoning))
            yield from self._added(text)
        for call in part.tool_calls:
            if call.name is not None:
                form = self._fields.forms.get(call.name, _FUNCTION)
                kind, prefix = _KINDS[form.kind]
                yield from self._begin(kind(*self._next(prefix), call, form))
            yield from self._added(call.arguments)

    def end(self, status: Status, *, cuts_call: bool) -> Iterator[ItemEvent]:
        """Yield the events of the end; a complete response without text and calls gets an empty message.

        A call that a stop string cuts is incomplete, although the response is not.
        """
        if status == "completed" and not self._has_answer:
            yield from self._begin(_Message(*self._next("msg")))
        yield from self._close("incomplete" if cuts_call else status)

    def _added(self, text: str, probs: Sequence[Prob] = ()) -> Iterator[ItemEvent]:
        if text and self._open is not None:
            yield from self._open.add(text, probs)

    def _begin(self, item: _OpenItem) -> Iterator[ItemEvent]:
        yield from self._close("completed")
        self._open = item
        self._has_answer |= not isinstance(item, _Reasoning)
        yield from item.begin()

    def _close(self, status: Status) -> Iterator[ItemEvent]:
        if self._open is not None:
            yield from self._open.end(status)
            self.items.append(self._open.item(status))
            self._open = None

    def _next(self, prefix: str) -> tuple[str, int]:
        """Return id and index of the item after the open one."""
        index = len(self.items) + (self._open is not None)
        return f"{prefix}_{self._unique_id}_{index}", index
