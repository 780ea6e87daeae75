"""Writes LoRA adapters with random weights for the GGUF files of tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = "attn_q.weight", "attn_v.weight", "ffn_up.weight"
RANK = 4
INVOCATION = "adapter.alora.invocation_tokens"


def write_adapter(
    path: Path,
    model: Path,
    seed: int,
    *,
    strength: float = 1.0,
    names: Sequence[str] = NAMES,
    values: Mapping[str, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    renamed: Mapping[str, str] | None = None,
    dtype: Any = np.float32,
) -> Path:
    """Write an adapter for the tensors of a model whose names end with one of `names`.

    What it adds to a tensor's output is about `strength` times what that is. `values` are further metadata, or
    in place of what an adapter has; None stands for a key that is missing. `shapes` are those of tensors whose
    names end so, the outermost dimension first; `renamed` has other names of tensors.
    """
    reader, chance = gguf.GGUFReader(model), np.random.default_rng(seed)
    architecture = str(reader.fields["general.architecture"].contents())
    chosen = {
        "general.architecture": architecture,
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(RANK),
        **(values or {}),
    }
    writer = gguf.GGUFWriter(path, str(chosen.pop("general.architecture")))
    for key, value in chosen.items():
        add_value(writer, key, value)
    for tensor in reader.tensors:
        if not tensor.name.endswith(tuple(names)):
            continue
        n_in, n_out, *others = (int(n) for n in tensor.shape)
        scale = strength * float(np.std(gguf.dequantize(tensor.data, tensor.tensor_type)))
        shape_a, shape_b = (*reversed(others), RANK, n_in), (*reversed(others), n_out, RANK)
        for end, shape, std in ((".lora_a", shape_a, 1.0), (".lora_b", shape_b, scale / np.sqrt(RANK))):
            given = next(
                (each for name, each in (shapes or {}).items() if (tensor.name + end).endswith(name)), shape
            )
            name = tensor.name + end
            writer.add_tensor((renamed or {}).get(name, name), chance.normal(0, std, given).astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value of its Python type; None for none."""
    match value:
        case str():
            writer.add_string(key, value)
        case float():
            writer.add_float32(key, value)
        case int():
            writer.add_uint32(key, value)
        case [*_] if key == INVOCATION:
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32)
        case [*_]:
            writer.add_array(key, value)
