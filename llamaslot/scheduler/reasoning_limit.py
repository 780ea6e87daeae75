"""Limit of a reply's reasoning tokens: after the last one, the tag that ends reasoning is forced.

As in llama-server, tags are found by their token ids. A tag that the model writes with other tokens is not found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum

from llamaslot.base.generation.tools import ReasoningBudget


class _State(Enum):
    BEFORE = "no reasoning yet"
    REASONING = "in reasoning"
    DONE = "reasoning has ended"


class ReasoningLimit:
    """Counts the reasoning tokens of one reply."""

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._state = _State.REASONING if budget.is_open else _State.BEFORE
        self._n = 0
        self._last: deque[int] = deque(maxlen=max(len(budget.start), len(budget.end)))

    def add(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Count tokens of the reply; returns the tokens that must follow, which count as added."""
        for token in tokens:
            if self._state is _State.DONE:
                break
            self._last.append(token)
            if self._state is _State.BEFORE:
                if self._n_last(self._budget.start) == len(self._budget.start):
                    self._state = _State.REASONING
                    self._last.clear()
                continue
            self._n += 1
            if self._n_last(self._budget.end) == len(self._budget.end):
                self._state = _State.DONE
        if self._state is not _State.REASONING or self._n < self._budget.n_tokens:
            return ()
        self._state = _State.DONE
        return self._budget.end[self._n_last(self._budget.end) :] + self._budget.after

    @property
    def n_free(self) -> int | None:
        """Tokens that can be added before any is forced; None if none will be."""
        return None if self._state is _State.DONE else self._budget.n_tokens - self._n

    def _n_last(self, tag: tuple[int, ...]) -> int:
        """Return how many of the last tokens are the beginning of a tag."""
        last = tuple(self._last)
        return next((n for n in range(min(len(tag), len(last)), 0, -1) if last[-n:] == tag[:n]), 0)
