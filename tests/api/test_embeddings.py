"""Embeddings and reranking over HTTP: forms of bodies and replies, errors, limits; on the fake model."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from structlog.testing import capture_logs

from bench.encoders import CLS, tiny_bert
from llamaslot.api import embeddings
from llamaslot.api.bodies import encode
from llamaslot.base.model import RerankFormat
from llamaslot.prompts import tokenizer
from llamaslot.service.live_request import MAX_INPUTS_SENT
from tests.backend.test_vectors import loaded
from tests.fake_backend import BOS, EOS, N_SCORES, N_VECTOR, FakeBackend, FakeVocab, cold_vector

HEAD = "Represent this sentence for searching relevant passages in a library of books about ships and the sea: "
EMBEDDINGS = ("/v1/embeddings", "/embedding", "/embeddings")
RERANK = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")
TEXTS = RerankFormat(template="Q: {query} D: {document}")
TOKENS = RerankFormat(start=(BOS,), middle=(EOS,), end=(EOS,))


def embedder(**fields: Any) -> FakeBackend:
    return FakeBackend(pooling="last", **{"n_ctx": 1024, **fields})


def reranker(form: RerankFormat = TOKENS, **fields: Any) -> FakeBackend:
    return FakeBackend(pooling="rank", rerank=form, **{"n_ctx": 1024, **fields})


def ids(text: str) -> list[int]:
    return [BOS, *text.encode()]


def unit(numbers: list[float], p: int = 2) -> list[float]:
    norm = sum(abs(number) ** p for number in numbers) ** (1 / p)
    return [number / norm for number in numbers]


def vector(text: str) -> Any:
    """The vector of a text as a client sees it."""
    return pytest.approx(unit(cold_vector(ids(text))), abs=1e-6)


@pytest.fixture
async def server(start: Any) -> Any:
    return await start(backend=embedder(), alias="embedder")


@pytest.fixture
async def ranker(start: Any) -> Any:
    return await start(backend=reranker(), alias="ranker")


async def test_openai_s_form(server: Any) -> None:
    reply = await server.ok("/v1/embeddings", {"input": ["one", "two"], "model": "any", "user": "me"})
    assert reply == {
        "object": "list",
        "model": "any",
        "usage": {"prompt_tokens": 8, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0}},
        "data": [
            {"object": "embedding", "index": 0, "embedding": vector("one")},
            {"object": "embedding", "index": 1, "embedding": vector("two")},
        ],
    }
    again = await server.ok("/v1/embeddings", {"input": "two"})
    assert (again["model"], again["data"]) == ("embedder", [{**reply["data"][1], "index": 0}])
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("path", EMBEDDINGS)
async def test_llama_server_s_form(server: Any, path: str) -> None:
    expected = [{"index": 0, "embedding": [vector("one")]}, {"index": 1, "embedding": [vector("two")]}]
    body = {"content": ["one", "two"], "encoding_format": "base64"}
    assert await server.ok(path, body) == expected
    if path != "/v1/embeddings":
        assert await server.ok(path, {"input": ["one", "two"]}) == expected


async def test_base64_has_the_same_numbers(server: Any) -> None:
    plain = (await server.ok("/v1/embeddings", {"input": "one", "encoding_format": "float"}))["data"][0]
    coded = (await server.ok("/v1/embeddings", {"input": "one", "encoding_format": "base64"}))["data"][0]
    assert coded["encoding_format"] == "base64"
    assert list(struct.unpack(f"<{N_VECTOR}f", base64.b64decode(coded["embedding"]))) == plain["embedding"]


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("", [[BOS]]),
        ("text", [ids("text")]),
        ([12, 34], [[12, 34]]),
        ([12, "ab", 34], [[12, *b"ab", 34]]),
        (["a", "b"], [ids("a"), ids("b")]),
        (["a", [12, 34]], [ids("a"), [12, 34]]),
        ([["a", 12], ["b"]], [[*ids("a"), 12], ids("b")]),
        ({"prompt_string": "a"}, [ids("a")]),
        ({"prompt_string": [12, "a"]}, [[12, *b"a"]]),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, [ids("ab")]),
        (["a", {"prompt_string": "b"}, {"content": [{"type": "text"}]}], [ids("a"), ids("b"), [BOS]]),
        ("a</s>b", [[*ids("a"), EOS, *b"b"]]),
    ],
    ids=str,
)
async def test_inputs(server: Any, given: Any, tokens: list[list[int]]) -> None:
    reply = await server.ok("/v1/embeddings", {"input": given, "embd_normalize": -1})
    assert [each["embedding"] for each in reply["data"]] == [cold_vector(each) for each in tokens]
    assert reply["usage"]["prompt_tokens"] == sum(map(len, tokens))


async def test_vectors_are_normalized_as_asked_and_cut_before(start: Any) -> None:
    server = await start(backend=embedder(), embd_normalize=1)
    raw = cold_vector(ids("x"))
    for fields, expected in (
        ({}, unit(raw, 1)),
        ({"embd_normalize": 2}, unit(raw)),
        ({"embd_normalize": -1}, raw),
        ({"embd_normalize": 0}, [32760 * each / max(map(abs, raw)) for each in raw]),
        ({"embd_normalize": 3}, unit(raw, 3)),
        ({"embd_normalize": 2, "dimensions": 2}, unit(raw[:2])),
        ({"embd_normalize": 2, "dimensions": N_VECTOR}, unit(raw)),
    ):
        reply = await server.ok("/v1/embeddings", {"input": "x", **fields})
        assert reply["data"][0]["embedding"] == pytest.approx(expected, rel=1e-5), fields


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, '"input" or "content" must be provided'),
        ({"input": []}, '"input" must not be empty'),
        ({"input": [[]]}, "input[0]"),
        ({"input": "x", "encoding_format": "hex"}, "Can be either float or base64"),
        ({"input": "x", "dimensions": N_VECTOR + 1}, "'dimensions' must be at most 6"),
        ({"input": "x", "dimensions": 0}, "'dimensions'"),
        ({"input": "x", "embd_normalize": -2}, "'embd_normalize'"),
        ({"input": [9999]}, "the vocabulary ends at"),
        ({"input": [[12, 9999]]}, "the vocabulary ends at"),
        ({"input": [[12, [13]]]}, "input"),
        ({"input": {"content": "text"}}, "content"),
        ({"input": {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}}, "type text only"),
        ({"input": {"prompt_string": "a", "multimodal_data": ["x"]}}, "only text is"),
        ({"input": {"text": "a"}}, "prompt_string"),
        ({"input": "x" * 2000}, "context size"),
        ({"input": ["x"] * 2049}, "the limit is 2048"),
        ({"input": "x", "model": "\ud800"}, "not valid JSON"),
    ],
    ids=str,
)
async def test_wrong_bodies_are_refused(server: Any, body: dict[str, Any], said: str) -> None:
    for path in ("/v1/embeddings", "/embedding"):
        status, reply = await server.post(path, body)
        assert status == 400, reply
        assert said in reply["error"]["message"]


async def test_no_token_at_all_is_refused(start: Any) -> None:
    class WithoutBos(FakeVocab):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Any:
            return super().tokenize(text, add_special=False, parse_special=parse_special)

    server = await start(backend=embedder(vocab=WithoutBos()))
    status, reply = await server.post("/v1/embeddings", {"input": ["a", ""]})
    message = "'input[1]': Input content cannot be empty"
    assert (status, reply["error"]["message"], reply["error"]["param"]) == (400, message, "input[1]")
    status, reply = await server.post("/v1/embeddings", {"input": ""})
    assert (status, reply["error"]["message"]) == (400, "Input content cannot be empty")


async def test_one_input_that_is_too_long_fails_the_request_before_any_is_computed(server: Any) -> None:
    status, reply = await server.post("/v1/embeddings", {"input": ["fits", "x" * 1023]})
    assert (status, reply["error"]["type"]) == (400, "exceed_context_size_error")
    assert (reply["error"]["n_prompt_tokens"], reply["error"]["n_ctx"]) == (1024, 1024)
    assert reply["error"]["param"] == "input[1]"
    assert reply["error"]["message"].startswith("'input[1]': the request (1024 tokens) exceeds")
    await server.ok("/v1/embeddings", {"input": "x" * 1022})
    assert server.local.engine._backend.n_decoded == 1023


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ["a", "b", [9999]]}, "input[2]"),
        ({"content": ["a", {"prompt_string": [9999]}]}, "content[1].prompt_string"),
        ({"content": ["a", "x" * 1023]}, "content[1]"),
        # Refused before it is tokenized.
        ({"input": ["a", "b", [1] * 1025]}, "input[2]"),
        ({"input": ["x" * 1023]}, None),
    ],
    ids=str,
)
async def test_errors_name_the_input_that_is_wrong(server: Any, body: dict[str, Any], param: str | None) -> None:
    status, reply = await server.post("/v1/embeddings", body)
    assert (status, reply["error"].get("param")) == (400, param)
    assert f"'{param}'" in reply["error"]["message"] or param is None


@pytest.mark.parametrize("field", ["documents", "texts"])
async def test_errors_name_the_document_that_is_too_long(ranker: Any, field: str) -> None:
    for text in ("x" * 1023, "x" * 9999):
        status, reply = await ranker.post("/rerank", {"query": "a", field: ["a", text, "b"]})
        assert (status, reply["error"]["param"]) == (400, f"{field}[1]")


async def test_the_openai_client(server: Any) -> None:
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)
    got = await client.embeddings.create(model="any", input=["one", "two"])
    assert [each.embedding for each in got.data] == [vector("one"), vector("two")]
    short = await client.embeddings.create(model="any", input="one", dimensions=2, encoding_format="float")
    assert len(short.data[0].embedding) == 2
    await client.close()


async def test_many_inputs_take_one_place_and_one_line_of_the_log(start: Any) -> None:
    server = await start(backend=embedder(n_slots=2, n_ctx=4096), max_queue=0, max_queue_per_client=0)
    texts = [f"{HEAD}{i}" for i in range(300)]
    with capture_logs() as logs:
        reply = await server.ok("/v1/embeddings", {"input": texts})
        assert [each["embedding"] for each in reply["data"]] == [vector(text) for text in texts]
        await server.idle()
    (done,) = [each for each in logs if each["event"] == "request.done"]
    n_tokens = sum(len(text) + 1 for text in texts)
    assert (done["prompt_tokens"], done["finish_reason"]) == (n_tokens, "limit")
    assert done["prompt_tokens"] - done["prefix_cache_tokens"] == server.local.engine._backend.n_decoded
    assert done["prefix_cache_tokens"] == reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert done["prefix_cache_tokens"] > 290 * len(HEAD)
    assert not done["request_id"].rpartition("-")[2].isdecimal()
    assert server.service.capacity.n_in_flight == 0
    # The places are free again.
    assert len(await asyncio.gather(*(server.ok("/v1/embeddings", {"input": ["a", "b"]}) for _ in range(2)))) == 2


async def test_a_full_server_refuses(start: Any) -> None:
    server = await start(backend=embedder(n_slots=1), max_queue=0)
    server.local.engine.scheduler.admission.is_held = True
    first = asyncio.create_task(server.post("/v1/embeddings", {"input": ["a", "b", "c"]}))
    await server.state_where(lambda state: state.n_queued == 3)
    assert (await server.post("/v1/embeddings", {"input": "a"}))[0] == 429
    server.local.engine.scheduler.admission.is_held = False
    server.local.engine._wake.set()
    assert (await first)[0] == 200


async def test_a_client_that_leaves_ends_all_of_its_inputs(start: Any) -> None:
    server = await start(backend=embedder(n_slots=1))
    server.local.engine.scheduler.admission.is_held = True
    with capture_logs() as logs:
        task = asyncio.create_task(server.post("/v1/embeddings", {"input": ["a", "b", "c"]}))
        await server.state_where(lambda state: state.n_queued == 3)
        task.cancel()
        await server.state_where(lambda state: state.n_queued == 0)
    assert [each["finish_reason"] for each in logs if each["event"] == "request.done"] == ["cancelled"]
    assert server.service.capacity.n_in_flight == 0


async def test_an_input_that_cannot_be_computed_fails_the_request(start: Any) -> None:
    backend = embedder()
    backend.poison = {ord("!")}
    server = await start(backend=backend)
    with capture_logs() as logs:
        status, reply = await server.post("/v1/embeddings", {"input": ["a", "b!", "c"]})
        assert (status, reply["error"]["type"]) == (500, "server_error")
        await server.idle()
    assert [each["finish_reason"] for each in logs if each["event"] == "request.done"] == ["error"]


async def test_salts_keep_prefixes_apart(server: Any) -> None:
    for body, n_cached in (
        ({"input": HEAD}, 0),
        ({"input": HEAD}, len(HEAD)),
        ({"input": HEAD, "cache_salt": "team"}, 0),
        ({"input": HEAD, "cache_prompt": False}, 0),
    ):
        reply = await server.ok("/v1/embeddings", body)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == n_cached
        assert reply["data"][0]["embedding"] == vector(HEAD)


async def test_an_instruction_can_be_warmed(server: Any) -> None:
    warmed = await server.ok("/cache/warm", {"prompt": HEAD})
    assert warmed["tokens"] == len(HEAD) + 1
    reply = await server.ok("/v1/embeddings", {"input": HEAD + "x"})
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == len(HEAD) + 1


async def test_scores(ranker: Any) -> None:
    body = {"query": "a?", "documents": ["one", "two", "three"], "model": "any"}
    scores = {
        i: cold_vector([BOS, *b"a?", EOS, *text.encode(), EOS], N_SCORES)[0]
        for i, text in enumerate(body["documents"])
    }
    order = sorted(scores, key=lambda i: -scores[i])
    results = [{"index": i, "relevance_score": scores[i]} for i in order]
    n_tokens = 3 * 5 + len("onetwothree")
    for path in RERANK:
        reply = await ranker.ok(path, body)
        assert reply.pop("usage") == {
            "prompt_tokens": n_tokens,
            "total_tokens": n_tokens,
            "prompt_tokens_details": {"cached_tokens": 0 if path == RERANK[0] else n_tokens - 3},
        }
        assert reply == {"object": "list", "model": "any", "results": results}
        tei = await ranker.ok(path, {"query": "a?", "texts": body["documents"], "return_text": True})
        assert tei == [{"index": i, "score": scores[i], "text": body["documents"][i]} for i in order]
        plain = await ranker.ok(path, {"query": "a?", "texts": body["documents"]})
        assert plain == [{"index": i, "score": scores[i]} for i in order]
        for top_n, n in ((0, 0), (2, 2), (3, 3), (99, 3)):
            assert (await ranker.ok(path, {**body, "top_n": top_n}))["results"] == results[:n]
            some = await ranker.ok(path, {"query": "a?", "texts": body["documents"], "top_n": top_n})
            assert [each["index"] for each in some] == order[:n]


async def test_documents_of_one_score_stay_in_order(ranker: Any) -> None:
    reply = await ranker.ok("/rerank", {"query": "a", "documents": ["same"] * 5})
    assert [each["index"] for each in reply["results"]] == [0, 1, 2, 3, 4]


async def test_a_template_of_the_file_is_filled_in_once(start: Any) -> None:
    server = await start(backend=reranker(TEXTS))
    reply = await server.ok("/rerank", {"query": "{document}", "documents": ["</s>x"]})
    tokens = [*b"Q: {document} D: ", EOS, *b"x"]
    assert reply["results"][0]["relevance_score"] == cold_vector(tokens, N_SCORES)[0]


async def test_without_a_template_control_tokens_in_documents_are_text(ranker: Any) -> None:
    reply = await ranker.ok("/rerank", {"query": "</s>", "documents": ["</s>"]})
    tokens = [BOS, *b"</s>", EOS, *b"</s>", EOS]
    assert reply["results"][0]["relevance_score"] == cold_vector(tokens, N_SCORES)[0]


async def test_the_query_is_computed_once_for_all_documents(start: Any) -> None:
    server = await start(backend=reranker(n_slots=4, n_ubatch=64))
    documents = [f"{chr(65 + i)} is one of them" for i in range(20)]
    usage = (await server.ok("/rerank", {"query": HEAD, "documents": documents}))["usage"]
    n_computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert n_computed == len(HEAD) + 2 + sum(len(each) + 1 for each in documents)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"documents": ["a"]}, '"query" must be provided'),
        ({"query": 1, "documents": ["a"]}, "'query'"),
        ({"query": "a"}, '"documents" must be a non-empty string array'),
        ({"query": "a", "documents": []}, '"documents" must be a non-empty string array'),
        ({"query": "a", "documents": None}, '"documents" must be a non-empty string array'),
        ({"query": "a", "documents": 123}, "'documents'"),
        ({"query": "a", "documents": [1, 2]}, "'documents[...]'"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "'top_n'"),
        ({"query": "a", "documents": ["a"] * 2049}, "the limit is 2048"),
        ({"query": "a", "documents": ["a", "x" * 2000]}, "context size"),
    ],
    ids=str,
)
async def test_wrong_rerank_bodies_are_refused(ranker: Any, body: dict[str, Any], said: str) -> None:
    status, reply = await ranker.post("/v1/rerank", body)
    assert status == 400, reply
    assert said.removesuffix("[...]'") in reply["error"]["message"]


GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/completion": {"prompt": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/responses": {"input": "Hi"},
}


async def refused_for_good(server: Any, path: str, body: dict[str, Any], said: str) -> None:
    async with server.session.post(server.url + path, json=body) as response:
        reply = await response.json()
        assert response.status == 501, (path, reply)
        if path != "/v1/messages":
            assert response.headers["X-Should-Retry"] == "false"
        assert said in reply["error"]["message"]


async def test_a_server_does_only_what_it_was_started_for(start: Any) -> None:
    text, vectors, ranks = await start(), await start(backend=embedder()), await start(backend=reranker())
    rerank = {"query": "a", "documents": ["b"]}
    for path in EMBEDDINGS:
        await refused_for_good(text, path, {"input": "x"}, "start it with --embeddings")
        await refused_for_good(ranks, path, {"input": "x"}, "scores only")
        # Whatever the body is: it is not read.
        await refused_for_good(text, path, {}, "start it with --embeddings")
    for path in RERANK:
        await refused_for_good(text, path, rerank, "start it with --reranking")
        await refused_for_good(vectors, path, rerank, "start it with --reranking")
    for path, body in GENERATING.items():
        await refused_for_good(vectors, path, body, "start it without --embeddings")
        await refused_for_good(ranks, path, body, "start it without --reranking")


async def test_the_server_says_what_it_does(start: Any) -> None:
    for backend, pooling, capability in (
        (FakeBackend(), "", "completion"),
        (embedder(), "last", "embedding"),
        (reranker(), "rank", "rerank"),
    ):
        server = await start(backend=backend)
        assert (await server.get("/props"))[1]["pooling"] == pooling
        assert (await server.get("/v1/models"))[1]["models"][0]["capabilities"] == [capability]


async def test_a_reply_of_many_vectors_is_sent_whole(start: Any) -> None:
    server = await start(backend=embedder(n_ctx=4096, n_ubatch=128))
    scheduler = server.local.engine.scheduler
    plan, n_waiting = scheduler.plan, []

    def planned(now: float) -> Any:
        n_waiting.append(len(scheduler.queue))
        return plan(now)

    scheduler.plan = planned
    texts = [f"text {i}" for i in range(2048)]
    reply = await server.ok("/v1/embeddings", {"input": texts})
    assert 200 < max(n_waiting) <= MAX_INPUTS_SENT, "each plan goes through all of them"
    assert [each["index"] for each in reply["data"]] == list(range(2048))
    assert all(math.isclose(sum(x * x for x in each["embedding"]), 1, rel_tol=1e-5) for each in reply["data"])
    assert reply["data"][2047]["embedding"] == vector("text 2047")


async def test_ollama_s_form(start: Any) -> None:
    server = await start(backend=embedder(), alias="embedder", embd_normalize=-1)
    reply = await server.ok("/api/embed", {"model": "any", "input": ["one", "two"], "options": {"num_ctx": 9}})
    durations = [reply.pop(name) for name in ("load_duration", "total_duration")]
    assert 0 < durations[0] < durations[1]
    expected = [vector("one"), vector("two")]
    assert reply == {"model": "any", "embeddings": expected, "prompt_eval_count": 8}
    raw = cold_vector(ids("one"))
    for dimensions, numbers in ((2, raw[:2]), (0, raw), (-1, raw), (99, raw), (None, raw)):
        reply = await server.ok("/api/embed", {"input": "one", "dimensions": dimensions})
        assert reply["embeddings"] == [pytest.approx(unit(numbers), abs=1e-6)]
    assert reply["model"] == "embedder:latest"
    # The older form is not normalized.
    assert await server.ok("/api/embeddings", {"prompt": "one"}) == {"embedding": pytest.approx(raw, rel=1e-5)}
    assert (await server.get("/api/tags"))[1]["models"][0]["capabilities"] == ["embedding"]
    for options, n_computed in (({}, len(HEAD)), ({"cache_prompt": False}, len(HEAD) + 1), ({}, 1)):
        before = server.local.engine._backend.n_decoded
        await server.ok("/api/embed", {"input": HEAD, "options": options})
        assert server.local.engine._backend.n_decoded - before == n_computed


@pytest.mark.parametrize("body", [{}, {"input": ""}, {"input": []}, {"input": None, "truncate": True}])
async def test_without_inputs_ollama_s_form_has_no_vectors(server: Any, body: dict[str, Any]) -> None:
    assert await server.ok("/api/embed", body) == {"model": "embedder:latest", "embeddings": []}
    for prompt in ({}, {"prompt": ""}):
        assert await server.ok("/api/embeddings", prompt) == {"embedding": []}
    assert server.service.capacity.n_in_flight == 0


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/api/embed", {"input": 5}, "'input'"),
        ("/api/embed", {"input": [5]}, "'input"),
        ("/api/embed", {"input": ["x"] * 2049}, "the limit is 2048"),
        ("/api/embed", {"input": "x", "options": {"cache_salt": 5}}, "'options.cache_salt'"),
        ("/api/embed", {"input": "x" * 2000, "truncate": False}, "context size"),
        ("/api/embeddings", {"prompt": ["x"]}, "'prompt'"),
        ("/api/embeddings", {"prompt": "x" * 2000}, "context size"),
    ],
    ids=str,
)
async def test_wrong_bodies_in_ollama_s_form_are_refused(server: Any, path: str, body: Any, said: str) -> None:
    status, reply = await server.post(path, body)
    assert (status, reply.keys()) == (400, {"error"})
    assert said in reply["error"]


class BertVocab(FakeVocab):
    """Adds a token after a text too."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Any:
        tokens = super().tokenize(text, add_special=add_special, parse_special=parse_special)
        return np.append(tokens, np.int32(EOS)) if add_special else tokens


@pytest.mark.parametrize("is_whole", [False, True])
async def test_ollama_s_form_cuts_what_is_too_long(start: Any, is_whole: bool) -> None:
    n = 64 if is_whole else 63
    fields = {"n_ctx": 64, "n_ubatch": 64, "n_spare_rows": 64, "attends_later": is_whole}
    for vocab in (FakeVocab(), BertVocab()):
        server = await start(backend=embedder(vocab=vocab, **fields))
        for text in ("x" * n, "x" * 50_000):
            tokens = ids(text)
            end = [EOS] if isinstance(vocab, BertVocab) else []
            cut = [*tokens[: n - len(end)], *end]
            reply = await server.ok("/api/embed", {"input": [text, "short"]})
            assert reply["embeddings"][0] == pytest.approx(unit(cold_vector(cut)), abs=1e-6)
            assert reply["embeddings"][1] == pytest.approx(unit(cold_vector([*ids("short"), *end])), abs=1e-6)
            assert reply["prompt_eval_count"] == n + len(ids("short")) + len(end)
            status, reply = await server.post("/api/embed", {"input": text, "truncate": False})
            assert status == 400


async def test_a_model_without_memory(start: Any, tmp_path: Path) -> None:
    """Over HTTP, with a real BERT: as many inputs in a step as fit, and none depends on the others."""
    backend = loaded(tiny_bert(tmp_path / "bert.gguf"), n_slots=4, n_ubatch=256)
    server = await start(backend=backend)
    texts = [f"where is the whale {i}? " * (1 + i % 9) for i in range(40)]
    together = await server.ok("/v1/embeddings", {"input": texts})
    for text, each in zip(texts, together["data"], strict=True):
        alone = (await server.ok("/v1/embeddings", {"input": text}))["data"][0]["embedding"]
        assert each["embedding"] == pytest.approx(alone, abs=1e-4)
        assert math.isclose(sum(x * x for x in alone), 1, rel_tol=1e-5)
    assert together["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    rows = (await server.ok("/embedding", {"content": ["the sea", ""]}))[1]["embedding"]
    assert (len(rows), len(rows[0])) == (1, 64)
    status, reply = await server.post("/v1/embeddings", {"input": "a " * 127})
    assert (status, reply["error"]["type"]) == (400, "exceed_context_size_error")
    assert (reply["error"]["n_prompt_tokens"], reply["error"]["n_ctx"]) == (129, 128)
    assert reply["error"]["message"].startswith("input (129 tokens) is too large to process")
    for text, n_tokens in (("a " * 500, 128), ("a " * 128 + "b" * 500, 128), ("a" + " " * 2000 + "b", 4)):
        cut = await server.ok("/api/embed", {"input": text})
        assert cut["prompt_eval_count"] == n_tokens
    assert (await server.post("/cache/warm", {"prompt": "the sea"}))[0] == 501
    assert (await server.get("/slots"))[0] == (await server.get("/cache"))[0] == 200
    assert (await server.ok("/tokenize", {"content": "the sea", "add_special": True}))["tokens"][0] == CLS


async def test_a_text_that_is_far_too_long_is_not_tokenized(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "_MAX_CHARACTERS", 1000)
    backend = loaded(tiny_bert(tmp_path / "bert.gguf"), n_ubatch=256)
    server = await start(backend=backend)
    tokenize, n_most = backend.vocab.tokenize, 0

    def watched(text: str, **fields: bool) -> Any:
        nonlocal n_most
        n_most = max(n_most, len(text))
        return tokenize(text, **fields)

    monkeypatch.setattr(backend.vocab, "tokenize", watched)
    for text, said in (("a " * 5000, "at least 129 tokens"), ("\u4e2d" * 1001, "more than 1000 characters")):
        status, reply = await server.post("/v1/embeddings", {"input": ["a", text]})
        assert status == 400
        assert said in reply["error"]["message"]
        assert reply["error"]["param"] == "input[1]"
        assert (await server.ok("/api/embed", {"input": text}))["prompt_eval_count"] == 128
    assert 0 < n_most <= 1000


async def test_a_reranker_without_memory(start: Any, tmp_path: Path) -> None:
    server = await start(backend=loaded(tiny_bert(tmp_path / "bert.gguf", "rank", head="cls.output"), n_ubatch=256))
    documents = [f"the captain is {i} " * (i + 1) for i in range(9)]
    together = (await server.ok("/rerank", {"query": "where is the captain?", "documents": documents}))["results"]
    for each in together:
        body = {"query": "where is the captain?", "documents": [documents[each["index"]]]}
        alone = (await server.ok("/rerank", body))["results"][0]
        assert each["relevance_score"] == pytest.approx(alone["relevance_score"], abs=1e-4)
    assert [each["relevance_score"] for each in together] == sorted(
        (each["relevance_score"] for each in together), reverse=True
    )


def whole(pooling: str) -> FakeBackend:
    return FakeBackend(pooling=pooling, n_ctx=64, n_ubatch=64, n_spare_rows=64)


async def test_inputs_that_are_computed_whole(start: Any) -> None:
    server = await start(backend=whole("mean"))
    texts = [f"text {i}" for i in range(30)]
    for _ in range(2):
        reply = await server.ok("/v1/embeddings", {"input": texts})
        assert [each["embedding"] for each in reply["data"]] == [vector(text) for text in texts]
        assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    await server.ok("/v1/embeddings", {"input": "x" * 63})
    for given in ("x" * 64, "x" * 5000, [1] * 65):
        status, reply = await server.post("/v1/embeddings", {"input": ["fits", given]})
        assert (status, reply["error"]["type"]) == (400, "exceed_context_size_error")
        assert "'input[1]': input (" in reply["error"]["message"]
        assert "too large to process" in reply["error"]["message"]
        assert "--ubatch-size" in reply["error"]["message"]
        assert reply["error"]["n_ctx"] == 64
    assert (await server.post("/cache/warm", {"prompt": "x"}))[0] == 501


async def test_a_vector_of_each_token(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await start(backend=whole("none"))
    tokens = ids("abc")
    rows = [cold_vector(tokens[: i + 1]) for i in range(4)]
    for path in ("/embedding", "/embeddings"):
        reply = await server.ok(path, {"input": ["abc", "a"], "embd_normalize": 2})
        assert reply == [{"index": 0, "embedding": rows}, {"index": 1, "embedding": rows[:2]}]
    sizes: list[int] = []

    def encoded(value: Any) -> bytes:
        data = encode(value)
        sizes.append(len(data))
        return data

    # A reply is made in pieces, of which none has more than a token's vector.
    monkeypatch.setattr(embeddings, "encode", encoded)
    (reply,) = await server.ok("/embedding", {"input": "x" * 60})
    assert [len(row) for row in reply["embedding"]] == [N_VECTOR] * 61
    assert len(sizes) == 61
    status, reply = await server.post("/v1/embeddings", {"input": "a"})
    assert status == 400
    assert "not OAI compatible" in reply["error"]["message"]
    status, reply = await server.post("/embedding", {"input": "a", "dimensions": 2})
    assert (status, reply["error"]["param"]) == (400, "dimensions")
