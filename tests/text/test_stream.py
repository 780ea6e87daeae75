"""Held against an oracle that sees the whole text at once, for any way of cutting it into pieces."""

from __future__ import annotations

import codecs
from itertools import pairwise
from typing import SupportsIndex

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaslot.text.stream import TextStream

ATOMS = [b"a", b"b", "é".encode(), "€".encode(), "🙂".encode(), b"\xff", b"\xe2", b"\x9f", b"\xf0\x9f", b"\xed\xa0"]
DATA = st.lists(st.sampled_from(ATOMS), max_size=30).map(b"".join)
STOPS = st.lists(st.text("abé🙂�", max_size=5), max_size=4)


def oracle(data: bytes, stops: list[str]) -> tuple[str, str | None]:
    """The text before the first complete stop string, and that stop string."""
    text = data.decode(errors="replace")
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@st.composite
def cut_data(draw: st.DrawFn) -> list[bytes]:
    data = draw(DATA)
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=10))
    edges = [0, *sorted(cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(pieces=cut_data(), stops=STOPS)
@example(pieces=[b"aab", b"aaab"], stops=["aaab"])
@example(pieces=[b"abab", b"b"], stops=["ababb", "bb"])
def test_the_text_does_not_depend_on_the_pieces(pieces: list[bytes], stops: list[str]) -> None:
    stream = TextStream(stops)

    text = "".join([stream.push(piece) for piece in pieces]) + stream.flush()

    assert (text, stream.stopped) == oracle(b"".join(pieces), stops)


@given(pieces=cut_data(), stops=STOPS)
def test_no_more_is_held_back_than_a_stop_string_could_begin_in(pieces: list[bytes], stops: list[str]) -> None:
    stream = TextStream(stops)
    sent, seen = "", b""
    for piece in pieces:
        sent += stream.push(piece)
        seen += piece
        if stream.stopped is not None:
            break
        text = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(seen)
        assert text.startswith(sent)
        starts = range(len(text))
        possible = [start for start in starts if any(stop.startswith(text[start:]) for stop in stops)]
        assert len(sent) == min(possible, default=len(text))


@pytest.mark.parametrize(
    ("stops", "pieces", "sent", "stopped"),
    [
        (["</s>"], [b"a<", b"/", b"b"], ["a", "", "</b"], None),
        (["</s>"], [b"a</", b"s>b", b"c"], ["a", "", ""], "</s>"),
        (["bc", "abcd"], [b"abcd"], ["a"], "bc"),
        (["c", "abc"], [b"ab", b"c"], ["", ""], "abc"),
        (["\n\n"], ["é\n".encode()[:1], "é\n".encode()[1:], b"\n"], ["", "é", ""], "\n\n"),
        ([], ["🙂".encode()[:3], "🙂".encode()[3:]], ["", "🙂"], None),
        ([""], [b"a"], ["a"], None),
    ],
    ids=["false alarm", "cut in two", "first complete", "longest of equals", "multibyte", "no stops", "empty stop"],
)
def test_each_push(stops: list[str], pieces: list[bytes], sent: list[str], stopped: str | None) -> None:
    stream = TextStream(stops)

    assert [stream.push(piece) for piece in pieces] == sent
    assert stream.stopped == stopped


def indented(text: str, n: int) -> str:
    """The text before a line, but for the first, that begins with fewer than `n` spaces and tabs; they are kept."""
    first, *others = text.split("\n")
    for i, line in enumerate(others, start=1):
        blank = line[: len(line) - len(line.lstrip(" \t"))]
        if len(blank) < n and (blank != line or i < len(others)):
            return "\n".join([first, *others[: i - 1], blank])
    return text


@given(
    pieces=st.lists(st.text("a \t\n", max_size=4).map(str.encode), max_size=20),
    stops=st.lists(st.text("a \n", max_size=3), max_size=2),
    n=st.integers(0, 4),
)
@example(pieces=[b"a\n", b"  ", b"a\n", b" ", b"a"], stops=[], n=2)
@example(pieces=[b"a\n", b"aba"], stops=["b"], n=1)
@example(pieces=[b"a\n", b"  \n", b"\n"], stops=["\n\n"], n=1)
def test_the_text_ends_before_a_line_that_is_not_indented(pieces: list[bytes], stops: list[str], n: int) -> None:
    stream = TextStream(stops, n)
    parts = []
    for piece in pieces:
        parts.append(stream.push(piece))
        if stream.is_cut or stream.stopped is not None:
            break
    text = "".join([*parts, stream.flush()])
    unlimited, stopped = oracle(b"".join(pieces), stops)
    limited = indented(unlimited, n) if n else unlimited
    assert text == limited
    assert stream.is_cut == (limited != unlimited)
    assert stream.stopped == (None if stream.is_cut else stopped)
    assert not (stream.is_cut or stopped) or stream.push(b"a\n  a") == ""


def test_flush_gives_what_was_held_back_once() -> None:
    stream = TextStream(["STOP"])

    assert stream.push(b"ST\xe2\x82") == ""
    assert stream.flush() == "ST�"
    assert stream.flush() == ""


def test_a_long_stop_string_costs_no_second_look() -> None:
    """Each character of a stop string of 20,000 is compared about once, not once per push."""
    stop = "a" * 20_000 + "b"
    compared = 0

    class Counting(str):
        __slots__ = ()

        def __getitem__(self, key: SupportsIndex | slice) -> str:
            nonlocal compared
            compared += 1
            return str.__getitem__(self, key)

    stream = TextStream([Counting(stop)])
    compared = 0
    for _ in range(20_000):
        assert stream.push(b"a") == ""
    assert stream.push(b"ab") == "a"

    assert stream.stopped == stop
    assert compared < 4 * 20_000
