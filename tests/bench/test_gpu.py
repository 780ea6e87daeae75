"""`python -m bench gpu`: verdicts, and steps that fail, take too long, or are done already."""

from __future__ import annotations

import asyncio
import ctypes
import math
import mmap
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import gpu
from bench.__main__ import main
from bench.gpu import DONE, Row, Step
from llamaslot.backend import page_locked
from llamaslot.backend.llama import costs, library
from llamaslot.base.kv_ops import Kv

FACTS: dict[str, Any] = {
    "commit": "c0ffee",
    "gpus": [],
    "settings": {"small": "tiny", "large": "60m", "threads": 1, "scale": 1.0, "tiny": True, "flags": ["-ngl", "0"]},
}


async def unused(_task: gpu.Task) -> None:
    raise AssertionError


def values(title: str, raw: dict[str, Any]) -> list[Row]:
    return [Row(f"{title}, {name}", str(value)) for name, value in raw.items()]


FAKES = tuple(Step(name, 30.0, unused, values, "large") for name in ("first", "failing", "hanging", "last"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder without figures."""
    gpu.begin(tmp_path, FACTS)
    return tmp_path


def script(step: Step, folder: Path) -> list[str]:
    """A command that keeps a figure, and then does what the step's name says."""
    code = f"""
import json, sys, time
content = json.load(open({str(step.file(folder))!r}))
content["raw"]["figure"] = time.time()
json.dump(content, open({str(step.file(folder))!r}, "w"))
if {step.name == "failing"}:
    sys.exit("bench: no such device")
if {step.name == "hanging"}:
    time.sleep(60)
"""
    return [sys.executable, "-c", code]


def test_a_step_that_fails_or_hangs_keeps_its_figures_and_stops_no_other(folder: Path) -> None:
    steps = [Step(**vars(each) | {"limit_s": 3.0 if each.name == "hanging" else 30.0}) for each in FAKES]
    gpu.run_steps(folder, (), 100.0, script, steps)
    ended = {"first": DONE, "failing": "failed: no such device", "hanging": "stopped after 3 s", "last": DONE}
    assert {each.name: gpu.read(each.file(folder))["state"] for each in steps} == ended
    rows = {row.figure: row.verdict for row in gpu.rows(folder, steps) if row.verdict}
    assert rows == {"failing: the rest": "not run", "hanging: the rest": "not run"}
    assert sum(row.figure == "60m, figure" for row in gpu.rows(folder, steps)) == len(steps)


def test_later_calls_run_what_is_missing_or_named(folder: Path) -> None:
    def figures() -> dict[str, float]:
        begun = [each for each in steps if each.file(folder).is_file()]
        return {each.name: gpu.read(each.file(folder))["raw"]["figure"] for each in begun}

    steps = [each for each in FAKES if each.name in ("first", "last")]
    gpu.run_steps(folder, ["first"], 30.0, script, steps)
    before = figures()
    assert before.keys() == {"first"}
    gpu.run_steps(folder, (), 30.0, script, steps)
    both = figures()
    assert both.keys() == {"first", "last"}
    assert both["first"] == before["first"]
    gpu.run_steps(folder, ["first"], 30.0, script, steps)
    assert figures()["first"] > both["first"]


def test_without_time_nothing_is_begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "monotonic", iter((0.0, 85.0, 85.0, 85.0, 85.0, 85.0)).__next__)
    gpu.run_steps(folder, (), 100.0, script, FAKES)
    assert not any(each.file(folder).is_file() for each in FAKES)
    assert [row.verdict for row in gpu.rows(folder, FAKES)] == ["not run"] * len(FAKES)


def test_figures_of_another_commit_are_dropped(folder: Path) -> None:
    file = FAKES[0].file(folder)
    gpu.write(file, {"state": DONE, "raw": {}})
    gpu.begin(folder, FACTS)
    assert file.is_file()
    gpu.begin(folder, FACTS | {"commit": "decaf"})
    assert not file.is_file()


def verdicts(rows: list[Row]) -> dict[str, str]:
    return {row.figure: row.verdict for row in rows}


def test_decode_is_judged_by_both_peers() -> None:
    raw = {"llama-batched-bench 8": [1000, 1010], "llamaslot sampled 8": [900, 960]}
    assert verdicts(gpu.decode_rows("8b", raw)) == {"8b, decode 8, sampled / llama-batched-bench": "met"}
    raw |= {"llama-server sampled 8": [700], "llama-server -bs sampled 8": [961, 900]}
    assert verdicts(gpu.decode_rows("8b", raw))["8b, decode 8, sampled / llama-server -bs"] == "missed"
    raw["llamaslot sampled 8"] = [961]
    assert verdicts(gpu.decode_rows("8b", raw))["8b, decode 8, sampled / llama-server -bs"] == "met"


def test_other_figures_are_judged() -> None:
    raw: dict[str, Any] = {"llama-server": 2.0, "first start": 2.91, "later start": 2.89}
    assert verdicts(gpu.ready_rows("8b", raw)) == {
        "8b, ready: first start": "missed",
        "8b, ready: later start": "met",
    }
    raw = {"bytes": 147_456, "load_us": 22.0, "save_us": 20.0, "first_save_us": 40.0, "prefill_us": 114.0}
    load, save, compute = gpu.kv_rows("8b", raw)
    assert (load.value, load.goal, load.verdict) == ("22.0 ms, 6.7 GB/s", "at most 6.0 ms", "missed")
    assert (save.verdict, compute.value) == ("", "114.0 ms")
    raw = {"ttft": [[0.05, 0.1], [0.04, 0.1]], "cached_tokens": 1200, "prompt_tokens": 1266}
    [row] = gpu.restart_rows("8b", raw)
    assert (row.value, row.verdict) == ("0.45 (45 / 100 ms, 1,200 of 1,266 tokens read)", "met")
    file: dict[str, Any] = {"status": 0, "counts": {"passed": 3, "skipped": 1}, "failed": []}
    raw = {"n_files": 2, "files": {"tests/a.py": file}}
    assert [row.verdict for row in gpu.tests_rows("", raw)] == [""]
    raw["files"]["tests/b.py"] = {"status": -6, "counts": {}, "failed": []}
    assert [row.verdict for row in gpu.tests_rows("", raw)] == ["missed", "missed"]
    raw["files"]["tests/b.py"] = file
    assert [row.verdict for row in gpu.tests_rows("", raw)] == ["met"]


def test_names_of_tests_are_printed_as_they_are(folder: Path) -> None:
    [step] = [each for each in gpu.STEPS if each.name == "tests"]
    file = {"status": 1, "counts": {}, "failed": ["tests/a.py::test_a[tiny-mla]", "tests/a.py::test_a[/]"]}
    gpu.write(step.file(folder), {"state": DONE, "raw": {"n_files": 1, "files": {"tests/a.py": file}}})
    console = Console(width=132, file=StringIO())
    console.print(gpu.table(folder, [step]))
    assert "test_a[tiny-mla], test_a[/]" in console.file.getvalue()


def test_without_figures_there_are_no_rows() -> None:
    assert [row for step in gpu.STEPS for row in step.rows("8b", {})] == []


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured however busy this machine is."""
    monkeypatch.setattr(costs, "read_clocks", lambda: costs.Clocks(time.perf_counter(), 0.0, {}))
    monkeypatch.setattr(costs, "MAX_SPREAD", math.inf)


def timed_loading(folder: Path, model: Path) -> Row:
    """The row of the step that times it."""
    gpu.begin(folder, FACTS | {"settings": FACTS["settings"] | {"large": str(model)}})
    [step] = [each for each in gpu.STEPS if each.name == "kv-large"]
    gpu.write(step.file(folder), {"state": DONE, "raw": {}})
    asyncio.run(step.measure(gpu.Task(step, folder)))
    return gpu.rows(folder, [step])[0]


@pytest.mark.usefixtures("undisturbed")
def test_loading_is_timed_by_the_servers_own_measurement(tmp_path: Path, tiny_model: Path) -> None:
    load = timed_loading(tmp_path, tiny_model)
    assert (load.figure, load.verdict) == (f"{tiny_model.name}, 1,000 tokens: load", "met")


@pytest.mark.usefixtures("undisturbed")
def test_loading_is_timed_from_page_locked_memory(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[mmap.mmap] = []
    taken: list[bool] = []
    take = page_locked.take

    def allocate(n_bytes: int) -> int:
        # Longer than the model loads.
        time.sleep(2)
        chunks.append(mmap.mmap(-1, n_bytes))
        return ctypes.addressof(ctypes.c_char.from_buffer(chunks[-1]))

    def noted_take(n_bytes: int) -> Kv | None:
        found = take(n_bytes)
        if n_bytes >= page_locked.MIN_BYTES:
            taken.append(found is not None)
        return found

    monkeypatch.setattr(library, "device_used", lambda _: "a GPU")
    monkeypatch.setattr(library, "page_locked_allocator", lambda: allocate)
    # More than the few tokens that are saved at the start have.
    monkeypatch.setattr(page_locked, "MIN_BYTES", 2**12)
    monkeypatch.setattr(page_locked, "_memory", [])
    monkeypatch.setattr(page_locked, "take", noted_take)
    timed_loading(tmp_path, tiny_model)
    assert taken
    assert all(taken)


@pytest.mark.slow
def test_a_step_runs_in_a_process_and_a_table_has_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    model = ["--large", "tiny", "--small", "tiny", "--server=-ngl 0", "--quick"]
    assert main(["gpu", *model, "--steps", "models", "--out", str(tmp_path), "--commit", "c0ffee"]) == 0
    assert gpu.read(tmp_path / "gpu.json")["commit"] == "c0ffee"
    content = gpu.read(tmp_path / "gpu-models.json")
    assert content["state"] == DONE
    assert content["raw"]["tiny"] > 0
    assert capsys.readouterr().out.count("not run") == len(gpu.STEPS) - 1
