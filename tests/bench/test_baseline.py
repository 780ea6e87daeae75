"""Two versions of llamaslot in pairs: the verdicts, and that each is imported from its own checkout."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import llamaslot
from bench.client import BenchmarkError
from bench.peers import baseline
from bench.peers.baseline import N_PAIRS, BothVersions, compared, without_figure
from bench.peers.results import RunResult
from bench.peers.servers import BEFORE, OWN, ServerSetup
from bench.peers.workloads import WORKLOADS
from bench.progress import Estimate, duration
from bench.server import llamaslot as command

RESULT = RunResult("chat", OWN, 0, [1.0], 0.1, 0.1, 1.0, 100.0, 10, 100, 60, 50)
WORKLOAD = WORKLOADS[0]


def results(workload: str, *ratios: float) -> list[RunResult]:
    """Pairs with these ratios of TTFT and decode rate."""
    before = [replace(RESULT, workload=workload, server=BEFORE, repeat=i) for i in range(len(ratios))]
    after = [
        replace(each, server=OWN, ttft=[ratio], decode_rate=100 * ratio)
        for each, ratio in zip(before, ratios, strict=True)
    ]
    return after + before


@pytest.mark.parametrize(
    ("workload", "ratios", "passes"),
    [
        ("chat", [1.02] * 8, True),
        ("chat", [1.03] * 8, False),
        ("chat", [0.5] * 8, True),
        ("chat", [0.99] * 3 + [1.03] * 5, True),
        ("chat", [0.99] * 3 + [1.08] * 5, False),
        ("decode 8", [0.98] * 20, True),
        ("decode 8", [0.97] * 20, False),
        ("decode 8", [1.3] * 20, True),
    ],
)
def test_a_change_passes_unless_it_is_measurably_slower(workload: str, ratios: list[float], passes: bool) -> None:
    change = compared(workload, results(workload, *ratios))
    assert change is not None
    assert (change.n_pairs, change.passes) == (len(ratios), passes)


def test_a_run_without_its_partner_is_no_pair() -> None:
    runs = results("chat", 1.0, 2.0)
    change = compared("chat", [each for each in runs if (each.server, each.repeat) != (BEFORE, 0)])
    assert change is not None
    assert (change.n_pairs, change.median) == (1, 2.0)
    assert compared("chat", [each for each in runs if each.server == OWN]) is None


def test_a_workload_without_a_figure_in_any_pair_is_a_failure() -> None:
    """The rate is 0 where all tokens of a stream came at once."""
    runs = [replace(each, decode_rate=0.0) for each in results("decode 1", 1.0, 1.0)]
    assert compared("decode 1", runs) is None
    assert list(without_figure([], runs)) == ["decode 1"]
    change = compared("decode 1", results("decode 1", 1.0))
    assert change is not None
    assert without_figure([change], runs) == {}


def test_both_versions_run_every_pair_in_turn() -> None:
    new, old = (ServerSetup(name, "llamaslot") for name in (OWN, BEFORE))
    servers = BothVersions((new, old))
    assert [servers.of(WORKLOAD, repeat, []) for repeat in (0, 1)] == [[new, old], [old, new]]
    assert set(N_PAIRS) <= {each.name for each in WORKLOADS}


@pytest.mark.slow
def test_two_checkouts_are_served_and_compared(tiny_model: Path, tmp_path: Path) -> None:
    before = tmp_path / "before"
    shutil.copytree(Path(llamaslot.__file__).parent, before / "llamaslot")
    baseline.run(
        model=tiny_model,
        title="tiny",
        baseline=before,
        repeats=1,
        scale=0.05,
        threads=1,
        # Its figure is TTFT, which every run has. A tiny model's stream may come in a single read of a busy client:
        # that has no decode rate.
        only=["chat"],
        folder=tmp_path,
        server_flags=(),
    )
    content = json.loads((tmp_path / "baseline.json").read_text())
    assert [(each["workload"], each["n_pairs"]) for each in content["changes"]] == [("chat", 1)]
    assert {each["server"] for each in content["runs"]} == {OWN, BEFORE}


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="no checkout of llamaslot"):
        baseline._require_package(tmp_path)


def test_a_checkout_is_imported_although_the_working_directory_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name / "llamaslot" / "cli").mkdir(parents=True)
        for module in ("__init__", "cli/__init__"):
            (tmp_path / name / "llamaslot" / f"{module}.py").touch()
        (tmp_path / name / "llamaslot" / "cli" / "main.py").write_text(f"print({name!r})")
    monkeypatch.chdir(tmp_path / "here")

    async def output(*words: str) -> str:
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        return (await process.communicate())[0].decode().strip()

    assert asyncio.run(output(*command(checkout=tmp_path / "there"))) == "there"
    assert sys.executable in command(checkout=tmp_path)


def test_an_estimate_follows_the_measured_times() -> None:
    estimate = Estimate({"chat": 10.0, "agent": 20.0})
    assert estimate.of({"chat": 3, "agent": 1}) == 50
    estimate.add("chat", 5.0)
    assert estimate.of({"chat": 2, "agent": 1}) == 2 * 5 + 20 / 2
    assert [duration(seconds) for seconds in (12, 600, 4000)] == ["12 s", "10 min", "1 h 07 min"]
