"""Metadata and tensors of the models in `bench.synthetic`, by the names that llama.cpp reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import gguf
import numpy as np
import numpy.typing as npt

from bench.synthetic_weights import Drawn, Tensors

SHARP = 2.0
"""Gain of queries, keys and down projections, so that answers depend on what is far back."""
LOGIT_STD = 3.0
FLAT_LOGIT_STD = 1.5
"""`LOGIT_STD` for the SentencePiece shape: llama-server's tests expect ten tokens behind its default samplers."""
NORM_EPS = 1e-6
CONV_KERNEL = 4
SSM_STATE = 16
SSM_TIME_RANK = 32
SSM_HEADS = 4
SSM_GROUPS = 1
"""Heads and groups of Mamba 2 layers."""
DELTA_STATE = 32
DELTA_KEY_HEADS = 2
DELTA_VALUE_HEADS = 4
"""State size and heads of gated delta nets."""
ATTENTION_INTERVAL = 2
"""Every second layer of Qwen3-Next and Qwen3.5 is attention, the others are gated delta nets."""
EXPERTS = 4
EXPERTS_USED = 2
LORA_RANK = 32
"""Rank of RWKV's small matrices, and of MLA's compressed queries and KV."""
RWKV_HEAD = 64
ROPE_DIM = 32
"""Dimensions of a head that MLA rotates."""
MAMBA_2 = ("mamba2", "granitehybrid")
DELTA_NETS = ("qwen3next", "qwen35")
EXPERT_MODELS = ("gpt-oss", "qwen3next", "deepseek2")
WITHOUT_QK_NORM = ("llama", "gpt-oss", "granitehybrid")
UNTIED = ("gpt-oss", "rwkv7")
"""Architectures whose output matrix is not the embedding."""
WRITES = ("attn_output.weight", "ffn_down.weight", "shortconv.out_proj.weight", "ssm_out.weight")
"""Ends of the names of the tensors that add to what the next layers get."""
CHAIN_GAIN = 0.15
"""Gain of these in a chain, before it is divided among the layers: they add a third of the embedding, or less."""


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model; `kv_heads` may be given for each layer, and a layer with 0 is a recurrent one."""

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


def add_metadata(writer: gguf.GGUFWriter, title: str, shape: Shape, kind: gguf.LlamaFileType) -> None:
    """Write the dimensions and constants of a model."""
    writer.add_name(f"llamaslot random weights {title}")
    writer.add_file_type(kind)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    if shape.heads:
        _add_attention_metadata(writer, shape)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.arch == "lfm2":
        writer.add_vocab_size(shape.vocab)
        writer.add_shortconv_l_cache(CONV_KERNEL)
    if shape.arch == "mamba" or shape.arch in MAMBA_2:
        is_second = shape.arch in MAMBA_2
        _add_state_metadata(writer, 2 * shape.width, SSM_STATE, SSM_HEADS if is_second else SSM_TIME_RANK)
        if is_second:
            writer.add_ssm_group_count(SSM_GROUPS)
    if shape.arch in DELTA_NETS:
        _add_state_metadata(writer, DELTA_VALUE_HEADS * DELTA_STATE, DELTA_STATE, DELTA_VALUE_HEADS)
        writer.add_ssm_group_count(DELTA_KEY_HEADS)
        writer.add_full_attention_interval(ATTENTION_INTERVAL)
    if shape.arch in EXPERT_MODELS:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(EXPERTS_USED)
        writer.add_expert_feed_forward_length(shape.ff)
    if shape.arch == "rwkv7":
        _add_rwkv_metadata(writer)


def _add_attention_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    # Qwen3-Next names its attention layers by their interval.
    kv_heads = max(shape.kv_heads) if shape.arch in DELTA_NETS else shape.kv_heads  # type: ignore[arg-type]
    is_latent = shape.arch == "deepseek2"
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(LORA_RANK + ROPE_DIM if is_latent else shape.head_dim)
    writer.add_value_length(LORA_RANK if is_latent else shape.head_dim)
    writer.add_rope_dimension_count(ROPE_DIM if is_latent else shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    if shape.arch == "qwen35":
        writer.add_rope_dimension_sections([shape.head_dim // 4, shape.head_dim // 8, shape.head_dim // 8, 0])
    if is_latent:
        writer.add_key_length_mla(shape.head_dim + ROPE_DIM)
        writer.add_value_length_mla(shape.head_dim)
        writer.add_q_lora_rank(LORA_RANK)
        writer.add_kv_lora_rank(LORA_RANK)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_shared_count(1)


def _add_state_metadata(writer: gguf.GGUFWriter, inner: int, state: int, time_rank: int) -> None:
    writer.add_ssm_conv_kernel(CONV_KERNEL)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(time_rank)


def _add_rwkv_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_layer_norm_eps(NORM_EPS)
    writer.add_wkv_head_size(RWKV_HEAD)
    writer.add_decay_lora_rank(LORA_RANK)
    writer.add_iclr_lora_rank(LORA_RANK)
    writer.add_value_residual_mix_lora_rank(LORA_RANK)
    writer.add_gate_lora_rank(LORA_RANK)
    writer.add_token_shift_count(2)


def model_tensors(shape: Shape, n_quiet: int, logit_std: float = LOGIT_STD) -> Tensors:
    """Return every tensor of a model, in the order of the file."""
    output_norm = "token_embd_norm" if shape.arch == "lfm2" else "output_norm"
    embedding = Drawn(shape.vocab, shape.width, logit_std / math.sqrt(shape.width), n_quiet)
    tensors: Tensors = {"token_embd.weight": embedding, f"{output_norm}.weight": _norm(shape.width)}
    if shape.arch in UNTIED:
        tensors["output.weight"] = embedding
    if shape.arch == "rwkv7":
        tensors |= {
            "token_embd_norm.weight": _norm(shape.width),
            "token_embd_norm.bias": _norm(shape.width, 0),
            "output_norm.bias": _norm(shape.width, 0),
        }
    for index in range(shape.layers):
        tensors |= {f"blk.{index}.{name}": tensor for name, tensor in _layer(shape, index).items()}
    return tensors


def as_chain(tensors: Tensors, shape: Shape) -> Tensors:
    """Return the tensors changed so that the token after t is t + 1, whatever is before it.

    The output matrix is the embedding with its rows moved down by one, and layers add little to the embedding.
    """
    embedding = tensors["token_embd.weight"]
    assert isinstance(embedding, Drawn), "a matrix"
    gain = CHAIN_GAIN / math.sqrt(shape.layers)
    quiet = {
        name: replace(tensor, std=gain * tensor.std)
        for name, tensor in tensors.items()
        if name.endswith(WRITES) and isinstance(tensor, Drawn)
    }
    output = replace(embedding, drawn_as="token_embd.weight", shift=1)
    return tensors | quiet | {"token_embd.weight": replace(embedding, std=1.0), "output.weight": output}


def _layer(shape: Shape, index: int) -> Tensors:
    kv_heads = shape.kv_heads if isinstance(shape.kv_heads, int) else shape.kv_heads[index]
    if shape.arch == "deepseek2":
        mixer = _latent_attention(shape)
    elif kv_heads:
        mixer = _attention(shape, kv_heads)
    else:
        mixer = RECURRENT_LAYERS[shape.arch](shape)
    if shape.arch in ("mamba", "mamba2", "rwkv7"):
        return mixer
    has_experts = shape.arch in EXPERT_MODELS and not (shape.arch == "deepseek2" and index == 0)
    return mixer | (_experts(shape) if has_experts else _feed_forward(shape))


def _norm(width: int, value: float = 1.0) -> npt.NDArray[np.float32]:
    return np.full(width, value, np.float32)


def _matrix(rows: int, columns: int, gain: float = 1.0) -> Drawn:
    return Drawn(rows, columns, gain / math.sqrt(columns))


def _attention(shape: Shape, kv_heads: int) -> Tensors:
    query, key_value = shape.heads * shape.head_dim, kv_heads * shape.head_dim
    gated = 2 if shape.arch in DELTA_NETS else 1
    norms: Tensors = {}
    gain = SHARP
    if shape.arch not in WITHOUT_QK_NORM:
        norms = {
            "attn_q_norm.weight": _norm(shape.head_dim, SHARP),
            "attn_k_norm.weight": _norm(shape.head_dim, SHARP),
        }
        gain = 1.0
    if shape.arch == "gemma3":
        norms["post_attention_norm.weight"] = _norm(shape.width, math.sqrt(shape.width))
    if shape.arch == "gpt-oss":
        norms = {"attn_output.bias": _norm(shape.width, 0), "attn_sinks.weight": _norm(shape.heads)}
    return {
        "attn_norm.weight": _norm(shape.width),
        "attn_q.weight": _matrix(gated * query, shape.width, gain),
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
        _ffn_norm(shape): _norm(shape.width),
        "ffn_gate.weight": _matrix(shape.ff, shape.width),
        "ffn_up.weight": _matrix(shape.ff, shape.width),
        "ffn_down.weight": _matrix(shape.width, shape.ff, SHARP),
        **post,
    }


def _short_convolution(shape: Shape) -> Tensors:
    width = shape.width
    kernel = np.linspace(0.3, 1.0, width * CONV_KERNEL, dtype=np.float32).reshape(width, CONV_KERNEL)
    return {
        "attn_norm.weight": _norm(width),
        "shortconv.conv.weight": kernel,
        "shortconv.in_proj.weight": _matrix(3 * width, width),
        "shortconv.out_proj.weight": _matrix(width, width),
    }


def _mamba_layer(shape: Shape) -> Tensors:
    width, inner = shape.width, 2 * shape.width
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


def _ffn_norm(shape: Shape) -> str:
    return "post_attention_norm.weight" if shape.arch in (*DELTA_NETS, "gpt-oss") else "ffn_norm.weight"


def _experts(shape: Shape) -> Tensors:
    inner, outer = EXPERTS * shape.ff, EXPERTS * shape.width
    std, down_std = 1 / math.sqrt(shape.width), SHARP / math.sqrt(shape.ff)
    tensors: Tensors = {
        _ffn_norm(shape): _norm(shape.width),
        "ffn_gate_inp.weight": _matrix(EXPERTS, shape.width, SHARP),
        "ffn_gate_exps.weight": Drawn(inner, shape.width, std, stack=EXPERTS),
        "ffn_up_exps.weight": Drawn(inner, shape.width, std, stack=EXPERTS),
        "ffn_down_exps.weight": Drawn(outer, shape.ff, down_std, stack=EXPERTS),
    }
    if shape.arch == "gpt-oss":
        return tensors | {
            "ffn_gate_inp.bias": _norm(EXPERTS, 0),
            "ffn_gate_exps.bias": np.zeros((EXPERTS, shape.ff), np.float32),
            "ffn_up_exps.bias": np.zeros((EXPERTS, shape.ff), np.float32),
            "ffn_down_exps.bias": np.zeros((EXPERTS, shape.width), np.float32),
        }
    if shape.arch == "qwen3next":
        tensors["ffn_gate_inp_shexp.weight"] = _norm(shape.width, 0.1)
    return tensors | {
        "ffn_gate_shexp.weight": _matrix(shape.ff, shape.width),
        "ffn_up_shexp.weight": _matrix(shape.ff, shape.width),
        "ffn_down_shexp.weight": _matrix(shape.width, shape.ff, SHARP),
    }


def _latent_attention(shape: Shape) -> Tensors:
    key = shape.head_dim + ROPE_DIM
    latent_std = SHARP / math.sqrt(shape.head_dim)
    return {
        "attn_norm.weight": _norm(shape.width),
        "attn_q_a_norm.weight": _norm(LORA_RANK),
        "attn_kv_a_norm.weight": _norm(LORA_RANK),
        "attn_q_a.weight": _matrix(LORA_RANK, shape.width),
        "attn_q_b.weight": _matrix(shape.heads * key, LORA_RANK, SHARP),
        "attn_kv_a_mqa.weight": _matrix(LORA_RANK + ROPE_DIM, shape.width),
        "attn_k_b.weight": Drawn(shape.heads * LORA_RANK, shape.head_dim, latent_std, stack=shape.heads),
        "attn_v_b.weight": Drawn(shape.heads * shape.head_dim, LORA_RANK, 1 / math.sqrt(LORA_RANK), 0, shape.heads),
        "attn_output.weight": _matrix(shape.width, shape.heads * shape.head_dim),
    }


def _mamba_2(shape: Shape) -> Tensors:
    width, inner = shape.width, 2 * shape.width
    states = 2 * SSM_GROUPS * SSM_STATE
    return {
        "attn_norm.weight": _norm(width),
        "ssm_in.weight": _matrix(2 * inner + states + SSM_HEADS, width),
        "ssm_conv1d.weight": np.full((inner + states, CONV_KERNEL), 0.5, np.float32),
        "ssm_conv1d.bias": np.zeros(inner + states, np.float32),
        "ssm_dt.bias": np.full(SSM_HEADS, -2.0, np.float32),
        "ssm_a": -np.arange(1, SSM_HEADS + 1, dtype=np.float32).reshape(-1, 1),
        "ssm_d": np.ones((SSM_HEADS, 1), np.float32),
        "ssm_norm.weight": np.ones((SSM_GROUPS, inner // SSM_GROUPS), np.float32),
        "ssm_out.weight": _matrix(width, inner, SHARP),
    }


def _delta_net(shape: Shape) -> Tensors:
    keys, values = DELTA_KEY_HEADS * DELTA_STATE, DELTA_VALUE_HEADS * DELTA_STATE
    gates: Tensors = {"ssm_ba.weight": _matrix(2 * DELTA_VALUE_HEADS, shape.width)}
    if shape.arch == "qwen35":
        gates = {f"ssm_{name}.weight": _matrix(DELTA_VALUE_HEADS, shape.width) for name in ("beta", "alpha")}
    return {
        "attn_norm.weight": _norm(shape.width),
        "attn_qkv.weight": _matrix(2 * keys + values, shape.width),
        "attn_gate.weight": _matrix(values, shape.width),
        "ssm_conv1d.weight": np.full((2 * keys + values, CONV_KERNEL), 0.5, np.float32),
        "ssm_dt.bias": np.full(DELTA_VALUE_HEADS, -2.0, np.float32),
        "ssm_a": -np.arange(1, DELTA_VALUE_HEADS + 1, dtype=np.float32) / DELTA_VALUE_HEADS,
        "ssm_norm.weight": _norm(DELTA_STATE),
        "ssm_out.weight": _matrix(shape.width, values, SHARP),
        **gates,
    }


def _rwkv_layer(shape: Shape) -> Tensors:
    width, ff = shape.width, shape.ff
    tensors: Tensors = {
        "time_mix_lerp_fused.weight": np.full((6, 1, 1, width), 0.5, np.float32),
        "channel_mix_lerp_k.weight": np.full((1, 1, width), 0.5, np.float32),
        "time_mix_w0.weight": np.linspace(-6.0, -1.0, width, dtype=np.float32),
        "time_mix_k_k.weight": _norm(width, 0.85),
        "time_mix_k_a.weight": _norm(width),
        "time_mix_r_k.weight": _norm(width, 0.1),
        "time_mix_output.weight": _matrix(width, width, SHARP),
        "channel_mix_key.weight": _matrix(ff, width),
        "channel_mix_value.weight": _matrix(width, ff, SHARP),
    }
    for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
        tensors |= {f"{name}.weight": _norm(width), f"{name}.bias": _norm(width, 0)}
    for name in "av":
        tensors[f"time_mix_{name}0.weight"] = _norm(width, 0)
    for name in "wavg":
        tensors[f"time_mix_{name}1.weight"] = _matrix(LORA_RANK, width)
        tensors[f"time_mix_{name}2.weight"] = _matrix(width, LORA_RANK)
    for name in ("key", "value", "receptance"):
        tensors[f"time_mix_{name}.weight"] = _matrix(width, width)
    return tensors


RECURRENT_LAYERS: dict[str, Callable[[Shape], Tensors]] = {
    "lfm2": _short_convolution,
    "mamba": _mamba_layer,
    "mamba2": _mamba_2,
    "granitehybrid": _mamba_2,
    "qwen3next": _delta_net,
    "qwen35": _delta_net,
    "rwkv7": _rwkv_layer,
}
"""Builders of the layers without KV heads, by architecture."""
