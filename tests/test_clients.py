"""Tests with client programs: what is installed for them is what the documents say, and `make` runs it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.clients.sdk_suite.exceptions import EXCEPTIONS, reason

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = (ROOT / "docs" / "clients.md").read_text()


@pytest.fixture(scope="module")
def clients() -> ModuleType:
    spec = importlib.util.spec_from_file_location("clients", ROOT / ".ci" / "clients.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def locked(client: str) -> dict[str, str]:
    """The versions that are installed for a client."""
    lines = (ROOT / ".ci" / "clients" / f"{client}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines)


def test_every_client_has_tests_and_versions_and_every_test_a_client(clients: ModuleType) -> None:
    listed = {**clients.LIGHT, **clients.HEAVY}
    assert {path.stem for path in clients.LOCKS.iterdir()} == set(listed)
    files = sorted(file for each in listed.values() for file in each)
    assert files == sorted(path.name for path in clients.TESTS.glob("test_*.py"))
    assert all("pytest" in locked(client) for client in listed)


def test_the_versions_in_the_document_are_those_that_are_installed(clients: ModuleType) -> None:
    versions: dict[str, set[str]] = {}
    for client in (*clients.LIGHT, *clients.HEAVY):
        for package, version in locked(client).items():
            versions.setdefault(package, set()).add(version)
    rows = re.findall(r"^\| ([a-z-]+) \| ([0-9]+\.[0-9.]+) \|", DOCUMENT, re.MULTILINE)
    assert len(rows) >= 10
    assert [row for row in rows if row[1] not in versions[row[0]]] == []


def test_every_exception_is_in_the_document_with_its_reason() -> None:
    tables, _, _ = DOCUMENT.partition("## langchain-tests")
    rows = re.findall(r"^\| `[^|]+ \| (\d+) \| (.+) \|$", tables, re.MULTILINE)
    assert sorted(why for _, why in rows) == sorted(why for _, why in EXCEPTIONS)
    total = re.search(r"^\| all \| (\d+) \| (\d+) \| (\d+) \|$", DOCUMENT, re.MULTILINE)
    assert total is not None
    n_run, n_passed, n_excepted = map(int, total.groups())
    assert sum(int(number) for number, _ in rows) == n_excepted == n_run - n_passed <= n_run / 10


def test_an_exception_is_for_its_test_alone() -> None:
    test = "tests/api_resources/{}.py::TestCompletions::test_method_create_with_all_params_overload_1[loose]"
    assert reason(test.format("test_completions"))
    assert not reason(test.format("chat/test_completions"))
    assert not reason("tests/api_resources/test_models.py::TestModels::test_path_params_delete[loose]")
