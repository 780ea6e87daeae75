"""Beside llama-server: the same vectors and scores, up to rounding."""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench import synthetic
from tests.backend.test_vectors import with_head
from tests.live import Server, serving
from tests.real.conftest import REAL, note, path_of
from tests.real.test_llama_server import llama_server

pytestmark = pytest.mark.skipif(not REAL, reason="long: make test-real")

FLAGS = ("-np", "4", "-kvu", "-c", "8192", "-b", "1024", "-ub", "1024", "-fa", "on", "-t", "1")
"""Without `-kvu`, llama-server computes texts of several lengths in pieces, and gives the mean of the last one."""
TOLERANCE = 1e-4
"""Of numbers of vectors of length 1, if both servers compute equal steps."""
NOISE_FACTOR = 2.0
"""Times the difference of llama-server's own vectors, alone and in a batch: chunk sizes and shared prefixes change
the order of additions, and quantized weights magnify that (fact 9).
"""
HEAD = "Instruct: Given a question, find a passage of a book about the sea that answers it.\nQuery: "
WORDS = ["ship", "sea", "whale", "captain", "rope", "mast", "storm", "harbour", "salt", "anchor", "tide", "crew"]


class Pair(NamedTuple):
    """Both servers with one model."""

    name: str
    own: Server
    peer: Server
    texts: list[str]


def texts() -> list[str]:
    """Texts of 1 to about 400 words (the context of MiniLM has 512 tokens), of which half begin alike."""
    chance = random.Random(4)
    lengths = [1, 2, 3, 5, 8, 20, 50, 64, 100, 200, 400]
    return [
        (HEAD if i % 2 else "") + " ".join(chance.choices(WORDS, k=lengths[i % len(lengths)])) for i in range(24)
    ]


@pytest.fixture(
    scope="module",
    params=[("smollm2", "last"), ("smollm2", "mean"), ("smollm2", "cls"), ("minilm", "mean"), ("minilm", "cls")],
    ids=" ".join,
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both servers of embeddings."""
    folder, (model, pooling) = tmp_path_factory.mktemp("pair"), request.param
    flags = ("-m", path_of(model), *FLAGS, "--embedding", "--pooling", pooling)
    with serving(folder, *flags) as own, llama_server(folder, *flags) as peer:
        yield Pair(f"{model}, {pooling}", own, peer, texts())


@pytest.fixture(scope="module")
def rankers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both servers of scores, with random weights."""
    folder = tmp_path_factory.mktemp("rankers")
    model = with_head(synthetic.ensure("tiny", folder=folder, is_exact=True), folder / "reranker.gguf")
    # Without what rounds most, so that shared prefixes move scores by less than the tolerance.
    flags = ("-m", model, *FLAGS, "--reranking", "-fa", "off", "-ctk", "f32", "-ctv", "f32")
    with serving(folder, *flags) as own, llama_server(folder, *flags) as peer:
        yield Pair("tiny reranker", own, peer, texts())


def vectors(server: Server, body: dict[str, Any], path: str = "/v1/embeddings") -> list[Sequence[float]]:
    reply: Any = server.post(path, body)
    if path != "/v1/embeddings":
        return [row for each in reply for row in each["embedding"]]
    found = [each["embedding"] for each in reply["data"]]
    return [
        struct.unpack(f"<{len(data := base64.b64decode(each)) // 4}f", data) if isinstance(each, str) else each
        for each in found
    ]


def largest_difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_vectors_are_those_of_llama_server(pair: Pair, shared: Path) -> None:
    """Alone and without the cache they are the same; shared prefixes and batches move them no more than there."""
    cold = [vectors(pair.own, {"input": text, "cache_prompt": False})[0] for text in pair.texts]
    peer = [vectors(pair.peer, {"input": text})[0] for text in pair.texts]
    difference = largest_difference(cold, peer)
    noise = largest_difference(peer, vectors(pair.peer, {"input": pair.texts}))
    warm = [vectors(pair.own, {"input": text})[0] for text in pair.texts]
    again, together = vectors(pair.own, {"input": pair.texts}), vectors(pair.own, {"input": pair.texts[::-1]})[::-1]
    own_noise = max(largest_difference(cold, each) for each in (warm, again, together))
    note(shared, model=pair.name, kind="embeddings", largest_cold=difference, largest_warm=own_noise)
    note(shared, model=pair.name, kind="embeddings", largest_of_llama_server=noise)
    assert difference <= TOLERANCE
    assert own_noise <= max(NOISE_FACTOR * noise, TOLERANCE)


def test_forms_are_those_of_llama_server(pair: Pair) -> None:
    ids = pair.own.post("/tokenize", {"content": "the captain and the whale"})["tokens"]
    for given in ("one", ids, [*ids, " and more"], ["a", ids, {"prompt_string": "b"}]):
        for fields in ({}, {"encoding_format": "base64"}, {"embd_normalize": 1}, {"embd_normalize": 3}):
            for path in ("/v1/embeddings", "/embedding"):
                body = {"input": given, **fields}
                own, peer = vectors(pair.own, body, path), vectors(pair.peer, body, path)
                assert largest_difference(own, peer) <= TOLERANCE
                assert largest_difference(own, vectors(pair.own, {"input": given, **fields}, path)) <= TOLERANCE
        for p, scale in ((-1, 100.0), (0, 32760.0)):
            body = {"input": given, "embd_normalize": p}
            assert largest_difference(vectors(pair.own, body), vectors(pair.peer, body)) <= scale * TOLERANCE
    for body in ({"content": ["a", "b"]}, {"input": "a"}):
        own, peer = (server.post("/v1/embeddings", body) for server in (pair.own, pair.peer))
        if isinstance(own, list):
            assert [set(each) for each in own] == [set(each) for each in peer]
        else:
            assert set(own) == set(peer)
            assert set(own["data"][0]) == set(peer["data"][0])
            assert own["usage"].items() >= peer["usage"].items()


def test_vectors_of_tokens_are_those_of_llama_server(tmp_path: Path) -> None:
    flags = ("-m", path_of("smollm2"), *FLAGS, "--embedding")
    with serving(tmp_path, *flags) as own, llama_server(tmp_path, *flags) as peer:
        for body in ({"input": text} for text in texts()[:8]):
            one, other = (vectors(server, body, "/embedding") for server in (own, peer))
            assert len(one) == len(other)
            assert largest_difference(one, other) <= TOLERANCE * max(abs(x) for row in other for x in row)


def test_scores_are_those_of_llama_server(rankers: Pair, shared: Path) -> None:
    documents = [each[len(HEAD) * (i % 2) :][:400] for i, each in enumerate(texts())]
    alone = [
        [
            server.post("/rerank", {"query": HEAD, "documents": [each], "cache_prompt": False})["results"][0]
            for each in documents
        ]
        for server in (rankers.own, rankers.peer)
    ]
    cold, peer = ([each["relevance_score"] for each in found] for found in alone)
    found = rankers.peer.post("/rerank", {"query": HEAD, "documents": documents})["results"]
    noise = max(abs(peer[each["index"]] - each["relevance_score"]) for each in found)
    difference = max(abs(a - b) for a, b in zip(cold, peer, strict=True))
    note(shared, model=rankers.name, kind="scores", largest_cold=difference, largest_of_llama_server=noise)
    assert difference <= TOLERANCE
    for query in ("who is the captain", HEAD * 2):
        for body in ({"documents": documents}, {"texts": documents[:9]}, {"documents": documents, "top_n": 5}):
            own, peer = (server.post("/rerank", {"query": query, **body}) for server in (rankers.own, rankers.peer))
            key = "score" if "texts" in body else "relevance_score"
            one, other = (each if "texts" in body else each["results"] for each in (own, peer))
            scores = [{each["index"]: each[key] for each in found} for found in (one, other)]
            # Equal scores may come in any order.
            common = scores[0].keys() & scores[1].keys()
            assert len(common) >= len(scores[0]) - 1
            difference = max(abs(scores[0][i] - scores[1][i]) for i in common)
            note(shared, model=rankers.name, kind="scores", largest_warm=difference)
            assert difference <= TOLERANCE
            assert len(one) == len(other)
            if "texts" not in body:
                assert own["usage"].items() >= peer["usage"].items()
