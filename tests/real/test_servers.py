"""Real servers with real weights: killed in the middle of traffic and started again, and two that share a store.

Every reply must be a cold one, as far as cold ones agree (`tests/real/cold.py`).
"""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.app.test_crashes import wait
from tests.app.test_remote_tier import remote, server
from tests.live import WRITE_SOON, Server, serving
from tests.real.cold import N_SCORES, Comparison, Control, Reply
from tests.real.conftest import NAMES, REAL, note, path_of
from tests.real.conversations import N_TOKENS, Family, cold_model, families
from tests.store_server import store_server

pytestmark = pytest.mark.skipif(not REAL, reason="long: make test-real")

N_WORKLOADS = 10
FETCHES = """
from llamaslot.kvcache.tiers import pacing, remote_tier
pacing.PARTIAL_DELAY_S = 0.1
def init(self, *args, _init=remote_tier.RemoteTier.__init__, **fields):
    _init(self, *args, **fields | {"prefill_seconds": lambda n: 0.05 * n})
remote_tier.RemoteTier.__init__ = init
"""
"""Fault: prefill is taken to be slow, since a store in Python is slower still with objects of megabytes."""
FLAGS = ("-np", "2", "-c", "8192", "--debug-invariants")


def ask(on: Server, prompt: str) -> Reply:
    """Return the greedy reply with its log-probabilities."""
    body: dict[str, Any] = {"prompt": prompt, "n_predict": N_TOKENS, "temperature": 0, "n_probs": N_SCORES}
    got = on.post("/completion", {**body, "return_tokens": True})
    rows = got["completion_probabilities"]
    return Reply(got["tokens"], [{each["id"]: each["logprob"] for each in row["top_logprobs"]} for row in rows])


def wait_for_reuse(on: Server) -> None:
    """Wait until the self-test has passed, which a model with windows needs."""
    wait(lambda: on.get("/props")["prefix_reuse"]["self_test"] in ("passed", "not needed", ""), 60)


def controlled(some: list[Family]) -> tuple[Comparison, dict[str, Reply]]:
    control = Control()
    for each in some:
        each.control(control)
    return Comparison(control), {prompt: reply for each in some for prompt, reply in each.cold.items()}


@pytest.mark.parametrize("name", NAMES)
def test_texts_after_a_kill_differ_only_as_cold_ones_do(name: str, tmp_path: Path, shared: Path) -> None:
    some = families(name, 0, shared)
    comparison, cold = controlled(some)
    chance = random.Random(1)
    replies: list[tuple[str, Reply]] = []
    n_from_disk = 0
    for _ in range(N_WORKLOADS):
        flags = ("-m", path_of(name), "--cache-disk", tmp_path / "cache", *FLAGS)
        with serving(tmp_path, *flags, fault=WRITE_SOON) as running:
            wait_for_reuse(running)

            def traffic(prompts: list[str], running: Server = running) -> None:
                for prompt in prompts:
                    try:
                        replies.append((prompt, ask(running, prompt)))
                    except OSError:
                        return

            prompts = chance.choice(some).prompts
            threads = [threading.Thread(target=traffic, args=(chance.sample(prompts, 4),)) for _ in range(2)]
            for thread in threads:
                thread.start()
            threads[0].join()
            time.sleep(chance.uniform(0.0, 0.5))
            n_from_disk += running.get("/cache")["requests"]["from_disk"]
            running.stop(signal.SIGKILL)
            for thread in threads:
                thread.join()
    for prompt, reply in replies:
        comparison.add(prompt, cold[prompt], reply)
    report(shared, name, "killed", comparison, from_disk=n_from_disk)
    assert n_from_disk > 0
    comparison.check(cold_model(name))


@pytest.mark.parametrize("name", NAMES)
def test_texts_on_two_servers_with_a_store_differ_only_as_cold_ones_do(
    name: str, tmp_path: Path, shared: Path
) -> None:
    some = families(name, 1, shared)
    comparison, cold = controlled(some)
    chance = random.Random(2)
    flags = ("-m", path_of(name), "--cache-ram", "256")
    with (
        store_server() as store,
        server(tmp_path, store.port, *flags, fault=FETCHES) as a,
        server(tmp_path, store.port, *flags, fault=FETCHES) as b,
    ):
        for each in (a, b):
            wait_for_reuse(each)
        for _ in range(N_WORKLOADS):
            for each in (a, b):
                # Its own cache would answer everything in the end.
                each.post("/cache/clear", {})
            servers = chance.sample((a, b), 2)
            for i, prompt in enumerate(sorted(chance.sample(chance.choice(some).prompts, 4), key=len)):
                on = servers[i % 2]
                before = remote(on)["uploads"]
                comparison.add(prompt, cold[prompt], ask(on, prompt))
                # What is uploaded can be asked for by the other server.
                wait_a_while(lambda on=on, before=before: remote(on)["uploads"] > before)  # type: ignore[misc]
        fetched = sum(remote(each)["fetched_tokens"] for each in (a, b))
        assert [each.stop() for each in (a, b)] == [0, 0]
    report(shared, name, "two servers", comparison, fetched_tokens=fetched)
    assert fetched > 0
    comparison.check(cold_model(name))


def wait_a_while(condition: Any) -> None:
    """Wait for something that need not come."""
    deadline = time.monotonic() + 3
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def report(shared: Path, name: str, kind: str, comparison: Comparison, **figures: int) -> None:
    note(
        shared,
        model=name,
        kind=kind,
        workloads=N_WORKLOADS,
        replies=comparison.n_texts,
        differing=comparison.n_differing,
        positions=len(comparison.moves),
        **{"largest move": max(comparison.moves)},
        **figures,
    )
