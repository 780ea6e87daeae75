"""Pytest plugin for llama-server's test suite: results as JSON lines, and no downloads.

The suite's session fixture starts every preset once to download its model, and some tests fetch files themselves;
there is nothing to download here.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import requests

from bench.sentencepiece import token_of
from bench.suite.start import FLAGS

RESULTS = "LLAMASLOT_SUITE_RESULTS"
"""Environment variable with the file that gets a JSON line for each test."""
IS_OWN = "LLAMASLOT_SUITE_IS_OWN"
"""Environment variable that is set if the server is llamaslot."""
DOWNLOADS = "LLAMASLOT_SUITE_DOWNLOADS"
"""Environment variable with local files for those that tests fetch, by name, as JSON."""
ANY_WORDS = "LLAMASLOT_SUITE_ANY_WORDS"
"""Environment variable that is set if any text passes for a trained model's words."""
DIVIDED = (
    "test_server_props",
    "test_server_slots",
    "test_context_size_exceeded",
    "test_context_size_exceeded_stream",
    "test_ctx_shift_enabled",
    "test_ctx_shift_disabled_short_prompt",
    "test_ctx_shift_disabled_long_prompt",
)
"""Tests that presume llama-server's default with `--parallel`: each slot has its part of the context."""

LED = ("test_completion_with_required_tool_real_model",)
"""Tests in which random weights must end a text that the grammar leaves free: they are led to the closing quote."""
QUOTE = token_of('"')
CONSTRAINED = (
    "test_completion_with_response_format",
    "test_completion_with_json_schema",
    "test_completion_with_grammar",
)
"""Tests that compare an answer with what a grammar allows, not with a trained model's words."""

# `utils.py` imports it for downloads only, and it is not among this project's packages.
sys.modules.setdefault("wget", ModuleType("wget"))

_test = ""
"""Name of the test that runs, without its parameters."""


def pytest_sessionstart() -> None:
    """Take downloads out of the suite, and let any text pass if that is asked for."""
    utils = sys.modules["utils"]
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    files = json.loads(os.environ[DOWNLOADS])
    utils.download_file = lambda url, *_: files.get(url.rpartition("/")[2], url)
    requests.get = _with_local_files(requests.get, files)
    match = utils.match_regex
    if os.environ.get(ANY_WORDS):
        utils.match_regex = lambda regex, text: _test not in CONSTRAINED or match(regex, text)


def _with_local_files(get: Callable[..., requests.Response], files: Mapping[str, str]) -> Any:
    """Return a function that answers as `get`, and with a local file where the URL ends with its name."""

    def answer(url: str, *args: Any, **kwargs: Any) -> requests.Response:
        file = files.get(url.rpartition("/")[2])
        if file is None:
            return get(url, *args, **kwargs)
        response = requests.Response()
        response.status_code, response.raw = 200, io.BytesIO(Path(file).read_bytes())
        return response

    return answer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Add the flags that a test presumes while it runs."""
    global _test  # noqa: PLW0603 -- pytest has one test at a time, and the suite's functions do not get it
    _test = getattr(item, "originalname", item.name)
    flags = ["--no-kv-unified"] if _test in DIVIDED and os.environ.get(IS_OWN) else []
    if _test in LED:
        flags += ["--logit-bias", f"{QUOTE}+30"]
    os.environ[FLAGS] = " ".join(flags)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the result of a test, and the line that says why it failed."""
    if report.when != "call" and report.outcome == "passed":
        return
    message = ""
    if report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else str(report.longrepr)
    line = {"test": report.nodeid, "outcome": report.outcome, "message": message, "seconds": report.duration}
    with open(os.environ[RESULTS], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
