"""The published comparison of fleets: every published figure comes from the raw data of one complete run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.client import BenchmarkError
from bench.fleet import published
from bench.fleet.setups import APIS, ONE, PARTS, SETUPS, Settings
from bench.peers import baseline
from bench.report import raw_data

COMMIT = "0123456789abcdef"
FACTS = {"date": "2026-01-02T03:04:05", "processor": "a CPU", "threads": 2, "memory_gib": 8, "load_before": 0.0}
GATEWAYS = [setup for setup, gateway in SETUPS.items() if gateway]


def measured(
    part: str, *, ratio: float = 1.0, lost: int = 0, moved: float = 1.0, failed: int = 0
) -> dict[str, Any]:
    """Raw data of one part: fleets compute `ratio` x 1,000 tokens, and a cold TTFT is 10 s."""
    compared = [
        {"setup": setup, "api": api, "n_prompt_computed": int(1000 * (1 if setup == ONE else ratio))}
        for api in APIS
        for setup in SETUPS
        if api == "chat" or setup != "round robin"
    ]
    outcomes = {"ok": 10, "broken": failed, "refused": 0, "unreachable": 0}
    killed = {
        "outcomes": outcomes,
        "n_turns": 12,
        "n_turns_lost": lost,
        "stayed": [0.25],
        "moved": [moved],
        "cold": [10.0],
    }
    results = {
        "compare": compared,
        "kill": [{"setup": setup, **killed} for setup in GATEWAYS],
        "rolling": [{"setup": setup, "outcomes": outcomes} for setup in GATEWAYS],
    }
    return {"settings": {"model": "a model", "setups": [*SETUPS]}, part: results[part]}


def content(**figures: Any) -> dict[str, Any]:
    """Raw data of a whole run."""
    parts = {part: measured(part, **figures) for part in PARTS}
    return {"commit": COMMIT, "machine": FACTS, "seconds": 60.0, "parts": parts}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A page of a checkout of its own, and programs that need not be there."""
    found = tmp_path / "README.md"
    found.write_text(f"before\n{published.BEGIN}\nstale figures\n{published.END}\nafter\n")
    monkeypatch.setattr(published, "PAGE", found)
    monkeypatch.setattr(published, "RAW", tmp_path / "fleet.json.gz")
    monkeypatch.setattr(published.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(published, "model_file", Path)
    return found


def finish(monkeypatch: pytest.MonkeyPatch, revisions: Sequence[str], **figures: Any) -> list[Settings]:
    """Replace the benchmark by one that ends at once; `revisions` are those of the checkout before and after it.

    Returns the settings with which it is run, as they come.
    """
    taken: list[Settings] = []

    def run(*, settings: Settings, folder: Path) -> dict[str, Any]:
        assert folder.is_dir()
        taken.append(settings)
        return measured(settings.parts[0], **figures)

    looks = iter(revisions)
    monkeypatch.setattr(baseline, "revision", lambda _root: next(looks))
    monkeypatch.setattr(published.fleet, "run", run)
    return taken


def publish(folder: Path, *, remote: str = "redis://127.0.0.1:1", quick: bool = False) -> None:
    published.run(remote=remote, nginx="", threads=2, folder=folder, quick=quick)


def test_the_page_is_generated_from_one_run_of_all_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: Path
) -> None:
    taken = finish(monkeypatch, [COMMIT] * 2)
    publish(tmp_path)
    assert [(each.parts, each.model.name, each.setups) for each in taken] == [
        ((part,), published.MODELS[part], tuple(SETUPS)) for part in PARTS
    ]
    # The comparison counts what a gateway alone does; a prefix that is fetched would hide it.
    assert [bool(each.fleet_flags) for each in taken] == [False, True, True]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{published.END}\nafter\n")
    assert "stale" not in text
    assert "commit `0123456789`" in text
    assert "| nginx, by session | 1,000 (1.00) | 1,000 (1.00) | 1,000 (1.00) |" in text
    assert "| round robin | 1,000 (1.00) |  |  |" in text
    assert (
        "| nginx, by session | 10 | 0 | 0 of 12 | 250 ms (1) | 1,000 ms (1) | 10,000 ms (1) | 0.10 | 10 | 0 |"
        in text
    )
    assert text.count(": met") == 4


def test_goals_that_were_missed_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: Path) -> None:
    finish(monkeypatch, [COMMIT] * 2, ratio=1.2, lost=1, moved=2.1, failed=3)
    publish(tmp_path)
    text = page.read_text().replace("\n", " ")
    assert text.count("**missed**") == 4
    assert "by cached prefix: **missed** (chat, messages, responses)" in text
    assert text.count(f"**missed** ({', '.join(GATEWAYS)})") == 3


@pytest.mark.parametrize("reason", ["changes before", "changes after", "no checkout", "no store"])
def test_an_incomplete_run_is_not_published(
    reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: Path
) -> None:
    before = {"changes before": f"{COMMIT} with changes", "no checkout": ""}.get(reason, COMMIT)
    finish(monkeypatch, [before, "other" if reason == "changes after" else COMMIT])
    with pytest.raises(BenchmarkError, match=r"nothing is published|clean git checkout|needs --cache-remote"):
        publish(tmp_path, remote="" if reason == "no store" else "redis://127.0.0.1:1")
    assert "stale figures" in page.read_text()
    assert not published.RAW.exists()


def test_a_trial_publishes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: Path) -> None:
    taken = finish(monkeypatch, [])
    publish(tmp_path, quick=True)
    assert {each.model.name for each in taken} == {"tiny"}
    assert "stale figures" in page.read_text()
    assert (tmp_path / "fleet-published.json").exists()


def test_the_published_page_agrees_with_the_raw_data() -> None:
    if not published.RAW.exists():
        assert f"{published.BEGIN}\nNot published yet.\n{published.END}" in published.PAGE.read_text()
        return
    assert published.rendered() == published.PAGE.read_text(), "run: python -m bench fleet --render"
    parts = raw_data(published.RAW)["parts"]
    assert [*parts] == [*PARTS]
    for part in PARTS:
        assert parts[part]["settings"]["n_conversations"] == Settings(Path(), "").n_conversations
        assert published.MODELS[part] in parts[part]["settings"]["model"]
        setups = {each["setup"] for each in parts[part][part]}
        assert setups == (set(SETUPS) if part == "compare" else set(GATEWAYS))


def test_the_page_says_what_the_run_before_it_computed() -> None:
    """It was ended after the comparison, for the defect that it showed."""
    before = raw_data(published.RAW.with_name("fleet-overload.json.gz"))
    text = published.PAGE.read_text().replace("\n", " ")
    computed = {(each["setup"], each["api"]): each["n_prompt_computed"] for each in before["compare"]}
    smg = [computed["smg, by cached prefix", api] for api in APIS]
    ratios = [f"{n / computed[ONE, api]:.2f}" for n, api in zip(smg, APIS, strict=True)]
    assert f"commit `{before['commit'][:10]}`" in text
    assert "{:,}, {:,} and {:,} tokens".format(*smg) in text
    assert "{}, {} and {} of one".format(*ratios) in text
