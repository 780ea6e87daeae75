"""Files that flags name: what is no regular file is refused at once, and cannot hold up a running server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from llamaslot.api import credentials
from llamaslot.api.credentials import FileChanges
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import MAX_BYTES, read_named, read_named_text
from tests.certificates import make
from tests.conftest import LONG
from tests.live import Server, serving

FLAGS = {
    "--api-key-file": (),
    "--config": (),
    "--chat-template-file": (),
    "--grammar-file": (),
    "--model": (),
    "--ssl-cert-file": ("--ssl-key-file", "{pipe}"),
    "--ssl-key-file": ("--ssl-cert-file", "{cert}"),
    "--cache-remote-key-file": ("--cache-remote", "redis://127.0.0.1:1"),
    "--cache-remote-password-file": (
        "--cache-remote",
        "redis://127.0.0.1:1",
        "--cache-remote-key-file",
        "{secret}",
    ),
    "--cache-remote-ca": ("--cache-remote", "rediss://127.0.0.1:1"),
}


if not LONG:
    FLAGS = {flag: FLAGS[flag] for flag in ("--api-key-file", "--config", "--ssl-cert-file")}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A named pipe without a writer."""
    path = tmp_path_factory.mktemp("files") / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def refusals(pipe: Path, tiny_model: Path) -> dict[str, tuple[int, str]]:
    """Status and last line of a server for each flag with the pipe; the servers start side by side."""
    cert, secret = pipe.parent / "cert.pem", pipe.parent / "secret"
    secret.write_text("a secret of the whole fleet")
    if shutil.which("openssl") is not None:
        make(pipe.parent, "cert")
    started = {}
    for flag, others in FLAGS.items():
        given = [each.format(pipe=pipe, cert=cert, secret=secret) for each in others]
        model = () if flag == "--model" else ("-m", str(tiny_model))
        argv = ["-m", "llamaslot.cli.main", "serve", "--port", "0", *model, flag, str(pipe), *given]
        started[flag] = subprocess.Popen([sys.executable, *argv], stderr=subprocess.PIPE, text=True)
    found = {}
    for flag, process in started.items():
        try:
            _, text = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            text = "it hangs\n" + process.communicate()[1]
        found[flag] = process.returncode, text
    return found


@pytest.mark.parametrize("flag", FLAGS)
def test_a_pipe_is_refused_at_the_start_by_its_flag(refusals: dict[str, tuple[int, str]], flag: str) -> None:
    if flag == "--ssl-key-file" and shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    status, text = refusals[flag]
    assert status == 2, text
    assert "there is no file" in text if flag == "--model" else f"not a regular file ({flag})" in text


def test_what_is_read_is_bounded(tmp_path: Path, pipe: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbfkey")
    assert read_named_text(path, "--flag") == "key", "editors on Windows write a BOM"
    (tmp_path / "link").symlink_to(path)
    assert read_named_text(tmp_path / "link", "--flag") == "key", "containers mount secrets as links"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    for wrong in (path, pipe, tmp_path, tmp_path / "none", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(ConfigError, match=r"cannot read .*\(--flag\)") as caught:
            read_named(wrong, "--flag")
        assert caught.value.param == "--flag"
    path.write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="is not text"):
        read_named_text(path, "--flag")


def test_a_file_system_that_hangs_keeps_one_thread_waiting_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(credentials, "_UNRESPONSIVE_S", 0.0)
    path, hung, free = tmp_path / "file", threading.Event(), threading.Event()
    path.write_text("a")

    def reload() -> None:
        hung.set()
        free.wait(30)

    changes = FileChanges([path], reload)
    changes.start()
    path.write_text("another")
    assert hung.wait(10)
    time.sleep(0.01)
    changes.report_unresponsive()
    assert changes._is_unresponsive
    changes.stop()
    free.set()


def status_of(server: Server, key: str = "") -> int:
    request = urllib.request.Request(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
@pytest.mark.parametrize("args", [["--in-process"], []], ids=["one process", "three"])
def test_a_key_file_that_becomes_a_pipe_stops_nothing_and_a_hangup_reads_it_again(
    tmp_path: Path, tiny_model: Path, args: list[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    with serving(tmp_path, "-m", tiny_model, *args, "--api-key-file", keys) as server:
        assert status_of(server, "old") == 200
        keys.unlink()
        os.mkfifo(keys)
        server.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 20
        while not server.log_lines("api_keys.reload_failed") and time.monotonic() < deadline:
            time.sleep(0.02)
        (line,) = server.log_lines("api_keys.reload_failed")
        assert "not a regular file" in line["error"]
        assert status_of(server, "old") == 200
        keys.unlink()
        keys.write_text("new\n")
        server.process.send_signal(signal.SIGHUP)
        while status_of(server, "new") != 200 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (status_of(server, "new"), status_of(server, "old")) == (200, 401)
        assert server.log_lines("server.reloading")
        keys.unlink()
        os.mkfifo(keys)
        assert server.stop() == 0
