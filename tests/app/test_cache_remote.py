"""The settings of `--cache-remote`: each that is wrong is named with its flag, before the model is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llamaslot.app.cache_tiers import KEY_VARIABLE, PASSWORD_VARIABLE, remote_settings
from llamaslot.app.config import Config
from llamaslot.base.errors import ConfigError
from tests.app.test_serve import refused

SECRET = "a secret of 32 bytes, as it seems"
URL = "redis://127.0.0.1:6379"


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret, and no password, in the environment."""
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)


def config(**given: object) -> Config:
    return replace(Config(), **{"cache_remote": URL, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "flag", "message"),
    [
        *(
            ({"cache_remote": url}, "--cache-remote", message)
            for url, message in {
                "http://127.0.0.1": "must be redis://",
                "127.0.0.1:6379": "must be redis://",
                "redis://": "must be redis://",
                "redis://127.0.0.1:0": "must be redis://",
                "unix://": "must be redis://",
                "redis://127.0.0.1:99999": "Port out of range",
                "redis://[::1": "Invalid IPv6",
                f"{URL}?db=1": "must not have options",
                f"{URL}#part": "must not have options",
                "redis://user:hush@127.0.0.1": "must not contain the password",
            }.items()
        ),
        ({"cache_ram": 0}, "--cache-remote", "needs the RAM tier"),
        *(
            ({"cache_remote": "", name: "file"}, flag, f"{flag} needs --cache-remote")
            for name, flag in {
                "cache_remote_key_file": "--cache-remote-key-file",
                "cache_remote_password_file": "--cache-remote-password-file",
                "cache_remote_ca": "--cache-remote-ca",
            }.items()
        ),
        ({"cache_remote_key_file": "/none"}, "--cache-remote-key-file", "cannot read /none: No such file"),
        ({"cache_remote_password_file": "/"}, "--cache-remote-password-file", "cannot read /: Is a directory"),
        ({"cache_remote_ca": "file"}, "--cache-remote-ca", "rediss://"),
        *(
            ({"cache_remote": "rediss://127.0.0.1", "cache_remote_ca": path}, "--cache-remote-ca", message)
            for path, message in {
                "/none": "cannot read /none: No such file",
                "/": "/ cannot be read: Is a directory",
                __file__: "no PEM certificate in",
            }.items()
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_flag(given: dict[str, object], flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        remote_settings(config(**given))
    assert caught.value.param == flag
    assert "hush" not in caught.value.message


@pytest.mark.parametrize("secret", ["", "short", "fifteen letters"])
def test_a_secret_of_sixteen_bytes_is_needed(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, secret)
    with pytest.raises(ConfigError, match="a secret of at least 16 bytes"):
        remote_settings(config())


def test_secrets_come_from_the_first_lines_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "of the environment")
    found = remote_settings(config())
    assert found is not None
    assert (found.secret, found.password) == (SECRET.encode(), "of the environment")
    (tmp_path / "key").write_text("  sixteen letters!\nanother line\n")
    (tmp_path / "password").write_text("of the file\n")
    files = {f"cache_remote_{name}_file": str(tmp_path / name) for name in ("key", "password")}
    found = remote_settings(config(**files))
    assert found is not None
    assert (found.secret, found.password) == (b"sixteen letters!", "of the file")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user@127.0.0.1:6379", "redis://127.0.0.1:6379"),
        ("rediss://store.example", "rediss://store.example"),
        ("unix:///run/valkey.sock", "unix:///run/valkey.sock"),
    ],
)
def test_the_url_is_shown_without_user(url: str, shown: str) -> None:
    found = remote_settings(config(cache_remote=url))
    assert found is not None
    assert found.address == shown


def test_the_server_does_not_start(tmp_path: Path) -> None:
    line = refused(tmp_path, "--cache-remote", "rediss://127.0.0.1", "--cache-remote-ca", "/none")
    assert line.endswith("cannot read /none: No such file or directory (--cache-remote-ca)")
