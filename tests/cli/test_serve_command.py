"""`llamaslot serve --hf-repo`: the model and its projector come from a hub, once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from bench.projector_files import write_projector
from llamaslot.app.model_files import resolve_model
from tests.app.test_mmproj import WIDTH
from tests.fake_hub import FakeHub, StoredFile
from tests.forked import Command
from tests.live import serving

REPO = "somebody/Some-GGUF"
MODEL = "some-Q8_0.gguf"


def variables(folder: Path, hub: FakeHub) -> dict[str, str]:
    return {
        "HF_HOME": str(folder),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_ENDPOINT": hub.url,
        "NO_PROXY": "127.0.0.1",
        "LLAMA_ARG_OFFLINE": "",
    }


async def test_a_model_of_a_hub_is_downloaded_once_and_served(tmp_path: Path) -> None:
    demo = resolve_model("demo").read_bytes()
    files = {
        MODEL: StoredFile(demo),
        "some-Q4_K_M.gguf": StoredFile(b"GGUF"),
        "draft/mmproj-Q8_0.gguf": StoredFile(b"of another model"),
    }
    async with FakeHub({REPO: files}).running() as hub:
        environ = variables(tmp_path, hub)

        def served(*args: str) -> str:
            with serving(tmp_path, "-m", "auto", *args, "-c", "512", "--in-process", environ=environ) as server:
                return str(server.get("/v1/models")["data"][0]["id"])

        args = ["-hf", f"{REPO}:q8_0", "-hft", "secret"]
        assert await asyncio.to_thread(served, *args) == MODEL
        assert hub.requested == [None]
        assert hub.tokens["hub"] == {"Bearer secret"}
        assert await asyncio.to_thread(served, *args, "--offline") == MODEL
        assert await asyncio.to_thread(served, "-hf", REPO, "-hff", MODEL) == MODEL
        assert hub.requested == [None], "it is here"

        async def refused(*args: str) -> str:
            command = Command("serve", *args, folder=tmp_path, environ={**os.environ, **environ})
            ended = await asyncio.to_thread(command.finish)
            assert ended.returncode == 2, ended.stderr
            return ended.stderr

        assert "has no GGUF file for Q2_K; its GGUF files: draft/mmproj" in await refused("-hf", f"{REPO}:Q2_K")
        assert "has no repository a/b" in await refused("-hf", "a/b")
        assert "no model of a/b is on this machine; without --offline" in await refused("-hf", "a/b", "--offline")
        assert "--offline forbids to download it" in await refused("-hf", REPO, "-hff", "z.gguf", "--offline")


async def test_the_projector_of_a_hub_is_downloaded_once_and_used(tmp_path: Path) -> None:
    projector = write_projector(tmp_path / "given.gguf", "mlp", n_embd=WIDTH)
    files = {
        MODEL: StoredFile(resolve_model("demo").read_bytes()),
        "mmproj-F16.gguf": StoredFile(b"none of this model"),
        "mmproj-Q8_0.gguf": StoredFile(projector.read_bytes()),
    }
    async with FakeHub({REPO: files}).running() as hub:
        environ = variables(tmp_path, hub)

        def takes_images(*args: str | Path) -> bool:
            flags = ("-m", "auto", "-hf", f"{REPO}:Q8_0", *args, "-c", "512", "--in-process")
            with serving(tmp_path, *flags, environ=environ) as server:
                assert not server.log_lines("projector.not_used")
                return bool(server.get("/props")["modalities"]["vision"])

        assert not await asyncio.to_thread(takes_images, "--no-mmproj")
        assert len(hub.requested) == 1
        assert await asyncio.to_thread(takes_images, "--mmproj", projector)
        assert len(hub.requested) == 1, "that of --mmproj is used"
        assert await asyncio.to_thread(takes_images)
        assert len(hub.requested) == 2
        hub.repos = {}
        assert await asyncio.to_thread(takes_images), "the hub is not asked"
        assert await asyncio.to_thread(takes_images, "--offline")
        assert len(hub.requested) == 2


async def test_a_projector_that_cannot_be_used_leaves_a_model_of_a_hub_with_text(tmp_path: Path) -> None:
    narrow = write_projector(tmp_path / "narrow.gguf", "mlp", n_embd=64)
    files = {MODEL: StoredFile(resolve_model("demo").read_bytes()), "mmproj.gguf": StoredFile(narrow.read_bytes())}
    async with FakeHub({REPO: files}).running() as hub:
        environ = variables(tmp_path, hub)

        def warnings(*args: str, event: str) -> list[dict[str, Any]]:
            flags = ("-m", "auto", "-hf", f"{REPO}:Q8_0", *args, "-c", "512")
            with serving(tmp_path, *flags, environ=environ) as server:
                assert server.post("/completion", {"prompt": "x", "n_predict": 1})["tokens_predicted"] == 1
                assert not server.get("/props")["modalities"]["vision"]
                return server.log_lines(event)

        files["mmproj.gguf"].sha256 = "0" * 64
        (warning,) = await asyncio.to_thread(warnings, event="projector.not_found")
        assert "mmproj.gguf" in warning["reason"], "what was downloaded is not what the hub describes"
        files["mmproj.gguf"] = StoredFile(narrow.read_bytes())
        (warning,) = await asyncio.to_thread(warnings, event="projector.not_used")
        assert "mmproj.gguf" in warning["reason"]
        assert "n_embd" in warning["reason"]
        cached = next((tmp_path / "hub").glob("**/mmproj.gguf"))
        cached.unlink()
        hub.repos = {}
        (warning,) = await asyncio.to_thread(warnings, event="projector.not_found")
        assert f"has no repository {REPO}" in warning["reason"]
        assert "--no-mmproj" in warning["advice"]
        for flag in ("--offline", "--no-mmproj"):
            assert not await asyncio.to_thread(warnings, flag, event="projector.not_found")
