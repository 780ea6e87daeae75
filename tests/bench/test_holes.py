"""Holes between idle cells, made on a real pool."""

from __future__ import annotations

from pathlib import Path

from bench import holes
from llamaslot.backend.llama import LlamaSettings


def test_a_prompt_that_fits_nowhere_else_is_computed_into_holes(tiny_model: Path) -> None:
    result = holes.among_holes(LlamaSettings(model=tiny_model, n_threads=1, flash_attn="on"), repeats=2)
    n_cells = -(-result["holes"] * holes.SPAN // 256) * 256
    n_behind = n_cells - result["holes"] * holes.SPAN
    assert n_behind < holes.PROMPT <= result["holes"] + n_behind
    assert (result["holes"], result["idle_cells"]) == (261, 5742)
    assert result["ratio"]["low"] > 0
    assert "5,742 idle cells" in holes.line(result)
