"""Metadata of GGUF files: what is in bounds passes, and what is not is refused in little time and memory."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from llamaslot.app.model_files import resolve_model
from llamaslot.base import files
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import check_metadata, parts
from tests.conftest import LONG
from tests.gguf_copies import rewritten

UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 6, 7, 8, 9, 10


def text(value: bytes | str, claimed: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if claimed is None else claimed) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(name: str, kind: int, count: int, items: bytes) -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", kind, count) + items)


def tensor(name: str = "weights", n_dimensions: int = 2) -> bytes:
    return text(name) + struct.pack("<I", n_dimensions) + bytes(8 * min(n_dimensions, 9) + 12)


def gguf(
    *keys: bytes, tensors: tuple[bytes, ...] = (), n_keys: int = -1, n_tensors: int = -1, version: int = 3
) -> bytes:
    counts = len(tensors) if n_tensors < 0 else n_tensors, len(keys) if n_keys < 0 else n_keys
    return struct.pack("<4sIQQ", b"GGUF", version, *counts) + b"".join(keys) + b"".join(tensors)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


GOOD = gguf(
    key("general.architecture", STRING, text("llama")),
    key("llama.block_count", UINT32, struct.pack("<I", 2)),
    key("tokenizer.chat_template", STRING, text("{{ messages }}")),
    array("tokenizer.ggml.tokens", STRING, 3, text("a") + text("") + text("c" * 20)),
    array("tokenizer.ggml.scores", FLOAT32, 3, bytes(12)),
    tensors=(tensor(), tensor("more", 4)),
)


def refusal(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        check_metadata(path)
    assert caught.value.param == "--model"
    assert str(path) in caught.value.message
    assert caught.value.message.isprintable()
    return caught.value.message


def test_models_are_accepted(path: Path, tiny_model: Path) -> None:
    check_metadata(resolve_model("demo"))
    check_metadata(tiny_model)
    path.write_bytes(GOOD)
    check_metadata(path)


@pytest.mark.parametrize(
    ("limit", "most", "raw_of"),
    [
        ("MAX_KEYS", 2, lambda n: gguf(*(key(f"k{i}", UINT8, b"\1") for i in range(n)))),
        ("MAX_TENSORS", 2, lambda n: gguf(tensors=tuple(tensor(f"t{i}") for i in range(n)))),
        ("MAX_KEY_BYTES", 9, lambda n: gguf(key("k" * n, UINT8, b"\1"))),
        ("MAX_STRING_BYTES", 9, lambda n: gguf(key("k", STRING, text("v" * n)))),
        ("MAX_STRING_BYTES", 9, lambda n: gguf(array("k", STRING, 2, text("v") + text("v" * n)))),
        ("MAX_TEMPLATE_BYTES", 9, lambda n: gguf(key("tokenizer.chat_template", STRING, text("v" * n)))),
        ("MAX_TEMPLATE_BYTES", 9, lambda n: gguf(key("tokenizer.chat_template.tool_use", STRING, text("v" * n)))),
        ("MAX_ARRAY_ITEMS", 9, lambda n: gguf(array("k", UINT32, n, bytes(4 * n)))),
        ("MAX_ARRAY_ITEMS", 9, lambda n: gguf(array("k", STRING, n, text("") * n))),
        ("MAX_TOKENS", 9, lambda n: gguf(array("tokenizer.ggml.tokens", STRING, n, text("") * n))),
        ("MAX_TENSOR_NAME_BYTES", 9, lambda n: gguf(tensors=(tensor("t" * n),))),
        ("MAX_DIMENSIONS", 4, lambda n: gguf(tensors=(tensor("t", n),))),
    ],
)  # fmt: skip
def test_each_limit_is_exact(
    path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, raw_of: object
) -> None:
    monkeypatch.setattr(files, limit, most)
    assert callable(raw_of)
    path.write_bytes(raw_of(most))
    check_metadata(path)
    assert f"at most {most}" in refusal(path, raw_of(most + 1))


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ((b"a", b"b", b"a"), "tokens 0 and 2 are the same: a"),
        ((b"a", b"ab", b"a\0c"), "tokens 0 and 2 are the same: a"),
        ((b"a", b"\0b", b"[EMPTY_1]"), "tokens 1 and 2 are the same: [EMPTY_1]"),
        ((b"", b"", b"a", b"\0"), ""),
        ((b"\xff\n" * 1000, b"\xff\n" * 1000), r"tokens 0 and 1 are the same: '\ufffd\n"),
    ],
)
def test_a_token_that_is_there_twice_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, tokens: tuple[bytes, ...], named: str
) -> None:
    raw = gguf(array("tokenizer.ggml.tokens", STRING, len(tokens), b"".join(map(text, tokens))))
    for piece in (7, 2**22):
        monkeypatch.setattr(files, "_READ_BYTES", piece)
        path.write_bytes(raw)
        if named:
            message = refusal(path, raw)
            assert named in message
            assert len(message) < 1000
        else:
            check_metadata(path)
    path.write_bytes(raw.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges"))
    check_metadata(path)


def test_llama_cpp_aborts_at_a_token_that_is_there_twice(path: Path) -> None:
    """If it does not any more, such models need not be refused."""
    raw = bytearray(resolve_model("demo").read_bytes())
    at = raw.index(text("Ġthe")) + 8
    raw[at : at + 5] = raw[raw.index(text("Ġand")) + 8 :][:5]
    assert "are the same: Ġand" in refusal(path, bytes(raw))
    assert b"token_to_id" in aborted(path, "b.LlamaVocab.load(pathlib.Path(sys.argv[1]))")


def aborted(path: Path, load: str) -> bytes:
    """Return the error output of a process that llama.cpp aborts while a file is loaded."""
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys, pathlib, llamaslot.backend.llama as b; {load}", str(path)],
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        stderr=subprocess.PIPE,
        check=False,
    )
    assert ended.returncode == -signal.SIGABRT
    return ended.stderr


def model(architecture: str, **values: int | bool | list[int]) -> bytes:
    """The metadata of a model, with keys of its architecture."""
    keys = [key("general.architecture", STRING, text(architecture))]
    for name, value in values.items():
        full = f"{architecture}.{name.replace('__', '.')}"
        if isinstance(value, list):
            keys.append(array(full, UINT32, len(value), struct.pack(f"<{len(value)}I", *value)))
        elif isinstance(value, bool):
            keys.append(key(full, BOOL, struct.pack("<?", value)))
        else:
            keys.append(key(full, UINT32, struct.pack("<I", value)))
    return gguf(*keys)


@pytest.mark.parametrize(
    ("architecture", "values", "reason"),
    [
        ("llada", {}, "is a diffusion model (llada)"),
        ("nomic-bert", {}, "is an embedding model (nomic-bert), which generates no text: start the server"),
        ("t5", {}, "is an encoder-decoder model (t5)"),
        ("eagle3", {}, "is a draft model (eagle3), which needs another model"),
        ("clip", {}, "is a projector for images or audio (clip)"),
        ("qwen3", {"attention__causal": False}, "has no causal attention"),
        ("qwen3", {"block_count": 0}, "its key qwen3.block_count is 0"),
        ("glm4moe", {"block_count": 2, "nextn_predict_layers": 3}, "is 3 with glm4moe.block_count 2"),
        ("qwen3moe", {"expert_count": 8, "expert_used_count": 9}, "is 9 with qwen3moe.expert_count 8"),
        ("qwen3moe", {"expert_count": 8, "expert_used_count": [1, 9, 2]}, "expert_used_count is 9 with"),
        ("qwen3moe", {"expert_count": 8}, "expert_used_count is 0 with qwen3moe.expert_count 8"),
        ("llama", {"expert_used_count": 1}, "expert_used_count is 1 with llama.expert_count 0"),
        ("llama", {"expert_group_count": 1}, "expert_group_count is 1 with llama.expert_count 0"),
        ("x", {"expert_count": 8, "expert_used_count": 1, "expert_group_count": 3}, "expert_group_count is 3 with"),
        (
            "x",
            {"expert_count": 8, "expert_used_count": 1, "expert_group_count": 4, "expert_group_used_count": 4},
            "expert_group_used_count is 4 with x.expert_group_count 4",
        ),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_served_is_refused_by_its_metadata(
    path: Path, architecture: str, values: dict[str, int | bool | list[int]], reason: str
) -> None:
    message = refusal(path, model(architecture, **values))
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("llada-like", {}),
        ("qwen3", {"attention__causal": True, "block_count": 1}),
        ("glm4moe", {"block_count": 2, "nextn_predict_layers": 2}),
        ("qwen3moe", {"expert_count": 8, "expert_used_count": [8, 0, 2]}),
        ("hunyuan-dense", {"expert_count": 1, "expert_used_count": 2}),
        ("x", {"expert_count": 8, "expert_used_count": 8, "expert_group_count": 4, "expert_group_used_count": 3}),
    ],
)  # fmt: skip
def test_a_model_that_llama_cpp_accepts_is_not_refused(
    path: Path, architecture: str, values: dict[str, int | bool | list[int]]
) -> None:
    path.write_bytes(model(architecture, **values))
    check_metadata(path)


@pytest.mark.parametrize(
    ("architecture", "values"), [("nomic-bert", {}), ("llama-embed", {}), ("qwen3", {"attention__causal": False})]
)
def test_a_model_that_only_embeds_is_not_refused_where_it_may(
    path: Path, architecture: str, values: dict[str, int | bool | list[int]]
) -> None:
    path.write_bytes(model(architecture, **values))
    check_metadata(path, embeds=True)
    path.write_bytes(model("t5encoder"))
    with pytest.raises(ConfigError, match="is an encoder"):
        check_metadata(path, embeds=True)


def test_llama_cpp_aborts_at_more_used_experts_than_there_are(path: Path, tiny_model: Path) -> None:
    """If it does not any more, such models need not be refused."""
    rewritten(tiny_model, path, "llama", values={"expert_used_count": 1})
    ended = aborted(path, "b.LlamaBackend(b.LlamaSettings(pathlib.Path(sys.argv[1])))")
    assert b"n_expert_used_max <= hparams.n_expert" in ended


def test_the_length_of_all_metadata_is_limited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = gguf(*(key(f"k{i}", STRING, text("v" * 100)) for i in range(9)))
    for piece in (7, 2**22):
        monkeypatch.setattr(files, "_READ_BYTES", piece)
        monkeypatch.setattr(files, "MAX_METADATA_BYTES", len(raw))
        path.write_bytes(raw)
        check_metadata(path)
    monkeypatch.setattr(files, "_READ_BYTES", 7)
    monkeypatch.setattr(files, "MAX_METADATA_BYTES", len(raw) - 100)
    assert "metadata is longer" in refusal(path, raw)


HUGE = 2**63
"""A number that no file can hold."""


@pytest.mark.parametrize(
    "raw",
    [
        gguf(n_keys=HUGE),
        gguf(n_tensors=HUGE),
        gguf(text("", HUGE)),
        gguf(key("k", STRING, text("", HUGE))),
        gguf(array("k", UINT8, HUGE, b"")),
        gguf(array("k", STRING, HUGE, b"")),
        gguf(array("k", STRING, 2, text("a") + text("", HUGE))),
        gguf(array("k", ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 1000)),
        gguf(key("k", 13, b"")),
        gguf(key("a\x1b[2J\n" * 20, 13, b"")),
        gguf(tensors=(text("", HUGE),)),
        gguf(tensors=(tensor("t", 2**32 - 1),)),
    ],
)
def test_impossible_metadata_is_refused_without_memory(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    # Sparse, so that what it announces could be in it.
    os.truncate(path, 2**40)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as caught:
            check_metadata(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.message.isprintable()
    assert peak < 32 * 2**20


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.block_count", 0, "llama.cpp cannot load llama.block_count 0"),
        ("llama.expert_count", 4, "llama.cpp cannot load llama.expert_used_count 0 with llama.expert_count 4"),
        ("llama.nextn_predict_layers", 3, "llama.nextn_predict_layers 3 with llama.block_count 2"),
        ("llama.rope.scaling.type", "other", "'other' is no type of RoPE scaling"),
        ("llama.rope.scaling.type", 1, "'1' is no type of RoPE scaling"),
    ],
)
def test_what_would_end_the_process_is_refused_of_overrides_too(
    path: Path, key: str, value: int | str, said: str
) -> None:
    path.write_bytes(GOOD)
    with pytest.raises(ConfigError) as caught:
        check_metadata(path, {key: value})
    assert caught.value.param == "--override-kv"
    assert caught.value.message.startswith("--override-kv: ")
    assert said in caught.value.message
    check_metadata(path, {"llama.block_count": 3, "llama.rope.scaling.type": "yarn", "other": 0.5})


def test_a_file_that_ends_early_is_refused(path: Path) -> None:
    for length in range(len(GOOD)):
        refusal(path, GOOD[:length])


@pytest.mark.parametrize("seed", range(5 if not LONG else 200))
def test_a_changed_file_is_accepted_or_refused_and_nothing_else(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        raw = bytearray(GOOD)
        for _ in range(rng.randint(1, 8)):
            raw[rng.randrange(4, len(raw))] = rng.choice((0, 1, 9, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path.write_bytes(raw)
        message = ""
        try:
            check_metadata(path)
        except ConfigError as error:
            message = error.message
        assert message == "" or message.isprintable()


def test_a_version_that_llama_cpp_refuses_is_left_to_it(path: Path) -> None:
    path.write_bytes(gguf(version=1, n_keys=HUGE))
    check_metadata(path)


def test_all_files_of_a_model_are_checked(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    assert parts(first) == [first, second]
    none = tmp_path / "x-00001-of-00000.gguf"
    assert parts(none) == [none], "its metadata is checked too"
    first.write_bytes(GOOD)
    with pytest.raises(ConfigError, match=r"there is no model file .*m-00002-of-00002"):
        check_metadata(first)
    second.write_bytes(gguf(n_keys=HUGE))
    with pytest.raises(ConfigError, match=r"m-00002-of-00002.* metadata keys"):
        check_metadata(first)
