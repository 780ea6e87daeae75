"""The doctor's benchmark: starts a server with the given configuration and measures it for at most ten seconds.

    short prompt                 rates, used to size the next prompt to the available time
    longer prompt, cold          TTFT, prefill and decode rates
    the same again, warm         TTFT with the prompt's KV in the pool

The client measures the times.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

from llamaslot.app.config import Config

_SERVER = "llamaslot.app.doctor.benchmark_server"
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 20.0
_LIMIT_S = 10.0
"""Time limit for all requests together."""
_FIRST_WORDS, _MAX_WORDS = 16, 1500
_PREFILL_S, _DECODE_S = 3.0, 2.0
"""Intended durations of the longer prompt's prefill and of its reply."""
_FIRST_NEW_TOKENS, _MAX_NEW_TOKENS = 8, 128
_WARM_REPEATS = 3
_SELF_TEST_S = 20.0
"""Time to wait for a self-test of reuse that is still pending after the requests."""


class BenchmarkError(Exception):
    """The server did not start or did not answer in time; the message is for the terminal."""

    def __init__(self, message: str, *, has_started: bool) -> None:
        super().__init__(message)
        self.has_started = has_started


class BenchmarkResult(msgspec.Struct, frozen=True):
    """Results of one run; rates in tokens per second."""

    load_s: float
    """Seconds until the server was ready."""
    prompt_tokens: int
    prefill_rate: float
    decode_rate: float
    cold_ttft_ms: float
    warm_ttft_ms: float
    warm_cached_tokens: int
    """Cached prompt tokens of the warm request."""
    start_lines: tuple[str, ...]
    """Lines about model, pool and reuse that the server printed at start."""
    self_test: str = ""
    """Why the self-test does not allow reuse by the end of the run; empty if it does."""


@dataclass(frozen=True, slots=True)
class _Reply:
    ttft_s: float
    timings: dict[str, Any]


def run_benchmark(config: Config) -> BenchmarkResult:
    """Start a server, measure it and stop it. Raises `BenchmarkError`."""
    started = time.monotonic()
    with _server(_local(config)) as (url, lines):
        load_s = time.monotonic() - started
        ends_at = time.monotonic() + _LIMIT_S
        first = _complete(url, _prompt(_FIRST_WORDS), _FIRST_NEW_TOKENS, ends_at)
        n_words, n_new = _sizes(first.timings, _context_of(url))
        prompt = _prompt(n_words)
        cold = _complete(url, prompt, n_new, ends_at)
        warm = [cold]
        for _ in range(_WARM_REPEATS):
            # Always measure once; repeat only while the remaining time suffices.
            if len(warm) == 1 or time.monotonic() + 2 * warm[-1].ttft_s < ends_at:
                warm.append(_complete(url, prompt, 1, ends_at))
        self_test = _self_test_of(url)
    return BenchmarkResult(
        load_s=load_s,
        prompt_tokens=cold.timings["prompt_n"] + cold.timings["cache_n"],
        prefill_rate=cold.timings["prompt_per_second"],
        decode_rate=cold.timings["predicted_per_second"],
        cold_ttft_ms=1e3 * cold.ttft_s,
        warm_ttft_ms=1e3 * min(reply.ttft_s for reply in warm[1:]),
        warm_cached_tokens=warm[-1].timings["cache_n"],
        start_lines=tuple(lines),
        self_test=self_test,
    )


def _local(config: Config) -> Config:
    """Return the configuration without API keys, TLS and the tiers that other servers may be using."""
    return replace(
        config,
        host="127.0.0.1",
        port=0,
        allowed_hosts="",
        insecure=False,
        api_key="",
        api_key_file="",
        ssl_key_file="",
        ssl_cert_file="",
        cache_salt_from_api_key=False,
        cache_ram_per_key=0,
        cache_disk_per_key=0,
        cache_disk="",
        cache_remote="",
        cache_remote_key_file="",
        cache_remote_password_file="",
        cache_remote_ca="",
        slot_save_path="",
        request_timeout=0.0,
        drain_delay=0.0,
    )


def _sizes(timings: dict[str, Any], n_ctx: int) -> tuple[int, int]:
    """Return the words of a prompt and the new tokens that fit into the time at the rates of the first request."""
    per_word = timings["prompt_n"] / _FIRST_WORDS
    n_words = int(timings["prompt_per_second"] * _PREFILL_S / per_word)
    n_new = max(_FIRST_NEW_TOKENS, min(int(timings["predicted_per_second"] * _DECODE_S), _MAX_NEW_TOKENS))
    # Halved: the words of this prompt may have more tokens than those of the first one.
    fits = int((n_ctx - n_new) / per_word / 2)
    return max(1, min(n_words, _MAX_WORDS, fits)), n_new


def _prompt(n_words: int) -> str:
    """Return a random text, so that no cached prefix matches it."""
    chance = random.Random()
    return " ".join(str(chance.randrange(1000)) for _ in range(n_words))


@contextlib.contextmanager
def _server(config: Config) -> Iterator[tuple[str, list[str]]]:
    """Run a server; yield its address and start lines."""
    command = [sys.executable, "-P", "-m", _SERVER]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=errors)
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            process.stdin.flush()
            yield _wait_until_ready(process, output, errors)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
            process.kill()
            process.wait()
            process.stdin.close()


def _wait_until_ready(process: subprocess.Popen[bytes], output: Any, errors: Any) -> tuple[str, list[str]]:
    ends_at = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < ends_at:
        lines = _lines(output)
        for i, line in enumerate(lines):
            if found := re.match(r"listening on (\S+)", line):
                return found[1], lines[:i]
        if process.poll() is not None:
            reasons = [line.removeprefix("llamaslot: ") for line in _lines(errors) if not line.startswith("{")]
            raise BenchmarkError(f"the server did not start: {(reasons or ['it exited'])[-1]}", has_started=False)
        time.sleep(0.05)
    raise BenchmarkError(f"the server was not ready after {_START_TIMEOUT_S:.0f} s", has_started=False)


def _lines(file: Any) -> list[str]:
    file.seek(0)
    return [line for line in file.read().splitlines() if line.strip()]


def _context_of(url: str) -> int:
    return int(_props(url)["default_generation_settings"]["n_ctx"])


def _self_test_of(url: str) -> str:
    """Wait until the self-test of reuse has ended, or a time limit; return why it does not allow reuse, if so."""
    ends_at = time.monotonic() + _SELF_TEST_S
    while (reuse := _props(url)["prefix_reuse"])["self_test"] == "pending" and time.monotonic() < ends_at:
        time.sleep(0.2)
    return str(reuse["reason"]) if reuse["self_test"] in ("pending", "failed") else ""


def _props(url: str) -> Any:
    connection, path = _connected(url, _LIMIT_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET", f"{path}/props")
            return json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BenchmarkError(f"the server did not answer /props: {error}", has_started=True) from error


def _complete(url: str, prompt: str, n_new: int, ends_at: float) -> _Reply:
    """Stream a completion; raises `BenchmarkError` if it does not end in time."""
    body = {"prompt": prompt, "n_predict": n_new, "stream": True, "ignore_eos": True, "temperature": 0}
    started = time.monotonic()
    connection, path = _connected(url, max(ends_at - started, 0.1))
    first = 0.0
    with contextlib.closing(connection):
        try:
            connection.request("POST", f"{path}/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                first = first or time.monotonic()
                event = json.loads(line.removeprefix(b"data: "))
                if event.get("stop"):
                    return _Reply(first - started, event["timings"])
                if time.monotonic() > ends_at:
                    break
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not isinstance(error, TimeoutError):
                raise BenchmarkError(
                    f"the connection to the server failed ({error or type(error).__name__})", has_started=True
                ) from None
    n_chars = f"{n_new} tokens after a prompt of {len(prompt):,} characters"
    raise BenchmarkError(f"too slow to measure in {_LIMIT_S:.0f} s: {n_chars}", has_started=True)


def _connected(url: str, timeout: float) -> tuple[http.client.HTTPConnection, str]:
    address = urlsplit(url)
    return http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout), address.path.rstrip(
        "/"
    )
