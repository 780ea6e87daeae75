"""Copies of small GGUF files under another architecture, for kinds of models that no synthetic shape covers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Value = bool | int | float | str | list[int] | list[str]


def rewritten(
    source: Path,
    path: Path,
    architecture: str,
    *,
    values: Mapping[str, Value] | None = None,
    tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
    dropped: Iterable[str] = (),
) -> Path:
    """Write `source` to `path` under another architecture, with values and tensors added.

    Keys of `values` stand behind the architecture's name. Tensors are dropped by the end of their names.
    """
    reader = gguf.GGUFReader(source)
    own = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, architecture)
    values = values or {}
    for key, field in reader.fields.items():
        name = key.removeprefix(f"{own}.")
        if key.startswith("GGUF.") or key == "general.architecture" or (name != key and name in values):
            continue
        kind, *inner = field.types
        writer.add_key_value(
            key if name == key else f"{architecture}.{name}", field.contents(), kind, inner[0] if inner else None
        )
    for name, value in values.items():
        _add(writer, f"{architecture}.{name}", value)
    for tensor in reader.tensors:
        if not tensor.name.endswith(tuple(dropped)):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
