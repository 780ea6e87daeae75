"""Ends of a text that depend on its lines: `n_indent`, `t_max_predict_ms`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from llamaslot.base.commands import InspectEngine
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.sampling import Sampling
from tests.engine.harness import Harness, run_ahead, running
from tests.fake_backend import FakeBackend
from tests.text.test_stream import indented

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)


def poet(n_slots: int = 4) -> FakeBackend:
    """A backend that generates lines, some of them indented."""
    backend = FakeBackend(n_slots=n_slots)
    backend.alphabet = b"ab  \n"
    return backend


async def finished(harness: Harness, name: str, prompt: str, **fields: object) -> Finished:
    end = await harness.submit(name, prompt, sampling=ENDLESS, **fields)
    assert isinstance(end, Finished)
    return end


@pytest.mark.slow
@pytest.mark.parametrize("n_indent", [0, 1, 2, 3])
async def test_a_generation_ends_before_a_line_that_is_not_indented(n_indent: int) -> None:
    async with running(poet()) as harness:
        n_cut = 0
        for prompt in "abcdefgh":
            free = f"free {prompt}"
            await finished(harness, free, prompt, max_tokens=60)
            end = await finished(harness, prompt, prompt, max_tokens=60, n_indent=n_indent)
            expected = indented(harness.text(free), n_indent) if n_indent else harness.text(free)
            assert harness.text(prompt) == expected
            assert (end.reason, end.stopping_word, end.truncated) == ("limit", "", False)
            is_cut = expected != harness.text(free)
            assert (end.progress.n_generated < 60) == is_cut
            n_cut += is_cut
        assert (n_cut > 0) == (n_indent > 0)


async def test_a_generation_ends_with_a_line_after_its_time() -> None:
    clock = itertools.count()
    async with running(poet(), clock=lambda: float(next(clock))) as harness:
        await finished(harness, "free", "abc", max_tokens=60)
        free = harness.text("free")
        assert free.count("\n") > 3
        for name, limit, expected in (
            ("at once", 1, free[: free.index("\n", 1) + 1]),
            ("never", 10**9, free),
            ("off", 0, free),
            ("also off", -1, free),
        ):
            end = await finished(harness, name, "abc", max_tokens=60, t_max_predict_ms=limit)
            assert (harness.text(name), end.reason) == (expected, "limit"), name


@pytest.mark.parametrize("n_ahead", [0, 1, 2, 60])
@pytest.mark.parametrize("fields", [{}, {"cache_prompt": False}, {"cache_salt": "a tenant"}], ids=str)
async def test_a_text_ends_at_the_same_place_though_further_steps_are_on_the_way(
    fields: dict[str, Any], n_ahead: int
) -> None:
    """Of what they compute nothing is sent or counted, and later requests are not disturbed by it."""
    clock = itertools.count()
    async with running(poet(), clock=lambda: float(next(clock))) as harness:
        run_ahead(harness, n_ahead)
        await finished(harness, "free", "abc", max_tokens=60, **fields)
        free = harness.text("free")
        lines = free[: free.index("\n", 1) + 1]
        in_time, never = {"t_max_predict_ms": 1}, ("no such text",)
        cases: dict[str, tuple[dict[str, Any], str]] = {
            "stop": ({"stop": (free[20:26],)}, free[: free.index(free[20:26])]),
            "indent": ({"n_indent": 1, "stop": never}, indented(free, 1)),
            "time": (in_time | {"stop": never}, lines),
            "stop before the time": (in_time | {"stop": (lines[-3:],)}, free[: free.index(lines[-3:])]),
            "indent and time": (in_time | {"n_indent": 1}, min(lines, indented(free, 1), key=len)),
        }
        for name, (ends, expected) in cases.items():
            end = await finished(harness, name, "abc", max_tokens=60, **ends, **fields)
            assert (harness.text(name), end.reason) == (expected, "word" if name.startswith("stop") else "limit")
            assert len(expected) <= end.progress.n_generated < 60
            # It is answered once no step computes the request any more.
            await harness.ask(InspectEngine())
            assert not harness.engine.scheduler.running
            if fields.get("cache_prompt") is False:
                assert not harness.engine.scheduler.cache.cells.used
            later = await finished(harness, f"after {name}", "abc" + free[:40], max_tokens=20, **fields)
            assert harness.text(f"after {name}") == free[40:60]
            assert bool(later.progress.n_cached) == (fields.get("cache_prompt") is not False)


@pytest.mark.parametrize("n_warm", [0, 100, 130])
async def test_the_progress_of_a_prompt_is_reported_before_and_after_each_step(n_warm: int) -> None:
    async with running(FakeBackend(n_ctx=512, n_ubatch=32)) as harness:
        prompt = "x" * 150
        if n_warm:
            await harness.submit("before", prompt[:n_warm], max_tokens=1)
        await harness.submit("r", prompt, return_progress=True)
        outputs = [event for event in harness.events["r"] if isinstance(event, Output)]
        reports = [event.prefill for event in outputs if event.prefill is not None]
        n_prompt = outputs[0].progress.n_prompt
        n_cached = n_warm + 1 if n_warm else 0
        assert {report.n_cached for report in reports} == {n_cached}
        expected = [*range(n_cached, n_prompt, 32), n_prompt]
        assert [report.n_processed for report in reports] == expected
        assert [event.prefill is None for event in outputs] == [False] * len(reports) + [True] * (
            len(outputs) - len(reports)
        ), "all before the first text"
        assert all(event.content == "" and event.tokens == () for event in outputs[: len(reports)])
        times = [event.progress.prompt_ms for event in outputs[: len(reports)]]
        assert times[0] == reports[0].ms == 0 < times[1]
        assert times == sorted(times)
        await harness.submit("without", prompt)
        assert all(event.prefill is None for event in harness.events["without"] if isinstance(event, Output))
