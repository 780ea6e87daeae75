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
from llamaslot.engine.remote_worker import RemoteWorker
from llamaslot.kvcache.cache import KVCache

_log = structlog.get_logger(__name__)

_Respond: TypeAlias = Callable[[Any], None]
_Drop: TypeAlias = Callable[[Callable[[str], None]], None]
"""Deletes objects of the remote store, then calls its argument with the reason of a failure, or an empty text."""


@dataclass(eq=False)
class DropActions:
    """Carries out queries that drop prefixes, between two steps.

    `lacks_disk` is True if a disk is configured but cannot be used, so that its content cannot be deleted.
    """

    _cache: KVCache
    _disk: DiskWorker | None
    _remote: RemoteWorker | None
    _lacks_disk: bool

    def clear(self, _: commands.ClearCache, respond: _Respond) -> None:
        """Drop all idle prefixes."""
        cleared = self._cache.drop()
        _log.info("cache.cleared", **msgspec.structs.asdict(cleared))
        if self._disk is not None:
            self._disk.start(self._cache.take_jobs())
            self._disk.clear_texts()
        self._respond_when_written(respond, cleared, self._remote.clear if self._remote is not None else None)

    def drop_paths(self, query: commands.DropPaths, respond: _Respond) -> None:
        """Drop the paths of a session."""
        forks = self._cache.forks(query.namespace, query.paths)
        dropped = self._cache.drop_paths(query.namespace, query.paths)
        _log.info("session.dropped", **msgspec.structs.asdict(dropped))
        if self._disk is not None:
            self._disk.start(self._cache.take_jobs())
            self._disk.drop_session(query.session)
        # Even if the session is unknown, the disk may still have it, if an earlier deletion failed there.
        answer = dropped if query.paths else NotFoundError("there is no such session")
        remote = self._remote
        drop = (lambda then: remote.drop(query.namespace, forks, then)) if remote is not None and forks else None
        self._respond_when_written(respond, answer, drop)

    def _respond_when_written(
        self, respond: _Respond, answer: CacheCleared | LlamaslotError, drop_remote: _Drop | None
    ) -> None:
        """Respond once the disk and the remote store have deleted everything, or with an error if they fail."""

        def finish(where: str, reason: str) -> None:
            message = f"done in the pool and in RAM, but {where} {reason}"
            respond(UnavailableError(message) if reason else answer)

        def then(reason: str) -> None:
            if reason or drop_remote is None:
                finish("the disk (--cache-disk)", reason)
            else:
                drop_remote(lambda reason: finish("the remote store (--cache-remote)", reason))

        if self._disk is not None:
            self._disk.when_written(then)
        else:
            then("cannot be used, so its content was not deleted" if self._lacks_disk else "")
