"""Rendering of a chat request's conversation, and the limit of its reply's reasoning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from llamaslot.base.commands import TextPart
from llamaslot.base.generation.tools import ReasoningBudget
from llamaslot.base.prompt_jobs import RequestPolicy
from llamaslot.formats.calls import ToolCall, is_object
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import Thinking
from llamaslot.formats.recognition import format_of
from llamaslot.protocol.bodies import ChatBody
from llamaslot.protocol.constraints import RAW_GRAMMAR, read_tools
from llamaslot.protocol.text_requests import wants_probs
from llamaslot.text.conversation import (
    SYSTEM_ROLES,
    Conversation,
    Message,
    clean_message,
    joined,
    parsed_arguments,
    refuse_field,
    without_volatile,
)
from llamaslot.text.template import ChatTemplate

_INTRODUCTION = (
    "You can call functions. Each of the following lines describes one, with the schema of its parameters:"
)
_EXAMPLE = ToolCall("name", '{"parameter": "value"}')
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class ChatReader:
    """Reads chat bodies for a template and a vocabulary with these named tokens. Usable on any thread.

    `tokens_of` tokenizes a text that may contain control tokens.
    """

    def __init__(
        self,
        template: ChatTemplate,
        named_tokens: Mapping[str, int],
        tokens_of: Callable[[str], tuple[int, ...]],
        settings: RequestPolicy,
    ) -> None:
        self.template = template
        self._settings = settings
        self._tokens_of = tokens_of
        self.format = format_of(template.source, named_tokens)
        self.preserved_tokens = tuple(
            sorted(named_tokens[text] for text in self.format.preserved if text in named_tokens)
        )
        """Control tokens that the parser of replies needs to see in the text."""

    def thinking(self, variables: Mapping[str, Any], reasoning_open: str) -> Thinking:
        """Return whether a reply reasons: it may unless a variable says no, and continues what the prompt opens."""
        if self.format.reasoning is None:
            return "none"
        if reasoning_open:
            return "open"
        return "optional" if variables.get("enable_thinking", True) else "none"

    def budget(self, body: ChatBody, thinking: Thinking, *, is_raw: bool) -> ReasoningBudget | None:
        """Return the limit of reasoning set by a request or, if it sets none, by the server.

        None if tokens cannot be forced: because probabilities are wanted, or a grammar covers the whole reply.
        """
        tags, n_tokens = self.format.reasoning, _budget_tokens(body)
        if tags is None or thinking == "none":
            return None
        against = ""
        if wants_probs(body):
            against = f"'{'logprobs' if body.logprobs else 'n_probs'}': forced tokens have none"
        elif is_raw:
            against = f"'{RAW_GRAMMAR}', which need not allow the forced end of the reasoning"
        if against and n_tokens > 0:
            refuse_field("reasoning_budget_tokens", f"cannot be combined with {against}")
        if n_tokens < 0:
            n_tokens = self._settings.reasoning_budget
        if n_tokens < 0 or against:
            return None
        start, end, after = map(self._tokens_of, (tags.start, tags.end, self.format.text_after_reasoning))
        return ReasoningBudget(n_tokens, start, end, after, is_open=thinking == "open")

    def render(self, body: ChatBody, *, keeps_added: bool = False) -> tuple[TextPart, ...]:
        """Return the conversation as prompt parts; raises `InvalidRequestError` if it cannot be rendered.

        `keeps_added` keeps BOS and EOS that the template writes, for a tokenizer that adds none itself.
        """
        return self.render_messages(
            body,
            checked_messages(body),
            read_tools(body).definitions,
            wants_reply=wants_reply(body),
            keeps_added=keeps_added,
        )

    def render_messages(
        self,
        body: ChatBody,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        wants_reply: bool,
        only_text: bool = False,
        keeps_added: bool = False,
    ) -> tuple[TextPart, ...]:
        """Return messages and tools as prompt parts, with the template variables of a body."""
        return self.template.render(
            with_text_of_tools(self.template, self.format, messages, tools),
            tools=tools if self.template.takes_tools else (),
            add_generation_prompt=wants_reply,
            kwargs=self.variables(body),
            only_text=only_text,
            keeps_added=keeps_added,
        )

    def variables(self, body: ChatBody) -> dict[str, Any]:
        """Return the template variables that a request sets, in addition to the server's."""
        kwargs = dict(self._settings.template_kwargs)
        if not self._settings.reasoning:
            kwargs["enable_thinking"] = False
        n_tokens = _budget_tokens(body)
        is_off = n_tokens == 0 or (n_tokens < 0 and self._settings.reasoning_budget == 0)
        if is_off or body.reasoning_effort == "none":
            kwargs["enable_thinking"] = False
        elif body.reasoning_effort:
            kwargs["reasoning_effort"] = body.reasoning_effort
        return kwargs | (body.chat_template_kwargs or {})

    def reasoning_open(self, body: ChatBody, prompt: str) -> str:
        """Return the end of the prompt from the tag that opens the reply's reasoning; empty if none is open.

        Only the generation prompt and a continued message are searched, since earlier messages may mention tags.
        """
        tags, last = self.format.reasoning, body.messages[-1]
        if tags is None or last.get("role") != "assistant" or not wants_reply(body):
            return self.format.reasoning_open_at(prompt)
        message = clean_message(last, len(body.messages) - 1)
        continued = joined(message["content"], "\n\n") or message.get("reasoning_content", "")
        before = prompt.removesuffix(continued)
        end = self.format.reasoning_open_at(before) + prompt[len(before) :]
        start = end.rfind(tags.start)
        return end[start:] if start > end.rfind(tags.end) else ""


def conversation_branch(template: ChatTemplate, body: ChatBody) -> str:
    """Return a digest of a conversation's start: its tools, and its messages up to the first user message.

    Later turns of a conversation have the same start; other conversations of the session have another.
    """
    opening = list(takewhile(lambda message: message["role"] != "assistant", body.messages))
    first = next((i for i, message in enumerate(opening) if message["role"] == "user"), len(opening))
    cleaned = [clean_message(message, index) for index, message in enumerate(opening[: first + 1])]
    start = without_volatile(template.volatile, cleaned)
    return hashlib.blake2b(msgspec.json.encode((body.tools, start), order="sorted"), digest_size=16).hexdigest()


def _budget_tokens(body: ChatBody) -> int:
    """Return the reasoning budget of a request in tokens; -1 if it sets none."""
    given = (body.reasoning_budget_tokens, body.thinking_budget_tokens)
    return next((n for n in given if n is not None), -1)


def wants_reply(body: ChatBody) -> bool:
    """Return True if the prompt ends where the assistant's reply begins, or where its last message continues."""
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        refuse_field("continue_final_message", "and 'add_generation_prompt' exclude each other")
    if body.messages[-1]["role"] != "assistant":
        refuse_field("continue_final_message", "needs a last message by the assistant")
    return True


def checked_messages(body: ChatBody) -> list[dict[str, Any]]:
    """Return the messages; raises `InvalidRequestError` for an unknown role."""
    for i, message in enumerate(body.messages):
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            refuse_field(f"messages[{i}].role", f"must be one of {', '.join(sorted(_ROLES))}")
    return body.messages


def with_text_of_tools(
    template: ChatTemplate,
    format_: Format,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> Sequence[Mapping[str, Any]]:
    """Return messages with the tools and calls that the template ignores as text; unchanged if there are none.

    Calls are written as models of the format write them. Raises `InvalidRequestError` for invalid messages.
    """
    adds_tools = bool(tools) and not template.takes_tools
    has_calls = any(
        isinstance(each, Mapping) and (each.get("tool_calls") or each.get("function_call")) for each in messages
    )
    adds_calls = has_calls and not template.takes_calls
    if not (adds_tools or adds_calls):
        return messages
    conversation = [clean_message(message, index) for index, message in enumerate(messages)]
    if adds_calls:
        conversation = [_with_calls(message, format_) for message in conversation]
    if not adds_tools:
        return conversation
    # Removed here, because it will not be at the start of the message any more.
    return _with_tools(without_volatile(template.volatile, conversation), format_, tools)


def _with_calls(message: Message, format_: Format) -> Message:
    calls = message.pop("tool_calls", ())
    if not calls:
        return message
    rendered = format_.render([_call(call) for call in calls])
    text = joined(message["content"], "\n")
    return {**message, "content": f"{text}\n{rendered}" if text else rendered}


def _call(call: Message) -> ToolCall:
    arguments = call["function"]["arguments"]
    if not is_object(arguments):
        arguments = json.dumps(parsed_arguments(arguments), ensure_ascii=False)
    return ToolCall(call["function"]["name"], arguments, call.get("id"))


def _with_tools(conversation: Conversation, format_: Format, tools: Sequence[Mapping[str, Any]]) -> Conversation:
    """Add a description of the tools at the start of the conversation's system message."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join(
        [_INTRODUCTION, *lines, "To call a function, reply with nothing but this form:", format_.render([_EXAMPLE])]
    )
    if conversation and conversation[0]["role"] in SYSTEM_ROLES:
        first, *rest = conversation
        return [{**first, "content": f"{text}\n\n{joined(first['content'], chr(10))}"}, *rest]
    return [{"role": "system", "content": text}, *conversation]
