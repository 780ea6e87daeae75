"""Metadata and tensors of the models in `bench.synthetic`, by the names that llama.cpp reads."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

QUIET = 0.05
SHARP = 2.0
LOGIT_STD = 3.0
FLAT_LOGIT_STD = 1.5
"""That of `SENTENCEPIECE`: llama-server's tests expect that its default samplers leave ten tokens."""
NORM_EPS = 1e-6
CONV_KERNEL = 4
SSM_STATE = 16
SSM_TIME_RANK = 32


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model; `kv_heads` may be given per layer, where 0 makes it a recurrent one."""

    arch: str
    vocab: int
    layers: int
    width: int
    ff: int
    heads: int
    kv_heads: int | tuple[int, ...]
    head_dim: int
    context: int
    rope_base: float = 10_000.0
    window: int = 0


@dataclass(frozen=True)
class Drawn:
    """A matrix of random Q8_0 weights; its first `quiet` rows are `QUIET` times smaller than the rest."""

    rows: int
    columns: int
    std: float
    quiet: int = 0

    @property
    def n_bytes(self) -> int:
        """Size of the blocks: 32 weights as int8 behind one float16 scale."""
        return self.rows * self.columns // 32 * 34

    def blocks(self, seed: str) -> npt.NDArray[np.uint8]:
        """The matrix as `[rows, bytes per row]`, always the same for the same seed."""
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:16])))
        uniform_std = math.sqrt((255**2 - 1) / 12)
        scale = np.full((self.rows, self.columns // 32, 1), self.std / uniform_std, np.float16)
        scale[: self.quiet] *= np.float16(QUIET)
        weights = rng.integers(-127, 128, (self.rows, self.columns // 32, 32), np.int8)
        blocks = np.concatenate([scale.view(np.uint8), weights.view(np.uint8)], axis=2)
        return blocks.reshape(self.rows, -1)


Tensors: TypeAlias = dict[str, "Drawn | npt.NDArray[np.float32]"]


def add_metadata(writer: gguf.GGUFWriter, title: str, shape: Shape) -> None:
    writer.add_name(f"llamaslot random weights {title}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    if shape.heads:
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_rope_dimension_count(shape.head_dim)
        writer.add_rope_freq_base(shape.rope_base)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.arch == "lfm2":
        writer.add_vocab_size(shape.vocab)
        writer.add_shortconv_l_cache(CONV_KERNEL)
    if shape.arch == "mamba":
        writer.add_ssm_conv_kernel(CONV_KERNEL)
        writer.add_ssm_inner_size(2 * shape.width)
        writer.add_ssm_state_size(SSM_STATE)
        writer.add_ssm_time_step_rank(SSM_TIME_RANK)


def model_tensors(shape: Shape, n_quiet: int, logit_std: float = LOGIT_STD) -> Tensors:
    """Every tensor of a model, in the order of the file."""
    output_norm = "token_embd_norm" if shape.arch == "lfm2" else "output_norm"
    embedding_std = logit_std / math.sqrt(shape.width)
    tensors: Tensors = {
        "token_embd.weight": Drawn(shape.vocab, shape.width, embedding_std, n_quiet),
        f"{output_norm}.weight": _norm(shape.width),
    }
    for index in range(shape.layers):
        kv_heads = shape.kv_heads if isinstance(shape.kv_heads, int) else shape.kv_heads[index]
        if shape.arch == "mamba":
            layer = _mamba_layer(shape.width)
        else:
            mixer = _attention(shape, kv_heads) if kv_heads else _short_convolution(shape.width)
            layer = mixer | _feed_forward(shape)
        tensors |= {f"blk.{index}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def _norm(width: int, value: float = 1.0) -> npt.NDArray[np.float32]:
    return np.full(width, value, np.float32)


def _matrix(rows: int, columns: int, gain: float = 1.0) -> Drawn:
    return Drawn(rows, columns, gain / math.sqrt(columns))


def _attention(shape: Shape, kv_heads: int) -> Tensors:
    query, key_value = shape.heads * shape.head_dim, kv_heads * shape.head_dim
    norms: Tensors = {}
    gain = SHARP
    if shape.arch != "llama":
        norms = {
            "attn_q_norm.weight": _norm(shape.head_dim, SHARP),
            "attn_k_norm.weight": _norm(shape.head_dim, SHARP),
        }
        gain = 1.0
    if shape.arch == "gemma3":
        norms["post_attention_norm.weight"] = _norm(shape.width, math.sqrt(shape.width))
    return {
        "attn_norm.weight": _norm(shape.width),
        "attn_q.weight": _matrix(query, shape.width, gain),
        "attn_k.weight": _matrix(key_value, shape.width, gain),
        "attn_v.weight": _matrix(key_value, shape.width),
        "attn_output.weight": _matrix(shape.width, query),
        **norms,
    }


def _feed_forward(shape: Shape) -> Tensors:
    post: Tensors = {}
    if shape.arch == "gemma3":
        post["post_ffw_norm.weight"] = _norm(shape.width, math.sqrt(shape.width))
    return {
        "ffn_norm.weight": _norm(shape.width),
        "ffn_gate.weight": _matrix(shape.ff, shape.width),
        "ffn_up.weight": _matrix(shape.ff, shape.width),
        "ffn_down.weight": _matrix(shape.width, shape.ff, SHARP),
        **post,
    }


def _short_convolution(width: int) -> Tensors:
    kernel = np.linspace(0.3, 1.0, width * CONV_KERNEL, dtype=np.float32).reshape(width, CONV_KERNEL)
    return {
        "attn_norm.weight": _norm(width),
        "shortconv.conv.weight": kernel,
        "shortconv.in_proj.weight": _matrix(3 * width, width),
        "shortconv.out_proj.weight": _matrix(width, width),
    }


def _mamba_layer(width: int) -> Tensors:
    inner = 2 * width
    decay = -np.tile(np.arange(1, SSM_STATE + 1, dtype=np.float32), (inner, 1))
    return {
        "attn_norm.weight": _norm(width),
        "ssm_in.weight": _matrix(2 * inner, width),
        "ssm_conv1d.weight": np.full((inner, CONV_KERNEL), 0.5, np.float32),
        "ssm_conv1d.bias": np.zeros(inner, np.float32),
        "ssm_x.weight": _matrix(SSM_TIME_RANK + 2 * SSM_STATE, inner),
        "ssm_dt.weight": _matrix(inner, SSM_TIME_RANK),
        "ssm_dt.bias": np.full(inner, -2.0, np.float32),
        "ssm_a": decay,
        "ssm_d": _norm(inner),
        "ssm_out.weight": _matrix(width, inner, 2 * SHARP),
    }
