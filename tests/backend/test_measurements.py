"""Start-up measurements are kept for the next start of the same model with the same settings."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, kv_cost, library, measurements, step_cost
from llamaslot.backend.llama.measurements import Measurements
from llamaslot.base.backend import Run, Status
from llamaslot.base.model import KvCost, StateCost, StepCost

MEASURED = Measurements(
    stream_copy_ms=0.5,
    kv_cost=KvCost(
        n_idle_cells=8192, prefill_slowdown=2.0, prefill_us=100.0, save_us=0.4, first_save_us=0.4, load_us=0.6
    ),
    step_cost=StepCost(step_us=1.0, token_us=2.0, token_cell_us=3.0, block_us=4.0, block_cell_us=5.0),
)
KEY = "0123456789abcdef"


def settings(model: Path, folder: Path | None, **fields: object) -> LlamaSettings:
    given: dict[str, object] = {"n_ctx": 1024, "n_slots": 2, "n_ubatch": 64, "measure_costs": True} | fields
    return LlamaSettings(model, measurements=folder, **given)


@pytest.fixture
def n_measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of times that the costs were measured, which then takes no time."""
    count = [0]

    def measure(*_: object) -> KvCost | None:
        count[0] += 1
        return MEASURED.kv_cost

    monkeypatch.setattr(kv_cost, "measure", measure)
    monkeypatch.setattr(step_cost, "measure", lambda *_: MEASURED.step_cost)
    return count


def start(model: Path, folder: Path | None, **fields: object) -> Measurements:
    """Load a model, and say what it takes for its measurements."""
    backend = LlamaBackend(settings(model, folder, **fields))
    backend.close()
    info = backend.info
    return Measurements(info.stream_copy_ms, info.kv_cost, info.step_cost)


def test_a_second_start_measures_nothing_and_has_the_same_figures(
    tiny_model: Path, tmp_path: Path, n_measured: list[int]
) -> None:
    first = start(tiny_model, tmp_path / "made" / "for it", unified=False)
    assert first.stream_copy_ms > 0
    assert start(tiny_model, tmp_path / "made" / "for it", unified=False) == first
    assert n_measured == [1]
    assert [file.suffix for file in (tmp_path / "made" / "for it").iterdir()] == [".json"]


def test_the_cost_of_checkpoints_is_kept_too(tmp_path: Path, n_measured: list[int]) -> None:
    def started() -> StateCost | None:
        backend = LlamaBackend(settings(synthetic.ensure("tiny-lfm2"), tmp_path, checkpoints=True))
        backend.close()
        return backend.info.state_cost

    first = started()
    assert first is not None
    assert 0 < first.take_ms < 1000
    assert 0 < first.restore_ms < 1000
    assert started() == first
    assert n_measured == [1]


def test_without_a_folder_each_start_measures(tiny_model: Path, n_measured: list[int]) -> None:
    start(tiny_model, None)
    start(tiny_model, None)
    assert n_measured == [2]


@pytest.mark.parametrize(
    "fields", [{"n_ubatch": 128}, {"n_threads": 1}, {"cache_type_k": "q8_0"}, {"n_slots": 3}, {"unified": False}]
)
def test_other_settings_are_measured_anew(
    tiny_model: Path, tmp_path: Path, n_measured: list[int], fields: dict[str, object]
) -> None:
    start(tiny_model, tmp_path)
    start(tiny_model, tmp_path, **fields)
    assert n_measured == [2]


def test_another_file_machine_or_library_is_measured_anew(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(tiny_model.read_bytes())
    backend = LlamaBackend(LlamaSettings(model, n_ctx=256))
    backend.close()

    def key() -> str:
        return measurements.key_of(LlamaSettings(model), backend.info, 4)

    keys = [key(), key()]
    assert len(set(keys)) == 1
    os.utime(model, (1, 1))
    keys.append(key())
    monkeypatch.setattr(library, "devices", lambda: [])
    keys.append(key())
    monkeypatch.setattr(library, "paths", lambda: [model])
    keys.append(key())
    backend.info = msgspec.structs.replace(backend.info, n_params=backend.info.n_params + 1)
    keys.append(key())
    assert len(set(keys)) == 5


def test_free_memory_that_makes_a_larger_pool_changes_nothing(tiny_model: Path) -> None:
    backend = LlamaBackend(LlamaSettings(tiny_model, n_ctx=256))
    backend.close()
    keys = set()
    for n_ctx in (16_384, 32_768):
        info = msgspec.structs.replace(backend.info, n_ctx=n_ctx)
        keys.add(measurements.key_of(replace(settings(tiny_model, None), n_ctx=n_ctx), info, 4))
    assert len(keys) == 1


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert measurements.read(tmp_path, KEY) is None
    measurements.write(tmp_path, KEY, MEASURED)
    assert measurements.read(tmp_path, KEY) == MEASURED


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-10],
        lambda data: b"",
        lambda data: b"\x00\xff",
        lambda data: data.replace(KEY.encode(), b"\xff" * len(KEY)),
        lambda data: data.replace(b"8192", b'"many"'),
        lambda data: data.replace(KEY.encode(), b"another"),
        lambda data: b"[1, 2]",
    ],
    ids=["cut", "empty", "no text", "no UTF-8", "a wrong type", "another key", "other JSON"],
)
def test_a_corrupt_or_foreign_file_counts_as_missing_and_is_replaced(tmp_path: Path, change: object) -> None:
    measurements.write(tmp_path, KEY, MEASURED)
    [file] = tmp_path.iterdir()
    assert callable(change)
    file.write_bytes(change(file.read_bytes()))
    assert measurements.read(tmp_path, KEY) is None
    measurements.write(tmp_path, KEY, MEASURED)
    assert measurements.read(tmp_path, KEY) == MEASURED


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurements.write(tmp_path, KEY, MEASURED)

    def fails(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(Path, "replace", fails)
    measurements.write(tmp_path, KEY, Measurements())
    assert measurements.read(tmp_path, KEY) == MEASURED
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_used_is_no_error(tiny_model: Path, tmp_path: Path, n_measured: list[int]) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    assert start(tiny_model, in_the_way).kv_cost == MEASURED.kv_cost
    assert n_measured == [1]


def test_old_measurements_count_as_missing_and_are_deleted_later(tmp_path: Path) -> None:
    others = [KEY[::-1], KEY[::2]]
    for key in (KEY, *others):
        measurements.write(tmp_path, key, MEASURED)
    file = tmp_path / f"{KEY}.json"
    os.utime(file, (0, file.stat().st_mtime - measurements.MAX_AGE_S - 60))
    assert measurements.read(tmp_path, KEY) is None
    measurements.write(tmp_path, others[0], MEASURED)
    assert {path.stem for path in tmp_path.iterdir()} == set(others)


def test_costs_that_turn_offloading_off_are_measured_again(tmp_path: Path) -> None:
    assert MEASURED.kv_cost is not None
    slow = msgspec.structs.replace(MEASURED.kv_cost, load_us=MEASURED.kv_cost.prefill_us)
    measurements.write(tmp_path, KEY, msgspec.structs.replace(MEASURED, kv_cost=slow))
    assert measurements.read(tmp_path, KEY) is None


def test_the_pool_is_empty_after_a_start_with_or_without_measuring(tiny_model: Path, tmp_path: Path) -> None:
    made = {"n_ctx": 4096, "measure_costs": True, "measurements": tmp_path}
    for _ in range(2):
        backend = LlamaBackend(LlamaSettings(tiny_model, **made))
        assert [backend.seq_range(seq) for seq in range(backend.n_seqs)] == [range(0)] * backend.n_seqs
        tokens = np.full(512, 5, dtype=np.int32)
        for start in range(0, 4096, 512):
            assert backend.decode([Run(0, start, tokens, output=False)]).status is Status.OK
        backend.close()
    assert len(list(tmp_path.iterdir())) == 1
