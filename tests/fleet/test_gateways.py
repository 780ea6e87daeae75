"""Command lines of the gateways."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from examples.fleet.gateways import Settings, Smg

NEVER = {"--balance-rel-threshold": "3", "--worker-overload-waiting-requests": "1000000"}
NEVER |= {"--worker-overload-token-usage": "1"}


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_smg_moves_conversations_for_load_only_where_workers_share_prefixes(shares_prefixes: bool) -> None:
    workers = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]
    settings = Settings(
        Path(), 9, workers, shares_prefixes=shares_prefixes, program="/bin/true", flags=["--x", "1"]
    )
    command = Smg(settings, "cache_aware").command()
    given = {flag: value for flag, value in pairwise(command) if flag in NEVER}
    assert given == ({} if shares_prefixes else NEVER)
    # The user's flags come last, and so count.
    assert command[-2:] == ["--x", "1"]
