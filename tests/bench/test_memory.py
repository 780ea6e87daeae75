"""What is counted as a server's memory."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from bench import memory
from bench.client import BenchmarkError
from bench.tokens import Tokens

QWEN3_0_6B = {
    "block_count": 28,
    "embedding_length": 1024,
    "attention.head_count": 16,
    "attention.head_count_kv": 8,
    "attention.key_length": 128,
    "attention.value_length": 128,
}


def test_the_pool_is_as_large_as_llama_server_says(tiny_model: Path) -> None:
    """Its log at `-lv 4`: `KV buffer size = 448.00 MiB` (Qwen3-0.6B), `3.00 MiB` (tiny) and `1.22 MiB`."""
    qwen3 = QWEN3_0_6B.get
    assert memory.pool_bytes(lambda key: qwen3(key, 0), 4096) == 448 * 2**20
    number = Tokens(tiny_model).number
    assert memory.pool_bytes(number, 4096) == 3 * 2**20
    assert memory.pool_bytes(number, 4096, "q8_0", "q4_0") / 2**20 == pytest.approx(1.22, abs=0.005)
    assert memory.pool_bytes(number, 0) == 0


def test_heads_are_as_wide_as_the_model_where_nothing_else_is_said() -> None:
    shape = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
    assert memory.pool_bytes(lambda key: shape.get(key, 0), 10) == 10 * 2 * 2 * (2 * 16 * 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"attention.sliding_window": 512}, "not all alike"), ({"attention.head_count_kv": 0}, "how wide")],
)
def test_a_pool_that_cannot_be_computed_is_not_guessed(change: dict[str, int], reason: str) -> None:
    shape = QWEN3_0_6B | change
    with pytest.raises(BenchmarkError, match=reason):
        memory.pool_bytes(lambda key: shape.get(key, 0), 4096)


def test_the_last_of_an_options_names_counts() -> None:
    flags = ("-ctk", "q8_0", "-fa", "on", "--cache-type-k", "q4_0", "-ctv")
    assert memory.option(flags, "f16", "-ctk", "--cache-type-k") == "q4_0"
    assert memory.option(flags, "f16", "-ctv") == "f16"


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not count pages of files at all")
def test_the_weights_are_not_counted_and_other_files_are(tmp_path: Path) -> None:
    size = 32 * 2**20
    (tmp_path / "weights").write_bytes(bytes(size))
    (tmp_path / "link").symlink_to(tmp_path / "weights")
    with (tmp_path / "weights").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapped[:]
        everything = memory.resident(os.getpid(), tmp_path / "another")
        rest = memory.resident(os.getpid(), tmp_path / "link")
    assert everything - rest == pytest.approx(size, rel=0.2)


@pytest.mark.skipif(sys.platform != "darwin", reason="only macOS keeps this account")
def test_macos_says_what_a_process_is_charged_for() -> None:
    assert memory.resident(os.getpid(), Path("weights")) > 2**20
