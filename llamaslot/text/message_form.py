"""The form in which a chat template reads contents and reasoning, found by rendering small conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llamaslot.text.conversation import Conversation, Message, joined

Attempt: TypeAlias = Callable[[Conversation, Sequence[Message]], str]
"""Renders a conversation with tools; returns an empty text if the template refuses them."""


class MessageForm:
    """The form that a template reads: content as text or parts, and reasoning in a field or a part."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._reads_thinking = self._takes_either = self._thinks_in_parts = False
        text = "a text to be found again"
        as_text = attempt([{"role": "user", "content": text}], ())
        as_parts = attempt([{"role": "user", "content": [{"type": "text", "text": text}]}], ())
        self._wants_parts = text not in as_text and text in as_parts
        self._takes_parts = self._wants_parts or (text in as_text and as_text == as_parts)
        self._text_roles: set[str] = set()

    def shaped(self, message: Message) -> Message:
        """Return the message in the form that the template reads."""
        content, reads_text = message["content"], message["role"] in self._text_roles
        if isinstance(content, str) and self._wants_parts and not reads_text:
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, str) and (reads_text or not self._takes_parts):
            content = joined(content, "\n")
        shaped = {**message, "content": content}
        if "reasoning_content" not in message:
            return shaped
        if self._reads_thinking:
            shaped["thinking"] = message["reasoning_content"]
            if "tool_calls" in message and self._takes_either:
                # The template accepts only one of them with a call, so both become the reasoning.
                both = message["reasoning_content"], joined(message["content"], "\n")
                shaped |= {"thinking": "\n\n".join(filter(None, both)), "content": ""}
        # Ministral 3 refuses such a part in a question, and prints the list in a result.
        elif self._thinks_in_parts and message["role"] in ("system", "assistant"):
            texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            shaped["content"] = [{"type": "thinking", "thinking": message["reasoning_content"]}, *texts]
        return shaped

    def probe_parts(self, conversation: Conversation, tool: Message) -> None:
        """Find out for which roles the template reads only text.

        GLM 4.6's and Mistral's templates print the parts of results as Python objects, and some templates leave out
        all parts but the first in other roles. Between texts of parts a template may write a space or newline, but
        nothing else.
        """
        texts = ["a part to be found", "and another one"]
        shaped = [self.shaped(message) for message in conversation]

        def attempt(index: int, content: str | list[Message]) -> str:
            changed = {**shaped[index], "content": content}
            return self._attempt([*shaped[:index], changed, *shaped[index + 1 :]], [tool])

        for index, message in enumerate(conversation if self._takes_parts else ()):
            as_parts = attempt(index, [{"type": "text", "text": text} for text in texts])
            as_texts = [attempt(index, separator.join(texts)) for separator in ("", " ", "\n")]
            if as_parts not in as_texts and all(text in as_texts[0] for text in texts):
                self._text_roles.add(message["role"])

    def probe_reasoning(self, calling: Conversation, tool: Message) -> None:
        """Find out where the template reads the reasoning before a call, or before a reply without calls.

        gpt-oss and LFM 2.5 read the field `thinking`, and gpt-oss refuses a call that also has text. Ministral 3
        reads a part of the content; a template that prints any kind of part does not count.
        """
        thought = "a thought to be found"
        question, call, result = map(self.shaped, calling)
        reply = self.shaped({"role": "assistant", "content": "!"})

        def is_read(**changes: Any) -> bool:
            """Return True if the thought is in the prompt of a call, or of a last reply, that has it."""
            called = self._attempt([question, call | changes, result], [tool])
            return thought in called or thought in self._attempt([question, reply | changes], ())

        is_thinking, is_reasoning = is_read(thinking=thought), is_read(reasoning_content=thought)
        self._reads_thinking = is_thinking and not is_reasoning
        beside = self.shaped({**calling[1], "content": "?"}) | {"thinking": thought}
        self._takes_either = self._reads_thinking and not self._attempt([question, beside, result], [tool])
        if not is_thinking and not is_reasoning:
            as_part, as_other = (
                is_read(content=[{"type": kind, "thinking": thought}]) for kind in ("thinking", "a_type_of_no_part")
            )
            self._thinks_in_parts = as_part and not as_other
