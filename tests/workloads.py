"""Requests that run side by side on one engine, for tests that compare their replies with cold ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from llamaslot.base.commands import TextPart
from llamaslot.base.events import Cancelled, Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.token_probs import TokenProb
from tests.engine.harness import Harness
from tests.prompt_threads import text_request


@dataclass(frozen=True)
class Ask:
    """One request: what it sends, in how many copies, after how many turns of the loop, and its patience."""

    prompt: str
    n: int = 1
    pause: int = 0
    patience: int | None = None
    """Milliseconds after which it is cancelled."""
    cache_prompt: bool = True
    id_slot: int = -1


@dataclass(frozen=True)
class Answer:
    """The tokens that a request got."""

    ask: Ask
    tokens: list[int]
    is_whole: bool
    """False if it was cancelled."""
    probs: list[TokenProb]
    """One a token if the sampling asks for them."""


@dataclass
class Tally:
    """Counts of what the workloads did, so that the test can say what it covered."""

    n_requests: int = 0
    n_cancelled: int = 0
    n_differing: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def count(self, engine: Harness) -> None:
        """Add what an engine reused, lost and moved."""
        scheduler = engine.engine.scheduler
        stats = scheduler.cache_stats()
        self.seen["evicted tokens"] += stats.evicted_tokens
        self.seen["copied tokens"] += stats.copied_tokens
        self.seen["read tokens"] += stats.read_tokens
        self.seen["restored tokens"] += stats.loaded_tokens
        self.seen["moved prefixes"] += stats.moved_prefixes
        self.seen["waits"] += scheduler.admission.n_waits
        self.seen["preemptions"] += scheduler.admission.n_preempted
        self.seen["layout changes"] += stats.layout_changes


async def answered(
    engine: Harness,
    asks: Sequence[Ask],
    *,
    sampling: Sampling,
    max_tokens: int,
    name: str = "request",
    together: int | None = None,
    max_draft: int = 0,
) -> list[Answer]:
    """Send requests, at most `together` at once, in their order; return the replies in the order of their ends."""
    answers = []
    places = asyncio.Semaphore(together or len(asks))

    async def ask(index: int, each: Ask) -> None:
        for _ in range(each.pause):
            await asyncio.sleep(0.0005)
        request = text_request(
            f"{name} {index}",
            (TextPart(each.prompt),),
            sampling=sampling,
            max_tokens=max_tokens,
            cache_prompt=each.cache_prompt,
            id_slot=each.id_slot,
            n=each.n,
            max_draft=max_draft,
        )
        async with places:
            engine.submit_all(request)
            names = [completion.completion_id for completion in request.params.completions()]
            if each.patience is not None:
                await asyncio.sleep(each.patience * 0.001)
                engine.cancel(names[0])
            for own in names:
                end = await engine.ends[own]
                assert isinstance(end, Finished | Cancelled), end
                events = [event for event in engine.events[own] if isinstance(event, Output | Finished)]
                probs = [row for event in events for row in event.probs or ()]
                answers.append(Answer(each, engine.tokens(own), isinstance(end, Finished), probs))

    await asyncio.gather(*(ask(i, each) for i, each in enumerate(asks)))
    return answers
