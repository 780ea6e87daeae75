"""Recorded agent sessions: what is read of them, the plan, the prompts, and a replay on a real server."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.client import BenchmarkError
from bench.traces import run as traces
from bench.traces.recording import MAX_DELAY_S, Context, Recorded, fitting, plan, read, requests_of
from bench.traces.replay import BlockTokens, fits, n_reply
from bench.traces.run import Settings
from tests.bench.forked_servers import forked_servers
from tests.conftest import LONG

TRACES = Path(__file__).parent / "traces"
N_COMPUTED = 84
"""Prompt tokens of the two recordings that have to be computed: their replies stand for a part of the prompts."""
SETTINGS = Settings(
    directory=TRACES,
    n_sessions=2,
    n_requests=100,
    n_slots=4,
    n_ctx_slot=160,
    time_scale=0.001,
    in_turn=True,
    seed=1,
)


def test_a_session_is_read_with_its_sub_agents() -> None:
    one = read(TRACES / "one.json")
    assert [step.name if isinstance(step, Context) else step.delay_s for step in one.steps] == [
        *(0.0, 2.0, "one/first", "one/second"),
        1.0,
    ]
    agent = one.steps[2]
    assert isinstance(agent, Context)
    assert agent.steps[1] == Recorded(2.0, 3.0, 90 / 64, (1, 2, 3, 4, 5, 6, *range(101, 110)))
    assert len([*requests_of(one)]) == 6


def test_without_a_recorded_pause_the_times_give_it() -> None:
    two = read(TRACES / "two.json")
    assert [request.delay_s for request in requests_of(two)] == [0.0, 8.0, MAX_DELAY_S, 10.0]


@pytest.mark.parametrize("text", ["", "[]", '{"id": "a"}', '{"requests": [{"t": "soon"}]}', '{"requests": [7]}'])
def test_other_files_are_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    file.write_text(text)
    with pytest.raises(BenchmarkError, match=r"some\.json is not a recorded session"):
        read(file)


def test_a_session_ends_at_its_first_request_that_does_not_fit() -> None:
    two = fitting(read(TRACES / "two.json"), lambda request: fits(request, 160))
    assert [len(request.blocks) for request in requests_of(two)] == [14, 17, 10]
    assert not [*requests_of(fitting(two, lambda request: fits(request, 80)))]


def test_sub_agents_run_side_by_side_and_the_session_goes_on_after_them() -> None:
    planned = plan([(10.0, read(TRACES / "one.json"))], 100)
    assert [(each.context, each.at_s) for each in planned] == [
        ("one", 10.0),
        ("one", 16.0),
        ("one/first", 19.0),
        ("one/second", 19.0),
        ("one/first", 23.0),
        ("one", 27.0),
    ]
    assert [each.after for each in planned] == [(), (0,), (1,), (1,), (2,), (3, 4)]
    assert [each.previous for each in planned] == [None, 0, None, None, 2, 1]


def test_a_request_comes_after_those_that_it_waits_for_however_many_are_planned() -> None:
    sessions = [(0.0, read(TRACES / "one.json")), (3.0, read(TRACES / "two.json"))]
    whole = plan(sessions, 100)
    assert len(whole) == 10
    assert [each.at_s for each in whole] == sorted(each.at_s for each in whole)
    for n in range(11):
        planned = plan(sessions, n)
        assert planned == whole[:n]
        assert all(other < i for i, each in enumerate(planned) for other in each.after)


def test_prompts_share_the_tokens_of_the_blocks_that_they_share() -> None:
    tokens = BlockTokens(512, seed=1)
    blocks = range(1000)
    prompt = tokens.prompt("s", blocks)
    assert 1400 < len(prompt) < 1600
    assert {len(tokens.prompt("s", [block])) for block in blocks} == {1, 2}
    assert all(0 <= token < 512 for token in prompt)
    assert tokens.prompt("s", range(500)) == prompt[: len(tokens.prompt("s", range(500)))]
    assert BlockTokens(512, seed=1).prompt("s", blocks) == prompt
    for other in (tokens.prompt("t", blocks), BlockTokens(512, seed=2).prompt("s", blocks)):
        assert other[:8] != prompt[:8]


def test_a_reply_stands_for_the_first_new_blocks_of_the_next_prompt() -> None:
    tokens = BlockTokens(512, seed=1)
    before = tokens.prompt("s", range(5))
    drawn = BlockTokens(512, seed=1).prompt("s", range(20))
    reply = [1000, 1001, 1002]
    tokens.add_reply("s", range(5, 20), reply)
    after = tokens.prompt("s", range(20))
    assert after == before + reply + drawn[len(before) + 3 :]
    tokens.add_reply("s", range(5, 20), [7] * 9)
    assert tokens.prompt("s", range(20)) == after, "known blocks keep their tokens"


def test_every_drawn_prompt_fits_the_slot_that_it_was_chosen_for() -> None:
    chance = random.Random(1)
    for _ in range(300 if LONG else 100):
        n = chance.randint(1, 3000)
        request = Recorded(0.0, 0.0, chance.uniform(0, 200), tuple(range(n)))
        n_ctx = chance.randint(64, 6000)
        n_prompt = len(BlockTokens(512, chance.randint(0, 9)).prompt(str(n_ctx), request.blocks))
        assert not fits(request, n_ctx) or n_prompt + n_reply(request) <= n_ctx


@pytest.mark.slow
@pytest.mark.parametrize("in_turn", [True, False])
def test_a_replay_on_a_real_server_computes_what_the_oracle_computes(
    in_turn: bool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "WRITES_POLL_S", 0.2)
    with forked_servers():
        traces.run(
            settings=replace(SETTINGS, in_turn=in_turn),
            model=tiny_model,
            title="tiny",
            repeats=1,
            threads=1,
            against=["llamaslot, with a disk"],
            folder=tmp_path,
            server_flags=(),
        )
    result = json.loads((tmp_path / "traces.json").read_text())
    [run] = result["runs"]
    assert result["settings"]["directory"] == "traces"
    assert sorted(run["contexts"]) == ["one"] * 3 + ["one/first"] * 2 + ["one/second"] + ["two"] * 3
    assert run["n_prompt"] == sum(run["prompt_tokens"]) > 2 * run["n_computed"]
    assert run["n_computed"] == sum(run["computed_tokens"]) == run["n_fewest"]
    assert run["n_computed"] == N_COMPUTED
    assert len(run["ttft"]) == 9
    assert all(time > 0 for time in run["ttft"])
    assert run["model_cpu"] > 0
    assert run["disk_bytes"] > 0
    assert run["ram_bytes"] >= run["disk_bytes"]


def test_a_folder_without_sessions_that_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="there are no recorded sessions"):
        traces.chosen(replace(SETTINGS, directory=tmp_path))
    with pytest.raises(BenchmarkError, match="has a prompt that fits 70 tokens"):
        traces.chosen(replace(SETTINGS, n_ctx_slot=70))


def test_the_same_seed_chooses_the_same_requests() -> None:
    assert traces.chosen(SETTINGS) == traces.chosen(SETTINGS)
    assert len(traces.chosen(replace(SETTINGS, n_requests=4))) == 4
    assert {each.scope for each in traces.chosen(replace(SETTINGS, n_sessions=1))} in ({"one"}, {"two"})
