"""The doctor on `--cache-remote`: stores that are missing, refuse, are too small, or that others can read."""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import hiredis
import pytest

from llamaslot.app.cache_tiers import KEY_VARIABLE, PASSWORD_VARIABLE, remote_settings
from llamaslot.app.config import Config
from llamaslot.app.doctor import Check, Outcome
from llamaslot.app.doctor import remote_checks as doctor_checks
from llamaslot.app.doctor.remote_checks import remote_checks
from tests import certificates
from tests.store_server import PROGRAM, store_server

DEFAULTS = {
    "PING": "+PONG",
    **dict.fromkeys(("AUTH", "CLIENT", "SELECT", "SET"), "+OK"),
    "INFO": "-ERR",
    "CONFIG": "-ERR",
}
NAME, MEMORY, ACCESS = "--cache-remote", "remote memory", "remote access"


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret, and no password, in the environment."""
    monkeypatch.setenv(KEY_VARIABLE, "a secret of 32 bytes, as it seems")
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)


def checked(url: str, **given: object) -> dict[str, Check]:
    """The checks by name, of which there is one each here."""
    config = replace(Config(), **{"cache_remote": url, "cache_remote_timeout": 5000, **given})  # type: ignore[arg-type]
    settings = remote_settings(config)
    assert settings is not None
    checks = remote_checks(settings, config)
    assert Outcome.FAIL not in {each.outcome for each in checks}, "serve starts without the store"
    return {each.name: each for each in checks}


def free_port() -> int:
    """A port of loopback on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextmanager
def refusing(replies: Mapping[str, str]) -> Iterator[str]:
    """The URL of a server that answers some commands as given, and all others as if it had obeyed."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            commands = hiredis.Reader()
            while data := self.request.recv(2**16):
                commands.feed(data)
                while (command := commands.gets()) is not False:
                    name = command[0].decode().upper()
                    reply = replies.get(name, DEFAULTS.get(name, ":1"))
                    if not reply:
                        return
                    self.request.sendall(reply.encode() + b"\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"redis://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_store_is_measured_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    if not PROGRAM:
        # fakeredis does not wait until a client has received what it sends.
        monkeypatch.setattr(doctor_checks, "_MEASURED_BYTES", 2**14)
    with store_server() as store:
        check = checked(f"redis://127.0.0.1:{store.port}")[NAME]
        assert check.outcome is Outcome.OK, check
        for words in ("connected in ", " ms, PING ", " MiB: writes ", " MiB/s, reads "):
            assert words in check.found
        assert store.connect().keys() == []


@pytest.mark.skipif(not PROGRAM, reason="fakeredis knows no password; `make test-remote` runs this")
@pytest.mark.parametrize(("password", "outcome"), [("", Outcome.WARN), ("no", Outcome.WARN), ("yes", Outcome.OK)])
def test_a_password_is_tried(monkeypatch: pytest.MonkeyPatch, password: str, outcome: Outcome) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, password)
    with store_server("--requirepass", "yes") as store:
        check = checked(f"redis://127.0.0.1:{store.port}")[NAME]
    assert check.outcome is outcome, check
    assert ("--cache-remote-password-file" in check.advice) == (outcome is Outcome.WARN)


@pytest.mark.skipif(not PROGRAM, reason="fakeredis has no memory; `make test-remote` runs this")
@pytest.mark.parametrize(("policy", "outcome"), [("noeviction", Outcome.WARN), ("allkeys-lru", Outcome.OK)])
def test_the_memory_of_a_store_is_found(policy: str, outcome: Outcome) -> None:
    with store_server("--maxmemory", "64mb", "--maxmemory-policy", policy) as store:
        check = checked(f"redis://127.0.0.1:{store.port}", cache_remote_size=64)[MEMORY]
    assert check.outcome is outcome, check
    assert check.found == f"maxmemory 64 MiB, {policy}"


def test_a_store_that_is_not_there_is_a_warning() -> None:
    [check] = checked(f"redis://127.0.0.1:{free_port()}").values()
    assert check.outcome is Outcome.WARN
    assert "cannot be used: Error" in check.found
    assert "start the store or correct --cache-remote:" in check.advice


def test_a_store_that_hangs_is_a_warning_after_the_time_limit() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        [check] = checked(f"redis://127.0.0.1:{server.server_address[1]}", cache_remote_timeout=200).values()
    assert check.found.endswith("does not answer within 200 ms")
    assert "--cache-remote-timeout" in check.advice


@pytest.mark.parametrize(
    ("replies", "found", "advice"),
    [
        (
            {"PING": "-NOAUTH Authentication required."},
            "Authentication required",
            "give --cache-remote-password-file",
        ),
        ({"PING": ""}, "cannot be used", "--cache-remote rediss://"),
        ({"HSET": "-READONLY You can't write against a read only replica."}, "read only", "the primary's address"),
        ({"HSET": "-NOPERM this user has no permissions"}, "no permissions", "ACL"),
        ({"HSET": "-OOM command not allowed"}, "command not allowed", "allkeys-lru"),
        ({"HMGET": "*1\r\n$1\r\nx", "GET": "$1\r\nx"}, "does not return the bytes", "another store"),
    ],
)
def test_what_a_store_refuses_is_a_warning_with_what_to_change(
    replies: dict[str, str], found: str, advice: str
) -> None:
    with refusing(replies) as url:
        [check] = checked(url).values()
    assert check.outcome is Outcome.WARN
    assert found in check.found
    assert advice in check.advice


@pytest.mark.parametrize(
    ("silent", "found", "advice"),
    [
        ("HMGET", "a small object took over 200 ms", "--cache-remote-timeout"),
        ("GET", "4 MiB took over 0 s", "closer"),
    ],
)
def test_a_store_that_is_late_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, silent: str, found: str, advice: str
) -> None:
    monkeypatch.setattr(doctor_checks, "_TRANSFER_TIMEOUT_S", 0.3)
    # It answers with the start of a string, and no more.
    replies = {"HMGET": "*1\r\n$64\r\n" + 64 * "x", silent: "$99"}
    with refusing(replies) as url:
        [check] = checked(url, cache_remote_timeout=200).values()
    assert check.outcome is Outcome.WARN
    assert found in check.found
    assert advice in check.advice


def test_a_wrong_password_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "wrong")
    with refusing({"AUTH": "-WRONGPASS invalid username-password pair or user is disabled."}) as url:
        [check] = checked(url).values()
    assert check.advice.startswith("correct --cache-remote-password-file")
    assert "wrong" not in check.found.replace("WRONGPASS", "")


def test_a_certificate_that_is_not_trusted_names_its_flag(tmp_path: Path) -> None:
    cert, key = certificates.make(tmp_path, "store")
    other, _ = certificates.make(tmp_path, "other")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)

    class Server(socketserver.ThreadingTCPServer):
        def get_request(self) -> Any:
            accepted, address = super().get_request()
            return context.wrap_socket(accepted, server_side=True), address  # type: ignore[arg-type]

    with Server(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        [check] = checked(f"rediss://127.0.0.1:{server.server_address[1]}", cache_remote_ca=str(other)).values()
        server.shutdown()
    assert "--cache-remote-ca" in check.advice


@pytest.mark.parametrize(
    ("info", "config", "size", "outcome", "words"),
    [
        ("maxmemory:1048576\nmaxmemory_policy:allkeys-lru", "", 2, Outcome.WARN, "--cache-remote-size 2 MiB"),
        ("maxmemory:2097152\nmaxmemory_policy:allkeys-lru", "", 2, Outcome.OK, "maxmemory 2 MiB, allkeys-lru"),
        ("maxmemory:2097152\nmaxmemory_policy:noeviction", "", 2, Outcome.WARN, "noeviction"),
        ("maxmemory:2097152\nmaxmemory_policy:volatile-ttl", "", 2, Outcome.WARN, "volatile-ttl"),
        ("maxmemory:0\nmaxmemory_policy:noeviction", "", 2, Outcome.OK, "maxmemory not set"),
        ("maxmemory:0\nmaxmemory_policy:noeviction", "", 0, Outcome.WARN, "maxmemory not set"),
        ("", "*4\r\n$9\r\nmaxmemory\r\n$7\r\n1048576\r\n$16\r\nmaxmemory-policy\r\n$11\r\nallkeys-lru", 2,
         Outcome.WARN, "maxmemory 1 MiB, allkeys-lru; "),
    ],
)  # fmt: skip
def test_the_memory_of_a_store_must_suit(info: str, config: str, size: int, outcome: Outcome, words: str) -> None:
    replies = {"INFO": f"${len(info)}\r\n{info}" if info else "-ERR", "CONFIG": config or "-ERR"}
    with refusing(replies) as url:
        check = checked(url, cache_remote_size=size)[MEMORY]
    assert check.outcome is outcome
    assert words in check.found


def test_who_else_can_read_is_checked(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sixteen letters!\n")
    key.chmod(0o644)
    nowhere = f"127.0.0.1:{free_port()}"
    for url, mode, words in (
        (f"redis://{nowhere}", 0o600, None),
        (f"redis://{nowhere}", 0o644, "other users may read"),
        ("redis://no.such.host.invalid", 0o600, "another machine, without TLS"),
        ("rediss://no.such.host.invalid", 0o600, None),
        (f"unix://{tmp_path}/none", 0o600, None),
    ):
        key.chmod(mode)
        for name in ("cache_remote_key_file", "cache_remote_password_file"):
            check = checked(url, **{name: str(key)}).get(ACCESS)
            if words is None:
                assert check is None
            else:
                assert check is not None
                assert check.outcome is Outcome.WARN
                assert words in check.found
