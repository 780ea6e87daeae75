"""Settings for all tests: how long property tests run, and by which seed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from bench import synthetic

LONG = os.environ.get("LLAMASLOT_TESTS") == "long"
"""`make test-slow` sets it: property tests then run 20 times as many examples."""

ROOT = Path(__file__).resolve().parent
SLOWEST = (
    "kvcache/test_cache_machine.py",
    "app/test_crashes.py",
    "processes/test_prompt_supervisor.py",
    "fleet/test_fleet.py",
    "real/test_warm_and_cold.py",
    "browser/test_page.py",
    "engine/test_workloads.py",
    "demo/test_next_turn.py",
    "kvcache/test_checkpoint_machine.py",
    "demo/test_workloads.py",
    "demo/test_reuse.py",
    "app/test_disk_limits.py",
    "engine/test_checkpoints.py",
    "bench/test_checkpoints.py",
    "app/test_chaos.py",
    "api/test_bad_input.py",
    "protocol/test_constraints.py",
    "cli/test_doctor_command.py",
    "engine/test_disk_worker.py",
    "backend/test_splitters.py",
    "demo/test_session_workloads.py",
    "demo/test_draft_workloads.py",
    "demo/test_restart.py",
    "demo/test_checkpoints.py",
    "engine/test_slot_actions.py",
    "app/test_serve.py",
    "backend/test_disk_store.py",
    "engine/test_no_memory.py",
    "cli/test_pull_command.py",
    "engine/test_sharing.py",
    "bench/test_compare.py",
)

for profile, is_fixed in (("fixed", True), ("random", False)):
    settings.register_profile(
        profile,
        max_examples=400 if LONG else 20,
        stateful_step_count=50,
        deadline=None,
        derandomize=is_fixed,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def new_seed() -> int:
    """Seed for a random test: another one each time in the long form, always the same in the short form."""
    return random.SystemRandom().randrange(2**32) if LONG else 1000


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed and the profile of hypothesis; let models compute on one thread.

    The short form runs the same examples each time, so that no change fails by chance. The long form explores, as
    does a run with a seed that was asked for. Workers have the options of the process that started them.

    Models of tests are tiny: a second thread mostly waits for the first, and keeps a core from the tests beside it.
    """
    # Read by OpenMP when llama.cpp is loaded, here and in the servers that tests start.
    os.environ.setdefault("OMP_THREAD_LIMIT", "1")
    # A server that is started without a model must not download one.
    os.environ["LLAMA_ARG_OFFLINE"] = "1"
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            # As under `nohup` and in a shell's background job. Servers that tests start must not ignore it as
            # well: a handler, unlike SIG_IGN, is not inherited by what a process executes.
            signal.signal(number, lambda *_: None)
    options = config.option
    if options.hypothesis_profile is None:
        options.hypothesis_profile = "random" if LONG or options.hypothesis_seed is not None else "fixed"
    if options.hypothesis_seed is None:
        options.hypothesis_seed = str(new_seed())
    if options.hypothesis_profile == "fixed":
        # Hypothesis also draws constants of whatever module was imported before, which depends on the tests beside.
        providers._get_local_constants = providers.Constants


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker is left with one of them in the end."""
    order = {ROOT / name: i for i, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    only = [item for item in items if item.get_closest_marker("cpu_only")]
    if only and has_gpu():
        for item in only:
            item.add_marker(pytest.mark.skip(reason="presumes llama.cpp's CPU backend"))


def has_gpu() -> bool:
    """Return True if llama.cpp computes on a GPU here: it was built for one, and there is one."""
    import llama_cpp  # noqa: PLC0415 - most runs of single tests need no llama.cpp

    from llamaslot.backend.llama import library  # noqa: PLC0415

    return bool(llama_cpp.llama_supports_gpu_offload()) and bool(library.gpus())


def pytest_report_header(config: pytest.Config) -> str:
    """Print which examples run, and the seed by which a failing run can be repeated."""
    length, profile = "long" if LONG else "short", config.option.hypothesis_profile
    return f"property tests: {length}, {profile} examples, --hypothesis-seed={config.option.hypothesis_seed}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight llama of half a megabyte; its answers mean nothing."""
    return synthetic.ensure("tiny", folder=tmp_path_factory.mktemp("models"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly what a missing program kept from being tested."""
    skipped = {report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())}
    for reason in sorted(each for each in skipped if "NOT TESTED" in each):
        terminalreporter.write_line(reason, yellow=True, bold=True)
