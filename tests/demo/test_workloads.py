"""Generated workloads on the embedded model: whatever happens around a request, its greedy text is the cold one.

Conversations branch, interleave, are cancelled midway, lose their prefixes to others, are preempted and sampled
several times at once, in both KV layouts. A token may differ only where it is a matter of rounding (`Noise`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.demo.corpus import held_out
from llamaslot.app.model_files import resolve_model
from llamaslot.backend.disk import DiskStore
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Decoded, Draws, Run
from llamaslot.base.events import Cancelled, Finished
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.model import StepCost
from llamaslot.kvcache.tiers import pacing
from llamaslot.scheduler import admission
from llamaslot.text.template import ChatTemplate
from tests.conftest import LONG
from tests.engine.harness import GREEDY, running
from tests.noise import Noise
from tests.text.rendering import rendered
from tests.workloads import Answer, Ask, Tally, answered

pytestmark = pytest.mark.slow

N_WORKLOADS = 200 if LONG else 8
MAX_TOKENS = 40
SMALLEST = 256
"""Cells of the smallest pool, and of a slot where each has its own."""
ENDLESS = Sampling(temperature=0.0, ignore_eos=True)
"""Sampling of replies that are as long as they may be, whatever the model would say."""


@dataclass
class Workload:
    """Requests on one server; small pools make them lose cells to each other."""

    asks: list[Ask]
    n_ctx: int
    n_slots: int
    n_cache_seqs: int
    n_ubatch: int


def prompts() -> list[list[str]]:
    """Families of prompts that share a prefix: the turns of a conversation, and the same ones asked otherwise."""
    backend = open_backend(Workload([], 4096, 1, 0, 512), unified=True)
    template = ChatTemplate(backend.info.chat_template, bos_token="", eos_token="")
    families = []
    dialogues = list(held_out(40, 77))
    for dialogue, other in zip(dialogues, [*dialogues[1:], dialogues[0]], strict=True):
        ends = [i + 1 for i, m in enumerate(dialogue.messages) if m["role"] == "user"]
        family = [rendered(template, dialogue.messages[:end]) for end in ends]
        question = other.messages[-1]
        family += [rendered(template, [*dialogue.messages[: end - 1], question]) for end in ends[1:]]
        families.append([prompt for prompt in family if n_tokens(backend, prompt) + MAX_TOKENS <= SMALLEST])
    backend.close()
    return [family for family in families if family]


def n_tokens(backend: LlamaBackend, prompt: str) -> int:
    return len(backend.vocab.tokenize(prompt, add_special=True, parse_special=True))


def generated(seed: int, families: list[list[str]]) -> Workload:
    """One workload, the same for the same seed."""
    chance = random.Random(seed)
    some = chance.sample(families, chance.randint(1, 4))
    asks = []
    for _ in range(chance.randint(4, 10)):
        asks.append(
            Ask(
                prompt=chance.choice(chance.choice(some)),
                n=chance.choice((1, 1, 1, 3)),
                pause=chance.randint(0, 60),
                patience=chance.choice((None, None, None, chance.randint(1, 60))),
                cache_prompt=chance.random() < 0.85,
                id_slot=chance.choice((-1, -1, -1, 0)),
            )
        )
    n_slots = chance.choice((1, 2, 4))
    return Workload(
        asks, chance.choice((SMALLEST, 512, 4096)), n_slots, chance.choice((0, 2, 8)), chance.choice((32, 512))
    )


def open_backend(workload: Workload, *, unified: bool) -> LlamaBackend:
    n_ctx = workload.n_ctx if unified else SMALLEST * workload.n_slots
    return LlamaBackend(
        LlamaSettings(
            resolve_model("demo"),
            n_ctx=n_ctx,
            n_slots=workload.n_slots,
            n_cache_seqs=workload.n_cache_seqs if unified else 0,
            n_ubatch=workload.n_ubatch,
            n_threads=1,
            unified=unified,
        )
    )


def pad(backend: LlamaBackend, tally: Tally) -> None:
    """Set a step cost with which all steps below `QUERY_BLOCK` tokens are padded, and count padded steps."""
    cost = StepCost(step_us=1e6, token_us=0.0, token_cell_us=0.0, block_us=0.0, block_cell_us=0.0)
    backend.info = msgspec.structs.replace(backend.info, step_cost=cost)
    decode = backend.decode

    def counted(runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        in_scratch = backend.info.unified and runs[-1].seq == backend.n_seqs - 1
        tally.seen["padded steps"] += in_scratch or len({run.seq for run in runs}) < len(runs)
        return decode(runs, draws)

    backend.decode = counted  # type: ignore[method-assign]


def count_pairs(backend: LlamaBackend, tally: Tally) -> None:
    """Note the batches that are for two requests."""
    decode = backend.decode

    def counted(runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        tally.seen["batches of two"] += len(runs) == 2
        return decode(runs, draws)

    backend.decode = counted  # type: ignore[method-assign]


async def run(
    workload: Workload, tally: Tally, *, unified: bool, storing: dict[str, Any], padded: bool
) -> list[Answer]:
    """Return the replies to all requests."""
    backend = open_backend(workload, unified=unified)
    if padded:
        pad(backend, tally)
    async with running(backend, **storing) as engine:
        answers = await answered(engine, workload.asks, sampling=GREEDY, max_tokens=MAX_TOKENS)
        tally.count(engine)
    return answers


async def cold_tokens(prompts: set[str], n_ubatch: int = 512, sampling: Sampling = GREEDY) -> dict[str, list[int]]:
    """The tokens that each prompt gives computed whole, alone, in chunks of `n_ubatch`."""
    answers = {}
    async with running(open_backend(Workload([], 4096, 1, 0, n_ubatch), unified=True)) as engine:
        for prompt in sorted(prompts):
            await engine.submit(prompt, prompt, sampling=sampling, max_tokens=MAX_TOKENS, cache_prompt=False)
            answers[prompt] = engine.tokens(prompt)
    return answers


def run_twice(workload: Workload, tally: Tally, folder: Path) -> list[Answer]:
    """The same with a disk, and again on another server that finds on it what the first one wrote."""
    answers: list[Answer] = []
    for _ in range(2):
        store = DiskStore(folder)
        store.open(b"k" * 32, 2**30)
        storing = IN_RAM | {"disk": store}
        answers += asyncio.run(run(workload, tally, unified=True, storing=storing, padded=False))
        store.close()
    return answers


IN_RAM: dict[str, Any] = {"ram_bytes": 2**30, "offload_after": 1}


@pytest.fixture(scope="module")
def workloads(pytestconfig: pytest.Config) -> list[Workload]:
    """Half of them always the same, so that all is covered, and half by the seed that is printed."""
    families = prompts()
    first = int(pytestconfig.getoption("--hypothesis-seed"))
    seeds = [*range(N_WORKLOADS // 2), *range(first, first + N_WORKLOADS // 2)]
    return [generated(seed, families) for seed in seeds]


@pytest.fixture(scope="module")
def cold(workloads: list[Workload]) -> dict[str, list[int]]:
    """The tokens that each prompt of all workloads gives computed whole, alone."""
    return asyncio.run(cold_tokens({each.prompt for workload in workloads for each in workload.asks}))


@pytest.fixture(scope="module")
def differing_share(cold: dict[str, list[int]]) -> float:
    """The share of texts that rounding may change, from those that it changes when only the chunks differ."""
    other = asyncio.run(cold_tokens(set(cold), n_ubatch=32))
    n = sum(other[prompt] != cold[prompt] for prompt in cold)
    print(f"{n} of {len(cold)} cold texts differ in chunks of 32")
    # Where 3 are expected, none is seen once in 20 times.
    return (n + 3) / len(cold)


@pytest.mark.parametrize(
    ("unified", "storing", "padded", "on_disk"),
    [
        (True, {}, False, False),
        (True, {}, True, False),
        (True, IN_RAM, False, False),
        (True, IN_RAM, False, True),
        (False, {}, False, False),
        (False, IN_RAM, True, False),
    ],
    ids=["unified", "padded", "in RAM", "on disk", "partitioned", "partitioned, padded, in RAM"],
)
def test_every_text_is_the_cold_one(
    *,
    unified: bool,
    storing: dict[str, Any],
    padded: bool,
    on_disk: bool,
    workloads: list[Workload],
    cold: dict[str, list[int]],
    differing_share: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)
    # Expecting too little makes requests outgrow the pool together, so that some are preempted.
    monkeypatch.setattr(admission, "MIN_EXPECTED_TOKENS", 2)
    tally = Tally()
    noise = Noise(LlamaSettings(resolve_model("demo"), n_ctx=4096, n_ubatch=512, n_threads=1))
    for i, workload in enumerate(workloads):
        answers = (
            run_twice(workload, tally, tmp_path / str(i))
            if on_disk
            else asyncio.run(run(workload, tally, unified=unified, storing=storing, padded=padded))
        )
        for answer in answers:
            each, tokens, is_whole = answer.ask, answer.tokens, answer.is_whole
            expected = cold[each.prompt]
            tally.n_requests += 1
            tally.n_cancelled += not is_whole
            if tokens == (expected if is_whole else expected[: len(tokens)]):
                continue
            at = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b)
            assert noise.explains(noise.tokenize(each.prompt) + expected[:at], tokens[at], expected[at]), each
            tally.n_differing += 1
    print(f"{len(workloads)} workloads, {tally}")
    assert tally.n_differing <= differing_share * tally.n_requests
    assert tally.n_cancelled > 0
    assert padded == (tally.seen["padded steps"] > 0)
    assert on_disk == (tally.seen["read tokens"] > 0)
    if unified:
        assert tally.seen["copied tokens"]
        assert tally.seen["restored tokens" if storing else "evicted tokens"]
        nothing = {"evicted tokens"} if storing else {"restored tokens"}
        nothing |= set() if on_disk else {"read tokens"}
        assert not LONG or {each for each, n in tally.seen.items() if n == 0} == nothing, "not all was covered"


async def test_one_known_in_cells_and_one_on_disk_in_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)
    workload = Workload([], 4096, 2, 4, 512)
    first, second = ([family[-1] for family in prompts() if len(family) > 1])[:2]
    cold = await cold_tokens({first, second}, sampling=ENDLESS)
    noise = Noise(LlamaSettings(resolve_model("demo"), n_ctx=4096, n_ubatch=512, n_threads=1))
    tally = Tally()
    for asked in ([second], [first]):
        store = DiskStore(tmp_path)
        store.open(b"k" * 32, 2**30)
        backend = open_backend(workload, unified=True)
        async with running(backend, ram_bytes=2**30, disk=store) as engine:
            for prompt in asked:
                await engine.submit(f"before {prompt}", prompt, max_tokens=2)
            if asked == [first]:
                count_pairs(backend, tally)
                # Reading takes as long as some tokens, so the first one goes on until the other ends.
                lasting = engine.submit(first, first, sampling=ENDLESS, max_tokens=3000)
                on_disk = await engine.submit(second, second, sampling=ENDLESS, max_tokens=MAX_TOKENS)
                engine.cancel(first)
                in_cells = await lasting
                assert isinstance(in_cells, Cancelled)
                assert isinstance(on_disk, Finished)
                assert in_cells.progress is not None
                assert in_cells.progress.n_cached > 0 == in_cells.progress.n_loaded
                # It may have been read ahead, at the start.
                assert on_disk.progress.n_loaded > 0
                for prompt in (first, second):
                    tokens, expected = engine.tokens(prompt), cold[prompt]
                    pairs = enumerate(zip(tokens, expected, strict=False))
                    at = next((i for i, (a, b) in pairs if a != b), None)
                    context = noise.tokenize(prompt) + expected[:at]
                    assert at is None or noise.explains(context, tokens[at], expected[at])
        store.close()
    assert tally.seen["batches of two"] >= MAX_TOKENS - 1
