"""Folder of the disk tier, and its key: the settings that must be equal for stored KV to be reused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from llamaslot.app.cache_tiers import lock_disk, open_disk
from llamaslot.app.config import Config
from llamaslot.app.start_lines import disk_line
from llamaslot.base.errors import ConfigError
from llamaslot.base.model import ModelFile, ModelInfo, SegmentSize
from llamaslot.kvcache.cache_settings import Budgets
from llamaslot.kvcache.disk_io import SegmentMeta, path_digest
from llamaslot.processes.messages import DiskUse
from tests.backend.test_disk_store import state_of
from tests.fake_backend import FakeBackend

MIB = 2**20
SIZE = SegmentSize(100, 10)
RAM = Budgets(ram_bytes=10**6)


@pytest.fixture
def info(tmp_path: Path) -> ModelInfo:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    files = (ModelFile.of(path),)
    return msgspec.structs.replace(FakeBackend(segment_size=SIZE).info, kv_facts="f16", kv_files=files)


def loaded_again(info: ModelInfo) -> ModelInfo:
    """Return the model with the present versions of its files, as after another load."""
    return msgspec.structs.replace(info, kv_files=tuple(ModelFile.of(Path(each.path)) for each in info.kv_files))


def found(tmp_path: Path, info: ModelInfo, **config: object) -> tuple[int, str]:
    """Number of segments that a server with this model finds, and its line; it writes one more."""
    disk = lock_disk(Config(cache_disk=str(tmp_path / "cache"), **config))
    assert disk is not None
    try:
        assert open_disk(disk, Config(**config), info, RAM, lambda _: True)
        line = disk_line(info, DiskUse(str(disk.folder), disk.capacity, disk.n_bytes, disk.n_other_bytes))
        n_found = len(disk.take_segments())
        tokens = bytes(4 * (n_found + 1))
        meta = SegmentMeta(disk.first_number, None, "", 0, tokens, SIZE.of(n_found + 1), path_digest("", tokens))
        assert disk.write(meta, state_of(1, meta.n_bytes))
        return n_found, line
    finally:
        disk.close()


def test_the_same_model_finds_what_it_left(tmp_path: Path, info: ModelInfo) -> None:
    assert [found(tmp_path, info)[0] for _ in range(3)] == [0, 1, 2]


def test_another_way_to_run_it_finds_nothing_and_leaves_it(tmp_path: Path, info: ModelInfo) -> None:
    found(tmp_path, info)
    n_found, line = found(tmp_path, msgspec.structs.replace(info, kv_facts="q8_0"))
    assert n_found == 0
    assert "of other models" in line
    assert found(tmp_path, info)[0] == 1


def test_other_weights_find_nothing(tmp_path: Path, info: ModelInfo) -> None:
    found(tmp_path, info)
    Path(info.kv_files[0].path).write_bytes(b"WEIGHTS")
    assert found(tmp_path, loaded_again(info))[0] == 0
    Path(info.kv_files[0].path).write_bytes(b"weights")
    assert found(tmp_path, loaded_again(info))[0] == 1, "it goes by what is in the file"


@pytest.mark.parametrize("is_known", [False, True], ids=["read whole", "digest known"])
def test_a_file_that_was_replaced_after_it_was_loaded_is_refused(
    tmp_path: Path, info: ModelInfo, is_known: bool
) -> None:
    if is_known:
        found(tmp_path, info)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"WEIGHTS")
    other.replace(info.kv_files[0].path)
    with pytest.raises(ConfigError, match="has changed since it was loaded"):
        found(tmp_path, info)


def test_a_file_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path, info: ModelInfo) -> None:
    disk = lock_disk(Config(cache_disk=str(tmp_path / "cache")))
    assert disk is not None

    def replace(_: float) -> bool:
        Path(info.kv_files[0].path).write_bytes(b"WEIGHTS")
        return True

    with pytest.raises(ConfigError, match="has changed since it was loaded"):
        open_disk(disk, Config(), info, RAM, replace)
    disk.close()


def test_the_size(tmp_path: Path, info: ModelInfo) -> None:
    assert "up to 3 MiB of prefixes in" in found(tmp_path, info, cache_disk_size=3)[1]
    large = msgspec.structs.replace(info, segment_size=SegmentSize(0, 10_000))
    with pytest.raises(ConfigError, match=r"less than one segment of this model \(4\.9 MiB\)"):
        found(tmp_path, large, cache_disk_size=4)


def test_nothing_is_read_where_nothing_is_stored(tmp_path: Path, info: ModelInfo) -> None:
    disk = lock_disk(Config(cache_disk=str(tmp_path / "cache")))
    assert disk is not None
    missing = msgspec.structs.replace(info, kv_files=(ModelFile("/nowhere", ""),))
    assert not open_disk(disk, Config(), missing, Budgets(), lambda _: True)
    assert not open_disk(disk, Config(), info, RAM, lambda _: False)
    with pytest.raises(ConfigError, match="cannot be used: No such file"):
        open_disk(disk, Config(), missing, RAM, lambda _: True)
    disk.close()
