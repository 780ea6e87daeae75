"""A Hugging Face hub on 127.0.0.1: the requests that a download makes, and the ways in which they go wrong.

Like the real one it answers `resolve` with a redirect to a second address that stores the files and must not
see the user's token. Nothing in it is shared with the code under test.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StoredFile:
    """A file as the hub describes it, which need not be what it sends."""

    content: bytes
    size: int = 0
    sha256: str = ""

    def __post_init__(self) -> None:
        """Describe truthfully what nothing else was said of."""
        self.size = self.size or len(self.content)
        self.sha256 = self.sha256 or hashlib.sha256(self.content).hexdigest()


@dataclass
class FakeHub:
    """Contents of the hub, its faults, and the requests for bytes that it saw."""

    repos: dict[str, dict[str, StoredFile]] = field(default_factory=dict)
    licence: str | None = "apache-2.0"
    gated: bool = False
    portal: bool = False
    """True if a proxy answers with a page of its own."""
    ranges: bool = True
    """True if Range requests are honoured."""
    cuts: list[int] = field(default_factory=list)
    """For each request for bytes in turn: how many to send before the connection is closed."""
    stalls: list[int] = field(default_factory=list)
    """The same, but the connection stays open and silent."""
    statuses: list[int] = field(default_factory=list)
    """For each request for bytes in turn: an error to answer with."""
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while a client waits for bytes that do not come."""
    requested: list[str | None] = field(default_factory=list)
    """The Range header of each request for bytes."""
    tokens: dict[str, set[str | None]] = field(default_factory=lambda: {"hub": set(), "storage": set()})
    """The Authorization headers that each address saw."""
    url: str = ""
    _storage: str = ""
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def describe(self, request: web.Request) -> web.Response:
        """`/api/models/OWNER/REPO`."""
        self.tokens["hub"].add(request.headers.get("Authorization"))
        if self.portal:
            return web.Response(text="<html>Please sign in</html>", content_type="text/html")
        repo = request.match_info["repo"]
        if repo not in self.repos:
            return web.json_response(
                {"error": "Repository not found"}, status=404, headers={"X-Error-Code": "RepoNotFound"}
            )
        siblings = [
            {
                "rfilename": name,
                "size": file.size,
                "blobId": "0" * 40,
                "lfs": {"size": file.size, "sha256": file.sha256, "pointerSize": 134},
            }
            for name, file in self.repos[repo].items()
        ]
        card = {"license": self.licence} if self.licence else {}
        return web.json_response(
            {
                "_id": "1",
                "id": repo,
                "modelId": repo,
                "sha": COMMIT,
                "private": False,
                "cardData": card,
                "siblings": siblings,
            },
        )

    async def resolve(self, request: web.Request) -> web.Response:
        """`/OWNER/REPO/resolve/REVISION/FILE`: where the bytes are."""
        self.tokens["hub"].add(request.headers.get("Authorization"))
        repo, name = request.match_info["repo"], request.match_info["file"]
        if self.gated:
            return web.Response(status=401, headers={"X-Error-Code": "GatedRepo"})
        file = self.repos[repo][name]
        headers = {
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": str(file.size),
            "X-Linked-Etag": f'"{file.sha256}"',
            "Location": f"{self._storage}/{file.sha256}",
        }
        return web.Response(status=302, headers=headers)

    async def send(self, request: web.Request) -> web.StreamResponse:
        """The bytes of a file, or as many as the plan of faults lets through."""
        self.tokens["storage"].add(request.headers.get("Authorization"))
        files = (file for repo in self.repos.values() for file in repo.values())
        content = next(file.content for file in files if file.sha256 == request.match_info["sha256"])
        asked = request.headers.get("Range")
        self.requested.append(asked)
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        response = web.StreamResponse(status=206 if start else 200)
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        response.content_length = len(content) - start
        await response.prepare(request)
        if self.cuts:
            await response.write(content[start : start + self.cuts.pop(0)])
            assert request.transport is not None
            request.transport.close()
        elif self.stalls:
            await response.write(content[start : start + self.stalls.pop(0)])
            self.stalled.set()
            await self._closing.wait()
        else:
            await response.write(content[start:])
        return response

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeHub]:
        """Listen on two ports, one for the hub and one for its storage."""
        hub, storage = web.Application(), web.Application()
        hub.router.add_get("/api/models/{repo:[^/]+/[^/]+}", self.describe)
        hub.router.add_get("/{repo:[^/]+/[^/]+}/resolve/{revision}/{file:.+}", self.resolve)
        storage.router.add_get("/{sha256}", self.send)
        runners = [web.AppRunner(hub), web.AppRunner(storage)]
        try:
            self.url, self._storage = [await _listen(runner) for runner in runners]
            yield self
        finally:
            self._closing.set()
            for runner in runners:
                await runner.cleanup()


async def _listen(runner: web.AppRunner) -> str:
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"
