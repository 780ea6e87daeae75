"""Pool of cells: the interface that the unified and the partitioned pool have in common."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from llamaslot.kvcache.match import Match


class Sharing(Enum):
    """Ways in which a request gets a prefix that others have, or are about to have."""

    SHARE = "take over its cells"
    COMPUTE = "compute it: taking it over would cost more"
    WAIT = "copy it after the next decode"


class Pool(Protocol):
    """Cells of the context. Sequences are named by their ids, tokens are packed."""

    @property
    def n_used(self) -> int:
        """Cells in use, once the operations so far are carried out."""

    @property
    def n_idle(self) -> int:
        """Cells that only idle sequences use."""

    @property
    def n_idle_duplicates(self) -> int:
        """Cells that idle sequences use besides those that others have for the same tokens; eviction frees them."""

    def sharing(self, match: Match, slots: Sequence[int], n_in_flight: int) -> Sharing:
        """Decide how the best of `slots` gets a prefix of which running requests compute `n_in_flight` tokens."""

    def acquire(self, slots: Sequence[int], match: Match) -> tuple[int, int]:
        """Choose one of `slots`, all idle or empty, and give it the resident part of a match, pinned.

        Returns the slot, and the number of tokens copied from other sequences.
        """

    def copy_resident(self, seq: int, match: Match) -> int:
        """Extend a sequence by what others hold of a match beyond its own tokens; returns how many those are."""

    def append(self, seq: int, tokens: bytes) -> None:
        """Append tokens that a running sequence computed."""

    def deduplicate(self) -> None:
        """Remove duplicate cells, and clear spare sequences that hold nothing of their own."""

    def move_to_spare(self, seq: int, keep: int) -> None:
        """Keep the path of an idle slot, which is about to drop all but `keep` tokens, in a spare sequence."""

    def ensure_free_id(self) -> None:
        """Free a spare sequence id if none is free, so that the next path can be moved to one."""
