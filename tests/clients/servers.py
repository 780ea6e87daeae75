"""A server process with the embedded model, which is led to the words that a test needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = os.environ.get("LLAMASLOT_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
TEMPLATE = Path(__file__).resolve().parent / "hermes.jinja"
"""Chat template that tells the model of tools in the form of Hermes."""
READY_TIMEOUT_S = 120


class Server:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON answer to a request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)


@contextmanager
def serving(folder: Path, *flags: str | Path, template: Path | None = TEMPLATE) -> Iterator[Server]:
    """A server with these flags, until the end of the block; `folder` gets its log.

    Without a `template` the embedded model has its own, which leaves tools to the server.
    """
    log = folder / "server.log"
    command = [PYTHON, "-m", "llamaslot.cli.main", "serve", "-m", "demo", "--port", "0", "-t", "1"]
    command += ["--alias", "demo", *map(str, flags)]
    command += ["--chat-template-file", str(template)] if template is not None else []
    with log.open("wb") as output:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder.parent / "cache")}
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environ)
    try:
        yield Server(_address(process, log))
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if found := re.search(r"listening on (\S+)", log.read_text()):
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def grammar_files(folder: Path, texts: tuple[str, ...]) -> list[str]:
    """Flags by which the k-th request without a grammar of its own gets the k-th text, and later ones none."""
    flags: list[str] = []
    for number, text in enumerate((*texts, "unused") if len(texts) == 1 else texts):
        path = folder / f"{number}.lark"
        path.write_text(f"start: {json.dumps(text, ensure_ascii=False)}")
        flags += ["--grammar-file", str(path)]
    return flags


def call(name: str, **arguments: object) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
