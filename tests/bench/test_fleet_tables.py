"""Tables of the benchmark of fleets."""

from __future__ import annotations

from pathlib import Path

from bench.fleet.failures import OUTCOMES, Killed, Rolled, kill_table, rolling_table
from bench.fleet.setups import Settings, median_cell, ttft_cells

SETTINGS = Settings(Path("model.gguf"), "a test")
NONE = dict.fromkeys(OUTCOMES, 0)


def test_cells_are_empty_where_nothing_was_measured() -> None:
    assert (median_cell([]), median_cell([0.1, 0.2, 0.9])) == ("", "200 ms")
    assert (ttft_cells([]), ttft_cells([0.1])) == (("", ""), ("100 ms", "100 ms"))
    killed = kill_table([Killed("nginx", "w1", 0, NONE, 0, 0, 0, [], [], [], [], [])], SETTINGS)
    assert [[*column.cells] for column in killed.columns][-4:] == [[""]] * 4
    rolled = rolling_table([Rolled("nginx", 1.0, NONE, [], 0, [])], SETTINGS)
    assert [[*column.cells] for column in rolled.columns][-2:] == [[""]] * 2
