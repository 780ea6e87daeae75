"""The demo model's weights and tokenizer as a GGUF file has them, read back to train on from there."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from bench.demo.tokenizer import SPECIALS

MATRICES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
NORMS = {"attention_norm": "attn_norm", "forward_norm": "ffn_norm"}


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
    head_size = int(reader.fields["llama.attention.key_length"].contents())
    result = {"embedding.weight": stored["token_embd.weight"], "norm.weight": stored["output_norm.weight"]}
    for index in range(int(reader.fields["llama.block_count"].contents())):
        for ours, theirs in (MATRICES | NORMS).items():
            weight = stored[f"blk.{index}.{theirs}.weight"]
            result[f"blocks.{index}.{ours}.weight"] = (
                split_halves(weight, head_size) if ours in ("q", "k") else weight
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
