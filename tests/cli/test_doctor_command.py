"""`llamaslot doctor` as a process: its table, its JSON, its exit status, and the benchmark on a real server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from llamaslot.app.config import Config
from llamaslot.app.doctor import Outcome, benchmark
from llamaslot.app.doctor.benchmark import BenchmarkResult
from llamaslot.app.doctor.checks import port
from llamaslot.cli.doctor_command import _measured
from tests.forked import Command, Ended


def doctor(folder: Path, *args: str | Path, **environ: str) -> Ended:
    # Start-up measurements are shared with other tests, as in `tests.live.serving`.
    run = folder.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else folder.parent
    variables = {**os.environ, "XDG_CACHE_HOME": str(run / "cache"), **environ}
    return Command("doctor", *args, folder=folder, environ=variables).finish()


@pytest.mark.slow
def test_a_machine_that_serves_is_measured(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    # The server that is measured has neither the keys nor the folder, which another server may use.
    args = ("-m", tiny_model, "--api-key-file", keys, "--cache-disk", tmp_path / "disk", "-c", "512", "-t", "1")
    ended = doctor(tmp_path, *args, "--port", "0", "--json")
    assert ended.stderr == ""
    report = json.loads(ended.stdout)
    assert (ended.returncode, report["ok"]) == (0, True)
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == [
        *("system", "llama.cpp", "devices", "model", "CPU", "memory", "swap", "descriptors", "cache folder"),
        *("--cache-disk", "configuration", "access", "port", "server", "benchmark"),
    ]
    assert all(bool(check["advice"]) == (check["outcome"] != "ok") for check in checks.values())
    result = report["benchmark"]
    assert result["warm_cached_tokens"] >= result["prompt_tokens"] - 1 > 0
    assert all(
        result[name] > 0 for name in ("prefill_rate", "decode_rate", "cold_ttft_ms", "warm_ttft_ms", "load_s")
    )
    assert any("Prefix reuse: on" in line for line in result["start_lines"])
    assert not (tmp_path / "disk").exists()


@pytest.mark.slow
def test_what_keeps_a_server_from_starting_is_a_failure(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = doctor(tmp_path, "-m", "no-such-model", "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 1
    assert ended.stderr == ""
    failed = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("fail ")]
    assert failed == ["model", "port"]
    assert "-> give another --port" in ended.stdout
    assert "benchmark" not in ended.stdout, "no server would start"


def test_a_wrong_flag_is_one_line_and_a_wrong_variable_a_check(tmp_path: Path) -> None:
    ended = doctor(tmp_path, "--prot", "1")
    assert (ended.returncode, ended.stderr) == (2, "llamaslot: there is no flag --prot; did you mean --port?\n")
    ended = doctor(tmp_path, "--no-bench", LLAMA_ARG_CTX_SIZE="many")
    assert ended.returncode == 1
    assert "LLAMA_ARG_CTX_SIZE: 'many' is invalid" in ended.stdout


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why(tiny_model: Path) -> None:
    with pytest.raises(benchmark.BenchmarkError, match=r"did not start: --ctx-size 2,000") as failure:
        benchmark.run_benchmark(Config(model=str(tiny_model), ctx_size=2_000_000_000, gpu_layers=0))
    assert not failure.value.has_started


@pytest.mark.slow
def test_a_server_that_is_too_slow_says_so(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(benchmark, "_LIMIT_S", 0.0)
    with pytest.raises(benchmark.BenchmarkError, match="too slow to measure in 0 s") as failure:
        benchmark.run_benchmark(Config(model=str(tiny_model), ctx_size=512, threads=1))
    assert failure.value.has_started


@pytest.mark.slow
def test_a_server_that_runs_already_is_named_and_ends_with_the_doctor_that_started_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = Config(model=str(tiny_model), ctx_size=512, port=0, threads=1)
    command = [sys.executable, "-P", "-m", "llamaslot.app.doctor.benchmark"]
    own = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=own) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(msgspec.json.encode(config) + b"\n")
        server.stdin.flush()
        url = next(line.split()[2] for line in server.stdout if line.startswith(b"listening on"))
        check = port(Config(port=int(url.rpartition(b":")[2])))
        assert check.outcome is Outcome.WARN
        assert "a llamaslot server" in check.found
        children = psutil.Process(server.pid).children()
        assert children
        server.stdin.close()
        assert server.wait(20) == 1
        assert not psutil.wait_procs(children, timeout=20)[1]


def test_the_benchmark_does_not_wait_for_a_drain_delay() -> None:
    assert benchmark._local(Config(drain_delay=60.0)).drain_delay == 0.0


@pytest.mark.parametrize("reason", ["", "self-test failed: a reason; --reuse-self-test on reuses all the same"])
def test_it_says_why_the_self_test_allows_no_reuse(reason: str) -> None:
    result = BenchmarkResult(1.0, 100, 100.0, 10.0, 100.0, 10.0, 99, ("a line",), reason)
    checks = {check.name: check for check in _measured(result)}
    assert ("self-test of reuse" in checks) is bool(reason)
    if reason:
        check = checks["self-test of reuse"]
        assert (check.outcome, check.found) == (Outcome.WARN, reason)
        assert "--reuse-self-test on" in check.advice
