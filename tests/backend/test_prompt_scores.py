"""On the embedded model, log-probabilities are those of a plain decode, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from llamaslot.app.model_files import resolve_model
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, loading
from llamaslot.base.backend import Run, Status
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.token_probs import TokenProb
from llamaslot.base.kv_ops import IllegalCallError, Remove
from tests.backend.test_probabilities import log_softmax
from tests.engine.harness import Harness, running

pytestmark = pytest.mark.gpu

PROMPT = (
    "<|im_start|>user\nMy cat's name is Otto. What is my cat's name?<|im_end|>\n<|im_start|>assistant\n"
    "Your cat's name is Otto.<|im_end|>\n<|im_start|>user\nThank you.<|im_end|>\n<|im_start|>assistant\n"
)
TOLERANCE = 5e-2
"""Chunk sizes change the order of additions (fact 9)."""


def loaded(**settings: object) -> LlamaBackend:
    return LlamaBackend(LlamaSettings(resolve_model("demo"), n_ctx=1024, n_slots=3, n_threads=1, **settings))


@pytest.fixture
def backend() -> Iterator[LlamaBackend]:
    backend = loaded()
    yield backend
    backend.close()


def plain_scores(backend: LlamaBackend, tokens: np.ndarray) -> list[np.ndarray]:
    """The log-softmax after each token, computed one by one."""
    rows = []
    for i, token in enumerate(tokens.tolist()):
        decoded = backend.decode([Run(0, i, np.array([token], dtype=np.int32), n_outputs=1)])
        assert decoded.status is Status.OK
        rows.append(log_softmax(backend._logits(0)))
    backend.change(Remove(0, 0))
    return rows


def prompt_rows(harness: Harness, name: str) -> list[TokenProb]:
    events = [event for event in harness.events[name] if isinstance(event, Output)]
    return [row for event in events for row in event.prompt_probs or ()]


def rows(harness: Harness, name: str) -> list[TokenProb]:
    events = [event for event in harness.events[name] if isinstance(event, Output | Finished)]
    return [row for event in events for row in event.probs or ()]


@pytest.mark.parametrize("n_spare_rows", [1, 7, 1000])
async def test_prompts_and_replies_are_scored_as_by_a_plain_decode(
    n_spare_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "spare_rows", lambda model, settings, n_ubatch: min(n_spare_rows, n_ubatch))
    backend = loaded()
    tokens = backend.vocab.tokenize(PROMPT, add_special=True, parse_special=True)
    sampling = Sampling(temperature=0.0, n_probs=4)
    async with running(backend) as harness:
        others = [harness.submit(f"other {i}", f"Once {i}", max_tokens=30, prompt_probs=0) for i in range(2)]
        fields = {"max_tokens": 12, "sampling": sampling}
        end = await harness.submit("scored", PROMPT, prompt_probs=4, **fields)
        for other in others:
            assert isinstance(await other, Finished)
        assert isinstance(end, Finished)
        cold, echoed = rows(harness, "scored"), prompt_rows(harness, "scored")
        await harness.submit("cold", PROMPT, **fields)
        warm_end = await harness.submit("warm", PROMPT, **fields)
        assert warm_end.progress.n_cached > 0
        for name in ("cold", "warm"):
            assert [row.token for row in rows(harness, name)] == [row.token for row in cold]
            for row, other in zip(rows(harness, name), cold, strict=True):
                assert row.value == pytest.approx(other.value, abs=TOLERANCE)
    fresh = loaded()
    everything = np.concatenate([tokens, [row.token for row in cold]]).astype(np.int32)
    expected = plain_scores(fresh, everything)
    fresh.close()
    assert [row.token for row in echoed] == tokens.tolist()
    assert echoed[0].value is None
    assert b"".join(row.piece for row in echoed).decode() == PROMPT
    for i, row in enumerate([*echoed[1:], *cold]):
        assert row.value == pytest.approx(expected[i][row.token], abs=TOLERANCE), i
        best = np.sort(expected[i])[::-1][:4]
        assert [top.value for top in row.top] == pytest.approx(best.tolist(), abs=TOLERANCE)
    assert all(row.token == row.top[0].token for row in cold), "greedy"


def test_calls_that_llama_cpp_would_abort_on_are_refused(backend: LlamaBackend) -> None:
    tokens = np.arange(100, dtype=np.int32)
    with pytest.raises(IllegalCallError, match="nothing to score"):
        backend.score(0, 1)
    for targets in (np.array([-1]), np.array([backend.info.n_vocab]), np.arange(101)):
        with pytest.raises(IllegalCallError):
            backend.decode([Run(0, 0, tokens, n_outputs=0, targets=targets.astype(np.int32))])
    assert backend.decode([Run(0, 0, tokens, n_outputs=1, targets=tokens)]).status is Status.OK
    assert len(backend.score(0, 0)) == 100


def test_every_row_may_be_an_output_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_MAX_SPARE_BYTES", 1)
    backend = loaded()
    assert backend.info.n_spare_rows == 1
    two = np.array([5, 6], dtype=np.int32)
    runs = [Run(seq, 0, two, n_outputs=1) for seq in range(1, backend.n_seqs)]
    runs.append(Run(0, 0, two, n_outputs=1, targets=two[1:]))
    assert backend.decode(runs).status is Status.OK
    assert len(backend.score(0, 2)) == 1
    with pytest.raises(IllegalCallError, match="rows of logits"):
        backend.decode([Run(0, 2, two, n_outputs=1, targets=two)])
    backend.close()
