"""Conversations in the language of the trained models, as the prompts of their turns."""

from __future__ import annotations

from dataclasses import replace

from bench.demo.chat_template import CHAT_TEMPLATE
from bench.demo.corpus import Dialogue, held_out
from llamaslot.text.template import ChatTemplate
from tests.text.rendering import rendered

TEMPLATE = ChatTemplate(CHAT_TEMPLATE, bos_token="", eos_token="")


def dialogues(n: int, seed: int, filler_tokens: int = 0) -> list[Dialogue]:
    """Return `n` dialogues, each followed by its twin."""
    return [each for d in held_out(n // 2, seed, filler_tokens) for each in (d, twin(d))]


def turns(dialogue: Dialogue) -> list[str]:
    """Return the prompt of every turn."""
    messages = dialogue.messages
    return [rendered(TEMPLATE, messages[: i + 1]) for i, m in enumerate(messages) if m["role"] == "user"]


def forked(dialogue: Dialogue, question: str) -> str:
    """Return the last prompt of a dialogue with another question in it."""
    return rendered(TEMPLATE, [*dialogue.messages[:-1], {"role": "user", "content": question}])


def twin(dialogue: Dialogue) -> Dialogue:
    """Return the same conversation about another value of the same form."""
    other = "".join(
        chr(97 + (ord(c) - 97 + 11) % 26) if c.islower() else str((int(c) + 3) % 10) if c.isdigit() else c
        for c in dialogue.value
    )
    messages = [{**m, "content": m["content"].replace(dialogue.value, other)} for m in dialogue.messages]
    return replace(dialogue, messages=messages, value=other, answer=dialogue.answer.replace(dialogue.value, other))
