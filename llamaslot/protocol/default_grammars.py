"""Grammars of requests that have none (`--grammar-file`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from llamaslot.base.commands import Constraint


class DefaultGrammars:
    """One grammar for all requests, or a list: the k-th is for the k-th request, and later requests get none."""

    def __init__(self, grammars: Sequence[Constraint] = ()) -> None:
        self._grammars = grammars
        self._numbers = itertools.count()

    def next(self) -> Constraint | None:
        """Return the grammar of the next request. Usable on any thread."""
        number = next(self._numbers)
        if len(self._grammars) == 1:
            return self._grammars[0]
        return self._grammars[number] if number < len(self._grammars) else None
