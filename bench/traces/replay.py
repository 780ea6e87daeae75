"""Replay of planned requests on a server: prompts of token ids, one or two for each recorded block.

Where a prompt continues the one before it in its context, the reply stands for the first of the new blocks, as it
does in a real conversation.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.client import Client, Completion
from bench.progress import Advance
from bench.traces.recording import Planned, Recorded

TOKENS_PER_BLOCK = 1.5
"""Mean; half of the blocks have one token, the others two."""


class BlockTokens:
    """The token ids of blocks: drawn from the id of the block, unless a reply has given them."""

    def __init__(self, n_vocab: int, seed: int) -> None:
        self._n_vocab = n_vocab
        self._seed = seed
        self._known: dict[tuple[str, int], tuple[int, ...]] = {}

    def prompt(self, scope: str, blocks: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt."""
        return [token for block in blocks for token in self._of(scope, block)]

    def add_reply(self, scope: str, blocks: Sequence[int], reply: Sequence[int]) -> None:
        """Assign the tokens of a reply to the first of some blocks that have no tokens yet."""
        at = 0
        for block in blocks:
            if (scope, block) in self._known or at >= len(reply):
                return
            drawn = self._of(scope, block)
            given = tuple(reply[at : at + len(drawn)])
            self._known[scope, block] = given + drawn[len(given) :]
            at += len(given)

    def _of(self, scope: str, block: int) -> tuple[int, ...]:
        tokens = self._known.get((scope, block))
        if tokens is None:
            digest = hashlib.blake2b(f"{self._seed} {scope} {block}".encode(), digest_size=9).digest()
            drawn = (int.from_bytes(digest[at : at + 4]) % self._n_vocab for at in (1, 5))
            tokens = self._known[scope, block] = tuple(drawn)[: 1 + digest[0] % 2]
        return tokens


def n_reply(request: Recorded) -> int:
    """Return how many tokens the reply to a request gets."""
    return max(1, round(request.reply_blocks * TOKENS_PER_BLOCK))


def fits(request: Recorded, n_ctx: int) -> bool:
    """Return True if a slot of `n_ctx` tokens holds a prompt and its reply, whatever tokens are drawn."""
    n_most = 1.1 * TOKENS_PER_BLOCK * len(request.blocks) + 64
    return bool(request.blocks) and n_most + n_reply(request) < n_ctx


@dataclass(frozen=True)
class Replayed:
    """A request and its reply."""

    planned: Planned
    prompt: tuple[int, ...]
    reply: Completion


@dataclass(eq=False)
class Replay:
    """Sends a plan to a server. `answered` has the requests in the order of their replies.

    `time_scale` shortens the recorded pauses.
    """

    client: Client
    tokens: BlockTokens
    plan: Sequence[Planned]
    time_scale: float
    answered: dict[int, Replayed] = field(default_factory=dict)

    @property
    def sent(self) -> list[Replayed]:
        """All requests in the order in which they were sent."""
        return sorted(self.answered.values(), key=lambda each: each.reply.started)

    async def in_turn(self, advance: Advance) -> None:
        """Send one request after the other, in the order of the plan and without pauses: counts then repeat."""
        for number in range(len(self.plan)):
            await self._send(number, advance)

    async def side_by_side(self, advance: Advance) -> None:
        """Send each request once those that it waits for are answered and its pause is over."""
        done = [asyncio.Event() for _ in self.plan]
        started = min((each.at_s for each in self.plan), default=0.0)

        async def send(number: int) -> None:
            planned = self.plan[number]
            for other in planned.after:
                await done[other].wait()
            # A session's first request waits until the session starts.
            pause = planned.request.delay_s if planned.after else planned.at_s - started
            await asyncio.sleep(pause * self.time_scale)
            await self._send(number, advance)
            done[number].set()

        async with asyncio.TaskGroup() as group:
            for number in range(len(self.plan)):
                group.create_task(send(number))

    async def _send(self, number: int, advance: Advance) -> None:
        planned = self.plan[number]
        blocks = planned.request.blocks
        if planned.previous is not None:
            before = self.plan[planned.previous].request.blocks
            if blocks[: len(before)] == before:
                reply = self.answered[planned.previous].reply.tokens
                self.tokens.add_reply(planned.scope, blocks[len(before) :], reply)
        prompt = self.tokens.prompt(planned.scope, blocks)
        reply = await self.client.complete(
            prompt,
            n_predict=n_reply(planned.request),
            session_id=planned.context,
            temperature=0,
            ignore_eos=True,
        )
        self.answered[number] = Replayed(planned, tuple(prompt), reply)
        advance(f"{planned.context}, {len(prompt)} tokens")
