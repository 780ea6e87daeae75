"""Embeddings and reranking beside llama-server, over HTTP: the same file, flags and texts, each first in turn.

`embed` has texts of one length, in requests of one text or of several, from one client or from many. They are
token ids, so that they have the exact length with any model, and begin differently, so that no cache helps.
`rerank` scores documents for a query that all prompts begin with, by a file with random weights and a random head;
a query is used once. llamaslot computes a query once, llama-server once for each document: a short query shows what
is left without that. Both servers get the same texts, must count the same tokens, and are warmed up with other
texts, for which their vectors and scores must agree.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import gguf
import numpy as np
from rich.progress import Progress
from rich.table import Table

from bench.client import BenchmarkError, Client
from bench.peers import build
from bench.report import Summary, console, machine, model_file, new_table, notes, write_json
from bench.server import Server, llamaslot, serving
from bench.tokens import Tokens


class Shape(NamedTuple):
    """Requests to embed texts."""

    n_tokens: int
    n_clients: int = 1
    n_inputs: int = 1

    @property
    def name(self) -> str:
        """The case in the table."""
        inputs = f", {self.n_inputs} a request" if self.n_inputs > 1 else ""
        return f"embed {self.n_tokens} tokens{inputs}, {self.n_clients} client{'s' if self.n_clients > 1 else ''}"


SHAPES = (
    *(Shape(n_tokens, n_clients) for n_clients in (1, 32) for n_tokens in (16, 128, 512)),
    Shape(16, n_inputs=64),
    Shape(128, n_inputs=16),
)
TEXT_TOKENS = 16_384
"""Tokens of all texts of a measurement together, and so many again for each further client up to four."""
MIN_TEXTS = 32
N_DOCUMENTS, DOCUMENT_TOKENS = 50, 200
N_SLOTS, CONTEXT = 8, 8192
RERANKER = "60m"
"""A shape of Qwen3, for which llama.cpp has rerankers."""
EMBED_GOAL = 0.95
"""Least throughput as a fraction of llama-server's."""
RERANK_GOALS = {500: 0.5, 10: 1.05}
"""Most time as a fraction of llama-server's, by the tokens of the query."""
MAX_DISTANCE = 0.01
"""Most that numbers of a vector may differ, as a fraction of the largest: rounding differs."""
MAX_MEAN_DISTANCE = 0.03
"""The same for scores, on average: by a random head single ones of 50 differ by 0.06 where llama-server scores the
documents together or one by one.
"""


@dataclass
class Case:
    """A measurement of both servers: tokens per second (`embed`), or seconds (`rerank`)."""

    name: str
    is_rate: bool
    goal: float
    """Least ratio of a rate, most ratio of a time."""
    peer: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> Summary:
        """llamaslot's figure divided by llama-server's just before."""
        return Summary.of([own / peer for own, peer in zip(self.own, self.peer, strict=True)])

    @property
    def is_met(self) -> bool:
        """True if the goal is met."""
        return self.ratio.median >= self.goal if self.is_rate else self.ratio.median <= self.goal


def run(
    *,
    model: Path,
    title: str,
    repeats: int,
    scale: float,
    threads: int,
    folder: Path,
    server_flags: Sequence[str],
) -> None:
    """Measure, print the table, write `embed.json` and the servers' logs."""
    facts = machine()
    flags = ["-np", str(N_SLOTS), "-c", str(CONTEXT), "-kvu", "-b", "2048", "-ub", "512", "-fa", "on"]
    flags += ["-t", str(threads), "-tb", str(threads), *server_flags]
    reranker = with_head(model_file(RERANKER), folder / "reranker.gguf")
    cases = asyncio.run(_measure(model, reranker, flags, repeats=repeats, scale=scale, folder=folder))
    console.print(table(cases))
    write_json(
        folder / "embed.json",
        {
            "benchmark": "embed",
            "settings": {"model": title, "flags": " ".join(flags), "repeats": repeats, "scale": scale},
            "machine": facts,
            "cases": [{**asdict(each), "ratio": asdict(each.ratio), "is_met": each.is_met} for each in cases],
        },
    )


async def _measure(
    model: Path, reranker: Path, flags: list[str], *, repeats: int, scale: float, folder: Path
) -> list[Case]:
    words, text = random.Random(secrets.token_hex(8)), Tokens(reranker)
    # A file with a pooling of its own keeps it; one that generates text has none.
    pooling = ["--pooling", "last"] if _has_no_pooling(model) else []
    embeds, ranks = [*flags, "--embedding", *pooling], [*flags, "--reranking"]
    cases = {shape: Case(shape.name, is_rate=True, goal=EMBED_GOAL) for shape in SHAPES}
    n_documents = max(round(N_DOCUMENTS * scale), 1)
    rankings = {
        n_tokens: Case(f"rerank {n_documents} documents, query of {n_tokens} tokens", is_rate=False, goal=goal)
        for n_tokens, goal in RERANK_GOALS.items()
    }

    def question(n_tokens: int) -> dict[str, Any]:
        documents = [text.draw(words, DOCUMENT_TOKENS) for _ in range(n_documents)]
        return {"query": text.draw(words, n_tokens), "documents": documents}

    with Progress(console=notes) as progress:
        task = progress.add_task("embedding", total=2 * repeats * (len(cases) + len(rankings)))
        async with AsyncExitStack() as stack:
            peer, own = [await stack.enter_async_context(each) for each in _servers(model, embeds, folder, "embed")]
            n_vocab = (await own.client.get("/v1/models"))["data"][0]["meta"]["n_vocab"]
            warming = _texts(words, n_vocab, SHAPES[-1], scale / 8)
            for server in (peer, own):
                await _rate(server.client, warming, 1)
            ((unseen,), *_) = _texts(words, n_vocab, Shape(128), 0)
            vectors = [await _vector(server.client, unseen) for server in (peer, own)]
            _check_close("the vectors", np.max, MAX_DISTANCE, *vectors)
            for i in range(repeats):
                for shape, case in cases.items():
                    texts = _texts(words, n_vocab, shape, scale)
                    for client, figures in _in_turn(i, (peer.client, case.peer), (own.client, case.own)):
                        figures.append(await _rate(client, texts, shape.n_clients))
                        progress.advance(task)
        async with AsyncExitStack() as stack:
            peer, own = [
                await stack.enter_async_context(each) for each in _servers(reranker, ranks, folder, "rank")
            ]
            body = question(min(RERANK_GOALS))
            scores = [(await _ranked(server.client, body))[1] for server in (peer, own)]
            _check_close("the scores", np.mean, MAX_MEAN_DISTANCE, *scores)
            for i in range(repeats):
                for n_tokens, case in rankings.items():
                    body = question(n_tokens)
                    counts: set[int] = set()
                    for client, figures in _in_turn(i, (peer.client, case.peer), (own.client, case.own)):
                        started = perf_counter()
                        count, _ = await _ranked(client, body)
                        figures.append(perf_counter() - started)
                        counts.add(count)
                        progress.advance(task)
                    if len(counts) > 1:
                        raise BenchmarkError(f"the servers made prompts of {counts} tokens for the same documents")
    return [*cases.values(), *rankings.values()]


def _in_turn(i: int, *sides: tuple[Client, list[float]]) -> Sequence[tuple[Client, list[float]]]:
    """Return both sides, of which each is the first one every other time."""
    return sides[::-1] if i % 2 else sides


async def _vector(client: Client, text: list[int]) -> list[float]:
    vector: list[float] = (await client.post("/v1/embeddings", input=text))["data"][0]["embedding"]
    return vector


async def _ranked(client: Client, body: dict[str, Any]) -> tuple[int, list[float]]:
    """Score documents; return the tokens of all prompts, and the scores in the order of the documents."""
    reply = await client.post("/v1/rerank", **body)
    ranks = sorted(reply["results"], key=lambda each: each["index"])
    return reply["usage"]["prompt_tokens"], [each["relevance_score"] for each in ranks]


def _check_close(
    what: str, of_all: Callable[[Any], float], most: float, peer: list[float], own: list[float]
) -> None:
    """Raise `BenchmarkError` if the servers' numbers are not the same but for rounding."""
    if len(peer) != len(own) or of_all(np.abs(np.subtract(peer, own))) > most * np.abs(peer).max():
        raise BenchmarkError(f"{what} of the two servers differ, so they have not done the same work")


def _servers(model: Path, flags: list[str], folder: Path, name: str) -> list[AbstractAsyncContextManager[Server]]:
    """llama-server and llamaslot, not started yet."""
    peer = [str(build.llama_server()), "-m", str(model), *flags]
    return [
        serving(command, log=folder / f"embed-{name}-{side}.log")
        for side, command in (("llama-server", peer), ("llamaslot", llamaslot(model, *flags)))
    ]


def _texts(words: random.Random, n_vocab: int, shape: Shape, scale: float) -> list[list[list[int]]]:
    """Return the texts of each request."""
    n_texts = max(round(TEXT_TOKENS * min(shape.n_clients, 4) * scale / shape.n_tokens), MIN_TEXTS)
    # Neither the special tokens at one end of most vocabularies nor those at the other.
    ids = range(n_vocab // 10, n_vocab - n_vocab // 10)
    texts = [words.choices(ids, k=shape.n_tokens) for _ in range(n_texts)]
    return [texts[at : at + shape.n_inputs] for at in range(0, n_texts, shape.n_inputs)]


async def _rate(client: Client, requests: Sequence[list[list[int]]], n_clients: int) -> float:
    """Computed tokens per second of requests that some clients send, each the next one when it has its vectors.

    Texts that begin with the same token by chance share that one in the cache.
    """
    n_tokens, waiting = sum(len(text) for texts in requests for text in texts), iter(requests)
    n_counted = n_cached = 0

    async def send() -> None:
        nonlocal n_counted, n_cached
        for texts in waiting:
            usage = (await client.post("/v1/embeddings", input=texts if len(texts) > 1 else texts[0]))["usage"]
            n_counted += usage["prompt_tokens"]
            n_cached += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)

    started = perf_counter()
    await asyncio.gather(*(send() for _ in range(n_clients)))
    seconds = perf_counter() - started
    if n_counted != n_tokens or n_cached > n_tokens // 10:
        raise BenchmarkError(f"of {n_tokens} tokens the server counted {n_counted}, {n_cached} of them cached")
    return (n_tokens - n_cached) / seconds


def table(cases: Sequence[Case]) -> Table:
    """A line for each case: both figures, the ratio, the goal and whether it is met."""
    headings = ("case", "llama-server", "llamaslot", "ratio", "range", "goal", "met")
    result = new_table("Embeddings and reranking", headings, left=("case",), caption="tokens/s, or seconds")
    for each in cases:
        ratio = each.ratio
        figures = (Summary.of(values).median for values in (each.peer, each.own))
        cells = [f"{figure:,.0f} tokens/s" if each.is_rate else f"{figure:,.2f} s" for figure in figures]
        goal = f"{'>=' if each.is_rate else '<='} {each.goal}"
        spread = f"{ratio.low:.2f}-{ratio.high:.2f}"
        result.add_row(each.name, *cells, f"{ratio.median:.2f}", spread, goal, "yes" if each.is_met else "NO")
    return result


def _has_no_pooling(model: Path) -> bool:
    fields = gguf.GGUFReader(model).fields
    return not any(key.endswith(".pooling_type") for key in fields)


def with_head(source: Path, path: Path) -> Path:
    """Write a Qwen3 as a reranker, with a random head of two labels."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(path, "qwen3")
    for key, each in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind, *inner = each.types
            writer.add_key_value(key, each.contents(), kind, inner[0] if inner else None)
    writer.add_uint32("qwen3.pooling_type", gguf.PoolingType.RANK)
    writer.add_array("qwen3.classifier.output_labels", ["yes", "no"])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    width = int(reader.fields["qwen3.embedding_length"].contents())
    head = np.random.default_rng(1).normal(0, 0.1, (2, width)).astype(np.float32)
    writer.add_tensor("cls.output.weight", head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
