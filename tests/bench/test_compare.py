"""The comparison with other servers: what it counts, what it compares, and one play against a real server."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.client import BenchmarkError
from bench.compare import Run, _Bench, compared, goal_rows, markdown, rows
from bench.contenders import CONTENDERS, Load
from bench.plots import draw
from bench.tokens import Tokens, fewest
from bench.workloads import WORKLOADS


@pytest.mark.parametrize(
    ("requests", "n"),
    [
        ([], 0),
        ([([1, 2, 3], [])], 3),
        ([([1, 2, 3], []), ([1, 2, 4], [])], 3 + 1),
        ([([1, 2, 3], []), ([1, 2, 3], [])], 3 + 1),
        ([([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [])], 2 + 2),
        ([([1, 2], [3, 4]), ([2, 1], [])], 2 + 2),
        ([([1, 2, 3], []), ([1, 9, 3], []), ([1, 9, 3, 5], [])], 3 + 2 + 1),
    ],
)
def test_the_fewest_tokens_that_anyone_could_compute(requests: list[tuple[list[int], list[int]]], n: int) -> None:
    assert fewest(requests) == n


def test_text_is_drawn_to_the_token_and_rendered_as_servers_do(tiny_model: Path) -> None:
    tokens = Tokens(tiny_model)
    text = tokens.draw(random.Random(1), 37)
    assert len(tokens.of(text)) == 37
    alone = tokens.prompt([{"role": "user", "content": " abc"}])
    both = tokens.prompt([{"role": "user", "content": " abc"}, {"role": "assistant", "content": text}])
    assert both[: len(alone) - 3] == alone[: len(alone) - 3]
    with pytest.raises(BenchmarkError, match="cannot read"):
        Tokens(Path(__file__))


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
    *(run("llamaslot", repeat, seconds) for repeat, seconds in enumerate((1, 2, 3))),
    *(run("llama-server", repeat, seconds) for repeat, seconds in enumerate((10, 10, 10))),
    *(run("llama-server -kvu", repeat, seconds) for repeat, seconds in enumerate((4, 4, 4))),
    *(run("llama-cpp-python", repeat, seconds) for repeat, seconds in enumerate((0.1, 0.1, 0.1))),
]


def test_the_best_llama_server_is_the_one_to_beat_and_pairs_are_of_one_repeat() -> None:
    [ratio] = compared("groups", RUNS)
    assert (ratio.peer, ratio.n_pairs) == ("llama-server -kvu", 3)
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.25, 0.75)
    assert ratio.is_met
    assert 0.25 <= ratio.interval[0] <= 0.5 <= ratio.interval[1] <= 0.75
    assert goal_rows([ratio])[0][-2:] == ["<= 0.60", "met"]


def test_where_more_is_better_the_best_has_most() -> None:
    runs = [replace(each, workload="decode 8") for each in RUNS]
    [ratio] = compared("decode 8", runs)
    assert (ratio.peer, ratio.median, ratio.is_met) == ("llama-server -kvu", 2.0, True)
    slower = [
        replace(each, decode_rate=each.decode_rate / 4) if each.contender == "llamaslot" else each for each in runs
    ]
    [ratio] = compared("decode 8", slower)
    assert (ratio.median, ratio.is_met) == (0.5, False)
    assert goal_rows([ratio])[0][-2:] == [">= 1.15", "short"]


def test_without_a_peer_there_is_nothing_to_compare() -> None:
    assert compared("groups", [each for each in RUNS if "server" not in each.contender]) == []
    assert compared("groups", [each for each in RUNS if each.contender != "llamaslot"]) == []


def test_tables_and_pictures_show_what_was_measured(tmp_path: Path) -> None:
    assert rows("groups", RUNS)[0][:2] == ["llama-server", "20,000"]
    assert rows("groups", RUNS)[-1][-3:] == ["60", "50", "1.20"]
    silent = [replace(each, n_computed=None) for each in RUNS]
    assert rows("groups", silent)[0][-3:] == ["", "50", ""]
    text = markdown(RUNS, compared("groups", RUNS), "a model")
    assert "| groups | TTFT mean | llama-server -kvu | 0.50 |" in text
    assert "## groups" in text
    draw(
        [*RUNS, *(replace(each, workload=name) for each in RUNS for name in ("chat", "decode 1"))],
        tmp_path,
        "a model",
    )
    assert (tmp_path / "peers.png").stat().st_size > 10_000


def test_every_slot_has_room_for_the_longest_prompt_but_where_the_pool_is_short() -> None:
    by_name = {workload.name: workload for workload in WORKLOADS}
    assert by_name["agent"].n_ctx(8, 1.0) >= 8 * 10_600
    assert by_name["pressure"].n_ctx(8, 1.0) < 8 * 1500 / 2


def test_all_contenders_are_told_the_same(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.contenders.peers.llama_server", lambda: Path("llama-server"))
    load = Load(tiny_model, n_slots=8, n_threads=2, n_ctx=4096, more=("-ngl", "9"))
    for contender in CONTENDERS:
        words = " ".join(contender.command(load))
        assert str(tiny_model) in words
        assert ("-np 8 -c 4096 -t 2 -tb 2 -fa on" in words) == (contender.kind != "llama-cpp-python")


def test_a_play_against_a_real_server(tiny_model: Path, tmp_path: Path) -> None:
    bench = _Bench(Tokens(tiny_model), Load(tiny_model, 8, 1, 0), 0.05, tmp_path)
    workloads = [each for each in WORKLOADS if each.name in ("branching", "fan-out cold")]
    contenders = [each for each in CONTENDERS if each.name == "llamaslot"]
    branching, fan_out = sorted(
        asyncio.run(bench.measure(workloads, contenders, 1)), key=lambda each: each.workload
    )
    assert (len(branching.ttft), len(fan_out.ttft)) == (1 + 8 * 2, 16)
    for each in (branching, fan_out):
        assert each.n_computed is not None
        assert each.n_fewest <= each.n_computed <= 1.05 * each.n_fewest + 16
        assert each.n_prompt > 2 * each.n_computed
        assert each.n_output == 16 * len(each.ttft)
