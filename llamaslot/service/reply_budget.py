"""Memory of replies while they are generated and sent: what one may ask for, and what all may take together.

Only the packed form is kept (`ProbRows`): the JSON of a probability is four times as long, and is made while it is
sent. An owner (`Caller.owner`) may take as much as it leaves free, so one alone gets half, and there is always room
for the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from llamaslot.base.callers import Amounts
from llamaslot.base.commands import PreparedPrompt
from llamaslot.base.errors import InvalidRequestError, QueueFullError

MAX_BYTES = 64 * 2**20
"""Bytes of all replies."""
_MIB = 2**20


class ReplyBudget:
    """Bytes that replies take, by owner."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = Amounts()

    @property
    def n_bytes(self) -> int:
        """Bytes of all owners."""
        return self._bytes.total

    def charge(self, owner: str, n_bytes: int, *, n_own: int = 0) -> None:
        """Count further bytes of a request that has `n_own`; raises `QueueFullError` if its owner has too many.

        One request alone may have any number.
        """
        if n_bytes > 0 and self.n_bytes > n_own and not self._bytes.may_add(owner, n_bytes, self._max_bytes):
            n_owner = self._bytes[owner] + n_bytes
            raise QueueFullError(
                f"unfinished and unread replies of this client take {n_owner / _MIB:.0f} MiB; "
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

    def check(self, prompts: Sequence[PreparedPrompt], n_ctx: int) -> None:
        """Raise `InvalidRequestError` if a reply to these prompts would have more.

        A reply without `max_tokens` is known to be long with `ignore_eos` only.
        """
        n = 0
        for params, n_prompt in ((each.params, each.tokenized.n_tokens) for each in prompts):
            n_new = n_ctx - n_prompt
            if params.max_tokens >= 0:
                n_new = min(n_new, params.max_tokens)
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
