"""On trained models with short convolutions and with sliding windows, reuse by checkpoints never changes a text.

The models of `tests/models` copy facts out of their context as the embedded model does. Half of their layers have a
recurrent state, or a window of 32 tokens, so a prefix can be continued only where a checkpoint was taken.
Conversations grow, are edited (a twin states another value), fork and are asked again. Long replies are cut and
continued: there the next word hangs on the state, which is what each convolution keeps of the last eight tokens, or
the window. Every greedy text must be the one that the prompt gives cold; a token may differ only where it is a
matter of rounding (`Noise`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.demo.corpus import Dialogue
from llamaslot.backend.disk import DiskStore
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.backend.llama.saved_states import PartialStates
from llamaslot.base.commands import TextPart, TokensPart
from llamaslot.base.events import Finished, Progress
from llamaslot.base.kv_ops import Kv, Restore
from llamaslot.kvcache.tiers import pacing
from tests.conftest import LONG
from tests.demo.talks import TEMPLATE, dialogues, forked, turns
from tests.engine.harness import GREEDY, Harness, running
from tests.noise import Noise
from tests.prompt_threads import text_request
from tests.text.rendering import rendered

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
MODELS = [ROOT / "tests" / "models" / f"{name}.gguf" for name in ("short_conv", "window")]
EMBEDDED = ROOT / "llamaslot" / "demo" / "demo.gguf"
MIB = 2**20
N_DIALOGUES = 24 if LONG else 4
SEED = 20
FILLER = 150
"""Tokens of chatter between facts and question: prompts get 40 to 450 tokens."""
CHAT_TOKENS, STORY_TOKENS, STEP = 40, 160, 20
POOL, SMALL_POOL = 4096, 1024
POOLS = [POOL, SMALL_POOL] if LONG else [SMALL_POOL]
IN_RAM = {"ram_bytes": 64 * MIB, "offload_after": 1}
"""Idle prefixes leave the pool before any prompt is computed."""
HEROES = (("fox", "Tom"), ("robot", "Anna"), ("bear", "Nina"), ("crow", "Leo"), ("frog", "Max"), ("lynx", "Ida"))


@dataclass
class Tally:
    """What a run reused, so that a test can say what it covered."""

    progress: list[Progress] = field(default_factory=list)
    n_restored: int = 0
    """Checkpoints that were restored."""

    def total(self, name: str) -> int:
        return sum(getattr(each, name) for each in self.progress)


@dataclass(frozen=True)
class Asked:
    """Prompts in the order in which users send them."""

    model: Path
    prompts: list[str]
    n_tokens: int
    """Tokens of a reply at most."""
    step: int
    """Tokens that a request asks for: fewer than those of a reply if it is cut and continued."""
    cold: list[list[int]] = field(default_factory=list)
    """Greedy tokens that each prompt gives, computed whole."""

    def compute_cold(self) -> Asked:
        """Return the same prompts with their cold tokens."""

        async def computed() -> list[list[int]]:
            async with running(load(self.model)) as engine:
                return await self._replies(engine, tally, [], self.n_tokens, cache_prompt=False)

        tally = Tally()
        cold = asyncio.run(computed())
        assert tally.total("n_cached") == 0
        return replace(self, cold=cold)

    async def warm(
        self,
        tally: Tally,
        *,
        backend: LlamaBackend | None = None,
        begun: Sequence[list[int]] = (),
        is_together: bool = False,
        **settings: Any,
    ) -> list[list[int]]:
        """Return the tokens that each prompt gives with a cache; replies that were begun go on from there."""
        backend = backend or load(self.model)
        async with running(backend, checkpoint_bytes=64 * MIB, debug_invariants=True, **settings) as engine:
            tokens = await self._replies(engine, tally, begun, self.step, is_together=is_together)
            tally.n_restored += engine.engine.scheduler.cache.stats().checkpoints.restored
        return tokens

    async def _replies(
        self,
        engine: Harness,
        tally: Tally,
        begun: Sequence[list[int]],
        step: int,
        *,
        is_together: bool = False,
        **fields: Any,
    ) -> list[list[int]]:
        """Return the tokens of all replies; each request asks for `step`, in turn or together with the others."""
        tokens = [list(each) for each in begun or [[]] * len(self.prompts)]

        async def ends(i: int) -> bool:
            """Ask for more of a reply; True if that is its end."""
            name = f"{i} from {len(tokens[i])}"
            prompt = TextPart(self.prompts[i]), TokensPart(tuple(tokens[i]))
            n = min(step, self.n_tokens - len(tokens[i]))
            end = await engine.send(text_request(name, prompt, sampling=GREEDY, max_tokens=n, **fields))
            assert isinstance(end, Finished), end
            tally.progress.append(end.progress)
            tokens[i] += engine.tokens(name)
            return end.reason != "limit" or len(tokens[i]) == self.n_tokens

        unfinished = list(range(len(self.prompts)))
        while unfinished:
            asking = map(ends, unfinished)
            ended = await asyncio.gather(*asking) if is_together else [await each for each in asking]
            unfinished = [i for i, is_end in zip(unfinished, ended, strict=True) if not is_end]
        return tokens

    def differing(self, tokens: Sequence[list[int]]) -> list[str]:
        """Return the prompts whose tokens differ from the cold ones by more than rounding explains."""
        noise = Noise(LlamaSettings(self.model, n_ctx=POOL, n_ubatch=128, n_threads=1))
        found = []
        for prompt, warm, cold in zip(self.prompts, tokens, self.cold, strict=True):
            if warm != cold:
                pairs = enumerate(zip(warm, cold, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), None)
                history = noise.tokenize(prompt) + cold[:at]
                if at is None or not noise.explains(history, warm[at], cold[at]):
                    found.append(prompt)
        return found


def load(model: Path, n_ctx: int = POOL) -> LlamaBackend:
    """Open the model, whose self-test must pass: without it nothing is reused."""
    backend = LlamaBackend(
        LlamaSettings(model, n_ctx=n_ctx, n_slots=2, n_ubatch=128, n_threads=1, checkpoints=True)
    )
    # On a busy machine the self-test takes too long for the start.
    assert backend.info.self_test == "passed" or backend.run_self_test()
    return backend


def require_segments(model: Path) -> None:
    """Skip where a device has no flash attention for this head size, so that nothing is offloaded."""
    backend = load(model)
    is_saved = backend.info.segment_size is not None
    backend.close()
    if not is_saved:
        pytest.skip("nothing is saved without flash attention")


def story(animal: str, hero: str) -> str:
    return f"Tell me a story about a {animal} called {hero}."


@pytest.fixture(scope="module")
def talks() -> list[Dialogue]:
    return dialogues(N_DIALOGUES, SEED, FILLER)


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.stem)
def model(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture(scope="module")
def chats(model: Path, talks: list[Dialogue]) -> Asked:
    """Conversations that grow, beside an edited one; then both fork, and are asked again."""
    prompts = []
    for first, edited in zip(talks[::2], talks[1::2], strict=True):
        for pair in zip(turns(first), turns(edited), strict=True):
            prompts += pair
        prompts += [forked(first, story("fox", "Tom")), forked(edited, "Hello!")]
        # Here only the start of the reply is computed.
        prompts += [turns(first)[-1], turns(edited)[-1]]
    return Asked(model, prompts, CHAT_TOKENS, CHAT_TOKENS).compute_cold()


@pytest.fixture(scope="module")
def stories(model: Path) -> Asked:
    """Replies that are cut many times and continued."""
    prompts = [rendered(TEMPLATE, [{"role": "user", "content": story(*each)}]) for each in HEROES]
    return Asked(model, prompts, STORY_TOKENS, STEP).compute_cold()


@pytest.fixture(params=["chats", "stories"])
def some(model: Path, request: pytest.FixtureRequest) -> Asked:
    found: Asked = request.getfixturevalue(request.param)
    return found


def test_answers_hang_on_the_context(model: Path, talks: list[Dialogue], chats: Asked, stories: Asked) -> None:
    """The model copies values, and a story's hero: without that, equal texts would prove little."""
    backend = load(model)

    def text(tokens: list[int]) -> str:
        return "".join(backend.vocab.text(token) for token in tokens).removesuffix("<|im_end|>")

    answers = dict(zip(chats.prompts, map(text, chats.cold), strict=True))
    n_right = sum(answers[turns(talk)[-1]] == talk.answer for talk in talks)
    print(f"{n_right} of {len(talks)} facts are right")
    assert n_right >= len(talks) / 2
    for (_, hero), tokens in zip(HEROES, stories.cold, strict=True):
        assert text(tokens).count(hero) >= 3
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("n_ctx", POOLS)
async def test_warm_and_cold_texts_are_the_same(n_ctx: int, some: Asked) -> None:
    tally = Tally()
    assert not some.differing(await some.warm(tally, backend=load(some.model, n_ctx)))
    assert tally.n_restored > 0
    assert tally.total("n_cached") > 0


@pytest.mark.slow
@pytest.mark.parametrize("n_ctx", POOLS)
async def test_they_are_the_same_when_idle_prefixes_are_in_ram(n_ctx: int, some: Asked) -> None:
    tally = Tally()
    require_segments(some.model)
    assert not some.differing(await some.warm(tally, backend=load(some.model, n_ctx), **IN_RAM))
    assert tally.n_restored >= len(some.prompts) / 4
    assert tally.total("n_loaded") > tally.total("n_prompt") / 4


@pytest.mark.slow
async def test_replies_side_by_side_are_the_same(stories: Asked) -> None:
    tally = Tally()
    assert not stories.differing(await stories.warm(tally, is_together=True, **IN_RAM))
    assert tally.n_restored >= len(stories.prompts)


@pytest.mark.slow
async def test_chats_are_the_same_after_a_restart(
    chats: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_segments(chats.model)
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)
    for is_again in (False, True):
        tally = Tally()
        with opened(tmp_path) as disk:
            assert not chats.differing(await chats.warm(tally, disk=disk, **IN_RAM))
        assert is_again == (tally.total("n_read") > 0)
        assert tally.n_restored >= len(chats.prompts) / 4


@pytest.mark.slow
async def test_cut_replies_go_on_after_a_restart(
    stories: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_segments(stories.model)
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)
    half = replace(stories, n_tokens=STORY_TOKENS // 2)
    with opened(tmp_path) as disk:
        begun = await half.warm(Tally(), disk=disk, **IN_RAM)
    tally = Tally()
    with opened(tmp_path) as disk:
        assert not stories.differing(await stories.warm(tally, begun=begun, disk=disk, **IN_RAM))
    for first in tally.progress[: len(stories.prompts)]:
        assert first.n_read > first.n_prompt - 2 * STEP
    assert tally.n_restored >= len(stories.prompts)


@contextmanager
def opened(folder: Path) -> Iterator[DiskStore]:
    """A cache on disk; what was written to the folder before is there again."""
    store = DiskStore(folder)
    store.open(b"k" * 32, 64 * MIB)
    try:
        yield store
    finally:
        store.close()


# Each of these bugs is planted in what restores a checkpoint; the comparison must notice every one.

CELL_BYTES, RECURRENT_HEADER_BYTES = 12, 28


def values(state: Kv, *, has_window: bool) -> list[slice]:
    """Return where a checkpoint has values; before them come positions, which llama.cpp compares, and types."""
    n_cells = int(state[12:16].view(np.uint32)[0]) if has_window else 1
    at = 16 + n_cells * CELL_BYTES + 8 if has_window else RECURRENT_HEADER_BYTES
    found = []
    while at < len(state):
        row_bytes = int(state[at + 4 : at + 12].copy().view(np.uint64)[0])
        at += 12 + n_cells * row_bytes
        found.append(slice(at - n_cells * row_bytes, at))
    return found


def restore_with(
    partial: PartialStates, operation: Restore, end: int, values_of: Callable[[Kv, slice], Any]
) -> None:
    """Restore a checkpoint with other values at its position."""
    own = partial.states[operation.checkpoint]
    mixed = own.copy()
    for each in values(own, has_window=partial._kind.has_window):
        mixed[each] = values_of(own, each)
    partial.states[operation.checkpoint] = mixed
    RESTORE(partial, operation, end)
    partial.states[operation.checkpoint] = own


def blank(partial: PartialStates, operation: Restore, end: int) -> None:
    """Keep the cells, and leave the state empty."""
    restore_with(partial, operation, end, lambda own, each: 0)


def foreign(partial: PartialStates, operation: Restore, end: int) -> None:
    """Restore the state that was taken before: of another reply, as they take turns."""
    before = max(n for n in (0, *partial.states) if n < operation.checkpoint)
    other = partial.states.get(before)
    restore_with(partial, operation, end, lambda own, each: (own if other is None else other)[each])


def stale(partial: PartialStates, operation: Restore, end: int) -> None:
    """Restore the state that was taken first."""
    first = partial.states[min(partial.states)]
    restore_with(partial, operation, end, lambda own, each: first[each])


RESTORE = PartialStates.restore


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [blank, foreign, stale])
async def test_the_comparison_notices_planted_bugs(
    wrong: Callable[[PartialStates, Restore, int], None], stories: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = load(stories.model)
    # The self-test at the start would notice each of them, and nothing would be reused.
    monkeypatch.setattr(PartialStates, "restore", wrong)
    tally = Tally()
    differing = stories.differing(await stories.warm(tally, backend=backend, **IN_RAM))
    print(f"{len(differing)} of {len(stories.prompts)} texts differ")
    assert tally.n_restored > 0
    assert len(differing) > len(stories.prompts) / 2


def test_the_trained_models_have_five_megabytes_together() -> None:
    assert sum(path.stat().st_size for path in [EMBEDDED, *MODELS]) <= 5 * MIB
