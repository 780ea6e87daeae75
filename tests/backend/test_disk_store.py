"""The disk store returns exactly what was written, or nothing, whatever happens to its files in between."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from llamaslot.app.cache_tiers import lock_disk
from llamaslot.app.config import Config
from llamaslot.backend.disk import DiskStore, disk_index
from llamaslot.backend.disk.disk_store import (
    KEY_BYTES,
    CorruptFileError,
    file_size,
    read_segment,
    write_segment,
)
from llamaslot.backend.storage import FailureLog
from llamaslot.base import text_records
from llamaslot.base.errors import ConfigError
from llamaslot.base.kv_ops import Kv
from llamaslot.base.model import ModelFile, SegmentSize
from llamaslot.base.text_records import Session, TextAnchor, TextRecord
from llamaslot.kvcache.disk_io import CorruptSegmentError, SegmentMeta, WriteTotals, path_digest
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.tiers.disk_tier import DiskTier
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers
from tests.cache_settings import tier_settings
from tests.conftest import LONG
from tests.prompts.test_token_memory import reply

KEY, OTHER = b"k" * KEY_BYTES, b"o" * KEY_BYTES
PATH = b"p" * 16
SIZE = SegmentSize(16, 10)
CAPACITY = 10**6


def state_of(number: int, n_bytes: int) -> Kv:
    return np.frombuffer(random.Random(number).randbytes(n_bytes), dtype=np.uint8)


def segment(
    number: int, parent: SegmentMeta | None = None, *, n_tokens: int = 8, namespace: str = ""
) -> SegmentMeta:
    """A segment of tokens that no other one has, behind a parent or at the start."""
    tokens = np.arange(1000 * number, 1000 * number + n_tokens, dtype="<i4").tobytes()
    start = parent.start + len(parent.tokens) // 4 if parent is not None else 0
    paths[number] = (paths[parent.number] if parent is not None else b"") + tokens
    digest = path_digest(namespace, paths[number])
    parent_number = parent.number if parent is not None else None
    return SegmentMeta(number, parent_number, namespace, start, tokens, SIZE.of(n_tokens), digest)


paths: dict[int, bytes] = {}


def opened(folder: Path, key: bytes = KEY, capacity: int = CAPACITY) -> DiskStore:
    store = DiskStore(folder)
    store.open(key, capacity)
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write(store: DiskStore, *segments: SegmentMeta) -> None:
    for each in segments:
        assert store.write(each, state_of(each.number, each.n_bytes))


def file_of(folder: Path, number: int) -> Path:
    (found,) = (each for each in (folder / "segments").iterdir() if int(each.stem) == number)
    return found


# --- files ---


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "1.kv"
    state = state_of(1, 3_000_000)
    digest = write_segment(path, KEY, PATH, state)
    assert np.array_equal(read_segment(path, KEY, len(state), PATH, digest), state)
    assert path.stat().st_mode & 0o077 == 0, "others may read it"
    assert [each.name for each in tmp_path.iterdir()] == ["1.kv"]


def test_a_file_is_flushed_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "1.kv"
    seen: list[tuple[int, bool]] = []
    monkeypatch.setattr(os, "fsync", lambda file: seen.append((os.fstat(file).st_size, path.exists())))
    write_segment(path, KEY, PATH, state_of(1, 1000))
    assert seen == [(file_size(1000), False)]
    assert path.exists()


def test_no_changed_file_is_taken_for_what_was_written(tmp_path: Path) -> None:
    chance = random.Random(1)
    path = tmp_path / "1.kv"
    state = state_of(1, 500)
    digest = write_segment(path, KEY, PATH, state)
    good = path.read_bytes()
    write_segment(path, OTHER, PATH, state)
    other_model = path.read_bytes()
    write_segment(path, KEY, b"q" * 16, state)
    other_path = path.read_bytes()
    write_segment(path, KEY, PATH, state_of(2, 500))
    other_state = path.read_bytes()
    kinds = {
        "cut": lambda: good[: chance.randrange(len(good))],
        "longer": lambda: good + chance.randbytes(chance.randrange(1, 100)),
        "a bit flipped": lambda: flipped(good, 1),
        "bits flipped": lambda: flipped(good, chance.randrange(2, 50)),
        "a part of zeros": lambda: zeroed(good),
        "two bytes swapped": lambda: swapped(good),
        "noise": lambda: chance.randbytes(len(good)),
        "another model": lambda: other_model,
        "another path": lambda: other_path,
        "another state": lambda: other_state,
        "another version": lambda: good[:8] + chance.randbytes(8) + good[16:],
    }

    def flipped(data: bytes, n: int) -> bytes:
        changed = bytearray(data)
        for at in chance.sample(range(8 * len(data)), n):
            changed[at // 8] ^= 1 << at % 8
        return bytes(changed)

    def zeroed(data: bytes) -> bytes:
        start = chance.randrange(len(data))
        end = min(len(data), start + chance.randrange(1, 200))
        return data[:start] + bytes(end - start) + data[end:]

    def swapped(data: bytes) -> bytes:
        a, b = sorted(chance.sample(range(len(data)), 2))
        return data[:a] + data[b : b + 1] + data[a + 1 : b] + data[a : a + 1] + data[b + 1 :]

    n_refused = 0
    n_changed = 10_000 if LONG else 600
    for i in range(n_changed):
        changed = list(kinds.values())[i % len(kinds)]()
        if changed == good:
            continue
        path.write_bytes(changed)
        with pytest.raises(CorruptFileError):
            read_segment(path, KEY, len(state), PATH, digest)
        n_refused += 1
    assert n_refused > 0.99 * n_changed


# --- the folder ---


def test_segments_are_found_again_in_the_order_of_use(folder: Path) -> None:
    store = opened(folder)
    a, c = segment(5), segment(9, namespace="salt")
    b = segment(7, a)
    write(store, a, b, c)
    store.mark_used([7, 5])
    store.close()
    store = opened(folder)
    files_of = [each for each in folder.rglob("*") if each.is_file()]
    assert len(files_of) >= 5
    assert not any(each.stat().st_mode & 0o077 for each in (folder, *files_of)), "others may read it"
    assert store.take_segments() == [c, b, a]
    assert store.first_number == 10
    for each in (a, b, c):
        assert np.array_equal(store.read(each.number), state_of(each.number, each.n_bytes))
    store.erase([7])
    with pytest.raises(CorruptSegmentError):
        store.read(7)
    store.close()
    store = opened(folder)
    assert store.take_segments() == [c, a]
    assert len(list((folder / "segments").iterdir())) == 2
    store.close()


def test_a_corrupt_file_is_moved_aside(folder: Path) -> None:
    store = opened(folder)
    write(store, *map(segment, range(20)))
    for number in range(15):
        path = file_of(folder, number)
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        with pytest.raises(CorruptSegmentError):
            store.read(number)
        assert not path.exists()
    file_of(folder, 15).unlink()
    with pytest.raises(CorruptSegmentError):
        store.read(15)
    assert len(list((folder / "corrupt").iterdir())) == 8
    assert np.array_equal(store.read(16), state_of(16, SIZE.of(8)))
    store.close()


def test_missing_and_corrupt_files_are_logged_once_in_30_seconds(folder: Path) -> None:
    now = [0.0]
    store = DiskStore(folder)
    store._failures = FailureLog(lambda: now[0])
    store.open(KEY, CAPACITY)
    write(store, *map(segment, range(12)))
    for number in range(6):
        file_of(folder, number).unlink()
    for number in range(6, 12):
        file_of(folder, number).write_bytes(b"!")
    with capture_logs() as logs:
        for number in (0, 1, 2, 3, 4, 6, 7, 8, 9, 10):
            with pytest.raises(CorruptSegmentError):
                store.read(number)
        now[0] = 30.0
        for number in (5, 11):
            with pytest.raises(CorruptSegmentError):
                store.read(number)
    found = [(line["event"], line["segment"], line.get("not_logged_before")) for line in logs]
    assert found == [
        ("disk.file_missing", 0, None),
        ("disk.corrupt_file", 6, None),
        ("disk.file_missing", 5, 4),
        ("disk.corrupt_file", 11, 4),
    ]
    assert logs[1]["moved_to"] == str(folder / "corrupt")
    store.close()


def test_two_files_that_changed_places_are_corrupt(folder: Path) -> None:
    store = opened(folder)
    write(store, segment(1), segment(2))
    one, two = file_of(folder, 1), file_of(folder, 2)
    one.rename(folder / "between")
    two.rename(one)
    (folder / "between").rename(two)
    for number in (1, 2):
        with pytest.raises(CorruptSegmentError):
            store.read(number)
    store.close()


def test_files_without_a_row_and_rows_without_a_file_are_removed(folder: Path) -> None:
    store = opened(folder)
    write(store, *map(segment, range(4)))
    store.close()
    file_of(folder, 1).unlink()
    file_of(folder, 2).write_bytes(b"short")
    (folder / "segments" / "000000000099.kv").write_bytes(b"a killed server's")
    (folder / "segments" / "000000000098.tmp").write_bytes(b"a killed server's")
    (folder / "segments" / "thesis.txt").write_text("mine")
    store = opened(folder)
    assert [each.number for each in store.take_segments()] == [0, 3]
    left = {each.name for each in (folder / "segments").iterdir()}
    assert left == {"000000000000.kv", "000000000003.kv", "thesis.txt"}
    store.close()


def test_segments_of_other_keys_stay_as_long_as_there_is_room(folder: Path) -> None:
    size = SIZE.of(8)
    store = opened(folder, OTHER, 4 * size)
    write(store, *map(segment, range(3)))
    store.close()
    store = opened(folder, KEY, 4 * size)
    assert store.take_segments() == []
    assert store.first_number == 3
    write(store, segment(3))
    assert store.n_bytes == 4 * size
    write(store, segment(4), segment(5))
    assert store.n_bytes == 4 * size
    store.close()
    store = opened(folder, OTHER, 4 * size)
    assert [each.number for each in store.take_segments()] == [2]
    store.close()


def test_of_other_keys_the_ends_of_paths_are_evicted_first(folder: Path) -> None:
    size = SIZE.of(8)
    store = opened(folder, OTHER)
    a = segment(0)
    b = segment(1, a)
    write(store, a, b, segment(2, b), segment(3, b))
    store.mark_used([2, 3])
    store.close()
    store = opened(folder, KEY, 4 * size)
    write(store, segment(4))
    store.close()
    store = opened(folder, OTHER)
    assert {each.number for each in store.take_segments()} == {0, 1, 3}
    store.close()


@pytest.mark.parametrize("used", ["'text'", "x'00ff'", 2**63 - 1, -1])
def test_an_invalid_order_of_use_costs_the_index_and_nothing_else(folder: Path, used: object) -> None:
    store = opened(folder)
    write(store, segment(1))
    store._index.database._connection.execute(f"UPDATE segments SET last_use = {used}")
    store.close()
    store = opened(folder)
    assert store.take_segments() == []
    write(store, segment(2))
    store.close()


@pytest.mark.parametrize("damage", ["DROP TABLE file_digests", "UPDATE file_digests SET digest = 'text'"])
def test_a_lost_digest_is_computed_again(folder: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "1.gguf"
    path.write_bytes(b"one")
    store = DiskStore(folder)
    digest = store.fingerprint(versions(path), lambda _: True)
    store._index.database._connection.execute(damage)
    assert store.fingerprint(versions(path), lambda _: True) == digest
    store.close()


def versions(*paths: Path) -> list[ModelFile]:
    return [ModelFile.of(path) for path in paths]


def anchor(n: int, parent: int | None = None) -> TextAnchor:
    behind = {"parent": b"name %d" % parent, "start": 3} if parent is not None else {"start": 0}
    return TextAnchor(key=b"name %d" % n, tokens=b"abcd", **behind)


def anchors(store: DiskStore) -> list[TextRecord]:
    return [each for each in store.texts.records() if isinstance(each, TextAnchor)]


def limit_texts(monkeypatch: pytest.MonkeyPatch, n_records: int, example: TextRecord) -> None:
    """Let the disk keep so many records that are like an example."""
    size = text_records.OVERHEAD + len(msgspec.msgpack.encode(example))
    monkeypatch.setattr(text_records, "MAX_BYTES", n_records * size)


def test_anchors_are_read_again_the_oldest_first_and_only_for_their_key(folder: Path) -> None:
    store = opened(folder)
    for each in (anchor(2), anchor(1), anchor(3, 2), anchor(1)):
        store.texts.write(each)
    store.close()
    other = opened(folder, OTHER)
    assert anchors(other) == []
    other.texts.write(anchor(2))
    other.texts.clear_texts()
    other.close()
    again = opened(folder)
    assert anchors(again) == [anchor(2), anchor(3, 2), anchor(1)]
    again.texts.clear_texts()
    assert anchors(again) == []
    again.close()


def test_anchors_are_deleted_with_their_parents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_texts(monkeypatch, 3, anchor(2, 1))
    store = opened(folder)
    for each in (anchor(1), anchor(2, 1), anchor(3, 2), anchor(4)):
        store.texts.write(each)
    assert anchors(store) == [anchor(4)]
    store.close()


def test_an_anchor_replaces_another_one_of_its_digest(folder: Path) -> None:
    store = opened(folder)
    store.texts.write(anchor(1))
    other = TextAnchor(key=b"name 1", start=0, tokens=b"efghijkl")
    store.texts.write(other)
    assert anchors(store) == [other]
    store.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("content", b"abce"),
        ("digest", b"name 9"),
        ("parent", b"name 1"),
        ("parent", "name 2"),
        ("content", 4),
        ("content", b""),
    ],
)
def test_a_changed_anchor_is_skipped(folder: Path, column: str, value: object) -> None:
    store = opened(folder)
    store.texts.write(anchor(1))
    store.texts.write(anchor(2))
    store.close()
    with sqlite3.connect(folder / "index.sqlite") as database:
        database.execute(f"UPDATE texts SET {column} = ? WHERE digest = ?", (value, b"name 2"))
    database.close()
    again = opened(folder)
    assert anchors(again) == [anchor(1)]
    again.close()


def test_the_oldest_anchors_beyond_the_limit_are_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_texts(monkeypatch, 3, anchor(1))
    monkeypatch.setattr(disk_index, "_TRIM_INTERVAL", 4)
    store = opened(folder)
    for n in range(7):
        store.texts.write(anchor(n))
    store.close()
    with sqlite3.connect(folder / "index.sqlite") as database:
        assert database.execute("SELECT count(*) FROM texts").fetchone() == (6,)
    database.close()
    again = opened(folder)
    assert anchors(again) == [anchor(4), anchor(5), anchor(6)]
    again.close()


def test_replies_are_read_with_their_owners(folder: Path) -> None:
    store = opened(folder)
    for owner in ("one", "two"):
        store.texts.write(reply(owner.encode(), owner=owner))
    written = store.texts.records()
    store.close()
    again = opened(folder)
    assert [each.owner for each in again.texts.records()] == ["one", "two"]
    assert written == again.texts.records()
    again.close()


@pytest.mark.parametrize("content", [b"no msgpack", msgspec.msgpack.encode({"kind": "anchor", "key": b"x"})])
def test_a_record_of_another_version_is_skipped(folder: Path, content: bytes) -> None:
    store = opened(folder)
    store.texts.write(anchor(1))
    row = ["anchor", b"x", b"", b"", content]
    values = (KEY, *row, disk_index._checksum(row))
    with store._index.database.use() as connection:
        columns = "key, kind, digest, parent, session, content, checksum"
        connection.execute(f"INSERT INTO texts ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    assert store.texts.records() == [anchor(1)]
    store.close()


def test_a_record_in_another_format_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(folder)
    store.texts.write(anchor(1))
    monkeypatch.setattr(disk_index, "_TEXTS_FORMAT", 0)
    store.texts.write(anchor(2))
    monkeypatch.undo()
    assert store.texts.records() == [anchor(1)]
    store.close()


def test_records_of_an_earlier_version_are_dropped_and_its_segments_stay(folder: Path) -> None:
    store = opened(folder)
    write(store, segment(1))
    with store._index.database.use() as connection:
        connection.executescript(
            """
            DROP TABLE texts;
            CREATE TABLE anchors (number INTEGER PRIMARY KEY, key BLOB, digest BLOB, parent BLOB, content BLOB,
                checksum BLOB);
            CREATE TABLE sessions (number INTEGER PRIMARY KEY, key BLOB, digest BLOB, parent BLOB, content BLOB,
                checksum BLOB);
            CREATE TABLE replies (number INTEGER PRIMARY KEY, key BLOB, digest BLOB, parent BLOB, content BLOB,
                checksum BLOB);
            INSERT INTO anchors VALUES (1, x'6b', x'6b', x'', x'6b', x'6b');
            """
        )
    store.close()
    again = opened(folder)
    assert again.texts.records() == []
    assert [each.number for each in again.take_segments()] == [1]
    again.texts.write(anchor(1))
    assert again.texts.records() == [anchor(1)]
    with again._index.database.use() as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert not tables & {"anchors", "sessions", "replies"}
    again.close()


def test_a_second_server_is_refused(folder: Path) -> None:
    store = opened(folder)
    with pytest.raises(ConfigError, match="another server uses"):
        DiskStore(folder)
    store.close()
    opened(folder).close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be used"):
            lock_disk(Config(cache_disk=str(path)))
    with pytest.raises(ConfigError, match="needs the RAM tier"):
        lock_disk(Config(cache_disk=str(tmp_path / "folder"), cache_ram=0))


def test_a_write_that_fails_leaves_nothing_behind(folder: Path) -> None:
    store = opened(folder)
    segments = folder / "segments"
    segments.rmdir()
    assert not store.write(segment(1), state_of(1, SIZE.of(8)))
    segments.mkdir()
    write(store, segment(2))
    store._index.database._connection.execute("DROP TABLE segments")
    assert not store.write(segment(3), state_of(3, SIZE.of(8)))
    assert [int(each.stem) for each in segments.iterdir()] == [2]
    store.close()


def test_a_store_that_is_closed_refuses_writes(folder: Path) -> None:
    store = opened(folder)
    write(store, segment(1))
    store.close()
    assert not store.write(segment(2), state_of(2, SIZE.of(8)))
    assert [int(each.stem) for each in (folder / "segments").iterdir()] == [1]
    store.texts.write(session(1, b"a"))
    assert store.texts.records() == []


def close_while_writing(folder: Path) -> None:
    """Close stores in the middle of another thread's writes, which then fail."""
    for _ in range(100):
        store = opened(folder)
        has_written = threading.Event()

        def use(store: DiskStore = store, has_written: threading.Event = has_written) -> None:
            while True:
                store._index.set_writes(1, 1, 1.0)
                has_written.set()

        with ThreadPoolExecutor(1) as threads:
            using = threads.submit(use)
            assert has_written.wait(30)
            store.close()
            assert isinstance(using.exception(30), sqlite3.ProgrammingError)


def test_a_store_can_be_closed_while_a_thread_writes(folder: Path) -> None:
    """Python's `sqlite3` crashes the process if a connection is closed during a call of another thread."""
    process = get_context("forkserver").Process(target=close_while_writing, args=(folder,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


# --- the index ---


@pytest.mark.parametrize("kind", ["noise", "empty schema", "newer", "older"])
def test_an_unusable_index_is_moved_aside(folder: Path, kind: str) -> None:
    store = opened(folder)
    write(store, segment(1))
    store.close()
    index = folder / "index.sqlite"
    if kind == "noise":
        index.write_bytes(random.Random(1).randbytes(5000))
    else:
        database = sqlite3.connect(index)
        database.execute(f"PRAGMA user_version = {3 if kind == 'older' else 99}")
        if kind == "empty schema":
            database.execute("DROP TABLE segments")
        database.commit()
        database.close()
    store = opened(folder)
    assert store.take_segments() == []
    assert list((folder / "segments").iterdir()) == []
    assert [each.name for each in (folder / "corrupt").iterdir()] == ["index.sqlite"]
    write(store, segment(1))
    store.close()
    store = opened(folder)
    assert len(store.take_segments()) == 1
    store.close()


HUGE = 60_000_000
"""Bytes of a value, more than SQLite is allowed to read."""


@pytest.mark.parametrize(
    ("column", "size"),
    [("tokens", HUGE), *((each, 10_000) for each in ("namespace", "tokens", "path_digest", "key", "checksum"))],
)
def test_an_index_with_a_huge_value_takes_no_memory(folder: Path, column: str, size: int) -> None:
    store = opened(folder)
    write(store, segment(1))
    store.close()
    with contextlib.closing(sqlite3.connect(folder / "index.sqlite")) as database:
        database.execute(f"UPDATE segments SET {column} = zeroblob({size})")
        database.commit()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = opened(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < HUGE // 2048
    assert store.take_segments() == []
    assert [each.name for each in (folder / "corrupt").iterdir()] == ["index.sqlite"]
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("column", ["digest", "parent", "content", "checksum"] if LONG else ["digest", "content"])
def test_a_huge_remembered_text_takes_no_memory(folder: Path, column: str) -> None:
    store = opened(folder)
    store.texts.write(anchor(1))
    store.texts.write(session(1, b"a"))
    store.close()
    with contextlib.closing(sqlite3.connect(folder / "index.sqlite")) as database:
        database.execute(f"UPDATE texts SET {column} = zeroblob({HUGE}) WHERE kind = 'anchor'")
        database.commit()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = opened(folder)
    # Only the content is trimmed; no other value is ever long.
    assert (anchors(store), [name for name, *_ in facts(store)]) == ([], [b"a"] if column == "content" else [])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < HUGE // 2048
    store.texts.write(anchor(2))
    assert anchors(store) == [anchor(2)]
    store.close()


def test_a_damaged_index_never_gives_a_segment_to_another_prefix(folder: Path) -> None:
    chance = random.Random(3)
    store = opened(folder)
    segments: list[SegmentMeta] = []
    for number in range(40):
        parent = segments[number // 2] if number % 4 else None
        segments.append(segment(number, parent, namespace="salt" if parent is None else parent.namespace))
        write(store, segments[-1])
    store.close()
    index = folder / "index.sqlite"
    good = index.read_bytes()
    kept = {each.name: each.read_bytes() for each in (folder / "segments").iterdir()}
    right = {(each.namespace, paths[each.number]): each.number for each in segments}
    n_taken = n_refused = 0
    for _ in range(1000 if LONG else 40):
        changed = bytearray(good)
        for at in chance.sample(range(len(good)), chance.choice([1, 1, 3, 100])):
            changed[at] ^= 1 << chance.randrange(8)
        for left in folder.glob("index.sqlite*"):
            left.unlink()
        index.write_bytes(changed)
        for name, data in kept.items():
            (folder / "segments" / name).write_bytes(data)
        store = opened(folder)
        tree = RadixTree()
        settings = tier_settings(ram_bytes=10**9, segment_size=SIZE, disk_bytes=10**9)
        tiers = SegmentTiers(tree, settings)
        DiskTier(tiers, tree, settings).adopt(store.take_segments(), store.first_number)
        tiers.check(tree.check())
        for found in tiers.disk:
            path = found.prefix
            try:
                state = store.read(found.number)
            except CorruptSegmentError:
                n_refused += 1
                continue
            number = right[found.namespace, path]
            assert np.array_equal(state, state_of(number, SIZE.of(8)))
            n_taken += 1
        n_refused += 40 - len(tiers.disk)
        store.close()
    print(f"{n_taken} taken, {n_refused} refused")
    assert n_taken
    assert n_refused


def test_weights_are_read_once_until_they_change(folder: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "1.gguf", tmp_path / "2.gguf"
    one.write_bytes(b"one")
    two.write_bytes(b"two")
    store = DiskStore(folder)
    told: list[float] = []
    assert store.fingerprint(versions(one), told.append) is None, "it was told to stop"
    assert told == [1.0]
    both = store.fingerprint(versions(one, two), lambda _: True)
    assert (
        store.fingerprint(versions(one), lambda _: True)
        != both
        != store.fingerprint(versions(two, one), lambda _: True)
    )
    store.close()
    store = DiskStore(folder)
    assert store.fingerprint(versions(one, two), lambda _: False) == both, "they were read again"
    two.write_bytes(b"TWO")
    assert store.fingerprint(versions(one, two), lambda _: True) != both
    store.close()


@pytest.mark.parametrize("name", ["segments", "corrupt", "lock", "index.sqlite"])
def test_no_symlink_in_the_folder_is_followed(tmp_path: Path, name: str) -> None:
    folder, outside = tmp_path / "cache", tmp_path / "outside"
    folder.mkdir()
    if name in ("segments", "corrupt"):
        outside.mkdir()
    (folder / name).symlink_to(outside)
    with pytest.raises(OSError, match=r"symlink|symbolic link"):
        DiskStore(folder)
    assert not outside.is_file()


@pytest.mark.parametrize("name", ["lock", "index.sqlite", "index.sqlite-wal"])
@pytest.mark.parametrize("kind", ["hard link", "pipe", "folder"])
def test_only_a_plain_file_is_opened_in_the_folder(tmp_path: Path, name: str, kind: str) -> None:
    folder, other = tmp_path / "cache", tmp_path / "other"
    folder.mkdir()
    other.write_bytes(b"mine")
    if kind == "hard link":
        (folder / name).hardlink_to(other)
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).mkdir()
    with pytest.raises(OSError, match=r"regular|hard link|directory"):
        DiskStore(folder)
    assert other.read_bytes() == b"mine"


@pytest.mark.parametrize("suffix", ["kv", "tmp"])
@pytest.mark.parametrize("kind", ["hard link", "pipe", "symlink"])
def test_a_segment_is_written_past_what_has_its_name(tmp_path: Path, kind: str, suffix: str) -> None:
    folder, other = tmp_path / "cache", tmp_path / "other"
    store = opened(folder)
    other.write_bytes(b"mine")
    name = folder / "segments" / f"000000000000.{suffix}"
    if kind == "hard link":
        name.hardlink_to(other)
    elif kind == "pipe":
        os.mkfifo(name)
    else:
        name.symlink_to(other)
    each = segment(0, None)
    kv = state_of(0, each.n_bytes)
    assert store.write(each, kv)
    read = store.read(0)
    assert read is not None
    assert bytes(read.data) == bytes(kv.data)
    assert other.read_bytes() == b"mine"
    store.close()


def test_a_folder_is_created_for_its_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = opened(tmp_path / "a" / "b" / "cache")
        store.close()
    finally:
        os.umask(before)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) == 5
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def test_a_folder_that_others_may_write_to_is_warned_of(tmp_path: Path) -> None:
    for mode, warned in ((0o755, []), (0o777, ["folder.writable_by_others"])):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        with capture_logs() as logs:
            opened(folder).close()
        assert [line["event"] for line in logs] == warned


def test_only_its_user_can_read_what_is_stored(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (folder / "segments").mkdir(parents=True, mode=0o755)
    store = opened(folder)
    each = segment(0, None)
    assert store.write(each, state_of(0, each.n_bytes))
    store.close()
    assert (folder / "segments").stat().st_mode & 0o777 == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_rows_that_could_not_be_deleted_are_deleted_with_the_next_ones(folder: Path) -> None:
    store = opened(folder)
    first, second, third = (segment(number) for number in (1, 2, 3))
    write(store, first, second, third)
    store._index.database._connection.execute("PRAGMA query_only = 1")
    store.erase([1, 7])
    assert not store.delete_again()
    assert store.n_bytes == second.n_bytes + third.n_bytes, "the file is gone"
    store._index.database._connection.execute("PRAGMA query_only = 0")
    store.erase([2])
    assert store.delete_again()
    assert store.n_bytes == third.n_bytes
    assert rows_of(folder) == [3]
    store.close()


def test_files_that_could_not_be_deleted_count_and_are_deleted_when_there_is_no_room(folder: Path) -> None:
    store = opened(folder, OTHER)
    other, first, second = segment(1), segment(2), segment(3)
    write(store, other)
    store.close()
    store = opened(folder, capacity=2 * first.n_bytes)
    write(store, first)
    path = file_of(folder, 2)
    path.unlink()
    path.mkdir()  # which `unlink` refuses, also for root
    with capture_logs() as logs:
        store.erase([2])
    assert [(each["event"], each["segment"]) for each in logs] == [("disk.erase_failed", 2)]
    assert not store.delete_again()
    assert store.n_bytes == other.n_bytes + first.n_bytes
    assert rows_of(folder) == [1], "it does not come back"
    path.rmdir()
    write(store, second)
    assert store.n_bytes == other.n_bytes + second.n_bytes
    assert rows_of(folder) == [1, 3], "that of another model stays, as there is room"
    assert store.delete_again()
    store.close()


def rows_of(folder: Path) -> list[int]:
    """Numbers of the segments in the index."""
    with contextlib.closing(sqlite3.connect(folder / "index.sqlite")) as database:
        return [number for (number,) in database.execute("SELECT number FROM segments ORDER BY number")]


# --- a process that ends at once ---

WRITER = """
import sys
from pathlib import Path
from tests.backend.test_disk_store import opened, segment, state_of
store = opened(Path(sys.argv[1]))
print("open", flush=True)
chain, number = None, store.first_number
while True:
    each = segment(number, chain if number % 5 else None)
    assert store.write(each, state_of(number, each.n_bytes))
    if number % 7 == 6:
        store.erase([number])
        number += 1
        chain = None
        number += -number % 5
        continue
    store.mark_used([number])
    chain = each
    number += 1
"""


@pytest.mark.slow
def test_whatever_was_written_survives_a_kill(folder: Path) -> None:
    chance = random.Random(2)
    n_found = 0
    for _ in range(200 if LONG else 5):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        time.sleep(chance.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = opened(folder, capacity=10**9)
        found = store.take_segments()
        for each in found:
            assert each.parent is None or each.parent in {other.number for other in found}
            assert np.array_equal(store.read(each.number), state_of(each.number, each.n_bytes))
        assert len(found) >= n_found
        n_found = len(found)
        store.close()
    assert n_found


def session(n: int, name: bytes, *, branch_of: bytes = b"") -> Session:
    return Session(
        key=name,
        session=branch_of or name,
        tokens=np.arange(n, n + 3, dtype="<i4").tobytes(),
        n_added=1,
        n_prompt=2,
        n_text=3,
        is_text=n % 2 == 0,
        branches=((n, b"abcd", "key"),),
    )


def facts(store: DiskStore) -> list[tuple[object, ...]]:
    return [
        (each.key, each.ids.tolist(), each.n_added, each.n_prompt, each.n_text, each.is_text, each.branches)
        for each in store.texts.records()
        if isinstance(each, Session)
    ]


def test_sessions_are_read_again_and_only_for_their_key(folder: Path) -> None:
    store = opened(folder)
    for name, n in ((b"a", 1), (b"b", 2), (b"a", 3)):
        store.texts.write(session(n, name))
    store.close()
    other = opened(folder, OTHER)
    assert facts(other) == []
    other.texts.write(session(4, b"b"))
    other.texts.clear_texts()
    other.close()
    again = opened(folder)
    assert facts(again) == [
        (b"b", [2, 3, 4], 1, 2, 3, True, ((2, b"abcd", "key"),)),
        (b"a", [3, 4, 5], 1, 2, 3, False, ((3, b"abcd", "key"),)),
    ]
    again.texts.drop_session(b"b")
    assert [name for name, *_ in facts(again)] == [b"a"]
    for name, parent in ((b"d", b"c"), (b"c", b""), (b"e", b"a")):
        again.texts.write(session(5, name, branch_of=parent))
    assert [each.session for each in again.texts.records()] == [b"a", b"c", b"c", b"a"]
    again.texts.drop_session(b"c")
    assert [name for name, *_ in facts(again)] == [b"a", b"e"], "the branches of a session are deleted with it"
    again.texts.clear_texts()
    assert facts(again) == []
    again.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("content", b"abcdefgh"),
        ("content", "x"),
        ("digest", b"x"),
        ("parent", b"a"),
        ("checksum", b"x"),
    ],
)
def test_a_changed_session_is_skipped(folder: Path, column: str, value: object) -> None:
    store = opened(folder)
    store.texts.write(session(1, b"a"))
    store.texts.write(session(2, b"b"))
    store.close()
    with sqlite3.connect(folder / "index.sqlite") as database:
        database.execute(f"UPDATE texts SET {column} = ? WHERE digest = ?", (value, b"b"))
    database.close()
    again = opened(folder)
    assert [name for name, *_ in facts(again)] == [b"a"]
    again.close()


def test_the_oldest_sessions_beyond_the_limit_are_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_texts(monkeypatch, 2, session(1, b"1"))
    store = opened(folder)
    for n in range(4):
        store.texts.write(session(n, b"%d" % n))
    assert [name for name, *_ in facts(store)] == [b"2", b"3"]
    store.close()


@pytest.mark.parametrize("is_cleared", [False, True])
def test_texts_that_could_not_be_deleted_are_deleted_before_the_next_change(folder: Path, is_cleared: bool) -> None:
    store = opened(folder)
    store.texts.write(anchor(1))
    for name, n in ((b"a", 1), (b"b", 2)):
        store.texts.write(session(n, name))
    store._index.database._connection.execute("PRAGMA query_only = 1")
    store.texts.drop_session(b"a")
    if is_cleared:
        store.texts.clear_texts()
    assert not store.delete_again()
    store._index.database._connection.execute("PRAGMA query_only = 0")
    store.texts.write(session(3, b"c"))
    store.texts.write(session(4, b"a"))
    assert store.delete_again()
    store.close()
    again = opened(folder)
    assert [name for name, *_ in facts(again)] == [b"b"] * (not is_cleared) + [b"c", b"a"], "what came later stays"
    assert len(again.texts.records()) == (2 if is_cleared else 4)
    again.close()


def test_missing_tables_of_texts_are_logged_now_and_then_and_nothing_else(folder: Path) -> None:
    now = [5.0]
    store = DiskStore(folder)
    store._failures = FailureLog(lambda: now[0])
    store.open(KEY, CAPACITY)
    store.texts.write(anchor(1))
    connection = store._index.database._connection
    connection.executescript("DROP TABLE texts; DROP TABLE segments;")
    with capture_logs() as logs:
        store.texts.write(session(1, b"a"))
        store.texts.drop_session(b"a")
        store.texts.clear_texts()
        assert store.texts.records() == []
        store.mark_used([1])
        now[0] += 31
        store.texts.drop_session(b"a")
        store.mark_used([1])
    lines = [(each["event"], each.get("not_logged_before")) for each in logs]
    texts, uses = "disk.text_tables_failed", "disk.mark_used_failed"
    assert lines == [(texts, None), (uses, None), (texts, 3), (uses, None)]
    assert logs[0]["error"] == "no such table: texts"
    store.close()


def test_what_was_written_is_counted_over_restarts_and_clock_jumps(folder: Path) -> None:
    day, now = 86_400.0, [10**9]

    def again() -> DiskStore:
        store = DiskStore(folder, lambda: now[0])
        store.open(KEY, CAPACITY)
        return store

    store = again()
    assert store.written.total_bytes == store.written.budget_used_bytes == 0
    first, second = segment(1), segment(2)
    write(store, first)
    store.count_write(first.n_bytes, 700)
    store.close()
    for elapsed, seconds_ago in ((50.0, 50.0), (day, day + 50.0), (-3 * day, 0.0), (3 * day, day + 50.0)):
        now[0] += elapsed
        store = again()
        assert store.written == WriteTotals(first.n_bytes, 700, seconds_ago)
        store.close()
    store = again()
    write(store, second)
    store.count_write(second.n_bytes, 900)
    store.erase([1, 2])
    store.close()
    assert again().written == WriteTotals(first.n_bytes + second.n_bytes, 900, 0.0), "erased bytes count too"


@pytest.mark.parametrize("row", [None, "(0, -1, 5, 1.0)", "(0, 'x', 5, 1.0)", "(0, 1, x'00', 1e300)"])
def test_a_folder_without_a_usable_count_starts_with_none_and_keeps_its_segments(
    folder: Path, row: str | None
) -> None:
    store = opened(folder)
    write(store, segment(1))
    store.count_write(5, 5)
    store.close()
    with contextlib.closing(sqlite3.connect(folder / "index.sqlite", isolation_level=None)) as database:
        database.execute("DROP TABLE writes" if row is None else f"REPLACE INTO writes VALUES {row}")
    store = opened(folder)
    assert (store.written.total_bytes, store.written.budget_used_bytes) == (0, 0)
    assert [each.number for each in store.take_segments()] == [1]
    write(store, segment(2))
    store.close()
