"""Sampling on the device: as part of llama.cpp's graph, so that no row of logits is copied to the host.

llama.cpp has one chain of samplers for each sequence. When a chain is set, the next decode reserves memory and
builds its graph again (fact 37). So a sequence keeps its chain from one request to the next. A request with the
same parameters brings only its state: the random numbers drawn so far, and the tokens that the penalties count.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
from msgspec.structs import replace

from llamaslot.backend.llama.sampling.candidates import Candidates, Logits, highest
from llamaslot.backend.llama.sampling.penalties import penalty_window
from llamaslot.backend.llama.sampling.samplers import (
    SEED_MASK,
    active_samplers,
    bounded_biases,
    constructors,
    takes_the_best,
)
from llamaslot.base.backend import NO_TOKEN, Draws, Run
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.token_probs import TokenScore
from llamaslot.base.kv_ops import IllegalCallError
from llamaslot.base.tokens import Tokens

_MAX_TOP_K = 1024
"""llama.cpp aborts if top-k asks for more than the vocabulary has; and large ones are copied to the host."""
_MAX_WINDOW = 1024
"""Largest window of the penalties: its tokens are sorted and copied to the device at each step."""
_MAX_MIN_P = 0.99
_MAX_MODEL_LOGIT, _MAX_LOGIT = 100.0, 1e4
"""Largest logit that is expected without a bias, and largest one for which min-p runs on the device. Min-p keeps
logits above the highest plus the logarithm of `min_p`: with `min_p` near 1, or larger logits, rounding leaves none.
"""
_STEPS_AFTER_A_DRAFT = 16
"""Steps after a draft in which a request is sampled on the host: drafts come in series, and with every change of a
chain llama.cpp builds its graph again.
"""
_ROWS_OF_A_CHAIN = 16
"""Memory that a chain may add to the graph, in rows of logits; 11 were measured, with penalties."""
_SUPPORTED = frozenset({"penalties", "top_k", "top_p", "min_p", "temperature", "dist"})


@dataclass(frozen=True, slots=True)
class ChainSpec:
    """Samplers of a chain and their parameters, but for the seed."""

    biases: tuple[tuple[int, float], ...]
    names: tuple[str, ...]
    """In order, without the last sampler, which draws the token; without `top_k`, the best token is chosen."""
    samplers: tuple[tuple[Any, ...], ...]
    """Constructor and arguments of each."""
    window: int
    """Number of tokens that the penalties count; 0 without penalties."""

    @property
    def kind(self) -> tuple[bool, tuple[str, ...]]:
        """The samplers without their parameters."""
        return bool(self.biases), self.names

    @classmethod
    def of(cls, sampling: Sampling, *, n_ctx: int, n_vocab: int, eog: frozenset[int]) -> ChainSpec | None:
        """Return the chain for these parameters; None if they need the host.

        The host has the samplers that llama.cpp does not compute on a device, those with another distribution there
        (a dynamic temperature, `min_keep`), probabilities, and chains that would leave the whole vocabulary.
        """
        window = penalty_window(sampling, n_ctx)
        active = [
            name for name, is_active in (("penalties", window), ("dry", sampling.dry_multiplier)) if is_active
        ]
        names = active_samplers(sampling, active)
        if sampling.n_probs >= 0 or not _SUPPORTED.issuperset(names) or window > min(_MAX_WINDOW, n_vocab - 1):
            return None
        # Penalties that come first count all tokens.
        n_first = names[0] == "penalties"
        first, rest = names[:n_first], names[n_first:]
        if takes_the_best(sampling, rest):
            names = [*first, "temperature"]
        elif (
            rest[0] != "top_k"
            or sampling.top_k > min(_MAX_TOP_K, n_vocab)
            or sampling.temperature <= 0
            or sampling.dynatemp_range > 0
            or sampling.min_keep > 1
        ):
            return None
        else:
            names = names[:-1]
        biases = bounded_biases(sampling, eog)
        # llama.cpp aborts at a token that is not in the vocabulary.
        if any(not 0 <= token < n_vocab for token in biases):
            return None
        if "min_p" in names:
            largest = max((_MAX_MODEL_LOGIT, *biases.values()))
            if "temperature" in names[: names.index("min_p")]:
                largest /= sampling.temperature
            if sampling.min_p > _MAX_MIN_P or largest > _MAX_LOGIT:
                return None
        # What has no effect is the same in all chains. At a temperature of 0 only the best token is left.
        temperature = max(sampling.temperature, 0.0)
        sampling = replace(sampling, temperature=temperature, dynatemp_range=0.0, dynatemp_exponent=1.0, min_keep=0)
        penalties = window, sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty
        known = constructors(sampling, n_vocab)
        known["penalties"] = llama_cpp.llama_sampler_init_penalties, n_vocab, *penalties
        return cls(
            biases=tuple(sorted(biases.items())),
            names=tuple(names),
            samplers=tuple(known[name] for name in names),
            window=window if "penalties" in names else 0,
        )

    @property
    def n_best(self) -> int:
        """Number of the highest logits that the chain needs; 0 for all, if biases or penalties come first."""
        if self.biases or self.names[0] == "penalties":
            return 0
        return int(self.samplers[0][1]) if self.names[0] == "top_k" else 1

    def make(self, n_vocab: int, seed: int) -> Any:
        """Return a new chain of llama.cpp's samplers."""
        lib = llama_cpp
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if self.biases:
            biases = (lib.llama_logit_bias * len(self.biases))(*self.biases)
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_logit_bias(n_vocab, len(biases), biases))
        for constructor, *arguments in self.samplers:
            lib.llama_sampler_chain_add(chain, constructor(*arguments))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed & SEED_MASK))
        return chain


class DeviceSampler:
    """Sampler of a request whose chain can run on the device; where it does not, it runs on the host."""

    def __init__(self, spec: ChainSpec, *, history: Tokens, n_vocab: int, seed: int) -> None:
        self.spec = spec
        self._host_chain = spec.make(n_vocab, seed)
        self.chain: SequenceChain | None = None
        """The sequence's chain that has the state; None if the sampler's own chain has it."""
        self.has_room = True
        """False once the device had too little memory for the chain."""
        self.n_on_host = 0
        """Number of steps for which it is still sampled on the host."""
        self.scores: list[TokenScore] = []
        self._closed = False
        if spec.window:
            for token in history[-spec.window :].tolist():
                llama_cpp.llama_sampler_accept(self._host_chain, token)

    @property
    def failure(self) -> str:
        """Empty: no constraint can fail."""
        return ""

    def move_to(self, chain: SequenceChain) -> None:
        """Move this sampler's state to a sequence's chain, which continues from it."""
        self.check_open()
        if self.chain is chain:
            return
        self.leave()
        if chain.sampler is not None:
            chain.sampler.leave()
        llama_cpp.llama_sampler_copy(self._host_chain, chain.handle)
        self.chain, chain.sampler = chain, self

    def leave(self) -> None:
        """Take the state back from a sequence's chain."""
        if self.chain is not None:
            llama_cpp.llama_sampler_copy(self.chain.handle, self._host_chain)
            self.chain.sampler = None
            self.chain = None

    def choose(self, logits: Logits) -> int:
        """Return the next token, chosen on the host from a row of logits; `NO_TOKEN` if they are not valid."""
        self.check_open()
        self.leave()
        if not np.isfinite(logits.max()):
            return NO_TOKEN
        found = highest(logits, self.spec.n_best) if self.spec.n_best else None
        candidates = (
            Candidates(np.arange(len(logits)), logits) if found is None else Candidates(found, logits[found])
        )
        llama_cpp.llama_sampler_apply(self._host_chain, ctypes.byref(candidates.array))
        selected = candidates.array.selected
        # Without a probability if biases rule out all tokens: llama.cpp then selects the last one.
        if selected < 0 or math.isnan(candidates.array.data[selected].p):
            return NO_TOKEN
        token = int(candidates.array.data[selected].id)
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Record a token of the reply, for the penalties."""
        handle = self._host_chain if self.chain is None else self.chain.handle
        llama_cpp.llama_sampler_accept(handle, token)

    def advance(self, *, forced: tuple[int, ...]) -> tuple[int, ...]:
        """Record forced tokens. No constraint forces more."""
        for token in forced:
            self.accept(token)
        return ()

    def force(self) -> tuple[int, ...]:
        """Return nothing: it has no constraint."""
        return ()

    def check_open(self) -> None:
        """Raise `IllegalCallError` if the sampler was freed."""
        if self._closed:
            raise IllegalCallError("sampling with a freed sampler")

    def close(self) -> None:
        """Free the sampler's own chain; the sequence keeps its chain for the next request."""
        if self._closed:
            raise IllegalCallError("a sampler was closed twice")
        self._closed = True
        if self.chain is not None:
            self.chain.sampler = None
            self.chain = None
        llama_cpp.llama_sampler_free(self._host_chain)


@dataclass(slots=True)
class SequenceChain:
    """A sequence's chain on the device."""

    spec: ChainSpec
    handle: Any
    sampler: DeviceSampler | None = None
    """The request's sampler whose state the chain has."""

    def free(self) -> None:
        """Free the chain; its state goes back to the request's sampler."""
        if self.sampler is not None:
            self.sampler.leave()
        llama_cpp.llama_sampler_free(self.handle)


class DeviceChains:
    """The chains of the sequences of `context`, of a model with `n_vocab` tokens."""

    context: Any
    """llama.cpp's context; another one may follow after `clear`."""

    def __init__(self, n_vocab: int, free_bytes: Callable[[], int]) -> None:
        self._n_vocab = n_vocab
        self._free_bytes = free_bytes
        """Returns the memory that is free where the graph is computed."""
        self._chains: dict[int, SequenceChain] = {}
        """By sequence."""
        self.on_device: set[int] = set()
        """Sequences whose rows the last batch sampled on the device."""
        self.n_set = 0
        """Number of times that a chain was set or removed, after which llama.cpp builds its graph again."""
        self.n_sampled = 0
        self._refused: set[tuple[bool, tuple[str, ...]]] = set()
        """Kinds of chains that the device cannot compute as a whole, whatever their parameters."""

    def prepare(self, runs: Sequence[Run], draws: Draws) -> None:
        """Have the chains of the sequences of a batch be those of `draws`, and no others where the host samples."""
        self.on_device = set()
        samplers = {seq: each for seq, each in draws if isinstance(each, DeviceSampler)}
        if not samplers and not self._chains:
            return
        n_draws = Counter(seq for seq, _ in draws)
        for run in runs:
            if not run.n_outputs and run.targets is None:
                continue
            # Several requests draw from one row on the host.
            is_single = run.n_outputs == 1 and run.targets is None and n_draws[run.seq] == 1
            sampler = samplers.get(run.seq)
            may_move = False
            if sampler is not None:
                sampler.n_on_host = _STEPS_AFTER_A_DRAFT if run.n_drafted else max(sampler.n_on_host - 1, 0)
                may_move = is_single and sampler.has_room and not sampler.n_on_host
            if sampler is not None and may_move and self._set(run.seq, sampler):
                sampler.move_to(self._chains[run.seq])
                self.on_device.add(run.seq)
            elif run.seq in self._chains:
                self._remove(run.seq)

    def token(self, row: int, sampler: DeviceSampler) -> int:
        """Return the token sampled for a row of the last batch; `NO_TOKEN` if its logits were not valid."""
        sampler.check_open()
        token = int(llama_cpp.llama_get_sampled_token_ith(self.context, row))
        n = llama_cpp.llama_get_sampled_probs_count_ith(self.context, row)
        if not 0 <= token < self._n_vocab or not n:
            return NO_TOKEN
        probs = llama_cpp.llama_get_sampled_probs_ith(self.context, row)
        if np.isnan(np.ctypeslib.as_array(probs, (n,))).any():
            return NO_TOKEN
        sampler.accept(token)
        self.n_sampled += 1
        return token

    def clear(self) -> None:
        """Free the chains, after the context was freed. Their states go back to the requests' samplers."""
        for chain in self._chains.values():
            chain.free()
        self._chains.clear()
        self.on_device.clear()

    def remove_all(self) -> None:
        """Remove the chains of all sequences."""
        for seq in [*self._chains]:
            self._remove(seq)

    def _set(self, seq: int, sampler: DeviceSampler) -> bool:
        """Set a sequence's chain unless it has the same; False if the device cannot compute it as a whole.

        Then the sequence may be left with a chain that has to be removed.
        """
        spec, old = sampler.spec, self._chains.get(seq)
        if old is not None and old.spec == spec:
            return True
        if spec.kind in self._refused:
            return False
        # llama.cpp aborts if there is no memory for the graph with the chain.
        needed = _ROWS_OF_A_CHAIN * 4 * self._n_vocab * (len(self._chains) + 1)
        sampler.has_room = needed <= self._free_bytes()
        if not sampler.has_room:
            return False
        handle = spec.make(self._n_vocab, seed=0)
        # It takes the place of the old one.
        is_set = llama_cpp.llama_set_sampler(self.context, seq, handle)
        self.n_set += 1
        if old is not None:
            old.free()
        self._chains[seq] = SequenceChain(spec, handle)
        if is_set and _runs_on_device(handle):
            return True
        self._refused.add(spec.kind)
        return False

    def _remove(self, seq: int) -> None:
        llama_cpp.llama_set_sampler(self.context, seq, None)
        self.n_set += 1
        self._chains.pop(seq).free()


def _runs_on_device(chain: Any) -> bool:
    """Return True if no sampler of a chain that was set runs on the host: their names then begin with `-`."""
    n = llama_cpp.llama_sampler_chain_n(chain)
    names = (llama_cpp.llama_sampler_name(llama_cpp.llama_sampler_chain_get(chain, i)) for i in range(n))
    return all(name[:1] in (b"+", b"?") for name in names)
