"""The arithmetic of the benchmarks: what is read from a stream, and what tables make of it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from bench import chat, decode
from bench.chat import Turn
from bench.client import BenchmarkError, parse_stream
from bench.decode import Comparison
from bench.report import Summary, decode_rate


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


CLOSING = [
    event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}),
    event(
        {
            "choices": [],
            "usage": {"prompt_tokens": 12, "completion_tokens": 2},
            "timings": {"cache_n": 5, "prompt_n": 7},
        }
    ),
    b"data: [DONE]\n\n",
]


def turn(**changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "conversation": "c",
        "cached": True,
        "repeat": 1,
        "number": 1,
        "ttft": 1.0,
        "total": 2.0,
        "prompt_tokens": 50,
        "new_tokens": 50,
        "computed_tokens": 50,
        "cached_tokens": 0,
    }
    return Turn(**fields | changes)


def test_a_stream_cut_anywhere_gives_the_same_answer() -> None:
    role = event(delta(role="assistant"))
    stream = role + event(delta(content=" grün")) + event(delta(content=" ab")) + b"".join(CLOSING)
    for cut in range(1, len(stream)):
        got = parse_stream(1.0, [(2.0, stream[:cut]), (3.0, stream[cut:])], ended=4.0)
        assert (got.text, got.finish_reason, got.prompt_tokens, got.completion_tokens) == (
            " grün ab",
            "length",
            12,
            2,
        )
        assert (got.computed, got.total, len(got.arrivals)) == (7, 3.0, 2)


def test_times_are_those_of_chunks_with_content() -> None:
    role, first, second = event(delta(role="assistant")), event(delta(content="a")), event(delta(content="b"))
    received = [(1.5, role), (2.0, first[:9]), (2.5, first[9:]), (4.0, second), (5.0, b"".join(CLOSING))]
    got = parse_stream(1.0, received, ended=6.0)
    assert got.arrivals == (2.5, 4.0)
    assert (got.ttft, got.gaps, got.total) == (1.5, [1.5], 5.0)


def test_tool_calls_are_put_together_and_count_as_text() -> None:
    first = {"index": 0, "id": "c0", "type": "function", "function": {"name": "read", "arguments": ""}}
    second = {"index": 1, "id": "c1", "type": "function", "function": {"name": "write", "arguments": "{}"}}
    more = [{"index": 0, "function": {"arguments": text}} for text in ('{"a":', " 1}")]
    events = [event(delta(tool_calls=[part])) for part in (first, *more, second)]
    got = parse_stream(0.0, [(float(i), part) for i, part in enumerate([*events, *CLOSING], 1)], ended=9.0)
    assert [(call["id"], call["function"]) for call in got.tool_calls] == [
        ("c0", {"name": "read", "arguments": '{"a": 1}'}),
        ("c1", {"name": "write", "arguments": "{}"}),
    ]
    assert (got.ttft, len(got.arrivals)) == (1.0, 4)


def test_a_stream_without_its_end_is_refused() -> None:
    pieces = [event(delta(content="a")), *CLOSING[:-1]]
    with pytest.raises(BenchmarkError, match="ended without"):
        parse_stream(0.0, [(1.0, b"".join(pieces))], ended=2.0)


def test_a_server_without_timings_is_measured_all_the_same() -> None:
    got = parse_stream(0.0, [(1.0, event(delta(content="a")) + CLOSING[-1])], ended=2.0)
    assert (got.ttft, got.prompt_tokens) == (1.0, 0)
    with pytest.raises(BenchmarkError, match="does not say"):
        assert got.computed


def test_an_error_in_mid_stream_is_reported() -> None:
    stream = event(delta(content="a")) + event({"error": {"message": "out of luck", "code": 500}})
    with pytest.raises(BenchmarkError, match="out of luck"):
        parse_stream(0.0, [(1.0, stream)], ended=2.0)


def test_summary_gives_median_mean_and_range() -> None:
    assert Summary.of([4.0, 1.0, 1.0]) == Summary(median=1.0, mean=2.0, low=1.0, high=4.0)
    assert Summary.of([0.5, 1.5]).milliseconds() == ("1,000", "1,000", "500-1,500")


def test_ratios_compare_medians_of_the_same_turn_and_of_all_turns() -> None:
    turns = [
        turn(number=number, repeat=repeat, cached=cached, ttft=ttft * repeat, total=ttft * repeat + 2)
        for number, ttfts in ((1, (6.0, 6.0)), (2, (8.0, 2.0)))
        for cached, ttft in zip((False, True), ttfts, strict=True)
        for repeat in (1, 2, 3)
    ]
    rows = {row["turn"]: row for row in chat.summarize(turns)}
    assert rows[1]["ttft_ratio"] == 1.0
    assert rows[2]["ttft_ratio"] == 16 / 4
    assert rows[2]["total_ratio"] == 18 / 6
    assert rows[0]["uncached"]["ttft"] == {"median": 14.0, "mean": 14.0, "low": 6.0, "high": 24.0}


def test_the_chat_table_shows_computed_beside_new_tokens() -> None:
    turns = [
        turn(number=number, cached=cached, computed_tokens=53 + number if cached else 200, new_tokens=53)
        for number in range(1, chat.TURNS + 1)
        for cached in (False, True)
    ]
    output = io.StringIO()
    Console(file=output, width=160).print(chat.table("c", turns))
    lines = [line.replace("│", " ").split() for line in output.getvalue().splitlines()]
    assert ["2", "off", "53", "200"] in [line[:4] for line in lines]
    assert ["on", "53", "55"] in [line[:3] for line in lines]
    assert ["on", "53", "54-57"] in [line[:3] for line in lines]


def test_the_decode_rate_counts_only_while_every_stream_decodes() -> None:
    early, late = (0.0, 1.0, 2.0, 3.0, 4.0), (2.0, 2.5, 3.0, 3.5, 9.0)
    assert decode_rate([early]) == 4 / 4.0
    assert decode_rate([early, late]) == (2 + 3) / 2.0
    with pytest.raises(BenchmarkError, match="side by side"):
        decode_rate([(0.0, 1.0), (2.0, 3.0)])


def test_the_decode_table_gives_the_median_of_paired_ratios() -> None:
    pairs = [Comparison(streams=1, batched_bench=100, engine=99, http=ours) for ours in (80, 90, 95)]
    pairs += [Comparison(streams=8, batched_bench=theirs, engine=90, http=90) for theirs in (100, 90, 200)]
    output = io.StringIO()
    Console(file=output, width=120).print(decode.table(pairs))
    lines = [line.replace("│", " ").split() for line in output.getvalue().splitlines()]
    assert ["1", "100", "99", "0.99", "0.99-0.99", "90", "0.90", "0.80-0.95"] in lines
    assert ["8", "100", "90", "0.90", "0.45-1.00", "90", "0.90", "0.45-1.00"] in lines
