"""Turns that running requests take, where llama.cpp should not compute all of them in one step.

    PromptTurns    all decoding requests, or one prompt: in a partitioned pool
    RunTurns       single tokens of any number of requests, or a longer run of one: for models with both sliding
                   windows and recurrent states
    ImageTurns     a tile of one request, or text: in a server with a projector
    AdapterTurns   requests with the same LoRA adapters, and of these the ones whose turn it is

`next` returns the requests for the next step. Only `commit` changes state, so a plan that is not executed takes no
turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from llamaslot.base.adapters import Adapters
from llamaslot.scheduler.chunk_sizer import ChunkSizer
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.step import Turn

MAX_STEPS_OVERTAKEN = 3
"""Most steps of other prompts before one of the first prompt, which so gets a quarter, as in a unified pool."""


class PromptTurns:
    """Turns of prompts in a partitioned pool: a step computes decodes, or a single prompt.

    llama.cpp computes tokens of several slots together only if each slot has equally many (fact 3). So two prompts
    in one step would be computed in small pieces, and a prompt beside decodes would take as long as two steps. A
    prompt therefore has a step of its own, and goes first as long as the decodes still get their next tokens within
    the gap (`ChunkSizer.limit`): a short prompt gets its first token earlier, and the decodes' intervals stay the
    same. Every fourth step of prompts is for the first one by share, the others for the one with the fewest tokens
    left.
    """

    def __init__(self, chunks: ChunkSizer) -> None:
        self._chunks = chunks
        self._n_overtaken = 0
        """Number of steps of other prompts since the first prompt's last step."""
        self._waiting_since: float | None = None
        """When the first step of prompts since the decodes' last step was planned; None if there was none."""

    def next(self, pending: Mapping[Request, int], now: float) -> Turn:
        """Return the turn of the next step.

        `pending` has the number of tokens that each request which may run has to compute, in order of their share.
        """
        # The last token of a prompt without a reply has the length of a decode, so it takes no step of its own.
        decodes = [request for request, n in pending.items() if n == 1 or request.is_decoding(n)]
        prompts = [request for request in pending if request not in decodes]
        waited_s = None if self._waiting_since is None else now - self._waiting_since
        if not prompts:
            return Turn(decodes, waited_s=waited_s)
        first = prompts[0]
        chosen = first if self._n_overtaken == MAX_STEPS_OVERTAKEN else min(prompts, key=pending.__getitem__)
        if waited_s is not None and not self._can_wait(decodes, waited_s, pending[chosen]):
            return Turn(decodes, waited_s=waited_s)
        since = now if self._waiting_since is None else self._waiting_since
        n_overtaken = 0 if chosen is first else self._n_overtaken + 1
        return Turn(
            [chosen], n_waiting=len(decodes), waiting_since=since, waited_s=waited_s, n_overtaken=n_overtaken
        )

    def _can_wait(self, decodes: Sequence[Request], waited_s: float, n_prompt: int) -> bool:
        """True if the gap leaves time for a query block of the prompt, or for all that the prompt has left."""
        # A prompt that is cached whole counts as decoding, but its user still waits for the first token.
        if any(not request.n_generated for request in decodes):
            return False
        limit = self._chunks.limit(0, n_waiting=len(decodes), waited_s=waited_s)
        return limit >= min(n_prompt, self._chunks.block(0))

    def commit(self, turn: Turn) -> None:
        """Record that a step with this turn was carried out."""
        self._waiting_since = turn.waiting_since if turn.n_waiting else None
        if turn.n_overtaken is not None:
            self._n_overtaken = turn.n_overtaken

    def wait(self, since: float | None) -> None:
        """Record that decodes waited for a step of other turns, which was planned at that time."""
        if self._waiting_since is None:
            self._waiting_since = since


class RunTurns:
    """Turns for models with both sliding windows and recurrent states, where all runs of a step must have the same
    length (fact 33).

    1. A step computes either one token each of any number of requests, or a longer run of a single request: a chunk
       of a prompt, or what a constraint forced after a sampled token. Both kinds of steps alternate.
    2. Longer runs of decodes and of prompts alternate as well, so that a decode does not wait for all prompts, nor
       a prompt for all decodes.
    3. Otherwise the request that has waited longest gets the longer run.
    """

    def __init__(self) -> None:
        self._last_had_long_run = False
        """True if the last step had a longer run."""
        self._last_was_forced = False
        """True if the last longer run belonged to a decoding request."""
        self._last: Request | None = None
        """The request that had the last longer run. Others that waited then have a `place`."""

    def next(self, pending: Mapping[Request, int], now: float) -> Turn:
        """Return the turn of the next step, as `PromptTurns` does."""
        single = [request for request, n in pending.items() if n == 1]
        longer = [request for request, n in pending.items() if n > 1]
        forced = [request for request in longer if request.is_decoding(pending[request])]
        if not longer or (single and self._last_had_long_run):
            return Turn(single, n_waiting=len(forced))
        # New requests come after those that wait already: otherwise a stream of short prompts would overtake a long
        # one forever. The last request served has waited least, so it comes after the new ones.
        longer.sort(key=lambda each: (each is self._last, each.place))
        chosen = next((each for each in longer if (each in forced) != self._last_was_forced), longer[0])
        longer.remove(chosen)
        is_forced = chosen in forced
        n_waiting = len(single) + len(forced) - is_forced
        return Turn([chosen], (chosen, *longer), is_forced, n_waiting=n_waiting)

    def commit(self, turn: Turn) -> None:
        """Record that a step with this turn was carried out."""
        self._last_had_long_run = bool(turn.long_runs)
        if turn.long_runs:
            self._last_was_forced = turn.is_forced
            self._last, *others = turn.long_runs
            self._last.place = math.inf
            for place, request in enumerate(others):
                request.place = place


class ImageTurns:
    """Turns of prompts with images: a step computes a tile, or text, since embeddings need batches of their own.

    While a tile is computed all others wait. So every other step is for those that have text to compute next, in
    the turns of `text_turns`.
    """

    def __init__(self, text_turns: PromptTurns | RunTurns | None) -> None:
        self._text_turns = text_turns
        self._last_was_tile = False
        """True if the last step computed a tile."""

    def next(self, pending: Mapping[Request, int], now: float) -> Turn:
        """Return the turn of the next step, as `PromptTurns` does."""
        tiles = {each: tile for each, n in pending.items() if (tile := each.tiles.at(len(each.tokens) - n))}
        text = {each: n for each, n in pending.items() if each not in tiles}
        if tiles and not (text and self._last_was_tile):
            request, tile = next(iter(tiles.items()))
            n_waiting = sum(each.is_decoding(n) for each, n in text.items())
            return Turn([request], tile=tile, n_waiting=n_waiting, waiting_since=now)
        return self._text_turns.next(text, now) if self._text_turns is not None else Turn([*text])

    def commit(self, turn: Turn) -> None:
        """Record that a step with this turn was carried out."""
        self._last_was_tile = turn.tile is not None
        if turn.tile is None and self._text_turns is not None:
            self._text_turns.commit(turn)
        elif turn.n_waiting and isinstance(self._text_turns, PromptTurns):
            # A tile delays the decodes as a prompt does.
            self._text_turns.wait(turn.waiting_since)


Turns: TypeAlias = PromptTurns | RunTurns | ImageTurns


class AdapterTurns:
    """Turns of requests with different LoRA adapters: llama.cpp applies adapters to a whole step.

    1. A change of adapters takes time (fact 42). So those of a step keep their turn for `min_s` seconds, as long as
       they have something to compute.
    2. Then it is the turn of those that have waited longest. New ones come after those that wait already, as in
       `RunTurns`.
    3. Among the requests with these adapters, the turns that `new_turns` makes say which may be in the step. Each
       set of adapters has its own, since they remember how long its decodes have waited.

    Decodes with other adapters wait meanwhile, so a prompt may take no more than their gap in one step.
    """

    def __init__(self, min_s: float, new_turns: Callable[[], Turns | None]) -> None:
        self._min_s = min_s
        self._new_turns = new_turns
        self._turns: dict[Adapters, Turns | None] = {}
        """By adapters, in the order of their turns; those of the last step at the end."""
        self._last: Adapters = ()
        """Adapters of the last step."""
        self._since = 0.0
        """When their turn began."""

    def next(self, pending: Mapping[Request, int], now: float) -> Turn:
        """Return the turn of the next step, as `PromptTurns` does."""
        groups: dict[Adapters, dict[Request, int]] = {}
        for request, n in pending.items():
            groups.setdefault(request.adapters_at(len(request.tokens) - n), {})[request] = n
        if not groups:
            return Turn()
        waiting = [each for each in self._turns if each in groups and each != self._last]
        waiting += [each for each in groups if each not in self._turns and each != self._last]
        keeps = self._last in groups and (not waiting or now - self._since < self._min_s)
        chosen = self._last if keeps else waiting.pop(0)
        if not keeps and self._last in groups:
            waiting.append(self._last)
        own, turns = groups[chosen], self._turns.get(chosen) or self._new_turns()
        turn = turns.next(own, now) if turns is not None else Turn([*own])
        others = [each for adapters in waiting for each in groups[adapters].items()]
        since = self._since if keeps else now
        return replace(
            turn,
            order=(*waiting, chosen),
            changes_adapters=chosen != self._last,
            since=since,
            until=since + self._min_s if waiting else None,
            n_others=len(others),
            n_apart=sum(request.is_decoding(n) for request, n in others),
            # Without own decodes that wait, it is the first step of prompts for the others.
            waited_s=turn.waited_s if turn.n_waiting else None,
        )

    def commit(self, turn: Turn) -> None:
        """Record that a step with this turn was carried out."""
        if not turn.order:
            return
        self._turns = {each: self._turns.get(each) or self._new_turns() for each in turn.order}
        self._last, self._since = turn.order[-1], turn.since
        turns = self._turns[self._last]
        if turns is not None:
            turns.commit(turn)
