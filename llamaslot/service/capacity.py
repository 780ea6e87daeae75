"""Capacity: how many requests may run and wait, of all clients and of each."""

from __future__ import annotations

import math
from typing import NamedTuple

import structlog

from llamaslot.base.callers import Amounts
from llamaslot.base.errors import InvalidRequestError, LlamaslotError, QueueFullError
from llamaslot.service.live_request import LiveRequest
from llamaslot.service.metrics import RequestLog

_MAX_RETRY_AFTER_S = 60
"""OpenAI's clients ignore a longer one."""
_log = structlog.get_logger(__name__)


class _Limit(NamedTuple):
    """A limit of the requests in flight, and how many there are."""

    flag: str
    most: int
    n_in_flight: int
    whose: str = ""
    """Words for the error message, if it is not a limit of all requests."""


class Capacity:
    """Counts completions that have not ended, and requests that are being prepared.

    At most `max_queue` may wait for one of `n_slots`, and of one client at most `max_per_client` (0 for no limit of
    its own); one more is refused.
    """

    def __init__(self, n_slots: int, max_queue: int, max_per_client: int, log: RequestLog) -> None:
        self.most = n_slots + max_queue
        """Completions that may run and wait together."""
        self.refusal: LlamaslotError | None = None
        """The error of all further requests."""
        self._n_slots = n_slots
        self._max_per_client = max_per_client
        self._n_of_client = Amounts()
        """By client; empty for what no client is known of."""
        self._log = log

    @property
    def n_in_flight(self) -> int:
        """Completions that have not ended, and requests that are being prepared."""
        return self._n_of_client.total

    def check(self, n: int, client: str = "") -> None:
        """Raise if `n` more requests of a client cannot be taken: `UnavailableError` when shutting down,
        `QueueFullError` when too many are in flight, `InvalidRequestError` when `n` always exceeds the limit.
        """
        if self.refusal is not None:
            raise self.refusal
        limits = [_Limit("--max-queue", self.most, self.n_in_flight)]
        if self._max_per_client and client:
            most, n_own = self._n_slots + self._max_per_client, self._n_of_client[client]
            limits.append(_Limit("--max-queue-per-client", most, n_own, " from this client"))
        for limit in limits:
            if n > limit.most:
                message = f"{n} completions requested at once, and the limit is {limit.most} ({limit.flag})"
                raise InvalidRequestError(message, param="n")
        for limit in limits:
            if limit.n_in_flight + n > limit.most:
                raise self._full(limit, n)

    def reserve(self, live: LiveRequest, n: int, client: str) -> None:
        """Count a request as `n` of a client, in place of what it counted as; raises what `check` raises."""
        n_before = live.n_reserved
        self.count(live, -n_before)
        try:
            self.check(n, client)
        except LlamaslotError:
            self.count(live, n_before)
            raise
        live.client = client
        self.count(live, n)

    def count(self, live: LiveRequest, n: int) -> None:
        """Count a request as `n` more than before, or less."""
        live.n_reserved += n
        self._n_of_client.add(live.client, n)

    def _full(self, limit: _Limit, n: int) -> QueueFullError:
        """Return the error of one request too many, and count it."""
        rounds = limit.n_in_flight / self._n_slots
        retry_after = min(max(1, math.ceil(rounds * self._log.mean_seconds)), _MAX_RETRY_AFTER_S)
        self._log.metrics.record_end("refused", None)
        _log.warning(
            "request.refused", in_flight=limit.n_in_flight, wanted=n, flag=limit.flag, retry_after=retry_after
        )
        message = (
            f"too many requests{limit.whose}: {limit.n_in_flight} in flight, limit {limit.most} (the slots and "
            f"{limit.flag}); try later"
        )
        return QueueFullError(message, retry_after=retry_after)
