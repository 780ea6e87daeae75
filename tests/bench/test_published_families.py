"""The published comparison by kind of model: every published figure comes from the raw data of one complete run."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.client import BenchmarkError
from bench.families import published
from bench.families.goals import FamilyRun
from bench.families.kinds import KINDS
from bench.families.oracle import Need
from bench.families.run import NAMES, PEERS, SAME_STEP
from bench.peers import baseline
from bench.peers.servers import OWN

COMMIT = "0123456789abcdef"
FACTS = {"date": "2026-01-02T03:04:05", "processor": "a CPU", "threads": 2, "memory_gib": 8, "load_before": 0.0}


def content(*, computed: int = 100, ttft: float = 0.5) -> dict[str, Any]:
    """Raw data in which every llama-server computes 400 tokens in a second, of which 100 are the fewest."""
    runs = [
        FamilyRun(kind.name, workload, server, 0, 1, [seconds], [400], [n], [Need(100, 300, False, False)])
        for kind in KINDS
        for workload in NAMES
        for server in (*PEERS, OWN)
        for n, seconds in [(computed, ttft) if server == OWN else (400, 1.0)]
    ]
    return {
        "commit": COMMIT,
        "machine": FACTS,
        "settings": {"scale": 0.35, "repeats": 1, "interval": 256, "peers": PEERS, "workloads": NAMES},
        "seconds": 60.0,
        "failures": {},
        "checkpoint_bytes": {kind.name: 2048 * (kind.name == "rwkv7") for kind in KINDS},
        "runs": [asdict(run) for run in runs],
    }


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """Pages of a checkout of its own: that on models and the benchmark's."""
    folder = tmp_path / "checkout"
    found = folder / "docs" / "models.md", folder / "bench" / "README.md"
    for page in found:
        page.parent.mkdir(parents=True)
        page.write_text(f"before\n{published.BEGIN}\nstale figures\n{published.END}\nafter\n")
    monkeypatch.setattr(published, "ROOT", folder)
    monkeypatch.setattr(published, "PAGES", found)
    monkeypatch.setattr(published, "RAW", folder / "families.json.gz")
    return found


def finish(monkeypatch: pytest.MonkeyPatch, raw: dict[str, Any], revisions: list[str]) -> None:
    """Replace the benchmark by one that ends at once with this raw data.

    `revisions` are those of the checkout before it and after it.
    """

    def run(*, folder: Path, **_: object) -> dict[str, Any]:
        (folder / "families.json").write_text(json.dumps(raw))
        return raw

    looks = iter(revisions)
    monkeypatch.setattr(baseline, "revision", lambda _root: next(looks))
    monkeypatch.setattr(published.families, "run", run)


def test_both_pages_are_generated_from_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pages: tuple[Path, Path]
) -> None:
    finish(monkeypatch, content(), [COMMIT] * 2)
    published.run(threads=1, folder=tmp_path)
    models, bench = (page.read_text() for page in pages)
    assert "| RWKV 7 | by checkpoints | 2 KiB | 1.00 to 1.00 | 4.00 to 4.00 | `60m-rwkv7` |" in models
    assert "| Llama, Qwen3, Mistral | to the token |  | 1.00 to 1.00 | 4.00 to 4.00 | `60m` |" in models
    assert f"| dense | {' | '.join(['1.00, 4.00'] * len(NAMES))} |" in bench
    assert f"| dense | {' | '.join(['0.50'] * len(NAMES))} |" in bench
    assert "commit `0123456789`" in bench
    assert bench.count("missed:** none") == 1
    assert bench.replace("\n", " ").count(":** none") == 3
    for text in (models, bench):
        assert text.startswith("before\n")
        assert text.endswith(f"{published.END}\nafter\n")
        assert "stale" not in text


def test_goals_that_were_missed_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pages: tuple[Path, Path]
) -> None:
    finish(monkeypatch, content(computed=401, ttft=0.7), [COMMIT] * 2)
    published.run(threads=1, folder=tmp_path)
    text = pages[1].read_text().replace("\n", " ")
    first, counts, times = (part.partition(".")[0] for part in text.split("missed")[1:])
    assert all(f"{name} (10 of 10 kinds)" in part for name in NAMES for part in (first, counts))
    assert "agent (10 of 10 kinds)" in times
    assert "chat" not in times


@pytest.mark.parametrize("reason", ["a failure", "changes before", "changes after", "no checkout"])
def test_an_incomplete_run_is_not_published(
    reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pages: tuple[Path, Path]
) -> None:
    raw = content() | {"failures": {"llama-server, dense, chat": "no answer"} if reason == "a failure" else {}}
    before = {"changes before": f"{COMMIT} with changes", "no checkout": ""}.get(reason, COMMIT)
    finish(monkeypatch, raw, [before, "other" if reason == "changes after" else COMMIT])
    with pytest.raises(BenchmarkError, match=r"nothing is published|clean git checkout"):
        published.run(threads=1, folder=tmp_path)
    assert "stale figures" in pages[0].read_text()
    assert not published.RAW.exists()


def test_the_published_pages_agree_with_the_raw_data() -> None:
    if not published.RAW.exists():
        assert all(
            f"{published.BEGIN}\nNot published yet.\n{published.END}" in page.read_text()
            for page in published.PAGES
        )
        return
    for page in published.PAGES:
        assert published.rendered(page) == page.read_text(), "run: python -m bench families --render"
    raw = json.loads(gzip.decompress(published.RAW.read_bytes()))
    runs = Counter((run["kind"], run["workload"], run["server"]) for run in raw["runs"])
    expected = [
        (kind.name, workload, server)
        for kind in KINDS
        for workload in NAMES
        for server in (*PEERS, OWN)
        if server != SAME_STEP.name or raw["checkpoint_bytes"][kind.name]
    ]
    assert runs == dict.fromkeys(expected, published.N_REPEATS)
    assert raw["settings"]["repeats"] == published.N_REPEATS
    assert (raw["settings"]["scale"], raw["settings"]["interval"]) == (
        published.PLAN.scale,
        published.PLAN.interval,
    )
    assert raw["failures"] == {}
