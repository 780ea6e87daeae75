"""Random workloads for models with a partial state, on the fake backend: every token is that of a cold run.

What the machine of `tests/kvcache/test_checkpoint_machine.py` does not have is here: several tenants with a public
prefix, and longer prompts that diverge from earlier ones anywhere. The oracle computes each prompt from its first
token, by the backend alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache

from llamaslot.base.backend import Run, Status
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Copy, Load, Remove, Restore, Save, Take
from llamaslot.base.model import StateKind
from llamaslot.base.namespaces import PUBLIC_SALT, key_salt, key_secret
from llamaslot.base.tokens import packed
from llamaslot.scheduler.request import Request, RequestState
from llamaslot.scheduler.scheduler import DecodeFailed
from llamaslot.scheduler.step import StepPlan
from tests.conftest import LONG
from tests.fake_backend import FakeBackend
from tests.random_workloads import run_workloads
from tests.scheduler.test_scheduler import Driver, as_letters, as_tokens, generated

N_WORKLOADS = 1000 if LONG else 40
KINDS = StateKind.RECURRENT, StateKind.WINDOW, StateKind.HYBRID, StateKind.HYBRID_WINDOW
SALTS = *(key_salt(key_secret(key), "") for key in ("ann", "bob")), PUBLIC_SALT, ""
MAX_STEPS = 600
"""Steps in which all requests of a workload must end."""

EVENTS = (
    *("ended", "failed", "cancelled", "reused", "reused public KV", "private", "public", "ahead"),
    *("saves", "loads", "takes", "restores", "copies", "dropped everything", "dropped a path"),
)
"""What must come up in any run, for else a check is vacuous."""
OPERATIONS = {"saves": Save, "loads": Load, "takes": Take, "restores": Restore, "copies": Copy}


@cache
def cold_backend(kind: StateKind) -> FakeBackend:
    return FakeBackend(kind=kind, n_slots=1, n_ubatch=256)


@cache
def cold(kind: StateKind, prompt: str, n: int) -> list[int]:
    """The first `n` tokens that are generated if nothing is cached."""
    backend = cold_backend(kind)
    backend.change(Remove(0, 0))
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    tokens, found = as_tokens(prompt), []
    for _ in range(n):
        assert backend.decode([Run(0, backend.seq_len(0), tokens, 1)]).status is Status.OK
        ((token,),) = backend.sample([(0, backend.new_sampler(sampling, tokens))])
        found.append(token)
        tokens = as_tokens(chr(found[-1]))
    return found


class Workload:
    """What one seed stands for: a server, the requests to it, and what goes wrong meanwhile."""

    n_requests = 5, 18
    max_prompt = 70
    max_new = 25
    """Letters of a prompt that no earlier one has, at most."""
    alphabet = "pqz"
    salts: Sequence[str] = SALTS
    drop_rate = 0.1
    ahead_rate = 0.2
    new_rate = 0.0
    """Share of prompts that begin as no earlier one does, and fill the pool."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.driver = self.new_driver()
        self.requests: list[Request] = []
        self.ahead: Request | None = None
        """What was last asked for in the background."""
        self.prompts = self.first_prompts()
        self.failed: set[Request] = set()
        self.cancelled: set[Request] = set()

    def new_driver(self) -> Driver:
        """Return a server with some settings."""
        rng = self.rng
        self.kind = rng.choice(KINDS)
        return Driver(
            kind=self.kind,
            n_slots=rng.choice([1, 2, 3]),
            n_reserved=rng.choice([0, 0, 2]),
            n_ctx=rng.choice([96, 160, 256]),
            n_ubatch=rng.choice([8, 32]),
            ram_bytes=rng.choice([0, 3000, 10**6]),
            segment_tokens=rng.choice([8, 16, 512]),
            min_shared=4,
            offload_after=rng.choice([None, 20]),
            checkpoints={
                "step": rng.choice([8, 16, 40]),
                "on_path": rng.choice([2, 4, 32]),
                "ram_bytes": rng.choice([128, 300, 600, 10**6]),
                "take_ms": rng.choice([0, 0, 60]),
            },
        )

    def first_prompts(self) -> list[str]:
        """Return three prompts that others begin with."""
        return ["h" * 20, "h" * 12 + "g" * 20, self.letters("xy", 30)]

    def run(self) -> None:
        """GenerateParams some requests, and step until all have ended."""
        rng = self.rng
        for _ in range(rng.randint(*self.n_requests)):
            self.submit()
            if rng.random() < 0.1:
                self.driver.backend.failures.append(self.failure())
            for _ in range(rng.randint(0, 8)):
                self.step(rng.choice([0.0, 0.1]))
                if rng.random() < 0.05:
                    self.cancel()
            if rng.random() < self.drop_rate:
                self.drop()
            if rng.random() < self.drop_rate:
                self.drop_path()
        for _ in range(MAX_STEPS):
            ends = [*self.requests, *filter(None, [self.ahead])]
            if all(request.state is RequestState.DONE for request in ends):
                break
            self.step(0.05)
        self.check()

    # --- events ---

    def letters(self, alphabet: str, n: int) -> str:
        return "".join(self.rng.choices(alphabet, k=n))

    def submit(self) -> None:
        """Ask something that continues a conversation, or begins as an earlier prompt does."""
        rng = self.rng
        before = rng.choice([*self.prompts[:3], *self.prompts[3:][-4:]])
        if self.requests and rng.random() < 0.3:
            before = as_letters(rng.choice(self.requests[-4:]).tokens.view().tolist())
        if rng.random() < self.new_rate:
            before = self.letters(self.alphabet, self.max_prompt)
        n = rng.choice([len(before), rng.randint(1, len(before))])
        prompt = before[:n] + self.letters(self.alphabet, rng.randint(1, self.max_new))
        self.prompts.append(prompt[: self.max_prompt])
        private = {"group": f"group {len(self.requests)}"} if rng.random() < 0.1 else {}
        request = self.driver.submit(
            self.prompts[-1], max_tokens=rng.randint(1, 12), cache_salt=rng.choice(self.salts), **private
        )
        self.requests.append(request)
        if rng.random() < self.ahead_rate:
            self.compute_ahead()
        self.counts["private"] += bool(private)
        self.counts["public"] += not private and request.params.cache_salt == PUBLIC_SALT

    def compute_ahead(self) -> None:
        """Have a prompt of the same kind computed in the background, in place of an earlier one."""
        rng, driver = self.rng, self.driver
        if self.ahead is not None and self.ahead.state is not RequestState.DONE:
            driver.scheduler.end(self.ahead, driver.backend.now, cancelled=True)
        prompt = self.prompts[-1][: rng.randint(1, self.max_prompt)] + self.letters(self.alphabet, 5)
        salt = self.requests[-1].params.cache_salt
        self.ahead = driver.submit(prompt, max_tokens=0, cache_salt=salt, is_background=True)

    def failure(self) -> tuple[Status, int]:
        """Return how the next step fails."""
        return self.rng.choice([Status.ABORTED, Status.FATAL]), 0

    def step(self, seconds: float = 0.0) -> StepPlan:
        """Carry out one step, on a clock that goes on."""
        driver = self.driver
        driver.backend.now += seconds
        plan = driver.step()
        is_ahead = any(work.request.params.is_background for work in plan.work)
        self.counts["ahead"] += is_ahead
        living = any(each.state is RequestState.RUNNING for each in self.requests)
        assert not (is_ahead and (living or driver.scheduler.queue)), "it runs beside others"
        self.failed |= {each.request for each in driver.outcomes if isinstance(each, DecodeFailed)}
        if not driver.cache._sequences.operations:
            states, held = driver.cache._sequences.states, driver.backend.states
            for seq in driver.cache._sequences.all:
                assert states.is_live(seq) == held.is_live(seq), f"sequence {seq} is live in one account only"
        for name, kind in (
            ("saves", Save),
            ("loads", Load),
            ("takes", Take),
            ("restores", Restore),
            ("copies", Copy),
        ):
            self.counts[name] += any(isinstance(each, kind) for each in plan.operations)
        return plan

    def cancel(self) -> None:
        """A client is gone."""
        living = [each for each in self.requests if each.state is not RequestState.DONE]
        if living:
            request = self.rng.choice(living)
            self.driver.scheduler.end(request, self.driver.backend.now, cancelled=True)
            self.cancelled.add(request)

    def drop(self) -> None:
        """A client drops all that is idle."""
        self.driver.cache.dropper.drop(None)
        self.counts["dropped everything"] += 1
        self.step()

    def drop_path(self) -> None:
        """A client drops what one request has left."""
        request = self.rng.choice(self.requests)
        self.driver.cache.dropper.drop_paths([(request.namespace, packed(request.tokens.view()))])
        self.counts["dropped a path"] += 1
        self.step()

    # --- what must hold ---

    def check(self) -> None:
        assert self.ahead is None or self.ahead.state is RequestState.DONE, "what is computed ahead does not end"
        for request, prompt in zip(self.requests, self.prompts[3:], strict=True):
            assert request.state is RequestState.DONE, f"{request.id} does not end"
            n = request.params.max_tokens
            found = generated(request)
            self.check_tokens(request, prompt, found)
            assert len(found) == n or request in self.failed | self.cancelled, f"{request.id} ended early"
            self.counts["reused"] += request.n_cached > 0
            self.counts["reused public KV"] += request.n_public > 0
            self.counts["ended"] += len(found) == n
        self.counts["failed"] += len(self.failed)
        self.counts["cancelled"] += len(self.cancelled)
        self.counts["preempted"] += len(self.driver.preempted)

    def check_tokens(self, request: Request, prompt: str, found: list[int]) -> None:
        """Verify what a request generated."""
        expected = cold(self.kind, prompt, request.params.max_tokens)
        assert found == expected[: len(found)], (request.id, prompt, request.n_cached)


def test_every_token_is_that_of_a_cold_run_and_every_request_ends() -> None:
    run_workloads(Workload, N_WORKLOADS, EVENTS)
