"""What the layout of KV costs: the same steps in pools whose cells are placed in different ways.

Nothing is computed to fill a pool: the KV of a few tokens is loaded again and again at other positions, since its
content does not matter for the time of a step. Calls of llama.cpp alone, without engine and cache. Beside them the
whole conversations, computed by llama-batched-bench and by a server at its defaults.
"""

from __future__ import annotations

import asyncio
import ctypes
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from rich.table import Table

from bench.client import BenchmarkError
from bench.decode import batched_bench_figures
from bench.peers import build
from bench.peers.baseline import revision
from bench.report import ROOT, console, machine, notes, write_json
from bench.server import llamaslot, serving
from llamaslot.backend.llama import library
from llamaslot.backend.llama.batch import Batch
from llamaslot.backend.state_format import HEADER_BYTES, LAYOUTS, Bytes, SavedCells, read_cells
from llamaslot.base.backend import Run
from llamaslot.base.model import QUERY_BLOCK

LAYOUTS_OF_POOL = ("apart", "tidy", "blocks", "interleaved")
"""Streams of their own; one pool, in which each sequence's cells lie together, in blocks of 64, or one by one."""
SERVED = "served"
"""The layout that llamaslot chooses."""
N_UBATCH = 512
MAX_KV_BYTES = 12 * 2**30
_SAVED = 64
"""Tokens whose KV fills the pools."""
MAX_COMPUTED = 24_000
"""Tokens that llama-batched-bench is given at most: it computes them all."""
_DECODED = 32
_SLOW_S = 4.0
"""A step that takes longer is not repeated."""


@dataclass(frozen=True)
class Case:
    """Conversations in a pool."""

    n: int
    n_tokens: int
    """Of each."""
    shared: float
    """Fraction of them that is the same in all."""

    @property
    def n_shared(self) -> int:
        """Shared tokens, in whole blocks."""
        return int(self.n_tokens * self.shared) // QUERY_BLOCK * QUERY_BLOCK if self.n > 1 else 0


CASES = [
    Case(n, n_tokens, shared)
    for n_tokens in (500, 3000, 12_000)
    for n in (1, 4, 8, 16)
    for shared in ((0.0, 0.5, 0.9) if n > 1 else (0.0,))
]


class Pool:
    """A context whose sequences have KV at given places."""

    def __init__(self, model: Any, case: Case, layout: str, *, threads: int) -> None:
        self._case = case
        self._unified = layout != "apart"
        self._scratch = case.n
        self._n_streams = 1 if self._unified else case.n
        # Room for what a step adds, and for a block that is shared beside its copy.
        part = -(-(case.n_tokens + N_UBATCH + 1) // 256) * 256
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = part * case.n if not self._unified else self._n_cells() + 2 * N_UBATCH
        params.n_batch = params.n_ubatch = N_UBATCH
        params.n_seq_max = case.n + self._unified
        params.n_outputs_max = case.n + 1
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = self._unified
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise BenchmarkError(f"no context for {case}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = Batch(N_UBATCH)
        self._random = np.random.default_rng(1)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._header, self._saved, self._rest = self._save_some()
        self._fill(layout)

    def close(self) -> None:
        """Free the context."""
        llama_cpp.llama_free(self._context)

    def new(self, seq: int, n: int) -> Run:
        """So many tokens that continue a sequence."""
        tokens = self._random.integers(0, self._n_vocab, n, dtype=np.int32)
        return Run(seq, self._case.n_tokens, tokens, n_outputs=1)

    def seconds(self, steps: Sequence[Sequence[Run]]) -> float:
        """Time of some steps, after which their tokens are removed again."""
        started = perf_counter()
        for runs in steps:
            self._batch.fill(runs)
            if status := llama_cpp.llama_decode(self._context, self._batch.struct):
                raise BenchmarkError(f"llama_decode returned {status}")
            llama_cpp.llama_synchronize(self._context)
        seconds = perf_counter() - started
        for run in (run for runs in steps for run in runs):
            llama_cpp.llama_memory_seq_rm(self._memory, run.seq, run.start, -1)
        return seconds

    def _n_cells(self) -> int:
        case = self._case
        own = case.n_tokens - case.n_shared
        return -(-(case.n_shared + case.n * own) // 256) * 256

    def _save_some(self) -> tuple[Bytes, SavedCells, Bytes]:
        """Compute `_SAVED` tokens, save and remove them: the header, the cells, and what follows them."""
        self._batch.fill([Run(0, 0, np.arange(_SAVED, dtype=np.int32) % self._n_vocab, n_outputs=1)])
        llama_cpp.llama_decode(self._context, self._batch.struct)
        state = np.empty(llama_cpp.llama_state_seq_get_size(self._context, 0), np.uint8)
        llama_cpp.llama_state_seq_get_data(self._context, _pointer(state), len(state), 0)
        llama_cpp.llama_memory_seq_rm(self._memory, 0, -1, -1)
        for cell_bytes, has_v in LAYOUTS:
            try:
                saved = read_cells(state, HEADER_BYTES + 4, cell_bytes=cell_bytes, has_v=has_v)
            except ValueError:
                continue
            return state[: HEADER_BYTES + 4], saved, state[saved.end :]
        raise BenchmarkError("a saved sequence has another format")

    def _state(self, start: int, n: int) -> Bytes:
        """A saved sequence of `n` tokens from position `start` on."""
        rows = np.arange(n) % _SAVED
        cells = self._saved.cells[rows].copy()
        cells[:, :4] = np.arange(start, start + n, dtype=np.int32)[:, None].view(np.uint8)
        parts = [self._header, np.array([n], np.uint32).view(np.uint8), cells.ravel(), self._saved.layers]
        for tensor in self._saved.tensors:
            parts += [tensor.header, tensor.rows[rows].ravel()]
        return np.concatenate([*parts, self._rest])

    def _add(self, seq: int, start: int, n: int) -> None:
        """Give a sequence KV for further positions, in the lowest free cells."""
        state = self._state(start, n)
        to = seq if not start else self._scratch
        if llama_cpp.llama_state_seq_set_data(self._context, _pointer(state), len(state), to) != len(state):
            raise BenchmarkError("a state could not be loaded")
        if start:
            llama_cpp.llama_memory_seq_cp(self._memory, to, seq, start, start + n)
            llama_cpp.llama_memory_seq_rm(self._memory, to, -1, -1)

    def _fill(self, layout: str) -> None:
        case, seqs = self._case, range(self._case.n)
        first = 0
        if self._unified and (first := case.n_shared):
            self._add(0, 0, first)
            for seq in seqs[1:]:
                llama_cpp.llama_memory_seq_cp(self._memory, 0, seq, 0, first)
        rest = case.n_tokens - first
        size = {"blocks": QUERY_BLOCK, "interleaved": 1}.get(layout, rest)
        for start in range(first, case.n_tokens, size):
            for seq in seqs:
                self._add(seq, start, min(size, case.n_tokens - start))


def _pointer(state: Bytes) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def steps_of(pool: Pool, n: int) -> dict[str, tuple[int, list[list[Run]]]]:
    """The measured steps by name, with the tokens that they compute."""
    each = N_UBATCH // n // 2
    steps = {
        "512 of one": (N_UBATCH, [[pool.new(0, N_UBATCH)]]),
        "64 of one": (64, [[pool.new(0, 64)]]),
        "decode": (n, [[pool.new(seq, 1) for seq in range(n)]]),
    }
    if n > 1:
        prompts = [pool.new(seq, each) for seq in range(n)]
        rows = [pool.new(seq, 1) for seq in range(1, n)]
        steps["a chunk of each, one step"] = (n * each, [prompts])
        steps["a chunk of each, a step each"] = (n * each, [[run] for run in prompts])
        steps["256 of one and decode, one step"] = (256 + n - 1, [[pool.new(0, 256), *rows]])
        steps["256 of one and decode, two steps"] = (256 + n - 1, [[pool.new(0, 256)], rows])
    if n >= 8:
        for name, seqs in (("decode of 7", range(7)), ("decode of 5, not adjacent", (0, 1, 3, 6, 7))):
            steps[name] = (len(seqs), [[pool.new(seq, 1) for seq in seqs]])
    return steps


@contextmanager
def loaded(model: Path) -> Iterator[Any]:
    """The model, whose KV alone matters."""
    library.initialise()
    found = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
    if not found:
        raise BenchmarkError(f"llama.cpp could not load {model}")
    try:
        yield found
    finally:
        llama_cpp.llama_model_free(found)


def run(*, model: Path, title: str, repeats: int, threads: int, cases: Sequence[Case], folder: Path) -> None:
    """Measure, print, write `layouts.json`."""
    results: list[dict[str, Any]] = []
    facts, commit, started = machine(), revision(ROOT), perf_counter()
    with loaded(model) as weights:
        for case in cases:
            if _kv_bytes(weights) * case.n * case.n_tokens > MAX_KV_BYTES:
                notes.print(f"left out, more than {MAX_KV_BYTES >> 30} GiB: {case}")
                continue
            for layout in LAYOUTS_OF_POOL if case.n > 1 else LAYOUTS_OF_POOL[:2]:
                results += _measured(weights, case, layout, repeats=repeats, threads=threads)
            if case.n > 1 and case.n * case.n_tokens <= MAX_COMPUTED:
                results += _batched_bench(model, case, threads)
                n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(weights))
                served = _served(model, case, n_vocab, threads=threads, log=folder / "layouts-server.log")
                seconds = asyncio.run(served)
                n_tokens = case.n * (case.n_tokens + _DECODED)
                results.append(_result(case, SERVED, "whole", n_tokens, [seconds]))
            console.print(_table(case, results))
            content = {"benchmark": "layouts", "model": title, "threads": threads, "machine": facts}
            content |= {"commit": commit, "seconds": round(perf_counter() - started, 1)}
            write_json(folder / "layouts.json", content | {"results": results})


def _measured(weights: Any, case: Case, layout: str, *, repeats: int, threads: int) -> Iterator[dict[str, Any]]:
    pool = Pool(weights, case, layout, threads=threads)
    try:
        for name, (n_tokens, steps) in steps_of(pool, case.n).items():
            times = [pool.seconds(steps)]
            if times[0] < _SLOW_S:
                times = [pool.seconds(steps) for _ in range(repeats)]
            yield _result(case, layout, name, n_tokens, times)
    finally:
        pool.close()


def _batched_bench(model: Path, case: Case, threads: int) -> Iterator[dict[str, Any]]:
    """The whole prompts and some tokens of each, by llama-batched-bench, which has no partly shared prompts."""
    if case.shared:
        return
    command = [str(build.batched_bench()), "-m", str(model), "-b", "2048", "-ub", str(N_UBATCH)]
    command += ["-c", str(_n_ctx(case))]
    command += ["-t", str(threads), "-tb", str(threads), "-fa", "on"]
    command += ["-npp", str(case.n_tokens), "-ntg", str(_DECODED), "-npl", str(case.n)]
    for layout, flags in (("apart", []), ("tidy", ["--kv-unified"])):
        figures = batched_bench_figures([*command, *flags])
        for name, n, key in (
            ("llama-batched-bench: prompts", case.n * case.n_tokens, "t_pp"),
            ("llama-batched-bench: decode", case.n * _DECODED, "t_tg"),
            ("whole", case.n * (case.n_tokens + _DECODED), "t"),
        ):
            yield _result(case, layout, name, n, [float(figures[key])])


def _n_ctx(case: Case) -> int:
    return case.n * -(-(case.n_tokens + _DECODED) // 256) * 256


async def _served(model: Path, case: Case, n_vocab: int, *, threads: int, log: Path) -> float:
    """Seconds that a server at its defaults takes for all conversations at once, with `_DECODED` tokens of each.

    Its prompts share what those of the case do.
    """
    flags = ["-c", str(_n_ctx(case)), "-np", str(case.n), "-t", str(threads), "-tb", str(threads)]
    words = np.random.default_rng(1)

    def drawn(n: int) -> list[int]:
        tokens: list[int] = words.integers(0, n_vocab, n).tolist()
        return tokens

    async with serving(llamaslot(model, *flags), log=log) as server:

        async def complete(prompt: list[int]) -> None:
            body = {"prompt": prompt, "n_predict": _DECODED, "temperature": 0, "ignore_eos": True}
            answer = await server.client.post("/completion", **body)
            if answer["tokens_predicted"] != _DECODED:
                raise BenchmarkError(f"a reply of {answer['tokens_predicted']} tokens, not {_DECODED}")

        await complete(drawn(8))
        shared = drawn(case.n_shared)
        prompts = [shared + drawn(case.n_tokens - case.n_shared) for _ in range(case.n)]
        started = perf_counter()
        await asyncio.gather(*map(complete, prompts))
        return perf_counter() - started


def _result(case: Case, layout: str, step: str, n_computed: int, seconds: Sequence[float]) -> dict[str, Any]:
    of_case = {"conversations": case.n, "tokens": case.n_tokens, "shared": case.shared}
    return of_case | {"layout": layout, "step": step, "computed": n_computed, "seconds": [*seconds]}


def _kv_bytes(model: Any) -> int:
    """Bytes of KV of a token, about."""
    heads, layers = llama_cpp.llama_model_n_head_kv(model), llama_cpp.llama_model_n_layer(model)
    width = llama_cpp.llama_model_n_embd(model) // llama_cpp.llama_model_n_head(model)
    return int(2 * 2 * heads * layers * max(width, 64))


def _table(case: Case, results: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        title=f"{case.n} conversations of {case.n_tokens:,} tokens, {case.shared:.0%} shared",
        caption="tokens per second, medians",
    )
    here = [
        each
        for each in results
        if (each["conversations"], each["tokens"], each["shared"]) == (case.n, case.n_tokens, case.shared)
    ]
    layouts = [layout for layout in (*LAYOUTS_OF_POOL, SERVED) if any(each["layout"] == layout for each in here)]
    for heading in ("step", *layouts):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for step in dict.fromkeys(each["step"] for each in here):
        rates = {e["layout"]: e["computed"] / statistics.median(e["seconds"]) for e in here if e["step"] == step}
        table.add_row(step, *(f"{rates[layout]:,.0f}" if layout in rates else "" for layout in layouts))
    return table
