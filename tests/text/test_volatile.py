"""Volatile text of system messages is removed, and nothing else is."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from llamaslot.app.config import Config
from llamaslot.base.errors import ConfigError
from llamaslot.protocol.anthropic import conversation_of
from llamaslot.text.conversation import volatile_pattern
from llamaslot.text.template import ChatTemplate
from tests.text.rendering import rendered

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
USER = {"role": "user", "content": "hi"}
SOURCE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def prompt(*messages: dict[str, Any], words: str = "claude-code") -> str:
    before = copy.deepcopy(messages)
    text = rendered(ChatTemplate(SOURCE, bos_token="", eos_token="", volatile=volatile_pattern(words)), messages)
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
    for given in (
        (HEADER, "You are helpful."),
        ("You are helpful.", HEADER),
        (HEADER, f"{HEADER}\nYou are helpful."),
    ):
        messages = {"role": "system", "content": parts(*given)}, USER
        assert prompt(*messages) == prompt({"role": "system", "content": parts("You are helpful.")}, USER, words="")


@pytest.mark.parametrize(
    "fields",
    [
        "cc_version=2.1.197.8a5; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.197.fff; cc_entrypoint=claude-vscode; cch=00000;",
        "cc_version=2.1.77; cc_entrypoint=sdk-py; cc_workload=cron; cch=1a2b3;",
        "cch=1a2b3;cc_entrypoint=cli;cc_version=2.1.37.0d9",
        "other=1; cc_version=2.1.37.0d9;",
        "cc_version=2.1.37.0d9;",
    ],
)
@pytest.mark.parametrize("after", ["", "\n", "\r\n", " \n\n"])
def test_the_header_with_any_fields_in_any_order(fields: str, after: str) -> None:
    header = f"x-anthropic-billing-header: {fields}{after}"
    for content in (header + "Be kind." if after else header, parts(header, "Be kind.")):
        kind = "<system>Be kind." if after or isinstance(content, list) else ""
        assert prompt({"role": "system", "content": content}, USER) == f"{kind}<user>hi"


def test_the_default_removes_it_from_both_apis_and_off_does_not() -> None:
    volatile = volatile_pattern(Config().drop_volatile)
    assert volatile is not None
    for number in ("8a5", "0d9"):
        header = f"x-anthropic-billing-header: cc_version=2.1.197.{number}; cc_entrypoint=sdk-cli;"
        system = [{"type": "text", "text": header}, {"type": "text", "text": "Be kind."}]
        messages = conversation_of(system, [USER])
        template = ChatTemplate(SOURCE, bos_token="", eos_token="", volatile=volatile)
        assert rendered(template, messages) == "<system>Be kind.<user>hi"
        assert rendered(template, [{"role": "system", "content": system}, USER]) == "<system>Be kind.<user>hi"
    assert volatile_pattern("off") is None


@pytest.mark.parametrize(
    "messages",
    [
        # A half of it would be worse than all of it.
        (
            {"role": "system", "content": "x-anthropic-billing-header: cc_version=2.1 (cli); cch=fa690;\nBe kind."},
            USER,
        ),
        ({"role": "system", "content": f"You are helpful.\n{HEADER}"}, USER),
        ({"role": "user", "content": f"{HEADER}\nhi"},),
        (USER, {"role": "system", "content": f"{HEADER}\nBe."}, USER),
        ({"role": "system", "content": "x-anthropic-billing-header: a line that Claude Code sends"}, USER),
        ({"role": "system", "content": "x-anthropic-billing-header: is cc_version=1; there?"}, USER),
        ({"role": "system", "content": f"Remove {HEADER}"}, USER),
        ({"role": "system", "content": ""}, USER),
        ({"role": "system", "content": "x-anthropic-version: 1"}, USER),
    ],
)
def test_anything_else_stays(messages: tuple[dict[str, Any], ...]) -> None:
    assert prompt(*messages) == prompt(*messages, words="")


def test_nothing_is_left_out_if_it_is_turned_off() -> None:
    assert prompt({"role": "system", "content": HEADER}, USER, words="off") == f"<system>{HEADER}<user>hi"


def test_an_expression_of_ones_own() -> None:
    message = {"role": "system", "content": "[now 12:00] Be kind."}
    assert prompt(message, USER, words=r"\[now [0-9:]+\] ") == "<system>Be kind.<user>hi"


@pytest.mark.parametrize(("words", "about"), [("claude", None), ("(", "claude-code"), ("x*", "an empty text")])
def test_what_is_no_pattern_is_refused(words: str, about: str | None) -> None:
    if about is None:
        assert volatile_pattern(words) is not None
        return
    with pytest.raises(ConfigError, match=about):
        volatile_pattern(words)
