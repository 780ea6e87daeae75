"""Every sampling parameter does what it says, and none is dropped on the way to llama.cpp.

One token is decoded once; the logits in llama.cpp's own buffer are then written over, so that the sampler chains,
which read that buffer, choose from known numbers. A sampler may choose from the same logits as often as one likes.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.backend.llama.sampling import candidates as llama_candidates
from llamaslot.backend.llama.sampling.candidates import highest
from llamaslot.backend.llama.sampling.host_sampler import HostSampler
from llamaslot.backend.llama.sampling.penalties import BreakerIndex
from llamaslot.base.backend import NO_TOKEN, Run, Status
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import IllegalCallError
from llamaslot.base.tokens import Tokens
from tests.engine.harness import running

N_CTX = 512
FAR_BELOW = -1000.0
BEST, SECOND, THIRD, FOURTH = 300, 301, 302, 303
"""Words of the tiny model, so no control tokens."""

OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)
"""Draws from all tokens by their probability."""
GREEDY = Sampling(temperature=0.0)


class Chooser:
    """A backend with the logits of one token, which `write` makes others."""

    def __init__(self, model: Path) -> None:
        self.backend = LlamaBackend(LlamaSettings(model, n_ctx=N_CTX, n_slots=2, n_ubatch=64, n_threads=1))
        token = np.array([BEST], dtype=np.int32)
        assert self.backend.decode([Run(0, 0, token, 1)]).status is Status.OK
        row = llama_cpp.llama_get_logits_ith(self.backend._context, 0)
        self.logits = np.ctypeslib.as_array(row, (self.backend.info.n_vocab,))

    def write(self, logits: dict[int, float]) -> None:
        """These logits, and all others far below."""
        self.logits[:] = FAR_BELOW
        for token, logit in logits.items():
            self.logits[token] = logit

    def probabilities(self) -> npt.NDArray[np.float64]:
        """The softmax of the logits."""
        weights = np.exp(self.logits.astype(np.float64) - self.logits.max())
        return weights / weights.sum()

    def draw(self, sampling: Sampling, n: int = 1, history: Sequence[int] = ()) -> list[int]:
        """`n` tokens from one sampler, all from the same logits."""
        sampler = self.backend.new_sampler(sampling, ids(history))
        try:
            return [self.backend.sample([(0, sampler)])[0][0] for _ in range(n)]
        finally:
            sampler.close()


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> Iterator[Chooser]:
    chooser = Chooser(tiny_model)
    yield chooser
    chooser.backend.close()


@pytest.fixture(params=[64, 1], ids=["among all", "among few"])
def chooser(loaded: Chooser, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Chooser:
    """With four tokens to choose from, of 64, 24, 9 and 3 percent."""
    monkeypatch.setattr(llama_candidates, "_BLOCK", request.param)
    loaded.write({BEST: 3.0, SECOND: 2.0, THIRD: 1.0, FOURTH: 0.0})
    return loaded


def ids(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def one_above_eight(chooser: Chooser) -> None:
    """Logits whose best token is not the most typical one; no probability is 0, for llama.cpp takes logarithms."""
    chooser.logits[:] = -60.0
    chooser.logits[SECOND : SECOND + 8] = 0.0
    chooser.logits[BEST] = 1.6


def changed(sampling: Sampling, **fields: object) -> Sampling:
    return Sampling(**{name: getattr(sampling, name) for name in sampling.__struct_fields__} | fields)


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others(chooser: Chooser) -> None:
    chooser.logits[:] = 0.0
    first = chooser.draw(changed(OPEN, seed=7), 20)
    assert chooser.draw(changed(OPEN, seed=7), 20) == first
    assert chooser.draw(changed(OPEN, seed=8), 20) != first
    assert len(set(first)) > 1


def test_each_sequence_gets_its_own_logits(tiny_model: Path) -> None:
    backend = LlamaBackend(LlamaSettings(tiny_model, n_ctx=N_CTX, n_slots=2, n_ubatch=64, n_threads=1))
    runs = [Run(1, 0, ids([BEST, SECOND, THIRD]), 1), Run(0, 0, ids([FOURTH, FOURTH]), 1)]
    assert backend.decode(runs).status is Status.OK
    size = (backend.info.n_vocab,)
    best = {
        seq: int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(backend._context, row), size).argmax())
        for seq, row in ((1, 2), (0, 4))
    }
    assert best[0] != best[1]
    for sampling in (GREEDY, changed(OPEN, top_k=1)):
        samplers = {seq: backend.new_sampler(sampling, ids([])) for seq in best}
        assert backend.sample(list(samplers.items())) == [(token,) for token in best.values()]
        for sampler in samplers.values():
            sampler.close()
    backend.close()


def test_temperature(chooser: Chooser) -> None:
    assert set(chooser.draw(GREEDY, 20)) == {BEST}
    assert set(chooser.draw(changed(OPEN, temperature=0.01), 100)) == {BEST}
    hot = chooser.draw(changed(OPEN, temperature=50.0), 400)
    assert {BEST, SECOND, THIRD, FOURTH} == set(hot)
    assert hot.count(BEST) < 200
    assert chooser.draw(OPEN, 400).count(BEST) > 200


def test_greedy_takes_the_best_whatever_else_is_set(chooser: Chooser) -> None:
    one_above_eight(chooser)
    for temperature in (0.0, -1.0):
        narrow = changed(GREEDY, temperature=temperature, typical_p=0.01, top_k=0)
        assert chooser.draw(narrow) == [BEST]
        assert chooser.draw(changed(narrow, repeat_penalty=1.1)) == [BEST]
        assert chooser.draw(changed(narrow, logit_bias={SECOND: -1.0})) == [BEST]


def test_top_k_keeps_the_best_k(chooser: Chooser) -> None:
    hot = changed(OPEN, temperature=100.0)
    assert set(chooser.draw(changed(hot, top_k=1), 100)) == {BEST}
    assert set(chooser.draw(changed(hot, top_k=2), 100)) == {BEST, SECOND}
    assert set(chooser.draw(changed(hot, top_k=3), 100)) == {BEST, SECOND, THIRD}
    assert set(chooser.draw(changed(hot, top_k=0), 100)) == {BEST, SECOND, THIRD, FOURTH}


@pytest.mark.parametrize("p", [0.01, 0.5, 0.7, 0.95])
def test_top_p_keeps_the_fewest_that_reach_p(chooser: Chooser, p: float) -> None:
    probabilities = chooser.probabilities()
    order = np.argsort(-probabilities)
    n = int(np.searchsorted(np.cumsum(probabilities[order]), p)) + 1
    drawn = chooser.draw(changed(OPEN, temperature=100.0, top_p=p), 200)
    assert set(drawn) == set(order[:n].tolist())


@pytest.mark.parametrize("p", [1.0, 0.3, 0.1, 0.04])
def test_min_p_keeps_what_is_near_the_best(chooser: Chooser, p: float) -> None:
    probabilities = chooser.probabilities()
    kept = np.flatnonzero(probabilities >= p * probabilities.max())
    drawn = chooser.draw(changed(OPEN, temperature=100.0, min_p=p), 200)
    assert set(drawn) == set(kept.tolist())


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9])
def test_typical_p_keeps_what_surprises_as_much_as_expected(chooser: Chooser, p: float) -> None:
    one_above_eight(chooser)
    probabilities = chooser.probabilities()
    surprise = -np.log(probabilities)
    order = np.argsort(np.abs(surprise - (probabilities * surprise).sum()), kind="stable")
    n = int(np.searchsorted(np.cumsum(probabilities[order]), p)) + 1
    drawn = set(chooser.draw(changed(OPEN, temperature=100.0, typical_p=p), 300))
    assert len(drawn) == n
    assert (BEST in drawn) == (BEST in order[:n])
    assert drawn <= {BEST, *range(SECOND, SECOND + 8)}


def test_frequency_counts_and_presence_does_not(chooser: Chooser) -> None:
    chooser.write({BEST: 10.0, SECOND: 8.5})
    history = [BEST, BEST, BEST, SECOND]
    assert chooser.draw(changed(GREEDY, frequency_penalty=1.0), history=history) == [SECOND]
    assert chooser.draw(changed(GREEDY, presence_penalty=1.0), history=history) == [BEST]
    assert chooser.draw(changed(GREEDY, presence_penalty=2.0), history=history[:3]) == [SECOND]


@pytest.mark.parametrize("sampling", [GREEDY, changed(OPEN, temperature=0.01)])
def test_repeat_penalty_sees_the_history(chooser: Chooser, sampling: Sampling) -> None:
    strong = changed(sampling, repeat_penalty=10.0)
    assert chooser.draw(strong) == [BEST]
    assert chooser.draw(strong, history=[BEST] * 8) == [SECOND]
    assert chooser.draw(strong, history=[BEST, SECOND]) == [THIRD]
    assert chooser.draw(changed(strong, repeat_last_n=0), history=[BEST] * 8) == [BEST]


def test_penalties_see_what_was_chosen_since(chooser: Chooser) -> None:
    drawn = chooser.draw(changed(GREEDY, presence_penalty=100.0), 4)
    assert drawn == [BEST, SECOND, THIRD, FOURTH]


async def test_an_engine_lets_the_penalties_see_the_prompt(tiny_model: Path) -> None:
    backend = LlamaBackend(LlamaSettings(tiny_model, n_ctx=N_CTX, n_slots=2, n_ubatch=64, n_threads=1))
    wanted, other = (backend.vocab.piece(token).decode() for token in (BEST, SECOND))
    sampling = changed(GREEDY, logit_bias={BEST: 100.0}, presence_penalty=200.0)
    async with running(backend) as harness:
        await harness.submit("unseen", other * 5, sampling=sampling, max_tokens=1)
        await harness.submit("seen", wanted + other * 4, sampling=sampling, max_tokens=1)
        assert harness.text("unseen") == wanted
        assert harness.text("seen") != wanted


def test_repeat_last_n_is_how_far_back_the_penalties_look(chooser: Chooser) -> None:
    strong = changed(GREEDY, repeat_penalty=10.0)
    history = [BEST] + [400] * 99
    assert chooser.draw(strong, history=history) == [BEST], "the default looks 64 tokens back"
    assert chooser.draw(changed(strong, repeat_last_n=99), history=history) == [BEST]
    for whole in (100, -1, 2**31 - 1):
        assert chooser.draw(changed(strong, repeat_last_n=whole), history=history) == [SECOND], whole


@pytest.mark.parametrize("last_n", [-1, 2**31 - 1])
def test_no_window_is_longer_than_the_context(chooser: Chooser, last_n: int) -> None:
    sampler = chooser.backend.new_sampler(changed(GREEDY, repeat_penalty=10.0, repeat_last_n=last_n), ids([]))
    [penalties] = sampler._adjusters
    assert len(penalties._window) == N_CTX
    sampler.close()


def test_penalties_take_in_a_long_prompt_at_once() -> None:
    history = ids(np.random.default_rng(1).integers(0, N_VOCAB, 32_000).tolist())
    sampling = changed(OPEN, repeat_penalty=1.1, repeat_last_n=-1)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        HostSampler(sampling, history=history, n_ctx=32_768, n_vocab=N_VOCAB, eog=EOG, breakers=NO_BREAKERS).close()
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.015, "a call of llama.cpp for each token takes longer on any machine"


@pytest.mark.parametrize("sampling", [GREEDY, OPEN, Sampling()])
def test_logit_bias(chooser: Chooser, sampling: Sampling) -> None:
    assert set(chooser.draw(changed(sampling, logit_bias={FOURTH: 100.0}), 50)) == {FOURTH}
    banned = dict.fromkeys((BEST, SECOND, THIRD), -math.inf)
    assert set(chooser.draw(changed(sampling, logit_bias=banned), 50)) == {FOURTH}
    assert BEST not in chooser.draw(changed(sampling, logit_bias={BEST: -math.inf}), 50)


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, OPEN, Sampling(), changed(GREEDY, repeat_penalty=1.1), changed(GREEDY, logit_bias={BEST: 0.5})],
    ids=["greedy", "open", "defaults", "greedy with penalties", "greedy with biases"],
)
def test_ignore_eos(chooser: Chooser, sampling: Sampling) -> None:
    eog = sorted(chooser.backend.vocab.eog)
    assert len(eog) > 1
    chooser.write({token: 40.0 + i for i, token in enumerate(eog)} | {BEST: 20.0})
    assert set(chooser.draw(sampling, 20)) <= set(eog)
    assert set(chooser.draw(changed(sampling, ignore_eos=True), 20)) == {BEST}
    assert set(chooser.draw(sampling, 20)) <= set(eog), "the logits themselves are left as they are"


def test_ignore_eos_is_stronger_than_a_bias(chooser: Chooser) -> None:
    biases = dict.fromkeys(chooser.backend.vocab.eog, 100.0)
    chooser.write(dict.fromkeys(biases, 0.0) | {BEST: 3.0})
    for sampling in (GREEDY, OPEN):
        assert chooser.draw(changed(sampling, logit_bias=biases))[0] in biases
        assert chooser.draw(changed(sampling, logit_bias=biases, ignore_eos=True))[0] not in biases


@contextmanager
def counted_chains(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The chains that were made and not freed."""
    alive: list[int] = []
    init, free = llama_cpp.llama_sampler_chain_init, llama_cpp.llama_sampler_free

    def counting_init(params: object) -> object:
        chain = init(params)
        alive.append(address(chain))
        return chain

    def counting_free(chain: object) -> None:
        alive.remove(address(chain))
        free(chain)

    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_sampler_chain_init", counting_init)
        patch.setattr(llama_cpp, "llama_sampler_free", counting_free)
        yield alive


def address(pointer: object) -> int:
    """Where a ctypes pointer of any kind points."""
    return ctypes.cast(pointer, ctypes.c_void_p).value


def test_close_frees_the_chain_once(chooser: Chooser, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted_chains(monkeypatch) as alive:
        sampler = chooser.backend.new_sampler(OPEN, ids([]))
        assert len(alive) == 1
        sampler.close()
        assert alive == []
        with pytest.raises(IllegalCallError):
            sampler.close()
        with pytest.raises(IllegalCallError):
            chooser.backend.sample([(0, sampler)])


N_VOCAB = 60_011
EOG = frozenset({3, 19_000})
TOP = np.random.default_rng(0).permutation(N_VOCAB)
"""All tokens, the best first."""
LOGITS = np.empty(N_VOCAB, dtype=np.float32)
LOGITS[TOP] = np.linspace(12.0, -12.0, N_VOCAB)
N_CTX_SAMPLED = 128


class NoVocabulary:
    """The vocabulary of `LOGITS`, of which nothing is known."""

    n_tokens = N_VOCAB

    def texts(self) -> list[bytes]:
        return [b""] * N_VOCAB


NO_BREAKERS = BreakerIndex(NoVocabulary())

near_the_top = st.integers(0, 120).map(lambda place: int(TOP[place]))
anywhere = st.integers(0, N_VOCAB - 1)
tokens = st.one_of(near_the_top, anywhere, st.sampled_from(sorted(EOG)))
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 5.0]),
    top_k=st.integers(0, 90),
    top_p=st.sampled_from([0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    typical_p=st.sampled_from([0.5, 1.0]),
    repeat_penalty=st.sampled_from([0.9, 1.0, 1.1, 3.0]),
    repeat_last_n=st.sampled_from([-1, 0, 8, 64]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    seed=st.integers(0, 2**32 - 2),  # one more asks llama.cpp for a random one
    logit_bias=st.dictionaries(tokens, st.sampled_from([-math.inf, -5.0, 0.5, 30.0]), max_size=12),
    ignore_eos=st.booleans(),
)


def sampler_of(sampling: Sampling, history: Sequence[int]) -> HostSampler:
    return HostSampler(
        sampling, history=ids(history), n_ctx=N_CTX_SAMPLED, n_vocab=N_VOCAB, eog=EOG, breakers=NO_BREAKERS
    )


class Reference:
    """llama.cpp's whole chain as llama-server makes it, over all tokens, with the history replayed."""

    def __init__(self, sampling: Sampling, history: Sequence[int]) -> None:
        biases = {**sampling.logit_bias, **dict.fromkeys(EOG if sampling.ignore_eos else (), -math.inf)}
        window = N_CTX_SAMPLED if sampling.repeat_last_n < 0 else min(sampling.repeat_last_n, N_CTX_SAMPLED)
        penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        links = [
            llama_cpp.llama_sampler_init_logit_bias(
                N_VOCAB, len(biases), (llama_cpp.llama_logit_bias * len(biases))(*biases.items())
            ),
            llama_cpp.llama_sampler_init_penalties(N_VOCAB, window, *penalties),
        ]
        if sampling.temperature <= 0:
            links.append(llama_cpp.llama_sampler_init_greedy())
        else:
            links += [
                llama_cpp.llama_sampler_init_top_k(sampling.top_k),
                llama_cpp.llama_sampler_init_typical(sampling.typical_p, 1),
                llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1),
                llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1),
                llama_cpp.llama_sampler_init_temp(sampling.temperature),
                llama_cpp.llama_sampler_init_dist(sampling.seed),
            ]
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for link in links:
            llama_cpp.llama_sampler_chain_add(self._chain, link)
        for token in history[-window:] if window else ():
            llama_cpp.llama_sampler_accept(self._chain, token)

    def choose(self) -> int:
        """Return the next token for `LOGITS`."""
        candidates = np.zeros(N_VOCAB, np.dtype(llama_cpp.llama_token_data))
        candidates["id"], candidates["logit"] = np.arange(N_VOCAB), LOGITS
        data = candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data=data, size=N_VOCAB, selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        llama_cpp.llama_sampler_accept(self._chain, token)
        return token

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._chain)


@given(sampling=samplings, history=st.lists(tokens, max_size=80))
@example(Sampling(top_k=5, logit_bias={int(TOP[100]): 0.5}), [])
@example(Sampling(top_k=5, ignore_eos=True, logit_bias={int(token): -5.0 for token in TOP[:50]}), [])
@example(Sampling(top_k=5, repeat_last_n=8, presence_penalty=-1.0), [int(TOP[100])])
@example(Sampling(temperature=0.0, repeat_last_n=8, repeat_penalty=0.5), [int(TOP[100])])
@example(Sampling(temperature=0.0, repeat_last_n=-1, frequency_penalty=9.0), TOP[:100].tolist())
@example(Sampling(temperature=0.0, repeat_last_n=3, frequency_penalty=9.0), TOP[:100].tolist())
def test_the_choice_is_that_of_llama_cpps_whole_chain(sampling: Sampling, history: list[int]) -> None:
    sampler, reference = sampler_of(sampling, history), Reference(sampling, history)
    for _ in range(8):
        assert sampler.choose(LOGITS) == reference.choose()
    sampler.close()
    reference.close()


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 234), levels=st.sampled_from([2, 50, 10**6]))
def test_none_of_the_highest_is_missing(seed: int, n: int, levels: int) -> None:
    logits = np.random.default_rng(seed).integers(0, levels, N_VOCAB).astype(np.float32)
    found = highest(logits, n)
    assert found is not None
    bound = np.sort(logits)[-n]
    assert set(np.flatnonzero(logits >= bound)) <= set(found)
    assert (np.diff(found) > 0).all()


def test_highest_finds_nothing_among_nan() -> None:
    assert highest(np.full(N_VOCAB, np.nan, dtype=np.float32), 40) is None
    assert highest(np.where(np.arange(N_VOCAB) % 100 == 0, np.nan, LOGITS).astype(np.float32), 40) is None


def test_a_small_vocabulary_is_looked_at_whole() -> None:
    assert highest(np.zeros(500, dtype=np.float32), 40) is None


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "places",
    [slice(None), slice(5, 6), slice(0, None, 100), slice(-1, None)],
    ids=["all", "one", "some", "the last"],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_invalid_logits_give_no_token(temperature: float, top_k: int, places: slice, value: float) -> None:
    logits = LOGITS.copy()
    logits[places] = value
    sampler = sampler_of(Sampling(temperature=temperature, top_k=top_k), [])
    assert sampler.choose(logits) == NO_TOKEN
    assert sampler.choose(LOGITS) != NO_TOKEN
    sampler.close()


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_of_minus_infinity_rule_tokens_out_but_not_all(temperature: float, top_k: int) -> None:
    sampler = sampler_of(Sampling(temperature=temperature, top_k=top_k), [])
    assert sampler.choose(np.where(np.arange(N_VOCAB) == 7, LOGITS, -np.inf).astype(np.float32)) == 7
    assert sampler.choose(np.full(N_VOCAB, -np.inf, dtype=np.float32)) == NO_TOKEN
    sampler.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_bias_beyond_float32_is_no_invalid_logit(temperature: float) -> None:
    sampler = sampler_of(Sampling(temperature=temperature, logit_bias={7: 1e300, 8: -1e300}), [])
    assert sampler.choose(LOGITS) == 7
    sampler.close()
