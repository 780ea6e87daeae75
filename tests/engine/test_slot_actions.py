"""Slots are saved to files, restored from them and erased, also while requests run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench import synthetic
from llamaslot.backend.disk import SlotFiles
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, self_test
from llamaslot.base.backend import Status
from llamaslot.base.commands import ClearCache, SlotAction, SlotActionDone
from llamaslot.base.errors import ErrorInfo
from llamaslot.base.events import Event, Finished, Output, Progress, Reply
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.model import StateKind
from llamaslot.kvcache.nodes import checkpoints_on
from llamaslot.kvcache.slot_snapshots import MAX_SAVED_CHECKPOINTS
from tests import conftest
from tests.engine.harness import Harness, alone, running
from tests.engine.test_images import parts_of
from tests.fake_backend import FakeBackend

KEY = b"k" * 32
LAYOUTS = [(1500, 4, 20_000), (900, 0, 0), (1500, 0, 0)]
ENDLESS = Sampling(temperature=0.0, ignore_eos=True)
LONG = "Some words that are said again and again. " * 30


class Files(Harness):
    """A harness that acts on slots."""

    n_acts = 0

    async def act(self, slot: int, action: Any, filename: str = "a.bin") -> SlotActionDone | ErrorInfo:
        answer = await self.ask(SlotAction(slot, action, filename))
        assert isinstance(answer, SlotActionDone | ErrorInfo)
        return answer

    def begin(self, slot: int, action: Any, filename: str = "a.bin") -> asyncio.Future[Reply]:
        return self.query(SlotAction(slot, action, filename))

    async def wait_a_turn(self) -> None:
        await asyncio.sleep(0.001)

    async def complete(self, prompt: str, slot: int = 0, **fields: object) -> Progress:
        end = await self.submit(f"{len(self.ends)}", prompt, id_slot=slot, max_tokens=4, **fields)
        assert isinstance(end, Finished)
        return end.progress

    def last_text(self) -> str:
        return self.text(f"{len(self.ends) - 1}")


@asynccontextmanager
async def served(folder: Path, backend: FakeBackend | None = None, **settings: Any) -> AsyncIterator[Files]:
    backend = backend or FakeBackend(n_slots=2, n_ctx=4096, n_reserved=4)
    size = backend.info.segment_size
    assert size is not None
    files = SlotFiles(folder, lambda: KEY, size, 1000, backend.info.checkpoint_size)
    async with running(backend, kind=Files, snapshots=files, **settings) as harness:
        assert isinstance(harness, Files)
        yield harness


async def test_a_saved_slot_can_be_restored_in_another_server(tmp_path: Path) -> None:
    async with served(tmp_path) as engine:
        asked = await engine.complete(LONG)
        saved = await engine.act(0, "save")
        assert isinstance(saved, SlotActionDone)
        assert saved.n_tokens == asked.n_prompt + 3
        assert saved.n_bytes == (tmp_path / "a.bin").stat().st_size
        text = engine.last_text()
    async with served(tmp_path) as engine:
        restored = await engine.act(1, "restore")
        assert isinstance(restored, SlotActionDone)
        assert (restored.n_tokens, restored.n_bytes) == (saved.n_tokens, saved.n_bytes)
        again = await engine.complete(LONG + text, slot=1)
        assert (again.n_prompt_computed, again.slot) == (1, 1)
        assert engine.last_text() == await alone(LONG + text, FakeBackend(n_slots=1, n_ctx=4096), max_tokens=4)


async def test_an_action_waits_until_its_slot_is_idle(tmp_path: Path) -> None:
    async with served(tmp_path) as engine:
        end = engine.submit("running", LONG, id_slot=0, max_tokens=30, sampling=ENDLESS)
        await engine.wait_for("running", Output, 2)
        replies = [engine.begin(0, "save"), engine.begin(0, "erase")]
        assert isinstance(await engine.act(1, "erase"), SlotActionDone), "the other slot is idle"
        assert not any(reply.done() for reply in replies)
        await end
        assert [(await reply).body.n_tokens for reply in replies] == [len("<" + LONG) + 29] * 2
        assert engine.engine.scheduler.cache.length(0) == 0


async def test_a_restored_slot_shares_the_cells_of_resident_prefixes(tmp_path: Path) -> None:
    async with served(tmp_path) as engine:
        await engine.complete(LONG)
        saved = await engine.act(0, "save")
        assert isinstance(saved, SlotActionDone)
        cache = engine.engine.scheduler.cache
        n_used = cache.cells.used
        await engine.act(1, "restore")
        await engine.wait_a_turn()
        assert (cache.cells.used, cache.length(1)) == (n_used, saved.n_tokens)


async def test_the_prefix_that_a_slot_held_before_a_restore_stays_cached(tmp_path: Path) -> None:
    async with served(tmp_path) as engine:
        await engine.complete("One. " + LONG)
        await engine.act(0, "save")
        await engine.complete("Two. " + LONG)
        await engine.act(0, "restore")
        assert (await engine.complete("Two. " + LONG, slot=1)).n_prompt_computed == 1


async def test_a_restore_evicts_idle_prefixes_but_no_running_request(tmp_path: Path) -> None:
    def pool() -> FakeBackend:
        return FakeBackend(n_slots=2, n_ctx=2000, n_reserved=4)

    async with served(tmp_path, pool()) as engine:
        await engine.complete(LONG)
        await engine.act(0, "save")
        await engine.complete("x" * 1500)
        assert isinstance(await engine.act(1, "restore"), SlotActionDone)
        assert (await engine.complete(LONG, slot=1)).n_prompt_computed == 1
        await engine.act(1, "erase")
        end = engine.submit("busy", "y" * 1500, id_slot=0, max_tokens=300, sampling=ENDLESS)
        await engine.wait_for("busy", Output)
        refused = await engine.act(1, "restore")
        assert isinstance(refused, ErrorInfo)
        assert "not enough free cells" in refused.message
        engine.cancel("busy")
        await end


@pytest.mark.parametrize(
    ("slot", "action", "filename", "words"),
    [
        (5, "save", "a", "there is no slot 5"),
        (0, "save", "a", "slot 0 cannot be saved: it is empty"),
        (0, "restore", "a", "there is no file a"),
        (0, "restore", "other", "it is not a slot file"),
    ],
)
async def test_impossible_actions_are_refused_with_a_reason(
    tmp_path: Path, slot: int, action: str, filename: str, words: str
) -> None:
    (tmp_path / "other").write_bytes(b"something else" * 10)
    async with served(tmp_path) as engine:
        refused = await engine.act(slot, action, filename)
        assert isinstance(refused, ErrorInfo)
        assert words in refused.message
        await engine.complete(LONG)


async def test_a_restore_that_does_not_fit_the_slot_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as engine:
        await engine.complete(LONG)
        await engine.act(0, "save")
    async with served(tmp_path, FakeBackend(n_slots=1, n_ctx=512, n_reserved=2)) as engine:
        refused = await engine.act(0, "restore")
        assert isinstance(refused, ErrorInfo)
        assert refused.param == "filename"


async def test_a_slot_with_an_image_is_not_restored_without_a_projector(tmp_path: Path) -> None:
    async with served(tmp_path, FakeBackend(n_slots=2, projector=True, n_reserved=4)) as engine:
        await engine.submit("image", parts_of("look: 2 what is it"), id_slot=0)
        await engine.act(0, "save")
        assert isinstance(await engine.act(1, "restore"), SlotActionDone)
    async with served(tmp_path) as engine:
        refused = await engine.act(0, "restore")
        assert isinstance(refused, ErrorInfo)
        assert (refused.param, "without an mmproj" in refused.message) == ("filename", True)
        await engine.complete(LONG)


async def test_actions_are_refused_without_a_folder() -> None:
    backend = FakeBackend(n_slots=2, n_ctx=1024)
    async with running(backend, kind=Files) as engine:
        assert isinstance(engine, Files)
        refused = await engine.act(0, "erase")
        assert isinstance(refused, ErrorInfo)
        assert refused.type == "not_supported_error"


@pytest.mark.slow
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(("n_ctx", "n_reserved", "ram_bytes"), LAYOUTS if conftest.LONG else LAYOUTS[:2])
async def test_actions_do_not_change_the_replies_of_requests_beside_them(
    tmp_path: Path, n_ctx: int, n_reserved: int, ram_bytes: int, unified: bool
) -> None:
    """Saves, restores and erasures of all slots while requests come and go, with invariants checked."""
    rng = random.Random(5)
    if unified:
        backend = FakeBackend(n_slots=3, n_ctx=n_ctx, n_reserved=n_reserved)
    else:
        backend = FakeBackend(n_slots=3, n_ctx=3 * n_ctx, unified=False)
    async with served(tmp_path, backend, ram_bytes=ram_bytes, debug_invariants=True) as engine:
        heads = [f"{name} " * 60 for name in ("one", "two", "three")]
        prompts: dict[str, str] = {}
        acts: list[asyncio.Future[Reply]] = []
        for i in range(60):
            prompts[f"r{i}"] = rng.choice(heads) + f"{rng.randrange(6)} and more"
            engine.submit(f"r{i}", prompts[f"r{i}"], max_tokens=rng.randrange(1, 20))
            acts.append(engine.begin(rng.randrange(3), rng.choice(["save", "restore", "erase"]), rng.choice("abc")))
            for _ in range(rng.randrange(4)):
                await engine.wait_a_turn()
        for name, end in engine.ends.items():
            assert isinstance(await end, Finished), name
        answers = [(await reply).body for reply in acts]
        n_restored = sum(isinstance(answer, SlotActionDone) for answer in answers)
        assert n_restored > 15
        for name, prompt in prompts.items():
            n = len(engine.tokens(name))
            assert engine.text(name) == await alone(prompt, FakeBackend(n_slots=1, n_ctx=1500), max_tokens=n)


async def test_an_idle_server_answers_actions_on_empty_slots_at_once(tmp_path: Path) -> None:
    async with served(tmp_path) as engine:
        await asyncio.sleep(0.3)
        assert isinstance(await asyncio.wait_for(engine.act(0, "erase"), 5), SlotActionDone)
        await asyncio.sleep(0.3)
        assert isinstance(await asyncio.wait_for(engine.act(0, "save"), 5), ErrorInfo)


async def test_a_slot_is_restored_beside_duplicate_cells_of_two_others(tmp_path: Path) -> None:
    """The two share too little for one to wait for the other, so each has cells of its own for it at first."""
    backend = FakeBackend(n_slots=3, n_ctx=2000, n_reserved=4, n_ubatch=256)
    async with served(tmp_path, backend, debug_invariants=True) as engine:
        await engine.complete("x" * 40 + "C" * 20, slot=2)
        await engine.act(2, "save")
        await engine.ask(ClearCache())
        busy = engine.submit("busy", "something else", id_slot=2, max_tokens=-1, sampling=ENDLESS)
        await engine.wait_for("busy", Output, 2)
        reply = engine.begin(2, "restore")
        await asyncio.sleep(0.1)
        on_events = engine.engine._on_events

        def cancel_at_their_end(events: list[Event]) -> None:
            on_events(events)
            if any(isinstance(event, Finished) and event.completion_id == "b" for event in events):
                engine.cancel("busy")

        engine.engine._on_events = cancel_at_their_end
        for slot, tail in enumerate("ab"):
            engine.submit(tail, "x" * 40 + tail * 20, id_slot=slot, max_tokens=0)
        await busy
        assert isinstance((await reply).body, SlotActionDone)
        assert engine.backend.cells_used == engine.engine.scheduler.cache.cells.used


async def test_a_restore_does_not_evict_the_short_prefix_that_it_loads(tmp_path: Path) -> None:
    """To free a sequence id, short tails are evicted first, but not the one that the restore has just loaded."""
    async with served(tmp_path, FakeBackend(n_slots=2, n_ctx=4096, n_reserved=2)) as engine:
        await engine.complete("short")
        saved = await engine.act(0, "save")
        assert isinstance(saved, SlotActionDone)
        await engine.act(0, "erase")
        for i in range(6):
            await engine.complete(f"{i} {LONG}", slot=i % 2)
        await engine.act(1, "restore")
        cache = engine.engine.scheduler.cache
        assert cache.length(1) == saved.n_tokens
        sequences = cache._sequences
        assert not all(map(sequences.in_use, sequences.spare)), "no spare id is free"


@pytest.mark.parametrize("kind", [StateKind.WINDOW, StateKind.RECURRENT])
async def test_a_slot_keeps_what_it_still_holds_of_a_snapshot(tmp_path: Path, kind: StateKind) -> None:
    """The pool has no cells to load it again beside a running request that shares its beginning."""
    backend = FakeBackend(n_slots=2, n_ctx=1500, n_seqs=3, kind=kind)
    async with served(tmp_path, backend, checkpoint_bytes=10**6, debug_invariants=True) as engine:
        await engine.complete(LONG[:400], slot=1)
        await engine.complete(LONG[:550])
        saved = await engine.act(0, "save")
        assert isinstance(saved, SlotActionDone)
        prompt = LONG[:400] + "r" * 850
        busy = engine.submit("busy", prompt, id_slot=1, max_tokens=-1, sampling=ENDLESS)
        await engine.wait_for("busy", Output, 2)
        assert isinstance(await engine.act(0, "restore"), SlotActionDone)
        assert engine.engine.scheduler.cache.length(0) == saved.n_tokens
        assert not busy.done()
        engine.cancel("busy")
        await busy


KINDS = [kind for kind in StateKind if kind is not StateKind.NONE]
TEXT = "One thing that is said, and then another one. " * 20


async def leave_early(engine: Files, at: int, kind: StateKind) -> Progress:
    """Ask for a prompt that departs from the saved text after `at` characters; check that its reply is right."""
    prompt = TEXT[:at] + "But no. "
    end = await engine.complete(prompt)
    assert engine.last_text() == await alone(prompt, FakeBackend(n_slots=1, n_ctx=4096, kind=kind), max_tokens=4)
    return end


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_restored_slot_has_its_checkpoints(tmp_path: Path, kind: StateKind) -> None:
    settings = {"checkpoint_bytes": 10**6, "checkpoint_step": 100, "debug_invariants": True}
    async with served(tmp_path, FakeBackend(n_slots=2, n_ctx=4096, kind=kind), **settings) as engine:
        await engine.complete(TEXT)
        assert isinstance(await engine.act(0, "save"), SlotActionDone)
        before = [each.end for each in checkpoints_on(engine.engine.scheduler.cache._sequences.end(0))]
        # The same server, after everything was dropped.
        await engine.ask(ClearCache())
        await engine.act(0, "restore")
        end = await leave_early(engine, 500, kind)
        assert 400 <= end.n_prompt - end.n_prompt_computed <= 501
    async with served(tmp_path, FakeBackend(n_slots=2, n_ctx=4096, kind=kind), **settings) as engine:
        await engine.act(0, "restore")
        await engine.wait_a_turn()
        after = [each.end for each in checkpoints_on(engine.engine.scheduler.cache._sequences.end(0))]
        assert after == [each for each in before if each < len(TEXT)]
        for at in (800, 300, 150):
            end = await leave_early(engine, at, kind)
            assert at - 101 <= end.n_prompt - end.n_prompt_computed <= at + 1
    # Twice: those that are there already are not added again.
    async with served(tmp_path, FakeBackend(n_slots=2, n_ctx=4096, kind=kind), **settings) as engine:
        for slot in (0, 1, 0):
            assert isinstance(await engine.act(slot, "restore"), SlotActionDone)
        await leave_early(engine, 500, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StateKind.WINDOW, StateKind.HYBRID])
@pytest.mark.parametrize(("n_bytes", "on_path"), [(0, 32), (150, 32), (400, 32), (10**6, 2)])
async def test_a_restore_adds_as_many_checkpoints_as_there_is_room_for(
    tmp_path: Path, kind: StateKind, n_bytes: int, on_path: int
) -> None:
    full = {"checkpoint_bytes": 10**6, "checkpoint_step": 50, "debug_invariants": True}
    async with served(tmp_path, FakeBackend(n_slots=2, n_ctx=4096, kind=kind), **full) as engine:
        await engine.complete(TEXT)
        assert isinstance(await engine.act(0, "save"), SlotActionDone)
    little = {**full, "checkpoint_bytes": n_bytes, "checkpoints_on_path": on_path}
    async with served(tmp_path, FakeBackend(n_slots=2, n_ctx=4096, kind=kind), **little) as engine:
        assert isinstance(await engine.act(0, "restore"), SlotActionDone)
        await engine.wait_a_turn()
        cache = engine.engine.scheduler.cache
        assert cache.stats().checkpoints.used_bytes <= n_bytes
        assert len(checkpoints_on(cache._sequences.end(0))) <= on_path
        for at in (900, 300):
            await leave_early(engine, at, kind)


async def test_no_more_checkpoints_are_saved_than_a_file_may_have(tmp_path: Path) -> None:
    kind = StateKind.RECURRENT
    settings = {"checkpoint_bytes": 10**6, "checkpoint_step": 64, "checkpoints_on_path": 200}
    async with served(tmp_path, FakeBackend(n_slots=2, n_ctx=16_384, kind=kind), **settings) as engine:
        sequences = engine.engine.scheduler.cache._sequences
        await engine.complete(TEXT * 6)
        n_before = len(checkpoints_on(sequences.end(0)))
        assert n_before > MAX_SAVED_CHECKPOINTS + 1
        assert isinstance(await engine.act(0, "save"), SlotActionDone)
        await engine.ask(ClearCache())
        assert isinstance(await engine.act(0, "restore"), SlotActionDone)
        await engine.wait_a_turn()
        assert len(checkpoints_on(sequences.end(0))) == MAX_SAVED_CHECKPOINTS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["short_conv", "tiny-swa"])
async def test_a_prompt_that_leaves_a_restored_text_early_is_as_cold(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """On real models: one with a recurrent state, one with sliding windows."""
    path = conftest.ROOT / "models" / "short_conv.gguf"
    if name != "short_conv":
        path = synthetic.ensure(name, folder=tmp_path_factory.getbasetemp())

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Files]:
        chosen = LlamaSettings(path, n_ctx=2048, n_slots=2, n_ubatch=128, n_threads=1, checkpoints=True)
        backend = LlamaBackend(chosen)
        assert backend.info.self_test in ("passed", "not needed", "") or backend.run_self_test()
        assert backend.info.segment_size is not None
        files = SlotFiles(tmp_path, lambda: KEY, backend.info.segment_size, 2048, backend.info.checkpoint_size)
        budgets = {"checkpoint_bytes": 2**26, "ram_bytes": 2**26, "checkpoint_step": 128}
        async with running(backend, kind=Files, snapshots=files, debug_invariants=True, **budgets) as harness:
            assert isinstance(harness, Files)
            yield harness

    text = "The cat was told the name of the house. " * 60
    early = text[: len(text) // 2] + "Then the dog came. "
    async with fresh() as engine:
        cold = await engine.complete(early)
        assert cold.n_prompt_computed == cold.n_prompt
        expected = engine.last_text()
    async with fresh() as engine:
        await engine.complete(text)
        assert isinstance(await engine.act(0, "save"), SlotActionDone)
        await engine.act(0, "erase")
        await engine.ask(ClearCache())
        assert isinstance(await engine.act(0, "restore"), SlotActionDone)
        warm = await engine.complete(early)
        assert engine.last_text() == expected
        assert warm.n_prompt_computed < 0.6 * warm.n_prompt
    async with fresh() as engine:
        assert isinstance(await engine.act(1, "restore"), SlotActionDone)
        warm = await engine.complete(early, slot=1)
        assert (engine.last_text(), warm.n_prompt_computed < 0.6 * warm.n_prompt) == (expected, True)


async def test_a_restore_evicts_idle_duplicate_cells(tmp_path: Path) -> None:
    """Two requests that compute the same tokens at once leave duplicates: recurrent states keep their own cells."""
    backend = FakeBackend(n_slots=2, n_ctx=1000, n_reserved=1, n_ubatch=512, kind=StateKind.RECURRENT)
    async with served(tmp_path, backend, checkpoint_bytes=0, debug_invariants=True) as engine:
        await engine.complete("y" * 650)
        saved = await engine.act(0, "save")
        assert isinstance(saved, SlotActionDone)
        await engine.act(0, "erase")
        await asyncio.gather(*(engine.submit(name, "x" * 40 + name * 200, max_tokens=1) for name in "ab"))
        await asyncio.gather(*(engine.submit(2 * name, "z" * 480, max_tokens=1) for name in "ab"))
        cache = engine.engine.scheduler.cache
        assert cache._sequences.n_idle_duplicates
        assert isinstance(await engine.act(0, "restore"), SlotActionDone)


async def test_a_restore_is_refused_if_a_running_request_keeps_it_from_its_cells(tmp_path: Path) -> None:
    """The slot has cells of its own for what they share: idle duplicates, but the restore would keep them."""
    backend = FakeBackend(n_slots=2, n_ctx=1000, n_reserved=1, n_ubatch=512, kind=StateKind.RECURRENT)
    async with served(tmp_path, backend, checkpoint_bytes=0, debug_invariants=True) as engine:
        await engine.complete("x" * 200 + "y" * 450)
        assert isinstance(await engine.act(0, "save"), SlotActionDone)
        await engine.act(0, "erase")
        ends = engine.submit("a", "x" * 200 + "a" * 20, id_slot=0, max_tokens=1)
        busy = engine.submit("b", "x" * 200 + "b" * 100, id_slot=1, max_tokens=-1, sampling=ENDLESS)
        await ends
        answer = await engine.act(0, "restore")
        if not isinstance(answer, SlotActionDone):
            assert "not enough free cells" in answer.message
        assert not busy.done()
        engine.cancel("b")
        await busy


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "start it with --slot-save-path"),
        ({"can_trim": False}, "no prefix of this model can be reused"),
        ({"segment_size": None}, "no sequence id is left for it, so lower --parallel"),
    ],
)
async def test_a_server_that_saves_no_slots_says_why(settings: dict[str, Any], reason: str) -> None:
    backend = FakeBackend(n_slots=2, n_ctx=1000, **settings)
    async with running(backend, kind=Files) as engine:
        refused = await engine.act(0, "save")
        assert isinstance(refused, ErrorInfo)
        assert refused.message == f"this server does not save its slots: {reason}"


async def test_a_slot_that_lost_its_state_cannot_be_saved_until_it_is_computed_on(tmp_path: Path) -> None:
    """A step fails in which it has no part, but recurrent states of other sequences are lost in it, too."""
    backend = FakeBackend(n_slots=2, n_ctx=1000, n_reserved=1, n_ubatch=512, kind=StateKind.RECURRENT)
    async with served(tmp_path, backend, debug_invariants=True) as engine:
        await engine.complete("x" * 200)
        assert isinstance(await engine.act(0, "save"), SlotActionDone)
        backend.failures.append((Status.ABORTED, 0))
        await engine.submit("failed", "y" * 100, id_slot=1, max_tokens=1)
        assert engine.engine.scheduler.cache.length(0)
        refused = await engine.act(0, "save")
        assert isinstance(refused, ErrorInfo)
        assert refused.message == "slot 0 cannot be saved: it has lost the state after its last token"
        assert refused.param == "id_slot"
        await engine.complete("x" * 200 + "and more")
        assert isinstance(await engine.act(0, "save"), SlotActionDone)


async def test_actions_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as engine:
        end = engine.submit("busy", LONG, id_slot=0, max_tokens=-1, sampling=ENDLESS)
        await engine.wait_for("busy", Output, 2)
        replies = [engine.begin(0, "erase") for _ in range(8)]
        refused = await engine.act(0, "erase")
        assert isinstance(refused, ErrorInfo)
        assert (refused.type, refused.retry_after) == ("rate_limit_error", 1)
        engine.cancel("busy")
        await end
        erased = [(await reply).body.n_tokens for reply in replies]
        assert erased[0] > len(LONG)
        assert erased[1:] == [0] * 7
        assert engine.engine.scheduler.cache.length(0) == 0


async def test_the_end_of_a_covered_slot_gets_a_checkpoint_before_a_restore(tmp_path: Path) -> None:
    """All of its tokens stay with the slot that continued them, but that one's state is a later one."""
    backend = FakeBackend(n_slots=3, n_ctx=2000, n_reserved=2, n_ubatch=512, kind=StateKind.RECURRENT)
    async with served(tmp_path, backend, checkpoint_bytes=10**6, debug_invariants=True) as engine:
        await engine.complete("other " * 20, slot=2)
        await engine.act(2, "save")
        await engine.submit("first", "x" * 200, id_slot=0, max_tokens=40, sampling=ENDLESS)
        turn = "x" * 200 + engine.text("first")
        cache = engine.engine.scheduler.cache
        await engine.complete(turn + "y" * 100, slot=1)
        n_tokens = cache.length(0)
        assert cache._sequences.is_covered(0)
        assert not cache.checkpoints.has_at_end(0)
        assert isinstance(await engine.act(0, "restore"), SlotActionDone)
        assert n_tokens in [each.end for each in checkpoints_on(cache._sequences.end(1))]
        assert (await engine.complete(turn + "z" * 100)).n_prompt_computed == 101


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StateKind.NONE, StateKind.WINDOW, StateKind.RECURRENT, StateKind.HYBRID])
async def test_slots_are_neither_saved_nor_restored_before_the_self_test_has_passed_or_after_it_failed(
    kind: StateKind, tmp_path: Path
) -> None:
    """Restored cells would be shared beside the self-test; after it failed, the backend takes no segments."""

    class Untested(FakeBackend):
        is_due = False

        def run_self_test(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
            if self.is_due:
                self.info = msgspec.structs.replace(
                    self.info, self_test="failed", keeps_checkpoints=False, checkpoint_size=None, segment_size=None
                )
            return self.is_due

    budgets = {"checkpoint_bytes": 10**6, "ram_bytes": 10**6}
    async with served(tmp_path, FakeBackend(n_ctx=4096, kind=kind), **budgets) as engine:
        await engine.complete(LONG)
        assert isinstance(await engine.act(0, "save"), SlotActionDone)
    backend = Untested(n_slots=2, n_ctx=4096, n_reserved=4, kind=kind)
    backend.info = msgspec.structs.replace(backend.info, self_test="pending", self_test_reason="the reason")
    async with served(tmp_path, backend, **budgets) as engine:
        for outcome in ("pending", "failed"):
            backend.is_due = outcome == "failed"
            await engine.complete(LONG)
            await engine.wait_a_turn()
            assert backend.info.self_test == outcome
            for action in ("save", "restore"):
                answer = await engine.act(0, action)
                assert isinstance(answer, ErrorInfo)
                assert "the reason" in answer.message
                assert "--reuse-self-test on" in answer.message
            assert isinstance(await engine.act(0, "erase"), SlotActionDone)
        assert (await engine.complete(LONG)).miss == "self_test_failed"
    at_start = FakeBackend(n_slots=2, n_ctx=4096, kind=kind)
    at_start.info = self_test.applied(at_start.info, self_test.SelfTestResult("failed", "the reason"))
    async with running(at_start, kind=Files) as engine:
        answer = await engine.act(0, "save")
        assert isinstance(answer, ErrorInfo)
        assert "the reason; --reuse-self-test on" in answer.message
