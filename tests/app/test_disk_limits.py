"""A disk that is full, read-only or gone, by errors of the kernel: replies stay the same, and writes go on later.

A limit on the size of files works everywhere. A full or read-only file system is mounted in a namespace of its own,
where the machine permits that.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.app.test_crashes import STORY, engine_of, is_healthy, outcome, wait
from tests.live import WRITE_SOON, Server, serving

LIMIT = 200 * 1024
"""Bytes that a file may have: less than the KV of a long prompt, and soon than the index's write-ahead log."""
RETRY = """
from llamaslot.kvcache.tiers import pacing
pacing.PARTIAL_DELAY_S, pacing.RETRY_DELAY_S = 0.1, 0.2
"""
FILE_SIZE = """
import os, resource, sys, threading, time
def follow():
    while True:
        limit = {limit} if os.path.exists({flag!r}) else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        time.sleep(0.02)
if "llamaslot.app.runtime.engine_main" in sys.orig_argv:
    threading.Thread(target=follow, daemon=True).start()
"""
LONG_PROMPTS = [f"{i}. {STORY * 12}" for i in range(8)]
SHORT_PROMPTS = [f"{i} and a cat" for i in range(8)]
MOUNT = (
    'mount -t tmpfs -o size=8m,mode=700 tmpfs "$0" && mkdir -m 700 "$0/segments" && '
    'mount --bind "$0/segments" "$0/segments"'
)
ARGS = ("--cache-disk-size", "6", "--cache-disk-write-per-day", "0")
Texts = dict[str, str]
NEAR_TIE = 0.1
"""Distance of log-probabilities that rounding may bridge."""


def has_namespaces(folder: Path) -> bool:
    """True if this machine lets a test mount file systems in a namespace of its own."""
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        return False
    command = ["unshare", "-rm", "sh", "-c", MOUNT, str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def serving_in_namespace(tmp_path: Path, disk: Path) -> Iterator[Server]:
    """A server for which a file system of 8 MiB is mounted at `disk`, and its folder of segments once more."""
    if not has_namespaces(disk):
        pytest.skip("this machine does not permit a user and mount namespace")
    prefix = ("unshare", "-rm", "sh", "-c", f'{MOUNT} && exec "$@"', str(disk))
    with serving(tmp_path, "--cache-disk", disk, *ARGS, fault=RETRY, is_forked=False, prefix=prefix) as server:
        yield server


def remounted(server: Server, path: Path, options: str) -> bool:
    """Mount `path` of the server's namespace with other options; false if a file in it is open for writing."""
    command = ["nsenter", "-t", str(server.process.pid), "-U", "-m", "--preserve-credentials", "mount"]
    done = subprocess.run([*command, "-o", f"remount,{options}", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "busy" in done.stderr, done.stderr
    return done.returncode == 0


def ask(server: Server, prompt: str) -> str:
    """The greedy reply to a prompt of a session of its own, up to a token that rounding may exchange."""
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "session_id": prompt[:20], "n_probs": 2}
    status, reply, _ = outcome(server, body)
    assert status == 200, reply
    best = [[each["logprob"] for each in row["top_logprobs"]] for row in reply["completion_probabilities"]]
    n_sure = next((i for i, (first, second) in enumerate(best) if first - second < NEAR_TIE), len(best))
    return "".join(row["token"] for row in reply["completion_probabilities"][:n_sure])


def n_failed(server: Server) -> int:
    count: int = server.get("/cache")["disk"]["failed_writes"]
    return count


def first_texts(server: Server) -> Texts:
    """Replies to some of the prompts, whose KV is on disk then."""
    texts = {prompt: ask(server, prompt) for prompt in (*LONG_PROMPTS[:2], *SHORT_PROMPTS[:2])}
    wait(lambda: server.get("/cache")["disk"]["segments"] >= 4)
    return texts


def check_failing(server: Server, texts: Texts) -> None:
    """Nothing can be written: replies are the same as before, new ones too, and the log has a few lines of it."""
    assert n_failed(server) == 0

    def has_failed() -> bool:
        for prompt in (*LONG_PROMPTS[:4], *SHORT_PROMPTS[:4]):
            text = ask(server, prompt)
            assert texts.setdefault(prompt, text) == text
        return n_failed(server) > 5

    wait(has_failed)
    assert is_healthy(server)
    events = Counter(line["event"] for line in disk_warnings(server))
    assert "disk.write_failed" in events
    # A line of each event in 30 s, however many calls fail.
    assert max(events.values()) <= 3, events


def disk_warnings(server: Server) -> list[dict[str, str]]:
    events = ("write", "erase", "mark_used", "text_tables", "count")
    return [line for event in events for line in server.log_lines(f"disk.{event}_failed")]


def check_recovered(server: Server, texts: Texts) -> None:
    """Writing goes on."""
    n_written = server.get("/cache")["disk"]["written_bytes"]
    for prompt in (*LONG_PROMPTS, *SHORT_PROMPTS):
        text = ask(server, prompt)
        assert texts.setdefault(prompt, text) == text
    wait(lambda: server.get("/cache")["disk"]["written_bytes"] > n_written)
    assert not server.log_lines("engine.ended")
    assert server.stop() == 0


@pytest.mark.slow
def test_files_that_may_not_grow(tmp_path: Path, disk: Path) -> None:
    flag = tmp_path / "limited"
    fault = RETRY + FILE_SIZE.format(limit=LIMIT, flag=str(flag))
    with serving(tmp_path, "--cache-disk", disk, *ARGS, fault=fault) as server:
        texts = first_texts(server)
        while (disk / "index.sqlite-wal").stat().st_size < LIMIT:
            assert ask(server, SHORT_PROMPTS[0]) == texts[SHORT_PROMPTS[0]]
        flag.touch()
        # Short prompts fit into a file, and the index cannot take them.
        check_failing(server, texts)
        errors = {line["error"] for line in disk_warnings(server)}
        assert any("File too large" in each for each in errors), errors
        assert "disk I/O error" in errors
        flag.unlink()
        check_recovered(server, texts)
    with serving(tmp_path, "--cache-disk", disk, *ARGS) as server:
        assert server.get("/cache")["disk"]["corrupt_files"] == 0
        for prompt, text in reversed(texts.items()):
            assert ask(server, prompt) == text
        assert server.get("/cache")["requests"]["from_disk"] > 0
        assert server.stop() == 0


def fill(file: Path) -> None:
    """Write to a file until no block is left."""
    with file.open("wb", buffering=0) as blocks, contextlib.suppress(OSError):
        while True:
            blocks.write(bytes(4096))


def test_a_full_file_system(tmp_path: Path, disk: Path) -> None:
    with serving_in_namespace(tmp_path, disk) as server:
        texts = first_texts(server)
        ballast = Path(f"/proc/{server.process.pid}/root{disk}/ballast")
        fill(ballast)
        check_failing(server, texts)
        errors = {line["error"] for line in disk_warnings(server)}
        assert any("No space left" in each for each in errors), errors
        assert "database or disk is full" in errors
        ballast.unlink()
        check_recovered(server, texts)


@pytest.mark.slow
def test_what_a_read_only_file_system_keeps_is_deleted_later(tmp_path: Path, disk: Path) -> None:
    with serving_in_namespace(tmp_path, disk) as server:
        first_texts(server)
        segments = Path(f"/proc/{server.process.pid}/root{disk}/segments")
        wait(lambda: remounted(server, disk / "segments", "bind,ro"))
        assert "could not delete" in refusal(server, "POST", "/cache/clear")
        assert list(segments.iterdir())
        wait(lambda: remounted(server, disk / "segments", "bind,rw"))
        assert server.post("/cache/clear", {})["cleared_disk_tokens"] == 0
        assert not list(segments.iterdir())
        assert server.stop() == 0


@pytest.mark.slow
def test_a_read_only_file_system(tmp_path: Path, disk: Path) -> None:
    with serving_in_namespace(tmp_path, disk) as server:
        texts = first_texts(server)
        wait(lambda: remounted(server, disk / "segments", "bind,ro"))
        check_failing(server, texts)
        assert any("Read-only" in line["error"] for line in disk_warnings(server))
        wait(lambda: remounted(server, disk / "segments", "bind,rw"))
        check_recovered(server, texts)


@pytest.mark.slow
def test_an_engine_that_starts_again_on_a_read_only_file_system_runs_without_it(tmp_path: Path, disk: Path) -> None:
    with serving_in_namespace(tmp_path, disk) as server:
        texts = first_texts(server)

        def remounted_without_engine() -> bool:
            # A file system with a file that is open for writing, such as the index, stays writable.
            n_restarts = len(server.log_lines("engine.restarted"))
            engine_of(server).kill()
            is_done = any(remounted(server, disk, "ro") for _ in range(10))
            wait(lambda: len(server.log_lines("engine.restarted")) > n_restarts)
            return is_done

        wait(remounted_without_engine)
        check_runs_without_disk(server, texts, "Read-only")


@pytest.mark.slow
def test_an_engine_that_starts_again_without_its_folder_runs_without_it(tmp_path: Path, disk: Path) -> None:
    with serving(tmp_path, "--cache-disk", disk, *ARGS, fault=WRITE_SOON) as server:
        texts = first_texts(server)
        disk.rename(tmp_path / "elsewhere")
        disk.touch()
        engine_of(server).kill()
        check_runs_without_disk(server, texts, "Not a directory")
        assert "cannot be used" in refusal(server, "POST", "/cache/clear")
        assert "cannot be used" in refusal(server, "DELETE", f"/sessions/{quote(LONG_PROMPTS[0][:20])}")
        disk.unlink()
        (tmp_path / "elsewhere").rename(disk)
        n_restarts = len(server.log_lines("engine.restarted"))
        engine_of(server).kill()
        wait(lambda: len(server.log_lines("engine.restarted")) > n_restarts)
        assert server.get("/cache")["disk"]["segments"] >= 4
        assert server.post("/cache/clear", {})["cleared_disk_tokens"] > 0
        assert not list((disk / "segments").iterdir())
        assert server.stop() == 0


@pytest.mark.slow
def test_an_engine_that_starts_again_without_disk_and_slot_folder_runs_without_them(
    tmp_path: Path, disk: Path
) -> None:
    slots = tmp_path / "slots"
    with serving(tmp_path, "--cache-disk", disk, "--slot-save-path", slots, *ARGS, fault=WRITE_SOON) as server:
        texts = first_texts(server)
        for folder in (disk, slots):
            folder.rename(tmp_path / f"{folder.name}-elsewhere")
            folder.touch()
        engine_of(server).kill()
        check_runs_without_disk(server, texts, "cannot be used")
        assert [line["flag"] for line in server.log_lines("folder.unusable")] == [
            "--cache-disk",
            "--slot-save-path",
        ]
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/slots/0?action=save", {"filename": "a.bin"})
        assert refused.value.code == 501
        refused.value.close()
        assert server.stop() == 0


def refusal(server: Server, method: str, path: str) -> str:
    """The message of a 503."""
    request = urllib.request.Request(server.url + path, method=method)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value:
        assert refused.value.code == 503
        message: str = json.load(refused.value)["error"]["message"]
    return message


def check_runs_without_disk(server: Server, texts: Texts, reason: str) -> None:
    """The engine has started again and has no disk, which the log says."""
    wait(lambda: bool(server.log_lines("folder.unusable")) and bool(server.log_lines("engine.restarted")))
    assert reason in server.log_lines("folder.unusable")[-1]["reason"]
    assert server.get("/cache")["disk"]["total_bytes"] == 0
    for prompt, text in texts.items():
        assert ask(server, prompt) == text
