"""Embeddings and reranking beside llama-server, over HTTP: the same file, flags and texts, in turn.

`embed` has texts of one length, each in a request of its own, from one client or from many. They are token ids, so
that they have the exact length with any model, and begin differently, so that no cache helps. `rerank` scores
documents for a query that all prompts begin with, by a file with random weights and a random head; a query is used
once. llamaslot computes a query once, llama-server once for each document.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

import gguf
import numpy as np
from rich.progress import Progress
from rich.table import Table

from bench.client import Client
from bench.peers import build
from bench.report import Summary, console, machine, model_file, new_table, notes, write_json
from bench.server import Server, llamaslot, serving
from bench.tokens import Tokens

LENGTHS = (16, 128, 512)
CLIENTS = (1, 32)
TEXT_TOKENS = 16_384
"""Tokens of all texts of a measurement together, and so many again for each further client up to four."""
MIN_TEXTS = 32
N_DOCUMENTS, DOCUMENT_TOKENS, QUERY_TOKENS = 50, 200, 500
N_SLOTS, CONTEXT = 8, 8192
RERANKER = "60m"
"""A shape of Qwen3, for which llama.cpp has rerankers."""
EMBED_GOAL, RERANK_GOAL = 0.95, 0.5
"""Least throughput, and most time, as a fraction of llama-server's."""


@dataclass
class Case:
    """A measurement of both servers: tokens per second (`embed`), or seconds (`rerank`)."""

    name: str
    is_rate: bool
    peer: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> Summary:
        """llamaslot's figure divided by llama-server's just before."""
        return Summary.of([own / peer for own, peer in zip(self.own, self.peer, strict=True)])

    @property
    def is_met(self) -> bool:
        """True if the goal is met."""
        return self.ratio.median >= EMBED_GOAL if self.is_rate else self.ratio.median <= RERANK_GOAL


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
    shapes = [(n_tokens, n_clients) for n_clients in CLIENTS for n_tokens in LENGTHS]
    cases = {shape: Case(f"embed {shape[0]} tokens, {shape[1]} clients", is_rate=True) for shape in shapes}
    ranking = Case(f"rerank {round(N_DOCUMENTS * scale)} documents", is_rate=False)
    with Progress(console=notes) as progress:
        task = progress.add_task("embedding", total=2 * repeats * (len(shapes) + 1))
        async with AsyncExitStack() as stack:
            peer, own = [await stack.enter_async_context(each) for each in _servers(model, embeds, folder, "embed")]
            n_vocab = (await own.client.get("/v1/models"))["data"][0]["meta"]["n_vocab"]
            for client in (peer.client, own.client):
                await _rate(client, words, n_vocab, shapes[-1], scale / 8)
            for _ in range(repeats):
                for shape, case in cases.items():
                    for client, figures in ((peer.client, case.peer), (own.client, case.own)):
                        figures.append(await _rate(client, words, n_vocab, shape, scale))
                        progress.advance(task)
        async with AsyncExitStack() as stack:
            peer, own = [
                await stack.enter_async_context(each) for each in _servers(reranker, ranks, folder, "rank")
            ]
            for _ in range(repeats):
                body = {
                    "query": text.draw(words, QUERY_TOKENS),
                    "documents": [text.draw(words, DOCUMENT_TOKENS) for _ in range(round(N_DOCUMENTS * scale))],
                }
                for client, figures in ((peer.client, ranking.peer), (own.client, ranking.own)):
                    started = perf_counter()
                    await client.post("/v1/rerank", **body)
                    figures.append(perf_counter() - started)
                    progress.advance(task)
    return [*cases.values(), ranking]


def _servers(model: Path, flags: list[str], folder: Path, name: str) -> list[AbstractAsyncContextManager[Server]]:
    """llama-server and llamaslot, not started yet."""
    peer = [str(build.llama_server()), "-m", str(model), *flags]
    return [
        serving(command, log=folder / f"embed-{name}-{side}.log")
        for side, command in (("llama-server", peer), ("llamaslot", llamaslot(model, *flags)))
    ]


async def _rate(client: Client, words: random.Random, n_vocab: int, shape: tuple[int, int], scale: float) -> float:
    """Tokens per second of texts of a length that some clients send, each the next one when it has its vector."""
    n_tokens, n_clients = shape
    n_texts = max(round(TEXT_TOKENS * min(n_clients, 4) * scale / n_tokens), MIN_TEXTS)
    # Neither the special tokens at one end of most vocabularies nor those at the other.
    ids = range(n_vocab // 10, n_vocab - n_vocab // 10)
    texts = iter([words.choices(ids, k=n_tokens) for _ in range(n_texts)])

    async def send() -> None:
        for text in texts:
            await client.post("/v1/embeddings", input=text)

    started = perf_counter()
    await asyncio.gather(*(send() for _ in range(n_clients)))
    return n_texts * n_tokens / (perf_counter() - started)


def table(cases: Sequence[Case]) -> Table:
    """A line for each case: both figures, the ratio, the goal and whether it is met."""
    headings = ("case", "llama-server", "llamaslot", "ratio", "range", "goal", "met")
    result = new_table("Embeddings and reranking", headings, left=("case",), caption="tokens/s, or seconds")
    for each in cases:
        ratio = each.ratio
        figures = (Summary.of(values).median for values in (each.peer, each.own))
        cells = [f"{figure:,.0f} tokens/s" if each.is_rate else f"{figure:,.2f} s" for figure in figures]
        goal = f">= {EMBED_GOAL}" if each.is_rate else f"<= {RERANK_GOAL}"
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
