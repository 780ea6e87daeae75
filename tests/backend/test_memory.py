"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

FREED = """
import ctypes
from pathlib import Path

from llamaslot.backend.host import trim_heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def malloc(n_bytes):
    block = libc.malloc(n_bytes)
    ctypes.memset(block, 1, n_bytes)
    return block

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
freed = [malloc(100_000) for _ in range(200)]
last = malloc(100_000)
before = resident()
for block in freed:
    libc.free(block)
kept = resident()
trim_heap()
print(before - kept, kept - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no such function")
def test_pages_below_blocks_in_use_go_back() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    before, trimmed = map(int, done.stdout.split())
    assert before < 1_000_000, "the C library gives them back by itself: trimming is of no use"
    assert trimmed > 15_000_000
