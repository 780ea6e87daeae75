"""Queries that drop prefixes in all tiers: clearing the cache, deleting a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import structlog

from llamaslot.base import commands
from llamaslot.base.commands import CacheCleared
from llamaslot.base.errors import LlamaslotError, NotFoundError, UnavailableError
from llamaslot.engine.disk_worker import DiskWorker
from llamaslot.kvcache.cache import KVCache

_log = structlog.get_logger(__name__)

_Respond: TypeAlias = Callable[[Any], None]


@dataclass(eq=False)
class DropActions:
    """Carries out queries that drop prefixes, between two steps.

    `lacks_disk` is True if a disk is configured but cannot be used, so what it has stays there.
    """

    _cache: KVCache
    _disk: DiskWorker | None
    _lacks_disk: bool

    def clear(self, _: commands.ClearCache, respond: _Respond) -> None:
        """Drop all idle prefixes."""
        cleared = self._cache.dropper.drop()
        _log.info("cache.cleared", **msgspec.structs.asdict(cleared))
        if self._disk is not None:
            self._disk.start(self._cache.take_jobs())
            self._disk.clear_texts()
        self._respond_when_written(respond, cleared)

    def drop_paths(self, query: commands.DropPaths, respond: _Respond) -> None:
        """Drop the paths of a session."""
        dropped = self._cache.dropper.drop_paths(query.namespace, query.paths)
        _log.info("session.dropped", **msgspec.structs.asdict(dropped))
        if self._disk is not None:
            self._disk.start(self._cache.take_jobs())
            self._disk.drop_session(query.session)
        # The disk may still have a session that is unknown here, if it could not delete it before.
        self._respond_when_written(respond, dropped if query.paths else NotFoundError("there is no such session"))

    def _respond_when_written(self, respond: _Respond, answer: CacheCleared | LlamaslotError) -> None:
        """Respond once the disk has carried out all jobs so far, or with an error if it does not."""

        def then(reason: str) -> None:
            message = f"done in the pool and in RAM, but the disk (--cache-disk) {reason}"
            respond(UnavailableError(message) if reason else answer)

        if self._disk is not None:
            self._disk.when_written(then)
        else:
            then("cannot be used: what it has stays there" if self._lacks_disk else "")
