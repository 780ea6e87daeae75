"""Slot snapshots in files: read exactly as they were written, or refused with a reason."""

from __future__ import annotations

import os
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from llamaslot.backend.disk import SlotFiles
from llamaslot.backend.disk.disk_store import checksum_of
from llamaslot.backend.disk.slot_files import _HEADER, VERSION
from llamaslot.base.kv_ops import Kv
from llamaslot.base.model import CheckpointSize, SegmentSize
from llamaslot.kvcache.slot_snapshots import (
    MAX_SAVED_CHECKPOINTS,
    InvalidSnapshotError,
    SlotSnapshot,
    SnapshotPart,
)
from tests.conftest import LONG

KEY, OTHER = b"k" * 32, b"o" * 32
SIZE = SegmentSize(16, 10)
N_CTX = 8


def kv(n_tokens: int, seed: int = 1) -> Kv:
    return np.frombuffer(random.Random(seed).randbytes(SIZE.of(n_tokens)), dtype=np.uint8)


def slot() -> SlotSnapshot:
    tokens = np.arange(7, dtype="<i4").tobytes()
    return SlotSnapshot("salt", tokens, (SnapshotPart(0, 4, kv(4)), SnapshotPart(4, 7, kv(3, 2))))


def folder_of(path: Path, key: bytes = KEY, size: SegmentSize = SIZE) -> SlotFiles:
    return SlotFiles(path, lambda: key, size, N_CTX)


def facts(saved: SlotSnapshot) -> object:
    return saved.namespace, saved.tokens, [(part.start, part.end, part.kv.tobytes()) for part in saved.parts]


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    n_bytes = folder_of(tmp_path).write("a.bin", slot())
    assert (tmp_path / "a.bin").stat().st_size == n_bytes
    assert (tmp_path / "a.bin").stat().st_mode & 0o777 == 0o600
    saved, n_read = folder_of(tmp_path).read("a.bin")
    assert (facts(saved), n_read) == (facts(slot()), n_bytes)


def test_a_file_replaces_another_one_of_its_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.write("a.bin", slot())
    other = SlotSnapshot("", b"abcd", (SnapshotPart(0, 1, kv(1)),))
    folder.write("a.bin", other)
    assert facts(folder.read("a.bin")[0]) == facts(other)
    assert [each.name for each in tmp_path.iterdir()] == ["a.bin"]


def test_files_with_other_suffixes_stay(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for name in ("a.tmp", "a.bin", "a.tmp", "a"):
        folder.write(name, slot())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "a.bin", "a.tmp"]


def test_a_file_of_another_model_or_size_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path).write("a.bin", slot())
    with pytest.raises(InvalidSnapshotError, match="another model"):
        folder_of(tmp_path, OTHER).read("a.bin")
    with pytest.raises(InvalidSnapshotError, match="size of its KV"):
        folder_of(tmp_path, size=SegmentSize(16, 11)).read("a.bin")


def test_a_missing_file_is_not_called_invalid(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        folder_of(tmp_path).read("a.bin")


def test_the_key_is_computed_once_and_only_when_it_is_needed(tmp_path: Path) -> None:
    asked: list[int] = []

    def key() -> bytes:
        asked.append(1)
        return KEY

    folder = SlotFiles(tmp_path, key, SIZE, N_CTX)
    assert not asked
    folder.write("a.bin", slot())
    folder.read("a.bin")
    assert len(asked) == 1


@pytest.mark.parametrize("seed", range(2000 if LONG else 100))
def test_a_file_that_was_changed_is_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = folder_of(tmp_path)
    folder.write("a.bin", slot())
    path = tmp_path / "a.bin"
    raw = bytearray(path.read_bytes())
    match rng.randrange(4):
        case 0:
            raw = raw[: rng.randrange(len(raw))]
        case 1:
            raw += rng.randbytes(rng.randint(1, 50))
        case 2:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        case _:
            at = rng.randrange(len(raw))
            raw[at : at + 8] = bytes(8) if raw[at : at + 8] != bytes(8) else b"\1" * 8
    path.write_bytes(raw)
    with pytest.raises(InvalidSnapshotError):
        folder.read("a.bin")


@pytest.mark.parametrize(
    "parts",
    [
        (SnapshotPart(0, 4, kv(4)),),
        (SnapshotPart(0, 4, kv(4)), SnapshotPart(5, 7, kv(2))),
        (SnapshotPart(0, 7, kv(6)),),
        (SnapshotPart(-1, 6, kv(7)),),
        (),
    ],
    ids=["too short", "with a gap", "of another size", "before 0", "empty"],
)
def test_a_complete_file_with_impossible_parts_is_refused(tmp_path: Path, parts: tuple[SnapshotPart, ...]) -> None:
    folder = folder_of(tmp_path)
    folder.write("a.bin", SlotSnapshot("", slot().tokens, parts))
    with pytest.raises(InvalidSnapshotError):
        folder.read("a.bin")


STATES = CheckpointSize(4, 2, 3)


def state(end: int, n_bytes: int | None = None) -> SnapshotPart:
    size = STATES.of(end) if n_bytes is None else n_bytes
    return SnapshotPart(end, end, np.frombuffer(random.Random(end).randbytes(size), dtype=np.uint8))


def with_states(*checkpoints: SnapshotPart) -> SlotSnapshot:
    whole = slot()
    return SlotSnapshot(whole.namespace, whole.tokens, whole.parts, state(7).kv, checkpoints)


def test_checkpoints_are_read_as_they_were_written(tmp_path: Path) -> None:
    folder = SlotFiles(tmp_path, lambda: KEY, SIZE, N_CTX, STATES)
    for checkpoints in ((), (state(1),), (state(1), state(2), state(6))):
        n_bytes = folder.write("a.bin", with_states(*checkpoints))
        saved, n_read = folder.read("a.bin")
        assert (facts(saved), n_read) == (facts(slot()), n_bytes)
        assert saved.state is not None
        assert saved.state.tobytes() == state(7).kv.tobytes()
        assert [(each.start, each.end, each.kv.tobytes()) for each in saved.checkpoints] == [
            (each.start, each.end, each.kv.tobytes()) for each in checkpoints
        ]


@pytest.mark.parametrize(
    "checkpoints",
    [
        (state(2), state(1)),
        (state(2), state(2)),
        (state(7),),
        (state(8),),
        (state(0, 4),),
        (SnapshotPart(0, -1, state(1).kv),),
        (state(2, 3), state(3, 11)),
        (state(2, 9),),
        (state(2, 0),),
        (state(2, 100),),
    ],
    ids=["order", "twice", "last", "after", "0", "before 0", "sizes", "large", "empty", "very large"],
)
def test_a_complete_file_with_impossible_checkpoints_is_refused(
    tmp_path: Path, checkpoints: tuple[SnapshotPart, ...]
) -> None:
    folder = SlotFiles(tmp_path, lambda: KEY, SIZE, N_CTX, STATES)
    folder.write("a.bin", with_states(*checkpoints))
    with pytest.raises(InvalidSnapshotError):
        folder.read("a.bin")


def test_a_file_has_checkpoints_only_of_a_model_with_states(tmp_path: Path) -> None:
    whole = slot()
    folder_of(tmp_path).write("a.bin", SlotSnapshot("", whole.tokens, whole.parts, None, (state(2),)))
    with pytest.raises(InvalidSnapshotError):
        folder_of(tmp_path).read("a.bin")


def test_more_checkpoints_than_a_snapshot_may_have_are_refused(tmp_path: Path) -> None:
    n = MAX_SAVED_CHECKPOINTS + 1
    folder = SlotFiles(tmp_path, lambda: KEY, SIZE, 1000, STATES)
    tokens = np.arange(n + 1, dtype="<i4").tobytes()
    parts = (SnapshotPart(0, n + 1, kv(n + 1)),)
    for count in (n - 1, n):
        states = tuple(state(end) for end in range(1, count + 1))
        folder.write("a.bin", SlotSnapshot("", tokens, parts, state(n + 1).kv, states))
        if count < n:
            assert len(folder.read("a.bin")[0].checkpoints) == count
        else:
            with pytest.raises(InvalidSnapshotError, match="checkpoints"):
                folder.read("a.bin")


def test_counts_in_the_head_cost_no_memory(tmp_path: Path) -> None:
    """Even if the checksum fits: MessagePack announces sizes, too."""
    folder = SlotFiles(tmp_path, lambda: KEY, SIZE, N_CTX, STATES)
    huge = (0xFFFFFFFF).to_bytes(4, "big")
    number = msgspec.msgpack.encode
    for head in (
        b"\x95" + b"\xdb" + huge,
        b"\x95" + number("") + b"\xc6" + huge,
        b"\x95" + number("") + number(b"") + b"\xdd" + huge,
        b"\x95" + number("") + number(b"") + number([]) + number(0) + b"\xdd" + huge,
        b"\xdd" + huge,
        b"\x91" * 10_000,
        number(("", b"abcd", [1], 2**60, [(2**60, 2**60)])),
        number(("", b"abcd", [1], -(2**60), [(1, 2**60)])),
        number(("", b"abcd", [2**62], 0, [])),
    ):
        header = _HEADER.pack(b"llamslotslot", VERSION, KEY, len(head), checksum_of(memoryview(head)))
        (tmp_path / "a.bin").write_bytes(header + head)
        with pytest.raises(InvalidSnapshotError):
            folder.read("a.bin")


def test_a_file_without_checkpoints_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    folder = SlotFiles(tmp_path, lambda: KEY, SIZE, N_CTX, STATES)
    whole = with_states()
    assert whole.state is not None
    head = msgspec.msgpack.encode((whole.namespace, whole.tokens, [4, 7], len(whole.state)))
    body = head + b"".join(part.kv.tobytes() for part in whole.parts) + whole.state.tobytes()
    header = _HEADER.pack(b"llamslotslot", 3, KEY, len(head), checksum_of(memoryview(body)))
    (tmp_path / "a.bin").write_bytes(header + body)
    saved, _ = folder.read("a.bin")
    assert (facts(saved), saved.checkpoints) == (facts(whole), ())
    assert saved.state is not None
    assert saved.state.tobytes() == whole.state.tobytes()


def test_a_namespace_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Even if its checksum fits."""
    folder = folder_of(tmp_path)
    folder.write("a.bin", slot())
    raw = (tmp_path / "a.bin").read_bytes()
    body = raw[_HEADER.size :].replace(b"salt", b"sal\xff", 1)
    magic, version, key, n_head, _ = _HEADER.unpack(raw[: _HEADER.size])
    (tmp_path / "a.bin").write_bytes(
        _HEADER.pack(magic, version, key, n_head, checksum_of(memoryview(body))) + body
    )
    with pytest.raises(InvalidSnapshotError, match="utf-8"):
        folder.read("a.bin")


def test_no_symlink_is_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    folder_of(outside).write("a", slot())
    (inside / "a").symlink_to(outside / "a")
    with pytest.raises(FileNotFoundError):
        folder_of(inside).read("a")
    before = (outside / "a").read_bytes()
    (inside / ".b.unfinished").symlink_to(outside / "a")
    folder_of(inside).write("b", slot())
    assert (outside / "a").read_bytes() == before
    assert facts(folder_of(inside).read("b")[0]) == facts(slot())
    with pytest.raises(FileExistsError, match="not a slot file"):
        folder_of(inside).write("a", slot())
    assert (outside / "a").read_bytes() == before


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(FileNotFoundError):
            folder_of(tmp_path).read(name)


def test_only_slot_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("notes", "empty", "pipe", "dangling"):
        with pytest.raises(FileExistsError, match="not a slot file"):
            folder_of(tmp_path).write(name, slot())
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        folder_of(tmp_path).write("folder", slot())
    assert (tmp_path / "notes").read_text() == "mine"
    assert {each.name for each in tmp_path.iterdir()} == {"notes", "empty", "pipe", "dangling", "folder"}


@pytest.mark.parametrize("kind", ["hard link", "pipe", "folder"])
def test_a_temporary_name_that_is_taken_neither_blocks_nor_overwrites(tmp_path: Path, kind: str) -> None:
    temporary, other = tmp_path / ".a.unfinished", tmp_path / "other"
    other.write_text("mine")
    if kind == "hard link":
        temporary.hardlink_to(other)
    elif kind == "pipe":
        os.mkfifo(temporary)
    else:
        temporary.mkdir()
        with pytest.raises(OSError, match=r"directory|permitted"):
            folder_of(tmp_path).write("a", slot())
        return
    folder_of(tmp_path).write("a", slot())
    assert facts(folder_of(tmp_path).read("a")[0]) == facts(slot())
    assert other.read_text() == "mine"


def test_a_hard_link_that_is_replaced_leaves_its_other_name_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.write("a", slot())
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    folder.write("a", SlotSnapshot("", b"abcd", (SnapshotPart(0, 1, kv(1)),)))
    assert facts(folder.read("b")[0]) == facts(slot())


def test_a_file_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.write("a", slot())
    with (tmp_path / "a").open("r+b") as file:
        # Sparse: it takes no disk space either.
        file.truncate(2**40)
    with pytest.raises(InvalidSnapshotError, match="larger than"):
        folder.read("a")
