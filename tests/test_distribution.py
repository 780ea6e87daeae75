"""The wheel runs without a checkout: installed into a fresh environment, it serves the embedded model.

Nothing is downloaded. The environment has links to the packages of this one, but only to those that the wheel's own
metadata requires, directly or not: an undeclared dependency is missing there, as it is for users.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
MAX_FIRST_TOKEN_S = 60
"""Time from starting the server to the first streamed token, start-up measurements included."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make dist` builds from its source distribution alone."""
    folder = tmp_path_factory.mktemp("dist")
    command = re.search(
        r"^dist:.*\n\t\$\(BIN\)/python (.*) \$\(ARGS\)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert command is not None
    build = [sys.executable, *command[1].split(), "--outdir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (source,) = folder.glob("llamaslot-*.tar.gz")
    (wheel,) = folder.glob("llamaslot-*.whl")
    assert source.stat().st_size > 2**20, "it has the embedded model"
    return wheel


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel and what it requires; nothing else can be imported."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--no-input"]
    install = [*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for source in sorted(required_files(wheel)):
        if not (packages / source.name).exists():
            (packages / source.name).symlink_to(source)
    return folder


def required_files(wheel: Path) -> set[Path]:
    """Return the folders and files of all packages that a wheel requires, directly or through others."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    # With the extras for which they are wanted: none of the wheel's own.
    waiting = [(Requirement(line), {""}) for line in re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)]
    seen: set[str] = set()
    found: set[Path] = set()
    while waiting:
        requirement, extras = waiting.pop()
        marker = requirement.marker
        if requirement.name in seen or not any(marker is None or marker.evaluate({"extra": e}) for e in extras):
            continue
        seen.add(requirement.name)
        package = metadata.distribution(requirement.name)
        assert package.version in requirement.specifier, f"{requirement} is not met by {package.version}"
        waiting += [(Requirement(line), {"", *requirement.extras}) for line in package.requires or ()]
        parts = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        found |= {Path(str(package.locate_file(part))) for part in parts}
    assert "llama-cpp-python" in seen
    return found


@pytest.fixture
def empty(tmp_path: Path, environment: Path) -> dict[str, str]:
    """Environment variables of a new user, whose home and caches are empty."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR", "OMP_THREAD_LIMIT") if name in os.environ}
    own = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return kept | own | {"PATH": f"{environment / 'bin'}{os.pathsep}{kept.get('PATH', '')}"}


def output_of(command: list[str], folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_package_is_not_the_checkout(
    environment: Path, tmp_path: Path, empty: dict[str, str]
) -> None:
    code = "import llamaslot; print(llamaslot.__file__, llamaslot.__version__)"
    file, version = output_of([str(environment / "bin" / "python"), "-c", code], tmp_path, empty).split()
    assert Path(file).is_relative_to(environment)
    assert output_of(["llamaslot", "--version"], tmp_path, empty) == f"llamaslot {version}\n"


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "llamaslot"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode != 0:
        pytest.skip("this is no checkout")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert set(tracked.stdout.split()) <= names
    assert not [name for name in names if not name.startswith("llamaslot/")], "tests and benchmarks stay out"


def test_a_chat_streams_from_the_embedded_model_within_a_minute(
    environment: Path, tmp_path: Path, empty: dict[str, str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    started = time.monotonic()
    with (tmp_path / "log").open("wb") as log:
        command = ["llamaslot", "serve", "demo", "--port", "0"]
        server = subprocess.Popen(command, cwd=work, env=empty, stdout=log, stderr=log)
    try:
        text = ""
        for piece in streamed(address(server, tmp_path / "log"), "Hello! My name is Ada."):
            if not text:
                first_token_s = time.monotonic() - started
            text += piece
        server.terminate()
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait(10)
    print(f"first streamed token {first_token_s:.1f} s after starting the server from the wheel")
    assert "Ada" in text
    assert first_token_s < MAX_FIRST_TOKEN_S
    assert list(work.iterdir()) == []


def address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the line that tells the address of the server."""
    deadline = time.monotonic() + MAX_FIRST_TOKEN_S
    while time.monotonic() < deadline:
        if found := re.search(r"listening on (\S+)", log.read_text()):
            return found[1]
        assert server.poll() is None, log.read_text()
        time.sleep(0.02)
    raise AssertionError(log.read_text())


def streamed(url: str, message: str) -> Iterator[str]:
    """Send a chat message, and yield the text of the reply as it comes."""
    body = {"messages": [{"role": "user", "content": message}], "stream": True, "temperature": 0, "max_tokens": 32}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=MAX_FIRST_TOKEN_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    if piece := choice["delta"].get("content"):
                        yield piece
