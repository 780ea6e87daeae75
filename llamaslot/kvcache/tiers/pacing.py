"""Delays and speeds that all tiers have in common. Times are seconds on the caller's clock.

Use the constants as `pacing.RETRY_DELAY_S`: tests shorten them here.
"""

from __future__ import annotations

PARTIAL_DELAY_S = 2.0
"""Age at which a partial segment is written or uploaded: a conversation's next turn usually replaces it before.
It is written earlier if it may be evicted from RAM before that.
"""
RETRY_DELAY_S = 30.0
"""Time until what failed is tried again: a save or load without memory, a read, a write, the remote tier."""
