"""The doctor's benchmark: starts a server with the given configuration and measures it for at most ten seconds.

    short prompt                 rates, used to size the next prompt to the available time
    longer prompt, cold          TTFT, prefill and decode rates
    the same again, warm         TTFT with the prompt's KV in the pool

The client measures the times. The main program of the server is this module too: it reads the configuration from
standard input, and exits when that closes, that is, when the doctor ends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import uvloop

from llamaslot.app.config import Config
from llamaslot.app.logs import configure_logging

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 20.0
_LIMIT_S = 10.0
"""Time limit for all requests together."""
_ANSWER_S = 10.0
"""Time limit for a reply that computes nothing."""
_FIRST_WORDS, _MAX_WORDS = 16, 1500
_PREFILL_S, _DECODE_S = 3.0, 2.0
"""Intended durations of the longer prompt's prefill and of its reply."""
_FIRST_NEW_TOKENS, _MAX_NEW_TOKENS = 8, 128
_WARM_REPEATS = 3
_COSTS_S = 20.0
"""Time to wait for the measurement of costs after the start."""
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


def run_benchmark(config: Config) -> BenchmarkResult:
    """Start a server, measure it and stop it. Raises `BenchmarkError`."""
    started = time.monotonic()
    with _server(_local(config)) as (address, lines):
        load_s = time.monotonic() - started
        _wait_for_costs(address)
        ends_at = time.monotonic() + _LIMIT_S
        _, timings = _complete(address, _prompt(_FIRST_WORDS), _FIRST_NEW_TOKENS, ends_at)
        n_words, n_new = _sizes(timings, int(_get(address, "/props")["default_generation_settings"]["n_ctx"]))
        prompt = _prompt(n_words)
        cold_s, cold = _complete(address, prompt, n_new, ends_at)
        warm_s, warm = _complete(address, prompt, 1, ends_at)
        for _ in range(_WARM_REPEATS - 1):
            if time.monotonic() + 2 * warm_s < ends_at:
                warm_s = min(warm_s, _complete(address, prompt, 1, ends_at)[0])
        self_test = _self_test(address)
    return BenchmarkResult(
        load_s=load_s,
        prompt_tokens=cold["prompt_n"] + cold["cache_n"],
        prefill_rate=cold["prompt_per_second"],
        decode_rate=cold["predicted_per_second"],
        cold_ttft_ms=1e3 * cold_s,
        warm_ttft_ms=1e3 * warm_s,
        warm_cached_tokens=warm["cache_n"],
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
    """Run a server; yield its address (host and port) and start lines."""
    command = [sys.executable, "-P", "-m", __name__]
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
    def lines_of(file: Any) -> list[str]:
        file.seek(0)
        return [line for line in file.read().splitlines() if line.strip()]

    ends_at = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < ends_at:
        lines = lines_of(output)
        for i, line in enumerate(lines):
            if found := re.match(r"listening on http://(\S+)", line):
                return found[1], lines[:i]
        if process.poll() is not None:
            reasons = [line.removeprefix("llamaslot: ") for line in lines_of(errors) if not line.startswith("{")]
            raise BenchmarkError(f"the server did not start: {(reasons or ['it exited'])[-1]}", has_started=False)
        time.sleep(0.05)
    raise BenchmarkError(f"the server was not ready after {_START_TIMEOUT_S:.0f} s", has_started=False)


def _self_test(address: str) -> str:
    """Wait until the self-test of reuse has ended, or a time limit; return why it does not allow reuse, if so."""
    ends_at = time.monotonic() + _SELF_TEST_S
    reuse = _get(address, "/props")["prefix_reuse"]
    while reuse["self_test"] == "pending" and time.monotonic() < ends_at:
        time.sleep(0.2)
        reuse = _get(address, "/props")["prefix_reuse"]
    return str(reuse["reason"]) if reuse["self_test"] in ("pending", "failed") else ""


def _wait_for_costs(address: str) -> None:
    """Wait until costs are measured, or a time limit: they decide how a request is computed."""
    ends_at = time.monotonic() + _COSTS_S
    while _get(address, "/cache")["costs_pending"] and time.monotonic() < ends_at:
        time.sleep(0.2)


def _get(address: str, path: str) -> Any:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=_ANSWER_S)) as connection:
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BenchmarkError(f"the server did not answer {path}: {error}", has_started=True) from error


def _complete(address: str, prompt: str, n_new: int, ends_at: float) -> tuple[float, dict[str, Any]]:
    """Stream a completion; return its TTFT in seconds and its `timings`.

    Raises `BenchmarkError` if it does not end in time.
    """
    body = {"prompt": prompt, "n_predict": n_new, "stream": True, "ignore_eos": True, "temperature": 0}
    started = time.monotonic()
    first = 0.0
    timeout = max(ends_at - started, 0.1)
    with contextlib.closing(http.client.HTTPConnection(address, timeout=timeout)) as connection:
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if not line.startswith(b"data: "):
                    continue
                first = first or time.monotonic()
                event = json.loads(line.removeprefix(b"data: "))
                if event.get("stop"):
                    return first - started, event["timings"]
                if time.monotonic() > ends_at:
                    break
        except TimeoutError:
            pass
        except (OSError, http.client.HTTPException, ValueError) as error:
            message = f"the connection to the server failed ({error or type(error).__name__})"
            raise BenchmarkError(message, has_started=True) from None
    n_chars = f"{n_new} tokens after a prompt of {len(prompt):,} characters"
    raise BenchmarkError(f"too slow to measure in {_LIMIT_S:.0f} s: {n_chars}", has_started=True)


def main() -> int:
    """Serve until stopped; return the exit status."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=Config)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logging("json", "warning")
    from llamaslot.app.composition import serve  # noqa: PLC0415
    from llamaslot.base.errors import ConfigError  # noqa: PLC0415

    try:
        return uvloop.run(serve(config))
    except ConfigError as error:
        print(f"llamaslot: {error.message}", file=sys.stderr)
        return 2


def _end_with_parent() -> None:
    # Not through `sys.stdin`: this thread would hold its lock, which Python needs at shutdown.
    while os.read(0, 1024):
        pass
    # The child processes end with this one.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
