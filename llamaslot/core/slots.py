"""A slot: the place where one request runs, and the history of the tokens whose KV its sequence holds."""

from __future__ import annotations

from enum import Enum

from llamaslot.core.backend import Tokens
from llamaslot.core.request import IllegalEventError, Request
from llamaslot.core.tokens import TokenBuffer, common_prefix


class SlotState(Enum):
    """What a slot is doing."""

    EMPTY = "empty"
    IDLE = "idle"
    RUNNING = "running"


class SlotEvent(Enum):
    """What can happen to a slot."""

    CLAIM = "claim"
    RELEASE = "release"
    EVICT = "evict"
    EXTEND = "extend"


SLOT_TABLE: dict[SlotEvent, frozenset[SlotState]] = {
    SlotEvent.CLAIM: frozenset({SlotState.EMPTY, SlotState.IDLE}),
    SlotEvent.RELEASE: frozenset({SlotState.RUNNING}),
    SlotEvent.EVICT: frozenset({SlotState.EMPTY, SlotState.IDLE}),
    SlotEvent.EXTEND: frozenset({SlotState.RUNNING}),
}
"""The states in which each event is legal; elsewhere it raises and changes nothing."""


class Slot:
    """One slot; its id is also its llama.cpp sequence id.

    `history` is exactly what was decoded into the sequence, position 0 on: the prompt and the generated tokens
    without the last one sampled.
    """

    def __init__(self, slot_id: int) -> None:
        self.id = slot_id
        self.history = TokenBuffer()
        self.request: Request | None = None
        self.last_used = 0
        """Logical clock of the last claim or release."""
        self.private_to = ""
        """The request that alone may reuse this KV (`cache_prompt` off), or empty."""
        self.broken = False
        """Whether the sequence holds something else than the history; see `spoil`."""

    @property
    def state(self) -> SlotState:
        """The state, read off what the slot holds."""
        if self.request is not None:
            return SlotState.RUNNING
        return SlotState.IDLE if len(self.history) else SlotState.EMPTY

    def check(self, event: SlotEvent) -> None:
        """Raise `IllegalEventError` if the event is not legal now."""
        if self.state not in SLOT_TABLE[event]:
            raise IllegalEventError(f"slot {self.id}: {event.value} while {self.state.value}")

    def claim(self, request: Request, keep: int, clock: int) -> None:
        """Give the slot to a request that reuses the first `keep` tokens."""
        self.check(SlotEvent.CLAIM)
        self.history.truncate(keep)
        self.request = request
        self.private_to = "" if request.submit.cache_prompt else request.id
        self.last_used = clock

    def release(self, clock: int) -> None:
        """Take the slot from its request; the KV stays."""
        self.check(SlotEvent.RELEASE)
        self.request = None
        self.last_used = clock

    def extend(self, tokens: Tokens) -> None:
        """Note tokens that were decoded for the running request."""
        self.check(SlotEvent.EXTEND)
        self.history.extend(tokens)

    def evict(self, keep: int) -> None:
        """Drop all but the first `keep` tokens."""
        self.check(SlotEvent.EVICT)
        self.history.truncate(keep)
        if keep == 0:
            self.private_to = ""

    def spoil(self) -> None:
        """Distrust the sequence, in whatever state: it counts as empty and must be cleared before anything else."""
        self.history.truncate(0)
        self.broken = True

    def mend(self) -> None:
        """The distrusted sequence was cleared."""
        self.broken = False

    def match(self, request: Request) -> int:
        """Tokens of this slot that `request` may start from: at most all it knows but one."""
        own = self.private_to == request.id
        shared = not self.private_to and request.submit.cache_prompt
        if self.broken or not (own or shared):
            return 0
        return min(common_prefix(self.history.view(), request.known.view()), len(request.known) - 1)
