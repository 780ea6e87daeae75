"""Conversations as prompt text, by the Jinja template that a model ships.

Messages are brought into the one form that templates are written for, in the way llama-server does it, so that the
same request gives the same prompt. A template comes with a downloaded file and is not trusted: it runs sandboxed,
without access to Python's attributes, files or modules. How long it runs is not bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llamaslot.base.commands import TextPart
from llamaslot.base.errors import ConfigError, InvalidRequestError
from llamaslot.text.conversation import Conversation, Message, clean_message, clean_tool, joined
from llamaslot.text.spans import ControlTokens, Marks, unmarked
from llamaslot.text.volatile import without


class ChatTemplate:
    """A parsed template and what it was found to understand.

    `bos_token` and `eos_token` are the texts of the model's tokens. Where the tokenizer adds them by itself
    (`adds_bos`, `adds_eos`), a leading BOS or trailing EOS that the template writes is left out. `control_tokens`
    are the texts of the vocabulary's control tokens; with `mark_control_tokens`, `render_parts` tells those that a
    caller spelled from those that the template wrote. `volatile` is left out where the system message begins with
    it (`text/volatile.py`). `now` is the clock for templates that print the date. Raises `ConfigError` with the
    line if `source` does not parse.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        adds_bos: bool = False,
        adds_eos: bool = False,
        control_tokens: Sequence[str] = (),
        mark_control_tokens: bool = True,
        volatile: re.Pattern[str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._dropped_head = bos_token if adds_bos else ""
        self._dropped_tail = eos_token if adds_eos else ""
        self._now = now
        self._volatile = volatile
        try:
            self._template = _ENVIRONMENT.from_string(source)
            self._control = ControlTokens(control_tokens if mark_control_tokens else (), _ENVIRONMENT.parse(source))
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is wrong in line {error.lineno}: {error.message}") from error
        except Exception as error:
            raise ConfigError(f"the chat template does not compile: {_described(error)}") from error
        self._probe()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation in OpenAI's form; `kwargs` are further variables for the template.

        With the generation prompt, a last message of the assistant is a beginning that the model is to continue:
        its text follows the generation prompt. Raises `InvalidRequestError` for messages or tools that are not in
        OpenAI's form, that hold other things than text, or that the template refuses.
        """
        return self._prompt(self._asked(messages, tools, add_generation_prompt, kwargs))

    def render_parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[TextPart, ...]:
        """What `render` gives, in parts: each control token that the caller spelled is one that is not special.

        Usually that is a single part. It is also where who wrote a token cannot be found out, because the template
        writes something else when it does not see the token: then all of them are special. Raises as `render` does.
        """
        asked = self._asked(messages, tools, add_generation_prompt, kwargs)
        prompt = self._prompt(asked)
        try:
            if self._control.begin_in((asked.messages, asked.tools, asked.kwargs)):
                return self._parts(asked, prompt)
        except RecursionError as error:
            raise InvalidRequestError("the messages or tools are nested too deep", param="messages") from error
        return (TextPart(prompt),)

    def _parts(self, asked: _Asked, prompt: str) -> tuple[TextPart, ...]:
        marks = self._control.marks(self.source, asked.messages, asked.tools, asked.kwargs)
        for messages, others in self._control.attempts(asked.messages, (asked.tools, asked.kwargs), marks):
            tools, kwargs = others
            try:
                marked = self._prompt(replace(asked, messages=messages, tools=tools, kwargs=kwargs), marks)
            except InvalidRequestError:
                continue
            if unmarked(marked, marks) == prompt:
                return self._control.parts(prompt, marked)
        return (TextPart(prompt),)

    def _asked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any] | None,
    ) -> _Asked:
        conversation = [clean_message(message, index) for index, message in enumerate(messages)]
        if self._volatile is not None:
            conversation = without(self._volatile, conversation)
        if not conversation:
            raise InvalidRequestError("'messages' must not be empty", param="messages")
        beginning = _take_beginning(conversation) if add_generation_prompt else []
        return _Asked(
            messages=[*self._adapted(conversation), *beginning],
            n_begun=len(beginning),
            tools=[clean_tool(tool, index) for index, tool in enumerate(tools or ())],
            add_generation_prompt=add_generation_prompt,
            kwargs=kwargs or {},
            now=self._now(),
        )

    def _prompt(self, asked: _Asked, marks: Marks | None = None) -> str:
        n_whole = len(asked.messages) - asked.n_begun
        try:
            prompt = self._render(
                asked.messages[:n_whole],
                tools=asked.tools,
                add_generation_prompt=asked.add_generation_prompt,
                kwargs=asked.kwargs,
                now=asked.now,
                marks=marks or {},
            )
        except _RefusedError as error:
            raise InvalidRequestError(str(error), param="messages") from error
        for beginning in asked.messages[n_whole:]:
            prompt = _continued(prompt, beginning)
        return prompt

    def _render(
        self,
        conversation: Sequence[Message],
        *,
        now: datetime,
        tools: Sequence[Message] = (),
        add_generation_prompt: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        marks: Marks | None = None,
    ) -> str:
        variables = {
            "enable_thinking": True,
            "date_string": now.strftime("%d %b %Y"),
            "datetime": now.strftime("%b %d %Y"),
            **(kwargs or {}),
            **self._tokens,
            "strftime_now": now.strftime,
            "messages": conversation,
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:
            variables["tools"] = tools
        try:
            text = self._template.render(variables)
        except TemplateError as error:
            raise _RefusedError(f"the chat template refuses the messages: {error.message}") from error
        except Exception as error:
            raise _RefusedError(f"the chat template fails on the messages: {_described(error)}") from error
        return text[self._kept(unmarked(text, marks or {}))]

    def _kept(self, text: str) -> slice:
        """What is left of a rendered text without the BOS and EOS that the tokenizer adds."""
        start = len(self._dropped_head) if text.startswith(self._dropped_head) else 0
        ends_with_tail = text.endswith(self._dropped_tail, start)
        return slice(start, len(text) - len(self._dropped_tail) if ends_with_tail else len(text))

    def _probe(self) -> None:
        """Find out by rendering small conversations what the template does with them."""
        mark = "a mark to be found again"
        user: Message = {"role": "user", "content": mark}
        as_text = self._attempt([user])
        as_parts = self._attempt([{"role": "user", "content": [{"type": "text", "text": mark}]}])
        self._wants_parts = mark not in as_text and mark in as_parts
        self._takes_parts = self._wants_parts or (mark in as_text and as_text == as_parts)

        system: Message = {"role": "system", "content": mark}
        question: Message = {"role": "user", "content": "?"}
        self._takes_system = mark in self._attempt([self._shaped(system), self._shaped(question)])

        function = {"name": "f", "arguments": {"argument": mark}}
        conversation: Conversation = [
            question,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "id": "call00001", "function": function}],
            },
            {"role": "tool", "content": "!", "tool_call_id": "call00001"},
            {"role": "assistant", "content": "!"},
            question,
        ]
        properties = {"argument": {"type": "string", "description": "?"}}
        parameters = {"type": "object", "properties": properties}
        tool = {"type": "function", "function": {"name": "f", "description": "?", "parameters": parameters}}
        self._takes_arguments = mark in self._attempt([self._shaped(m) for m in conversation], tools=[tool])

    def _attempt(self, conversation: Conversation, tools: Sequence[Message] = ()) -> str:
        try:
            return self._render(conversation, tools=tools, now=self._now())
        except _RefusedError:
            return ""

    def _adapted(self, conversation: Conversation) -> Conversation:
        """The conversation without what this template does not understand."""
        for message in conversation:
            if message["role"] == "developer" and "<|channel|>" not in self.source:
                message["role"] = "system"
            if self._takes_arguments:
                _parse_arguments(message)
        if conversation and conversation[0]["role"] == "system" and not self._takes_system:
            conversation = _without_system(conversation)
        return [self._shaped(message) for message in conversation]

    def _shaped(self, message: Message) -> Message:
        """The message with its content as text or as parts, whichever the template reads."""
        content = message["content"]
        if isinstance(content, str) and self._wants_parts:
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, str) and not self._takes_parts:
            content = joined(content, "\n")
        return {**message, "content": content}


@dataclass(frozen=True, slots=True)
class _Asked:
    """All that a prompt depends on; the last `n_begun` messages, 0 or 1, are for the model to continue."""

    messages: Sequence[Message]
    n_begun: int
    tools: Sequence[Message]
    add_generation_prompt: bool
    kwargs: Mapping[str, Any]
    now: datetime


class _RefusedError(Exception):
    """The template did not render a conversation."""


def _take_beginning(conversation: Conversation) -> Conversation:
    """Take the last message out of the conversation if it is one for the model to continue."""
    roles = [message["role"] for message in conversation[-2:]]
    if roles[-1] != "assistant":
        return []
    if roles == ["assistant", "assistant"]:
        raise InvalidRequestError(
            "there cannot be two assistant messages at the end of 'messages'", param="messages"
        )
    if "tool_calls" in conversation[-1]:
        raise InvalidRequestError(
            "an assistant message with tool calls cannot be continued; add their results", param="messages"
        )
    return [conversation.pop()]


def _continued(prompt: str, beginning: Message) -> str:
    """The prompt and the reply begun; thoughts that the generation prompt opens are closed before its text."""
    text = joined(beginning["content"], "\n\n")
    if prompt.rstrip().endswith("<think>"):
        prompt += beginning.get("reasoning_content", "")
        if text:
            prompt += "\n</think>\n\n"
    return prompt + text


def _without_system(conversation: Conversation) -> Conversation:
    """The leading system message put in front of the next message's text, or made the user's if there is none."""
    system, *rest = conversation
    if not rest:
        return [{**system, "role": "user"}]
    content = joined(system["content"], "\n") + "\n" + joined(rest[0]["content"], "\n")
    return [{**rest[0], "content": content}, *rest[1:]]


def _parse_arguments(message: Message) -> None:
    """Turn the arguments of tool calls, which clients send as JSON text, into objects."""
    for call in message.get("tool_calls", ()):
        function = call["function"]
        if isinstance(function["arguments"], str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(
                    f"the arguments of a call of '{function['name']}' are not JSON: {error}", param="messages"
                ) from error


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(Extension):
    """`{% generation %}`, which marks replies for training, means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    environment.filters["safe"] = str  # Jinja's own would make everything added to it be HTML-escaped
    return environment


_ENVIRONMENT = _environment()
