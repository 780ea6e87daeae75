"""Request: parameters of one completion, its tokens so far, and how many of them were computed or reused.

As in vLLM V1, a request has no prefill or decode phase: each step computes tokens that have no KV yet, whether of
the prompt or generated, and a step that computes the last of them yields the next token.

`ReuseStats` counts what ended requests reused.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from msgspec.structs import replace

from llamaslot.base.adapters import Adapters, activation_of, always_active
from llamaslot.base.backend import CompiledConstraint, Sampler
from llamaslot.base.cache_ids import cache_ids_of
from llamaslot.base.commands import GenerateParams
from llamaslot.base.errors import next_state
from llamaslot.base.events import Progress
from llamaslot.base.generation.token_probs import NOT_SCORED, TokenScore
from llamaslot.base.generation.tools import ReasoningBudget
from llamaslot.base.images import PromptImage, Tile
from llamaslot.base.namespaces import private_namespace, shifted_namespace
from llamaslot.base.stats import CacheStats, Miss, PromptStats, RequestStats, SpeculationStats
from llamaslot.base.tokens import WIDTH, TokenizedPrompt, Tokens, packed, unpacked
from llamaslot.kvcache.match import Acquired, LoadResult, Match

NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


class RequestState(Enum):
    """States of a request."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class RequestEvent(Enum):
    """Events that change the state of a request."""

    ADMIT = "admit"
    PREEMPT = "preempt"
    END = "end"


REQUEST_TABLE: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.QUEUED, RequestEvent.ADMIT): RequestState.RUNNING,
    (RequestState.QUEUED, RequestEvent.END): RequestState.DONE,
    (RequestState.RUNNING, RequestEvent.PREEMPT): RequestState.QUEUED,
    (RequestState.RUNNING, RequestEvent.END): RequestState.DONE,
}
"""Every legal transition; any other pair raises and changes nothing."""


class TokenBuffer:
    """Token ids with O(1) append. A view stays valid while tokens are added."""

    __slots__ = ("_data", "_length")

    def __init__(self, tokens: Tokens) -> None:
        self._data: Tokens = np.array(tokens, dtype=np.int32)
        self._length = len(self._data)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._length

    def view(self, start: int = 0, end: int | None = None) -> Tokens:
        """Return the tokens `[start, end)` as int32, without a copy."""
        return self._data[start : self._length if end is None else min(end, self._length)]

    def append(self, token: int) -> None:
        """Add one token."""
        if self._length == len(self._data):
            grown = np.empty(max(2 * self._length, 64), dtype=np.int32)
            grown[: self._length] = self._data
            self._data = grown
        self._data[self._length] = token
        self._length += 1

    def remove(self, start: int, end: int) -> None:
        """Remove the tokens `[start, end)`. Earlier views keep them."""
        self._data = np.concatenate([self._data[:start], self._data[end : self._length]])
        self._length = len(self._data)

    def truncate(self, length: int) -> None:
        """Remove the tokens from `length` on. Views of them are overwritten by the next tokens."""
        self._length = length


class CheckpointStops:
    """Positions at which a step of one request must end, so that a checkpoint can be taken there."""

    def __init__(self, positions: Sequence[int] = ()) -> None:
        self._positions = sorted(set(positions))

    def add(self, position: int) -> None:
        """Add a stop."""
        if not self.has(position):
            bisect.insort(self._positions, position)

    def has(self, position: int) -> bool:
        """Return True if there is a stop at a position."""
        at = bisect.bisect_left(self._positions, position)
        return at < len(self._positions) and self._positions[at] == position

    def limit(self, position: int, n: int) -> int:
        """Return how many of the `n` tokens after `position` a step may compute."""
        at = bisect.bisect_right(self._positions, position)
        return min(n, self._positions[at] - position) if at < len(self._positions) else n


class Tiles:
    """Tiles of a prompt's images by their positions: a step computes one of them, or tokens of text."""

    def __init__(self, images: Sequence[PromptImage] = ()) -> None:
        self._tiles = {start: Tile(each, i) for each in images for i, (start, _) in enumerate(each.tiles)}
        self._starts = list(self._tiles)
        self.image_ends = [each.tiles[-1][1] for each in images if each.tiles]
        """Position after the last one of each image."""

    def at(self, position: int) -> Tile | None:
        """Return the tile that begins at a position; None for text."""
        return self._tiles.get(position)

    def limit(self, position: int, n: int) -> int:
        """Return how many of the `n` tokens from `position` on are before the next tile."""
        place = bisect.bisect_left(self._starts, position)
        return min(n, self._starts[place] - position) if place < len(self._starts) else n


class _Reasoning(Enum):
    BEFORE = "no reasoning yet"
    REASONING = "in reasoning"
    DONE = "reasoning has ended"


class ReasoningLimit:
    """Counts the reasoning tokens of one reply: after the last one, the tag that ends reasoning is forced.

    As in llama-server, tags are found by their token ids. A tag that the model writes with other tokens is not
    found.
    """

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._state = _Reasoning.REASONING if budget.is_open else _Reasoning.BEFORE
        self._n = 0
        self._last: deque[int] = deque(maxlen=max(len(budget.start), len(budget.end)))

    def add(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Count tokens of the reply; returns the tokens that must follow, which count as added."""
        for token in tokens:
            if self._state is _Reasoning.DONE:
                break
            self._last.append(token)
            if self._state is _Reasoning.BEFORE:
                if self._n_last(self._budget.start) == len(self._budget.start):
                    self._state = _Reasoning.REASONING
                    self._last.clear()
                continue
            self._n += 1
            if self._n_last(self._budget.end) == len(self._budget.end):
                self._state = _Reasoning.DONE
        if self._state is not _Reasoning.REASONING or self._n < self._budget.n_tokens:
            return ()
        self._state = _Reasoning.DONE
        return self._budget.end[self._n_last(self._budget.end) :] + self._budget.after

    @property
    def n_free(self) -> int | None:
        """Tokens that can be added before any is forced; None if none will be."""
        return None if self._state is _Reasoning.DONE else self._budget.n_tokens - self._n

    def _n_last(self, tag: tuple[int, ...]) -> int:
        """Return how many of the last tokens are the beginning of a tag."""
        last = tuple(self._last)
        return next((n for n in range(min(len(tag), len(last)), 0, -1) if last[-n:] == tag[:n]), 0)


class Acceptance:
    """Estimate of how many of a request's drafted tokens will be accepted. The last drafts count most."""

    _KEPT = 0.7
    """Factor on what was counted, at each draft."""
    _MAX_ACCEPTED = 16.0
    """Most accepted tokens that count: after a long repeated text, few rejected drafts must lower the estimate."""
    _WEIGHT = 2.0
    """Weight of the estimate by the length of the match, in tokens."""
    _DOUBT = 3.0
    """Length of a match after which the next token is as likely to be accepted as not."""

    def __init__(self) -> None:
        self._n_accepted = self._n_rejected = 0.0

    def add(self, n_drafted: int, n_accepted: int) -> None:
        """Count a draft. Of its rejected tokens only the first is known to be wrong."""
        self._n_accepted = min(self._KEPT * self._n_accepted + n_accepted, self._MAX_ACCEPTED)
        self._n_rejected = self._KEPT * self._n_rejected + (n_accepted < n_drafted)

    def rate(self, n_matched: int) -> float:
        """Return the probability, below 1, that a token is accepted after `n_matched` repeated ones."""
        guess = n_matched / (n_matched + self._DOUBT)
        return (self._n_accepted + self._WEIGHT * guess) / (self._n_accepted + self._n_rejected + self._WEIGHT)


class Request:
    """State of one request. Times are seconds on the caller's clock.

    `can_reuse` is True if prefixes of this model are reused; if not, `why_not` is the reason.
    """

    _admitted: float | None = None
    _computing: float | None = None
    _first_token: float | None = None
    _last_token: float | None = None
    _was_preempted = False
    _prefix = b""

    state = RequestState.QUEUED
    slot = -1
    """The slot in which it runs or last ran; -1 before the first admission."""
    sampler: Sampler | None = None
    constraint: CompiledConstraint | None = None
    """The compiled `params.constraint`; the request is not admitted before it is compiled."""
    is_fetching = False
    """True during lookup and fetch in the remote tier; the request is not admitted before they are done."""
    is_suspect = False
    """True from a failed step until it was computed, or has failed, alone."""
    is_invalidated = False
    """True if its slot lost its KV, by a failed step or a change of the pool's layout; the next plan starts again
    from what is cached of its tokens.
    """
    distrusted = b""
    """Packed tokens of a cached prefix after which its logits were invalid."""

    match: Match | None = None
    """The last lookup of its prefix."""
    n_matched = 0
    """Prompt tokens that were cached at the first admission."""
    n_lost = 0
    """Prompt tokens after those that earlier requests had computed, and that are not usable any more."""
    n_at_admission = 0
    """Number of its tokens at the last admission."""
    n_cached_at_admission = 0
    """Of these, those that were cached."""
    n_waited_for = 0
    """Length of the prefix for which it waited while another request computed it; 0 if it never waited."""
    n_overtaken = 0
    """Number of later requests that were admitted although this one could have been."""
    place = math.inf
    """Its place among requests that wait to compute several tokens (`RunTurns`); infinite for a new one."""

    draft: Tokens = NO_TOKENS
    """Tokens that may come next, to be computed and verified in one step; a new token drops them."""
    lookup_at = 0
    """Number of tokens from which on enough of the last ones may be repeated for a draft (`drafter.py`)."""
    search_at = 0
    """Number of generated tokens from which on other conversations are searched for them (`drafter.py`)."""
    n_drafted = 0
    n_accepted = 0
    """Of the drafted tokens, those that were sampled."""
    n_generated = 0
    n_discarded = 0
    """Tokens that context shifts have removed from `tokens`."""
    n_forced = 0
    """Tokens that were forced after the last sampled one; they are computed together with it."""
    n_scored = 0
    """Prompt tokens whose scores were reported; 0 if scores are not wanted.

    A request that wants scores shares no KV, so the successor of every token that has KV has been scored.
    """

    n_prompt_computed = 0
    n_copied = 0
    """Of `n_reused`, those copied from another sequence."""
    n_loaded = 0
    """Of `n_reused`, those loaded from RAM."""
    n_read = 0
    """Of `n_loaded`, those that had to be read from disk."""
    n_fetched = 0
    """Of `n_loaded`, those that had to be fetched from the remote tier."""
    n_public = 0
    """Tokens loaded from segments of the public namespace, including those after a preemption."""

    def __init__(
        self,
        params: GenerateParams,
        prompt: TokenizedPrompt,
        *,
        arrival: int,
        now: float,
        can_reuse: bool = True,
        why_not: Miss = "unsupported",
    ) -> None:
        self.params = params
        # The next turn invokes an adapter after what is computed ahead of it.
        self.activation = None if params.is_background else activation_of(params.adapters, prompt.packed_tokens)
        """Where its prompt activates an adapter, if it does."""
        self.prompt = prompt
        """As the model knows it."""
        known = cache_ids_of(prompt, self.activation)
        self.marked_from = known.marked_from
        """Where tokens of the prompt have other ids in the cache (`CacheIds.marked_from`)."""
        self.packed_ids = packed(known.ids) if known.marked_from else prompt.packed_tokens
        """The prompt as the cache knows it, packed."""
        self.id = params.completion_id
        self.arrival = arrival
        """Order of submission; unchanged by preemption."""
        self._submitted = now
        self.tiles = Tiles(prompt.images)
        self.tokens = TokenBuffer(known.ids)
        """The prompt and the tokens generated so far, as the cache knows them, without those that a context shift
        has discarded.
        """
        self.n_prompt = len(self.tokens)
        self.wants_scores = params.prompt_probs >= 0
        self.is_private = self.wants_scores or not (params.cache_prompt and can_reuse)
        """True if it shares no KV with other requests, neither theirs nor its own."""
        self.shared_namespace = params.namespace_with(known.key)
        """The namespace of requests that share KV with it, unless it is private."""
        self.namespace = (
            private_namespace(self.id if self.wants_scores else params.group or self.id, params.cache_salt)
            if self.is_private
            else self.shared_namespace
        )
        self.miss: Miss = "" if not self.is_private else "off" if can_reuse else why_not
        """Reason why no more of its prompt was cached at the first admission."""
        self.n_reused = self.n_prompt
        """Prompt tokens reused since the first admission.

        Until then the whole prompt, because a sibling's prefill may spare this request its own.
        """
        self.n_common: dict[tuple[int, int], int] = {}
        """While it waits: length of the prefix shared with each running request, by its `arrival` and
        `n_at_admission`.
        """
        self.stops = CheckpointStops()
        """Positions at which a step must end, so that a checkpoint can be taken."""
        self.acceptance = Acceptance()
        budget = params.reasoning_budget
        self.reasoning_limit = ReasoningLimit(budget) if budget is not None else None

    def handle(self, event: RequestEvent, now: float) -> None:
        """Go to the next state, or raise `IllegalTransitionError` and change nothing."""
        self.state = next_state(REQUEST_TABLE, self.state, event, f"request {self.id}")
        if event is RequestEvent.ADMIT:
            self._mark_started(now)
        self._was_preempted |= event is RequestEvent.PREEMPT
        if event is RequestEvent.END and self.sampler is not None:
            self.sampler.close()
            self.sampler = None

    def admit(self, acquired: Acquired, now: float) -> None:
        """Start to run in the acquired slot."""
        self.handle(RequestEvent.ADMIT, now)
        is_first = self.slot < 0
        self.slot = acquired.slot
        self.n_at_admission, self.n_cached_at_admission = len(self.tokens), acquired.n_cached
        self.n_common.clear()
        if not is_first:
            return
        self.n_reused, self.n_copied = acquired.n_resident, acquired.n_copied
        if not self.is_private:
            self.n_matched, self.miss, self.n_lost = acquired.n_cached, acquired.miss, acquired.n_lost
            if self.miss == "diverged" and self.prompt.is_reply_edited:
                self.miss = "changed"

    def isolate(self, distrusted: bytes) -> None:
        """Make a waiting request private, so that its prompt is computed without the cache."""
        self.is_private = True
        self.namespace = private_namespace(self.id, self.params.cache_salt)
        self.match = None
        self.n_reused = 0
        self.distrusted = distrusted

    def adapters_at(self, position: int) -> Adapters:
        """Return the LoRA adapters that the token at a position is computed with."""
        if self.activation is not None and position >= self.activation.start:
            return self.activation.adapters
        return always_active(self.params.adapters)

    def n_alike(self, position: int, n: int) -> int:
        """Return how many of the `n` tokens from `position` on have its adapters, and are before the next tile."""
        n = self.tiles.limit(position, n)
        start = self.activation.start if self.activation is not None else 0
        return min(n, start - position) if position < start else n

    def inputs(self, start: int, end: int | None = None) -> Tokens:
        """Return the tokens `[start, end)` as the model knows them, or the ids of a tile."""
        return self._with_prompt(self.prompt.packed_tokens, start, self.tokens.view(start, end))

    def as_cached(self, start: int, computed: Tokens) -> Tokens:
        """Return computed tokens, the first of which is at `start`, as the cache knows them."""
        return self._with_prompt(self.packed_ids, start, computed)

    def _with_prompt(self, prompt: bytes, start: int, tokens: Tokens) -> Tokens:
        """Return tokens with those of a prompt, packed, in place of the ones at the same positions.

        A request with marked tokens is never shifted, so the prompt's tokens stay at their positions.
        """
        if not self.marked_from or start >= self.n_prompt:
            return tokens
        of_prompt = unpacked(prompt[start * WIDTH : (start + len(tokens)) * WIDTH])
        return np.concatenate([of_prompt, tokens[len(of_prompt) :]])

    def shift(self, start: int, end: int) -> None:
        """Discard tokens `[start, end)`; the rest belongs to the namespace `shifted` from now on."""
        self.tokens.remove(start, end)
        self.lookup_at = 0
        self.n_discarded += end - start
        self.namespace = self.shifted
        self.match, self._prefix = None, b""

    @property
    def shifted(self) -> str:
        """The namespace of what it holds after a context shift."""
        return shifted_namespace(self.id, self.params.cache_salt)

    def restart(self) -> None:
        """Continue from what is cached of its tokens. That counts as reused only if it has computed nothing yet."""
        self._was_preempted |= self._computing is not None
        if not self._was_preempted:
            self.n_reused = self.n_copied = self.n_loaded = self.n_read = self.n_fetched = 0

    def count_computed(self, start: int, n: int, now: float) -> None:
        """Count positions `[start, start + n)` as computed; `now` is when their computation began."""
        if self._computing is None:
            self._computing = now
        if self.n_discarded:
            # These are other positions than the prompt's.
            return
        self.n_prompt_computed += max(0, min(start + n, self.n_prompt) - start)

    def count_loaded(self, loaded: LoadResult) -> None:
        """Count loaded tokens as reused, unless the request was preempted: it may have computed them itself."""
        self.n_public += loaded.n_public
        if not self._was_preempted:
            self.n_reused += loaded.n_copied + loaded.n_loaded
            self.n_copied += loaded.n_copied
            self.n_loaded += loaded.n_loaded
            self.n_read += loaded.n_read
            self.n_fetched += loaded.n_fetched

    def add_token(self, token: int, now: float, *, forced: bool = False) -> None:
        """Append a sampled token, or one that was forced after it."""
        self._mark_started(now)
        self.tokens.append(token)
        self.draft = NO_TOKENS
        self.n_generated += 1
        self.n_forced = self.n_forced + 1 if forced else 0
        self._last_token = now
        if self._first_token is None:
            self._first_token = now

    def count_draft(self, n_drafted: int, n_accepted: int) -> None:
        """Count the tokens of a draft, and those of them that were sampled."""
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        self.acceptance.add(n_drafted, n_accepted)
        if n_accepted == n_drafted:
            self.search_at = 0

    def drop_tokens(self, n: int) -> None:
        """Remove the last `n` generated tokens, which follow a stop string. The slot may hold them, if drafted."""
        self.tokens.truncate(max(len(self.tokens) - n, 0))
        self.n_generated -= n
        self.n_forced = max(self.n_forced - n, 0)

    @property
    def is_ready(self) -> bool:
        """True unless its constraint is still being compiled, or its KV still being fetched."""
        return not self.is_fetching and (self.params.constraint is None or self.constraint is not None)

    def is_decoding(self, n_pending: int) -> bool:
        """True if it has only one token to compute, or the last sampled one with those forced after it.

        So a prompt that is cached whole counts as decoding, and waits no longer. One without a reply never does: no
        client waits for its next token.
        """
        if not self.wants_tokens:
            return False
        return n_pending == 1 or (self.n_generated > 0 and n_pending <= 1 + self.n_forced)

    @property
    def has_started(self) -> bool:
        """True once it has had a slot or got a token."""
        return self._admitted is not None

    @property
    def prefix(self) -> bytes:
        """Tokens that it may reuse, packed: all but the last, which must be computed for its logits."""
        n = len(self.tokens) - 1
        if len(self._prefix) != n * WIDTH:
            self._prefix = packed(self.tokens.view(0, n))
        return self._prefix

    def continues(self, other: Request) -> bool:
        """True if its prompt begins with that of another request, which may then be needless.

        By tokens: the last ones of the other prompt may be marked in this one, before an image or an invocation.
        """
        tokens = self.prompt.packed_tokens
        return self.namespace == other.namespace and tokens.startswith(other.prompt.packed_tokens)

    @property
    def wants_tokens(self) -> bool:
        """True if it generates tokens; False if only the prompt is to be computed."""
        return self.params.max_tokens != 0

    @property
    def has_output(self) -> bool:
        """True if its last token has an output: tokens are sampled from it, or it is a vector."""
        return self.wants_tokens or self.params.vector is not None

    def targets(self, start: int, n: int) -> Tokens | None:
        """Return the prompt tokens that follow those at `[start, start + n)`, if any are still to be scored."""
        end = min(start + n + 1, self.n_prompt)
        if not self.wants_scores or end <= max(self.n_scored, start + 1):
            return None
        return self.inputs(start + 1, end)

    def new_scores(self, start: int, scores: Sequence[TokenScore]) -> Sequence[TokenScore]:
        """Return the scores that were not reported yet; `scores` begins with the token after `start`.

        The prompt's first token, which cannot be scored, is reported with the second one.
        """
        if not self.n_scored:
            scores = [TokenScore(int(self.inputs(0, 1)[0]), NOT_SCORED), *scores]
        else:
            scores = scores[self.n_scored - start - 1 :]
        self.n_scored += len(scores)
        return scores

    @property
    def is_scored(self) -> bool:
        """True if no prompt token is left to be scored."""
        return not self.wants_scores or self.n_scored == self.n_prompt

    @property
    def n_remaining(self) -> int | None:
        """Tokens that may still be generated; None if the request has no limit."""
        limit = self.params.max_tokens
        return None if limit < 0 else max(0, limit - self.n_generated)

    @property
    def n_draftable(self) -> int | None:
        """Drafted tokens of which all may be accepted with one more before a limit ends the reply or its reasoning.

        None without a limit.
        """
        n_reasoning = self.reasoning_limit.n_free if self.reasoning_limit is not None else None
        if n_reasoning is not None and self.params.constraint is not None:
            # What the constraint forces within the draft might pass the end of the reasoning.
            return 0
        limits = [self.n_remaining, n_reasoning]
        return min((max(limit - 1, 0) for limit in limits if limit is not None), default=None)

    @property
    def n_cached(self) -> int:
        """Prompt tokens reused, without those that were computed after all."""
        if not self.has_started:
            return 0
        return max(0, min(self.n_reused, self.n_prompt - self.n_prompt_computed))

    @property
    def predicted_ms(self) -> float:
        """Milliseconds from the first token to the latest."""
        if self._first_token is None or self._last_token is None:
            return 0.0
        return (self._last_token - self._first_token) * 1e3

    def progress(self, now: float, n_held: int = 0) -> Progress:
        """Return the counts and times that users see; `n_held` is the number of tokens in the slot."""
        admitted = self._admitted if self._admitted is not None else now
        computing = self._computing if self._computing is not None else now
        first = self._first_token if self._first_token is not None else now
        return Progress(
            n_prompt=self.n_prompt,
            n_cached=self.n_cached,
            n_prompt_computed=self.n_prompt_computed,
            n_generated=self.n_generated,
            queue_ms=(admitted - self._submitted) * 1e3,
            prompt_ms=max(0.0, first - admitted) * 1e3,
            predicted_ms=self.predicted_ms,
            load_ms=max(0.0, computing - admitted) * 1e3 if self.n_loaded else 0.0,
            n_held=n_held,
            slot=self.slot,
            n_copied=min(self.n_copied, self.n_cached),
            n_loaded=min(self.n_loaded, self.n_cached),
            n_read=min(self.n_read, self.n_cached),
            n_fetched=min(self.n_fetched, self.n_cached),
            n_anchored=self.prompt.n_anchored,
            n_restored=self.prompt.n_of_replies,
            session_match=self.prompt.session_match,
            n_approximate=self.prompt.n_approximate,
            miss=self.miss if self.has_started else "",
            n_drafted=self.n_drafted,
            n_accepted=self.n_accepted,
        )

    def _mark_started(self, now: float) -> None:
        if self._admitted is None:
            self._admitted = now


@dataclass(slots=True)
class Slot:
    """Runs one request at a time; its id is also its llama.cpp sequence id."""

    id: int
    request: Request | None = None


class ReuseStats:
    """Counts hits by tier, misses, and reused tokens of requests that have ended."""

    def __init__(self) -> None:
        self.requests = RequestStats()
        self.prompt_tokens = PromptStats()
        self.miss_reasons: dict[Miss, int] = {}
        self.speculation = SpeculationStats()

    def count_draft(self, n_drafted: int, n_accepted: int) -> None:
        """Count a draft that was computed, and the tokens of it that were sampled."""
        self.speculation.drafts += 1
        self.speculation.drafted_tokens += n_drafted
        self.speculation.accepted_tokens += n_accepted

    def count(self, request: Request) -> None:
        """Count a request that has ended."""
        if request.params.is_background:
            self.prompt_tokens.ahead += request.n_prompt_computed
            return
        if request.miss and request.has_started:
            self.miss_reasons[request.miss] = self.miss_reasons.get(request.miss, 0) + 1
        if request.is_private or not request.has_started:
            return
        n_cached, requests, tokens = request.n_cached, self.requests, self.prompt_tokens
        tokens.total += request.n_prompt
        tokens.matched += n_cached
        tokens.restored += request.prompt.n_of_replies
        tokens.hit_rate = tokens.matched / max(tokens.total, 1)
        if n_cached:
            requests.hits += 1
            if request.n_fetched:
                requests.from_remote += 1
            elif request.n_read:
                requests.from_disk += 1
            elif request.n_loaded:
                requests.from_ram += 1
            elif request.n_copied:
                requests.cross_slot += 1
            else:
                requests.same_slot += 1
            requests.anchored += request.prompt.n_anchored > 0
            requests.restored += request.prompt.n_of_replies > 0
            requests.in_session += request.prompt.session_match in ("exact", "extend", "diverge")
        else:
            requests.misses += 1
        requests.hit_rate = requests.hits / (requests.hits + requests.misses)

    def add_to(self, stats: CacheStats) -> None:
        """Fill in the fields of the cache's statistics that are about requests."""
        stats.requests = replace(self.requests)
        stats.prompt_tokens = replace(self.prompt_tokens)
        stats.miss_reasons = dict(self.miss_reasons)
        stats.speculation = replace(self.speculation)
