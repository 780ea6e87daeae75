"""Turns: which requests a step may have, where llama.cpp should not compute runs of different lengths together.

    NoTurns        all requests
    PromptTurns    all streams, or one prompt: in a partitioned pool
    RunTurns       single tokens of any number of requests, or a longer run of one: for models with both sliding
                   windows and recurrent states

`next` returns the requests for the next step. Only `commit` changes state, so a plan that is not executed takes no
turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from llamaslot.scheduler.chunk_sizer import ChunkSizer
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.step import Turn

MAX_OVERTAKEN = 3
"""Most steps of other prompts before one of the first prompt, which so gets a quarter, as in a unified pool."""


class NoTurns:
    """Null implementation for unified pools of most models, in which steps may have runs of any lengths."""

    def next(self, able: Sequence[Request], n_pending: Callable[[Request], int], now: float) -> Turn:
        """Return a turn for all `able` requests."""
        return Turn(able)

    def commit(self, turn: Turn) -> None:
        """Do nothing, because no request waits for a turn."""


class PromptTurns:
    """Turns of prompts in a partitioned pool: a step computes streams, or a single prompt.

    llama.cpp computes tokens of several slots together only if each slot has equally many (fact 3). So two prompts
    in one step would be computed in small pieces, and a prompt beside streams would take as long as two steps. A
    prompt therefore has a step of its own, and goes first as long as the streams still get their next tokens within
    the gap (`ChunkSizer.limit`): a short prompt gets its first token earlier, and the streams' intervals stay the
    same. Every fourth step of prompts is for the first one by share, the others for the one with the fewest tokens
    left.
    """

    def __init__(self, chunks: ChunkSizer) -> None:
        self._chunks = chunks
        self._n_overtaken = 0
        """Number of steps of other prompts since the first prompt's last step."""
        self._waiting_since: float | None = None
        """When the first step of prompts since the streams' last step was planned; None if there was none."""

    def next(self, able: Sequence[Request], n_pending: Callable[[Request], int], now: float) -> Turn:
        """Return the turn of the next step; `able` are the requests that may run, in order of their share."""
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
        """True if the gap leaves time for a query block of the prompt, or for all that the prompt has left."""
        # A prompt that is cached whole counts as a stream, but its user still waits for the first token.
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
    """Turns for models with both sliding windows and recurrent states, where all runs of a step must have the same
    length (fact 33).

    1. A step computes either one token each of any number of requests, or a longer run of a single request: a chunk
       of a prompt, or what a constraint forced after a stream's last token. Both kinds of steps alternate.
    2. Longer runs of streams and of prompts alternate as well, so that a stream does not wait for all prompts, nor
       a prompt for all streams.
    3. Otherwise the request that has waited longest gets the longer run.
    """

    def __init__(self) -> None:
        self._last_had_long_run = False
        """True if the last step had a longer run."""
        self._last_was_forced = False
        """True if the last longer run belonged to a stream."""
        self._last_long_run = ""
        """Id of the request that had the last longer run."""
        self._order: list[str] = []
        """Ids of the other requests that had longer runs to compute then, the next one first."""

    def next(self, able: Sequence[Request], n_pending: Callable[[Request], int], now: float) -> Turn:
        """Return the turn of the next step; `able` are the requests that may run, in order of their share.

        `n_pending` returns the number of tokens that a request has to compute.
        """
        pending = [(request, n_pending(request)) for request in able]
        single = [request for request, n in pending if n == 1]
        longer = [(request, request.is_stream(n)) for request, n in pending if n > 1]
        n_forced = sum(is_stream for _, is_stream in longer)
        if not longer or (single and self._last_had_long_run):
            return Turn(single, n_waiting=n_forced)
        places = {name: i for i, name in enumerate(self._order)}
        # New requests come after those that wait already: otherwise a stream of short prompts would overtake a long
        # one forever. The last request served has waited least, so it comes after the new ones.
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
