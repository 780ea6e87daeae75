"""Limits: how many requests may run and wait, the memory of replies, and requests that crashed the engine.

Of a reply, only the packed probabilities are kept (`ProbRows`): the JSON of a probability is four times as long,
and is made while it is sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import structlog

from llamaslot.base.callers import Amounts
from llamaslot.base.commands import Generate, GenerateParams
from llamaslot.base.errors import InvalidRequestError, LlamaslotError, QueueFullError, UnavailableError
from llamaslot.base.tokens import TokenizedPrompt
from llamaslot.service.metrics import Metrics

MAX_REPLY_BYTES = 64 * 2**20
"""Bytes of all replies."""
_MAX_RETRY_AFTER_S = 60
"""OpenAI's clients ignore a longer one."""
_REFUSED_S = 600.0
"""Time for which a request that crashed the engine alone is refused."""
_MAX_SUSPECTS = 1024
_MIB = 2**20
_log = structlog.get_logger(__name__)


class Capacity:
    """Counts completions that have not ended, and requests that are being prepared.

    At most `max_queue` may wait for one of `n_slots`, and of one client at most `max_per_client` (0 for no limit of
    its own); one more is refused.
    """

    def __init__(self, n_slots: int, max_queue: int, max_per_client: int, metrics: Metrics) -> None:
        self.most = n_slots + max_queue
        """Completions that may run and wait together."""
        self.refusal: LlamaslotError | None = None
        """The error of all further requests."""
        self._n_slots = n_slots
        self._max_per_client = max_per_client
        self.n_of_client = Amounts()
        """By client; the empty name counts requests whose client is not known yet."""
        self._metrics = metrics

    @property
    def n_in_flight(self) -> int:
        """Completions that have not ended, and requests that are being prepared."""
        return self.n_of_client.total

    def check(self, n: int, client: str = "", *, is_accepted: bool = False) -> None:
        """Raise if `n` more requests of a client cannot be taken: `UnavailableError` when shutting down,
        `QueueFullError` when too many are in flight, `InvalidRequestError` when `n` always exceeds the limit.

        With `is_accepted` they are of a request that had a place before the shutdown, which waits for it.
        """
        if self.refusal is not None and not is_accepted:
            raise self.refusal
        limits = [("--max-queue", self.most, self.n_in_flight, "")]
        if self._max_per_client and client:
            most, n_own = self._n_slots + self._max_per_client, self.n_of_client[client]
            limits.append(("--max-queue-per-client", most, n_own, " from this client"))
        for flag, most, _, _ in limits:
            if n > most:
                message = f"{n} completions requested at once, and the limit is {most} ({flag})"
                raise InvalidRequestError(message, param="n")
        for flag, most, n_in_flight, whose in limits:
            if n_in_flight + n > most:
                rounds = n_in_flight / self._n_slots
                retry_after = min(max(1, math.ceil(rounds * self._metrics.mean_seconds)), _MAX_RETRY_AFTER_S)
                self._metrics.record_end("refused", None)
                _log.warning("request.refused", in_flight=n_in_flight, wanted=n, flag=flag, retry_after=retry_after)
                message = (
                    f"too many requests{whose}: {n_in_flight} in flight, limit {most} (the slots and {flag}); "
                    "try later"
                )
                raise QueueFullError(message, retry_after=retry_after)


class AheadBudget:
    """Tokens that may be computed ahead of next turns: `per_hour` at first, and as many more in each hour.

    Unused tokens do not accumulate. `clock` gives seconds.
    """

    def __init__(self, per_hour: int, clock: Callable[[], float]) -> None:
        self._per_hour = per_hour
        self._clock = clock
        self._left = float(per_hour)
        self._since = clock()

    @property
    def n_left(self) -> int:
        """The tokens that may be computed now."""
        now = self._clock()
        self._left = min(self._left + (now - self._since) * self._per_hour / 3600, self._per_hour)
        self._since = now
        return int(self._left)

    def take(self, n_tokens: int) -> None:
        """Count tokens that are to be computed."""
        self._left -= n_tokens


class ReplyBudget:
    """Bytes that replies take while they are generated and sent, and parts of bodies until then, by owner.

    An owner (`Caller.owner`) may take as much as it leaves free, so one alone gets half, and there is always room
    for the next one.
    """

    def __init__(self) -> None:
        self._bytes = Amounts()

    @property
    def n_bytes(self) -> int:
        """Bytes of all owners."""
        return self._bytes.total

    def charge(self, owner: str, n_bytes: int, *, n_own: int = 0) -> None:
        """Count further bytes of a request that has `n_own`; raises `QueueFullError` if its owner has too many.

        One request alone may have any number.
        """
        if n_bytes > 0 and self.n_bytes > n_own and not self._bytes.may_add(owner, n_bytes, MAX_REPLY_BYTES):
            n_owner = self._bytes[owner] + n_bytes
            raise QueueFullError(
                f"requests and unread replies of this client take {n_owner / _MIB:.0f} MiB; "
                "try later, send fewer requests at once, or ask for less",
                retry_after=1,
            )
        self._bytes.add(owner, n_bytes)

    @contextmanager
    def held(self, owner: str, n_bytes: int) -> Iterator[None]:
        """Count the bytes of a reply while it is sent; raises as `charge` does."""
        self.charge(owner, n_bytes)
        try:
            yield
        finally:
            self.charge(owner, -n_bytes)


class ProbsLimit(NamedTuple):
    """Limit of the probabilities in one reply."""

    flag_value: int
    """That of `--max-reply-probs`, which counts all copies."""
    fields: Sequence[str]
    """Request fields that ask for them."""
    n_copies: int = 1
    """Times that the reply has each of them."""

    @property
    def most(self) -> int:
        """The most probabilities of which the reply may have its copies."""
        return self.flag_value // self.n_copies

    def check(self, prompts: Sequence[Generate], n_ctx: int) -> None:
        """Raise `InvalidRequestError` if a reply to these prompts would have more.

        A reply without `max_tokens` is known to be long with `ignore_eos` only.
        """
        n = 0
        for params, n_prompt in ((each.params, each.prompt.n_tokens) for each in prompts):
            n_new = n_ctx - n_prompt
            if params.max_tokens >= 0:
                # A context that is shifted limits no reply.
                n_new = params.max_tokens if params.shift.is_on else min(n_new, params.max_tokens)
            elif not params.sampling.ignore_eos:
                n_new = 0
            n += params.n * (n_new * (1 + params.sampling.n_probs) + n_prompt * (1 + params.prompt_probs))
        if n > self.most:
            raise self.error(f"would have {n}")

    def error(self, has: str) -> InvalidRequestError:
        """Return the error of a reply that has too many."""
        *others, last = [f"'{field}'" for field in self.fields]
        return InvalidRequestError(
            f"the reply {has} probabilities, and the limit is {self.most} (--max-reply-probs): "
            f"lower {', '.join(others)} or {last}" + ("" if self.n_copies > 1 else "; a stream has no limit"),
            param=self.fields[-1],
        )


def request_digest(params: GenerateParams, prompt: TokenizedPrompt) -> bytes:
    """Return the 16 bytes by which a request is recognized: its namespace and its tokens."""
    digest = hashlib.blake2b(params.namespace.encode(), digest_size=16)
    digest.update(b"\0" + prompt.packed_tokens)
    return digest.digest()


class Suspects:
    """Requests that may have crashed the engine, by their digests; `clock` gives seconds.

    A suspect that comes again runs alone. If the engine crashes then too, it is refused for ten minutes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._suspects: dict[bytes, float] = {}
        """By digest, the time until which it is refused."""

    def __bool__(self) -> bool:
        """True if there are any."""
        return bool(self._suspects)

    def add(self, digest: bytes) -> None:
        """Add a request that ran beside others when the engine crashed."""
        self._suspects.setdefault(digest, 0.0)
        while len(self._suspects) > _MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]

    def refuse(self, digest: bytes) -> None:
        """Refuse a request with which the engine crashed although it ran alone."""
        self._suspects[digest] = self._clock() + _REFUSED_S

    def clear(self, digest: bytes) -> None:
        """Take a request off the list: it ran to its end."""
        self._suspects.pop(digest, None)

    def check(self, digest: bytes) -> bool:
        """Return True if a request has to run alone; raises `UnavailableError` if it is refused."""
        refused_until = self._suspects.get(digest)
        if refused_until is None:
            return False
        left = refused_until - self._clock()
        if left > 0:
            minutes = math.ceil(left / 60)
            raise UnavailableError(
                f"the engine crashed twice while it ran this request; it is refused for {minutes} more minutes",
                retry_after=math.ceil(left),
            )
        return True
