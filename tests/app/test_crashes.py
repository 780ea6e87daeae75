"""Crashes of the engine under a real server: what runs gets one clear error, the rest is done after the restart."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llamaslot.app.model_files import resolve_model
from tests.conftest import LONG
from tests.live import WRITE_SOON, Server, serving

ABORT, HANG, RAISE = 7, 8, 9
"""Tokens at which the engine aborts, hangs, and fails with a Python error."""
FAULT = f"""
import os, sys, time
_apply = None
def apply(plan, *others):
    tokens = {{token for work in plan.work for token in work.run.tokens.tolist()}}
    if {ABORT} in tokens:
        os.abort()
    if {HANG} in tokens:
        time.sleep(1000)
    if {RAISE} in tokens:
        raise RuntimeError("a bug")
    return _apply(plan, *others)
if "llamaslot.app.runtime.engine_main" in sys.orig_argv:
    from llamaslot.engine import model_worker
    _apply, model_worker.apply = model_worker.apply, apply
"""
STORY = "Once upon a time there was a cat who lived in a house by the sea. "
ENDLESS = {
    "prompt": "a",
    "n_predict": -1,
    "ignore_eos": True,
    "logit_bias": [[ABORT, False], [HANG, False], [RAISE, False]],
}


def engine_of(server: Server) -> psutil.Process:
    """The engine's process."""
    children = psutil.Process(server.process.pid).children()
    return next(each for each in children if "llamaslot.app.runtime.engine_main" in each.cmdline())


def outcome(server: Server, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
    """Status, body and headers of the reply to a completion."""
    try:
        return 200, server.post("/completion", body), {}
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), dict(error.headers)


def streamed(server: Server, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, also of one that fails."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/completion", data)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            lines = reply.read().decode().split("\n\n")
    except urllib.error.HTTPError as error:
        with error:
            return [json.load(error)]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


class OpenStream:
    """A stream whose first events have arrived: its request runs until it has read the rest."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(f"{server.url}{path}", json.dumps({**body, "stream": True}).encode())
        self._reply = urllib.request.urlopen(request, timeout=120)
        self._first = [self._reply.readline() for _ in range(12)]

    def events(self) -> list[Any]:
        """All events to the end; `[DONE]` is text."""
        with self._reply:
            lines = b"".join([*self._first, self._reply.read()]).decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


def wait(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def n_running(server: Server) -> int:
    try:
        return sum(slot["is_processing"] for slot in server.get("/slots"))
    except urllib.error.HTTPError:
        return 0


def health(server: Server) -> tuple[int, Any, dict[str, str]]:
    """Status, body and headers of `/health`."""
    try:
        return 200, server.get("/health"), {}
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), dict(error.headers)


def is_healthy(server: Server) -> bool:
    try:
        return bool(server.get("/health") == {"status": "ok"})
    except urllib.error.HTTPError as error:
        error.close()
        return False


def test_a_crash_fails_what_runs_and_a_request_that_crashes_alone_is_refused(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "-np", "2", fault=FAULT) as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        expected = server.post("/completion", {"prompt": STORY, "n_predict": 8, "temperature": 0})["content"]
        running = pool.submit(streamed, server, ENDLESS)
        wait(lambda: n_running(server) == 1)
        crashing = pool.submit(outcome, server, {"prompt": [ABORT], "n_predict": 1})
        wait(lambda: n_running(server) != 1)
        queued = [
            pool.submit(outcome, server, {"prompt": STORY, "n_predict": 8, "temperature": 0}) for _ in range(4)
        ]
        *texts, last = running.result()
        assert texts
        assert last["error"]["code"] == 503
        assert "restarting" in last["error"]["message"]
        assert crashing.result()[0] == 503
        assert [(status, body.get("content")) for status, body, _ in (q.result() for q in queued)] == [
            (200, expected)
        ] * 4
        assert is_healthy(server)
        innocent = pool.submit(outcome, server, {**ENDLESS, "n_predict": 50})
        status, body, _ = outcome(server, {"prompt": [ABORT], "n_predict": 1})
        assert status == 503
        assert innocent.result()[0] == 200, "it did not run beside the suspect"
        status, body, headers = outcome(server, {"prompt": [ABORT], "n_predict": 1})
        assert (status, "crashed twice" in body["error"]["message"]) == (503, True)
        assert int(headers["Retry-After"]) > 500
        ends = server.log_lines("engine.ended")
        assert [(end["reason"], end["crashed"]) for end in ends] == [("SIGABRT", True)] * 2
        assert server.stop() == 0


LEAVE = """
import ctypes, sys
from pathlib import Path
if "llamaslot.app.runtime.engine_main" in sys.orig_argv:
    from llamaslot.engine.engine import Engine
    def send(self, command, send=Engine.send):
        mark = Path(__file__).with_name("leave")
        if type(command).__name__ == "Generate" and mark.exists():
            mark.unlink()
            # The main thread ends, and the others keep the process and its socket.
            ctypes.CDLL(None).pthread_exit(None)
        send(self, command)
    Engine.send = send
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="on Linux, a process may lose its main thread and go on")
def test_an_engine_that_cannot_end_is_replaced(tmp_path: Path) -> None:
    """As after SIGKILL while one of its threads waits for a disk: it is a zombie whose socket stays open."""
    with serving(tmp_path, fault=LEAVE) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        before = engine_of(server)
        (tmp_path / "fault" / "leave").touch()
        waiting = pool.submit(outcome, server, {"prompt": STORY, "n_predict": 4})
        wait(lambda: len(server.log_lines("engine.ended")) == 1)
        assert waiting.result()[0] == 200
        assert engine_of(server).pid != before.pid
        assert server.stop() == 0


SILENT_DISK = """
import sys, time
from pathlib import Path
if "llamaslot.app.runtime.engine_main" in sys.orig_argv:
    from llamaslot.app.runtime import engine_host
    engine_host._FOLDER_TIMEOUT_AGAIN_S = 1.0
    def lock_disk(config, lock=engine_host.lock_disk):
        if Path(__file__).with_name("hang").exists():
            time.sleep(1000)
        return lock(config)
    engine_host.lock_disk = lock_disk
"""


@pytest.mark.slow
def test_an_engine_starts_again_beside_a_disk_that_hangs(tmp_path: Path) -> None:
    with serving(tmp_path, "--cache-disk", tmp_path / "disk", fault=SILENT_DISK) as server:
        (tmp_path / "fault" / "hang").touch()
        engine_of(server).kill()
        wait(lambda: len(server.log_lines("engine.restarted")) == 1)
        assert server.post("/completion", {"prompt": STORY, "n_predict": 4})["content"]
        [line] = server.log_lines("folder.unusable")
        assert (line["flag"], "does not respond" in line["reason"]) == ("--cache-disk", True)
        assert server.stop() == 0


@contextlib.contextmanager
def freezable(folder: Path) -> Iterator[Path]:
    """A file system that `fsfreeze` can freeze: threads that write to it then wait uninterruptibly."""
    image, mounted = folder / "image", folder / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(2**26)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, mounted]):
        if (
            not shutil.which(str(command[0]))
            or subprocess.run(command, capture_output=True, check=False).returncode
        ):
            pytest.skip("no file system can be mounted here")
    try:
        yield mounted
    finally:
        subprocess.run(["fsfreeze", "-u", mounted], capture_output=True, check=False)
        subprocess.run(["umount", "-l", mounted], check=True)


@pytest.mark.skipif(not LONG, reason="needs the right to mount; the tests above have it without a disk")
def test_an_engine_that_is_killed_while_its_disk_hangs_is_replaced(tmp_path: Path) -> None:
    with (
        freezable(tmp_path) as disk,
        serving(tmp_path, "--cache-disk", disk / "cache", fault=WRITE_SOON) as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        before = engine_of(server)
        subprocess.run(["fsfreeze", "-f", disk], check=True)
        server.post("/completion", {"prompt": STORY * 30, "n_predict": 40})
        wait(lambda: any(state_of(each) == "D" for each in Path(f"/proc/{before.pid}/task").iterdir()))
        before.kill()
        wait(lambda: not is_healthy(server), seconds=6)
        waiting = pool.submit(outcome, server, {"prompt": STORY, "n_predict": 4})
        wait(lambda: len(server.log_lines("engine.restarted")) == 1)
        assert waiting.result()[0] == 200
        assert before.status() == psutil.STATUS_ZOMBIE
        assert [line["flag"] for line in server.log_lines("folder.unusable")] == ["--cache-disk"]
        assert is_healthy(server)
        assert server.stop() == 0


def state_of(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_a_stopped_engine_is_not_healthy_and_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        for process in psutil.Process(server.process.pid).children():
            process.suspend()
            wait(lambda: not is_healthy(server))
            status, body, _ = health(server)
            assert (status, "is stopped, by a signal" in body["error"]["message"]) == (503, True)
            waiting = pool.submit(outcome, server, {"prompt": STORY, "n_predict": 4})
            process.resume()
            assert waiting.result()[0] == 200
            wait(lambda: is_healthy(server))
        assert not server.log_lines("engine.ended")
        assert server.stop() == 0


@pytest.mark.slow
def test_a_bug_in_the_engine_fails_what_runs_and_is_restarted_from(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "-np", "2", fault=FAULT) as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        running = pool.submit(streamed, server, ENDLESS)
        wait(lambda: n_running(server) == 1)
        bad = {"prompt": [RAISE], "n_predict": 1}
        assert outcome(server, bad)[0] == 503
        assert running.result()[-1]["error"]["code"] == 503
        assert outcome(server, bad)[0] == 503
        status, body, _ = outcome(server, bad)
        assert (status, "crashed twice" in body["error"]["message"]) == (503, True)
        assert outcome(server, {"prompt": STORY, "n_predict": 2})[0] == 200
        assert len(server.log_lines("engine.died")) == 2
        assert server.stop() == 0


@pytest.mark.slow
def test_a_step_that_hangs_is_ended(tmp_path: Path) -> None:
    with serving(tmp_path, "--step-timeout", "1", fault=FAULT) as server:
        started = time.monotonic()
        assert outcome(server, {"prompt": [HANG], "n_predict": 1})[0] == 503
        assert 1 < time.monotonic() - started < 10
        wait(lambda: is_healthy(server))
        assert outcome(server, {"prompt": STORY, "n_predict": 2})[0] == 200
        assert server.log_lines("step.overdue")[0]["flag"] == "--step-timeout"
        assert server.log_lines("engine.ended")[0]["crashed"]
        assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("n_kills", [50 if LONG else 2])
def test_killing_the_engine_under_load_loses_nothing_that_is_on_disk(tmp_path: Path, n_kills: int) -> None:
    disk = tmp_path / "disk"
    prompts = [f"Story {i}. {STORY * 12}" for i in range(4)]
    outcomes: list[tuple[int, Any]] = []
    with (
        serving(tmp_path, "--cache-disk", disk, "--cache-disk-write-per-day", "0", fault=WRITE_SOON) as server,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        expected = [server.post("/completion", {"prompt": p, "n_predict": 8, "temperature": 0}) for p in prompts]
        texts = [each["content"] for each in expected]
        n_prompt = sum(each["tokens_evaluated"] for each in expected)
        wait(lambda: server.get("/cache")["disk"]["tokens"] >= n_prompt - 4 * len("Story 1."))
        for n in range(n_kills):
            endless = OpenStream(server, "/completion", ENDLESS)
            futures = [
                pool.submit(outcome, server, {"prompt": prompts[i % 4], "n_predict": 8, "temperature": 0})
                for i in range(12)
            ]
            wait(lambda futures=futures: n_running(server) > 1 or any(each.done() for each in futures))
            engine_of(server).kill()
            killed = time.monotonic()
            wait(lambda n=n: len(server.log_lines("engine.restarted")) > n)
            assert is_healthy(server)
            assert time.monotonic() - killed < 5
            for i, future in enumerate(futures):
                status, body, _ = future.result()
                outcomes.append((status, body))
                assert status in (200, 503)
                assert status == 503 or body["content"] == texts[i % 4]
            *texts_before, last = endless.events()
            assert last["error"]["code"] == 503
            assert not any("error" in event or event["stop"] for event in texts_before)
        assert sum(status == 200 for status, _ in outcomes) > len(outcomes) // 4
        stats = server.get("/cache")
        assert stats["disk"]["corrupt_files"] == 0
        assert len(server.log_lines("engine.restarted")) == n_kills
        assert not server.log_lines("engine.suspects")
        n_written = stats["disk"]["tokens"]
        engine_of(server).kill()
        wait(lambda: len(server.log_lines("engine.restarted")) > n_kills)
        assert server.get("/cache")["disk"]["tokens"] >= n_written
        # Before anything else runs: only the disk can have it.
        warm = server.post("/completion", {"prompt": prompts[0], "n_predict": 8, "temperature": 0})
        assert warm["cache"]["disk"] > 0
        assert warm["content"] == texts[0]
        assert server.stop() == 0


MESSAGES = [{"role": "user", "content": STORY}]
STREAMS: dict[str, tuple[dict[str, Any], list[str], Callable[[Any], str]]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, ["error"], lambda event: event["error"]["type"]),
    "/v1/completions": ({"prompt": STORY}, ["error"], lambda event: event["error"]["type"]),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 10**6},
        ["error"],
        lambda event: event["error"]["type"].replace("overloaded", "unavailable"),
    ),
    "/v1/responses": ({"input": STORY}, ["error", "response.failed"], lambda event: event["code"]),
}
"""By path: an endless request, the events with which its stream then ends, and the type in the first of them."""
ENDS = {"[DONE]", "message_delta", "message_stop", "response.completed", "response.incomplete"}
"""Events at the end of streams that do not fail."""


def kind_of(event: Any) -> str:
    """The type of an event."""
    return event if isinstance(event, str) else event.get("type", "error" if "error" in event else "chunk")


def n_deferred(server: Server) -> float:
    """Requests that wait for a slot."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("llamacpp:requests_deferred "))


def test_the_stream_of_every_api_ends_with_one_error_when_the_engine_is_killed(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "-np", str(len(STREAMS)), "--metrics") as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        streams = [(path, OpenStream(server, path, {**STREAMS[path][0], "ignore_eos": True})) for path in STREAMS]
        queued = [pool.submit(server.post, path, {**STREAMS[path][0], "max_tokens": 2}) for path in STREAMS]
        wait(lambda: n_deferred(server) == len(queued))
        engine_of(server).kill()
        for path, stream in streams:
            _, expected, type_of = STREAMS[path]
            events = stream.events()
            kinds = [kind_of(event) for event in events]
            assert kinds[-len(expected) :] == expected, path
            assert not ({"error", "response.failed"} | ENDS) & {*kinds[: -len(expected)]}, path
            assert type_of(events[-len(expected)]) == "unavailable_error", path
        failed = events[-1]["response"]
        assert failed["status"] == "failed"
        assert "restarting" in failed["error"]["message"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            server.get(f"/v1/responses/{failed['id']}")
        assert all(each.result() for each in queued), "they run after the restart"
        assert server.stop() == 0


def test_a_stop_just_after_the_engine_was_killed_is_clean(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        parent, engine = psutil.Process(server.process.pid), engine_of(server)
        # So that it hears of both at once.
        parent.suspend()
        engine.kill()
        wait(lambda: engine.status() == psutil.STATUS_ZOMBIE)
        parent.send_signal(signal.SIGTERM)
        parent.resume()
        assert server.process.wait(15) == 0
        assert [line["reason"] for line in server.log_lines("engine.ended")] == ["SIGKILL"]
        assert not server.log_lines("server.aborted")


@pytest.mark.slow
def test_a_crash_of_the_engine_while_it_stops_is_named(tmp_path: Path) -> None:
    fault = "import os\nfrom llamaslot.engine.engine import Engine\nEngine.stop = lambda _: os.abort()"
    with serving(tmp_path, fault=fault) as server:
        assert server.stop() == 1
        assert "SIGABRT" in server.log_lines("server.aborted")[0]["reason"]


def test_the_children_end_with_the_parent_and_leave_no_lock(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with (
        serving(tmp_path, "--cache-disk", disk) as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        children = psutil.Process(server.process.pid).children()
        assert len(children) == 2
        pool.submit(streamed, server, ENDLESS)
        wait(lambda: n_running(server) == 1)
        server.process.kill()
        # Without a process that reaps orphans they stay zombies.
        wait(lambda: all(not c.is_running() or c.status() == psutil.STATUS_ZOMBIE for c in children), seconds=1)
    with serving(tmp_path, "--cache-disk", disk) as server:
        assert is_healthy(server)


@pytest.mark.slow
def test_a_model_file_that_is_gone_is_waited_for_and_a_changed_one_is_not_served(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(resolve_model("demo"), model)
    # Of a pool this small, nothing is measured at start.
    with serving(tmp_path, "-m", model, "-c", "2048", is_forked=False) as server:
        model.rename(tmp_path / "elsewhere")
        engine_of(server).kill()
        wait(lambda: len(server.log_lines("engine.ended")) >= 2)
        assert not is_healthy(server)
        assert "no model file" in server.log_lines("engine.ended")[1]["reason"]
        (tmp_path / "elsewhere").rename(model)
        wait(lambda: is_healthy(server))
        assert outcome(server, {"prompt": STORY, "n_predict": 2})[0] == 200
        os.utime(model)
        engine_of(server).kill()
        assert server.process.wait(20) == 1, "a service manager may start it again"
        assert "was changed" in server.log_lines("engine.not_restarted")[0]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (
            "import os\nfrom llamaslot.backend.llama import LlamaVocab\nLlamaVocab.load = lambda *_: os.abort()\n"
            "from llamaslot.processes import prompt_supervisor\nprompt_supervisor._PAUSE_S = 0.1",
            "SIGABRT",
        ),
        pytest.param(
            "import os, llamaslot.app.runtime.engine_host as host\nhost.lock_disk = lambda _: os.abort()",
            "SIGABRT",
            marks=pytest.mark.skipif(not LONG, reason="the engine's failure with a status is in the short form"),
        ),
        (
            "import llamaslot.app.runtime.engine_host as host\nhost.lock_disk = lambda _: 1 / 0",
            "exit status 1",
        ),
    ],
    ids=["vocabulary", "engine", "bug"],
)
def test_a_process_that_crashes_at_the_first_start_ends_the_server_with_one_line(
    tmp_path: Path, fault: str, line: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(fault)
    ended = subprocess.run(
        [sys.executable, "-m", "llamaslot.cli.main", "serve", "-m", "demo", "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path.parent / "cache")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert line in ended.stderr.splitlines()[-1]
    assert ended.stderr.splitlines()[-1].startswith("llamaslot: ")


@pytest.mark.slow
def test_a_signal_while_the_model_loads_ends_it(tmp_path: Path) -> None:
    slow = "import llamaslot.app.runtime.engine_host as host, time\nhost.lock_disk = lambda _: time.sleep(3)"
    (tmp_path / "sitecustomize.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, "-m", "llamaslot.cli.main", "serve", "-m", "demo", "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    try:
        parent = psutil.Process(process.pid)
        wait(lambda: len(parent.children()) == 2)
        time.sleep(1)
        children = parent.children()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) in (0, 130)
        wait(lambda: all(not c.is_running() or c.status() == psutil.STATUS_ZOMBIE for c in children), seconds=2)
    finally:
        process.kill()
