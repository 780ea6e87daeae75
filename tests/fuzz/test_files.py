"""A damaged file is refused, and gives no other KV and no other error; so does one with a checksum that fits."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from llamaslot.backend.disk import SlotFiles
from llamaslot.backend.disk.disk_store import CorruptFileError, checksum_of, read_segment, write_segment
from llamaslot.backend.disk.slot_files import _HEADER as SLOT_HEADER
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import check_metadata
from llamaslot.base.kv_ops import Kv
from llamaslot.base.model import SegmentSize
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.slot_snapshots import InvalidSnapshotError, SlotSnapshot, SnapshotPart
from tests.conftest import LONG, new_seed
from tests.fuzz.mutations import damaged

N = 10_000 if LONG else 200
KEY = b"k" * 32
SIZE = SegmentSize(16, 10)


@pytest.fixture
def chance() -> random.Random:
    seed = new_seed()
    print(f"seed {seed}")
    return random.Random(seed)


def kv(n_bytes: int, seed: int) -> Kv:
    return np.frombuffer(random.Random(seed).randbytes(n_bytes), dtype=np.uint8)


def snapshot(seed: int) -> SlotSnapshot:
    parts = (SnapshotPart(0, 4, kv(SIZE.of(4), seed)), SnapshotPart(4, 7, kv(SIZE.of(3), seed + 1)))
    return SlotSnapshot("salt", np.arange(7, dtype="<i4").tobytes(), parts)


def test_a_damaged_segment_file_is_refused(tmp_path: Path, chance: random.Random) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    digest, n_bytes = b"d" * 16, 300
    checksum = write_segment(path, KEY, digest, kv(n_bytes, 1))
    write_segment(other, KEY, b"e" * 16, kv(n_bytes, 2))
    good, donor = path.read_bytes(), other.read_bytes()
    for _ in range(N):
        path.write_bytes(damaged(good, chance, donor))
        with pytest.raises(CorruptFileError):
            read_segment(path, KEY, n_bytes, digest, checksum)
    path.write_bytes(good)
    assert bytes(read_segment(path, KEY, n_bytes, digest, checksum)) == bytes(kv(n_bytes, 1))


def test_a_damaged_slot_file_is_refused(tmp_path: Path, chance: random.Random) -> None:
    files = SlotFiles(tmp_path, lambda: KEY, SIZE, 1000)
    files.write("a", snapshot(1))
    files.write("b", snapshot(3))
    good, donor = ((tmp_path / name).read_bytes() for name in "ab")
    for _ in range(N):
        (tmp_path / "a").write_bytes(damaged(good, chance, donor))
        with pytest.raises(InvalidSnapshotError):
            files.read("a")


def test_a_slot_file_whose_checksum_fits_is_refused_or_consistent(tmp_path: Path, chance: random.Random) -> None:
    files = SlotFiles(tmp_path, lambda: KEY, SIZE, 1000)
    files.write("a", snapshot(1))
    files.write("b", snapshot(3))
    good, donor = ((tmp_path / name).read_bytes()[SLOT_HEADER.size :] for name in "ab")
    _, version, _, n_head, _ = SLOT_HEADER.unpack((tmp_path / "a").read_bytes()[: SLOT_HEADER.size])
    accepted = 0
    for _ in range(N):
        body = damaged(good, chance, donor, within=chance.choice((n_head, len(good))))
        n = chance.choice((n_head, n_head, chance.randrange(len(body) + 2), 2**63))
        header = SLOT_HEADER.pack(b"llamslotslot", version, KEY, n, checksum_of(memoryview(body)))
        (tmp_path / "a").write_bytes(header + body)
        try:
            read, _ = files.read("a")
        except InvalidSnapshotError:
            continue
        accepted += 1
        assert msgspec.convert(read.namespace, str) == read.namespace
        ends = [0, *(part.end for part in read.parts)]
        assert [part.start for part in read.parts] == ends[:-1]
        assert ends[-1] * WIDTH == len(read.tokens)
        assert all(len(part.kv) == SIZE.of(part.end - part.start) > 0 for part in read.parts)
    assert 0 < accepted < N, "damage to the KV alone cannot be told once the checksum fits"


def test_a_damaged_model_file_is_accepted_or_refused_with_a_reason(
    tiny_model: Path, tmp_path: Path, chance: random.Random
) -> None:
    good = tiny_model.read_bytes()
    n_header = good.index(b"token_embd.weight") + 2000
    path = tmp_path / "model.gguf"
    errors = []
    for _ in range(N):
        # Tensors are not read by the check: a short rest is enough.
        path.write_bytes(damaged(good[: n_header + 5000], chance, within=chance.choice((24, 200, n_header))))
        try:
            check_metadata(path)
        except ConfigError as error:
            errors.append(error)
    assert 0 < len(errors) < N
    assert {error.param for error in errors} == {"--model"}
