"""The dense oracle by request: what a server that never forgets computes where every KV cache can be trimmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Need:
    """What one request needs at least, given the requests before it."""

    fewest: int
    """Prompt tokens that the oracle computes."""
    matched: int
    """Leading prompt tokens that were in an earlier prompt or reply."""
    is_branch: bool
    """True if it departs from what is known where no request has departed before: its fork is new."""
    is_turn: bool
    """True if it continues a reply that no other request has continued."""


def needs(requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Need]:
    """Return what each of these prompts needs, which are given with their replies in the order of sending.

    As `bench.tokens.fewest`, which is the sum: a prompt's last token is computed in any case, and a reply's last
    token is sampled and never computed.
    """
    root: dict[int, Any] = {}
    result = []
    for prompt, reply in requests:
        at, matched = root, 0
        while matched < len(prompt) and prompt[matched] in at:
            at = at[prompt[matched]]
            matched += 1
        result.append(
            Need(
                fewest=max(len(prompt) - matched, 1),
                matched=matched,
                is_branch=matched > 0 and len(at) == 1,
                is_turn=matched > 0 and not at,
            )
        )
        for token in (*prompt[matched:], *reply[:-1]):
            at = at.setdefault(token, {})
    return result
