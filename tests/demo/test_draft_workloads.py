"""Generated workloads on trained models: with drafts, replies are those without, and no tenant gets another's text.

Conversations branch, are asked again, are cancelled midway, lose their cells to others and come back from RAM or,
after a restart, from disk. Replies are greedy, seeded, constrained, or end at a stop string within a draft. Each is
compared with the reply that its prompt gives alone, without drafts and cache; a token may differ only where it is a
matter of rounding (`Noise`). Drafts are made after short matches, whether they pay or not, so that many are wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from llamaslot.backend.disk import DiskStore
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Status
from llamaslot.base.commands import TextPart
from llamaslot.base.events import Cancelled, Finished
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.model import StepCost
from llamaslot.base.tokens import Tokens, unpacked
from llamaslot.kvcache.tiers import pacing
from llamaslot.scheduler import admission, drafter
from llamaslot.scheduler.step import StepPlan, StepResult
from tests.conftest import LONG
from tests.demo.talks import dialogues, turns
from tests.demo.test_checkpoints import EMBEDDED, IN_RAM, MIB, MODELS
from tests.demo.test_structured_output import PERSON
from tests.engine.harness import GREEDY, Harness, running
from tests.noise import Noise
from tests.prompt_threads import text_request
from tests.random_workloads import run_workloads

N_WORKLOADS = 500 if LONG else 10
N_FAMILIES = 24
MAX_DRAFT = 63
SMALLEST = 256
"""Cells of the smallest pool, and of a slot where each has its own."""
MAX_PROMPT = 160
"""Tokens of a prompt, so that any reply fits."""
KINDS = {
    "greedy": {"sampling": GREEDY, "max_tokens": 40},
    "endless": {"sampling": Sampling(temperature=0.0, ignore_eos=True), "max_tokens": 90},
    "seeded": {"sampling": Sampling(temperature=0.8, top_k=40, top_p=1.0, min_p=0.0), "max_tokens": 40},
    "drawn of all": {"sampling": Sampling(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0), "max_tokens": 40},
    "grammar": {"sampling": GREEDY, "max_tokens": 60, "constraint": PERSON},
    "seeded grammar": {
        "sampling": Sampling(temperature=0.8, top_k=40, top_p=1.0, min_p=0.0),
        "max_tokens": 60,
        "constraint": PERSON,
    },
    "scored grammar": {"sampling": Sampling(temperature=0.0, n_probs=2), "max_tokens": 60, "constraint": PERSON},
}
"""Fields of requests; those that are sampled get a seed."""
EVENTS = (
    *(
        "accepted",
        "rejected",
        "tree",
        "own tokens",
        "elsewhere",
        "cancelled",
        "stopped",
        "preempted",
        "loaded",
        "read",
        "copied",
    ),
    *("seeded", "grammar", "seeded grammar", "recurrent"),
)
"""What the workloads must come to."""


COST = StepCost(step_us=1e3, token_us=10.0, token_cell_us=0.0, block_us=1e6, block_cell_us=0.0)
"""Cost with which drafts pay, and padding does not."""


@dataclass(frozen=True)
class Question:
    """A prompt, and how its reply is generated: without drafts, always the same."""

    model: Path
    prompt: str
    kind: str
    seed: int

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = dict(KINDS[self.kind])
        if fields["sampling"].temperature:
            fields["sampling"] = msgspec.structs.replace(fields["sampling"], seed=self.seed)
        return fields


@dataclass(frozen=True)
class Ask:
    """A request."""

    question: Question
    salt: str
    n: int
    pause: int
    patience: int | None
    """Milliseconds after which it is cancelled."""
    stop_at: float | None
    """Share of the reply before the stop string."""
    id_slot: int


@dataclass
class Reply:
    """A reply without drafts."""

    ids: list[int]
    """Of the prompt."""
    tokens: list[int]
    text: str


@cache
def families(model: Path) -> list[list[str]]:
    """Prompts that share a prefix: the turns of a conversation."""
    backend = LlamaBackend(settings_of(model, checkpoints=False))

    def fits(prompt: str) -> bool:
        return len(backend.vocab.tokenize(prompt, add_special=True, parse_special=True)) <= MAX_PROMPT

    found = [list(filter(fits, turns(each))) for each in dialogues(N_FAMILIES, seed=43, filler_tokens=60)]
    backend.close()
    return [each for each in found if each]


def settings_of(model: Path, **fields: Any) -> LlamaSettings:
    has_partial_states = model in MODELS
    own = {"checkpoints": True, "max_draft": MAX_DRAFT, "n_ubatch": 128} if has_partial_states else {}
    return LlamaSettings(model, **{"n_threads": 1, "n_ctx": 4096, "n_slots": 2} | own | fields)


def opened(settings: LlamaSettings) -> LlamaBackend:
    """Open a model, whose self-test must pass: without it nothing is reused or drafted."""
    backend = LlamaBackend(settings)
    assert not settings.checkpoints or backend.info.self_test == "passed" or backend.run_self_test()
    return backend


class Plain:
    """Replies without drafts and cache, each to a prompt alone."""

    def __init__(self) -> None:
        self._replies: dict[Question, Reply] = {}

    async def add(self, questions: set[Question]) -> None:
        """Compute the replies to some questions about one model."""
        missing = sorted(questions - self._replies.keys(), key=repr)
        if not missing:
            return
        async with running(opened(settings_of(missing[0].model))) as engine:
            for i, each in enumerate(missing):
                end = await engine.submit(f"{i}", each.prompt, cache_prompt=False, max_draft=0, **each.fields)
                assert isinstance(end, Finished), end
                assert not end.progress.n_drafted
                ids = engine.backend.vocab.tokenize(each.prompt, add_special=True, parse_special=True)
                self._replies[each] = Reply(ids.tolist(), engine.tokens(f"{i}"), engine.text(f"{i}"))

    def reply(self, question: Question) -> Reply:
        """Return the reply to a question that was added."""
        return self._replies[question]


class Witness:
    """Watches engines that share their storage: whose text is drafted, and what the tree learns."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._known: dict[str, dict[tuple[int, str], Tokens]] = defaultdict(dict)
        """The prompts with all tokens that were sampled after them, by namespace, engine and request."""
        self._n_engines = 0

    def watch(self, engine: Harness) -> None:
        """Watch an engine from its start."""
        self._n_engines += 1
        scheduler, number = engine.engine.scheduler, self._n_engines
        plan, commit = scheduler.plan, scheduler.commit

        def planned(now: float) -> StepPlan:
            made = plan(now)
            for work in made.work:
                if work.run.n_drafted:
                    self._check_origin(work.request, work.run.tokens[-work.run.n_drafted :])
            return made

        def committed(made: StepPlan, result: StepResult, now: float) -> Any:
            if result.decoded.status is Status.OK:
                for each in itertools.chain.from_iterable(result.results):
                    sampled = np.array([*each.tokens, *each.forced], dtype=np.int32)
                    known, key = self._known[each.request.namespace], (number, each.request.id)
                    # Once its text has ended, the slot alone gets the tokens of the last step.
                    before = known[key] if each.request in scheduler.ending else each.request.tokens.view()
                    known[key] = np.concatenate([before, sampled])
            return commit(made, result, now)

        scheduler.plan, scheduler.commit = planned, committed

    def _check_origin(self, request: Any, draft: Tokens) -> None:
        """A draft repeats the request's own tokens, or a text that its namespace has."""
        tokens = request.tokens.view()
        _, own = drafter.prompt_lookup(tokens, len(draft))
        whole = np.concatenate([tokens, draft])
        known = self._known[request.namespace].values()
        generated = whole[-len(draft) - min(request.n_generated, drafter.MIN_MATCH_ELSEWHERE) :]
        if begins(whole, known):
            self._counts["tree"] += 1
        elif draft.tolist() != own.tolist() and len(generated) >= len(draft) + drafter.MIN_MATCH_ELSEWHERE:
            assert any(has(each, generated) for each in known), "a draft that no text of the namespace has"
            self._counts["elsewhere"] += 1
        else:
            assert draft.tolist() == own.tolist(), "a draft that neither the request nor its namespace has"
            self._counts["own tokens"] += 1

    def check_tree(self, engine: Harness) -> None:
        """The tree has only prompts and tokens that were sampled after them."""
        for leaf in engine.engine.scheduler.cache._tree.nodes():
            if not leaf.children:
                assert begins(unpacked(leaf.prefix()), self._known[leaf.namespace].values()), (
                    "the tree has other tokens"
                )


def has(text: Tokens, tokens: Tokens) -> bool:
    """Return True if a text has these tokens somewhere."""
    if len(text) < len(tokens):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(text, len(tokens))
    return bool((windows == tokens).all(axis=1).any())


def begins(tokens: Tokens, known: Iterable[Tokens]) -> bool:
    """Return True if one of some texts begins with these tokens."""
    return any(np.array_equal(each[: len(tokens)], tokens) for each in known)


@dataclass
class Workload:
    """Requests on one server, twice, perhaps with a restart between."""

    seed: int
    plain: Plain
    folder: Path
    noises: dict[Path, Noise]
    counts: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        chance = random.Random(self.seed)
        model = EMBEDDED if chance.random() < 0.85 else chance.choice(MODELS)
        unified = model in MODELS or chance.random() < 0.8
        on_disk = model == EMBEDDED and unified and chance.random() < 0.3
        storing = IN_RAM if on_disk else chance.choice(({}, IN_RAM))
        n_slots = chance.choice((1, 2, 4, 4))
        n_ctx = chance.choice((SMALLEST, SMALLEST, 4096)) if unified else SMALLEST * n_slots
        n_cache_seqs = chance.choice((0, 2, 8)) if unified else 0
        settings = settings_of(model, n_ctx=n_ctx, n_slots=n_slots, n_cache_seqs=n_cache_seqs, unified=unified)
        if model in MODELS:
            storing = storing | {"checkpoint_bytes": 64 * MIB}
        asks = list(self._asks(chance, model))
        asyncio.run(self.plain.add({each.question for each in asks}))
        asyncio.run(self._run(settings, asks, storing, on_disk=on_disk))
        self.counts["workloads"] += 1

    def _asks(self, chance: random.Random, model: Path) -> Iterator[Ask]:
        some = [prompt for each in chance.sample(families(model), chance.randint(1, 2)) for prompt in each]
        some = chance.sample(some, min(len(some), 5))
        for _ in range(chance.randint(4, 8)):
            kind = chance.choice([*KINDS, "greedy", "endless"])
            is_sampled = KINDS[kind]["sampling"].temperature > 0  # type: ignore[attr-defined]
            yield Ask(
                Question(model, chance.choice(some), kind, chance.randrange(3) if is_sampled else 0),
                salt=chance.choice(("", "", "another tenant")),
                n=1 if is_sampled else chance.choice((1, 1, 1, 3)),
                pause=chance.randint(0, 40),
                patience=chance.choice((None, None, None, chance.randint(1, 60))),
                stop_at=chance.choice((None, None, chance.random())),
                id_slot=chance.choice((-1, -1, -1, 0)),
            )

    async def _run(
        self, settings: LlamaSettings, asks: Sequence[Ask], storing: dict[str, Any], *, on_disk: bool
    ) -> None:
        witness = Witness(self.counts)
        rounds = [[asks], [asks]] if on_disk else [[asks, asks]]
        for n, each in enumerate(rounds):
            own = dict(storing)
            if on_disk:
                own["disk"] = DiskStore(self.folder)
                own["disk"].open(b"k" * 32, 64 * MIB)
            async with running(opened(settings), debug_invariants=True, **own) as engine:
                witness.watch(engine)
                for m, some in enumerate(each):
                    await asyncio.gather(*(self._ask(engine, f"{n} {m} {i}", ask) for i, ask in enumerate(some)))
                self._count(engine)
                witness.check_tree(engine)
            if on_disk:
                own["disk"].close()

    async def _ask(self, engine: Harness, name: str, ask: Ask) -> None:
        for _ in range(ask.pause):
            await asyncio.sleep(0.0005)
        plain, fields = self.plain.reply(ask.question), ask.question.fields
        stop = ""
        if ask.stop_at is not None:
            stop = plain.text[int(ask.stop_at * len(plain.text)) :][:4]
        request = text_request(
            name,
            (TextPart(ask.question.prompt),),
            n=ask.n,
            id_slot=ask.id_slot,
            cache_salt=ask.salt,
            max_draft=MAX_DRAFT,
            stop=(stop,) if stop else (),
            **fields,
        )
        engine.submit_all(request)
        names = [each.completion_id for each in request.params.completions()]
        if ask.patience is not None:
            await asyncio.sleep(ask.patience * 0.001)
            engine.cancel(names[0])
        for own in names:
            end = await engine.ends[own]
            assert isinstance(end, Finished | Cancelled), end
            self._compare(engine, own, ask, plain, stop, is_whole=isinstance(end, Finished))

    def _compare(self, engine: Harness, name: str, ask: Ask, plain: Reply, stop: str, *, is_whole: bool) -> None:
        tokens, question = engine.tokens(name), ask.question
        self.counts["replies"] += 1
        self.counts["tokens"] += len(tokens)
        self.counts["cancelled"] += not is_whole
        pairs = enumerate(zip(tokens, plain.tokens, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), None)
        if at is None:
            if is_whole:
                assert engine.text(name) == (plain.text.partition(stop)[0] if stop else plain.text)
                assert stop or tokens == plain.tokens
                self.counts["stopped"] += bool(stop)
                self.counts[question.kind] += 1
            return
        noise = self.noises.setdefault(question.model, Noise(settings_of(question.model, checkpoints=False)))
        sampling = question.fields["sampling"]
        constraint = question.fields.get("constraint")
        assert noise.explains_draw(
            plain.ids, plain.tokens[:at], sampling, tokens[at], plain.tokens[at], constraint=constraint
        ), (ask, at)
        self.counts["differing"] += 1
        self.counts[f"differing, {question.kind}"] += 1

    def _count(self, engine: Harness) -> None:
        scheduler = engine.engine.scheduler
        stats, admitted = scheduler.cache_stats(), scheduler.admission
        drafts = stats.speculation
        self.counts["drafts"] += drafts.drafts
        self.counts["accepted"] += drafts.accepted_tokens
        self.counts["rejected"] += drafts.drafted_tokens - drafts.accepted_tokens
        self.counts["preempted"] += admitted.n_preempted
        self.counts["loaded"] += stats.loaded_tokens
        self.counts["read"] += stats.read_tokens
        self.counts["copied"] += stats.copied_tokens
        self.counts["recurrent"] += engine.backend.info.state.kind.has_recurrent_state and drafts.drafts


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft after short matches, whether it pays or not; write at once, and admit more than the pool holds."""
    monkeypatch.setattr(drafter, "MIN_MATCH", 2)
    monkeypatch.setattr(drafter, "MIN_MATCH_ELSEWHERE", 3)
    monkeypatch.setattr(drafter, "SEARCH_EVERY", 1)
    monkeypatch.setattr(drafter, "MIN_GAIN", -100.0)
    monkeypatch.setattr(drafter, "MAX_DELAY", 100.0)
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)
    monkeypatch.setattr(admission, "MIN_EXPECTED_TOKENS", 2)
    monkeypatch.setattr(admission, "_NEWEST_WEIGHT", 0.0)


def test_replies_with_drafts_are_those_without(tmp_path: Path) -> None:
    plain, noises = Plain(), dict[Path, Noise]()
    run_workloads(lambda seed: Workload(seed, plain, tmp_path / f"{seed}", noises), N_WORKLOADS, EVENTS)


@pytest.fixture
def only_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft only replies that the tree has: no repeated tokens of a request's own, or of another's, are enough."""
    monkeypatch.setattr(drafter, "MIN_MATCH", drafter.MAX_MATCH + 1)
    monkeypatch.setattr(drafter, "MIN_MATCH_ELSEWHERE", 1000)


async def drafted(engine: Harness, name: str, prompt: str, salt: str = "") -> tuple[int, int]:
    """Return how many tokens were drafted for a reply, and how many of these accepted."""
    fields = KINDS["endless"]
    end = await engine.submit(name, prompt, max_draft=MAX_DRAFT, cache_salt=salt, **fields)
    assert isinstance(end, Finished), end
    return end.progress.n_drafted, end.progress.n_accepted


@pytest.mark.usefixtures("only_tree")
async def test_the_text_of_a_tenant_is_not_drafted_to_another() -> None:
    prompt = families(EMBEDDED)[0][-1]
    async with running(opened(settings_of(EMBEDDED)), debug_invariants=True) as engine:
        for salt in ("one tenant", "another tenant", ""):
            assert await drafted(engine, f"first of {salt}", prompt, salt) == (0, 0)
        for salt in ("one tenant", "another tenant", ""):
            _, n_accepted = await drafted(engine, f"second of {salt}", prompt, salt)
            assert n_accepted > 60


@pytest.mark.usefixtures("only_tree")
async def test_the_first_reply_after_a_restart_is_drafted_as_one_before_it(tmp_path: Path) -> None:
    prompt, found = families(EMBEDDED)[0][-1], []
    for names in (("first", "again"), ("after the restart",)):
        disk = DiskStore(tmp_path)
        disk.open(b"k" * 32, 64 * MIB)
        backend = opened(settings_of(EMBEDDED))
        # As measured at a start, or kept from an earlier one: no prompt of this process tells what drafts cost.
        backend.info = msgspec.structs.replace(backend.info, step_cost=COST)
        async with running(backend, debug_invariants=True, disk=disk, **IN_RAM) as engine:
            found += [await drafted(engine, name, prompt) for name in names]
        disk.close()
    first, again, after = found
    assert first == (0, 0)
    assert again[1] > 60
    assert after == again
