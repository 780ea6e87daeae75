"""A demo model's weights and tokenizer as a GGUF file has them, read back to train on from there."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from bench.demo.tokenizer import SPECIALS

LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "forward_norm": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "in_proj": "shortconv.in_proj",
    "conv": "shortconv.conv",
    "out_proj": "shortconv.out_proj",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attention_post_norm": "post_attention_norm",
    "forward_post_norm": "post_ffw_norm",
}
OUTPUT_NORM = {"llama": "output_norm", "lfm2": "token_embd_norm", "gemma3": "output_norm"}
NEIGHBOURS = {"llama"}
"""Architectures in which RoPE pairs neighbours, where training splits a head in halves."""


def gguf_weights(weights: Mapping[str, np.ndarray], arch: str, head_size: int) -> dict[str, np.ndarray]:
    """Training's weights under llama.cpp's names and in its layout."""
    result = {
        "token_embd.weight": weights["embedding.weight"],
        f"{OUTPUT_NORM[arch]}.weight": weights["norm.weight"],
    }
    for name, weight in weights.items():
        if name.startswith("blocks."):
            _, index, ours, _ = name.split(".")
            paired = ours in ("q", "k") and arch in NEIGHBOURS
            result[f"blk.{index}.{LAYER_NAMES[ours]}.weight"] = (
                pair_neighbours(weight, head_size) if paired else weight[:, 0] if ours == "conv" else weight
            )
    return result


def pair_neighbours(weight: np.ndarray, head_size: int) -> np.ndarray:
    """Half-split rows (a0 a1 .. b0 b1 ..) to interleaved ones (a0 b0 a1 b1 ..), head by head."""
    columns = weight.shape[1]
    return weight.reshape(-1, 2, head_size // 2, columns).swapaxes(1, 2).reshape(-1, columns)


def split_halves(weight: np.ndarray, head_size: int) -> np.ndarray:
    """Interleaved rows to half-split ones, which undoes `pair_neighbours`."""
    columns = weight.shape[1]
    return weight.reshape(-1, head_size // 2, 2, columns).swapaxes(1, 2).reshape(-1, columns)


def read_weights(path: Path) -> dict[str, Tensor]:
    """A GGUF file's matrices (F16) and norms under the names that training has for them."""
    reader = GGUFReader(path)
    stored = {tensor.name: np.asarray(tensor.data, np.float32) for tensor in reader.tensors}
    arch = str(reader.fields["general.architecture"].contents())
    head_size = int(reader.fields[f"{arch}.attention.key_length"].contents())
    names = {theirs: ours for ours, theirs in LAYER_NAMES.items()}
    result = {
        "embedding.weight": stored.pop("token_embd.weight"),
        "norm.weight": stored.pop(f"{OUTPUT_NORM[arch]}.weight"),
    }
    for name, weight in stored.items():
        _, index, theirs = name.removesuffix(".weight").split(".", 2)
        ours = names[theirs]
        paired = ours in ("q", "k") and arch in NEIGHBOURS
        result[f"blocks.{index}.{ours}.weight"] = (
            split_halves(weight, head_size) if paired else weight[:, None] if ours == "conv" else weight
        )
    return {name: torch.from_numpy(np.array(weight)) for name, weight in result.items()}


def read_tokenizer(path: Path) -> Tokenizer:
    """A GGUF file's tokenizer, which has the same ids."""
    fields = GGUFReader(path).fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer
