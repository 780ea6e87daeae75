"""The tests of openai's and anthropic's SDKs pass, but for at most a tenth, each with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import FLAGS
from tests.clients.sdk_suite import plugin
from tests.clients.sdk_suite.sources import source_of
from tests.clients.servers import ROOT, serving

MAX_EXCEPTED = 0.1
ENDPOINTS = {
    "openai": ("chat", "test_completions.py", "test_models.py", "test_responses.py", "responses"),
    "anthropic": ("test_messages.py",),
}


def test_the_sdks_own_tests_pass(tmp_path: Path) -> None:
    results = []
    for package in ENDPOINTS:
        (tmp_path / package).mkdir()
        found = results_of(package, tmp_path / package)
        counts = Counter(each["outcome"] for each in found)
        print(f"{package}: {dict(counts)}")
        results += found
    failed = [f"{each['test']}: {each['message']}" for each in results if each["outcome"] == "failed"]
    assert not failed, "\n".join(failed)
    excepted = sum(each["outcome"] == "excepted" for each in results)
    assert excepted <= MAX_EXCEPTED * len(results), f"{excepted} of {len(results)}"


def results_of(package: str, folder: Path) -> list[dict[str, Any]]:
    """The results of an SDK's tests, a server of their own for each SDK."""
    suite, results = source_of(package), folder / "results.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "sdk_suite.plugin", "-c", os.devnull, "--rootdir", str(suite)]
    command += ["-q", "-o", "asyncio_default_fixture_loop_scope=session", "-o", "asyncio_mode=auto"]
    command += [f"tests/api_resources/{each}" for each in ENDPOINTS[package]]
    with serving(folder, *FLAGS, "-n", "32", template=None) as server:
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "tests" / "clients"),
            plugin.URL: server.url,
            plugin.PACKAGE: package,
            plugin.RESULTS: str(results),
        }
        subprocess.run(command, cwd=suite, env=environ, check=False, timeout=900)
    if not results.exists():
        pytest.fail(f"the tests of {package} did not run")
    return [json.loads(line) for line in results.read_text().splitlines()]
