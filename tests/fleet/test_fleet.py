"""A fleet of real workers behind a real gateway, as `examples/fleet` starts it: routing, keys, kills, restarts.

The long form is `python -m bench fleet`, which compares it with one large server, and smg with nginx.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from bench.fleet.processes import PROGRAM, FleetProcess, running
from bench.fleet.setups import MODEL
from bench.fleet.traffic import Api, Attempt, Conversation, Lengths, Target, Traffic, new_session
from bench.tokens import Tokens, fewest
from llamaslot.app.model_files import resolve_model

KEY = "key-of-a-client"
LENGTHS = Lengths(system=100, user=10, reply=6)
"""System prompts are longer than `CacheSettings.min_shared`, so that nobody computes one that is being computed."""
WORKERS = ("-t", "1", "-np", "2", "-c", "4096", "--alias", MODEL, "--ignore-eos", "--temp", "0")
FOUND = Path(sys.executable).with_name("smg").exists() or shutil.which("smg")

pytestmark = pytest.mark.asyncio(loop_scope="module")
needs_smg = pytest.mark.skipif(not FOUND, reason="there is no smg for this system")


def fleet_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `fleet.py` to its end."""
    command = [sys.executable, str(PROGRAM), "--dir", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(resolve_model("demo"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEY}\n\nanother\n")
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> AsyncIterator[FleetProcess]:
    """Two workers with the embedded model behind smg, which asks for keys."""
    folder = tmp_path_factory.mktemp("fleet")
    flags = ["--workers", "2", "--api-key-file", str(keys)]
    async with running(folder, flags, WORKERS) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with new_session(KEY) as made:
        yield made


def traffic_to(fleet: FleetProcess, session: aiohttp.ClientSession, tokens: Tokens, api: Api = "chat") -> Traffic:
    return Traffic(session, Target(fleet.url, MODEL), api, tokens, LENGTHS)


def conversation_requests(
    tokens: Tokens, chosen: list[Conversation], attempts: list[Attempt]
) -> list[tuple[list[int], list[int]]]:
    """Return prompt and reply of each attempt as token ids, in order of time."""
    by_number = {each.number: each for each in chosen}
    found = []
    for each in sorted(attempts, key=lambda one: one.started):
        one = by_number[each.conversation]
        history = [{"role": "system", "content": one.system}, *one.messages[: 2 * each.turn - 1]]
        reply = str(one.messages[2 * each.turn - 1]["content"])
        found.append((tokens.prompt(history), tokens.of(reply)))
    return found


@pytest.mark.slow
@needs_smg
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_a_fleet_computes_hardly_more_than_one_server_would(
    fleet: FleetProcess, session: aiohttp.ClientSession, tokens: Tokens, api: Api
) -> None:
    """Eight streamed conversations share two system prompts, through each API that smg passes on."""
    traffic = traffic_to(fleet, session, tokens, api)
    chosen = traffic.conversations(8, 2, random.Random(api))
    await traffic.run(chosen, 3, api, 0.05)
    assert [each.detail for each in traffic.attempts if each.outcome != "ok"] == []
    assert len(traffic.attempts) == 24
    for each in chosen:
        workers = {attempt.worker for attempt in traffic.attempts if attempt.conversation == each.number}
        assert len(workers) == 1, "a conversation stays on its worker"
    least = fewest(conversation_requests(tokens, chosen, traffic.attempts))
    n_computed = sum(each.n_computed for each in traffic.attempts)
    # A second copy of a system prompt would be over this. What templates begin with is cached since the first test.
    assert 0.95 * least <= n_computed <= 1.1 * least


@needs_smg
async def test_a_client_needs_a_key_and_cannot_change_the_workers(fleet: FleetProcess) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    [first, _] = await fleet.workers()
    async with aiohttp.ClientSession() as anyone:
        for url in (fleet.url, first):
            for key, status in (("", 401), ("wrong", 401), (KEY, 200)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                async with anyone.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
                    assert reply.status == status
        async with anyone.get(f"{fleet.url}/workers", headers={"Authorization": f"Bearer {KEY}"}) as reply:
            assert reply.status == 401


@needs_smg
async def test_conversations_of_a_worker_that_is_killed_go_on_elsewhere_and_it_is_started_again(
    fleet: FleetProcess, session: aiohttp.ClientSession, tokens: Tokens
) -> None:
    traffic = Traffic(session, Target(fleet.url, MODEL), "chat", tokens, Lengths(60, 10, 400))
    chosen = traffic.conversations(2, 1, random.Random("kill"))
    pids = {each["url"].removeprefix("http://"): each["pid"] for each in (await fleet.status())["workers"]}
    killed: list[str] = []

    def on_text(_one: Conversation, worker: str) -> None:
        if not killed:
            killed.append(worker)
            os.kill(pids[worker], signal.SIGKILL)

    traffic.on_text = on_text
    async with asyncio.timeout(60):
        await traffic.run(chosen, 1, "kill", 0.0)
    [victim] = killed
    outcomes = [each.outcome for each in traffic.attempts]
    assert "broken" in outcomes, "the stream of a killed worker ends, and not as if it were complete"
    assert outcomes.count("ok") == 2
    assert all(each.worker != victim for each in traffic.attempts if each.outcome == "ok")
    for _ in range(200):
        [again] = [each for each in (await fleet.status())["workers"] if each["url"] == f"http://{victim}"]
        if again["state"] == "ready":
            break
        await asyncio.sleep(0.1)
    assert (again["state"], again["starts"]) == ("ready", 2)


@pytest.mark.slow
@needs_smg
async def test_no_request_is_lost_while_a_worker_is_drained_and_started(
    fleet: FleetProcess, session: aiohttp.ClientSession, tokens: Tokens
) -> None:
    """Two conversations go on, on worker 1 alone, while worker 2 is drained, ends and is started again."""
    traffic = traffic_to(fleet, session, tokens)
    chosen = traffic.conversations(2, 2, random.Random("drain"))
    is_over = asyncio.Event()

    async def talk(one: Conversation) -> None:
        words = random.Random(one.name)
        for _ in range(400):
            if is_over.is_set() or not await traffic.turn(one, words):
                return
            del one.messages[4:]
            await asyncio.sleep(0.1)

    async with asyncio.timeout(90), asyncio.TaskGroup() as group:
        for each in chosen:
            group.create_task(talk(each))
        assert await fleet.command("drain", "2") == "worker 2 drains\nworker 2 has ended\n"
        [_, drained] = (await fleet.status())["workers"]
        assert (drained["state"], drained["pid"]) == ("stopped", 0)
        assert await fleet.command("start", "2") == "worker 2 is ready\n"
        is_over.set()
    assert {each.outcome for each in traffic.attempts} == {"ok"}
    assert len(traffic.attempts) > 10


@pytest.mark.slow
@needs_smg
async def test_closing_the_terminal_ends_all(tmp_path: Path) -> None:
    async with running(tmp_path, ["--workers", "1"], WORKERS) as process:
        status = await process.status()
        assert "already runs" in fleet_command(tmp_path, "up").stderr
        os.kill(process.pid, signal.SIGHUP)
        await process.ended()
    for each in (status["gateway"], *status["workers"]):
        with pytest.raises(ProcessLookupError):
            os.kill(each["pid"], 0)
    assert "Traceback" not in (tmp_path / "fleet.log").read_text()


@pytest.mark.slow
@needs_smg
async def test_a_fleet_runs_again_after_its_supervisor_was_killed(tmp_path: Path) -> None:
    """With the same ports, which what was left has."""
    async with running(tmp_path, ["--workers", "1"], WORKERS) as process:
        status = await process.status()
        os.kill(process.pid, signal.SIGKILL)
        await process.ended()
    [worker] = status["workers"]
    ports = [each["url"].rpartition(":")[2] for each in (status["gateway"], worker)]
    flags = ["--workers", "1", "--port", ports[0], "--worker-port", ports[1]]
    async with running(tmp_path, flags, WORKERS) as process:
        assert (await process.status())["gateway"]["url"] == status["gateway"]["url"]
    for each in (status["gateway"], worker):
        with pytest.raises(ProcessLookupError):
            os.kill(each["pid"], 0)


@pytest.mark.slow
async def test_what_cannot_be_done_is_one_line(tmp_path: Path, keys: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for words, *command in (
        ("no fleet runs in", "drain", "1"),
        ("no fleet runs in", "down"),
        ("nosuch was not found", "up", "--gateway-program", "nosuch"),
        ("has no key", "up", "--api-key-file", str(empty)),
        ("No such file", "up", "--api-key-file", str(tmp_path / "missing")),
        ("--workers must be 1 to 1000", "up", "--workers", "0"),
    ):
        done = fleet_command(tmp_path / "fleet", *command)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert words in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flag in ("--port", "--worker-port"):
            gateway = ("--gateway", "nginx", "--gateway-program", sys.executable)
            done = fleet_command(tmp_path / "fleet", "up", *gateway, "--workers", "1", "--port", "0", flag, port)
            assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
            assert f"port {port} cannot be used: Address already in use" in done.stderr
    too_long = fleet_command(tmp_path / ("x" * 100), "status")
    assert "too long" in too_long.stderr


@pytest.mark.skipif(not (nginx := shutil.which("nginx") or shutil.which("/usr/sbin/nginx")), reason="no nginx here")
async def test_nginx_keeps_a_conversation_on_one_worker(tmp_path: Path, tokens: Tokens) -> None:
    flags = ["--workers", "2", "--gateway", "nginx"]
    async with running(tmp_path, flags, WORKERS) as process, new_session() as session:
        traffic = traffic_to(process, session, tokens)
        chosen = traffic.conversations(6, 1, random.Random("nginx"))
        await traffic.run(chosen, 2, "nginx", 0.0)
        assert {each.outcome for each in traffic.attempts} == {"ok"}
        for each in chosen:
            assert len({a.worker for a in traffic.attempts if a.conversation == each.number}) == 1
        await process.command("rolling-restart")
        for pid in [each["pid"] for each in (await process.status())["workers"]][:1]:
            os.kill(pid, signal.SIGKILL)
        await traffic.run(chosen, 1, "again", 0.0)
        assert [each.detail for each in traffic.attempts if each.outcome != "ok"] == []
