"""The benchmark of idle prefixes, on a real server: cells are filled as far as it says. Never timed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.idle import Pool, after_mixed_use, beside_idle
from bench.server import llamaslot, serving
from tests.bench.forked_servers import forked_servers


@pytest.mark.slow
def test_the_pool_is_filled_and_measured(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("-c", "4096", "-np", "2", "-t", "1", "--cache-idle-cells", "all", "--cache-ram", "0")

    async def measure() -> None:
        async with serving(llamaslot(tiny_model, *flags), log=tmp_path / "log") as server:
            pool = Pool(server.client, 512)
            seconds = await beside_idle(pool, 2, levels=(0, 600, 1200))
            assert list(seconds) == [0, 600, 1200]
            assert all(each.low > 0 for each in seconds.values())
            assert await pool.n_used() == 1200
            mixed = await after_mixed_use(pool, pool, 5, 1)
            assert mixed["cells_used"] > 1200
            assert mixed["ratio"]["low"] > 0

    with forked_servers():
        asyncio.run(measure())
