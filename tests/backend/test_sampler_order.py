"""All samplers of llama-server, in any order, choose what llama.cpp's own chain chooses."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llamaslot.backend.llama import library
from llamaslot.backend.llama.sampling import candidates as llama_candidates
from llamaslot.backend.llama.sampling.host_sampler import HostSampler
from llamaslot.backend.llama.sampling.penalties import BreakerIndex, Dry
from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.backend import NO_TOKEN
from llamaslot.base.generation.sampling import SAMPLERS, Sampling, named_samplers

N_CTX = 96
ALL = (*SAMPLERS, "adaptive_p")
OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
"""Draws from all tokens by their probability."""
PARROT = "tom:tim tam\ntom:tim tam tom:tim"


class Model:
    """The vocabulary of the tiny model, and logits for it."""

    def __init__(self, path: Path) -> None:
        library.initialise()
        self.vocab = LlamaVocab.load(path)
        self.index = BreakerIndex(self.vocab)
        self.n = self.vocab.n_tokens
        order = np.random.default_rng(0).permutation(self.n)
        self.logits = np.empty(self.n, dtype=np.float32)
        self.logits[order] = np.linspace(8.0, -8.0, self.n)
        self.near_top = order[:12].tolist()

    def tokens(self, text: str) -> list[int]:
        return self.vocab.tokenize(text, add_special=False, parse_special=False).tolist()

    def sampler(self, sampling: Sampling, history: Sequence[int] = ()) -> HostSampler:
        return HostSampler(
            sampling,
            history=np.array(history, dtype=np.int32),
            n_ctx=N_CTX,
            n_vocab=self.n,
            eog=self.vocab.eog,
            breakers=self.index,
        )

    def draw(self, sampling: Sampling, n: int = 1, history: Sequence[int] = ()) -> list[int]:
        """`n` tokens from one sampler, all from the same logits."""
        sampler = self.sampler(sampling, history)
        drawn = [sampler.choose(self.logits) for _ in range(n)]
        sampler.close()
        return drawn


class Reference:
    """llama.cpp's chain as llama-server makes it: each sampler as asked for, fed all of the history."""

    def __init__(self, model: Model, sampling: Sampling, history: Sequence[int]) -> None:
        self._model = model
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        biases = list(sampling.logit_bias.items())
        array = (llama_cpp.llama_logit_bias * len(biases))(*biases)
        links = [llama_cpp.llama_sampler_init_logit_bias(model.n, len(biases), array)]
        tau, eta, seed = sampling.mirostat_tau, sampling.mirostat_eta, sampling.seed
        if sampling.mirostat:
            links.append(llama_cpp.llama_sampler_init_temp(sampling.temperature))
        else:
            links += [self._link(name, sampling) for name in sampling.samplers if name != "adaptive_p"]
        if sampling.mirostat == 1:
            links.append(llama_cpp.llama_sampler_init_mirostat(model.n, seed, tau, eta, 100))
        elif sampling.mirostat == 2:
            links.append(llama_cpp.llama_sampler_init_mirostat_v2(seed, tau, eta))
        elif "adaptive_p" in sampling.samplers:
            target, decay = sampling.adaptive_target, sampling.adaptive_decay
            links.append(llama_cpp.llama_sampler_init_adaptive_p(target, decay, seed))
        else:
            links.append(llama_cpp.llama_sampler_init_dist(seed))
        for link in links:
            llama_cpp.llama_sampler_chain_add(self._chain, link)
        for token in history:
            llama_cpp.llama_sampler_accept(self._chain, token)

    def _link(self, name: str, s: Sampling) -> object:
        def window(n: int) -> int:
            return N_CTX if n < 0 else min(n, N_CTX)

        if name == "penalties":
            factors = s.repeat_penalty, s.frequency_penalty, s.presence_penalty
            return llama_cpp.llama_sampler_init_penalties(self._model.n, window(s.repeat_last_n), *factors)
        if name == "dry":
            return dry_of_llama(self._model, s, window(s.dry_penalty_last_n))
        return {
            "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(s.top_n_sigma),
            "top_k": lambda: llama_cpp.llama_sampler_init_top_k(s.top_k),
            "typ_p": lambda: llama_cpp.llama_sampler_init_typical(s.typical_p, s.min_keep),
            "top_p": lambda: llama_cpp.llama_sampler_init_top_p(s.top_p, s.min_keep),
            "min_p": lambda: llama_cpp.llama_sampler_init_min_p(s.min_p, s.min_keep),
            "xtc": lambda: llama_cpp.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, s.min_keep, s.seed),
            "temperature": lambda: llama_cpp.llama_sampler_init_temp_ext(
                s.temperature, s.dynatemp_range, s.dynatemp_exponent
            ),
        }[name]()

    def choose(self) -> int:
        data, array = candidates(self._model.logits)
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        llama_cpp.llama_sampler_accept(self._chain, token)
        del data
        return token

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._chain)


def candidates(logits: np.ndarray) -> tuple[np.ndarray, llama_cpp.llama_token_data_array]:
    """All tokens with their logits; the first value owns the memory of the second."""
    data = np.zeros(len(logits), np.dtype(llama_cpp.llama_token_data))
    data["id"], data["logit"] = np.arange(len(logits)), logits
    pointer = data.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
    return data, llama_cpp.llama_token_data_array(data=pointer, size=len(data), selected=-1, sorted=False)


def dry_of_llama(model: Model, sampling: Sampling, window: int) -> object:
    texts = [text.encode() for text in sampling.dry_sequence_breakers]
    array = ctypes.cast((ctypes.c_char_p * len(texts))(*texts), ctypes.POINTER(ctypes.c_char_p))
    values = sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length
    return llama_cpp.llama_sampler_init_dry(model.vocab.pointer, *values, window, array, len(texts))


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Model:
    return Model(tiny_model)


@pytest.fixture(params=[64, 1], ids=["among all", "among few"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(llama_candidates, "_BLOCK", request.param)
    return


def changed(sampling: Sampling, **fields: object) -> Sampling:
    return Sampling(**{name: getattr(sampling, name) for name in sampling.__struct_fields__} | fields)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 3.0]),
    dynatemp_range=st.sampled_from([0.0, 0.0, 0.5, 2.0]),
    dynatemp_exponent=st.sampled_from([0.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([0.0, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    top_n_sigma=st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    repeat_last_n=st.sampled_from([-1, 0, 8]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    dry_multiplier=st.sampled_from([0.0, 0.8, 100.0]),
    dry_base=st.sampled_from([1.0, 1.75, 100.0]),
    dry_allowed_length=st.sampled_from([0, 1, 2, 2**31 - 1]),
    dry_penalty_last_n=st.sampled_from([-1, 0, 1, 7, 2**31 - 1]),
    mirostat=st.sampled_from([0, 0, 0, 1, 2]),
    mirostat_tau=st.sampled_from([0.0, 2.0, 100.0]),
    mirostat_eta=st.sampled_from([0.0, 0.1, 100.0]),
    adaptive_target=st.sampled_from([-1.0, 0.0, 0.3, 1.0]),
    adaptive_decay=st.sampled_from([0.0, 0.9, 0.99]),
    min_keep=st.sampled_from([0, 1, 3, 2**31 - 1]),
    samplers=st.one_of(
        st.just(SAMPLERS), st.permutations(ALL).map(tuple), st.lists(st.sampled_from(ALL), max_size=6).map(tuple)
    ),
    seed=st.integers(0, 2**32 - 2),
    logit_bias=st.dictionaries(st.integers(0, 400), st.sampled_from([-math.inf, 9.0]), max_size=3),
)


@pytest.mark.usefixtures("blocks")
@given(sampling=samplings, history=st.lists(st.integers(0, 11), max_size=150))
@example(
    changed(OPEN, dry_multiplier=5.0, dry_penalty_last_n=-1, samplers=("top_k", "dry"), top_k=7), [0, 1, 2] * 40
)
@example(changed(OPEN, temperature=0.0, xtc_probability=1.0, xtc_threshold=0.01), [])
@example(
    changed(OPEN, temperature=0.0, top_k=3, presence_penalty=9.0, samplers=("top_k", "penalties", "temperature")),
    [0],
)
@example(changed(OPEN, temperature=0.0, samplers=()), [])
@example(changed(OPEN, temperature=0.0, dynatemp_range=2.0), [])
@example(changed(OPEN, samplers=("adaptive_p", "temperature"), adaptive_target=0.2), [])
@example(changed(OPEN, samplers=("penalties", "penalties"), frequency_penalty=0.7), [1, 2, 3])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_the_choice_is_that_of_llama_cpps_chain(model: Model, sampling: Sampling, history: list[int]) -> None:
    history = [model.near_top[i] for i in history]
    sampler, reference = model.sampler(sampling, history), Reference(model, sampling, history)
    for _ in range(6):
        assert sampler.choose(model.logits) == reference.choose()
    sampler.close()
    reference.close()


@pytest.mark.parametrize(
    "breakers",
    [(), ("t",), ("om:t",), ("tim ta", "o"), ("to", "tom"), (" to", "oo", "om"), ("\n", ":"), ("é",), ("x" * 60,)],
    ids=str,
)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(0, 130),
    window=st.sampled_from([1, 2, 5, 30, 96]),
    allowed=st.integers(0, 4),
)
@example(seed=1, length=60, window=30, allowed=1)
@example(seed=41, length=60, window=30, allowed=2)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_dry_gives_llama_cpps_logits(
    model: Model, *, seed: int, length: int, window: int, allowed: int, breakers: tuple[str, ...]
) -> None:
    words = list(dict.fromkeys(model.tokens(PARROT)))
    rng = np.random.default_rng(seed)
    tokens = rng.choice(rng.permutation(words)[: rng.integers(1, 5)], length).tolist()
    sampling = Sampling(
        dry_multiplier=0.7, dry_allowed_length=allowed, dry_penalty_last_n=window, dry_sequence_breakers=breakers
    )
    n_history = length // 2
    dry = Dry.of(sampling, history=np.array(tokens[:n_history], dtype=np.int32), n_ctx=N_CTX, index=model.index)
    theirs = dry_of_llama(model, sampling, window)
    for token in tokens[:n_history]:
        llama_cpp.llama_sampler_accept(theirs, token)
    for token in [*tokens[n_history:], words[0]]:
        data, array = candidates(model.logits)
        llama_cpp.llama_sampler_apply(theirs, ctypes.byref(array))
        ours = model.logits.copy()
        ours[dry.tokens] = dry.adjusted(ours[dry.tokens])
        np.testing.assert_allclose(ours, data["logit"], rtol=1e-6)
        llama_cpp.llama_sampler_accept(theirs, token)
        dry.accept(token)
    llama_cpp.llama_sampler_free(theirs)


def test_dry_ends_a_loop_that_greedy_decoding_would_not_leave(model: Model) -> None:
    history = model.tokens(PARROT)
    best = int(model.logits.argmax())
    greedy = changed(OPEN, temperature=0.0)
    assert model.draw(greedy, 8) == [best] * 8
    drawn = model.draw(changed(greedy, dry_multiplier=2.0, dry_allowed_length=1), 8, history)
    assert drawn[:2] == [best] * 2
    assert len(set(drawn)) > 2


def test_the_logits_are_left_as_they_are(model: Model) -> None:
    before = model.logits.copy()
    every = changed(OPEN, dry_multiplier=1.0, dry_allowed_length=0, presence_penalty=1.0, xtc_probability=1.0)
    for sampling in (every, changed(every, temperature=0.0), changed(every, mirostat=2)):
        model.draw(sampling, 5, model.near_top)
        assert (model.logits == before).all()


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("sampling", [OPEN, changed(OPEN, mirostat=1), changed(OPEN, samplers=("adaptive_p",))])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_invalid_logits_give_no_token(model: Model, sampling: Sampling, value: float) -> None:
    sampler = model.sampler(sampling)
    broken = model.logits.copy()
    broken[5] = value
    assert sampler.choose(broken) == NO_TOKEN
    assert sampler.choose(model.logits) != NO_TOKEN
    sampler.close()


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("", SAMPLERS),
        ("edskypmxt", SAMPLERS),
        ("tk?k", ("temperature", "top_k", "top_k")),
        ("ia", ("infill", "adaptive_p")),
        ([], ()),
        (["top-k", "TopP", "nucleus", "typ", "tfs_z"], ("top_k", "top_p", "top_p", "typ_p")),
        (["temp", "minp", "top_n-sigma"], ("temperature", "min_p")),
        (["adaptive-p", "top-n-sigma", "DRY"], ("adaptive_p", "top_n_sigma", "dry")),
    ],
)  # fmt: skip
def test_samplers_have_llama_servers_spellings(asked: object, names: tuple[str, ...]) -> None:
    assert named_samplers(asked) == names
