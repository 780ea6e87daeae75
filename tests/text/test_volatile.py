"""Volatile text is removed if the server was told to, and nothing else is."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from llamaslot.base.errors import ConfigError
from llamaslot.text.template import ChatTemplate
from llamaslot.text.volatile import pattern
from tests.text.rendering import rendered

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
USER = {"role": "user", "content": "hi"}
SOURCE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def prompt(*messages: dict[str, Any], words: str = "claude-code") -> str:
    before = copy.deepcopy(messages)
    text = rendered(ChatTemplate(SOURCE, bos_token="", eos_token="", volatile=pattern(words)), messages)
    assert messages == before, "the request was changed"
    return text


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_line_is_gone_whatever_its_number_and_the_rest_is_there(role: str) -> None:
    for number in ("fa690", "00000"):
        content = f"{HEADER.replace('fa690', number)}\nYou are helpful."
        assert prompt({"role": role, "content": content}, USER) == "<system>You are helpful.<user>hi"


@pytest.mark.parametrize("content", [HEADER, f"{HEADER}\n", parts(HEADER)])
def test_a_message_that_holds_nothing_else_is_gone(content: Any) -> None:
    assert prompt({"role": "system", "content": content}, USER) == "<user>hi"


def test_a_part_that_holds_nothing_else_is_gone_and_the_others_are_there() -> None:
    messages = {"role": "system", "content": parts(HEADER, "You are helpful.", HEADER)}, USER
    assert prompt(*messages) == prompt(
        {"role": "system", "content": parts("You are helpful.", HEADER)}, USER, words=""
    )


@pytest.mark.parametrize(
    "messages",
    [
        ({"role": "system", "content": f"You are helpful.\n{HEADER}"}, USER),
        ({"role": "user", "content": f"{HEADER}\nhi"},),
        ({"role": "system", "content": "Be kind."}, {"role": "system", "content": f"{HEADER}\nBe."}, USER),
        ({"role": "system", "content": ""}, USER),
        ({"role": "system", "content": "x-anthropic-version: 1"}, USER),
    ],
    ids=["further down", "a user's", "a later message", "empty", "another line"],
)
def test_anything_else_stays(messages: tuple[dict[str, Any], ...]) -> None:
    assert prompt(*messages) == prompt(*messages, words="")


def test_nothing_is_left_out_unless_it_is_asked_for() -> None:
    assert prompt({"role": "system", "content": HEADER}, USER, words="") == f"<system>{HEADER}<user>hi"


def test_an_expression_of_ones_own() -> None:
    message = {"role": "system", "content": "[now 12:00] Be kind."}
    assert prompt(message, USER, words=r"\[now [0-9:]+\] ") == "<system>Be kind.<user>hi"


@pytest.mark.parametrize(("words", "about"), [("claude", None), ("(", "claude-code"), ("x*", "an empty text")])
def test_what_is_no_pattern_is_refused(words: str, about: str | None) -> None:
    if about is None:
        assert pattern(words) is not None
        return
    with pytest.raises(ConfigError, match=about):
        pattern(words)
