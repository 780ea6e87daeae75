"""Sends mutated requests to a server and checks each reply: no 500, no hang, and the type that is described."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

import aiohttp

from tests.fuzz.bodies import Request
from tests.fuzz.replies import check_reply

HANG_S = 60
"""Replies of a few tokens that take longer are called hung; the machine may be busy."""


async def send_all(
    session: aiohttp.ClientSession, url: str, requests: Iterable[Request], *, at_once: int
) -> Counter[int]:
    """Send requests, some at once; returns their statuses. An `AssertionError` names a request that fails."""
    statuses: Counter[int] = Counter()
    source = iter(requests)

    async def send_some() -> None:
        for request in source:
            try:
                async with asyncio.timeout(HANG_S):
                    statuses[await _send(session, url, request)] += 1
            except (AssertionError, TimeoutError, aiohttp.ClientError) as error:
                raise AssertionError(f"{error!r} for {request}") from error

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(send_some())
    return statuses


async def _send(session: aiohttp.ClientSession, url: str, request: Request) -> int:
    headers = {"Content-Type": "application/json"}
    async with session.request(request.method, url + request.path, data=request.body, headers=headers) as response:
        raw = await response.read()
        # A slot may be short of cells for the file that it restores; a vocabulary may have no tokens for infilling.
        # `/sessions/..` is `/`, the page.
        more = {"/slots/{id_slot}": (503,), "/infill": (501,), "/sessions/{session_id:.+}": (405,)}
        # What a server was not started for.
        unserved = "/v1/embeddings", "/embedding", "/api/embed", "/api/embeddings", "/rerank"
        more |= dict.fromkeys((*unserved, "/models/load", "/models/unload"), (501,))
        explained = (200, 400, 404, 413, 429, *more.get(request.pattern, ()))
        assert response.status in explained, (response.status, raw)
        check_reply(
            request.method,
            request.pattern,
            response.status,
            response.content_type,
            raw,
            picked=request.picks_fields,
        )
        return response.status
