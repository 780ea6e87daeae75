"""The benchmark of checkpoints over a restart, in a short pool, and in memory: on real servers, never timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from bench import synthetic
from bench.__main__ import main
from bench.families import checkpoint_runs, checkpoints
from bench.families.checkpoint_runs import resident_bytes
from bench.families.checkpoints import MEASUREMENTS, MIB, Figure, Settings, figures_of
from bench.families.run import COUNTER, DECODED
from tests.bench.forked_servers import forked_servers
from tests.bench.miscount import miscount
from tests.conftest import LONG


@pytest.fixture
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "ensure", partial(synthetic.ensure, folder=tmp_path))
    monkeypatch.setattr("bench.peers.build.has_llama_server", lambda: False)
    monkeypatch.setattr(checkpoint_runs, "PAUSE_S", 0.05)
    monkeypatch.setattr(checkpoint_runs, "QUIET_S", 0.0)


def quick(folder: Path, *arguments: str) -> int:
    with forked_servers():
        return main(["checkpoints", "--quick", "--threads", "1", "--out", str(folder), *arguments])


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("model", [None, "tiny-swa", "tiny"] if LONG else [None])
def test_a_quick_look_reuses_what_the_restart_and_the_short_pool_leave(model: str | None, tmp_path: Path) -> None:
    chosen = ["--only", "restart", "--only", "eight", *(["--model", model] if model else [])]
    assert quick(tmp_path, "--scale", "0.07", *chosen) == 0
    result = json.loads((tmp_path / "checkpoints.json").read_text())
    [restart], [eight] = result["runs"]["restart"], result["runs"]["eight"]
    assert restart["computed"] < restart["prompt"] / 4
    assert restart["cold_s"] > 0
    assert eight["fewest"] <= eight["computed"] < eight["prompt"]
    assert {each["model"] for each in result["figures"]} == {model or checkpoints.QUICK_HYBRID}


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
def test_memory_is_that_of_the_shape_with_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quick(tmp_path, "--only", "memory") == 0
    assert "llama-server is not built" in capsys.readouterr().err
    result = json.loads((tmp_path / "checkpoints.json").read_text())
    [measured] = result["runs"]["memory"]
    assert set(measured) == {"own_rss", "own_pss", "own_checkpoints"}
    assert measured["own_checkpoints"] > 0
    assert 10 * MIB < measured["own_pss"] <= measured["own_rss"]
    assert {(each["model"], each["is_met"]) for each in result["figures"]} == {("tiny-swa", None)}


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("wrong", [COUNTER, DECODED])
def test_counts_that_the_metrics_do_not_confirm_are_no_result(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    miscount(monkeypatch, wrong)
    monkeypatch.setattr(checkpoint_runs, "TURNS", 1)
    assert quick(tmp_path, "--only", "eight", "--scale", "0.02") == 1
    assert f"{wrong} is" in capsys.readouterr().err
    assert not (tmp_path / "checkpoints.json").exists()


def test_a_system_that_cannot_drop_files_from_its_page_cache_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    checkpoint_runs.forget(tmp_path)
    assert "page cache" in capsys.readouterr().err


def test_all_is_measured_on_the_usual_shapes_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Settings] = []
    repeats: list[int] = []

    def take(**given: object) -> None:
        settings, n = given["settings"], given["repeats"]
        assert isinstance(settings, Settings)
        assert isinstance(n, int)
        asked.append(settings)
        repeats.append(n)

    monkeypatch.setattr(checkpoints, "run", take)
    for arguments in ([], ["--only", "memory", "--only", "restart", "--model", "60m-next", "--scale", "0.5"]):
        assert main(["checkpoints", "--out", str(tmp_path), *arguments]) == 0
    usual, one = asked
    assert repeats == [3, 3]
    assert (tuple(usual.measurements), usual.scale, usual.tiny) == (MEASUREMENTS, 1.0, False)
    assert [usual.model_of(name) for name in MEASUREMENTS] == ["60m-granite", "60m-granite", "60m-swa"]
    assert (one.measurements, one.scale) == (["restart", "memory"], 0.5)
    assert {one.model_of(name) for name in MEASUREMENTS} == {"60m-next"}


@pytest.mark.parametrize(
    ("measurement", "measured", "value", "is_met"),
    [
        ("restart", {"prompt": 10, "computed": 1, "cold_s": 2.0, "resumed_s": 0.2}, 0.1, True),
        ("restart", {"prompt": 10, "computed": 1, "cold_s": 2.0, "resumed_s": 0.25}, 0.125, False),
        ("eight", {"prompt": 200, "fewest": 100, "computed": 120, "read_tokens": 50}, 1.2, True),
        ("eight", {"prompt": 200, "fewest": 100, "computed": 130, "read_tokens": 50}, 1.3, False),
        ("memory", {"own_rss": 1, "own_pss": 320 * MIB, "peer_rss": 1, "peer_pss": 200 * MIB}, 1.0, True),
        ("memory", {"own_rss": 1, "own_pss": 336 * MIB, "peer_rss": 1, "peer_pss": 200 * MIB}, 1.05, False),
    ],
)
def test_goals_are_those_of_the_medians(
    measurement: str, measured: dict[str, float], value: float, is_met: bool
) -> None:
    worse = {name: 2 * n if name in ("resumed_s", "computed", "own_pss") else n for name, n in measured.items()}
    *shown, goal = figures_of(measurement, "60m", [measured, worse, measured])
    assert {each.is_met for each in shown} == {None}
    assert goal.values == pytest.approx([value, 2 * value, value])
    assert goal.is_met is is_met
    assert len({len(each.cells()) for each in (*shown, goal)}) == 1


def test_the_published_figures_come_from_the_raw_data() -> None:
    bench = Path(checkpoints.__file__).parents[1]
    content = json.loads((bench / "published" / "checkpoints.json").read_text())
    page = (bench / "README.md").read_text()
    assert f"at {content['commit'][:7]}" in page
    goals = 0
    for fields in content["figures"]:
        del fields["is_met"]
        figure = Figure(**fields)
        if figure.most is not None:
            measured, _, _, *cells = figure.cells()
            name = {"restart": "TTFT after the restart / cold"}.get(measured, figure.name)
            assert f"| {measured} | {name} | {cells[0]} | {cells[1]} | {cells[2]}: {cells[3]} |" in page
            goals += 1
    assert goals == len(MEASUREMENTS)


def test_pages_that_processes_share_count_once_in_pss() -> None:
    source = "import os, time; held = b'x' * (64 << 20); os.fork(); os.write(1, b'1'); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.read(2) == b"11", "one of each process"
            found = resident_bytes(parent.pid)
        finally:
            for process in (*psutil.Process(parent.pid).children(), parent):
                process.kill()
    assert found["rss"] > 128 * MIB
    assert 64 * MIB < found["pss"] < 128 * MIB
