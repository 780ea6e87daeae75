"""One request as the core sees it: what it wants, what it knows, how far it came.

A request has no phases beyond its state: each step brings what is computed closer to what is known (the prompt and
the tokens generated so far), and a step that reaches the end of the known yields the next token.
"""

from __future__ import annotations

from enum import Enum

from llamaslot.base.backend import Sampler
from llamaslot.base.commands import Submit
from llamaslot.base.events import Progress
from llamaslot.base.namespaces import private_namespace, salt_namespace
from llamaslot.base.prompt import TokenizedPrompt
from llamaslot.base.stats import Miss
from llamaslot.base.tokens import WIDTH, packed
from llamaslot.scheduler.token_buffer import TokenBuffer


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
    """The mutable state of one request. Times are seconds on the caller's clock.

    `reuse` says whether this model's KV can be trimmed and continued.
    """

    def __init__(
        self,
        submit: Submit,
        prompt: TokenizedPrompt,
        *,
        arrival: int,
        now: float,
        reuse: bool = True,
    ) -> None:
        self.submit = submit
        self.prompt = prompt
        self.id = submit.request_id
        self.is_private = not (submit.cache_prompt and reuse)
        """Whether it neither uses nor feeds what other requests compute."""
        self.space = (
            private_namespace(submit.group or self.id) if self.is_private else salt_namespace(submit.cache_salt)
        )
        """The namespace that its tokens are looked for and kept in."""
        self.arrival = arrival
        """Order of submission; it survives preemption."""
        self.known = TokenBuffer(prompt.tokens)
        self.n_prompt = len(self.known)
        self.n_generated = 0
        self.n_prompt_computed = 0
        self.state = RequestState.QUEUED
        self.n_reused = 0
        """Tokens that were known when it was admitted last."""
        self.n_found = self.n_prompt
        """Prompt tokens that it found since it was first admitted, instead of computing them; until then all, since
        a choice may get its first token from another one's logits."""
        self.n_copied = 0
        """Of `n_found`, those taken over from another sequence."""
        self.n_loaded = 0
        """Of `n_found`, those that were stored."""
        self.n_read = 0
        """Of `n_loaded`, those that were read from disk for it."""
        self.miss: Miss = "" if not self.is_private else "off" if reuse else "unsupported"
        """Why no more of its prompt was known when it was first admitted."""
        self.n_known = 0
        """Prompt tokens that were known then."""
        self.diverged_at = -1
        """The character where they end, once somebody has found out; -1 before."""
        self.n_overtaken = 0
        """Later requests that were admitted while this one could have been."""
        self.awaits = 0
        """Tokens of the prefix that it has waited for while another one computed it, 0 if it never did."""
        self.sampler: Sampler | None = None
        self.slot_id = -1
        """The slot it runs in or ran in last, -1 before the first."""
        self._submitted = now
        self._admitted: float | None = None
        self._computing: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._was_preempted = False
        self._prefix = b""

    def handle(self, event: RequestEvent, now: float) -> None:
        """Move to the next state, or raise `IllegalEventError` and change nothing."""
        following = REQUEST_TABLE.get((self.state, event))
        if following is None:
            raise IllegalEventError(f"request {self.id}: {event.value} while {self.state.value}")
        self.state = following
        if event is RequestEvent.ADMIT:
            self._note_started(now)
        self._was_preempted |= event is RequestEvent.PREEMPT
        if event is RequestEvent.END and self.sampler is not None:
            self.sampler.close()
            self.sampler = None

    def count_computed(self, start: int, n: int, now: float) -> None:
        """Note that positions `[start, start + n)` went into the model, from now on."""
        if self._computing is None:
            self._computing = now
        self.n_prompt_computed += max(0, min(start + n, self.n_prompt) - start)

    def note_found(self, n_copied: int, n_loaded: int, n_read: int) -> None:
        """Note tokens that need not be computed, unless it may have computed them itself before."""
        if not self._was_preempted:
            self.n_found += n_copied + n_loaded
            self.n_copied += n_copied
            self.n_loaded += n_loaded
            self.n_read += n_read

    def add_token(self, token: int, now: float) -> None:
        """Append a sampled token to what is known."""
        self._note_started(now)
        self.known.append(token)
        self.n_generated += 1
        self._last_token = now
        if self._first_token is None:
            self._first_token = now

    @property
    def has_started(self) -> bool:
        """Whether it ever had a slot or got a token."""
        return self._admitted is not None

    @property
    def prefix(self) -> bytes:
        """What it may start from, as the tree takes it: all it knows but the last token, whose logits it needs."""
        n = len(self.known) - 1
        if len(self._prefix) != n * WIDTH:
            self._prefix = packed(self.known.view(0, n))
        return self._prefix

    @property
    def wants_tokens(self) -> bool:
        """Whether anything is to be generated, rather than the prompt evaluated only."""
        return self.submit.max_tokens != 0

    @property
    def n_remaining(self) -> int | None:
        """Tokens that may still be generated, None without a limit of its own."""
        limit = self.submit.max_tokens
        return None if limit < 0 else max(0, limit - self.n_generated)

    @property
    def n_cached(self) -> int:
        """Prompt tokens that were never computed for it; those that it has yet to compute are none of them."""
        if not self.has_started:
            return 0
        return max(0, min(self.n_found, self.n_prompt - self.n_prompt_computed))

    def progress(self, now: float, n_held: int = 0) -> Progress:
        """The figures that users see; `n_held` is what the slot holds."""
        admitted = self._admitted if self._admitted is not None else now
        computing = self._computing if self._computing is not None else now
        first = self._first_token if self._first_token is not None else now
        last = self._last_token if self._last_token is not None else first
        return Progress(
            n_prompt=self.n_prompt,
            n_cached=self.n_cached,
            n_prompt_computed=self.n_prompt_computed,
            n_generated=self.n_generated,
            queue_ms=(admitted - self._submitted) * 1e3,
            prompt_ms=max(0.0, first - admitted) * 1e3,
            predicted_ms=(last - first) * 1e3,
            load_ms=max(0.0, computing - admitted) * 1e3 if self.n_loaded else 0.0,
            n_held=n_held,
            slot=self.slot_id,
            n_copied=min(self.n_copied, self.n_cached),
            n_loaded=min(self.n_loaded, self.n_cached),
            n_read=min(self.n_read, self.n_cached),
            n_anchored=self.prompt.n_anchored,
            session_match=self.prompt.session_match,
            n_approximate=self.prompt.n_approximate,
            miss=self.miss if self.has_started else "",
            diverged_at=self.diverged_at,
        )

    def _note_started(self, now: float) -> None:
        if self._admitted is None:
            self._admitted = now
