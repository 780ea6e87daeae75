"""Servers of benchmarks are tried here, and not timed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.server import Server


@pytest.fixture(scope="package", autouse=True)
def _without_costs() -> Iterator[None]:
    """Wait for no measured costs: other programs may keep them from being measured for minutes."""

    async def known(_server: Server, _n_before: int) -> None:
        return

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "measured", known)
        yield
