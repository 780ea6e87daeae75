"""What llamaslot is to reach: against whom, by how many pairs, and how it is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.contenders import CONTENDERS, OWN
from bench.figures import Run
from bench.goals import FRUGAL, GOALS, N_ALL, Ratio, best_peers, compared, players
from bench.memory import Memory
from bench.plots import draw
from bench.tables import goal_rows, markdown, memory_rows, rows
from bench.workloads import FEW, MANY, WORKLOADS

BY_NAME = {each.name: each for each in WORKLOADS}
GROUPS = BY_NAME["groups"]


def run(contender: str, repeat: int, seconds: float, workload: str = "groups") -> Run:
    """A run in which everything took so long."""
    return Run(
        workload=workload,
        contender=contender,
        repeat=repeat,
        ttft=[seconds, 2 * seconds, 3 * seconds],
        gaps=[seconds] * 4,
        wall=seconds,
        decode_rate=1 / seconds,
        n_output=10,
        n_prompt=100,
        n_computed=60,
        n_fewest=50,
    )


RUNS = [
    *(run(OWN, repeat, seconds) for repeat, seconds in enumerate((1, 2, 3))),
    *(run("llama-server", repeat, seconds) for repeat, seconds in enumerate((10, 10, 10))),
    *(run("llama-server -kvu", repeat, seconds) for repeat, seconds in enumerate((4, 4, 4))),
    *(run("llama-cpp-python", repeat, seconds) for repeat, seconds in enumerate((0.1, 0.1, 0.1))),
]


def test_the_best_llama_server_is_the_one_to_beat_and_pairs_are_of_one_repeat() -> None:
    ratio, computed = compared(GROUPS, RUNS)
    assert (ratio.peer, ratio.n_pairs) == ("llama-server -kvu", 3)
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.25, 0.75)
    assert 0.25 <= ratio.interval[0] <= 0.5 <= ratio.interval[1] <= 0.75
    assert (computed.peer, computed.median, computed.goal) == ("the fewest possible", 1.2, 1.05)


def test_where_more_is_better_the_best_has_most() -> None:
    runs = [replace(each, workload="decode 8") for each in RUNS]
    [ratio] = compared(BY_NAME["decode 8"], runs)
    assert (ratio.peer, ratio.median, ratio.is_on_target) == ("llama-server -kvu", 2.0, True)
    slower = [replace(each, decode_rate=each.decode_rate / (4 if each.contender == OWN else 1)) for each in runs]
    [ratio] = compared(BY_NAME["decode 8"], slower)
    assert (ratio.median, ratio.is_on_target) == (0.5, False)
    silent = [replace(each, decode_rate=0.0 if each.repeat else each.decode_rate) for each in runs]
    assert [each.n_pairs for each in compared(BY_NAME["decode 8"], silent)] == [1]


def test_the_best_is_found_where_all_play_and_every_pair_counts() -> None:
    later = [run("llama-server", N_ALL, 0.001), run("llama-server -kvu", N_ALL, 4), run(OWN, N_ALL, 100)]
    assert best_peers("groups", RUNS + later) == {"TTFT mean": "llama-server -kvu"}
    ratio, _ = compared(GROUPS, RUNS + later)
    assert (ratio.peer, ratio.n_pairs, ratio.high) == ("llama-server -kvu", 4, 25)


def test_without_a_peer_there_is_nothing_to_compare() -> None:
    alone = compared(GROUPS, [each for each in RUNS if "server" not in each.contender])
    assert [each.metric for each in alone] == ["computed"]
    assert compared(GROUPS, [each for each in RUNS if each.contender != OWN]) == []
    assert compared(BY_NAME["restart"], [replace(each, workload="restart") for each in RUNS]) == []


@pytest.mark.parametrize(
    ("pairs", "at_least", "verdict"),
    [
        ([0.9] * 20, False, "met"),
        ([0.9] * 11 + [1.2] * 9, False, "open"),
        ([0.9] * 9 + [1.2] * 11, False, "short"),
        ([0.9] * 19, False, "few pairs"),
        ([1.1] * 20, True, "met"),
        ([0.8] * 9 + [1.1] * 11, True, "open"),
        ([0.8] * 20, True, "short"),
    ],
)
def test_a_goal_is_met_by_the_median_and_the_end_of_its_interval(
    pairs: list[float], at_least: bool, verdict: str
) -> None:
    ratio = Ratio.of("chat", "TTFT p50", "a", pairs=pairs, goal=1.0, n_needed=20, at_least=at_least)
    assert (ratio.verdict, ratio.is_met) == (verdict, verdict == "met")


def test_bounds_near_one_take_many_pairs() -> None:
    for workload in WORKLOADS:
        timed = [(metric, goal) for metric, goal in GOALS.get(workload.name, ()) if metric.name != "resident"]
        is_near = any(0.8 < goal < 1.25 for _, goal in timed)
        assert workload.n_pairs == (MANY if is_near else FEW), workload.name
    assert set(GOALS) | set(FRUGAL) <= set(BY_NAME)
    assert N_ALL % 2 == 0
    assert (FEW, MANY) == (N_ALL, 20)


def test_all_play_at_first_and_then_llamaslot_and_the_best_forwards_and_backwards() -> None:
    everyone = [each for each in CONTENDERS if each.plays("groups")]
    assert players(GROUPS, CONTENDERS, 0, []) == everyone
    assert players(GROUPS, CONTENDERS, 1, []) == everyone[::-1]
    names = [each.name for each in players(GROUPS, CONTENDERS, N_ALL, RUNS)]
    assert names == ["llama-server -kvu", OWN]
    assert [each.name for each in players(GROUPS, CONTENDERS, N_ALL + 1, RUNS)] == names[::-1]
    alone = [each for each in CONTENDERS if each.name == OWN]
    assert players(GROUPS, alone, N_ALL, [each for each in RUNS if each.contender == OWN]) == alone


def test_every_figure_with_a_goal_keeps_its_best_player() -> None:
    runs = [replace(each, workload="low reuse") for each in RUNS]
    runs = [replace(each, n_output=1000) if each.contender == "llama-server" else each for each in runs]
    names = {each.name for each in players(BY_NAME["low reuse"], CONTENDERS, N_ALL, runs)}
    assert names == {OWN, "llama-server", "llama-server -kvu"}


def test_tables_and_pictures_show_what_was_measured(tmp_path: Path) -> None:
    assert rows("groups", RUNS)[0][:2] == ["llama-server", "20,000"]
    assert rows("groups", RUNS)[-1][-3:] == ["60", "50", "1.20"]
    silent = [replace(each, n_computed=None) for each in RUNS]
    assert rows("groups", silent)[0][-3:] == ["", "50", ""]
    ratios = compared(GROUPS, RUNS)
    assert goal_rows(ratios)[0][-3:] == ["3", "<= 0.60", "few pairs"]
    text = markdown(RUNS, ratios, "a model")
    assert "| groups | TTFT mean | llama-server -kvu | 0.50 |" in text
    assert "## groups" in text
    draw(
        [*RUNS, *(replace(each, workload=name) for each in RUNS for name in ("chat", "decode 1"))],
        tmp_path,
        "a model",
    )
    assert (tmp_path / "peers.png").stat().st_size > 10_000


def test_memory_beyond_what_all_must_have_is_compared() -> None:
    mib = 2**20
    weighed = {
        OWN: Memory(resident=(60 + 32 + 8) * mib, pool=32 * mib, tier=8 * mib, n_seqs=41),
        "llama-server": Memory(resident=(50 + 32) * mib, pool=32 * mib, tier=0, n_seqs=8),
        "llama-cpp-python": Memory(resident=(90 + 32) * mib, pool=32 * mib, tier=0, n_seqs=None),
    }
    runs = [replace(run(name, 0, 1, "memory"), memory=memory) for name, memory in weighed.items()]
    [ratio] = compared(BY_NAME["memory"], runs)
    assert (ratio.peer, ratio.median) == ("llama-server", 1.2)
    assert memory_rows(runs) == [
        ["llama-server", "82", "32", "0", "50", "8"],
        [OWN, "100", "32", "8", "60", "41"],
        ["llama-cpp-python", "122", "32", "0", "90", ""],
    ]
    assert "| llamaslot | 100 | 32 | 8 | 60 | 41 |" in markdown(runs, [ratio], "a model")
    assert memory_rows(RUNS) == []
