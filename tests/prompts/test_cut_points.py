"""Digests of texts tell apart whatever is tokenized differently, and texts are divided at their cut points only."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from llamaslot.base.commands import TextPart
from llamaslot.prompts.cut_points import MARKER, TextScanner, n_characters

START, END = "<|im_start|>", "<|im_end|>"
SCANNER = TextScanner((START, END, "<|im"), (START, END, "<|im", "<|strips|>"))

pieces = st.lists(st.sampled_from([START, END, "<|im", "a", "b\n", " ", "é", "<|", "\ud800"]), max_size=8)
parts = st.lists(st.builds(TextPart, pieces.map("".join), special=st.booleans()), min_size=1, max_size=4).map(tuple)


def text(parts: tuple[TextPart, ...]) -> str:
    return "".join(part.text for part in parts)


def user(content: str) -> str:
    return f"{START}user\n{content}{END}\n{START}assistant\n"


def offsets(*prompt: TextPart) -> list[int]:
    """Cut points in characters of the whole text."""
    text = SCANNER.scan(prompt, "")
    return [n_characters(text.data[: cut.at]) for cut in text.cut_points]


def test_cut_points_are_before_parsed_control_tokens_but_never_before_all_text() -> None:
    before = f"{START}user\nsay {END}"
    prompt = (TextPart(f"{START}user\nsay "), TextPart(END, special=False), TextPart(f"{END}\n{START}x{END}"))
    assert offsets(*prompt) == [len(before), len(f"{before}{END}\n"), len(f"{before}{END}\n{START}x")]


def test_there_is_no_cut_point_before_other_control_tokens() -> None:
    assert offsets(TextPart(f"a<|strips|>b{END}")) == [len("a<|strips|>b")]
    assert SCANNER.has_control_token("a<|strips|>")


def test_the_longest_control_token_is_found() -> None:
    assert offsets(TextPart(f"a<|im{END}")) == [1, 5]


@given(parts, pieces.map("".join), st.text(max_size=5))
def test_a_reply_has_the_digest_of_the_cut_point_behind_it_when_it_comes_back(
    prompt: tuple[TextPart, ...], reply: str, salt: str
) -> None:
    prompt = tuple(part for part in prompt if part.text) or (TextPart(""),)
    *front, last = prompt
    assume(text(prompt) + reply)
    begun = last.text if last.special else ""
    assume(not SCANNER.has_control_token(begun + reply, len(begun)))
    if last.special:
        again = (*front, TextPart(last.text + reply + END + "\n"))
    else:
        again = (*prompt, TextPart(reply + END + "\n"))
    scanned = SCANNER.scan(prompt, salt)
    digests = [cut.digest for cut in SCANNER.scan(again, salt).cut_points]
    assert scanned.digest_with(reply) in digests
    assert scanned.digest_with(reply) in digests, "the first call changed the digest"


@given(parts, parts, st.booleans())
def test_cut_points_have_equal_digests_only_if_all_text_before_them_is_equal(
    a: tuple[TextPart, ...], b: tuple[TextPart, ...], same_salt: bool
) -> None:
    texts: dict[bytes, object] = {}
    for salt, prompt in (("s", a), ("s" if same_salt else "t", b)):
        scanned = SCANNER.scan(prompt, salt)
        for cut in scanned.cut_points:
            before = (salt, scanned.parts(0, cut.at))
            assert texts.setdefault(cut.digest, before) == before


@given(parts)
def test_parts_between_cut_points_put_together_are_the_prompt(prompt: tuple[TextPart, ...]) -> None:
    scanned = SCANNER.scan(prompt, "")
    assert scanned.parts() == [
        TextPart(part.text.encode(errors="replace").decode(), special=part.special) for part in prompt if part.text
    ]
    for i, later in enumerate(scanned.cut_points):
        rest = scanned.parts(later.at)
        assert rest[0].special
        assert rest[0].text.startswith((START, END, "<|im"))
        for start in (0, *(cut.at for cut in scanned.cut_points[: i + 1])):
            between = scanned.parts(start, later.at)
            assert text((*between, *rest)) == text(tuple(scanned.parts(start)))
            assert all(part.text for part in between)


def test_a_control_token_that_begins_before_the_reply_is_found() -> None:
    assert SCANNER.has_control_token("<|im_end" + "|>", len("<|im_end"))
    assert not SCANNER.has_control_token(user("x") + "fine", len(user("x")))


@given(parts)
def test_there_is_a_marker_before_each_parsed_control_token(prompt: tuple[TextPart, ...]) -> None:
    data = SCANNER.scan(prompt, "").data
    assert data.replace(MARKER, b"") == text(prompt).encode(errors="replace")
    assert data.count(MARKER) == sum(
        len(re.findall(r"<\|im_start\|>|<\|im_end\|>|<\|strips\|>|<\|im", part.text))
        for part in prompt
        if part.special
    )


@given(parts, st.data())
def test_parts_from_an_offset_are_the_rest_with_their_kinds(
    prompt: tuple[TextPart, ...], data: st.DataObject
) -> None:
    text = SCANNER.scan(prompt, "")
    at = data.draw(st.integers(0, len(text.data)))
    assume(at == len(text.data) or text.data[at] & 0xC0 != 0x80)
    rest = text.parts(at)
    assert all(part.text for part in rest)
    assert "".join(part.text for part in rest).encode() == text.data[at:].replace(MARKER, b"")
    kinds = [part.special for part in prompt if part.text]
    assert [part.special for part in rest] == kinds[len(kinds) - len(rest) :]


@pytest.mark.parametrize(
    ("before", "rest", "is_cut"),
    [
        ("a", START, True),
        ("a", "<|strips|>", False),
        ("a", " b", True),
        ("a.", "  b", True),
        ("a ", " b", False),
        ("a\n", " b", False),
        ("a\u00a0", " b", False),
        ("a\u3000", " b", False),
        ("日", " b", True),
        ("a", "\n", False),
        ("a", "b", False),
        ("", "b", True),
        ("b", "", True),
    ],
)
def test_approximate_cuts_are_before_exact_control_tokens_and_words(before: str, rest: str, is_cut: bool) -> None:
    data = SCANNER.scan([TextPart(before), TextPart(rest)], "").data
    assert SCANNER.is_approximate_cut(data, len(before.encode())) is is_cut


def test_there_is_no_approximate_cut_before_a_control_token_written_out_as_plain_text() -> None:
    data = SCANNER.scan([TextPart("a"), TextPart(START, special=False)], "").data
    assert not SCANNER.is_approximate_cut(data, 1)
