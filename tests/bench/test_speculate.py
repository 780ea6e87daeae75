"""The benchmark of drafts: prompts whose replies are known, figures and verdicts. Never timed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench import gpu, speculate, synthetic
from bench.client import BenchmarkError, Completion
from bench.quoting import CHAT, REWRITE, TOOLS, ChainPrompts, Prompt, RealPrompts
from bench.speculate import BESIDE, DRAFTING, NO_DRAFTS, PEERS, WITHOUT, Goal, Run
from bench.tokens import Tokens
from tests.bench.forked_servers import forked_servers
from tests.real.cold import ColdModel

SCALE = 0.08
"""So that texts fit into the words of a tiny vocabulary."""
N_VOCAB = 151_936
SIDES = DRAFTING.name, WITHOUT.name


def shared_runs(prompt: Sequence[int], reply: Sequence[int], n: int = 8) -> int:
    """Return how many runs of `n` tokens of a reply are in the prompt."""
    seen = {tuple(prompt[i : i + n]) for i in range(len(prompt) - n + 1)}
    return sum(tuple(reply[i : i + n]) in seen for i in range(len(reply) - n + 1))


def reply_of(prompt: Prompt) -> list[int]:
    """Return the reply of a chain."""
    first = prompt.ids[-1] + 1
    return list(range(first, first + prompt.n_reply))


@pytest.mark.parametrize(
    "shape", ["tiny", *(pytest.param(f"tiny-{name}", marks=pytest.mark.slow) for name in ("lfm2", "qwen35"))]
)
def test_a_chain_replies_with_what_its_prompts_repeat(shape: str, tmp_path: Path) -> None:
    path = synthetic.ensure(shape, folder=tmp_path, is_chain=True)
    assert path != synthetic.ensure(shape, folder=tmp_path)
    model = ColdModel(path, 1024)
    prompts, chance = ChainPrompts(model.backend.vocab.n_tokens, SCALE), random.Random(3)
    for kind in (REWRITE, TOOLS, CHAT):
        prompt = prompts.draw(kind, chance)
        assert model.reply(prompt.ids, prompt.n_reply).tokens == reply_of(prompt)
    model.backend.close()


def test_prompts_of_a_chain_have_as_much_of_the_reply_as_they_should() -> None:
    prompts, chance = ChainPrompts(N_VOCAB), random.Random(1)
    prompt = prompts.draw(REWRITE, chance)
    file = range(prompt.ids[-1] + 1, prompt.ids[-1] + 1501)
    n_changed = len({*file} - {*prompt.ids})
    assert 60 <= n_changed <= 80
    assert len(prompt.ids) == 32 + 1500 + 16 + 1
    prompt = prompts.draw(TOOLS, chance)
    # Four of five pieces of 40 tokens, each in another result.
    assert shared_runs(prompt.ids, reply_of(prompt)) == 4 * (40 - 8 + 1)
    assert len(prompt.ids) == 64 + 4 * (24 + 250) + 1
    prompt = prompts.draw(CHAT, chance)
    assert shared_runs(prompt.ids, reply_of(prompt)) == 0


def test_a_text_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="words are too few"):
        ChainPrompts(512).draw(REWRITE, random.Random(1))


def test_prompts_for_trained_weights_begin_the_reply_and_forbid_a_token(tiny_model: Path) -> None:
    prompts, chance = RealPrompts(Tokens(tiny_model), 0.5), random.Random(2)
    seen = set()
    for _ in range(5):
        prompt = prompts.draw(REWRITE, chance)
        [[forbidden, bias]] = prompt.fields["logit_bias"]
        assert bias is False
        assert forbidden in prompt.ids
        seen.add(tuple(prompt.ids))
        assert 600 < len(prompt.ids) < 1300
        assert shared_runs(prompt.ids[:-12], prompt.ids[-12:]) >= 1
        prompt = prompts.draw(TOOLS, chance)
        assert shared_runs(prompt.ids[:-12], prompt.ids[-12:]) >= 1
        assert prompts.draw(CHAT, chance).ids != prompts.draw(CHAT, chance).ids
    assert len(seen) == 5


def completion(arrivals: Sequence[float], counts: Sequence[int], **timings: int) -> Completion:
    return Completion(
        tokens=(7,) * sum(counts),
        started=arrivals[0] - 0.5,
        arrivals=tuple(arrivals),
        counts=tuple(counts),
        ended=arrivals[-1],
        timings=timings,
    )


def test_figures_are_those_of_the_time_in_which_all_streams_run() -> None:
    chat = completion([1.0, 2.0, 3.0, 5.0, 6.0], [1, 1, 1, 1, 1])
    rewrite = completion([1.5, 2.0, 2.0, 5.0, 5.0], [1, 2, 3, 4, 2], draft_n=12, draft_n_accepted=9)
    figures = speculate.measured([chat, rewrite], [chat])
    assert figures["rate"] == (3 + 11) / 3.5
    assert figures["stream_rate"] == (4 / 5 + 11 / 3.5) / 2
    assert figures["ttft"] == 0.5
    assert (figures["gap_p50"], figures["n_tokens"]) == (1.5, 17)
    assert (figures["n_drafted"], figures["n_accepted"]) == (12, 9)
    # Chunks that come at once have no gap between them.
    assert speculate.measured([rewrite], [rewrite])["gap_p50"] == 1.75
    with pytest.raises(BenchmarkError, match="side by side"):
        speculate.measured([chat, completion([6.0, 7.0], [1, 1])], [chat])


def runs(workload: str, n: int, *, n_pairs: int, n_drafted: int = 100, **rates: float) -> list[Run]:
    """Return runs of servers by their rate, which is also their gap."""
    servers = {"own": DRAFTING.name, "off": WITHOUT.name, "plain": PEERS[0].name, "mod": PEERS[1].name}
    return [
        Run(workload, n, repeat, servers[name], rate, rate, 0.1, rate, rate, 1000, n_drafted, n_drafted // 2)
        for name, rate in rates.items()
        for repeat in range(n_pairs)
    ]


def verdicts(found: list[Run]) -> dict[tuple[str, str], str]:
    return {(each.workload, each.peer): speculate.verdict(each, found) for each in speculate.ratios(found)}


def test_goals_are_judged_beside_ourselves_and_the_best_llama_server() -> None:
    found = runs(REWRITE, 1, n_pairs=4, own=30, off=10, plain=12, mod=25)
    assert verdicts(found) == {
        ("rewrite 1", "llamaslot, no drafts"): "met",
        ("rewrite 1", "llama-server ngram-mod"): "missed",
    }
    found = runs(CHAT, 8, n_pairs=20, own=9.9, off=10) + runs(CHAT, 4, n_pairs=20, own=9.7, off=10)
    found += runs(CHAT, 1, n_pairs=19, own=9.9, off=10)
    assert [*verdicts(found).values()] == ["few pairs", "missed", "met"]
    assert [*verdicts(runs(BESIDE, 8, n_pairs=4, own=1.05, off=1)).values()] == ["met"]
    assert [*verdicts(runs(BESIDE, 8, n_pairs=4, own=1.15, off=1)).values()] == ["missed"]


def test_a_model_without_drafts_misses_no_goal_that_needs_them() -> None:
    found = runs(REWRITE, 8, n_pairs=4, n_drafted=0, own=10, off=10, plain=9)
    assert {*verdicts(found).values()} == {NO_DRAFTS}
    assert [*verdicts(runs(CHAT, 8, n_pairs=20, n_drafted=0, own=10, off=10)).values()] == ["met"]


def test_the_gpu_table_has_a_row_for_each_goal() -> None:
    found = runs(REWRITE, 1, n_pairs=1, own=30, off=10, plain=12, mod=25)
    raw = {"model": "large", "runs": [vars(each) for each in found]}
    rows = gpu.speculation_rows("8b", raw)
    assert [row.verdict for row in rows] == ["met", "missed", ""]
    assert rows[-1].value == "50 of 100"


@pytest.mark.slow
def test_both_sides_give_whole_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = synthetic.ensure("tiny", folder=tmp_path, is_chain=True)
    monkeypatch.setattr(speculate, "model_of", lambda _: (path, "tiny"))
    # Several replies of such a model may end one after another.
    alone = [replace(each, streams=(1,)) for each in speculate.WORKLOADS if each.kinds == (REWRITE,)]
    monkeypatch.setattr(speculate, "WORKLOADS", alone)
    monkeypatch.setattr(speculate, "GOALS", [Goal(REWRITE, (1,), 2.5)])
    with forked_servers():
        speculate.run(
            model="tiny",
            repeats=1,
            scale=SCALE,
            threads=1,
            folder=tmp_path,
            server_flags=(),
            only=(REWRITE, "sampled rewrite"),
            against=(),
            streams=speculate.STREAMS,
            time_limit_s=300.0,
        )
    content = json.loads((tmp_path / "speculate.json").read_text())
    own, without = ([each for each in content["runs"] if each["server"] == name] for name in SIDES)
    assert not any(each["n_drafted"] for each in without)
    assert [each["n_tokens"] for each in (*own, *without)] == [32] * 4
    assert all(each["rate"] > 0 for each in content["runs"])
    assert not content["failures"]
