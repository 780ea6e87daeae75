"""Any request body gets a reply of the described type and does not affect other requests."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from bench.projector_files import write_projector
from llamaslot.api.routes import ROUTES
from llamaslot.backend.disk import SlotFiles
from llamaslot.base.errors import ServerError
from llamaslot.base.model import FimTokens, RerankFormat
from tests.app.test_mmproj import WIDTH
from tests.conftest import LONG, new_seed
from tests.fake_backend import FakeBackend
from tests.fuzz.bodies import STORY, VALID, BodyFuzzer, Request
from tests.fuzz.client import send_all
from tests.fuzz.images import WITH_IMAGES
from tests.live import Server, serving

N_FAKE = 10_000 if LONG else 200
N_LIVE = 10_000
REFERENCE = {"prompt": STORY, "n_predict": 16, "temperature": 0, "ignore_eos": True}


async def test_no_body_brings_a_500_or_a_hang(start: Any, tmp_path: Path) -> None:
    backend = FakeBackend(n_ctx=512)
    backend.info = msgspec.structs.replace(backend.info, fim=FimTokens(1, 2, 3))
    assert backend.info.segment_size is not None
    store = SlotFiles(tmp_path, lambda: bytes(32), backend.info.segment_size, backend.info.n_ctx_slot)
    server = await start(backend=backend, n_predict=4, engine={"snapshots": store})
    before = (await server.ok("/completion", REFERENCE))["content"]
    seed = new_seed()
    print(f"seed {seed}")
    statuses = await send_all(server.session, server.url, BodyFuzzer(seed).requests(N_FAKE), at_once=4)
    assert statuses.total() == N_FAKE
    assert min(statuses[200], statuses[400]) > N_FAKE / 10, "neither all too wrong nor all valid"
    await server.idle()
    assert (await server.ok("/completion", REFERENCE))["content"] == before


async def test_no_image_brings_a_500_or_a_hang_or_changes_a_reply(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=512, projector=True), n_predict=4)
    for path, bodies in WITH_IMAGES.items():
        for body in bodies:
            await server.ok(path, {**body, "stream": False})
    look = {**WITH_IMAGES["/v1/chat/completions"][0], "temperature": 0}
    before = (await server.ok("/v1/chat/completions", look))["choices"]
    seed = new_seed()
    print(f"seed {seed}")
    statuses = await send_all(server.session, server.url, BodyFuzzer(seed, WITH_IMAGES).requests(N_FAKE), at_once=4)
    assert min(statuses[200], statuses[400]) > N_FAKE / 10, "neither all too wrong nor all valid"
    await server.idle()
    assert (await server.ok("/v1/chat/completions", look))["choices"] == before


@pytest.mark.parametrize("pooling", ["last", "rank"])
async def test_no_body_with_texts_to_embed_or_to_score_brings_a_500(start: Any, pooling: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=512, pooling=pooling, rerank=RerankFormat(start=(1,))))
    seed = new_seed()
    print(f"seed {seed}")
    vectors = "/v1/embeddings", "/embedding", "/api/embed", "/api/embeddings"
    paths = ("/rerank",) if pooling == "rank" else vectors
    requests = [each for each in BodyFuzzer(seed).requests(10 * N_FAKE) if each.pattern in paths]
    statuses = await send_all(server.session, server.url, requests, at_once=4)
    assert min(statuses[200], statuses[400]) > len(requests) / 10, "neither all too wrong nor all valid"
    await server.idle()


async def test_a_500_is_noticed(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ServerError("a bug")

    server = await start()
    monkeypatch.setattr("llamaslot.protocol.request_reader.checked", fail)
    request = Request("POST", "/detokenize", "/detokenize", b'{"tokens": [1]}')
    with pytest.raises(ExceptionGroup) as caught:
        await send_all(server.session, server.url, [request], at_once=1)
    assert "a bug" in str(caught.value.exceptions)


def test_requests_are_the_same_for_a_seed_and_reach_every_endpoint() -> None:
    requests = list(BodyFuzzer(5).requests(400))
    assert requests == list(BodyFuzzer(5).requests(400))
    assert requests != list(BodyFuzzer(6).requests(400))
    assert {request.pattern for request in requests} == set(VALID)
    changing = {route.handler for route in ROUTES if route.method != "GET"}
    assert changing <= {route.handler for route in ROUTES if route.path in VALID}


@pytest.mark.skipif(not LONG, reason="takes minutes")
def test_no_body_crashes_a_process_or_changes_a_reply(tmp_path: Path) -> None:
    """Beside mutated bodies, a greedy reply stays the same on the real model, and no process is started again."""
    flags = ("-c", "1024", "-np", "4", "--metrics", "--n-predict", "4", "--cache-disk", tmp_path / "cache")
    projector = write_projector(tmp_path / "mmproj.gguf", "mlp", n_embd=WIDTH)
    (tmp_path / "slots").mkdir()
    with serving(tmp_path, *flags, "--mmproj", projector, "--slot-save-path", tmp_path / "slots") as server:
        pid, before = server.process.pid, server.post("/completion", REFERENCE)["content"]
        seed = new_seed()
        print(f"seed {seed}")
        statuses = asyncio.run(_fuzz(server, seed, before))
        print(f"statuses {dict(statuses)}")
        assert statuses.total() == N_LIVE
        assert server.process.poll() is None
        assert server.process.pid == pid
        assert server.get("/health") == {"status": "ok"}
        assert _restarts(server) == 0
        assert not server.log_lines("request.crashed")
        assert server.stop() == 0


async def _fuzz(server: Server, seed: int, expected: str) -> Counter[int]:
    statuses: Counter[int] = Counter()
    fuzzer = BodyFuzzer(seed)
    async with aiohttp.ClientSession() as session:
        for _ in range(N_LIVE // 100):
            statuses += await send_all(session, server.url, fuzzer.requests(100), at_once=6)
            async with session.post(f"{server.url}/completion", json=REFERENCE) as response:
                assert (await response.json())["content"] == expected
    return statuses


def _restarts(server: Server) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    assert "# TYPE llamaslot_restarts_total counter" in lines
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("llamaslot_restarts_total"))
