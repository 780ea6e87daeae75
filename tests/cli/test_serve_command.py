"""`llamaslot serve --hf-repo`: the model comes from a hub, once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from llamaslot.app.models import resolve_model
from tests.fake_hub import FakeHub, StoredFile
from tests.forked import Command
from tests.live import serving

REPO = "somebody/Some-GGUF"


async def test_a_model_of_a_hub_is_downloaded_once_and_served(tmp_path: Path) -> None:
    demo = resolve_model("demo").read_bytes()
    files = {
        "some-Q8_0.gguf": StoredFile(demo),
        "some-Q4_K_M.gguf": StoredFile(b"GGUF"),
        "mmproj-Q8_0.gguf": StoredFile(b"x"),
    }
    async with FakeHub({REPO: files}).running() as hub:
        environ = {
            "HF_HOME": str(tmp_path),
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_ENDPOINT": hub.url,
            "NO_PROXY": "127.0.0.1",
            "LLAMA_ARG_OFFLINE": "",
        }

        def served(*args: str) -> str:
            with serving(tmp_path, "-m", "auto", *args, "-c", "512", "--in-process", environ=environ) as server:
                return str(server.get("/v1/models")["data"][0]["id"])

        args = ["-hf", f"{REPO}:q8_0", "-hft", "secret"]
        assert await asyncio.to_thread(served, *args) == "some-Q8_0.gguf"
        assert hub.requested == [None]
        assert hub.tokens["hub"] == {"Bearer secret"}
        assert await asyncio.to_thread(served, *args, "--offline") == "some-Q8_0.gguf"
        assert await asyncio.to_thread(served, "-hf", REPO, "-hff", "some-Q8_0.gguf") == "some-Q8_0.gguf"
        assert hub.requested == [None], "it is here"

        async def refused(*args: str) -> str:
            command = Command("serve", *args, folder=tmp_path, environ={**os.environ, **environ})
            ended = await asyncio.to_thread(command.finish)
            assert ended.returncode == 2, ended.stderr
            return ended.stderr

        assert "has no GGUF file for Q2_K; its GGUF files: mmproj" in await refused("-hf", f"{REPO}:Q2_K")
        assert "has no repository a/b" in await refused("-hf", "a/b")
        assert "no model of a/b is on this machine; without --offline" in await refused("-hf", "a/b", "--offline")
        assert "--offline forbids to download it" in await refused("-hf", REPO, "-hff", "z.gguf", "--offline")
