"""Texts with long runs, on vocabularies that llama.cpp splits by std::regex, end in tokens or in a clear error.

Each case runs in a process of its own, since an overflow of the stack ends the process.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.error
from pathlib import Path

import gguf
import pytest

from bench import synthetic
from llamaslot.backend.llama.vocab import _REGEX_MAX_CHARACTERS, _SPLITTERS_WITHOUT_REGEX
from tests.conftest import LONG
from tests.live import serving

BY_REGEX = {"bloom": ["a", "é", "\u0301\x1c"], "gpt-4o": ["a", "\n", "!\x1c"]}
"""A vocabulary for each kind of regular expression, with texts whose repetitions nest deepest on it.

The long form takes all vocabularies and all of `UNITS`.
"""
OTHERS_BY_REGEX = """
    deepseek-llm deepseek-coder spark2_5 youtu falcon jais-2 whitespace poro-chat viking gpt3-finnish exaone-moe
    chameleon llama4 granite-embed-multi-97m tiny_aya superbpe bailingmoe seed-coder hunyuan-dense hy_v4 joyai-llm
    ufakzeka afmoe minimax-m2 minicpm5
    """.split()  # noqa: SIM905
SAFE = sorted(_SPLITTERS_WITHOUT_REGEX) if LONG else ["llama-bpe", "qwen2"]

UNITS = [
    "a",
    "A",
    " ",
    "\n",
    "1",
    "!",
    "é",
    "漢",
    "\u0301",
    "a1",
    "\n/",
    "a\x1c",
    "\u0301\x1c",
    "A\u0301 ",
    "!\x1c",
]
"""Texts whose repetition one match can take in, on one vocabulary or another."""
if LONG:
    BY_REGEX = dict.fromkeys([*BY_REGEX, *OTHERS_BY_REGEX], UNITS)

TOKENIZE = """
import sys, threading
import llama_cpp
from llamaslot.backend.llama import library
from llamaslot.backend.llama.vocab import LlamaVocab
library.initialise()
params = llama_cpp.llama_model_default_params()
params.vocab_only = True
vocab = LlamaVocab(llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params))
n, units = int(sys.argv[2]), sys.argv[3:]
def run():
    for unit in units:
        vocab.tokenize((unit * n)[:n], add_special=False, parse_special=False)
    print("survived", vocab.stack_bytes > 0)
threading.stack_size(vocab.stack_bytes)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def tokenized(model: Path, n: int, units: list[str]) -> str:
    """Tokenize texts of `n` characters in another process; return the last line of its output."""
    command = [sys.executable, "-c", TOKENIZE, str(model), str(n), *units]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    return done.stdout.splitlines()[-1]


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model with another `tokenizer.ggml.pre`."""
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_tokenizer_pre", lambda self, _: self.add_string("tokenizer.ggml.pre", request.param)
    )
    return synthetic.ensure("tiny", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "units"), BY_REGEX.items(), indirect=["model"], ids=BY_REGEX)
def test_the_longest_texts_that_are_allowed_fit_the_stack(model: Path, units: list[str]) -> None:
    assert tokenized(model, _REGEX_MAX_CHARACTERS, units) == "survived True"


@pytest.mark.slow
@pytest.mark.parametrize("model", SAFE, indirect=True)
def test_other_vocabularies_need_no_stack(model: Path) -> None:
    assert tokenized(model, 1_000_000 if LONG else 100_000, UNITS) == "survived False"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bloom"], indirect=True)
def test_a_server_answers_long_runs_or_refuses_them_by_name(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, "-m", model, "--in-process") as server:
        assert len(server.post("/tokenize", {"content": "a" * 40_000})["tokens"]) > 1000
        for path, body in (
            ("/tokenize", {"content": "a" * (_REGEX_MAX_CHARACTERS + 1)}),
            ("/completion", {"prompt": " " * (_REGEX_MAX_CHARACTERS + 1)}),
        ):
            with pytest.raises(urllib.error.HTTPError) as refusal:
                server.post(path, body)
            with refusal.value as reply:
                assert reply.code == 400
        assert server.get("/health") == {"status": "ok"}
