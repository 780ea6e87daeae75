"""Servers for client programs: `make test-clients` runs these tests, `make test` does not collect them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.clients.servers import Server, grammar_files, serving

collect_ignore_glob: list[str] = []
FLAGS = ("-c", "16384", "-np", "4", "-n", "512", "--temp", "0")
OTHER_SERVERS = ("OPENAI_", "ANTHROPIC_", "LITELLM_", "LANGCHAIN_", "LANGSMITH_", "OLLAMA_")
"""Beginnings of variables that would lead a client elsewhere."""

Lead = Callable[..., Server]


def pytest_configure(config: pytest.Config) -> None:
    """Collect nothing in a run of the project's own tests, whose environment has not the clients."""
    if config.inipath is None or config.inipath.parent != Path(__file__).resolve().parent:
        collect_ignore_glob.append("test_*.py")


@pytest.fixture(scope="session", autouse=True)
def only_this_machine() -> Iterator[None]:
    """Take settings of a user's own clients out of the environment; nothing is asked of hubs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(OTHER_SERVERS)]:
            patch.delenv(name)
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "LITELLM_LOCAL_MODEL_COST_MAP", "DO_NOT_TRACK"):
            patch.setenv(name, "True" if name.startswith("LITELLM") else "1")
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the embedded model; it picks the best token and stops after 512 of them."""
    with serving(tmp_path_factory.mktemp("server"), *FLAGS) as started:
        yield started


@pytest.fixture
def lead(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    """Start a server whose k-th request gets the k-th text as its reply, unless it brings a grammar of its own."""
    with ExitStack() as stack:

        def led(*texts: str) -> Server:
            folder = tmp_path_factory.mktemp("led")
            return stack.enter_context(serving(folder, *FLAGS, *grammar_files(folder, texts)))

        yield led
