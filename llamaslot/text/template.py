"""Rendering of conversations to prompt text, with the Jinja template of a model.

Messages are converted to the form that templates expect in the same way as in llama-server, so that the same
request gives the same prompt. A template comes with a downloaded file and is not trusted: it runs in a sandbox,
without access to Python's attributes, files or modules. The caller limits its running time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from llamaslot.base.commands import TextPart
from llamaslot.base.errors import ConfigError, InvalidRequestError
from llamaslot.text.control_tokens import ControlTokens, Placeholders, restored
from llamaslot.text.conversation import (
    SYSTEM_ROLES,
    Conversation,
    Message,
    clean_message,
    clean_tool,
    joined,
    parsed_arguments,
    without_volatile,
)
from llamaslot.text.jinja_sandbox import ChatSandbox, copied
from llamaslot.text.message_form import MessageForm, simpler_tools
from llamaslot.text.message_order import (
    CALLED,
    MessageOrder,
    Preambles,
    probed,
    results_from_user,
    with_accepted_roles,
    without_system,
)

MAX_CHARACTERS = 2**26
"""Most characters of a prompt, more than the context of any model holds."""


class ChatTemplate:
    """A parsed template, and what probing it has shown.

    `bos_token` and `eos_token` are the texts of the model's tokens. If the tokenizer adds them itself (`adds_bos`,
    `adds_eos`), a leading BOS or trailing EOS of the template is left out. `control_tokens` has the texts of the
    vocabulary's control tokens; without `mark_control_tokens`, those in the caller's text are parsed too.
    `volatile` is removed from the start of system messages (`volatile_pattern`). `now` is the clock of templates
    that print the date. Raises `ConfigError` with the line if `source` cannot be parsed.
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
        self.volatile = volatile
        try:
            self._template = _ENVIRONMENT.from_string(source)
            tree = _ENVIRONMENT.parse(source)
            self._control = ControlTokens(control_tokens if mark_control_tokens else (), tree)
            self._reads_functions = "functions" in find_undeclared_variables(tree)
        except TemplateSyntaxError as error:
            raise ConfigError(f"error in line {error.lineno} of the chat template: {error.message}") from error
        except Exception as error:
            raise ConfigError(f"the chat template does not compile: {_described(error)}") from error
        self._form = MessageForm(self._attempt)
        self._orders: dict[tuple[bool, bool, bool], MessageOrder] = {}
        self._probe()

    def prepared(self, messages: Sequence[Mapping[str, Any]], *, continues: bool = True) -> Conversation:
        """Return the messages as they are rendered: checked, without `volatile` text, and in accepted roles.

        If the last message `continues`, it is joined with the assistant's messages right before it.
        """
        conversation = [clean_message(message, index) for index, message in enumerate(messages)]
        replies = takewhile(
            lambda each: each["role"] == "assistant" and "tool_calls" not in each, conversation[::-1]
        )
        if continues and (n_last := len(list(replies))) > 1:
            conversation[-n_last:] = [_as_one(conversation[-n_last:])]
        return with_accepted_roles(
            without_volatile(self.volatile, conversation),
            later_system=self._takes_later_system,
            user_twice=self._takes_user_twice,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        only_text: bool = False,
        keeps_added: bool = False,
    ) -> tuple[TextPart, ...]:
        """Render a conversation in OpenAI's form. `kwargs` are further variables for the template.

        With `keeps_added`, BOS and EOS that the template writes are kept even if the tokenizer would add them.

        With the generation prompt, a last message by the assistant is the beginning of the reply: its text follows
        the generation prompt. Control tokens that the caller wrote are in separate parts, in which none are parsed;
        usually there are none, and only one part. There is also only one part if the caller's tokens cannot be
        distinguished from the template's, because the template writes something else without them; and with
        `only_text`, which takes half the time.

        Raises `InvalidRequestError` for messages or tools that are not in OpenAI's form, that contain anything but
        text, or that the template refuses.
        """
        conversation = self.prepared(messages, continues=add_generation_prompt)
        if not conversation:
            raise InvalidRequestError("'messages' must not be empty", param="messages")
        continued = _take_continued_message(conversation) if add_generation_prompt else []
        inputs = _Inputs(
            conversation,
            self._now(),
            n_continued=len(continued),
            tools=[clean_tool(tool, index) for index, tool in enumerate(tools or ())],
            add_generation_prompt=add_generation_prompt,
            kwargs=kwargs or {},
            keeps_added=keeps_added,
        )
        inputs, prompt = self._first_taken(inputs, continued)
        try:
            if not only_text and self._control.begin_in((inputs.messages, inputs.tools, inputs.kwargs)):
                return self._parts(inputs, prompt)
        except RecursionError as error:
            raise InvalidRequestError("the messages or tools are nested too deeply", param="messages") from error
        return (TextPart(prompt),)

    def _first_taken(self, inputs: _Inputs, continued: Conversation) -> tuple[_Inputs, str]:
        """Return the first form of a conversation that the template accepts, and its prompt.

        Tools with simpler schemas are tried if it refuses the given ones regardless of the messages.
        """
        conversation = inputs.messages
        has_system = bool(conversation) and conversation[0]["role"] in SYSTEM_ROLES
        refusal: InvalidRequestError | None = None
        for tools in self._printable(inputs.tools):
            for refusals in (False, True):
                form = self._message_order(refusals=refusals, has_tools=bool(tools), has_system=has_system)
                messages = [*self._adapted(copied(conversation), form), *continued]
                tried = replace(inputs, messages=messages, tools=tools, call_head=form.call_head)
                try:
                    return tried, self._prompt(tried)
                except InvalidRequestError as error:
                    refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _parts(self, inputs: _Inputs, prompt: str) -> tuple[TextPart, ...]:
        placeholders = self._control.placeholders(self.source, inputs.messages, inputs.tools, inputs.kwargs)
        others = inputs.tools, inputs.kwargs
        for messages, (tools, kwargs) in self._control.variants(inputs.messages, others, placeholders):
            try:
                replaced = self._prompt(
                    replace(inputs, messages=messages, tools=tools, kwargs=kwargs), placeholders
                )
            except InvalidRequestError:
                continue
            if restored(replaced, placeholders) == prompt:
                return self._control.parts(prompt, replaced)
        return (TextPart(prompt),)

    def _prompt(self, inputs: _Inputs, placeholders: Placeholders | None = None) -> str:
        n_whole = len(inputs.messages) - inputs.n_continued
        try:
            prompt = self._rendered(replace(inputs, messages=inputs.messages[:n_whole]), placeholders)
        except _RefusedError as error:
            raise InvalidRequestError(str(error), param="messages") from error
        for continued in inputs.messages[n_whole:]:
            prompt = _with_continued(prompt, continued)
        return prompt

    def _rendered(self, inputs: _Inputs, placeholders: Placeholders | None = None) -> str:
        preambles = Preambles(inputs.call_head, inputs.messages)
        variables = self._variables(replace(inputs, messages=preambles.marked(inputs.messages)))
        try:
            text = preambles.written(self._joined(self._template.generate(variables)))
        except TemplateError as error:
            raise _RefusedError(f"the chat template refuses the messages: {error.message}") from error
        except _RefusedError:
            raise
        except Exception as error:
            raise _RefusedError(f"the chat template fails on the messages: {_described(error)}") from error
        return text if inputs.keeps_added else text[self._kept(restored(text, placeholders or {}))]

    def _variables(self, inputs: _Inputs) -> dict[str, Any]:
        """Return the variables of a template, copied because it may change them."""
        try:
            variables = {
                "enable_thinking": True,
                "date_string": inputs.now.strftime("%d %b %Y"),
                "datetime": inputs.now.strftime("%b %d %Y"),
                **copied(inputs.kwargs),
                **self._tokens,
                "strftime_now": inputs.now.strftime,
                "messages": copied(inputs.messages),
                "add_generation_prompt": inputs.add_generation_prompt,
            }
            # Left undefined without tools, because templates check whether `tools` is defined.
            if inputs.tools:
                variables["tools"] = copied(inputs.tools)
            if self._reads_functions:
                functions = [tool["function"] for tool in inputs.tools]
                variables.setdefault("functions", json.dumps(functions, ensure_ascii=False, indent=4))
        except RecursionError as error:
            raise _RefusedError("the messages or tools are nested too deeply") from error
        return variables

    def _joined(self, pieces: Iterator[str]) -> str:
        """Join the pieces that a template writes; raises `_RefusedError` once the text is too long."""
        text: list[str] = []
        n_characters = 0
        for piece in pieces:
            n_characters += len(piece)
            if n_characters > MAX_CHARACTERS:
                raise _RefusedError(f"the prompt would be longer than {MAX_CHARACTERS} characters")
            text.append(piece)
        return "".join(text)

    def _kept(self, text: str) -> slice:
        """Return the part of a rendered text between the BOS and EOS that the tokenizer adds."""
        start = len(self._dropped_head) if text.startswith(self._dropped_head) else 0
        ends_with_tail = text.endswith(self._dropped_tail, start)
        return slice(start, len(text) - len(self._dropped_tail) if ends_with_tail else len(text))

    def _probe(self) -> None:
        """Render small conversations to find out what the template supports, as llama-server does."""
        text = "a text to be found again"
        question: Message = {"role": "user", "content": "?"}
        system: Message = {"role": "system", "content": text}
        self._takes_system = text in self._written(system, question)
        self._takes_user_twice = text in self._written(question, {**question, "content": text})
        # Some templates write all system messages at the start.
        answer: Message = {"role": "assistant", "content": "an answer to be found"}
        start = {**system, "content": "another text"}, question, answer
        before = "".join(self._written(*start, question).partition(answer["content"])[:2])
        several = self._written(*start, system, question)
        self._takes_later_system = text in several[len(before) :] and several.startswith(before)

        tool = _probed_tool("f")
        self.takes_tools = "a_tool_to_be_found" in self._written(
            question, tools=[_probed_tool("a_tool_to_be_found")]
        )
        result: Message = {"role": "tool", "content": "!", "tool_call_id": "call00001"}
        reply: Message = {"role": "assistant", "content": "!"}
        asked = _probed_call("f", {"argument": text})
        self._takes_arguments = text in self._written(question, asked, result, reply, question, tools=[tool])
        called = _probed_call("a_call_to_be_found", {} if self._takes_arguments else "{}")
        calling = [question, called, result]
        self.takes_calls = "a_call_to_be_found" in self._written(*calling, tools=[tool])
        self._form.probe_reasoning(calling, tool)
        as_result = self._written(question, asked, {**result, "content": text}, tools=[tool])
        as_question = self._written(question, asked, {**result, "role": "user", "content": text}, tools=[tool])
        self._takes_results = text in as_result or text not in as_question
        instructions: Conversation = [{"role": "system", "content": "?"}] if self._takes_system else []
        self._form.probe_parts([*instructions, *calling, reply, question], tool)

    def _written(self, *messages: Message, tools: Sequence[Message] = ()) -> str:
        """Return the prompt of messages in the form that the template reads; empty if it refuses them."""
        return self._attempt([self._form.shaped(message) for message in messages], tools)

    def _attempt(self, conversation: Conversation, tools: Sequence[Message] = ()) -> str:
        """Return the prompt; empty if the template refuses the conversation."""
        return self._tried(_Inputs(conversation, self._now(), tools=tools)) or ""

    def _tried(self, inputs: _Inputs) -> str | None:
        try:
            return self._rendered(inputs)
        except _RefusedError:
            return None

    def _message_order(self, *, refusals: bool, has_tools: bool, has_system: bool) -> MessageOrder:
        """Return the order of messages that the template accepts, probed at the first use."""
        key = refusals, has_tools, has_system
        if key not in self._orders:
            tools = [_probed_tool(CALLED), _probed_tool(_NOT_CALLED)] if has_tools else []

            def render(conversation: Conversation, *, wants_reply: bool = False) -> str | None:
                messages = self._adapted(copied(conversation), MessageOrder())
                return self._tried(_Inputs(messages, self._now(), tools=tools, add_generation_prompt=wants_reply))

            self._orders[key] = probed(
                render,
                refusals=refusals,
                has_system=has_system,
                takes_calls=self.takes_calls,
                written=[_NOT_CALLED] if tools and self.takes_tools else [],
                generation_prompt=partial(render, wants_reply=True),
            )
        return self._orders[key]

    def _printable(self, tools: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """Yield the tools and, if the template refuses them even after a single question, simpler ones."""
        yield tools
        question = _Inputs([self._form.shaped({"role": "user", "content": "?"})], self._now())
        if not tools or self._tried(question) is None:
            return
        try:
            self._rendered(replace(question, tools=tools))
        except _RefusedError as error:
            for simpler in simpler_tools(tools):
                if self._tried(replace(question, tools=simpler)) is not None:
                    yield simpler
                    return
            said = str(error).replace("the messages", "the tools", 1)
            raise InvalidRequestError(said, param="tools") from error

    def _adapted(self, conversation: Conversation, form: MessageOrder) -> Conversation:
        """Return the conversation in the form that this template accepts."""
        for message in conversation:
            if message["role"] == "developer" and "<|channel|>" not in self.source:
                message["role"] = "system"
            for call in message.get("tool_calls", ()) if self._takes_arguments else ():
                call["function"]["arguments"] = parsed_arguments(call["function"]["arguments"])
        conversation = form.with_question(form.fitted(conversation))
        if conversation and conversation[0]["role"] == "system" and not self._takes_system:
            conversation = without_system(conversation)
        if not self._takes_results:
            conversation = results_from_user(conversation)
        return [self._form.shaped(message) for message in form.alternated(conversation)]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs of a prompt. The last `n_continued` messages (0 or 1) are the beginning of the reply."""

    messages: Sequence[Message]
    now: datetime
    n_continued: int = 0
    tools: Sequence[Message] = ()
    add_generation_prompt: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    keeps_added: bool = False
    call_head: str | None = None
    """`MessageOrder.call_head`."""


class _RefusedError(Exception):
    """The template did not render a conversation."""


def _as_one(replies: Conversation) -> Message:
    joined_texts = {
        key: "\n\n".join(filter(None, (joined(each.get(key, ""), "\n\n") for each in replies)))
        for key in ("content", "reasoning_content")
    }
    return {"role": "assistant", **{key: text for key, text in joined_texts.items() if text or key == "content"}}


def _take_continued_message(conversation: Conversation) -> Conversation:
    """Remove and return the last message of the conversation if it is the beginning of the reply."""
    if conversation[-1]["role"] != "assistant":
        return []
    if "tool_calls" in conversation[-1]:
        message = "an assistant message with tool calls cannot be continued; add their results"
        raise InvalidRequestError(message, param="messages")
    return [conversation.pop()]


def _with_continued(prompt: str, continued: Message) -> str:
    """Append the message to continue. Reasoning that the prompt opens is closed before the message's text."""
    text = joined(continued["content"], "\n\n")
    if prompt.rstrip().endswith("<think>"):
        prompt += continued.get("reasoning_content", "")
        if text:
            prompt += "\n</think>\n\n"
    return prompt + text


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_ENVIRONMENT = ChatSandbox()
_NOT_CALLED = "a_function_to_be_found"
"""A probed tool that is never called, so that its name is in a prompt only if the tools are."""


def _probed_tool(name: str) -> Message:
    parameters = {"type": "object", "properties": {"argument": {"type": "string", "description": "?"}}}
    return {"type": "function", "function": {"name": name, "description": "?", "parameters": parameters}}


def _probed_call(name: str, arguments: Any) -> Message:
    call = {"type": "function", "id": "call00001", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
