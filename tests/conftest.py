"""Settings for all tests: how long property tests run, and a seed that rotates and is printed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from bench import synthetic

LONG = os.environ.get("LLAMASLOT_TESTS") == "long"
"""`make test-slow` sets it: property tests then run 20 times as many examples."""

ROOT = Path(__file__).resolve().parent
SLOWEST = (
    "kvcache/test_cache_machine.py",
    "app/test_crashes.py",
    "processes/test_prompt_supervisor.py",
    "demo/test_workloads.py",
    "demo/test_reuse.py",
    "app/test_disk_limits.py",
    "app/test_chaos.py",
    "engine/test_disk_worker.py",
    "backend/test_splitters.py",
    "demo/test_session_workloads.py",
    "demo/test_restart.py",
    "engine/test_slot_actions.py",
    "app/test_serve.py",
    "backend/test_disk_store.py",
    "engine/test_no_memory.py",
    "cli/test_pull_command.py",
    "engine/test_sharing.py",
    "bench/test_compare.py",
)

settings.register_profile(
    "llamaslot",
    max_examples=400 if LONG else 20,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("llamaslot")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give hypothesis another seed each run, unless one was asked for; let models compute on one thread.

    Models of tests are tiny: a second thread mostly waits for the first, and keeps a core from the tests beside it.
    """
    # Read by OpenMP when llama.cpp is loaded, here and in the servers that tests start.
    os.environ.setdefault("OMP_THREAD_LIMIT", "1")
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker is left with one of them in the end."""
    order = {ROOT / name: i for i, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_report_header(config: pytest.Config) -> str:
    """Print the seed by which a failing run can be repeated."""
    length = "long" if LONG else "short"
    return f"property tests: {length}, --hypothesis-seed={config.option.hypothesis_seed}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight llama of half a megabyte; its answers mean nothing."""
    return synthetic.ensure("tiny", folder=tmp_path_factory.mktemp("models"))
