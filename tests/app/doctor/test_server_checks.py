"""The doctor on a configuration: wrong values, who may reach the server, ports that are taken."""

from __future__ import annotations

import argparse
import http.server
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamaslot.app.config import Config
from llamaslot.app.config_reader import Parser, add_flags
from llamaslot.app.doctor import Check, Outcome, checks


def flags(*args: str | Path) -> argparse.Namespace:
    parser = Parser(allow_abbrev=False)
    add_flags(parser)
    return parser.parse([str(arg) for arg in args])


def configured(*args: str | Path, **environ: str) -> tuple[Config, Check]:
    return checks.configuration(flags(*args), environ)


def test_a_valid_configuration_is_returned(tmp_path: Path) -> None:
    file = tmp_path / "llamaslot.toml"
    file.write_text("port = 9000\nctx-size = 4096\n")
    config, check = configured("--config", file, "-np", "2")
    assert (config.port, config.ctx_size, config.parallel) == (9000, 4096, 2)
    assert check.outcome is Outcome.OK
    assert "3 settings" in check.found
    assert str(file) in check.found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "did you mean port?"),
        ("port = ", "is not valid TOML"),
        ("port = 'x'", "port in"),
        (None, "cannot read"),
    ],
)
def test_a_wrong_file_fails_with_the_line_of_serve(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "llamaslot.toml"
    if text is not None:
        file.write_text(text)
    config, check = configured("--config", file)
    assert config == Config()
    assert check.outcome is Outcome.FAIL
    assert words in check.found


def test_what_serve_refuses_fails(tmp_path: Path) -> None:
    for words, *args in (
        ("lets other machines use this server", "--host", "0.0.0.0"),
        ("--cache-salt-from-api-key needs API keys", "--cache-salt-from-api-key"),
        ("cannot read", "--chat-template-file", tmp_path / "nowhere"),
        ("no model of nobody/nothing is on this machine", "-hf", "nobody/nothing"),
        ("--mmproj: there is no file", "--mmproj", tmp_path / "nowhere"),
        ("--ssl-cert-file needs", "--ssl-cert-file", tmp_path / "nowhere"),
        ("--cache-remote must be redis://", "--cache-remote", "http://127.0.0.1"),
        ("cannot read", "--cache-remote", "redis://h", "--cache-remote-key-file", tmp_path / "nowhere"),
    ):
        config, check = configured(*args, "--port", "9001")
        assert config.port == 9001
        assert check.outcome is Outcome.FAIL
        assert words in check.found


def keys(folder: Path, *, mode: int = 0o600, text: str = "secret\n") -> str:
    file = folder / f"keys{mode:o}"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def test_who_may_reach_the_server_is_checked(tmp_path: Path) -> None:
    outside = "0.0.0.0"
    for config, outcome, words in (
        (Config(), Outcome.OK, "all users of this machine"),
        (Config(api_key_file=keys(tmp_path)), Outcome.OK, "with API keys"),
        (Config(host=outside, insecure=True), Outcome.WARN, "without API keys"),
        (Config(host=f"127.0.0.1,{outside}", api_key="secret"), Outcome.WARN, "without TLS"),
        (Config(host=outside, api_key="secret", ssl_cert_file="some"), Outcome.OK, "over TLS"),
        (Config(api_key_file=keys(tmp_path, mode=0o644)), Outcome.WARN, "other users may read"),
        (Config(api_key_file=keys(tmp_path, mode=0o640)), Outcome.OK, "with API keys"),
        (Config(api_key_file=str(tmp_path / "nowhere")), Outcome.FAIL, "cannot read"),
        (Config(api_key_file=keys(tmp_path, mode=0o400, text="\n")), Outcome.FAIL, "there is no key"),
    ):
        check = checks.access(config)
        assert check.outcome is outcome, check
        assert words in check.found


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port of loopback on which something listens that does not answer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


@pytest.mark.slow
def test_a_port_that_is_taken_fails_and_names_the_process(taken: socket.socket) -> None:
    number = taken.getsockname()[1]
    check = checks.port(Config(port=number))
    assert check.outcome is Outcome.FAIL
    assert f"{number} is in use by" in check.found
    assert f"process {os.getpid()}" in check.found or "another program" in check.found
    taken.close()
    assert checks.port(Config(port=number)).outcome is Outcome.OK


def test_another_http_server_is_named() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        check = checks.port(Config(port=other.server_port))
        thread.join()
    assert check.outcome is Outcome.FAIL
    assert "answers as SimpleHTTP" in check.found


def test_addresses_that_this_machine_does_not_have_fail() -> None:
    assert "is not an address of this machine" in checks.port(Config(host="192.0.2.1")).found
    assert "is not an address of this machine" in checks.port(Config(host="no.such.host.invalid")).found
    assert checks.port(Config(port=0)).outcome is Outcome.OK


@pytest.mark.skipif(os.geteuid() == 0, reason="root may listen on any port")
def test_a_port_that_needs_privileges_fails() -> None:
    check = checks.port(Config(port=1))
    assert check.outcome in (Outcome.FAIL, Outcome.OK), "some systems allow it"
