"""Who is compared, and how each is started: the same file, threads, slots, cells and flash attention for all."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bench import peers
from bench.client import BenchmarkError


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

    @property
    def is_peer(self) -> bool:
        """Whether this is one of those to beat: llama-server at some tuning."""
        return self.kind == "llama-server"

    def command(self, load: Load) -> list[str]:
        """How it is started, but for host and port."""
        threads, n_ctx = str(load.n_threads), str(load.n_ctx)
        if self.kind == "llama-cpp-python":
            command = [sys.executable, "-m", "llama_cpp.server", "--model", str(load.model), "--n_ctx", n_ctx]
            return [*command, "--n_threads", threads, "--n_threads_batch", threads, "--flash_attn", "true"]
        if self.kind == "llama-server":
            command = [str(peers.llama_server()), "-m", str(load.model)]
        elif self.kind == "llamaslot":
            command = [sys.executable, "-m", "llamaslot.cli.main", "serve", "-m", str(load.model)]
        else:
            raise BenchmarkError(f"there is no contender of the kind {self.kind}")
        command += ["-np", str(load.n_slots), "-c", n_ctx, "-t", threads, "-tb", threads, "-fa", "on"]
        return [*command, *self.flags, *load.more]


CONTENDERS = (
    Contender("llama-server", "llama-server"),
    Contender("llama-server -kvu", "llama-server", ("-kvu",)),
    Contender("llama-server -kvu, idle slots kept", "llama-server", ("-kvu", "--no-cache-idle-slots")),
    Contender("llamaslot", "llamaslot"),
    Contender("llamaslot, slots apart", "llamaslot", ("--no-kv-unified",)),
    Contender("llamaslot, no cache", "llamaslot", ("--no-cache-prompt",)),
    Contender("llama-cpp-python", "llama-cpp-python"),
)
