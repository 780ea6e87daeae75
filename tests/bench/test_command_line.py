"""`python -m bench`: every benchmark gets what it asks for."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from bench import adapters, chat, constrained, decode, drafting, idle, scenarios, speculate, tree
from bench.__main__ import QUICK, main
from bench.fleet import run as fleet
from bench.fleet import setups
from bench.peers import baseline, compare
from bench.traces import run as traces

BENCHMARKS = {
    "adapters": adapters,
    "chat": chat,
    "baseline": baseline,
    "constrained": constrained,
    "decode": decode,
    "drafting": drafting,
    "fleet": fleet,
    "idle": idle,
    "peers": compare,
    "scenarios": scenarios,
    "speculate": speculate,
    "traces": traces,
    "tree": tree,
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bench.__main__.model_file", lambda _name: tiny_model)


def called(
    monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str, module: str | None = None
) -> dict[str, Any]:
    """The arguments that a benchmark's `run` gets."""
    calls: list[dict[str, Any]] = []
    benchmark = BENCHMARKS[module or name]
    signature = inspect.signature(benchmark.run)
    monkeypatch.setattr(benchmark, "run", lambda **given: calls.append(signature.bind(**given).arguments))
    assert main([name, *arguments]) == 0
    [call] = calls
    return call


@pytest.mark.parametrize(
    ("name", "usual", "quick"),
    [
        ("adapters", 7, 2),
        ("chat", 5, 2),
        ("constrained", 7, 2),
        ("decode", 7, 2),
        ("drafting", 8, 1),
        ("idle", 7, 2),
        ("peers", None, 1),
        ("scenarios", 3, 1),
        ("speculate", None, 1),
        ("tree", 9, 2),
    ],
)
def test_repeats_are_the_benchmarks_own_unless_told(
    name: str, usual: int, quick: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "pairs" if name == "decode" else "repeats"
    for arguments, expected in (((), usual), (("--quick",), quick), (("--quick", "--repeats", "30"), 30)):
        with monkeypatch.context() as patch:
            assert called(patch, name, *arguments)[key] == expected


def test_flags_reach_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    call = called(monkeypatch, "idle", "--threads", "3", "--server=-ngl 9", "--out", "there")
    assert (call["server_flags"], call["folder"]) == (["-t", "3", "-ngl", "9"], Path("there"))
    assert Path("there").is_dir()


def test_a_quick_comparison_has_two_servers_and_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    call = called(monkeypatch, "peers", "--quick", "--only", "chat", "--only", "engine alone")
    assert (call["against"], call["scale"], call["only"]) == (QUICK, 0.25, ["chat", "engine alone"])
    assert call["title"].startswith("60m shape")


def test_what_is_replayed_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    call = called(monkeypatch, "traces", "--dir", "there", "--sessions", "3", "--in-turn", "--quick")
    settings = call["settings"]
    assert (settings.directory, settings.n_sessions, settings.in_turn) == (Path("there"), 3, True)
    assert (settings.n_requests, call["repeats"], call["against"]) == (40, 1, ())


def test_a_baseline_is_another_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    call = called(monkeypatch, "peers", "--baseline", "there", "--repeats", "3", module="baseline")
    assert (call["baseline"], call["repeats"], call["scale"]) == (Path("there"), 3, 1.0)


def test_a_fleet_is_measured_in_all_parts_unless_some_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = called(monkeypatch, "fleet", "--only", setups.ONE)["settings"]
    assert (settings.parts, settings.setups, settings.apis) == (setups.PARTS, [setups.ONE], setups.APIS)
    all_of_them = settings.n_conversations * settings.lengths.longest(settings.n_turns)
    assert 3 * settings.cells >= all_of_them, "nothing is evicted where the load is even"


def test_parts_and_workers_of_a_fleet_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("--kill", "--api", "chat", "--workers", "2", "--cache-remote", "redis://store")
    settings = called(monkeypatch, "fleet", *chosen, "--fleet=--no-restart")["settings"]
    assert (settings.parts, settings.apis, settings.n_workers) == (["kill"], ["chat"], 2)
    assert settings.fleet_flags == ("--no-restart", "--cache-remote", "redis://store")


def test_one_large_server_has_all_that_the_workers_have() -> None:
    settings = setups.Settings(Path("model.gguf"), "title", threads=6, flags=("--metrics",))
    for flag in ("-np", "-c", "-t"):
        [worker, whole] = [
            int(flags[flags.index(flag) + 1]) for flags in (settings.server_flags(), settings.server_flags(3))
        ]
        assert whole == 3 * worker
