"""Names of texts tell apart whatever would be tokenized differently, and a reply gets the name it comes back by."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from llamaslot.base.commands import TextPart
from llamaslot.prompts.cuts import CONTROL, Cutter, parts_between, parts_from

START, END = "<|im_start|>", "<|im_end|>"
CUTTER = Cutter((START, END, "<|im"), (START, END, "<|im", "<|strips|>"))

pieces = st.lists(st.sampled_from([START, END, "<|im", "a", "b\n", " ", "é", "<|", "\ud800"]), max_size=8)
parts = st.lists(st.builds(TextPart, pieces.map("".join), special=st.booleans()), min_size=1, max_size=4).map(tuple)


def text(parts: tuple[TextPart, ...]) -> str:
    return "".join(part.text for part in parts)


def user(content: str) -> str:
    return f"{START}user\n{content}{END}\n{START}assistant\n"


def test_cuts_are_before_control_tokens_that_are_parsed_and_never_before_all_text() -> None:
    prompt = (TextPart(f"{START}user\nsay "), TextPart(END, special=False), TextPart(f"{END}\n{START}x{END}"))
    cuts, _ = CUTTER.cuts(prompt, "")
    assert [(cut.part, cut.at) for cut in cuts] == [(2, 0), (2, len(END) + 1), (2, len(END + START) + 2)]


def test_there_is_no_cut_before_a_control_token_that_is_no_boundary() -> None:
    cuts, _ = CUTTER.cuts((TextPart(f"a<|strips|>b{END}"),), "")
    assert [cut.at for cut in cuts] == [len("a<|strips|>b")]
    assert CUTTER.spells_control("a<|strips|>")


def test_the_longest_control_token_counts() -> None:
    cuts, _ = CUTTER.cuts((TextPart(f"a<|im{END}"),), "")
    assert [cut.at for cut in cuts] == [1, 5]


@given(parts, pieces.map("".join), st.text(max_size=5))
def test_a_reply_has_the_name_of_the_cut_behind_it_when_it_comes_back(
    prompt: tuple[TextPart, ...], reply: str, salt: str
) -> None:
    prompt = tuple(part for part in prompt if part.text) or (TextPart(""),)
    _, name = CUTTER.cuts(prompt, salt)
    *front, last = prompt
    assume(text(prompt) + reply)
    assume(not CUTTER.spells_control((last.text if last.special else "") + reply, len(last.text) * last.special))
    if last.special:
        again = (*front, TextPart(last.text + reply + END + "\n"))
    else:
        again = (*prompt, TextPart(reply + END + "\n"))
    cuts, _ = CUTTER.cuts(again, salt)
    before = name.value
    assert name.extended(reply) in [cut.name for cut in cuts]
    assert name.value == before, "the name of the prompt has changed"


@given(parts, parts, st.booleans())
def test_cuts_have_the_same_name_only_where_all_in_front_of_them_is_the_same(
    a: tuple[TextPart, ...], b: tuple[TextPart, ...], same_salt: bool
) -> None:
    fronts: dict[bytes, object] = {}
    for salt, prompt in (("s", a), ("s" if same_salt else "t", b)):
        for cut in CUTTER.cuts(prompt, salt)[0]:
            before = [
                (part.text.encode(errors="replace"), part.special) for part in prompt[: cut.part] if part.text
            ]
            own = prompt[cut.part]
            if cut.at:
                before.append((own.text[: cut.at].encode(errors="replace"), own.special))
            assert fronts.setdefault(cut.name, (salt, before)) == (salt, before)


@given(parts)
def test_a_prompt_falls_apart_at_its_cuts_and_nowhere_else(prompt: tuple[TextPart, ...]) -> None:
    cuts, _ = CUTTER.cuts(prompt, "")
    for i, later in enumerate(cuts):
        rest = parts_from(prompt, later)
        assert CUTTER.spells_control(rest[0].text[: len(END) + len(START)])
        for earlier in (None, *cuts[: i + 1]):
            between = parts_between(prompt, earlier, later)
            assert text((*between, *rest)) == text(tuple(parts_from(prompt, earlier)))
            assert all(part.text for part in between) or any(not part.text for part in prompt)
    assert parts_from(prompt, None) == list(prompt)


def test_a_control_token_is_noticed_also_where_the_reply_only_ends_it() -> None:
    assert CUTTER.spells_control("<|im_end" + "|>", len("<|im_end"))
    assert not CUTTER.spells_control(user("x") + "fine", len(user("x")))


@given(parts)
def test_a_marked_text_has_a_mark_before_each_control_token_that_is_parsed(prompt: tuple[TextPart, ...]) -> None:
    marked = CUTTER.marked(prompt)
    assert marked.replace(CONTROL, b"") == text(prompt).encode(errors="replace")
    assert marked.count(CONTROL) == sum(
        len(re.findall(r"<\|im_start\|>|<\|im_end\|>|<\|strips\|>|<\|im", part.text))
        for part in prompt
        if part.special
    )


@given(parts, st.data())
def test_what_lies_behind_a_place_is_the_rest_with_its_kinds(
    prompt: tuple[TextPart, ...], data: st.DataObject
) -> None:
    marked = CUTTER.marked(prompt)
    at = data.draw(st.integers(0, len(marked)))
    assume(at == len(marked) or marked[at] & 0xC0 != 0x80)
    rest = CUTTER.parts_behind(prompt, at)
    assert all(part.text for part in rest)
    assert "".join(part.text for part in rest).encode() == marked[at:].replace(CONTROL, b"")
    kinds = [part.special for part in prompt if part.text]
    assert [part.special for part in rest] == kinds[len(kinds) - len(rest) :]


@pytest.mark.parametrize(
    ("front", "rest", "is_seam"),
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
def test_seams_are_before_boundaries_and_words(front: str, rest: str, is_seam: bool) -> None:
    marked = CUTTER.marked([TextPart(front), TextPart(rest)])
    assert CUTTER.is_seam(marked, len(front.encode())) is is_seam


def test_a_boundary_that_is_only_spelled_is_no_seam() -> None:
    assert not CUTTER.is_seam(CUTTER.marked([TextPart("a"), TextPart(START, special=False)]), 1)
