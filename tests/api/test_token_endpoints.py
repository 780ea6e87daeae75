"""`/tokenize`, `/detokenize`, and counts of tokens: long texts are dropped once their client is gone, and those of
the first two delay no completion.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from llamaslot.base.tokens import Tokens
from tests.fake_backend import FakeBackend, FakeVocab

LONG = "x" * 20_000


class GatedVocab(FakeVocab):
    """Long texts wait for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.n_begun = 0

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        if len(text) >= len(LONG):
            self.n_begun += 1
            self.gate.wait(20)
            return np.zeros(3, dtype=np.int32)
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)


@pytest.fixture
async def gated(start: Any) -> Any:
    backend = FakeBackend(n_ctx=1024)
    backend.vocab = GatedVocab()
    server = await start(backend=backend)
    yield server, backend.vocab
    backend.vocab.gate.set()


async def begun(vocab: GatedVocab, n: int) -> None:
    async with asyncio.timeout(10):
        while vocab.n_begun < n:
            await asyncio.sleep(0.005)


async def test_a_completion_does_not_wait_for_long_texts(gated: Any) -> None:
    server, vocab = gated
    waiting = [asyncio.create_task(server.post("/tokenize", {"content": LONG})) for _ in range(3)]
    await begun(vocab, 1)
    async with asyncio.timeout(5):
        await server.ok("/completion", {"prompt": "Hello", "n_predict": 2, "logit_bias": [["a", 1]]})
        assert await server.ok("/tokenize", {"content": "short"}) == {"tokens": list(b"short")}
        assert await server.ok("/detokenize", {"tokens": list(b"short")}) == {"content": "short", "prompt": "short"}
    vocab.gate.set()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 3


async def test_a_long_text_whose_client_has_gone_is_not_tokenized(gated: Any) -> None:
    server, vocab = gated
    for _ in range(6):
        abandoned = [asyncio.create_task(server.post("/tokenize", {"content": LONG})) for _ in range(2)]
        await begun(vocab, 1)
        await asyncio.sleep(0.05)
        for each in abandoned:
            each.cancel()
        await asyncio.wait(abandoned)
        await asyncio.sleep(0.05)
    vocab.gate.set()
    async with asyncio.timeout(10):
        while (await server.post("/tokenize", {"content": LONG}))[0] != 200:
            await asyncio.sleep(0.01)
    assert vocab.n_begun == 2, "the first, which had begun, and the last"


async def test_many_empty_parts_are_a_long_query(gated: Any) -> None:
    server, vocab = gated
    waiting = [asyncio.create_task(server.post("/tokenize", {"content": LONG})) for _ in range(3)]
    await begun(vocab, 1)
    parts = asyncio.create_task(server.post("/tokenize", {"content": [""] * 20_000}))
    await asyncio.sleep(0.2)
    assert not parts.done(), "it waits behind the others"
    vocab.gate.set()
    assert {status for status, _ in await asyncio.gather(*waiting, parts)} == {200}


async def test_too_many_long_texts_are_refused(gated: Any) -> None:
    server, vocab = gated
    waiting = [asyncio.create_task(server.post("/tokenize", {"content": LONG})) for _ in range(4)]
    await begun(vocab, 1)
    await asyncio.sleep(0.1)
    async with (
        asyncio.timeout(5),
        server.session.post(server.url + "/tokenize", json={"content": LONG}) as response,
    ):
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
    vocab.gate.set()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 4


MESSAGES = [{"role": "user", "content": LONG}]
COUNTS = {
    "/cache/probe": {"prompt": LONG},
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses/input_tokens": {"input": LONG},
}


@pytest.fixture
async def roomy(start: Any) -> Any:
    """A server whose prompts may be long texts."""
    backend = FakeBackend(n_ctx=2 * len(LONG))
    backend.vocab = GatedVocab()
    server = await start(backend=backend)
    yield server, backend.vocab
    backend.vocab.gate.set()


@pytest.mark.slow
@pytest.mark.parametrize("path", COUNTS)
async def test_a_prompt_is_not_counted_whose_client_has_gone(roomy: Any, path: str) -> None:
    server, vocab = roomy
    abandoned = [asyncio.create_task(server.post(path, COUNTS[path])) for _ in range(3)]
    await begun(vocab, 1)
    await asyncio.sleep(0.2)
    for each in abandoned:
        each.cancel()
    await asyncio.wait(abandoned)
    await asyncio.sleep(0.1)
    vocab.gate.set()
    await server.ok("/completion", {"prompt": "Hello", "n_predict": 1})
    assert vocab.n_begun == 1, "the others had not begun"
    async with asyncio.timeout(10):
        while server.local.prompts.n_kept:
            await asyncio.sleep(0.005)
