"""One request as the core sees it: what it wants, what it knows, how far it came.

A request has no phases beyond its state: each step brings what is computed closer to what is known (the prompt and
the tokens generated so far), and a step that reaches the end of the known yields the next token.
"""

from __future__ import annotations

from enum import Enum

from llamaslot.base.messages import Progress, Submit
from llamaslot.core.backend import Sampler, Tokens
from llamaslot.core.tokens import TokenBuffer


class IllegalEventError(AssertionError):
    """An event that a state does not allow: a bug in this project, never raised by bad input."""


class RequestState(Enum):
    """Where a request is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class RequestEvent(Enum):
    """What can happen to a request."""

    ADMIT = "admit"
    PREEMPT = "preempt"
    END = "end"


REQUEST_TABLE: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.QUEUED, RequestEvent.ADMIT): RequestState.RUNNING,
    (RequestState.QUEUED, RequestEvent.END): RequestState.DONE,
    (RequestState.RUNNING, RequestEvent.PREEMPT): RequestState.QUEUED,
    (RequestState.RUNNING, RequestEvent.END): RequestState.DONE,
}
"""Every legal step of a request; whatever is not listed raises and changes nothing."""


class Request:
    """The mutable state of one request. Times are seconds on the caller's clock."""

    def __init__(self, submit: Submit, prompt: Tokens, *, arrival: int, now: float) -> None:
        self.submit = submit
        self.id = submit.request_id
        self.arrival = arrival
        """Order of submission; it survives preemption."""
        self.known = TokenBuffer(prompt)
        self.n_prompt = len(prompt)
        self.n_generated = 0
        self.n_prompt_computed = 0
        self.state = RequestState.QUEUED
        self.sampler: Sampler | None = None
        self.slot_id = -1
        """The slot it runs in or ran in last, -1 before the first."""
        self._submitted = now
        self._admitted: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None

    def handle(self, event: RequestEvent, now: float) -> None:
        """Move to the next state, or raise `IllegalEventError` and change nothing."""
        following = REQUEST_TABLE.get((self.state, event))
        if following is None:
            raise IllegalEventError(f"request {self.id}: {event.value} while {self.state.value}")
        self.state = following
        if event is RequestEvent.ADMIT and self._admitted is None:
            self._admitted = now
        if event is RequestEvent.END and self.sampler is not None:
            self.sampler.close()
            self.sampler = None

    def count_computed(self, start: int, n: int) -> None:
        """Note that positions `[start, start + n)` went into the model."""
        self.n_prompt_computed += max(0, min(start + n, self.n_prompt) - start)

    def add_token(self, token: int, now: float) -> None:
        """Append a sampled token to what is known."""
        self.known.append(token)
        self.n_generated += 1
        self._last_token = now
        if self._first_token is None:
            self._first_token = now

    @property
    def wants_tokens(self) -> bool:
        """Whether anything is to be generated, rather than the prompt evaluated only."""
        return self.submit.max_tokens != 0

    @property
    def n_remaining(self) -> int | None:
        """Tokens that may still be generated, None without a limit of its own."""
        limit = self.submit.max_tokens
        return None if limit < 0 else max(0, limit - self.n_generated)

    def progress(self, now: float, n_held: int = 0) -> Progress:
        """The figures that users see; `n_held` is what the slot holds."""
        admitted = self._admitted if self._admitted is not None else now
        first = self._first_token if self._first_token is not None else now
        last = self._last_token if self._last_token is not None else first
        return Progress(
            n_prompt=self.n_prompt,
            n_cached=max(0, self.n_prompt - self.n_prompt_computed) if self._admitted is not None else 0,
            n_prompt_computed=self.n_prompt_computed,
            n_generated=self.n_generated,
            queue_ms=(admitted - self._submitted) * 1e3,
            prompt_ms=max(0.0, first - admitted) * 1e3,
            predicted_ms=(last - first) * 1e3,
            n_held=n_held,
            slot=self.slot_id,
        )
