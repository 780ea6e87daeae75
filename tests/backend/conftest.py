"""Fixture of all tests of backends."""

from __future__ import annotations

import math
import time

import pytest

from llamaslot.backend.llama import LlamaBackend, costs


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """To measurements the machine seems idle, however many tests run side by side."""
    monkeypatch.setattr(costs, "read_clocks", lambda: costs.Clocks(time.perf_counter(), 0.0, {}))
    monkeypatch.setattr(costs, "MAX_SPREAD", math.inf)
    monkeypatch.setattr(LlamaBackend, "_were_threads_left_out", lambda _: False)
