"""Speculative decoding without a second model: drafts of text that is known already.

    the tree            this prompt was answered before: its reply goes on as the one that the tree has
    prompt lookup       a reply that rewrites a file or quotes a tool's result: the tokens after the longest earlier
                        occurrence of the request's last ones
    the tree, elsewhere a text that another conversation of the namespace has: what follows there after the last
                        generated tokens

One step computes a draft and samples after each of its tokens, as long as the sample is the drafted token
(`base.backend.accepted`). So the reply is the one without drafts, and each accepted token saves a step.

    commit     after each token, the event loop looks for drafts (`propose`). In multi-step decode the model's
               thread computes the next step meanwhile: its token drops the draft, which only ends multi-step decode
    plan       the step is planned with the drafts that were found after the last one (`step_planner.py`)
    commit     what the step took longer, and how many tokens were accepted, is learned (`observe`)

All drafts of a step have the same length, the one with the most tokens per second. It pays by the difference of

    gain       tokens that are expected to be accepted, by how long the text has been repeated, and how many tokens
               of each request's last drafts were accepted
    cost       tokens that all decoding requests would get in the additional time, as measured for steps of that
               length

A longer draft may gain more than it costs, but less than the next drafts would gain in that time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llamaslot.base.model import MAX_DRAFT, ModelInfo
from llamaslot.base.tokens import Tokens
from llamaslot.kvcache.cache import KVCache
from llamaslot.scheduler.chunk_sizer import ChunkSizer
from llamaslot.scheduler.request import NO_TOKENS, Request

MIN_MATCH = 8
"""Fewest repeated tokens before a draft: shorter ones are often phrases after which the text differs."""
MAX_MATCH = 64
"""Most repeated tokens that are compared."""
LENGTHS = (3, 7, 15, 31, MAX_DRAFT)
"""Lengths of drafts. A draft and the token before it fill groups of the four rows that llama.cpp's CPU kernels
compute together (fact 36).
"""
MAX_DELAY = 0.1
"""Fraction of a step by which drafts may delay a stream that gains nothing by them."""
MIN_GAIN = 0.5
"""Fewest tokens by which the gain must exceed the cost; less than that is within the noise of the estimates."""
MIN_MATCH_ELSEWHERE = 16
"""Fewest generated tokens that another conversation must repeat before a draft from it: it is more likely to go on
otherwise than the request's own text.
"""
SEARCH_EVERY = 16
"""Generated tokens between two searches of other conversations, each of which delays a step (`RadixTree.search`).
After a draft of which all was accepted, the next one comes at once.
"""
MAX_SEARCHES = 4
"""Most searches of other conversations after one step: they take about a millisecond then."""
_NEWEST_WEIGHT = 0.3
"""Weight of the newest observation of a cost."""
_DECAY = 0.999
"""Factor on all observed costs after each step, so that a slowdown does not rule out a length for long."""
_MAX_ENDS = 1024
"""Most occurrences of a token that are compared, the latest ones: a text of few different tokens has many."""
_FEW_ENDS = 32
"""Occurrences that are compared at once, all of `MAX_MATCH` tokens: in less time than token by token."""


class _Candidate(NamedTuple):
    request: Request
    rate: float
    """Probability that a token is accepted."""
    follows: Tokens
    """Tokens that may follow."""


class Drafter:
    """Proposes drafts for decoding requests, and learns what they cost."""

    def __init__(self, info: ModelInfo, chunks: ChunkSizer, cache: KVCache) -> None:
        self._chunks = chunks
        self._cache = cache
        self._n_searches = 0
        """Searches of other conversations since the last step."""
        self._added_s: dict[tuple[int, int], float] = {}
        """Seconds by which drafts make a step longer, by the smallest of `LENGTHS` that is not shorter than all of
        them together (more tokens in proportion), and by the bit length of the number of decoding requests.
        """
        self.set_model(info)

    def set_model(self, info: ModelInfo) -> None:
        """Take over what depends on measured costs and on the layout of the pool, and forget what drafts cost."""
        settings = self._cache.settings
        self.max_draft = info.max_draft
        # In a partitioned pool, llama.cpp computes runs of another length in a pass over the weights of their own.
        # With recurrent states, it may then move a state of which a draft needs an earlier one (fact 44). So all
        # runs of a step have drafts of one length there, or none has.
        self.may_differ = settings.unified and not info.state.kind.has_recurrent_state
        self._n_ctx = min(info.n_ctx_slot, settings.seq_cells)
        self._n_rows = info.n_spare_rows
        self._step_cost = info.step_cost
        self._added_s.clear()

    def propose(self, requests: Sequence[Request]) -> bool:
        """Set the drafts of all requests that decode; returns True if there are any."""
        for key in self._added_s:
            self._added_s[key] *= _DECAY
        step_s = self._chunks.decode_seconds(len(requests))
        self._n_searches = 0
        found = [each for request in requests if step_s and (each := self._candidate(request)) is not None]
        lengths: list[int] = []
        if found and (len(found) == len(requests) or self.may_differ):
            lengths = self._lengths(found, len(requests), step_s)
        for request in requests:
            request.draft = NO_TOKENS
        for each, n in zip(found, lengths, strict=False):
            each.request.draft = each.follows[:n]
        return bool(lengths)

    def _candidate(self, request: Request) -> _Candidate | None:
        """Return what may follow the tokens of a request; None if that is not likely enough, or not allowed."""
        n = min(request.params.max_draft, self.max_draft, self._n_rows, self._n_ctx - len(request.tokens) - 1)
        if request.n_draftable is not None:
            n = min(n, request.n_draftable)
        if n <= 0:
            return None
        n_matched, follows = self._find(request, n)
        # Tiles, and the ids of marked tokens (`cache_ids.py`), are not generated.
        follows = follows[: next(iter(np.flatnonzero(follows < 0)), len(follows))]
        rate = request.acceptance.rate(n_matched)
        is_likely = len(follows) > 0 and _expected(rate, min(n, LENGTHS[0])) > MIN_GAIN
        return _Candidate(request, rate, follows) if is_likely else None

    def _lengths(self, found: Sequence[_Candidate], n_decoding: int, step_s: float) -> list[int]:
        """Return the lengths of drafts with which a step has the most tokens per second; none if none pays."""
        best, best_rate = list[int](), 0.0
        n_cells = max(len(each.request.tokens) for each in found)
        for length in LENGTHS:
            lengths = [min(length, len(each.follows)) for each in found]
            if not self.may_differ:
                lengths = [min(lengths)] * len(found)
            gains = [_expected(each.rate, n) for each, n in zip(found, lengths, strict=True)]
            added = self._seconds(sum(lengths), n_decoding, n_cells, step_s) / step_s
            # Nobody is delayed by much more than what they gain themselves. One that is alone delays nobody.
            least = min(gains) if len(found) == n_decoding else 0.0
            is_fair = n_decoding == 1 or added <= max(least, MAX_DELAY)
            pays = sum(gains) - added * n_decoding > MIN_GAIN
            rate = (n_decoding + sum(gains)) / (1 + added)
            if rate > best_rate and pays and is_fair and sum(lengths) <= self._n_rows:
                best, best_rate = lengths, rate
        return best

    def observe(self, n_drafted: int, n_decoding: int, n_cells: int, seconds: float) -> None:
        """Learn from a step of `n_decoding` requests without prompts, with `n_drafted` drafted tokens in all.

        The longest request has `n_cells` tokens. A first step that was disturbed must not end all drafts of this
        length, so it counts as much as later ones beside the estimate.
        """
        step_s = self._chunks.decode_seconds(n_decoding)
        added_s = max(seconds - step_s, 0.0)
        before = self._seconds(n_drafted, n_decoding, n_cells, step_s)
        if before < math.inf:
            added_s = (1 - _NEWEST_WEIGHT) * before + _NEWEST_WEIGHT * added_s
        self._added_s[_key(n_drafted, n_decoding)] = added_s * min(MAX_DRAFT / n_drafted, 1.0)

    def _find(self, request: Request, n: int) -> tuple[int, Tokens]:
        """Return how many repeated tokens precede what may come next, and up to `n` tokens of that.

        (0, no tokens) if too few are repeated.
        """
        tokens = request.tokens.view()
        if self._cache.length(request.slot) == len(tokens) - 1:
            follows = self._cache.continuation(request.slot, int(tokens[-1]), n)
            if len(follows) >= min(n, LENGTHS[0]):
                # The whole prompt and the reply so far are repeated, which is enough even if they are short.
                return max(MIN_MATCH, min(len(tokens), MAX_MATCH)), follows
        if len(tokens) >= request.lookup_at:
            n_matched, follows = prompt_lookup(tokens, n)
            # With each token, no more than one more can be repeated. In text that repeats little, most lookups are
            # left out by this: on a CPU each one delays a step by a tenth of a millisecond.
            request.lookup_at = len(tokens) + max(MIN_MATCH - n_matched, 0)
            if n_matched >= MIN_MATCH:
                return n_matched, follows
        is_due = request.n_generated >= max(request.search_at, MIN_MATCH_ELSEWHERE)
        if not is_due or self._n_searches == MAX_SEARCHES:
            return 0, NO_TOKENS
        self._n_searches += 1
        # Not the end of the prompt: templates and short questions end many prompts, and replies to them differ.
        last = tokens[-min(request.n_generated, MAX_MATCH) :]
        n_matched, follows = self._cache.search(request.namespace, last, MIN_MATCH_ELSEWHERE, n)
        request.search_at = request.n_generated + SEARCH_EVERY
        return n_matched, follows

    def _seconds(self, n: int, n_decoding: int, n_cells: int, step_s: float) -> float:
        """Return by how many seconds `n` drafted tokens after `n_cells` make a step longer; infinite if unknown."""
        if (observed := self._added_s.get(_key(n, n_decoding))) is not None:
            return observed * max(n / MAX_DRAFT, 1.0)
        if self._step_cost is None:
            return self._chunks.chunk_seconds(n, n_decoding) or math.inf
        few = self._step_cost.small_ms(n, n * n_cells) - self._step_cost.small_ms(0, 0)
        # The step is padded to a query block where that is faster (`padding.py`).
        block = self._step_cost.block_ms(n_cells) - 1e3 * step_s if n <= MAX_DRAFT else math.inf
        return max(min(few, block), 0.0) / 1e3


def prompt_lookup(tokens: Tokens, n: int) -> tuple[int, Tokens]:
    """Return how many of the last tokens occur before, and `n` tokens that may follow.

    Of the longest occurrences (of at most `MAX_MATCH` tokens) the latest is taken, with the tokens after it. If
    these are fewer than `n`, the text is assumed to go on with that period.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])[-_MAX_ENDS:]
    if not len(ends):
        return 0, NO_TOKENS
    # In text that repeats itself at once, the latest occurrence is the longest already.
    lengths = _n_equal_before(tokens, ends[-1:])
    if lengths[0] < MAX_MATCH:
        length = 1
        while len(ends) > _FEW_ENDS and length < MAX_MATCH:
            longer = ends[np.searchsorted(ends, length) :]
            longer = longer[tokens[longer - length] == tokens[last - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        ends = ends[-_FEW_ENDS:]
        lengths = _n_equal_before(tokens, ends)
    longest = int(lengths.max())
    found = int(ends[-len(lengths) :][lengths == longest][-1])
    return longest, np.resize(tokens[found + 1 : found + 1 + n], n)


def _n_equal_before(tokens: Tokens, ends: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return how many tokens up to each of `ends` are the last ones of all, at most `MAX_MATCH`."""
    back = np.arange(min(MAX_MATCH, len(tokens)))
    places = ends[:, None] - back
    # Before the beginning there is nothing: numpy takes such places from the end.
    differs = (tokens[places] != tokens[len(tokens) - 1 - back]) | (places < 0)
    return np.where(differs.any(axis=1), differs.argmax(axis=1), len(back))


def _expected(rate: float, n: int) -> float:
    """Return how many of `n` tokens are expected to be accepted, if each is with this probability."""
    return rate * (1 - rate**n) / (1 - rate)


def _key(n_drafted: int, n_decoding: int) -> tuple[int, int]:
    return next((each for each in LENGTHS if each >= n_drafted), LENGTHS[-1]), n_decoding.bit_length()
