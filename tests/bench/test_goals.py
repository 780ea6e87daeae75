"""The goals: which server is compared with, how many pairs are needed, and how the result is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.peers.goals import FRUGAL, GOALS, N_ALL, Ratio, Selection, best_peers, compared
from bench.peers.plots import draw
from bench.peers.results import RunResult
from bench.peers.servers import OWN, SERVERS
from bench.peers.tables import goal_rows, markdown, rows
from bench.peers.workloads import FEW, MANY, REAL, SEVERAL, WORKLOADS

BY_NAME = {each.name: each for each in (*WORKLOADS, *REAL)}
GROUPS = BY_NAME["groups"]


def run(server: str, repeat: int, seconds: float, workload: str = "groups") -> RunResult:
    """A run in which everything took this long."""
    return RunResult(
        workload=workload,
        server=server,
        repeat=repeat,
        ttft=[seconds, 2 * seconds, 3 * seconds],
        gap_p50=seconds,
        gap_p99=seconds,
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


def test_pairs_are_formed_within_a_repeat_with_the_best_llama_server() -> None:
    ratio, computed = compared(GROUPS, RUNS)
    assert (ratio.peer, ratio.n_pairs) == ("llama-server -kvu", 3)
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.25, 0.75)
    assert 0.25 <= ratio.interval[0] <= 0.5 <= ratio.interval[1] <= 0.75
    assert (computed.peer, computed.median, computed.goal) == ("the fewest possible", 1.2, 1.05)


def test_the_best_server_has_the_greatest_figure_if_more_is_better() -> None:
    runs = [replace(each, workload="decode 8") for each in RUNS]
    [ratio] = compared(BY_NAME["decode 8"], runs)
    assert (ratio.peer, ratio.median, ratio.is_on_target) == ("llama-server -kvu", 2.0, True)
    slower = [replace(each, decode_rate=each.decode_rate / (4 if each.server == OWN else 1)) for each in runs]
    [ratio] = compared(BY_NAME["decode 8"], slower)
    assert (ratio.median, ratio.is_on_target) == (0.5, False)
    silent = [replace(each, decode_rate=0.0 if each.repeat else each.decode_rate) for each in runs]
    assert [each.n_pairs for each in compared(BY_NAME["decode 8"], silent)] == [1]


def test_the_best_server_is_chosen_by_the_first_pairs_and_every_pair_counts() -> None:
    later = [run("llama-server", N_ALL, 0.001), run("llama-server -kvu", N_ALL, 4), run(OWN, N_ALL, 100)]
    assert best_peers("groups", RUNS + later) == {"TTFT mean": "llama-server -kvu"}
    ratio, _ = compared(GROUPS, RUNS + later)
    assert (ratio.peer, ratio.n_pairs, ratio.high) == ("llama-server -kvu", 4, 25)


def test_without_a_peer_there_is_nothing_to_compare() -> None:
    alone = compared(GROUPS, [each for each in RUNS if "server" not in each.server])
    assert [each.metric for each in alone] == ["computed"]
    assert compared(GROUPS, [each for each in RUNS if each.server != OWN]) == []
    assert compared(BY_NAME["restart"], [replace(each, workload="restart") for each in RUNS]) == []


@pytest.mark.parametrize(
    ("pairs", "at_least", "verdict"),
    [
        ([0.9] * 20, False, "met"),
        ([0.9] * 11 + [1.2] * 9, False, "open"),
        ([0.9] * 9 + [1.2] * 11, False, "missed"),
        ([0.9] * 19, False, "few pairs"),
        ([1.1] * 20, True, "met"),
        ([0.8] * 9 + [1.1] * 11, True, "open"),
        ([0.8] * 20, True, "missed"),
    ],
)
def test_a_goal_is_met_by_the_median_and_the_end_of_its_interval(
    pairs: list[float], at_least: bool, verdict: str
) -> None:
    ratio = Ratio.of("chat", "TTFT p50", "a", pairs=pairs, goal=1.0, n_needed=20, at_least=at_least)
    assert (ratio.verdict, ratio.is_met) == (verdict, verdict == "met")


def test_goals_near_one_need_many_pairs() -> None:
    for workload in (*WORKLOADS, *REAL):
        is_near = any(0.8 < goal < 1.25 for _, goal in GOALS.get(workload.name, ()))
        expected = SEVERAL if re.match("conversations|.*six", workload.name) else MANY if is_near else FEW
        assert workload.n_pairs == expected, workload.name
    assert set(GOALS) | set(FRUGAL) <= set(BY_NAME)
    assert N_ALL % 2 == 0
    assert FEW == N_ALL < SEVERAL < MANY


def names(selection: Selection, repeat: int, results: list[RunResult], workload: str = "groups") -> list[str]:
    return [each.name for each in selection.of(BY_NAME[workload], repeat, results)]


def test_all_servers_run_the_first_pairs_and_later_llamaslot_and_the_best_in_turn() -> None:
    everyone = [each.name for each in SERVERS if each.takes_part("groups")]
    selection = Selection(SERVERS)
    assert names(selection, 0, []) == everyone
    assert names(selection, 1, []) == everyone[::-1]
    runs = [*RUNS, run(OWN, 3, 1), run("llama-server -kvu", 3, 1)]
    later = Selection(SERVERS, n_reference=100)
    assert names(later, N_ALL, runs) == ["llama-server -kvu", OWN]
    assert names(later, N_ALL + 1, runs) == [OWN, "llama-server -kvu"]
    alone = Selection([each for each in SERVERS if each.name == OWN])
    assert names(alone, N_ALL, [each for each in RUNS if each.server == OWN]) == [OWN]
    assert [selection.expected(GROUPS, repeat) for repeat in (0, N_ALL)] == [len(everyone), 2]
    assert alone.expected(GROUPS, N_ALL) == 1


def test_servers_without_a_goal_can_run_fewer_pairs() -> None:
    judged = [each.name for each in SERVERS if each.takes_part("groups") and (each.is_peer or each.name == OWN)]
    assert names(Selection(SERVERS, n_reference=2), 2, []) == judged


def test_the_best_server_at_every_figure_with_a_goal_is_kept() -> None:
    runs = [replace(each, workload="low reuse") for each in RUNS]
    runs = [replace(each, n_output=1000) if each.server == "llama-server" else each for each in runs]
    assert set(names(Selection(SERVERS), N_ALL, runs, "low reuse")) == {OWN, "llama-server", "llama-server -kvu"}


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
