"""The published benchmark: its plan fits into its time, and every published figure comes from the raw data."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.client import BenchmarkError
from bench.peers import baseline, published
from bench.peers.goals import GOALS, Selection
from bench.peers.results import RunResult
from bench.peers.runner import ENGINE, ENGINE_SECONDS, EnginePair, Runner
from bench.peers.servers import OWN, SERVERS
from bench.peers.workloads import REAL, WORKLOADS
from bench.progress import Estimate

FACTS = {"date": "2026-01-02T03:04:05", "processor": "a CPU", "threads": 2, "memory_gib": 8}
FACTS |= {"llama_cpp_python": "0", "load_before": 0.0}


def content() -> dict[str, Any]:
    """Raw data in which llamaslot takes half as long as the others."""
    runs = [
        {
            "workload": workload.name,
            "server": server.name,
            "repeat": repeat,
            "ttft": [seconds, 2 * seconds],
            "gap_p50": seconds,
            "gap_p99": seconds,
            "wall": seconds,
            "decode_rate": 1 / seconds,
            "n_output": 10,
            "n_prompt": 100,
            "n_computed": 50,
            "n_fewest": 50,
            "ready": seconds,
        }
        for workload in (*WORKLOADS, *REAL)
        for server in SERVERS
        if server.takes_part(workload.name)
        for repeat in range(2)
        for seconds in [1.0 if server.name == OWN else 2.0]
    ]
    return {
        "commit": "0123456789abcdef",
        "command": published.COMMAND,
        "machine": FACTS,
        "settings": {"model": "a model", "slots": 8, "threads": 2},
        "seed": "",
        "pairs": {"chat": 2},
        "reference_pairs": 2,
        "seconds": 60.0,
        "failures": {},
        "engine": [{"engine": 90.0, "batched_bench": 100.0}] * 20,
        "runs": runs,
    }


def test_the_plan_has_every_workload_and_fits_into_two_and_a_half_hours() -> None:
    selection = Selection(SERVERS, published.N_REFERENCE_PAIRS)
    runs = Counter(
        {
            each.name: sum(selection.expected(each, repeat) for repeat in range(published.N_PAIRS[each.name]))
            for each in (*WORKLOADS, *REAL)
        }
    )
    seconds = Estimate({each.name: each.seconds for each in (*WORKLOADS, *REAL)}).of(runs)
    assert seconds + 2 * published.N_ENGINE_PAIRS * ENGINE_SECONDS < 9000
    assert all(published.N_PAIRS[each.name] >= each.n_pairs for each in WORKLOADS)


def test_every_goal_and_server_is_in_the_published_tables() -> None:
    page = published.page(content())
    for workload, goals in GOALS.items():
        for metric, _ in goals:
            assert f"| {workload} | {metric.name} | llama-server" in page
    assert all(f"`{server.name}`" in page for server in SERVERS)
    assert "| engine alone | decode 8 | llama-batched-bench | 0.90 |" in page
    summary = published.summary(content())
    assert "commit `0123456789`" in summary
    assert "on a CPU (2 threads, 8 GiB)" in summary.replace("\n", " ")
    assert f"| chat: {published.IN_WORDS['chat']} | TTFT p50 | 0.50 | at most 1.00 | few pairs |" in summary
    assert summary.count("| fan-out cold: ") == 1
    assert "**Goals missed:** engine alone (decode 8)." in summary
    undecided = summary.replace("\n", " ").partition("**Not decided:** ")[2]
    for workload, goals in GOALS.items():
        assert all(f"{workload} ({metric.name})" in undecided for metric, _ in goals)
    assert set(published.IN_WORDS) == {*GOALS, ENGINE}


def test_raw_data_have_a_line_for_each_run_and_survive_writing(tmp_path: Path) -> None:
    raw = content()
    raw["runs"][0]["ttft"] = [0.123456789, 1.0]
    published.write(tmp_path / "peers.json", raw)
    text = (tmp_path / "peers.json").read_text()
    assert sum('"repeat":' in line for line in text.splitlines()) == len(raw["runs"])
    assert json.loads(text)["runs"][0]["ttft"] == [0.12346, 1.0]
    published.render(tmp_path, None)
    assert (tmp_path / "README.md").read_text() == published.page(json.loads(text))


def test_only_the_generated_part_of_the_readme_is_replaced() -> None:
    text = f"before\n{published.BEGIN}\nstale figures\n{published.END}\nafter\n"
    new = published.replaced(text, content())
    assert new is not None
    assert new.startswith("before\n")
    assert new.endswith(f"{published.END}\nafter\n")
    assert "stale figures" not in new
    assert published.replaced(new, content()) == new
    assert published.replaced("no such part", content()) is None


def test_a_checkout_with_changes_publishes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for revision in ("", "0123456789 with changes"):
        monkeypatch.setattr(baseline, "revision", lambda _root, revision=revision: revision)
        with pytest.raises(BenchmarkError, match="clean git checkout"):
            published.run(threads=1, logs=tmp_path, quick=False)
    assert list(tmp_path.iterdir()) == []


def finish(monkeypatch: pytest.MonkeyPatch, folder: Path, failures: dict[str, str], commits: list[str]) -> None:
    """Replace the runner by one that ends at once with these failures; `commits` are reported in turn."""

    class Finished(Runner):
        seed = ""

        def __init__(self, *_: object) -> None:
            self.failures = failures

        def measure_engine(self, _n_pairs: int) -> list[EnginePair]:
            return [EnginePair(90.0, 100.0)] * 2

        async def measure(self, *_: object) -> list[RunResult]:
            return [RunResult(**each) for each in content()["runs"]]

    revisions = iter(commits)
    for name, value in {
        "Runner": Finished,
        "Tokens": lambda _model: None,
        "model_file": lambda _shape: folder,
        # A machine need not have it.
        "resolve_model": lambda _name: folder,
        "FOLDER": folder / "published",
        "README": folder / "README.md",
    }.items():
        monkeypatch.setattr(published, name, value)
    monkeypatch.setattr(baseline, "revision", lambda _root: next(revisions))


def test_what_another_server_cannot_run_is_published_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failures = {f"{OWN}, slots apart, pressure": "too long", "llama-server, pressure": "too long"}
    finish(monkeypatch, tmp_path, failures, ["0123456789"] * 2)
    (tmp_path / "README.md").write_text(f"{published.BEGIN}\n{published.END}")
    published.run(threads=1, logs=tmp_path / "logs", quick=False)
    page = (tmp_path / "published" / "README.md").read_text()
    assert all(f"- Failed: {name}: too long" in page for name in failures)
    assert "**Goals missed:**" in (tmp_path / "README.md").read_text()


def test_a_workload_that_failed_here_is_a_missed_goal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finish(monkeypatch, tmp_path, {f"{OWN}, {ENGINE}": "no costs"}, ["0123456789"] * 2)
    (tmp_path / "README.md").write_text(f"{published.BEGIN}\n{published.END}")
    published.run(threads=1, logs=tmp_path / "logs", quick=False)
    for page in (tmp_path / "published" / "README.md", tmp_path / "README.md"):
        (missed,) = (line for line in page.read_text().split("\n\n") if line.startswith("**Goals missed:**"))
        assert f"{ENGINE} (failed)" in " ".join(missed.split())


def test_a_run_of_a_checkout_that_changed_is_kept_and_not_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finish(monkeypatch, tmp_path, {}, ["0123456789", "other"])
    with pytest.raises(BenchmarkError, match="nothing is published"):
        published.run(threads=1, logs=tmp_path / "logs", quick=False)
    assert (tmp_path / "logs" / "published" / "peers.json").is_file()
    assert [each.name for each in tmp_path.iterdir()] == ["logs"]


def test_published_tables_and_readme_agree_with_the_raw_data() -> None:
    if not (published.FOLDER / "peers.json").exists():
        assert f"{published.BEGIN}\nNot published yet.\n{published.END}" in published.README.read_text()
        return
    raw = json.loads((published.FOLDER / "peers.json").read_text())
    assert (published.FOLDER / "README.md").read_text() == published.page(raw)
    readme = published.README.read_text()
    assert published.replaced(readme, raw) == readme, "run: python -m bench publish --render"
    # A workload that is new since then comes with the next run, for no row is added alone.
    assert raw["pairs"].items() <= published.N_PAIRS.items()
    runs = Counter((each["workload"], each["server"]) for each in raw["runs"])
    assert {name: runs[name, OWN] for name in raw["pairs"]} == raw["pairs"]
    assert len(raw["engine"]) == published.N_ENGINE_PAIRS or f"{OWN}, {ENGINE}" in raw["failures"]
    assert (published.FOLDER / "peers.json").stat().st_size < 1_500_000
