"""Who is compared, and how each is started: the same file, threads, slots, cells and flash attention for all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench import peers
from bench.client import BenchmarkError
from bench.server import llamaslot

OWN = "llamaslot"
"""The contender that the others are compared with."""
FOLDER = "{folder}"
"""Stands in flags for an empty folder, another one for each play."""


@dataclass(frozen=True)
class Load:
    """What every contender is told."""

    model: Path
    n_slots: int
    n_threads: int
    n_ctx: int
    """Cells of all slots together."""
    more: tuple[str, ...] = ()
    """Further flags for llama-server and llamaslot alike, such as `-ngl 99`."""


@dataclass(frozen=True)
class Contender:
    """A server with its tuning."""

    name: str
    kind: str
    """`llamaslot`, `llama-server` or `llama-cpp-python`."""
    flags: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    """Where it plays; empty for everywhere."""

    @property
    def is_peer(self) -> bool:
        """Whether this is one of those to beat: llama-server at some tuning."""
        return self.kind == "llama-server"

    @property
    def saves_slots(self) -> bool:
        """Whether slots can be saved and restored by hand."""
        return "--slot-save-path" in self.flags

    def plays(self, workload: str) -> bool:
        """Whether it takes part there."""
        return not self.workloads or workload in self.workloads

    def command(self, load: Load, more: Sequence[str] = (), folder: Path = Path()) -> list[str]:
        """How it is started, but for host and port; `more` flags are the workload's."""
        threads, n_ctx = str(load.n_threads), str(load.n_ctx)
        if self.kind == "llama-cpp-python":
            command = [sys.executable, "-m", "llama_cpp.server", "--model", str(load.model), "--n_ctx", n_ctx]
            command += ["--n_threads", threads, "--n_threads_batch", threads, "--flash_attn", "true"]
            return [*command, "--interrupt_requests", "false"]
        if self.kind == "llama-server":
            command = [str(peers.llama_server()), "-m", str(load.model)]
        elif self.kind == "llamaslot":
            command = llamaslot(load.model)
            more = more if more and more[0] in own_flags() else ()
        else:
            raise BenchmarkError(f"there is no contender of the kind {self.kind}")
        command += ["-np", str(load.n_slots), "-c", n_ctx, "-t", threads, "-tb", threads, "-fa", "on"]
        flags = [str(folder) if flag == FOLDER else flag for flag in (*self.flags, *more)]
        return [*command, *flags, *load.more]


@cache
def own_flags() -> frozenset[str]:
    """The words in the help of `llamaslot serve`, its flags among them."""
    command = [sys.executable, "-m", "llamaslot.cli.main", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"llamaslot does not start: {done.stderr[-500:]}")
    return frozenset(done.stdout.split())


CONTENDERS = (
    Contender("llama-server", "llama-server"),
    Contender("llama-server -kvu", "llama-server", ("-kvu",)),
    Contender("llama-server -kvu, idle slots kept", "llama-server", ("-kvu", "--no-cache-idle-slots")),
    Contender("llama-server -kvu, slots saved", "llama-server", ("-kvu", "--slot-save-path", FOLDER), ("restart",)),
    Contender(OWN, "llamaslot"),
    Contender("llamaslot, slots apart", "llamaslot", ("--no-kv-unified",)),
    Contender("llamaslot, no cache", "llamaslot", ("--no-cache-prompt",)),
    Contender("llama-cpp-python", "llama-cpp-python"),
)
