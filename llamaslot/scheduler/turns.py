"""Which requests a step may be for, where llama.cpp does not compute runs of any lengths together.

    NoTurns        a step has all requests
    PromptTurns    streams, or one prompt: a partitioned pool
    RunTurns       single tokens of any number of requests, or a longer run of one: windows beside recurrent states

`next` says which requests the next step may be for. Only `commit` changes anything, so a plan that is not carried
out takes no turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from llamaslot.scheduler.chunk_sizer import ChunkSizer
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.step import Turn

MAX_OVERTAKEN = 3
"""Steps with other prompts before one with the first: as in a unified pool, it gets a quarter."""


class NoTurns:
    """Null implementation, where steps may have runs of any lengths: most models, in a unified pool."""

    def next(self, able: Sequence[Request], n_pending: Callable[[Request], int], now: float) -> Turn:
        """Return a turn for all the `able` requests."""
        return Turn(able)

    def commit(self, turn: Turn) -> None:
        """Do nothing: no request waits for a turn."""


class PromptTurns:
    """Turns of prompts in a partitioned pool: a step computes streams, or a single prompt.

    llama.cpp computes tokens of several slots together only as far as their numbers are equal (fact 3). So two
    prompts in one step are computed in small pieces, and a prompt beside streams takes as long as two steps.
    A prompt therefore has a step of its own, and goes first while the streams can still keep to the gap
    (`ChunkSizer.limit`): a short prompt gets its first token earlier, and the streams' intervals stay the
    same. Every fourth step of prompts is for the first one by share, the others for the one with the fewest
    tokens left.
    """

    def __init__(self, chunks: ChunkSizer) -> None:
        self._chunks = chunks
        self._n_overtaken = 0
        """Steps with another prompt than the first one, since that had its last turn."""
        self._waiting_since: float | None = None
        """When the first of the steps was planned that streams have waited for; None if the last one was theirs."""

    def next(self, able: Sequence[Request], n_pending: Callable[[Request], int], now: float) -> Turn:
        """Return the turn of the next step, of `able` requests: those that may run, by share."""
        pending = {request.id: n_pending(request) for request in able}
        streams = [request for request in able if request.is_stream(pending[request.id])]
        prompts = [request for request in able if not request.is_stream(pending[request.id])]
        waited_s = None if self._waiting_since is None else now - self._waiting_since
        if not prompts:
            return Turn(streams, waited_s=waited_s)
        first = prompts[0]
        chosen = first if self._n_overtaken == MAX_OVERTAKEN else min(prompts, key=lambda each: pending[each.id])
        if waited_s is not None and not self._can_wait(streams, waited_s, pending[chosen.id]):
            return Turn(streams, waited_s=waited_s)
        since = now if self._waiting_since is None else self._waiting_since
        n_overtaken = 0 if chosen is first else self._n_overtaken + 1
        return Turn(
            [chosen], n_waiting=len(streams), waiting_since=since, waited_s=waited_s, n_overtaken=n_overtaken
        )

    def _can_wait(self, streams: Sequence[Request], waited_s: float, n_prompt: int) -> bool:
        """True if the gap still allows a query block of a prompt, or all that it has left."""
        # A prompt that was cached whole counts as a stream, and its user still waits for the first token.
        if any(not stream.n_generated for stream in streams):
            return False
        limit = self._chunks.limit(0, n_waiting=len(streams), waited_s=waited_s)
        return limit >= min(n_prompt, self._chunks.block(0))

    def commit(self, turn: Turn) -> None:
        """Record that a step with this turn was carried out."""
        self._waiting_since = turn.waiting_since if turn.n_waiting else None
        if turn.n_overtaken is not None:
            self._n_overtaken = turn.n_overtaken


class RunTurns:
    """Turns of requests on models with both windows and recurrent states: runs of a step have one length (fact 33).

    1. A step computes either one token each of any number of requests, or a longer run of a single request: a chunk
       of a prompt, or what a constraint forced after a stream's last token. Both kinds of steps alternate.
    2. Longer runs of streams and of prompts alternate as well, so a stream does not wait for all prompts, nor a
       prompt for all streams.
    3. Otherwise the longer run is computed whose request has waited longest.
    """

    def __init__(self) -> None:
        self._last_had_long_run = False
        """True if the last step was for a longer run."""
        self._last_was_forced = False
        """True if the last longer run was that of a stream."""
        self._last_long_run = ""
        """Id of the request whose longer run was computed last."""
        self._order: list[str] = []
        """Ids of the other requests that had longer runs then, the next one first."""

    def next(self, able: Sequence[Request], n_pending: Callable[[Request], int], now: float) -> Turn:
        """Return the turn of the next step, of `able` requests: those that may run, by share.

        `n_pending` gives the number of tokens that a request has to compute.
        """
        pending = [(request, n_pending(request)) for request in able]
        single = [request for request, n in pending if n == 1]
        longer = [(request, request.is_stream(n)) for request, n in pending if n > 1]
        n_forced = sum(is_stream for _, is_stream in longer)
        if not longer or (single and self._last_had_long_run):
            return Turn(single, n_waiting=n_forced)
        places = {name: i for i, name in enumerate(self._order)}
        # Behind those that wait already: else short prompts that keep coming would overtake a long one forever.
        # The last one waits only since its step, so it comes behind those that are new.
        longer.sort(key=lambda each: (each[0].id == self._last_long_run, places.get(each[0].id, len(places))))
        chosen = next((each for each in longer if each[1] != self._last_was_forced), longer[0])
        request, is_forced = chosen
        longer.remove(chosen)
        long_runs = (request.id, *(other.id for other, _ in longer))
        return Turn([request], long_runs, is_forced, n_waiting=len(single) + n_forced - is_forced)

    def commit(self, turn: Turn) -> None:
        """Record that a step with this turn was carried out."""
        self._last_had_long_run = bool(turn.long_runs)
        if turn.long_runs:
            self._last_was_forced = turn.is_forced
            self._last_long_run, *self._order = turn.long_runs


Turns: TypeAlias = NoTurns | PromptTurns | RunTurns
