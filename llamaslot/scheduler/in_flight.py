"""In-flight sharing: which prefixes running requests hold or are about to compute.

A waiting request that shares such a prefix waits for it instead of computing it again. Who waits for whom is not
stored: each plan compares the prompts again. So when a leader ends, for whatever reason, its followers are free,
and the first of them to be admitted leads the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamaslot.base.tokens import Tokens, n_common
from llamaslot.scheduler.request import Request


class InFlight:
    """Tokens of the running requests, as of their admission.

    `has_passed` returns True if it is too late to share that many tokens of a running request, because no
    checkpoint will be taken after them.
    """

    def __init__(self, has_passed: Callable[[Request, int], bool]) -> None:
        self._has_passed = has_passed
        self._running: dict[str, tuple[Request, Tokens]] = {}
        self._n_common: dict[str, dict[tuple[str, int], int]] = {}
        """Length of the common prefix, by waiting request, then by running request and its number of tokens."""

    def add(self, request: Request) -> None:
        """Record that a request was admitted."""
        self._running[request.id] = request, request.tokens.view()
        self._n_common.pop(request.id, None)

    def remove(self, request: Request) -> None:
        """Record that a request has left its slot or the queue."""
        self._running.pop(request.id, None)
        self._n_common.pop(request.id, None)

    def longest(self, request: Request) -> tuple[int, Sequence[Request]]:
        """Return the longest prefix shared with running requests of the namespace, and which requests share it."""
        lengths = self._n_common.setdefault(request.id, {})
        prefix = request.tokens.view(0, len(request.tokens) - 1)
        longest, leaders = 0, []
        for leader, tokens in self._running.values():
            if leader.namespace != request.namespace:
                continue
            key = leader.id, len(tokens)
            if key not in lengths:
                lengths[key] = n_common(prefix, tokens)
            if lengths[key] >= max(longest, 1) and self._has_passed(leader, lengths[key]):
                continue
            if lengths[key] > longest:
                longest, leaders = lengths[key], [leader]
            elif lengths[key] == longest > 0:
                leaders.append(leader)
        return longest, leaders
