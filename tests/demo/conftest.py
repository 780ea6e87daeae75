"""One server with the embedded model for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live import Server, serving


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running `llamaslot serve` with the embedded model."""
    with serving(tmp_path_factory.mktemp("demo"), "--metrics") as server:
        yield server
