"""Pool of cells: the interface that the unified and the partitioned pool have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from llamaslot.kvcache.match import Match


class Sharing(Enum):
    """How a request gets a prefix that others have, or are about to have."""

    SHARE = "take over its cells"
    COMPUTE = "compute it: taking it over would cost more"
    WAIT = "copy it after the next decode"


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of the pool, once the operations so far are carried out."""

    total: int
    used: int
    idle: int
    """Cells that only idle prefixes use."""

    @property
    def free(self) -> int:
        """Cells that nothing uses."""
        return self.total - self.used

    @property
    def pinned(self) -> int:
        """Cells that running requests use."""
        return self.used - self.idle


class Pool(Protocol):
    """Cells of the context. Sequences are named by their ids, tokens are packed."""

    n_moved_prefixes: int
    """Idle paths that were moved from a slot to a spare sequence."""
    n_dropped_prefixes: int
    """Idle paths that were evicted for lack of a sequence id."""

    @property
    def n_used(self) -> int:
        """Cells in use, once the operations so far are carried out."""

    @property
    def n_idle(self) -> int:
        """Cells that only idle sequences use."""

    def sharing(self, match: Match, slots: Sequence[int], n_in_flight: int) -> Sharing:
        """How the best of `slots` gets a prefix of which running requests compute `n_in_flight` tokens."""

    def acquire(self, slots: Sequence[int], match: Match) -> tuple[int, int]:
        """Let one of `slots`, all idle or empty, hold the resident part of a match, pinned.

        Returns the slot, and the tokens that it took over from other sequences.
        """

    def copy_resident(self, seq: int, match: Match) -> int:
        """Let a sequence hold what others do of a match behind its own; returns how many tokens that is."""

    def append(self, seq: int, tokens: bytes) -> None:
        """A running sequence computed these tokens behind those that it holds."""

    def tidy(self) -> None:
        """Clean up what the last step left."""

    def move_to_spare(self, seq: int, keep: int) -> None:
        """Keep the path of an idle slot, which is about to drop all but `keep` tokens, in a spare sequence."""

    def free_an_id(self) -> None:
        """Make sure that the next path can be moved to a spare sequence."""

    def on_flush(self) -> None:
        """The operations so far go to the backend, which carries them out before its next decode."""
