"""Grammars of requests that bring none (`--grammar-file`)."""

from __future__ import annotations

from collections.abc import Sequence

from llamaslot.base.commands import Constraint


class DefaultGrammars:
    """One grammar for all requests, or several: the k-th for the k-th request, and none for later ones."""

    def __init__(self, grammars: Sequence[Constraint] = ()) -> None:
        self._grammars = grammars
        self._n_requests = 0

    def next(self) -> Constraint | None:
        """Return the grammar of the next request."""
        self._n_requests += 1
        if len(self._grammars) == 1:
            return self._grammars[0]
        return self._grammars[self._n_requests - 1] if self._n_requests <= len(self._grammars) else None
