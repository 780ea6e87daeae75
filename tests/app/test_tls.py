"""HTTPS: certificates that are wrong, that change, and a server that is reached by them."""

from __future__ import annotations

import asyncio
import io
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from llamaslot.api.context import ApiSettings
from llamaslot.api.credentials import Certificate, certificate
from llamaslot.api.http_server import create_app, serve
from llamaslot.base.errors import ConfigError
from llamaslot.cli.client import Client
from llamaslot.cli.main import main
from tests.certificates import make
from tests.live import serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two certificates, and what is none."""
    folder = tmp_path_factory.mktemp("certificates")
    make(folder, "one")
    make(folder, "two")
    key = folder / "one-key.pem"
    command = f"openssl ec -in {key} -aes128 -passout pass:secret -out {folder / 'encrypted.pem'}"
    subprocess.run(command.split(), check=True, capture_output=True)
    (folder / "text.pem").write_text("no certificate\n")
    (folder / "both.pem").write_text((folder / "one.pem").read_text() + key.read_text())
    return folder


@pytest.mark.parametrize(
    ("cert", "key", "param", "message"),
    [
        ("one.pem", "", "--ssl-key-file", "--ssl-cert-file needs --ssl-key-file"),
        ("", "one-key.pem", "--ssl-cert-file", "--ssl-key-file needs --ssl-cert-file"),
        (
            "none.pem",
            "one-key.pem",
            "--ssl-cert-file",
            r"cannot read .*none.pem: No such file .*\(--ssl-cert-file\)",
        ),
        ("one.pem", "none.pem", "--ssl-key-file", r"cannot read .*none.pem: No such file .*\(--ssl-key-file\)"),
        ("one.pem", ".", "--ssl-key-file", r"cannot read .*: Is a directory \(--ssl-key-file\)"),
        ("text.pem", "one-key.pem", "--ssl-cert-file", r"no PEM certificate in .*text.pem \(--ssl-cert-file\)"),
        ("one-key.pem", "one-key.pem", "--ssl-cert-file", r"no PEM certificate in .*one-key.pem"),
        ("one.pem", "text.pem", "--ssl-key-file", r"no PEM private key in .*text.pem \(--ssl-key-file\)"),
        ("one.pem", "one.pem", "--ssl-key-file", r"no PEM private key in .*one.pem"),
        ("one.pem", "two-key.pem", "--ssl-key-file", r"does not match the certificate in .*one.pem"),
        ("one.pem", "encrypted.pem", "--ssl-key-file", r"encrypted.pem is encrypted: .*\(--ssl-key-file\)"),
    ],
)
def test_a_wrong_file_is_named_with_its_flag(made: Path, cert: str, key: str, param: str, message: str) -> None:
    given = [str(made / file) if file else "" for file in (cert, key)]
    with pytest.raises(ConfigError, match=message) as caught:
        certificate(*given)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


def test_without_flags_there_is_no_tls() -> None:
    assert certificate("", "") is None


def test_key_and_certificate_may_be_one_file(made: Path) -> None:
    both = str(made / "both.pem")
    made_of = certificate(both, both)
    context = made_of and made_of.context
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert {"AES-CBC", "SHA1", "SHA-1"}.isdisjoint({each["symmetric"].upper() for each in context.get_ciphers()})
    assert all(each["aead"] for each in context.get_ciphers())


async def served_certificate(port: int) -> str:
    """The certificate that a server gives to a new connection, as PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return ssl.DER_cert_to_PEM_cert(der)


def copied(made: Path, name: str, cert: Path, key: Path) -> str:
    """Put a pair in the place of another one; the certificate's text."""
    shutil.copy(made / f"{name}-key.pem", key)
    shutil.copy(made / f"{name}.pem", cert)
    return cert.read_text()


async def test_a_changed_certificate_is_served_and_a_broken_one_is_not(made: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    one = copied(made, "one", cert, key)
    certificate = Certificate(cert, key)
    listener = await serve(create_app(ApiSettings()), ["127.0.0.1"], 0, tls=certificate.context)
    port = listener.addresses[0][1]
    assert await served_certificate(port) == one
    # First only one file of the pair is replaced, as a renewal does it.
    shutil.copy(made / "two.pem", cert)
    assert await served_certificate(port) == one
    with capture_logs() as logs:
        certificate.changes.check()
        assert await served_certificate(port) == one
    assert [line["event"] for line in logs] == ["tls.reload_failed"]
    two = copied(made, "two", cert, key)
    certificate.changes.check()
    assert await served_certificate(port) == two
    cert.unlink()
    certificate.changes.check()
    assert await served_certificate(port) == two
    await listener.close()


@pytest.mark.slow
def test_a_server_is_reached_over_https_by_its_own_certificate(
    made: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    copied(made, "one", cert, key)
    small = ("-c", "512", "-np", "1", "--cache-ram", "0", "--in-process", "--max-connections", "4")
    with serving(tmp_path, "-m", tiny_model, "--ssl-cert-file", cert, "--ssl-key-file", key, *small) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert f"curl --cacert {cert} https://" in server.log.read_text()
        port = int(server.url.rpartition(":")[2])
        silent = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(12)]
        assert [each.recv(1) for each in silent[:8]] == [b""] * 8, "handshakes count as connections"
        for each in silent:
            each.close()
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
        assert main(["chat", "--url", server.url, "--cacert", str(cert), "--max-tokens", "2"]) == 0
        assert "2 tokens" in capsys.readouterr().err
        assert main(["cache", server.url]) == 2
        error = capsys.readouterr().err
        assert "is not trusted" in error
        assert "--cacert" in error
        assert main(["cache", server.url.replace("https", "http")]) == 2
        copied(made, "two", cert, key)
        time.sleep(1.1)
        assert main(["cache", server.url, "--cacert", str(cert)]) == 0
        assert "cells" in capsys.readouterr().out
        assert server.stop() == 0


def test_the_certificates_of_a_client_are_checked_before_it_connects(made: Path) -> None:
    for name, message in (("none.pem", "cannot read .*--cacert"), ("text.pem", "no PEM certificate in .*--cacert")):
        with pytest.raises(ConfigError, match=message):
            Client("https://127.0.0.1:9", "", str(made / name))
