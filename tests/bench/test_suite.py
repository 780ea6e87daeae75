"""llama-server's own test suite: how it starts llamaslot, the model that it gets, and what its results mean."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import synthetic
from bench.peers import build
from bench.suite import exceptions, run, start
from bench.suite.models import CACHED, N_POSITIONS, Models
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.backend.llama.vocab import LlamaVocab

UTILS = """
import os, requests, subprocess, wget
def download_file(url, output_file_path=None):
    raise AssertionError("downloads")
class ServerPreset:
    @staticmethod
    def load_all():
        raise AssertionError("downloads")
def match_regex(regex, text):
    return regex == text
def started():
    assert download_file("https://host/moe_shakespeare15M.gguf").endswith("adapter.gguf")
    assert requests.get("https://host/91_cat.png", timeout=1).content.startswith(b"\\x89PNG")
    program = os.environ["LLAMA_SERVER_BIN_PATH"]
    return subprocess.run([program, "--hf-repo", "a", "--slots"], capture_output=True, text=True).stdout
"""
CONFTEST = """
import pytest
from utils import *
@pytest.fixture(scope="session", autouse=True)
def load_server_presets():
    ServerPreset.load_all()
"""
TESTS = """
from utils import *
def test_words():
    assert match_regex("once upon a time", "x y z")
def test_completion_with_grammar():
    assert match_regex("aaa", "bbb"), "constrained"
def test_server_props():
    assert "--no-kv-unified" in started()
def test_other():
    assert os.listdir("tmp") == []
    open("tmp/left", "w").close()
    assert "--no-kv-unified" not in started()
    assert "--model" in started() and "--hf-repo" not in started() and "--slots" in started()
"""
LOREM = """
Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore et dolore \
magna aliqua.
Ut enim ad minim veniam, quis nostrud exercitation ullamco laboris nisi ut aliquip ex ea commodo consequat.
Duis aute irure dolor in reprehenderit in voluptate velit esse cillum dolore eu fugiat nulla pariatur.
""".strip()


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A suite of the same structure, on a server that prints its flags and ends."""
    folder = tmp_path / "tools" / "server" / "tests"
    (folder / "unit").mkdir(parents=True)
    for name, text in (("utils.py", UTILS), ("conftest.py", CONFTEST), ("unit/test_it.py", TESTS)):
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(build, "llama_cpp_source", lambda: tmp_path)
    monkeypatch.setattr(run, "llamaslot", lambda: ["echo"])
    monkeypatch.setattr(build, "llama_server", lambda: Path("/bin/echo"))
    return folder


@pytest.mark.slow
def test_the_suite_runs_with_a_local_model_and_the_flags_that_its_tests_presume(
    suite: Path, tmp_path: Path
) -> None:
    status = run.run(servers=[run.OWN], files=["it"], options=[], any_words=True, out=tmp_path)
    results = json.loads((tmp_path / "llama-suite" / "results.json").read_text())[run.OWN]
    outcomes = {each["test"].rpartition("::")[2]: each["outcome"] for each in results}
    assert outcomes == {
        "test_words": "passed",
        "test_completion_with_grammar": "failed",
        "test_server_props": "passed",
        "test_other": "passed",
    }
    assert status == 1


@pytest.mark.slow
@pytest.mark.usefixtures("suite")
def test_only_what_llama_server_passes_and_no_exception_names_is_unexpected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run.run(servers=[run.OWN, run.PEER], files=["it"], options=[], any_words=False, out=tmp_path)
    assert status == 0, "llama-server fails both as well"
    assert capsys.readouterr().out.count("[llama-server fails it too]") == 2
    monkeypatch.setattr(exceptions, "EXCEPTIONS", (("test_words|with_grammar", "a reason"),))
    assert run.run(servers=[run.OWN], files=["it"], options=[], any_words=False, out=tmp_path) == 0
    assert capsys.readouterr().out.count("[a reason]") == 2


def test_only_what_chooses_a_model_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(start.SERVER, json.dumps(["llamaslot", "serve"]))
    models = {
        "bert": ["--model", "encoder.gguf"],
        "tinygemma3": ["--model", "random.gguf", "--mmproj", "mmproj.gguf"],
        "": ["--model", "random.gguf"],
    }
    monkeypatch.setenv(start.MODELS, json.dumps(models))
    monkeypatch.setenv(start.DEFAULT, json.dumps(["--config", "models.toml"]))
    monkeypatch.setenv(start.FLAGS, "--no-kv-unified")
    flags = ["--port", "1", "--hf-repo", "a/b", "--hf-file", "c.gguf", "--batch-size", "32", "--embedding"]
    kept = ["--port", "1", "--batch-size", "32", "--embedding", "--no-kv-unified"]
    assert start.command(flags) == ["llamaslot", "serve", "--model", "random.gguf", *kept]
    encoder = start.command(["--hf-repo", "a/b", "--hf-file", "bert-bge-small/c.gguf"])
    assert encoder == ["llamaslot", "serve", "--model", "encoder.gguf", "--no-kv-unified"]
    image = start.command(["--hf-repo", "a/tinygemma3-GGUF:Q8_0", "--port", "1"])
    assert image == ["llamaslot", "serve", *models["tinygemma3"], "--port", "1", "--no-kv-unified"]
    text = start.command(["--hf-repo", "a/tinygemma3-GGUF:Q8_0", "--no-mmproj"])
    assert text == ["llamaslot", "serve", "--model", "random.gguf", "--no-kv-unified"]
    several = start.command(["--port", "1"])
    assert several == ["llamaslot", "serve", "--config", "models.toml", "--port", "1", "--no-kv-unified"]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> LlamaVocab:
    model = synthetic.ensure("tiny-sentencepiece", folder=tmp_path_factory.mktemp("models"))
    return LlamaBackend(LlamaSettings(model, n_ctx=256, n_slots=1, n_threads=1)).vocab


@pytest.mark.parametrize(
    ("text", "n_tokens"),
    [
        ("I believe the meaning of life is", 18),
        ("Write a joke about AI from a very long prompt which will not be truncated", 46),
        (" Hello 1" * 41, 41 * 5 + 2),
        (
            "<|im_start|>system\nTest<|im_end|>\n<|im_start|>user\n1 2 3 4 5 6<|im_end|>\n<|im_start|>assistant\n",
            77,
        ),
        ("What is the capital of France?", 21),
        (LOREM, 226),
    ],
)
def test_prompts_of_the_suite_have_as_many_tokens_as_it_expects(
    vocab: LlamaVocab, text: str, n_tokens: int
) -> None:
    tokens = vocab.tokenize(text, add_special=True, parse_special=True).tolist()
    assert len(tokens) == n_tokens
    assert vocab.detokenize(tokens[1:]).decode().removeprefix(" ") == text


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("suite"))


def file_of(models: Models, name: str) -> Path:
    return Path(models.flags[name][models.flags[name].index("--model") + 1])


@pytest.mark.parametrize(
    ("name", "texts", "n_tokens"),
    [
        ("bert-bge-small", ("I believe the meaning of life is",), 9),
        ("bert-bge-small", ("This is a test",), 6),
        ("bert-bge-small", ("hello hello hello",), 5),
        ("bert-bge-small", ("d " * 256,), 258),
        ("jina-reranker", ("Machine learning is", "A machine", "Machine learning is", "Learning is"), 19),
        ("jina-reranker", ("Which city?", "Machine learning is ", "Which city?", "Paris, capitale de la"), 26),
    ],
)
def test_texts_of_the_suite_have_as_many_tokens_for_encoders_as_it_expects(
    models: Models, name: str, texts: tuple[str, ...], n_tokens: int
) -> None:
    vocab = LlamaVocab.load(file_of(models, name))
    is_reranker = len(texts) > 1
    found = [vocab.tokenize(text, add_special=not is_reranker, parse_special=False) for text in texts]
    # Around each query and document stand BOS, EOS, SEP and EOS.
    assert sum(map(len, found)) + 4 * (len(texts) // 2) == n_tokens
    assert n_tokens <= N_POSITIONS


def test_models_that_the_suite_expects_in_the_cache_are_local(models: Models) -> None:
    table = tomllib.loads(models.table.read_text())["models"]
    assert tuple(table) == CACHED
    for name in CACHED:
        repository, quant = name.split(":")
        folder = models.hub / f"models--{repository.replace('/', '--')}"
        [file] = (folder / "snapshots" / (folder / "refs" / "main").read_text()).iterdir()
        assert file.name.endswith(f"-{quant}.gguf")
        assert file.read_bytes()[:4] == Path(table[name]["model"]).read_bytes()[:4] == b"GGUF"
    Models(models.hub.parent)


def test_the_model_for_infill_has_the_tokens_for_it(models: Models) -> None:
    override = models.flags["infill"][models.flags["infill"].index("--override-kv") + 1]
    values = tuple(
        (key, int(value.removeprefix("int:"))) for key, value in (e.split("=") for e in override.split(","))
    )
    assert LlamaVocab.load(file_of(models, "infill"), values).fim is not None
    assert LlamaVocab.load(file_of(models, "infill")).fim is None
