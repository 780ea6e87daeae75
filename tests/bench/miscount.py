"""A server whose metrics disagree with its replies, which no benchmark may accept."""

from __future__ import annotations

import pytest

from bench.client import Client


def miscount(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Make `Client` read one counter of `/metrics` as one more than it is."""
    honest = Client.counter

    async def one_more(client: Client, name: str) -> float:
        return await honest(client, name) + (name == wrong)

    monkeypatch.setattr(Client, "counter", one_more)
