"""The benchmark of embeddings: goals, and the file that it measures reranking with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import embed
from bench.client import BenchmarkError
from bench.embed import SHAPES, Case, table
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from tests.gguf_copies import rewritten


@pytest.mark.parametrize(
    ("is_rate", "goal", "peer", "own", "is_met"),
    [
        (True, 0.95, [100, 200, 100], [95, 190, 60], True),
        (True, 0.95, [100, 200, 100], [94, 180, 200], False),
        (False, 0.5, [10, 20], [5, 9], True),
        (False, 0.5, [10, 20], [5.1, 10.1], False),
        (False, 1.05, [10, 20], [10.4, 20.9], True),
    ],
)
def test_goals_are_those_of_the_median_of_pairs(
    is_rate: bool, goal: float, peer: list[float], own: list[float], is_met: bool
) -> None:
    case = Case("any", is_rate, goal, peer, own)
    assert case.is_met is is_met
    assert list(table([case]).columns[-1].cells) == ["yes" if is_met else "NO"]


def test_requests_have_all_texts_and_each_server_is_the_first_every_other_time() -> None:
    for shape in SHAPES:
        requests = embed._texts(random.Random(1), 1000, shape, 1.0)
        texts = [text for request in requests for text in request]
        assert {len(text) for text in texts} == {shape.n_tokens}
        assert {len(request) for request in requests[:-1]} <= {shape.n_inputs}
        assert len({tuple(text[:2]) for text in texts}) > 0.9 * len(texts)
    sides: Any = "peer", "own"
    assert [embed._in_turn(i, *sides)[0] for i in range(4)] == ["peer", "own", "peer", "own"]


def test_servers_that_do_other_work_are_not_compared() -> None:
    embed._check_close("the vectors", np.max, 0.01, [1.0, -2.0], [1.01, -2.01])
    embed._check_close("the scores", np.mean, 0.03, [1.0, -2.0], [1.0, -1.9])
    for of_all, other in ((np.max, [1.0, -1.9]), (np.mean, [1.0, -1.8]), (np.mean, [1.0])):
        with pytest.raises(BenchmarkError, match="the vectors"):
            embed._check_close("the vectors", of_all, 0.01, [1.0, -2.0], other)


def test_the_reranker_has_a_head(tiny_model: Path, tmp_path: Path) -> None:
    norms = {f"blk.{i}.attn_{name}_norm.weight": np.ones(64, np.float32) for i in range(3) for name in "qk"}
    source = rewritten(tiny_model, tmp_path / "source.gguf", "qwen3", tensors=norms)
    path = embed.with_head(source, tmp_path / "reranker.gguf")
    backend = LlamaBackend(LlamaSettings(path, n_ctx=512, n_threads=1, embeds=True))
    assert (backend.info.pooling, backend.info.n_vector) == ("rank", 2)
    backend.close()
