"""A slot: the place where one request runs. Its id is also its llama.cpp sequence id."""

from __future__ import annotations

from enum import Enum

from llamaslot.scheduler.request import IllegalEventError, Request


class SlotState(Enum):
    """Whether a request runs in a slot. What its sequence holds is the ledger's affair."""

    FREE = "free"
    RUNNING = "running"


class SlotEvent(Enum):
    """What can happen to a slot."""

    CLAIM = "claim"
    RELEASE = "release"


SLOT_TABLE: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.CLAIM): SlotState.RUNNING,
    (SlotState.RUNNING, SlotEvent.RELEASE): SlotState.FREE,
}
"""Every legal step of a slot; whatever is not listed raises and changes nothing."""


class Slot:
    """One slot and the request that runs in it, if any."""

    def __init__(self, slot_id: int) -> None:
        self.id = slot_id
        self.request: Request | None = None

    @property
    def state(self) -> SlotState:
        """The state, read off the request."""
        return SlotState.FREE if self.request is None else SlotState.RUNNING

    def claim(self, request: Request) -> None:
        """Give the slot to a request."""
        self._check(SlotEvent.CLAIM)
        self.request = request

    def release(self) -> None:
        """Take the slot from its request."""
        self._check(SlotEvent.RELEASE)
        self.request = None

    def _check(self, event: SlotEvent) -> None:
        if (self.state, event) not in SLOT_TABLE:
            raise IllegalEventError(f"slot {self.id}: {event.value} while {self.state.value}")
