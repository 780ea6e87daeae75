"""A prompt on which a vocabulary takes quadratic time ends at `--prompt-timeout`; other requests are answered."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import gguf
import pytest

from bench import synthetic
from tests.app.test_crashes import STORY, n_running, outcome, streamed, wait
from tests.live import serving

RUN = " " * 240_000
"""With two spaces as a token, llama.cpp takes 5 s for half of it, and 20 s for all (2.8 GHz)."""
REQUEST = {"prompt": STORY, "n_predict": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model with a user-defined token of two spaces, like GPT-NeoX's and MPT's.

    At each occurrence of such a token llama.cpp cuts the text, and looks at all of the rest again. Another token is
    so long that a run of spaces could fit the context, as in most real vocabularies.
    """

    class Writer(gguf.GGUFWriter):
        def add_token_list(self, tokens: Any) -> None:
            self.replaced = tokens[-2:]
            super().add_token_list([*tokens[:-2], "  ", "-" * 128])

        def add_token_types(self, types: Any) -> None:
            super().add_token_types([*types[:-2], gguf.TokenType.USER_DEFINED, gguf.TokenType.USER_DEFINED])

        def add_token_merges(self, merges: Any) -> None:
            super().add_token_merges([each for each in merges if each.replace(" ", "") not in self.replaced])

        def add_tokenizer_pre(self, pre: str) -> None:
            super().add_tokenizer_pre("mpt")

    monkeypatch.setattr(gguf, "GGUFWriter", Writer)
    return synthetic.ensure("tiny", folder=tmp_path)


@pytest.mark.slow
def test_a_run_of_spaces_on_a_vocabulary_of_quadratic_time_fails_alone(model: Path, tmp_path: Path) -> None:
    with (
        serving(tmp_path, "-m", model, "-np", "2", "--prompt-timeout", "1") as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        assert server.post("/completion", REQUEST)["tokens_predicted"] == 8
        body = {"prompt": "a", "n_predict": 1500, "ignore_eos": True}
        running = pool.submit(streamed, server, body)
        wait(lambda: n_running(server) == 1)
        slow = pool.submit(outcome, server, {"prompt": RUN, "n_predict": 1})
        others = [pool.submit(outcome, server, REQUEST) for _ in range(3)]
        status, reply, _ = slow.result()
        assert (status, "took more than 1 s" in reply["error"]["message"]) == (400, True), reply
        assert "--prompt-timeout" in reply["error"]["message"]
        # With random weights the text depends on what shares the batch: on some CPUs its best tokens are near-ties.
        answers = [each.result() for each in others]
        assert [(answer[0], answer[1].get("tokens_predicted")) for answer in answers] == [(200, 8)] * 3
        assert running.result()[-1]["tokens_predicted"] == 1500
        assert outcome(server, REQUEST)[0] == 200
        assert len(server.log_lines("prompt_worker.ended")) == 1
        assert not server.log_lines("engine.ended")
        assert server.stop() == 0
