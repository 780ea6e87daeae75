"""On the embedded model, whose answers break when KV is wrong, reuse never changes a text.

Conversations run turn by turn, several at once on few slots. Each has a twin that states another value for the fact
that is asked for in the end, so that stale KV, or another slot's, gives a wrong answer. Every turn's greedy text
must be the one that the same prompt gives cold.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from llama_cpp._ggml import libggml

from bench.demo.corpus import held_out
from llamaslot.app.model_files import resolve_model
from llamaslot.backend import page_locked
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, batch, library
from llamaslot.backend.llama.operations import KvOperations
from llamaslot.base.events import Finished
from llamaslot.base.kv_ops import Copy, Load, Operation, Remove
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.match import Match
from llamaslot.kvcache.nodes import Node
from llamaslot.kvcache.radix_tree import RadixTree
from tests.conftest import LONG
from tests.demo.talks import TEMPLATE, dialogues, turns
from tests.engine.harness import Harness, running
from tests.text.rendering import rendered

pytestmark = pytest.mark.gpu

N_SLOTS = 3
N_TOGETHER = 5
MAX_TOKENS = 60
SEED = 20


def open_backend(n_ctx: int = 8192, n_slots: int = N_SLOTS, *, on_device: bool = False) -> LlamaBackend:
    settings = LlamaSettings(resolve_model("demo"), n_ctx=n_ctx, n_slots=n_slots, backend_sampling=on_device)
    return LlamaBackend(settings)


async def generate(engine: Harness, name: str, prompt: str, **fields: object) -> tuple[str, int]:
    """The greedy text of a prompt and the tokens it reused; a request that fails counts as a wrong answer."""
    end = await engine.submit(name, prompt, max_tokens=MAX_TOKENS, **fields)
    assert isinstance(end, Finished), end
    return engine.text(name), end.progress.n_cached


IN_RAM = {"ram_bytes": 2**30, "offload_after": 1}
"""Idle prefixes leave the pool before any prompt is computed."""


@asynccontextmanager
async def sound(backend: LlamaBackend, **storing: int) -> AsyncIterator[Harness]:
    """An engine whose cache agrees with the pool whenever nothing runs, and that dies of nothing but that.

    Another error is no wrong answer, which `pytest.raises` would take for one, but a fault of the test.
    """
    engine: Harness | None = None
    try:
        async with running(backend, debug_invariants=True, **storing) as engine:
            yield engine
    finally:
        stopped = engine.stopped if engine is not None else None
        if stopped is None or stopped.reason.partition(":")[0] not in {"", "AssertionError", "IllegalCallError"}:
            pytest.fail(f"the engine died: {stopped}")
    assert not stopped.reason


async def warm_texts(
    talks: list[list[str]], n_ctx: int, storing: dict[str, int], *, on_device: bool = False
) -> tuple[dict[tuple[int, int], str], int]:
    """The texts of all turns when conversations run side by side, and the tokens that were reused."""
    texts: dict[tuple[int, int], str] = {}
    n_cached = 0
    backend = open_backend(n_ctx, on_device=on_device)
    async with sound(backend, **storing) as engine:
        turn_taking = asyncio.Semaphore(N_TOGETHER)

        async def talk(i: int, turns: list[str]) -> None:
            nonlocal n_cached
            async with turn_taking:
                for t, prompt in enumerate(turns):
                    texts[i, t], cached = await generate(engine, f"{i}-{t}", prompt)
                    n_cached += cached

        async with asyncio.TaskGroup() as group:
            for i, turns in enumerate(talks):
                group.create_task(talk(i, turns))
    # Each slot gets its chain of samplers once, whatever number of turns it computes.
    assert backend.stats.n_sampler_changes == (N_SLOTS if on_device else 0)
    assert (backend.stats.n_device_sampled > len(texts)) == on_device
    return texts, n_cached


async def cold_texts(talks: list[list[str]]) -> dict[tuple[int, int], str]:
    """The texts of all turns, each computed whole."""
    texts = {}
    async with running(open_backend()) as engine:
        for i, turns in enumerate(talks):
            for t, prompt in enumerate(turns):
                texts[i, t], cached = await generate(engine, f"{i}-{t}", prompt, cache_prompt=False)
                assert cached == 0
    return texts


async def alternating_texts(
    talks: list[list[str]], n_slots: int, storing: dict[str, int]
) -> dict[tuple[int, int], str]:
    """The texts when twins take turns: in one slot each cuts away what the other left, in two each has its own."""
    texts = {}
    async with sound(open_backend(n_slots=n_slots), **storing) as engine:
        for first in range(0, len(talks) - 1, 2):
            for t in range(max(map(len, talks[first : first + 2]))):
                for i in (first, first + 1):
                    if t < len(talks[i]):
                        texts[i, t], _ = await generate(engine, f"{i}-{t}", talks[i][t])
    return texts


def compare(
    talks: list[list[str]],
    cold: dict[tuple[int, int], str],
    n_ctx: int = 8192,
    storing: dict[str, int] | None = None,
) -> int:
    """Assert that warm and cold agree; the tokens that were reused side by side."""
    for n_slots, some in ((1, talks), (2, talks[:20])):
        alternating = asyncio.run(alternating_texts(some, n_slots, storing or {}))
        assert alternating == {turn: cold[turn] for turn in alternating}
    warm, n_cached = asyncio.run(warm_texts(talks, n_ctx, storing or {}))
    assert warm == {turn: cold[turn] for turn in warm}
    return n_cached


@pytest.fixture(scope="module")
def talks() -> list[list[str]]:
    return [turns(each) for each in dialogues(200 if LONG else 12, SEED)]


@pytest.fixture(scope="module")
def cold(talks: list[list[str]]) -> dict[tuple[int, int], str]:
    return asyncio.run(cold_texts(talks))


def test_warm_and_cold_texts_are_the_same(talks: list[list[str]], cold: dict[tuple[int, int], str]) -> None:
    assert compare(talks, cold) > 0


def test_they_are_the_same_with_tokens_sampled_on_the_device(
    talks: list[list[str]], cold: dict[tuple[int, int], str]
) -> None:
    warm, n_cached = asyncio.run(warm_texts(talks, 8192, {}, on_device=True))
    assert n_cached > 0
    assert warm == {turn: cold[turn] for turn in warm}


@pytest.mark.slow
def test_they_are_the_same_when_the_pool_is_too_small_for_all(
    talks: list[list[str]], cold: dict[tuple[int, int], str]
) -> None:
    assert compare(talks if LONG else talks[:8], cold, n_ctx=1024) > 0


@pytest.mark.slow
@pytest.mark.parametrize("n_ctx", [8192, 1024] if LONG else [1024])
def test_they_are_the_same_when_idle_prefixes_are_in_ram(
    n_ctx: int, talks: list[list[str]], cold: dict[tuple[int, int], str]
) -> None:
    assert compare(talks if LONG else talks[:8], cold, n_ctx, IN_RAM) > 0


def test_they_are_the_same_when_ram_is_memory_of_ggmls(
    talks: list[list[str]], cold: dict[tuple[int, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a GPU, whose copies are faster from there."""
    libggml.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    allocate = library.buffer_allocator(libggml.ggml_backend_cpu_buffer_type())
    memory = page_locked.PageLockedMemory(allocate, 2**24, 2**22)
    monkeypatch.setattr(page_locked, "MIN_BYTES", 1)
    monkeypatch.setattr(page_locked, "_memory", [memory])
    warm, n_cached = asyncio.run(warm_texts(talks[:8], 1024, IN_RAM))
    assert n_cached > 0
    assert warm == {turn: cold[turn] for turn in warm}
    assert memory.n_bytes > 0


@pytest.mark.slow
def test_two_requests_of_60_percent_of_the_pool_give_the_texts_they_give_alone() -> None:
    backend = open_backend()
    long_talks = [[rendered(TEMPLATE, d.messages)] for d in held_out(2, SEED, filler_tokens=1000)]
    needs = [len(backend.vocab.tokenize(t[0], add_special=True, parse_special=True)) + 40 for t in long_talks]
    backend.close()
    n_ctx = -(-int(max(needs) / 0.6) // 256) * 256
    assert sum(needs) > n_ctx, "they would fit side by side"
    compare(long_talks, asyncio.run(cold_texts(long_talks)), n_ctx)


# Each of these bugs is planted in the code that decides about reuse; the comparison must notice every one.


def match_one_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match that ends inside an edge takes the next token along: one stale token stays in the middle."""
    match = RadixTree.match

    def too_long(tree: RadixTree, namespace: str, tokens: bytes) -> Match:
        found = match(tree, namespace, tokens)
        ends_inside = 0 < found.n_resident < found.resident_end.end and found.n_resident * WIDTH < len(tokens)
        return replace(found, n_resident=found.n_resident + ends_inside)

    monkeypatch.setattr(RadixTree, "match", too_long)


def never_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells behind the match stay where they are."""

    def remove(operations: KvOperations, operation: Remove) -> None:
        operations.set_length(operation.seq, min(operation.keep, operations.lengths[operation.seq]))

    monkeypatch.setattr(KvOperations, "_remove", remove)


def copy_from_the_wrong_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix is taken from another sequence that holds as many tokens."""
    change = LlamaBackend.change

    def wrong(backend: LlamaBackend, operation: Operation) -> None:
        if isinstance(operation, Copy):
            lengths = enumerate(backend._kv.lengths)
            others = [s for s, n in lengths if n >= operation.end and s not in (operation.src, operation.dst)]
            operation = replace(operation, src=(others or [operation.src])[0])
        change(backend, operation)

    monkeypatch.setattr(LlamaBackend, "change", wrong)


def lose_a_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path moved to a spare sequence is believed to be held, and is not."""
    change = LlamaBackend.change

    def lost(backend: LlamaBackend, operation: Operation) -> None:
        if isinstance(operation, Copy) and operation.dst >= backend.info.n_slots:
            backend._kv.lengths[operation.dst] = operation.end
        else:
            change(backend, operation)

    monkeypatch.setattr(LlamaBackend, "change", lost)


def shift_positions_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reused sequence is continued one position too far."""
    arange = np.arange

    def shifted(start: int, stop: int | None = None, **options: object) -> np.ndarray:
        values = arange(start, stop, **options)
        return values + 1 if stop is not None and start > 0 else values

    fake_numpy = type("numpy", (), {**vars(np), "arange": staticmethod(shifted)})
    monkeypatch.setattr(batch, "np", fake_numpy)


def drop_the_pins_in_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that a request runs on may be evicted once another one branches off it."""
    split = RadixTree._split

    def forgetful(tree: RadixTree, node: Node, n: int) -> Node:
        upper = split(tree, node, n)
        if upper is not node:
            tree.n_pinned_tokens -= upper.n_tokens if upper.n_pins else 0
            upper.n_pins = 0
        return upper

    monkeypatch.setattr(RadixTree, "_split", forgetful)


def load_another_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load KV of the right positions, but of another conversation."""
    change = LlamaBackend.change

    def wrong(backend: LlamaBackend, operation: Operation) -> None:
        if isinstance(operation, Load):
            (number, end), *rest = operation.parts
            stored = backend._kv.segment_tokens.items()
            others = [n for n, at in stored if at.start <= operation.start and end <= at.stop]
            others = [n for n in others if n != number] or others
            operation = replace(operation, parts=((max(others), end), *rest))
        change(backend, operation)

    monkeypatch.setattr(LlamaBackend, "change", wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "storing"),
    [
        (match_one_token_too_many, {}),
        (never_trim, {}),
        (copy_from_the_wrong_sequence, {}),
        (lose_a_holder, {}),
        (shift_positions_by_one, {}),
        (drop_the_pins_in_a_split, {}),
        (load_another_segment, IN_RAM),
    ],
)
def test_the_comparison_notices_planted_bugs(
    plant: Callable[[pytest.MonkeyPatch], None],
    storing: dict[str, int],
    talks: list[list[str]],
    cold: dict[tuple[int, int], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ExceptionGroup)):
        compare(talks[:16], cold, storing=storing)
