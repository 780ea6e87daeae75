"""The servers that are compared, and their commands: all have the same file, threads, slots and cells."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.client import BenchmarkError
from bench.peers import build
from bench.server import llamaslot

OWN = "llamaslot"
"""The server that the others are compared with."""
BEFORE = "llamaslot before"
"""llamaslot from another checkout."""
FOLDER = "{folder}"
"""Placeholder in flags for an empty folder that is created for each run."""


@dataclass(frozen=True)
class CommonSettings:
    """The settings that every server gets."""

    model: Path
    n_slots: int
    n_threads: int
    n_ctx: int
    """Cells of all slots together."""
    more: tuple[str, ...] = ()
    """Further flags for llama-server and llamaslot alike, such as `-ngl 99`."""


@dataclass(frozen=True)
class ServerSetup:
    """A server with its own flags."""

    name: str
    kind: str
    """`llamaslot`, `llama-server` or `llama-cpp-python`."""
    flags: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    """The workloads that it takes part in; empty for all."""
    checkout: Path | None = None
    """Folder that `llamaslot` is imported from; None for the installed one."""

    @property
    def is_peer(self) -> bool:
        """True for llama-server with any flags: the best of these is what llamaslot is compared with."""
        return self.kind == "llama-server"

    @property
    def is_reference(self) -> bool:
        """True if no goal depends on this server: its figures are only shown."""
        return not self.is_peer and self.name not in (OWN, BEFORE)

    @property
    def saves_slots(self) -> bool:
        """True if the benchmark saves and restores the slots around a restart."""
        return "--slot-save-path" in self.flags

    def takes_part(self, workload: str) -> bool:
        """True if this server runs the workload."""
        return not self.workloads or workload in self.workloads

    def command(self, common: CommonSettings, more: Sequence[str] = (), folder: Path = Path()) -> list[str]:
        """The command that starts the server, without host and port; `more` flags are the workload's."""
        threads, n_ctx = str(common.n_threads), str(common.n_ctx)
        if self.kind == "llama-cpp-python":
            command = [sys.executable, "-m", "llama_cpp.server", "--model", str(common.model), "--n_ctx", n_ctx]
            command += ["--n_threads", threads, "--n_threads_batch", threads, "--flash_attn", "true"]
            return [*command, "--interrupt_requests", "false"]
        if self.kind == "llama-server":
            command = [str(build.llama_server()), "-m", str(common.model)]
        elif self.kind == "llamaslot":
            # Each version would keep what it measured on another day for a week. So all runs measure anew.
            command = llamaslot(common.model, checkout=self.checkout, measurements=folder / "measurements")
            more = more if more and more[0] in llamaslot_flags(self.checkout) else ()
            if "--speculate" in llamaslot_flags(self.checkout):
                # Models with random weights repeat themselves, so drafts would make decoding faster than it is.
                command += ["--speculate", "off"]
        else:
            raise BenchmarkError(f"there is no server of the kind {self.kind}")
        command += ["-np", str(common.n_slots), "-c", n_ctx, "-t", threads, "-tb", threads, "-fa", "on"]
        flags = [str(folder) if flag == FOLDER else flag for flag in (*self.flags, *more)]
        return [*command, *flags, *common.more]


@cache
def llamaslot_flags(checkout: Path | None = None) -> frozenset[str]:
    """The words in the help of `llamaslot serve`, its flags among them."""
    command = [*llamaslot(checkout=checkout), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"llamaslot does not start: {done.stderr[-500:]}")
    return frozenset(done.stdout.split())


SERVERS = (
    ServerSetup("llama-server", "llama-server"),
    ServerSetup("llama-server -kvu", "llama-server", ("-kvu",)),
    ServerSetup("llama-server -kvu, idle slots kept", "llama-server", ("-kvu", "--no-cache-idle-slots")),
    ServerSetup(
        "llama-server -kvu, slots saved", "llama-server", ("-kvu", "--slot-save-path", FOLDER), ("restart",)
    ),
    ServerSetup("llama-server -bs", "llama-server", ("--backend-sampling",), ("decode 1", "decode 8", "sampled 8")),
    ServerSetup(OWN, "llamaslot"),
    ServerSetup("llamaslot, slots apart", "llamaslot", ("--no-kv-unified",)),
    ServerSetup("llamaslot, no cache", "llamaslot", ("--no-cache-prompt",)),
    ServerSetup("llama-cpp-python", "llama-cpp-python"),
)
