"""Files of LoRA adapters: what does not fit the model is refused by name before llama.cpp reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.lora_files import write_adapter
from llamaslot.base.adapters import adapters_key, applied
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import read_adapter
from llamaslot.base.model import Adapter
from llamaslot.base.namespaces import (
    PUBLIC_NAMESPACE,
    PUBLIC_SALT,
    is_salted,
    key_salt,
    key_secret,
    public_of,
    reads_public,
    salt_namespace,
    tenant_of,
)

ONE, TWO = Adapter("one.gguf", "1", 1.0), Adapter("two.gguf", "2", 0.5)


def test_an_adapter_that_fits_gives_its_texts(tiny_model: Path, tmp_path: Path) -> None:
    named = {"adapter.lora.task_name": "sums", "adapter.lora.prompt_prefix": "Add: "}
    texts = read_adapter(write_adapter(tmp_path / "a.gguf", tiny_model, 1, values=named), tiny_model)
    assert (texts["adapter.lora.task_name"], texts["adapter.lora.prompt_prefix"]) == ("sums", "Add: ")
    half = write_adapter(tmp_path / "half.gguf", tiny_model, 1, dtype=np.float16)
    assert read_adapter(half, tiny_model)["general.type"] == "adapter"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"values": {"general.architecture": "gemma3"}}, "architecture gemma3, not llama"),
        ({"values": {"general.type": "model"}}, "not a LoRA adapter"),
        ({"values": {"general.type": None}}, "not a LoRA adapter"),
        ({"values": {"general.type": 7}}, "not a LoRA adapter"),
        ({"values": {"adapter.type": "cvec"}}, "not a LoRA adapter"),
        ({"values": {"adapter.lora.alpha": "four"}}, "adapter.lora.alpha is not a float"),
        ({"shapes": {"attn_q.weight.lora_b": (128, 3)}}, "another shape than the model's blk.0.attn_q.weight"),
        ({"shapes": {"attn_q.weight.lora_a": (2, 4, 128)}}, "another shape"),
        ({"names": ["token_embd.weight"]}, "the output matrix too"),
        ({"renamed": {"blk.0.attn_q.weight.lora_a": "blk.0.attn_q.lora_a.weight.lora_a"}}, "hostile: the name blk"),
        ({"dtype": np.float64}, "another type than F32"),
        ({"dtype": np.int32}, "another type than F32"),
    ],
)
def test_an_adapter_that_llama_cpp_would_abort_on_is_refused(
    tiny_model: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    path = write_adapter(tmp_path / "a.gguf", tiny_model, 1, **changes)
    with pytest.raises(ConfigError, match=reason) as refused:
        read_adapter(path, tiny_model)
    assert refused.value.param == "--lora"
    assert refused.value.message.startswith("--lora: ")


def test_a_file_that_is_missing_or_cut_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lora: there is no file"):
        read_adapter(tmp_path / "none.gguf", tiny_model)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(write_adapter(tmp_path / "a.gguf", tiny_model, 1).read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"--lora: .* ends within its metadata"):
        read_adapter(cut, tiny_model)
    cut.write_bytes(b"GGML")
    with pytest.raises(ConfigError, match=r"--lora: .* is not a GGUF file"):
        read_adapter(cut, tiny_model)


def test_scales_that_are_zero_to_llama_cpp_leave_the_model_alone() -> None:
    assert applied((ONE, TWO), (0.0, 0.0)) == applied((ONE, TWO), (1e-60, -0.0)) == ()
    (only,) = applied((ONE, TWO), (0.0, 0.1))
    assert (only.id, only.scale, only.digest) == (1, float(np.float32(0.1)), "2")


def test_the_key_of_adapters_depends_on_files_and_scales_and_not_on_their_order() -> None:
    keys = [
        adapters_key(applied((ONE, TWO), scales)) for scales in ((0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (2, 1))
    ]
    assert keys[0] == ""
    assert len(set(keys)) == len(keys)
    assert adapters_key(applied((TWO, ONE), (2, 1))) == adapters_key(applied((ONE, TWO), (1, 2)))


def test_a_namespace_with_adapters_belongs_to_the_same_tenant_and_reads_what_is_public_of_the_same_adapters() -> (
    None
):
    key = adapters_key(applied((ONE,), (1,)))
    own = salt_namespace(key_salt(key_secret("ann"), ""))
    with_adapters = salt_namespace(key_salt(key_secret("ann"), ""), key)
    assert with_adapters != own
    assert tenant_of(with_adapters) == tenant_of(own) != ""
    assert reads_public(with_adapters)
    assert public_of(with_adapters) == salt_namespace(PUBLIC_SALT, key) != public_of(own) == PUBLIC_NAMESPACE
    assert tenant_of(salt_namespace("", key)) == ""
    assert not reads_public(salt_namespace("", key))
    assert not is_salted(salt_namespace("", key))
    assert is_salted(salt_namespace("salt", key))
