"""Run llama-server's test suite file by file on llamaslot, and on llama-server to know what is possible."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from bench.client import BenchmarkError
from bench.peers import build
from bench.report import console, notes, write_json
from bench.server import free_port, llamaslot
from bench.suite import plugin, start
from bench.suite.exceptions import reason
from bench.suite.models import Models

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = (
    "basic", "chat_completion", "completion", "tokenize", "template", "tool_call", "compat_anthropic",
    "compat_oai_responses", "compat_gcp", "security", "metrics", "ignore_eos", "sleep", "embedding", "rerank",
    "lora", "infill", "ctx_shift", "slot_save", "kv_keep_only_active", "speculative", "stream", "router", "proxy",
    "vision_api", "mcp_servers", "tools_builtin",
)  # fmt: skip
OWN, PEER = "llamaslot", "llama-server"
OUTCOMES = ("passed", "failed", "skipped")
FILE_TIMEOUT_S = 1800
MESSAGE_CHARACTERS = 200


@dataclass(frozen=True)
class Result:
    """The result of one test."""

    test: str
    outcome: str
    message: str
    seconds: float

    @property
    def summary(self) -> str:
        """The test and the first line of why it failed."""
        return f"{self.test}: {self.message.partition(chr(10))[0][:MESSAGE_CHARACTERS]}"


def run(*, servers: Sequence[str], files: Sequence[str], options: Sequence[str], any_words: bool, out: Path) -> int:
    """Run the files on each server, print what llamaslot fails and write all results.

    Returns the exit status: 1 if a failure is unexpected.
    """
    folder = out / "llama-suite"
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, list[Result]]] = {}
    for server in servers:
        environment = _environment(server, folder, any_words)
        results[server] = {file: _run_file(server, file, environment, options, folder) for file in files}
    console.print(_table(results, files))
    unexpected = list(_report(results)) if OWN in results else []
    plain = {
        server: [asdict(each) for found in by_file.values() for each in found]
        for server, by_file in results.items()
    }
    write_json(folder / "results.json", plain)
    return 1 if unexpected else 0


def _environment(server: str, folder: Path, any_words: bool) -> dict[str, str]:
    """Return the environment of the suite's pytest and of the servers that it starts."""
    program = (folder / "start").resolve()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {start.__name__} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    starts = (folder / f"{server}-starts.jsonl").resolve()
    starts.unlink(missing_ok=True)
    models = Models((folder / "models").resolve())
    return {
        "PYTHONPATH": str(ROOT),
        "PORT": str(free_port()),
        "LLAMA_SERVER_BIN_PATH": str(program),
        start.SERVER: json.dumps(llamaslot() if server == OWN else [str(build.llama_server())]),
        start.MODELS: json.dumps(models.flags),
        start.DEFAULT: json.dumps(["--config", str(models.table)] if server == OWN else []),
        start.STARTS: str(starts),
        plugin.DOWNLOADS: json.dumps(models.downloads),
        "LLAMA_CACHE": str(models.hub),
        plugin.IS_OWN: "1" if server == OWN else "",
        plugin.ANY_WORDS: "1" if any_words else "",
    }


def _run_file(
    server: str, file: str, environment: Mapping[str, str], options: Sequence[str], folder: Path
) -> list[Result]:
    """Run one file's tests and return their results; the output of pytest and of the servers goes to a log."""
    found = (folder / f"{server}-{file}.jsonl").resolve()
    found.write_text("")
    suite = build.llama_cpp_source() / "tools" / "server" / "tests"
    # Some tests leave files there, which the other server may not overwrite.
    shutil.rmtree(suite / "tmp", ignore_errors=True)
    (suite / "tmp").mkdir()
    command = [sys.executable, "-B", "-m", "pytest", "-p", plugin.__name__, "-p", "no:cacheprovider", "-s"]
    command += [*options, f"unit/test_{file}.py"]
    log = folder / f"{server}-{file}.log"
    notes.print(f"{server}: test_{file}.py")
    with log.open("w") as output:
        try:
            subprocess.run(
                command,
                cwd=suite,
                env=os.environ | environment | {plugin.RESULTS: str(found)},
                stdout=output,
                stderr=output,
                check=False,
                timeout=FILE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"{file} takes longer than {FILE_TIMEOUT_S} s; its output is in {log}") from error
    return [Result(**json.loads(line)) for line in found.read_text().splitlines()]


def _table(results: Mapping[str, Mapping[str, Sequence[Result]]], files: Sequence[str]) -> Table:
    """Return the number of each file's tests by their outcome."""
    table = Table(title=f"tests of llama-server that {', '.join(OUTCOMES)}")
    table.add_column("file")
    for server in results:
        table.add_column(server, justify="right")
    for file in files:
        table.add_row(file, *(_counts(by_file[file]) for by_file in results.values()))
    table.add_section()
    table.add_row(
        "all", *(_counts([each for file in files for each in by_file[file]]) for by_file in results.values())
    )
    return table


def _counts(results: Sequence[Result]) -> str:
    counts = Counter(each.outcome for each in results)
    return "  ".join(f"{counts[outcome]:>3}" for outcome in OUTCOMES)


def _report(results: Mapping[str, Mapping[str, Sequence[Result]]]) -> Iterator[Result]:
    """Print each test that llamaslot fails, and yield those that llama-server passes and no exception names."""
    peer = {each.test: each.outcome for found in results.get(PEER, {}).values() for each in found}
    for each in (each for found in results[OWN].values() for each in found if each.outcome == "failed"):
        why = reason(each.test)
        if peer.get(each.test, "passed") != "passed":
            verdict = f"{PEER} fails it too"
        else:
            verdict = why or "UNEXPECTED"
            if not why:
                yield each
        console.print(f"{each.summary} [{verdict}]", markup=False, highlight=False, soft_wrap=True)
