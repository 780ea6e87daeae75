"""Random conversations of more than a segment on the embedded model: KV and text are those of a cold run.

Sessions are continued, edited, regenerated and asked side by side; idle slots are saved, restored and erased; the
pool is too small for all, so that segments go to RAM and disk, where a second engine finds them. A seed repeats it.
The KV of each prompt is compared row by row: two rows that changed places change few of the texts.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bench.demo.corpus import held_out
from llamaslot.app.model_files import resolve_model
from llamaslot.backend.disk import DiskStore, SlotFiles
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Decoded, Draws, Run
from llamaslot.base.commands import SlotAction, TextPart, TokensPart
from llamaslot.base.events import Finished, Progress
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Remove
from llamaslot.kvcache.tiers import pacing
from tests.conftest import LONG
from tests.engine.harness import GREEDY, Accepted, Harness, running
from tests.kv_rows import Rows, rows_of
from tests.noise import Noise
from tests.prompt_threads import text_request

SETTINGS = LlamaSettings(resolve_model("demo"), n_ctx=2400, n_slots=2, n_cache_seqs=2, n_threads=1)
MAX_KV_DIFFERENCE = 0.02
"""Norm of a difference by norm of a token's KV: rounding gives 0.0025, another token's KV 0.4 or more."""
N_ROUNDS = 20 if LONG else 1
N_TALKS = 3
N_TURNS = 4
MAX_TOKENS = 32
SEGMENT = 512


class Talks:
    """Conversations, what was asked in them, and what came back."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        # One each: in which order they get their replies is not for the seed to say.
        self.chances = [random.Random(chance.random()) for _ in range(N_TALKS)]
        self.short_tokens = short_tokens()
        self.dialogues = list(held_out(4 * N_TALKS, chance.randrange(10**6)))
        self.texts = [self._opening(i) for i in range(N_TALKS)]
        self.asked: list[tuple[tuple[int, ...], Sampling, list[int]]] = []
        """Token ids of each prompt, how the reply was sampled, and its tokens."""
        self.prompt_rows: list[Rows] = []
        """KV of each prompt longer than a segment when its last token was computed."""
        self.seen: Counter[str] = Counter()

    def _opening(self, i: int) -> str:
        """The first prompt of a conversation, longer than a segment."""
        text = "".join(message(m["role"], m["content"]) for d in self.dialogues[i::N_TALKS] for m in d.messages)
        return (6 * text)[: self.chance.randint(2400, 3000)] + QUESTION

    async def take_turn(self, engine: Harness, i: int) -> None:
        """Ask in a conversation; then continue it, change an earlier part of it, or leave it to be regenerated."""
        name, chance = f"{len(engine.ends)}", self.chances[i]
        sampling = self.short_tokens if name == "1" else chance.choice((GREEDY, drawn(chance), drawn(chance)))
        end = await engine.send(
            text_request(
                name,
                (TextPart(self.texts[i]),),
                sampling=sampling,
                max_tokens=MAX_TOKENS,
                session_id=f"talk {i}",
            )
        )
        assert isinstance(end, Finished), end
        accepted = engine.events[name][0]
        assert isinstance(accepted, Accepted)
        # With a BOS before it.
        text = engine.backend.vocab.detokenize(accepted.prompt_tokens).decode(errors="replace")
        assert text.endswith(self.texts[i]), (
            "bytes of a reply that are no UTF-8 came back as replacement characters"
        )
        self.asked.append((accepted.prompt_tokens, sampling, engine.tokens(name)))
        self._count(end.progress)
        self.seen["sampled"] += sampling.temperature > 0
        reply = engine.text(name)
        # At least one is continued, and one departs from a reply that has other tokens than its text.
        kinds = ("continue", "continue", "edit", "edit the reply", "regenerate")
        what = {"0": "continue", "1": "edit the reply"}.get(name) or chance.choice(kinds)
        if what == "edit":
            at = int(chance.uniform(0.5, 0.95) * len(self.texts[i]))
            self.texts[i] = self.texts[i][:at] + chance.choice(("q", " and ", "")) + self.texts[i][at + 3 :]
        if what == "edit the reply":
            reply = reply[: int(chance.uniform(0.5, 1) * len(reply))] + " no"
        if what != "regenerate":
            self.texts[i] += reply + "<|im_end|>\n" + QUESTION

    def _count(self, progress: Progress) -> None:
        self.seen[progress.session_match] += 1
        self.seen["loaded"] += progress.n_loaded > 0
        self.seen["loaded two segments"] += progress.n_loaded > SEGMENT
        self.seen["read"] += progress.n_read > 0
        self.seen["cached"] += progress.n_cached > SEGMENT

    async def act(self, engine: Harness) -> None:
        """Save the slots, take one's KV away, and load the other's or its own into it."""
        slot = self.chance.randrange(2)
        names = [f"{n}.bin" for n in range(2)]
        for n, file in enumerate(names):
            await engine.ask(SlotAction(n, "save", file))
        await engine.ask(SlotAction(slot, "erase"))
        restored = await engine.ask(SlotAction(slot, "restore", self.chance.choice(names)))
        self.seen["restored slots"] += getattr(restored, "n_tokens", 0) > SEGMENT


def keep_prompt_rows(backend: LlamaBackend, kept: list[Rows]) -> None:
    """Add the KV of each prompt longer than a segment to `kept` when its last token is computed."""
    decode = backend.decode
    ends: dict[int, int] = {}

    def decode_and_keep(runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        decoded = decode(runs, draws)
        for run in runs:
            end = run.start + len(run.tokens)
            is_reply = len(run.tokens) == 1 and ends.get(run.seq) == run.start
            if run.n_outputs and not is_reply and end > SEGMENT:
                kept.append(rows_of(backend, run.seq))
            ends[run.seq] = end if run.n_outputs else -1
        return decoded

    backend.decode = decode_and_keep  # type: ignore[method-assign]


def check_rows(talks: Talks) -> int:
    """Compare the KV of prompts with that of the same prompts computed alone; returns how many there were."""
    backend = LlamaBackend(SETTINGS)
    cold: dict[tuple[int, ...], Rows] = {}
    for ids, _, _ in talks.asked:
        for start in range(0, len(ids), SEGMENT):
            part = np.array(ids[start : start + SEGMENT], dtype=np.int32)
            backend.decode([Run(0, start, part, 0)])
        cold[ids] = rows_of(backend, 0).astype(np.float32)
        backend.change(Remove(0, 0))
    backend.close()
    for rows in talks.prompt_rows:
        differences = [relative_difference(rows, each) for ids, each in cold.items() if len(ids) == len(rows)]
        assert min(differences, default=math.inf) < MAX_KV_DIFFERENCE, differences
    return len(talks.prompt_rows)


def relative_difference(rows: Rows, cold: npt.NDArray[np.float32]) -> float:
    """The largest difference of a token's KV, by its norm."""
    distance = np.linalg.norm(rows - cold, axis=1)
    return float((distance / np.linalg.norm(cold, axis=1)).max())


def drawn(chance: random.Random) -> Sampling:
    """Sampling that gives the same tokens each time."""
    top_k = chance.choice((0, 40))
    return Sampling(temperature=1.6, top_p=1.0, min_p=0.0, top_k=top_k, seed=chance.randrange(2**31))


def short_tokens() -> Sampling:
    """Sampling of short tokens only: what it writes is tokenized otherwise when it comes back as text."""
    backend = LlamaBackend(SETTINGS)
    tokens = range(backend.info.n_vocab)
    bias = {token: -math.inf for token in tokens if len(backend.vocab.piece(token)) > 2}
    backend.close()
    return Sampling(temperature=0.0, logit_bias=bias)


QUESTION = "<|im_start|>user\nWhat did I tell you?<|im_end|>\n<|im_start|>assistant\n"


def message(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


async def converse(talks: Talks, folder: Path) -> None:
    """All turns, the second half of them on another engine."""
    (folder / "slots").mkdir(parents=True)
    for use_anchors in (False, True):
        store = DiskStore(folder)
        store.open(b"k" * 32, 2**30)
        backend = LlamaBackend(SETTINGS)
        assert backend.info.segment_size is not None
        keep_prompt_rows(backend, talks.prompt_rows)
        storing = {
            "disk": store,
            "ram_bytes": 2**30,
            "offload_after": 1,
            # With text anchors, sessions have less to add.
            "text_anchors": use_anchors,
            "snapshots": SlotFiles(
                folder / "slots", lambda: b"k" * 32, backend.info.segment_size, backend.info.n_ctx_slot
            ),
        }
        async with running(backend, debug_invariants=True, **storing) as engine:
            for slot in range(SETTINGS.n_slots):
                # The second engine begins with what the first one saved.
                await engine.ask(SlotAction(slot, "restore", f"{slot}.bin"))
            for _ in range(N_TURNS // 2):
                await asyncio.gather(*(talks.take_turn(engine, i) for i in range(N_TALKS)))
                await talks.act(engine)
        store.close()


async def cold_tokens(talks: Talks, settings: LlamaSettings = SETTINGS) -> list[list[int]]:
    """The reply to each prompt computed whole, alone."""
    async with running(LlamaBackend(settings)) as engine:
        for n, (ids, sampling, _) in enumerate(talks.asked):
            await engine.send(
                text_request(
                    f"{n}", (TokensPart(ids),), sampling=sampling, max_tokens=MAX_TOKENS, cache_prompt=False
                )
            )
        return [engine.tokens(f"{n}") for n in range(len(talks.asked))]


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


@pytest.mark.slow
def test_texts_of_sessions_are_the_cold_ones(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)
    seed = int(request.config.getoption("--hypothesis-seed"))
    print("seed", seed)
    noise = Noise(SETTINGS)
    seen: Counter[str] = Counter()
    n_asked = n_differing = n_drawn = 0
    for n in range(N_ROUNDS):
        talks = Talks(seed + n)
        asyncio.run(converse(talks, tmp_path / str(n)))
        seen += talks.seen
        seen["compared KV"] += check_rows(talks)
        cold = asyncio.run(cold_tokens(talks))
        for (ids, sampling, warm), expected in zip(talks.asked, cold, strict=True):
            n_asked += 1
            n_drawn += len(expected)
            at = first_difference(warm, expected)
            if at is None:
                assert len(warm) == len(expected)
                continue
            n_differing += 1
            assert noise.explains_draw(ids, expected[:at], sampling, warm[at], expected[at]), (ids, at)
    print(f"{n_asked} requests, {n_drawn} tokens, {n_differing} differing", seen)
    # Rounding moves a probability by about as much as a logit: by less than 1% here, and few draws are that close.
    assert n_differing <= 2 + 0.01 * n_drawn
    assert seen["compared KV"] >= n_asked - seen["diverge"], seen
    assert seen["extend"], seen
    assert seen["loaded two segments"], seen
    assert seen["read"], seen
    for each in ("diverge", "sampled", "loaded", "restored slots"):
        assert seen[each] or not LONG, f"{each} was not covered"
