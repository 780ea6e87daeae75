"""Time of steps of few tokens, plain and padded: what a user waits for whose prefix is cached.

Asked of the backend alone, in turn (A B B A): some tokens behind a prefix, and streams side by side on one prefix.
The last column is what the server would do, by what it measures at its start (`StepCost`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.table import Table

from bench.client import BenchmarkError
from bench.report import Summary, console, machine, write_json
from llamaslot.app.config_reader import Parser, add_flags, read_config
from llamaslot.app.runtime.engine_host import llama_settings
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Run, Status
from llamaslot.base.errors import ConfigError
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Copy, Remove
from llamaslot.base.model import QUERY_BLOCK
from llamaslot.scheduler.padding import Padding

PREFIXES = (0, 1024, 4096)
NEW = (1, 4, 8, 16, 32, 48)
"""Tokens after a prefix."""
STREAMS = 8
"""Of one token each, all on one prefix."""
_CHUNK = 512


class Steps:
    """A backend whose first sequence grows from prefix to prefix."""

    def __init__(self, settings: LlamaSettings) -> None:
        self._backend = LlamaBackend(settings)
        if not self._backend.measure_costs():
            raise BenchmarkError(f"costs could not be measured: {self._backend.info.costs_pending}")
        info = self._backend.info
        self._scratch = self._backend.n_seqs - 1
        self._padding = Padding(info.step_cost, info.n_ubatch)
        self._sampler = self._backend.new_sampler(Sampling(temperature=0.0), np.empty(0, np.int32))
        self._random = np.random.default_rng(1)

    def grow(self, n_tokens: int) -> None:
        """Give all streams a shared prefix of so many tokens."""
        backend = self._backend
        while (start := backend.seq_len(0)) < n_tokens:
            self._decode([self._fresh(0, start, min(_CHUNK, n_tokens - start))])
        for seq in range(1, STREAMS):
            if (start := backend.seq_len(seq)) < n_tokens:
                backend.change(Copy(0, seq, start, n_tokens))

    def measured(self, runs_of: Callable[[], list[Run]], repeats: int) -> dict[str, Any]:
        """Seconds plain and padded, and whether the server pads."""
        runs = runs_of()
        n = sum(len(run.tokens) for run in runs)
        padding = Run(self._scratch, 0, np.zeros(QUERY_BLOCK - n, dtype=np.int32), n_outputs=0)
        kinds: dict[str, list[Run]] = {"plain": [], "padded": [padding]}
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for repeat in range(repeats + 1):
            for kind in list(kinds) if repeat % 2 else list(kinds)[::-1]:
                seconds[kind].append(self._seconds([*runs_of(), *kinds[kind]]))
        timed = {kind: Summary.of(times[1:]) for kind, times in seconds.items()}
        spans = [(run.start, len(run.tokens)) for run in runs]
        gain = self._padding.gain_ms(spans, n_used=self._backend.seq_len(0))
        return {"seconds": timed, "is_padded": gain > 0}

    def new(self, n_tokens: int) -> list[Run]:
        """So many tokens behind the prefix."""
        return [self._fresh(0, self._backend.seq_len(0), n_tokens)]

    def streams(self) -> list[Run]:
        """A token for each stream."""
        return [self._fresh(seq, self._backend.seq_len(seq), 1) for seq in range(STREAMS)]

    def close(self) -> None:
        """Free the model."""
        self._sampler.close()
        self._backend.close()

    def _seconds(self, runs: Sequence[Run]) -> float:
        started = perf_counter()
        self._decode(runs)
        self._backend.sample([(runs[0].seq, self._sampler)])
        seconds = perf_counter() - started
        for run in runs:
            self._backend.change(Remove(run.seq, run.start))
        return seconds

    def _decode(self, runs: Sequence[Run]) -> None:
        if (status := self._backend.decode(runs).status) is not Status.OK:
            raise BenchmarkError(f"llama.cpp could not compute a step: {status.name}")

    def _fresh(self, seq: int, start: int, n_tokens: int) -> Run:
        tokens = self._random.integers(0, self._backend.info.n_vocab, n_tokens, dtype=np.int32)
        return Run(seq, start, tokens, n_outputs=1)


def run(*, model: Path, title: str, repeats: int, folder: Path, server_flags: Sequence[str]) -> None:
    """Measure, print, write `steps.json`."""
    flags = ["-c", str(PREFIXES[-1] + 2 * _CHUNK), "-np", str(STREAMS), "-fa", "on", *server_flags]
    steps = Steps(backend_settings(model, flags))
    results = []
    for n_prefix in PREFIXES:
        steps.grow(n_prefix)
        for n_new in NEW:
            found = steps.measured(lambda n=n_new: steps.new(n), repeats)  # type: ignore[misc]
            results.append({"prefix": n_prefix, "tokens": f"{n_new} new", **found})
        found = steps.measured(steps.streams, repeats)
        results.append({"prefix": n_prefix, "tokens": f"{STREAMS} streams", **found})
    steps.close()
    console.print(_table(title, results))
    for result in results:
        result["seconds"] = {kind: asdict(summary) for kind, summary in result["seconds"].items()}
    write_json(folder / "steps.json", {"machine": machine(), "model": title, "steps": results})


def backend_settings(model: Path, flags: Sequence[str]) -> LlamaSettings:
    """The settings of a backend for flags of `llamaslot serve`; what it measures is neither read nor kept."""
    parser = Parser(prog="--server")
    add_flags(parser)
    try:
        settings = llama_settings(read_config(parser.parse(["-m", str(model), *flags]), {}), model)
    except ConfigError as error:
        raise BenchmarkError(str(error)) from None
    return replace(settings, measurements=None)


def _table(title: str, results: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        title=f"Steps of few tokens, {title}", caption=f"padded: up to {QUERY_BLOCK} tokens; medians and ranges"
    )
    for column in ("prefix", "tokens", "plain", "range (ms)", "padded", "range (ms)", "x", "server pads"):
        table.add_column(column, justify="right")
    for result in results:
        plain, padded = result["seconds"]["plain"], result["seconds"]["padded"]
        cells = [cell for each in (plain, padded) for cell in (each.milliseconds()[0], each.milliseconds()[2])]
        ratio = f"{plain.median / padded.median:.2f}"
        table.add_row(
            f"{result['prefix']:,}", result["tokens"], *cells, ratio, "yes" if result["is_padded"] else ""
        )
    return table
