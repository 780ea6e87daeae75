"""`llamaslot cache` as a process of its own, against a real server and against servers of other kinds."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from llamaslot.base.stats import CachePrefix
from llamaslot.cli.cache_command import tree
from tests.forked import Command
from tests.live import Server, serving

HEAD = "the head of all prompts, "


def cache(*args: str, **environment: str) -> tuple[int, list[str], list[str]]:
    """The exit status and the lines of stdout and stderr."""
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LLAMA_API_KEY")}
    with tempfile.TemporaryDirectory() as folder:
        done = Command("cache", *args, folder=Path(folder), environ={**variables, **environment}).finish()
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without debug text."""
    args = ("-m", tiny_model, "-c", "2048", "-np", "2", "--in-process")
    with serving(tmp_path_factory.mktemp("server"), *args) as server:
        yield server


@pytest.fixture(scope="module")
def telling(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With debug text and a key."""
    args = ("-m", tiny_model, "-c", "2048", "-np", "2", "--in-process", "--cache-debug-text")
    with serving(tmp_path_factory.mktemp("telling"), *args, environ={"LLAMA_API_KEY": "key"}) as server:
        yield server


def fill(server: Server) -> None:
    for tail in ("one", "two"):
        server.post("/completion", {"prompt": HEAD + tail, "n_predict": 1, "ignore_eos": True})


def test_the_state_and_the_tree(server: Server) -> None:
    fill(server)
    told = server.get("/cache")
    status, lines, errors = cache(server.url)
    assert (status, errors) == (0, [])
    used, idle, free = (f"{told['cells'][name]:,}" for name in ("used", "idle", "free"))
    assert lines[0] == f"cells      {used} of 2,048 used: 0 by running requests, {idle} idle; {free} free"
    assert re.fullmatch(r"RAM        0 tokens in 0 segments, 0\.0 of [\d,]+ MiB", lines[1])
    assert lines[2] == f"sequences  {told['sequences']['used']} of 6 used (2 slots', 4 spare)"
    assert lines[3].startswith(f"tree       {told['tokens']} tokens in {told['nodes']} nodes, ")
    assert lines[4].startswith("hits       1 of 2 requests (50.0%), ")
    matched, total = told["prompt_tokens"]["matched"], told["prompt_tokens"]["total"]
    assert lines[5] == "anchors    0 replies, 0.0 MiB; 0 requests continued from one"
    assert lines[6] == f"reused     {matched} of {total} prompt tokens ({matched / total:.1%})"
    assert "tokens copied, 0 to RAM, 0 from RAM; " in lines[7]
    assert lines[8] == "evicted    0 tokens; 0 prefixes dropped for lack of a sequence id; 0 preemptions"
    assert lines[9] == "drafts     0 of 0 drafted tokens accepted"
    assert lines[10] == f"prefixes   {told['nodes']}, most hits first"
    head, *tails = told["prefixes"]
    held = ", ".join(map(str, head["holders"]))
    assert lines[11].startswith(
        f"└── +{head['edge_tokens']} = {head['tokens']} tokens · 1 hit · held by {held} · used #"
    )
    assert [line[:8] for line in lines[12:]] == ["    ├── ", "    └── "]
    for line, prefix in zip(lines[12:], tails, strict=True):
        assert f"+{prefix['edge_tokens']} = {prefix['tokens']} tokens" in line
    assert not any("head of all" in line for line in lines)


def test_top_and_clear(server: Server) -> None:
    fill(server)
    status, lines, _ = cache(server.url, "--top", "1")
    assert status == 0
    assert lines[10] == "prefixes   1, most hits first"
    assert len(lines) == 12
    idle = server.get("/cache")["cells"]["idle"]
    assert idle > 0
    status, lines, _ = cache(server.url, "--clear")
    assert status == 0
    assert lines[0] == f"cleared: {idle} idle tokens, 0 in RAM, 0 on disk"
    assert lines[1].startswith("cells      0 of 2,048 used")
    assert lines[-1] == "prefixes   none"
    assert server.get("/cache")["nodes"] == 0


def test_debug_text_and_api_key(telling: Server) -> None:
    for how in ({"LLAMA_API_KEY": "wrong"}, {}):
        status, lines, errors = cache(telling.url, **how)
        assert (status, lines) == (2, [])
        assert errors == [f"llamaslot: {telling.url} rejects the API key: Invalid API Key (--api-key)"]
    assert cache(telling.url, "--api-key", "key")[0] == 0
    body = json.dumps({"prompt": "what a user wrote", "n_predict": 0}).encode()
    request = urllib.request.Request(f"{telling.url}/completion", body, {"Authorization": "Bearer key"})
    urllib.request.urlopen(request).close()
    status, lines, _ = cache(telling.url, LLAMA_API_KEY="key")
    assert status == 0
    assert "what a user wrote" in lines[-1]


def test_a_wrong_top_prints_the_message_of_the_server(server: Server) -> None:
    status, _, errors = cache(server.url, "--top", "0")
    assert status == 2
    assert errors == [f"llamaslot: {server.url} answered 400: 'top' must be an integer from 1 to 2000"]
    status, _, errors = cache(server.url, "--top", "many")
    assert (status, len(errors)) == (2, 1)
    assert "--top" in errors[0]


def test_a_missing_server_or_address_is_one_line() -> None:
    assert cache("http://127.0.0.1:9") == (
        2,
        [],
        [
            "llamaslot: no server answers at http://127.0.0.1:9 (Connection refused); "
            "start one with `llamaslot serve`"
        ],
    )
    assert cache("ftp://host") == (
        2,
        [],
        ["llamaslot: 'ftp://host' is not a URL such as http://127.0.0.1:8080"],
    )
    (_, _, (without_scheme,)) = cache("127.0.0.1:9")
    assert without_scheme.startswith("llamaslot: no server answers at http://127.0.0.1:9 (")


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The address of a server that gives one answer to every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    # `shutdown` waits until the server looks.
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b'{"error": {"message": "there is nothing at /cache"}}', "has no /cache.*: .* older llamaslot"),
        (404, b"<html>", "has no /cache"),
        (501, b'{"error": {"message": "start it with --slots"}}', "answered 501: start it with --slots"),
        (200, b"<html>", "is not llamaslot"),
        (200, b'{"nodes": 1}', "incompatible version of llamaslot"),
        (200, json.dumps({"nodes": "many"}).encode(), "incompatible version of llamaslot"),
    ],
)
@pytest.mark.parametrize("flag", [(), ("--clear",)])
def test_a_server_without_a_cache_endpoint_is_one_line(
    status: int, body: bytes, words: str, flag: tuple[str, ...]
) -> None:
    with answering(status, body) as url:
        code, out, errors = cache(url, *flag)
    assert (code, out, len(errors)) == (2, [], 1)
    assert re.search(words, errors[0])


def test_checkpoints_are_shown_with_their_sizes() -> None:
    prefixes = [
        CachePrefix(None, 0, 9, 9, 0, 0, 1, (0,), False, 0, 3 * 2**19),
        CachePrefix(0, 0, 12, 3, 2, 0, 0, (0,), False, 0, None),
        CachePrefix(0, 0, 14, 5, 3, 4, 0, (), False, 0, None),
    ]
    drawn = tree(prefixes, n_namespaces=1)
    [above] = drawn.children
    assert str(above.label) == "+9 = 9 tokens · 1 hit · held by 0 · used #1 latest · checkpoint of 1.5 MiB"
    below = [str(each.label) for each in above.children]
    assert below == [
        "+3 = 12 tokens · 0 hits · held by 0, 2 tokens in RAM · used #1 latest",
        "+5 = 14 tokens · 0 hits · 3 tokens in RAM, 4 tokens on disk · used #1 latest",
    ]


def test_namespaces_are_separate_and_text_cannot_control_the_terminal() -> None:
    def prefix(parent: int | None, namespace: int, text: str = "") -> CachePrefix:
        return CachePrefix(parent, namespace, 9, 3, 0, 0, 1, (0,), parent is None, 0, None, text)

    drawn = tree(
        [prefix(None, 0), prefix(None, 1), prefix(0, 0, "\x1b[2Jbad [red]\u202e"), prefix(1, 1, "y" * 99)],
        n_namespaces=2,
    )
    first, second = drawn.children
    assert (str(first.label), str(second.label)) == ("namespace 0", "namespace 1")
    [above], [below] = first.children, first.children[0].children
    assert str(above.label) == "+3 = 9 tokens · 1 hit · held by 0 · used #1 latest · running"
    assert str(below.label).endswith(r" '\x1b[2Jbad [red]\u202e'")
    assert str(second.children[0].children[0].label).endswith(f" '{'y' * 59}…'")


def test_warm_computes_the_prompts_of_a_file(server: Server, tmp_path: Path) -> None:
    def warm(*args: str) -> tuple[int, list[str], str]:
        done = Command("warm", *args, folder=tmp_path).finish()
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout.splitlines(), done.stderr

    file = tmp_path / "prompts.json"
    file.write_text(
        json.dumps([{"prompt": "to be warmed " * 3}, {"messages": [{"role": "user", "content": "Hi"}]}])
    )
    status, lines, errors = warm(str(file), server.url, "--pin")
    assert (status, errors) == (0, "")
    assert [line.split(",")[-1] for line in lines] == [" pinned"] * 2
    assert server.get("/cache")["pins"]["prefixes"] == 2
    status, lines, _ = warm(str(file), server.url, "--unpin")
    assert status == 0
    assert re.fullmatch(r"prompt 1: \d+ tokens, \d+ cached, 1 computed", lines[0])
    assert server.get("/cache")["pins"]["prefixes"] == 0
    file.write_text('[{"prompt": "ok"}, {"prompt": ["a", "b"]}]')
    status, lines, errors = warm(str(file), server.url)
    assert (status, len(lines)) == (2, 1)
    assert "prompt 2" in errors
    assert "'prompt' must be one prompt" in errors
    for text in ("{", "[]", "5"):
        file.write_text(text)
        status, _, errors = warm(str(file), server.url)
        assert status == 2
        assert "prompts.json" in errors
