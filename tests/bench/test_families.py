"""Reuse by kind of model: the oracle, the goals, and a quick look on real servers of this project. Never timed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench import synthetic
from bench.__main__ import main
from bench.client import BenchmarkError, Client
from bench.families import run as families
from bench.families.goals import COLUMNS, FamilyRun, Row, rows
from bench.families.kinds import KINDS, state_sizes
from bench.families.oracle import Need, needs
from bench.families.run import QUICK_KINDS, QUICK_WORKLOADS, Runner
from bench.peers.servers import OWN, SERVERS
from bench.peers.workloads import WORKLOADS
from bench.tokens import fewest
from tests.bench.forked_servers import forked_servers
from tests.bench.miscount import miscount

INTERVAL = 10
HEAD = [1, 2, 3, 4]


def flags(need: Need) -> str:
    return "branch" if need.is_branch else "turn" if need.is_turn else ""


@pytest.mark.parametrize(
    ("requests", "kinds", "matched"),
    [
        ([(HEAD, [])], [""], [0]),
        ([(HEAD, []), ([9, 9], [])], ["", ""], [0, 0]),
        ([(HEAD, [5, 6]), ([*HEAD, 5, 6, 7], [])], ["", "turn"], [0, 5]),
        ([([*HEAD, 5], []), ([*HEAD, 6], []), ([*HEAD, 7], [])], ["", "branch", ""], [0, 4, 4]),
        ([(HEAD, [5, 6]), ([*HEAD, 5, 6], []), ([*HEAD, 5, 7], [])], ["", "turn", "branch"], [0, 5, 5]),
        ([(HEAD, []), (HEAD[:2], [])], ["", "branch"], [0, 2]),
    ],
)
def test_only_the_first_to_leave_a_known_path_is_a_branch(
    requests: list[tuple[list[int], list[int]]], kinds: list[str], matched: list[int]
) -> None:
    found = needs(requests)
    assert [flags(need) for need in found] == kinds
    assert [need.matched for need in found] == matched
    assert sum(need.fewest for need in found) == fewest(requests)


def run_of(server: str, computed: Sequence[int], *, workload: str = "agent", ttft: float = 1.0) -> FamilyRun:
    """Three requests of 100 tokens: a new one, a turn, and a branch; the oracle computes 100, 20 and 40."""
    found = [Need(100, 0, False, False), Need(20, 80, False, True), Need(40, 60, True, False)]
    return FamilyRun("dense", workload, server, 0, 1, [ttft] * 3, [100] * 3, list(computed), found)


@pytest.mark.parametrize(
    ("computed", "is_frugal"),
    [((100, 20, 40), True), ((100, 20, 74), True), ((100, 20, 75), False), ((40, 85, 40), False)],
)
def test_an_interval_is_allowed_for_a_branch_and_few_tokens_for_a_turn(
    computed: tuple[int, ...], is_frugal: bool
) -> None:
    [row] = rows([run_of(OWN, computed)], INTERVAL)
    assert (row.fewest, row.limit) == (160, 160 * 1.15 + 10)
    assert row.worst_turn == computed[1] - 20
    assert row.is_frugal is is_frugal
    assert row.is_ahead is None
    assert len(row.cells()) == len(COLUMNS)


def test_a_match_shorter_than_the_interval_allows_no_more_than_itself() -> None:
    run = run_of(OWN, (100, 20, 40))
    assert run.limit(1000) == run.limit(60) == 160 * 1.15 + 60


def beside(own: FamilyRun, *peers: FamilyRun) -> Row:
    [row] = rows([*peers, own], INTERVAL)
    assert len(row.cells()) == len(COLUMNS)
    return row


def test_the_best_llama_server_at_each_figure_is_the_peer() -> None:
    own = run_of(OWN, (100, 20, 40), ttft=0.5)
    row = beside(
        own,
        run_of("llama-server", (100, 100, 200), ttft=1.0),
        run_of("llama-server -kvu", (100, 100, 100), ttft=2.0),
    )
    assert (row.peer_computed, row.peer_ttft_ms, row.ttft_ratio) == (300, 1000, 0.5)
    assert row.is_ahead is True


@pytest.mark.parametrize(
    ("workload", "peer_computed", "ttft", "is_ahead"),
    [
        ("agent", 320, 0.6, True),
        ("agent", 320, 0.7, False),
        ("agent", 180, 0.6, True),
        ("agent", 160, 0.6, True),
        ("agent", 159, 0.6, False),
        ("chat", 160, 5.0, True),
        ("chat", 159, 0.1, False),
    ],
)
def test_half_of_the_computed_tokens_or_as_few_as_the_goal_asks(
    workload: str, peer_computed: int, ttft: float, is_ahead: bool
) -> None:
    own = run_of(OWN, (100, 20, 40), workload=workload, ttft=ttft)
    peer = run_of("llama-server", (peer_computed - 2, 1, 1), workload=workload)
    assert beside(own, peer).is_ahead is is_ahead


def test_repeats_are_medians_and_goal_one_holds_in_each() -> None:
    own = [replace(run_of(OWN, (100, 20, n)), repeat=i) for i, n in enumerate((40, 50, 400))]
    peer = [replace(run_of("llama-server", (100, 100, 100), ttft=2.0), repeat=i) for i in range(3)]
    [row] = rows(own + peer, INTERVAL)
    assert (row.computed, row.ttft_ratio, row.is_frugal) == (170, 0.5, False)
    assert rows(peer, INTERVAL) == []


@pytest.mark.slow
def test_checkpoints_have_a_size_where_a_state_cannot_be_trimmed(tmp_path: Path) -> None:
    found = {kind.name: state_sizes(synthetic.ensure(kind.tiny, folder=tmp_path), 1) for kind in KINDS}
    sizes = {name: each.checkpoint_bytes for name, each in found.items()}
    assert {name for name, size in sizes.items() if size == 0} == {"dense", "mla"}
    assert sizes["window 5:1"] > 5 * 32 * 2 * 64 * 2, "keys and values of a window of 32 tokens in 5 layers, F16"
    assert sizes["short conv"] > 2 * 3 * 128 * 4, "three columns in 2 layers, F32"
    layers = {"dense": 3, "window 5:1": 1, "short conv": 2, "mamba2": 0}
    row = 2 * 64 * 2
    for name, n in layers.items():
        assert n * row <= found[name].kv_bytes < n * row + 32, (
            "keys and values of one head of 64, F16, and its place"
        )


def test_both_servers_get_the_same_bytes_for_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = families.Settings(KINDS, families.NAMES, families.USUAL, 1.0, 256, 1)
    runner = Runner(settings, 1, tmp_path, ())
    own, peer = (next(each for each in SERVERS if each.name == name) for name in (OWN, "llama-server"))
    same_step = ["--ctx-checkpoints", "32", "--checkpoint-min-step", "256"]
    assert runner._checkpoint_flags(families.SAME_STEP, 7) == same_step
    monkeypatch.setattr(families, "llamaslot_flags", lambda: {"--checkpoint-ram", "--checkpoint-min-step"})
    assert runner._checkpoint_flags(own, 7) == ["--checkpoint-ram", "7", "--checkpoint-min-step", "256"]
    assert runner._checkpoint_flags(peer, 7) == ["--ctx-checkpoints", "32"]
    assert runner._checkpoint_flags(own, 0) == runner._checkpoint_flags(peer, 0) == []
    monkeypatch.setattr(families, "llamaslot_flags", lambda: {"-np"})
    assert runner._checkpoint_flags(own, 7) == []


def test_every_kind_has_its_shapes_and_every_workload_exists() -> None:
    for kind in KINDS:
        big, tiny = synthetic.SHAPES[kind.shape], synthetic.SHAPES[kind.tiny]
        assert big.arch == tiny.arch or kind.name == "dense"
        assert 45e6 < synthetic.parameters(kind.shape) < 66e6
        assert bool(big.window) == bool(tiny.window)
    assert set(families.NAMES) <= {each.name for each in WORKLOADS}
    assert set(QUICK_KINDS) < {each.name for each in KINDS}


def test_all_kinds_and_workloads_are_measured_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[families.Settings] = []
    monkeypatch.setattr(families, "run", lambda **given: asked.append(given["settings"]))
    for arguments in ([], ["--quick", "--against", "llama-server"], ["--kind", "mla", "--only", "agent"]):
        assert main(["families", "--out", str(tmp_path), *arguments]) == 0
    usual, quick, one = asked
    assert (usual.kinds, usual.workloads, usual.peers) == (list(KINDS), families.NAMES, families.USUAL)
    assert (usual.scale, usual.tiny) == (families.SCALE, False)
    assert ([kind.name for kind in quick.kinds], quick.workloads) == (list(QUICK_KINDS), QUICK_WORKLOADS)
    assert (quick.peers, quick.scale, quick.tiny) == (["llama-server"], families.QUICK_SCALE, True)
    assert ([kind.name for kind in one.kinds], one.workloads) == (["mla"], ["agent"])


@pytest.fixture
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "ensure", partial(synthetic.ensure, folder=tmp_path))
    monkeypatch.setattr("bench.peers.build.has_llama_server", lambda: False)


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
def test_a_quick_look_counts_what_llamaslot_computes(tmp_path: Path) -> None:
    with forked_servers():
        assert main(["families", "--quick", "--scale", "0.1", "--threads", "1", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "families.json").read_text())
    runs = result["runs"]
    assert [(run["kind"], run["workload"]) for run in runs] == [
        (kind, workload) for kind in QUICK_KINDS for workload in QUICK_WORKLOADS
    ]
    for run in runs:
        assert run["server"] == OWN
        assert run["checkpoint_mib"] > 0
        for n_prompt, computed, need in zip(
            run["prompt_tokens"], run["computed_tokens"], run["needs"], strict=True
        ):
            assert need["fewest"] <= computed <= n_prompt
            assert n_prompt == max(need["fewest"] + need["matched"], 1)
    # The same text, whatever the kind of model.
    by_workload = [[run["prompt_tokens"] for run in runs if run["workload"] == name] for name in QUICK_WORKLOADS]
    assert all(first == second for first, second in by_workload)
    assert len(result["goals"]) == 4
    assert result["failures"] == {}


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("wrong", [families.COUNTER, families.DECODED])
def test_counts_that_the_metrics_do_not_confirm_are_no_result(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    miscount(monkeypatch, wrong)
    arguments = ["--kind", "dense", "--only", "chat", "--scale", "0.1", "--threads", "1", "--out", str(tmp_path)]
    with forked_servers():
        assert main(["families", "--quick", *arguments]) == 1
    assert f"{wrong} is" in capsys.readouterr().err
    result = json.loads((tmp_path / "families.json").read_text())
    assert (result["runs"], list(result["failures"])) == ([], ["llamaslot, dense, chat"])


async def test_a_metric_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Response:
        status = 200

        async def __aenter__(self) -> Response:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def text(self) -> str:
            return "# TYPE a counter\na_total 7\n"

    class Session:
        def get(self, _path: str) -> Response:
            return Response()

    client = Client(Session())  # type: ignore[arg-type]
    assert await client.counter("a_total") == 7
    with pytest.raises(BenchmarkError, match="no b_total"):
        await client.counter("b_total")
