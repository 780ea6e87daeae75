"""Sampling on the device: the distribution, the state and the fallback of llama.cpp's chains in the graph.

Without a GPU the device is the CPU, which computes the same graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from llguidance import LLMatcher

from llamaslot.backend.llama import LlamaBackend, LlamaSettings, costs
from llamaslot.backend.llama.sampling import candidates, device_sampler
from llamaslot.backend.llama.sampling.device_sampler import ChainSpec, DeviceSampler
from llamaslot.backend.llama.sampling.host_sampler import HostSampler
from llamaslot.base.backend import Draws, Run, Sampler, Status
from llamaslot.base.commands import Constraint
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Copy, Remove
from llamaslot.base.tokens import Tokens
from tests.conftest import has_gpu

pytestmark = pytest.mark.gpu

N_SLOTS = 32
N_DRAWS = 20_000
START = 300
"""The token before all others."""
DEFAULT = Sampling()
GREEDY = Sampling(temperature=0.0)
TOP_K = Sampling(temperature=1.0, top_k=40, top_p=1.0, min_p=0.0)


def changed(sampling: Sampling, **fields: object) -> Sampling:
    return Sampling(**{name: getattr(sampling, name) for name in sampling.__struct_fields__} | fields)


def ids(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, dtype=np.int32)


class Streams:
    """A backend whose slots all compute the same token."""

    def __init__(self, model: Path, **fields: object) -> None:
        given: dict[str, object] = {"n_ctx": 2048, "n_slots": N_SLOTS, "n_cache_seqs": 1, "n_ubatch": 64} | fields
        self.backend = LlamaBackend(LlamaSettings(model, n_threads=1, backend_sampling=True, **given))
        self.n_vocab = self.backend.vocab.n_tokens
        assert self.backend.decode([Run(0, 0, ids([START]), 1)]).status is Status.OK
        self.logits = self.backend._logits(0).astype(np.float64)
        self.backend.change(Remove(0, 0))

    @property
    def n_set(self) -> int:
        """Number of times that a chain was set or removed."""
        return self.backend.stats.n_sampler_changes

    def sampler(self, sampling: Sampling, history: Sequence[int] = ()) -> DeviceSampler:
        sampler = self.backend.new_sampler(sampling, ids(history))
        assert isinstance(sampler, DeviceSampler)
        return sampler

    def step(self, draws: Draws, tokens: Sequence[int] = ()) -> list[int]:
        """Compute a token in the sequence of each draw, START if none is given, and draw the next one."""
        backend = self.backend
        tokens = tokens or [START] * len(draws)
        runs = [
            Run(seq, backend.seq_len(seq), ids([token]), 1) for (seq, _), token in zip(draws, tokens, strict=True)
        ]
        assert backend.decode(runs, draws).status is Status.OK
        return [token for (token,) in backend.sample(draws)]

    def clear(self) -> None:
        for seq in range(self.backend.n_seqs):
            self.backend.change(Remove(seq, 0))

    def text(self, sampling: Sampling, n: int, seq: int = 0, sampler: Sampler | None = None) -> list[int]:
        """Draw `n` tokens, each after the one before."""
        sampler = sampler or self.backend.new_sampler(sampling, ids([]))
        tokens = [START]
        for _ in range(n):
            tokens += self.step([(seq, sampler)], tokens[-1:])
        sampler.close()
        self.clear()
        return tokens[1:]


@pytest.fixture(scope="module")
def streams(tiny_model: Path) -> Iterator[Streams]:
    streams = Streams(tiny_model)
    yield streams
    streams.backend.close()


@pytest.fixture(autouse=True)
def no_chain_has_a_freed_sampler(streams: Streams) -> Iterator[None]:
    yield
    for chain in streams.backend._chains._chains.values():
        if chain.sampler is not None:
            chain.sampler.check_open()


def distribution(
    sampling: Sampling, logits: npt.NDArray[np.float64], history: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Return the probability of each token, by the definition of each sampler in the default order."""
    logits = logits.copy()
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    for token in set(history[-sampling.repeat_last_n :]) if sampling.repeat_last_n else ():
        count = list(history[-sampling.repeat_last_n :]).count(token)
        logits[token] *= sampling.repeat_penalty if logits[token] <= 0 else 1 / sampling.repeat_penalty
        logits[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    order = np.argsort(-logits, kind="stable")[: sampling.top_k]
    kept = logits[order]
    weights = np.exp(kept - kept[0])
    below = np.cumsum(weights / weights.sum()) - weights / weights.sum()
    kept = kept[below < sampling.top_p]
    kept = kept[kept >= kept[0] + math.log(sampling.min_p)] if sampling.min_p else kept
    weights = np.exp((kept - kept[0]) / sampling.temperature)
    result = np.zeros(len(logits))
    result[order[: len(kept)]] = weights / weights.sum()
    return result


def assert_drawn_from(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> None:
    """Pearson's chi-square test, at a significance of 1e-6."""
    n = int(counts.sum())
    assert not counts[expected == 0].any()
    # Rare tokens count as one, so that each class is expected at least five times.
    is_rare = expected * n < 5
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum()) * n
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    n_free = len(wanted) - 1
    assert n_free > 2, "too few classes to tell anything"
    # Wilson and Hilferty's approximation of the quantile; 4.75 standard deviations.
    bound = n_free * (1 - 2 / (9 * n_free) + 4.75 * math.sqrt(2 / (9 * n_free))) ** 3
    assert statistic < bound, (statistic, bound)


def _with_typical(make: Callable[[ChainSpec, int, int], Any]) -> Callable[..., Any]:
    """A chain in which a sampler without a device's part stands before the last one."""

    def made(spec: ChainSpec, n_vocab: int, seed: int) -> Any:
        chain = make(spec, n_vocab, seed)
        last = llama_cpp.llama_sampler_chain_remove(chain, llama_cpp.llama_sampler_chain_n(chain) - 1)
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_typical(0.9, 0))
        llama_cpp.llama_sampler_chain_add(chain, last)
        return chain

    return made


LIKELY = (3, 300, 301, 302)
CASES = {
    "top-k": (TOP_K, ()),
    "top-p": (changed(TOP_K, top_p=0.7), ()),
    "min-p": (changed(TOP_K, min_p=0.1), ()),
    "temperature": (changed(TOP_K, temperature=0.5), ()),
    "high temperature": (changed(TOP_K, temperature=2.0), ()),
    "repeat penalty": (changed(TOP_K, repeat_penalty=1.7), LIKELY),
    "presence penalty": (changed(TOP_K, presence_penalty=0.7), LIKELY),
    "frequency penalty": (changed(TOP_K, frequency_penalty=0.4), (*LIKELY, 300, 300, 302)),
    "short window": (changed(TOP_K, presence_penalty=3.0, repeat_last_n=2), LIKELY),
    "biases": (changed(TOP_K, logit_bias={300: 2.0, 301: -1.0, 302: -math.inf}), ()),
    "default": (DEFAULT, ()),
    "all": (
        changed(DEFAULT, repeat_penalty=1.2, frequency_penalty=0.2, logit_bias={5: 1.5}, top_p=0.9, min_p=0.1),
        LIKELY,
    ),
}


@pytest.mark.parametrize(
    ("sampling", "history"),
    [
        pytest.param(*case, id=name, marks=() if name in ("default", "all") else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_draws_have_the_distribution_of_their_samplers(
    streams: Streams, sampling: Sampling, history: Sequence[int]
) -> None:
    counts = np.zeros(streams.n_vocab, dtype=np.int64)
    best = np.argsort(-streams.logits)[:4].tolist()
    # The names of tokens stand for likely ones, on which penalties and biases have an effect.
    names = dict(zip(LIKELY, best, strict=True))
    history = [names[token] for token in history]
    sampling = changed(
        sampling, logit_bias={names.get(token, token): b for token, b in sampling.logit_bias.items()}
    )
    n_set = None
    for first in range(0, N_DRAWS, N_SLOTS):
        draws = [(seq, streams.sampler(changed(sampling, seed=first + seq), history)) for seq in range(N_SLOTS)]
        np.add.at(counts, streams.step(draws), 1)
        assert len(streams.backend._chains.on_device) == N_SLOTS
        for _, sampler in draws:
            sampler.close()
        streams.clear()
        n_set = n_set or streams.n_set
    assert streams.n_set == n_set, "a request with the same parameters needs no new chain"
    assert_drawn_from(counts, distribution(sampling, streams.logits, history))


@pytest.mark.cpu_only
def test_seeds_are_reproducible_whatever_runs_beside(streams: Streams) -> None:
    sampling = changed(DEFAULT, temperature=1.5, seed=11)
    alone = streams.text(sampling, 12)
    assert streams.text(sampling, 12, seq=5) == alone
    assert streams.text(changed(sampling, seed=12), 12) != alone
    samplers: list[tuple[int, Sampler]] = [
        (seq, streams.sampler(changed(sampling, seed=seed))) for seq, seed in ((3, 12), (4, 11), (9, 13))
    ]
    texts = [[START] for _ in samplers]
    for _ in range(12):
        for text, token in zip(texts, streams.step(samplers, [text[-1] for text in texts]), strict=True):
            text.append(token)
    streams.clear()
    assert texts[1][1:] == alone
    for _, sampler in samplers:
        sampler.close()


def test_a_seed_draws_what_it_draws_on_the_host(streams: Streams) -> None:
    # Where top-p is on, since it sorts; the order of what top-k alone leaves is not defined.
    for sampling in (
        changed(DEFAULT, seed=3),
        changed(DEFAULT, seed=4, temperature=2.0),
        changed(DEFAULT, seed=5, frequency_penalty=0.5, top_p=0.99),
        # In other orders.
        changed(DEFAULT, seed=6, samplers=("top_k", "temperature", "top_p", "min_p"), temperature=1.5),
        changed(DEFAULT, seed=7, samplers=("top_k", "top_p", "penalties", "temperature"), repeat_penalty=1.7),
        changed(DEFAULT, seed=8, samplers=("top_k", "penalties", "min_p", "top_p"), presence_penalty=0.7),
    ):
        on_device = streams.text(sampling, 20)
        on_host = streams.backend._host_sampler(sampling, ids([]))
        assert streams.text(sampling, 20, sampler=on_host) == on_device


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_request_keeps_its_state_when_it_moves_to_another_sequence(streams: Streams, penalty: float) -> None:
    sampling = changed(DEFAULT, temperature=1.5, seed=4, repeat_penalty=penalty)
    expected = streams.text(sampling, 10)
    sampler, other = streams.sampler(sampling), streams.sampler(changed(sampling, seed=5))
    text = [START]
    for i in range(10):
        seq = 7 if i < 5 else 8
        if i == 5:
            streams.backend.change(Copy(7, 8, 0, i))
            streams.backend.change(Remove(7, 0))
        text += streams.step([(seq, sampler)], text[-1:])
        # Another request takes the sequence between two steps of this one, as after a preemption.
        if i in (2, 6):
            n = streams.backend.seq_len(seq)
            streams.step([(seq, other)], [START])
            streams.backend.change(Remove(seq, n))
    assert text[1:] == expected
    streams.clear()
    sampler.close()
    other.close()


@pytest.mark.cpu_only
def test_a_sampler_goes_on_in_another_layout(tiny_model: Path) -> None:
    streams = Streams(tiny_model, n_ctx=1024, n_slots=2, may_partition=True)
    backend, sampling = streams.backend, changed(DEFAULT, temperature=1.5, seed=4)
    expected = streams.text(sampling, 8)
    sampler = streams.sampler(sampling)
    text = [START]
    for i in range(8):
        if i == 4:
            streams.clear()
            backend.set_layout(unified=False)
            assert backend.decode([Run(0, 0, ids(text[:-1]), 0)]).status is Status.OK
        text += streams.step([(0, sampler)], text[-1:])
    assert text[1:] == expected
    # Counted on: one chain in each context.
    assert (streams.n_set, backend.stats.n_device_sampled) == (2, 16)
    sampler.close()
    backend.close()


@pytest.mark.cpu_only
def test_prompts_of_several_lengths_draw_from_their_own_rows(tiny_model: Path) -> None:
    """In a partitioned pool, llama.cpp computes them in several passes, and the outputs in another order."""
    prompts = [[START] * n for n in (7, 1, 3, 12)]
    drawn = []
    for unified, on_device in itertools.product((True, False), repeat=2):
        streams = Streams(tiny_model, n_ctx=1024, n_slots=len(prompts), unified=unified)
        backend = streams.backend
        backend.info = msgspec.structs.replace(backend.info, samples_on_device=on_device)
        draws = [
            (seq, backend.new_sampler(changed(DEFAULT, temperature=1.5, seed=seq), ids([])))
            for seq in range(len(prompts))
        ]
        runs = [Run(seq, 0, ids(prompt), 1) for seq, prompt in enumerate(prompts)]
        assert backend.decode(runs, draws).status is Status.OK
        tokens = [token for (token,) in backend.sample(draws)]
        drawn.append((tokens, streams.step(draws, tokens)))
        assert backend.stats.n_device_sampled == on_device * 2 * len(prompts)
        for _, sampler in draws:
            sampler.close()
        backend.close()
    assert all(each == drawn[0] for each in drawn)


def test_a_batch_may_mix_device_host_and_grammar(streams: Streams) -> None:
    greedy = streams.text(GREEDY, 6)
    sampled = streams.text(changed(DEFAULT, seed=2), 6)
    scored = changed(GREEDY, n_probs=3)
    digits = streams.backend.compile(Constraint(LLMatcher.grammar_from_lark("start: /[0-9]{40}/"), "grammar"))
    constrained = streams.backend.new_sampler(GREEDY, ids([]), digits)
    samplers: list[tuple[int, Sampler]] = [
        (0, streams.sampler(GREEDY)),
        (1, streams.backend.new_sampler(scored, ids([]))),
        (2, streams.sampler(changed(DEFAULT, seed=2))),
        (3, constrained),
    ]
    assert isinstance(samplers[1][1], HostSampler)
    texts = [[START] for _ in samplers]
    for _ in range(6):
        for text, token in zip(texts, streams.step(samplers, [text[-1] for text in texts]), strict=True):
            text.append(token)
        assert streams.backend._chains.on_device == {0, 2}
        assert len(samplers[1][1].scores) == 1
    streams.clear()
    if not has_gpu():  # There, steps of one and of four sequences round differently.
        assert texts[0][1:] == texts[1][1:] == greedy
        assert texts[2][1:] == sampled
    assert streams.backend.vocab.detokenize(texts[3][1:]).decode().isdigit()
    for _, sampler in samplers:
        sampler.close()


def test_requests_that_share_a_row_draw_from_it_on_the_host(streams: Streams) -> None:
    samplers: list[tuple[int, Sampler]] = [(0, streams.sampler(changed(DEFAULT, seed=seed))) for seed in range(40)]
    assert streams.backend.decode([Run(0, 0, ids([START]), 1)], samplers).status is Status.OK
    drawn = streams.backend.sample(samplers)
    assert not streams.backend._chains.on_device
    assert len(set(drawn)) > 1
    streams.clear()
    alone = [streams.text(changed(DEFAULT, seed=seed), 1) for seed in range(40)]
    assert [list(each) for each in drawn] == alone
    for _, sampler in samplers:
        sampler.close()


@pytest.mark.cpu_only
def test_drafts_are_drawn_on_the_host_and_go_on_on_the_device(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_sampler, "_STEPS_AFTER_A_DRAFT", 2)
    sampling = changed(DEFAULT, temperature=1.2, seed=6)
    expected = streams.text(sampling, 8)
    sampler = streams.sampler(sampling)
    text = [START, *streams.step([(0, sampler)])]
    # Two right tokens and a wrong one.
    draft = [*expected[1:3], START]
    run = Run(0, 1, ids([text[-1], *draft]), n_outputs=4)
    assert streams.backend.decode([run], [(0, sampler)]).status is Status.OK
    ((*tokens,),) = streams.backend.sample([(0, sampler)])
    assert tokens == expected[1:4]
    streams.backend.change(Remove(0, 4))
    text += tokens
    for _ in range(4):
        text += streams.step([(0, sampler)], text[-1:])
    assert streams.backend._chains.on_device == {0}
    assert text[1:] == expected
    streams.clear()
    sampler.close()


def on_host(sampler: DeviceSampler) -> DeviceSampler:
    """The same sampler, which never runs on the device."""
    sampler.has_room = False
    return sampler


@pytest.mark.parametrize(
    ("sampling", "is_few"),
    [
        (GREEDY, True),
        (changed(DEFAULT, seed=3), True),
        (changed(GREEDY, repeat_penalty=1.3), False),
        (changed(DEFAULT, seed=3, logit_bias={7: 2.0}), False),
    ],
)
def test_on_the_host_a_chain_gets_no_tokens_that_its_first_sampler_drops(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, is_few: bool
) -> None:
    """Of 151,936 logits all of them take 1.2 ms instead of 0.04, greedy, for each drafted token."""
    sizes: list[int] = []

    class Noted(candidates.Candidates):
        def __init__(self, tokens: npt.NDArray[np.int64], logits: npt.NDArray[np.float32]) -> None:
            super().__init__(tokens, logits)
            sizes.append(len(tokens))

    monkeypatch.setattr(device_sampler, "Candidates", Noted)
    monkeypatch.setattr(candidates, "_BLOCK", 4)
    monkeypatch.setattr(candidates, "_BLOCKS_EACH", 1)
    expected = streams.text(sampling, 8)
    assert streams.text(sampling, 8, sampler=on_host(streams.sampler(sampling))) == expected
    assert len(sizes) == 8
    assert (max(sizes) < streams.n_vocab / 2) == is_few


REFUSED = {
    "no top-k": changed(DEFAULT, top_k=0),
    "top-k not first": changed(DEFAULT, samplers=("top_p", "top_k", "temperature")),
    "large top-k": changed(DEFAULT, top_k=100_000),
    "dynamic temperature": changed(DEFAULT, dynatemp_range=0.5),
    "minimum kept": changed(DEFAULT, min_keep=3),
    "typical": changed(DEFAULT, typical_p=0.5),
    "top-n-sigma": changed(DEFAULT, top_n_sigma=1.0),
    "XTC": changed(DEFAULT, xtc_probability=0.5),
    "min-p near 1": changed(DEFAULT, min_p=1.0),
    "min-p beside a large bias": changed(DEFAULT, logit_bias={5: 1e8}),
    "min-p after a low temperature": changed(
        DEFAULT, samplers=("top_k", "temperature", "min_p"), temperature=1e-6, min_p=0.9
    ),
    "min-p beside a bias, after a temperature": changed(
        DEFAULT, samplers=("top_k", "temperature", "min_p"), temperature=0.01, logit_bias={5: 5e3}
    ),
    "DRY": changed(DEFAULT, dry_multiplier=0.8),
    "Mirostat": changed(DEFAULT, mirostat=2),
    "adaptive-p": changed(DEFAULT, samplers=("top_k", "adaptive_p")),
    "probabilities": changed(DEFAULT, n_probs=0),
    "probabilities after sampling": changed(DEFAULT, n_probs=5, post_sampling_probs=True),
    "penalties over the context": changed(DEFAULT, repeat_penalty=1.2, repeat_last_n=2000),
}


@pytest.mark.parametrize("sampling", REFUSED.values(), ids=REFUSED)
def test_what_the_device_cannot_do_is_done_on_the_host(streams: Streams, sampling: Sampling) -> None:
    sampler = streams.backend.new_sampler(sampling, ids([]))
    assert isinstance(sampler, HostSampler)
    sampler.close()


def test_a_chain_that_the_device_computes_only_in_part_is_not_used(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChainSpec, "make", _with_typical(ChainSpec.make))
    monkeypatch.setattr(streams.backend._chains, "_refused", set())
    for top_p in (0.123, 0.124):
        n_set = streams.n_set
        sampler = streams.sampler(changed(DEFAULT, top_p=top_p))
        streams.step([(0, sampler)])
        assert not streams.backend._chains.on_device
        sampler.close()
    assert streams.n_set == n_set, "not tried again, whatever the parameters"
    streams.clear()


def test_without_memory_for_the_graph_the_host_samples(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the whole reply of that request: llama.cpp would abort."""
    sampling = changed(DEFAULT, top_k=7, seed=3)
    chains, expected = streams.backend._chains, streams.text(sampling, 8)
    chains.remove_all()
    n_set = streams.n_set
    free = iter([0])
    with monkeypatch.context() as patch:
        patch.setattr(chains, "_free_bytes", lambda: next(free))
        assert streams.text(sampling, 8) == expected
    assert streams.n_set == n_set
    assert streams.text(sampling, 8) == expected
    assert chains.on_device == {0}, "the next request is tried again"


def test_parameters_without_an_effect_need_no_other_chain(streams: Streams) -> None:
    unused = {"repeat_penalty": 1.3, "repeat_last_n": 0}
    for base, others in (
        (GREEDY, ({"top_p": 0.5, "min_p": 0.2, "top_k": 3}, {"temperature": -1.0}, unused)),
        (DEFAULT, ({"seed": 5}, {"min_keep": 1}, {"dynatemp_exponent": 2.0}, unused)),
    ):
        first, *samplers = [streams.sampler(changed(base, **fields)) for fields in ({}, *others)]
        assert all(each.spec == first.spec for each in samplers)
        for sampler in (first, *samplers):
            sampler.close()


def test_parameters_with_an_effect_need_another_chain(streams: Streams) -> None:
    changes = {"top_k": 20, "top_p": 0.5, "min_p": 0.2, "temperature": 0.3, "repeat_penalty": 1.3}
    samplers = [streams.sampler(changed(DEFAULT, **{name: value})) for name, value in changes.items()]
    samplers += [streams.sampler(each) for each in (DEFAULT, GREEDY, changed(DEFAULT, logit_bias={5: 1.5}))]
    assert all(one.spec != other.spec for one, other in itertools.combinations(samplers, 2))
    for sampler in samplers:
        sampler.close()


def test_a_bias_outside_of_the_vocabulary_never_reaches_llama_cpp(streams: Streams) -> None:
    for token in (-1, streams.n_vocab):
        spec = ChainSpec.of(
            changed(DEFAULT, logit_bias={token: 1.0}), n_ctx=64, n_vocab=streams.n_vocab, eog=frozenset()
        )
        assert spec is None


def test_greedy_takes_the_first_of_equal_logits_and_reports_invalid_ones(streams: Streams) -> None:
    best = int(streams.logits.argmax())
    assert streams.text(GREEDY, 1) == [best]
    assert streams.text(changed(GREEDY, logit_bias={best: -math.inf}), 1) == [int(np.argsort(-streams.logits)[1])]
    nothing = dict.fromkeys(range(streams.n_vocab), -math.inf)
    for base in (GREEDY, DEFAULT):
        sampling = changed(base, logit_bias=nothing)
        assert streams.text(sampling, 1) == [-1]
        assert streams.text(sampling, 1, sampler=on_host(streams.sampler(sampling))) == [-1]


def test_low_temperatures_and_large_biases_leave_logits_finite(streams: Streams) -> None:
    best = int(streams.logits.argmax())
    for sampling, expected in (
        (changed(TOP_K, temperature=1e-39), best),
        (changed(DEFAULT, temperature=1e-45), best),
        (changed(TOP_K, temperature=1e-6, logit_bias={5: 1e38}), 5),
    ):
        assert streams.text(sampling, 1) == [expected]
        assert streams.text(sampling, 1, sampler=on_host(streams.sampler(sampling))) == [expected]
        assert streams.text(sampling, 1, sampler=streams.backend._host_sampler(sampling, ids([]))) == [expected]


@pytest.mark.parametrize(("times", "is_faster"), [((2, 1, 2, 1), True), ((2, 1, 1, 2), False), ((1, 2), False)])
def test_the_device_is_chosen_only_if_it_is_faster_for_one_stream_and_for_all_slots(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, times: Sequence[float], is_faster: bool
) -> None:
    backend, real, left = streams.backend, costs._sampled_step, list(times)
    sampled: list[tuple[int, bool]] = []

    def step(*args: Any) -> float:
        before = backend.stats.n_device_sampled
        real(*args)
        sampled.append((len(args[2]), backend.stats.n_device_sampled > before))
        return left.pop(0)

    monkeypatch.setattr(costs, "_sampled_step", step)
    assert backend._measure_sampling(costs.Quiet(on_cpu=True)) is is_faster
    assert not backend._chains._chains, "they would take memory and time"
    assert sampled == [(1, False), (1, True), (N_SLOTS, False), (N_SLOTS, True)][: len(times)]
    assert not any(backend.seq_len(seq) for seq in range(N_SLOTS))


@pytest.mark.parametrize(
    ("chosen", "is_faster", "is_used"),
    [(None, None, False), (None, True, True), (False, True, False), (True, False, True)],
)
def test_the_user_decides_before_the_measurement(
    tiny_model: Path, chosen: bool | None, is_faster: bool | None, is_used: bool
) -> None:
    backend = LlamaBackend(LlamaSettings(tiny_model, n_ctx=64, n_threads=1, backend_sampling=chosen))
    assert backend.info.samples_on_device is bool(chosen)
    backend._set_costs(costs.Measurements(samples_faster=is_faster))
    sampler = backend.new_sampler(DEFAULT, ids([]))
    assert isinstance(sampler, DeviceSampler) is is_used is backend.info.samples_on_device
    sampler.close()
    backend.close()


def test_drafts_do_not_change_the_chains_again_and_again(streams: Streams) -> None:
    """Each change has llama.cpp build its graph again."""
    draws = [(seq, streams.sampler(changed(DEFAULT, seed=seq))) for seq in range(2)]
    before = streams.n_set
    for i in range(24):
        # A draft in every second step, whose tokens are rejected.
        drafted = [START] * (i % 2)
        runs = [Run(seq, i, ids([START, *drafted]), 1 + len(drafted)) for seq, _ in draws]
        assert streams.backend.decode(runs, draws).status is Status.OK
        streams.backend.sample(draws)
        for seq, _ in draws:
            streams.backend.change(Remove(seq, i + 1))
    assert streams.n_set - before <= 2 * len(draws)
    n_sampled = streams.backend.stats.n_device_sampled
    for _ in range(20):
        streams.step(draws)
    assert streams.backend.stats.n_device_sampled - n_sampled == 2 * (20 - device_sampler._STEPS_AFTER_A_DRAFT + 1)
    for _, sampler in draws:
        sampler.close()
    streams.clear()
