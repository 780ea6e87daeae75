"""The start lines say what is reused of a model, and why nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import synthetic
from llamaslot.app.config import Config
from llamaslot.app.start_lines import announce
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.processes.messages import Loaded

LINES = {
    "tiny": "Prefix reuse: on; 3 layers: KV of every token in 3",
    "tiny-swa": (
        "Prefix reuse: off, every prompt is computed whole (sliding-window model: it forgets what is more than 32 "
        "tokens back); 6 layers: KV of every token in 1, KV of the last 32 in 5"
    ),
    "tiny-lfm2": (
        "Prefix reuse: off, every prompt is computed whole (hybrid model: its recurrent state cannot be cut back); "
        "4 layers: KV of every token in 2"
    ),
    "tiny-mamba": (
        "Prefix reuse: off, every prompt is computed whole (recurrent model: its state cannot be cut back); "
        "2 layers: a recurrent state in all"
    ),
}


@pytest.mark.parametrize("shape", LINES)
def test_one_line_says_what_is_reused(tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str) -> None:
    backend = LlamaBackend(
        LlamaSettings(synthetic.ensure(shape, folder=tmp_path), n_ctx=512, n_slots=2, n_ubatch=64, n_threads=1)
    )
    info = backend.info
    backend.close()
    announce(Loaded(info, ram_line="", disk_line=""), ["http://127.0.0.1:1"], Config())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Prefix reuse")]
    assert lines == [LINES[shape]]
