"""The benchmark of embeddings: goals, and the file that it measures reranking with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import embed
from bench.embed import Case, table
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from tests.gguf_copies import rewritten


@pytest.mark.parametrize(
    ("is_rate", "peer", "own", "is_met"),
    [
        (True, [100, 200, 100], [95, 190, 60], True),
        (True, [100, 200, 100], [94, 180, 200], False),
        (False, [10, 20], [5, 9], True),
        (False, [10, 20], [5.1, 10.1], False),
    ],
)
def test_goals_are_those_of_the_median_of_pairs(
    is_rate: bool, peer: list[float], own: list[float], is_met: bool
) -> None:
    case = Case("any", is_rate, peer, own)
    assert case.is_met is is_met
    assert list(table([case]).columns[-1].cells) == ["yes" if is_met else "NO"]


def test_the_reranker_has_a_head(tiny_model: Path, tmp_path: Path) -> None:
    norms = {f"blk.{i}.attn_{name}_norm.weight": np.ones(64, np.float32) for i in range(3) for name in "qk"}
    source = rewritten(tiny_model, tmp_path / "source.gguf", "qwen3", tensors=norms)
    path = embed.with_head(source, tmp_path / "reranker.gguf")
    backend = LlamaBackend(LlamaSettings(path, n_ctx=512, n_threads=1, embeds=True))
    assert (backend.info.pooling, backend.info.n_vector) == ("rank", 2)
    backend.close()
