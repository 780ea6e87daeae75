"""Random requests with images, LoRA adapters, infill and context shift on real models: texts as without a cache.

They mix on one server, which offloads, evicts and writes to disk, and is started again midway. A token may differ
only where another one was about as likely without a cache, since llama.cpp rounds attention to float16. What
follows it is not compared, so few replies may have one. `tests/noise.py` knows no images or adapters.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from bench import synthetic
from bench.lora_files import INVOCATION, write_adapter
from bench.projector_files import Kind, picture, write_projector
from llamaslot.backend.disk import DiskStore
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.adapters import Adapters, applied
from llamaslot.base.commands import ContextShift, ImagePart, InspectEngine, PromptPart, TextPart, TokensPart
from llamaslot.base.events import Cancelled, Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.images import ImageSize
from llamaslot.base.model import FimTokens
from llamaslot.kvcache.tiers import pacing
from llamaslot.protocol.bodies import FileExtract, InfillBody
from llamaslot.protocol.text_requests import InfillPrompts
from tests.backend.llama_machine import empty_pool
from tests.conftest import LONG
from tests.engine.harness import Harness, running
from tests.engine.test_disk_worker import KEY
from tests.prompt_threads import SETTINGS
from tests.random_workloads import run_workloads
from tests.vision_files import with_mrope, with_tokens

N_WORKLOADS = 100 if LONG else 2
N_CTX_SLOT = 448
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
SCORED = structs.replace(GREEDY, n_probs=2)
MAX_ROUNDED = 0.1
"""Difference of two log-probabilities below which rounding may exchange the tokens; their median is 0.8."""
MAX_ROUNDED_SHARE = 0.15
"""Largest part of the replies in which rounding may exchange a token; 3 to 7 % of 139 did."""
FIM = FimTokens(prefix=300, suffix=301, middle=302)
SCALES = (
    *((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.5, 0.0, 0.0)),
    *((0.0, 0.0, 1.0), (0.0, 0.0, 1.0), (0.0, 0.0, 0.5), (0.0, 1.0, 1.0)),
)
"""Scales of the adapters; the last one is active from `INVOKED` on."""
INVOKED = " how old is that"
HEADS = ("you see what others do not: ", "you see what others do not, and say so in a few words only. " * 2)
PIECES = (" what is it?", " and", " whose", " how old is that", " -", " x")
SOURCE = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(6))
MODELS: dict[str, tuple[str, Kind, tuple[int, int]]] = {
    "one tile": ("tiny", "mlp", (90, 70)),
    "several tiles": ("tiny", "idefics3", (120, 64)),
    "M-RoPE": ("tiny", "qwen2vl_merger", (150, 60)),
    "window": ("tiny-swa", "gemma3", (80, 64)),
    "hybrid": ("tiny-lfm2", "lfm2", (100, 60)),
    "hybrid with M-RoPE": ("tiny-qwen35", "qwen2vl_merger", (150, 60)),
}
"""Shape of a model, its projector, and the pixels of its images."""
SMALL = {"clip.vision.preproc_image_size": 128}
"""So small are images cut to tiles."""
SLOW = "one tile", "M-RoPE", "window"
EVENTS = "images", "adapters", "invoked", "infill", "cancelled", "reused", "loaded", "read"
LONG_EVENTS = ("evicted",) if LONG else ()
"""Rarer: two workloads may do without."""


class KeptLlama(LlamaBackend):
    """A real model that several engines serve, one after the other; each begins with an empty pool."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__(settings)
        self.info = structs.replace(self.info, n_ctx_slot=N_CTX_SLOT)

    def close(self) -> None:
        empty_pool(self)

    def end(self) -> None:
        """Close it."""
        super().close()


class Model:
    """A model with three adapters and a projector: the server, and cold runs by a backend of their own."""

    def __init__(self, name: str, folder: Path) -> None:
        shape, kind, size = MODELS[name]
        path = with_tokens(synthetic.ensure(shape, folder=folder, is_exact=True), folder / "model.gguf")
        if kind == "qwen2vl_merger" and shape == "tiny":
            path = with_mrope(path, folder / "mrope.gguf")
        vocab = LlamaVocab.load(path, {})
        invocation = vocab.tokenize(INVOKED, add_special=False, parse_special=False).tolist()
        values = {INVOCATION: invocation}
        files = [write_adapter(folder / f"{i}.gguf", path, i, values=values if i == 2 else None) for i in range(3)]
        adapters = tuple((each, 0.0) for each in files)
        settings = LlamaSettings(
            path,
            mmproj=write_projector(folder / "mmproj.gguf", kind, values=SMALL if kind == "idefics3" else None),
            adapters=adapters,
            n_ctx=4 * N_CTX_SLOT,
            n_slots=3,
            n_cache_seqs=3,
            n_ubatch=256,
            n_threads=1,
            flash_attn="on",
            cache_type_k="f32",
            cache_type_v="f32",
            checkpoints=True,
            context_shift=True,
        )
        self.size = ImageSize(*size)
        self.server, self._cold = KeptLlama(settings), KeptLlama(settings)
        self.info = self.server.info
        self.can_shift = not self.info.unshifted_reason

    def image(self, seed: int) -> ImagePart:
        """An image of random colours."""
        data = picture(seed, self.size.width, self.size.height)
        return ImagePart(data, b"digest%d" % seed, self.server.image_layout(self.size))

    def infill(self, at: int, extra: bool) -> tuple[PromptPart, ...]:
        """The prompt of `/infill` at a place of a source text."""

        def tokenize(prompt: Iterable[PromptPart]) -> list[int]:
            found: list[int] = []
            for part in prompt:
                assert isinstance(part, TextPart)
                ids = self.server.vocab.tokenize(part.text, add_special=False, parse_special=part.special)
                found += ids.tolist()
            return found

        prompts = InfillPrompts(structs.replace(self.info, fim=FIM), tokenize, lambda _: None)
        files = [FileExtract(text="x = 1\n" * 4, filename="a.py")] if extra else None
        body = InfillBody(input_prefix=SOURCE[:at], input_suffix=SOURCE[at:], input_extra=files, n_predict=8)
        return prompts.of_parts(body, SETTINGS)

    def cold(self, asks: Iterable[Ask]) -> list[list[tuple[int, float]]]:
        """The tokens of each reply, one request after the other, without a cache.

        Each with how much more likely it was than any other one, as a difference of logarithms.
        """

        async def run() -> list[list[tuple[int, float]]]:
            async with running(self._cold) as engine:
                for i, ask in enumerate(asks):
                    await engine.submit(
                        str(i), ask.parts, **ask.fields | {"cache_prompt": False, "sampling": SCORED}
                    )
                return [replied(engine, str(i)) for i in range(len(engine.ends))]

        return asyncio.run(run())

    def end(self) -> None:
        self.server.end()
        self._cold.end()


def replied(engine: Harness, name: str) -> list[tuple[int, float]]:
    found = []
    for event in engine.events[name]:
        for row in (event.probs or ()) if isinstance(event, Output | Finished) else ():
            first, second = (each.value for each in row.top)
            assert first is not None
            assert second is not None
            found.append((row.token, first - second))
    return found


@dataclass(frozen=True)
class Ask:
    """A request: its prompt and fields, the turns of the loop before it, and milliseconds until it is cancelled."""

    parts: tuple[PromptPart, ...]
    adapters: Adapters
    fields: dict[str, Any]
    pause: int
    patience: int | None


class Workload:
    """Requests of one seed, in two runs of a server."""

    def __init__(self, model: Model, folder: Path, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._model, self._folder, self._chance = model, folder / str(seed), random.Random(seed)

    def run(self) -> None:
        chance, model = self._chance, self._model
        runs = [[self._ask() for _ in range(chance.randint(8, 12))] for _ in range(2)]
        size = model.info.segment_size
        ram = size.of(64) * chance.choice((4, 1000)) if size is not None else 0
        for asks in runs:
            replies = asyncio.run(self._warm(asks, ram))
            for cold, (tokens, end) in zip(model.cold(asks), replies, strict=True):
                assert isinstance(end, Finished | Cancelled), end
                assert len(tokens) == len(cold) or isinstance(end, Cancelled)
                first = next((each for each in zip(tokens, cold, strict=False) if each[0] != each[1][0]), None)
                assert first is None or first[1][1] < MAX_ROUNDED, first
                self.counts["rounded"] += first is not None
                self.counts["replies"] += bool(tokens)

    def _ask(self) -> Ask:
        chance, model = self._chance, self._model
        kind = chance.choice(("text", "image", "image", "infill", "shift"))
        parts: list[PromptPart] = [TextPart(chance.choice(HEADS))]
        fields: dict[str, Any] = {"max_tokens": 8}
        if kind == "shift":
            parts = [TextPart(HEADS[-1] * 4)]
            shift = ContextShift(model.can_shift, chance.choice((0, 3, 30, -1)), chance.choice((0, 50)))
            fields = {"max_tokens": 160, "shift": shift}
        if kind == "infill":
            parts = [*model.infill(chance.choice((40, 60, 64, 66, 120)), chance.random() < 0.3)]
            self.counts["infill"] += isinstance(parts[0], TokensPart)
        for _ in range(chance.choice((1, 1, 2)) if kind == "image" else 0):
            parts += [model.image(chance.randint(1, 2)), TextPart(chance.choice(PIECES))]
            self.counts["images"] += 1
        if kind != "infill":
            parts += [TextPart("".join(chance.choices(PIECES, k=chance.randint(1, 4))))]
        adapters = applied(model.info.adapters, chance.choice(SCALES))
        self.counts["adapters"] += bool(adapters)
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        self.counts["invoked"] += (
            adapters[-1:] != () and adapters[-1].id == 2 and any(INVOKED in each for each in texts)
        )
        fields |= {
            "sampling": GREEDY,
            "adapters": adapters,
            "cache_prompt": chance.random() < 0.9,
        }
        patience = chance.randint(1, 60) if chance.random() < 0.1 else None
        return Ask(tuple(parts), adapters, fields, chance.choice((0, 0, 50, 200)), patience)

    async def _warm(self, asks: list[Ask], ram: int) -> list[tuple[list[int], object]]:
        store = DiskStore(self._folder)
        store.open(KEY, 10**9)
        kept = {"ram_bytes": ram, "offload_after": 1, "checkpoint_bytes": 10**9, "checkpoints_on_path": 8}
        try:
            async with running(self._model.server, disk=store, debug_invariants=True, **kept) as engine:
                await asyncio.gather(*(self._send(engine, i, ask) for i, ask in enumerate(asks)))
                state = await engine.ask(InspectEngine())
                self.counts["shifts"] += state.cache.context_shifts
                self.counts["evicted"] += state.cache.evicted_tokens
                return [(engine.tokens(str(i)), engine.ends[str(i)].result()) for i in range(len(asks))]
        finally:
            store.close()

    async def _send(self, engine: Harness, i: int, ask: Ask) -> None:
        for _ in range(ask.pause):
            await asyncio.sleep(0.001)
        end = engine.submit(str(i), ask.parts, **ask.fields)
        if ask.patience is not None:
            await asyncio.sleep(ask.patience / 1000)
            engine.cancel(str(i))
        ended = await end
        self.counts["cancelled"] += isinstance(ended, Cancelled)
        if isinstance(ended, Finished):
            progress = ended.progress
            self.counts["reused"] += progress.n_cached > 0
            self.counts["loaded"] += progress.n_loaded > 0
            self.counts["read"] += progress.n_read > 0


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in MODELS]
)
def test_texts_are_those_of_cold_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)
    model = Model(name, tmp_path)
    try:
        expected = *EVENTS, *LONG_EVENTS, *(("shifts",) if model.can_shift else ())
        counts = run_workloads(partial(Workload, model, tmp_path), N_WORKLOADS, expected)
        assert counts["rounded"] < MAX_ROUNDED_SHARE * counts["replies"], counts
    finally:
        model.end()
