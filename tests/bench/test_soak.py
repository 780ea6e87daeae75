"""The soak: what its verdict misses and meets, which replies its clients call unexpected, and a short real run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.client import BenchmarkError
from bench.soak.clients import Load, connected
from bench.soak.run import run
from bench.soak.samples import ENGINE, MIB, PARENT, PROMPTS, Sample
from bench.soak.verdict import FULL_S, growth, verdict
from tests.conftest import LONG


def soaked(change: Callable[[Sample], None] = lambda _: None, seconds: int = FULL_S) -> list[Sample]:
    """Samples of a soak in which nothing grows, each changed by `change`."""
    samples = []
    for t in range(0, seconds + 1, 20):
        process = {"pid": 1, "rss": 100 * MIB + t % 3 * MIB, "descriptors": 20, "threads": 5}
        sample: Sample = {
            "t": float(t),
            "processes": {name: dict(process) for name in (PARENT, PROMPTS, ENGINE)},
            "health_s": 0.01,
            "restarts": 0,
            "tier_bytes": 0,
            "remembered_bytes": 0,
            "corrupt_files": 0,
            "pinned_cells": 0,
            "busy_slots": 0,
        }
        change(sample)
        samples.append(sample)
    return samples


def missed(samples: list[Sample], unexpected: int = 0) -> list[str]:
    """The names of the figures that miss their limits."""
    rows = verdict(samples, samples[::3], samples[-1]["t"], unexpected)
    return [row.name for row in rows if row.met is False]


def more(name: str, figure: str, per_hour: float) -> Callable[[Sample], None]:
    def change(sample: Sample) -> None:
        sample["processes"][name][figure] += int(per_hour * sample["t"] / 3600)

    return change


def test_memory_that_grows_is_missed_after_an_hour() -> None:
    assert missed(soaked()) == []
    assert missed(soaked(more(PARENT, "rss", 30 * MIB))) == ["growth of the parent less its records"]
    assert missed(soaked(more(PARENT, "rss", 15 * MIB))) == []
    assert missed(soaked(more(ENGINE, "rss", 50 * MIB))) == ["growth of the engine less its RAM tier"]
    assert missed(soaked(more(ENGINE, "rss", 50 * MIB), seconds=600)) == [], "it is too short to say"


def test_the_ram_tier_is_no_growth_of_the_engine() -> None:
    def change(sample: Sample) -> None:
        more(ENGINE, "rss", 500 * MIB)(sample)
        sample["tier_bytes"] = 500 * MIB * sample["t"] / 3600

    assert missed(soaked(change)) == []


def test_what_the_server_remembers_is_no_growth_of_the_parent() -> None:
    def change(sample: Sample) -> None:
        more(PARENT, "rss", 50 * MIB)(sample)
        sample["remembered_bytes"] = 50 * MIB * sample["t"] / 3600

    assert missed(soaked(change)) == []


def test_growth_is_that_of_the_last_half_hour_without_peaks() -> None:
    early = [(float(t), 100.0 if t > 1000 else 0.0) for t in range(0, 3600, 10)]
    assert growth(early, 3600) == 0
    assert growth([(t, value + (50 if t == 3590 else 0)) for t, value in early], 3600) == 0
    assert growth([], 3600) is None


def test_memory_is_not_judged_over_a_restart() -> None:
    def change(sample: Sample) -> None:
        more(PARENT, "rss", 100 * MIB)(sample)
        sample["restarts"] = 1

    assert missed(soaked(change)) == []


@pytest.mark.parametrize("name", [PARENT, PROMPTS, ENGINE])
def test_one_more_descriptor_is_missed(name: str) -> None:
    assert missed(soaked(more(name, "descriptors", 3))) == [f"descriptors of the {name} when idle"]


def test_the_figure_of_descriptors_shows_the_medians_that_are_judged() -> None:
    def change(sample: Sample) -> None:
        more(PARENT, "descriptors", 8)(sample)
        if sample["t"] in (1800, 3600):
            sample["processes"][PARENT]["descriptors"] = 90

    samples = soaked(change)
    row = next(row for row in verdict(samples, samples[::3], 3600, 0) if row.name.startswith("descriptors of"))
    assert (row.figure, row.met) == ("25 to 26.5", False)
    short = next(row for row in verdict(samples, samples[:3], 3600, 0) if row.name.startswith("descriptors of"))
    assert (short.figure, short.met) == ("?", None)


def test_a_connection_that_was_closed_once_at_an_idle_point_is_no_growth() -> None:
    def change(sample: Sample) -> None:
        if 600 < sample["t"] < 700:
            sample["processes"][PARENT]["descriptors"] -= 1

    assert missed(soaked(change)) == []


def test_stuck_slots_slow_health_and_unexpected_replies_are_missed() -> None:
    def slow(sample: Sample) -> None:
        sample["health_s"] = 0.6

    def stuck(sample: Sample) -> None:
        sample["busy_slots"] = int(sample["t"] > 3000)

    assert missed(soaked(slow)) == ["/health, 99%"]
    assert missed(soaked(stuck)) == ["idle points with a busy slot or pinned cells"]
    assert missed(soaked(), unexpected=1) == ["unexpected replies"]


async def test_clients_tell_expected_replies_from_others() -> None:
    chunk = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    replies: dict[str, tuple[int, bytes]] = {
        "/whole": (200, b'{"choices":[{"message":{"content":"hi"}}]}'),
        "/streamed": (200, chunk + chunk + b"data: [DONE]\n\n"),
        "/unfinished": (200, chunk),
        "/message": (200, b'data: {"type":"message_stop"}\n\n'),
        "/message-broken-off": (200, b'data: {"type":"error","error":{"type":"api_error"}}\n\n'),
        "/response": (200, b'data: {"type":"response.completed"}\n\n'),
        "/response-of-killed-engine": (200, b'data: {"type":"error","code":"unavailable_error"}\n\n'),
        "/broken-off": (200, chunk + b'data: {"error":{"code":500,"message":"x"}}\n\n'),
        "/full": (429, b"{}"),
        "/failed": (500, b"a bug"),
    }

    async def reply(request: web.Request) -> web.Response:
        status, body = replies[request.path]
        return web.Response(status=status, body=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/{name}", reply)
    async with TestServer(app) as server, connected(str(server.make_url(""))) as session:
        load = Load(session, random.Random(1))
        texts = [await load.post(path, {"stream": path != "/whole"}) for path in replies]
        assert await load.post("/streamed", {"stream": True}, stop_after=1) == "a"
    assert texts == ["hi", "aa", *[""] * 8]
    assert load.outcomes == {
        "whole": 1,
        "streamed": 3,
        "unfinished": 1,
        "status 500": 3,
        "status 429": 1,
        "status 503": 1,
        "disconnected": 1,
    }
    assert [each.partition(":")[0] for each in load.unexpected] == ["unfinished", *["status 500"] * 3]
    assert len(load.take_gaps()) == 1
    assert load.n_active == 0


def test_the_time_is_bounded(tmp_path: Path) -> None:
    for minutes in (0, -1, 1441, float("nan")):
        with pytest.raises(BenchmarkError, match="--minutes"):
            run(minutes=minutes, faults=False, folder=tmp_path, seed=1)


@pytest.mark.skipif(not LONG, reason="takes a minute")
@pytest.mark.parametrize("faults", [False, True])
def test_a_short_soak_of_a_real_server_finds_nothing(tmp_path: Path, faults: bool) -> None:
    assert run(minutes=1 / 3, faults=faults, folder=tmp_path, seed=5) == 0
    lines: list[Any] = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()]
    samples = [line for line in lines if line["kind"] == "sample"]
    assert len(samples) >= 5
    assert sum(line["kind"] == "idle" for line in lines) >= 2
    assert (max(sample["restarts"] for sample in samples) > 0) is faults
    assert max(sample.get("queued", 0) for sample in samples) > 0
    assert any(name.startswith("killed") for name in samples[-1]["outcomes"]) is faults
    assert (tmp_path / "soak.png").stat().st_size > 20_000
