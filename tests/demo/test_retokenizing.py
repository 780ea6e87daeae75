"""Sampled conversations come back as text: only new text is computed, whichever tokens their replies consist of.

The tokens of a sampled reply need not be those of its text. Without text anchors such a reply, and everything after
it, is computed again. The embedded model hardly ever samples such tokens at temperature 1, so it runs hot.
"""

from __future__ import annotations

from collections import Counter

import pytest

from bench.demo.corpus import held_out
from llamaslot.app.model_files import resolve_model
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.commands import TextPart, TokensPart
from llamaslot.base.events import Finished
from llamaslot.base.generation.sampling import Sampling
from tests.conftest import LONG
from tests.engine.harness import GREEDY, Accepted, Harness, running
from tests.noise import Noise
from tests.prompt_threads import text_request

N_CONVERSATIONS = 200 if LONG else 12
N_TURNS = 4
N_REPLY = 32
HEAT = 3.0
START, END = "<|im_start|>", "<|im_end|>"
SETTINGS = LlamaSettings(resolve_model("demo"), n_ctx=4096, n_slots=4)


def turn(content: str) -> str:
    return f"{START}user\n{content}{END}\n{START}assistant\n"


async def converse(harness: Harness, name: str, seed: int, counts: Counter[str]) -> str:
    """A conversation; counts the turns after the first by what they computed. Its text."""
    (dialogue,) = held_out(1, seed)
    said = [message["content"] for message in dialogue.messages if message["role"] == "user"]
    text, reply = "", ""
    vocab = harness.backend.vocab
    for i in range(N_TURNS):
        new = (END + "\n" if i else "") + turn(said[i % len(said)])
        text += new
        request_id = f"{name} {i}"
        sampling = Sampling(temperature=HEAT, top_k=0, top_p=1.0, min_p=0.0, seed=1000 * seed + i)
        end = await harness.submit(request_id, text, sampling=sampling, max_tokens=N_REPLY)
        assert isinstance(end, Finished)
        if i:
            # The last token of a reply is sampled and never computed.
            n_new = len(vocab.tokenize(new, add_special=False, parse_special=True)) + 1
            tokens = harness.tokens(f"{name} {i - 1}")
            has_control = any(control in reply for control in vocab.special_tokens)
            has_control |= not all(map(vocab.piece, tokens[:-1]))
            known = "only new text" if end.progress.n_prompt_computed <= n_new else "more"
            counts["a control token in the reply" if has_control and known == "more" else known] += 1
            counts["anchored"] += end.progress.n_anchored > 0
        reply = harness.text(request_id)
        text += reply
    return text


async def counted(*, anchors: bool) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    texts: list[str] = []
    for first in range(0, N_CONVERSATIONS, 25):
        async with running(LlamaBackend(SETTINGS), text_anchors=anchors) as harness:
            some = range(first, min(first + 25, N_CONVERSATIONS))
            texts += [await converse(harness, f"talk {i}", i, counts) for i in some]
    return counts, texts


@pytest.mark.slow
async def test_turns_compute_only_their_new_text() -> None:
    with_anchors, texts = await counted(anchors=True)
    without, same = await counted(anchors=False)
    n = N_CONVERSATIONS * (N_TURNS - 1)
    print(f"\n{n} turns: with anchors {dict(with_anchors)}, without {dict(without)}")
    assert with_anchors["only new text"] >= 0.99 * (n - with_anchors["a control token in the reply"])
    assert with_anchors["anchored"] > 0
    assert without["anchored"] == 0
    assert without["more"] > 0.05 * n, "no reply needs an anchor: this shows nothing"
    assert len(texts) == len(same)


@pytest.mark.slow
async def test_greedy_text_after_an_anchor_equals_that_of_the_same_tokens_computed_cold() -> None:
    noise = Noise(SETTINGS)
    n_anchored = 0
    async with running(LlamaBackend(SETTINGS)) as harness:
        for i in range(8 if not LONG else 40):
            text = await converse(harness, f"talk {i}", i, Counter()) + END + "\n" + turn("And then?")
            name, cold_name = f"warm {i}", f"cold {i}"
            warm = await harness.send(text_request(name, (TextPart(text),), sampling=GREEDY, max_tokens=16))
            assert isinstance(warm, Finished)
            (accepted,) = [event for event in harness.events[name] if isinstance(event, Accepted)]
            ids = accepted.prompt_tokens
            assert harness.backend.vocab.detokenize(ids).decode(errors="replace") == text
            n_anchored += warm.progress.n_anchored > 0
            cold = await harness.send(
                text_request(cold_name, (TokensPart(ids),), sampling=GREEDY, max_tokens=16, cache_prompt=False)
            )
            assert isinstance(cold, Finished)
            a, b = harness.tokens(name), harness.tokens(cold_name)
            differs = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            assert differs is None or noise.explains([*ids, *a[:differs]], a[differs], b[differs])
    assert n_anchored > 0
