"""The trained models' layers as llama.cpp computes them.

RMSNorm, RoPE, grouped-query attention and SwiGLU; the embedding is the output matrix too. A shape with convolutions
is an LFM2: they are gated and alternate with attention whose queries and keys have norms of their own. One without
is a llama.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """A model's hyperparameters, under llama.cpp's names where it has one."""

    vocabulary: int = 1536
    width: int = 192
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    feed_forward: int = 448
    rope_base: float = 500_000.0
    epsilon: float = 1e-5
    context: int = 4096
    convolution: int = 0  # tokens that a short convolution sums over; 0 for none, as in a llama

    @property
    def arch(self) -> str:
        return "lfm2" if self.convolution else "llama"

    def has_attention(self, layer: int) -> bool:
        return not self.convolution or layer % 2 == 1


class Norm(nn.Module):
    def __init__(self, shape: Shape, size: int) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), shape.epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


def rope_table(shape: Shape) -> Tensor:
    """Cosine and sine of every position, for the half-split layout (export interleaves the rows of a llama)."""
    rates = shape.rope_base ** (-torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size)
    angles = torch.outer(torch.arange(shape.context, dtype=torch.float32), rates)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = table[0].to(x.dtype), table[1].to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """A layer: what mixes positions, then SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm, self.forward_norm = Norm(shape, shape.width), Norm(shape, shape.width)
        self.gate = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def mix(self, normed: Tensor, table: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.mix(self.attention_norm(x), table)
        normed = self.forward_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class AttentionBlock(Block):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.q = nn.Linear(shape.width, queries, bias=False)
        self.k = nn.Linear(shape.width, keys, bias=False)
        self.v = nn.Linear(shape.width, keys, bias=False)
        self.o = nn.Linear(queries, shape.width, bias=False)
        if shape.convolution:
            self.q_norm, self.k_norm = Norm(shape, shape.head_size), Norm(shape, shape.head_size)

    def mix(self, normed: Tensor, table: Tensor) -> Tensor:
        rows, length, _ = normed.shape
        shape = self.shape
        q, k, v = (
            layer(normed).view(rows, length, -1, shape.head_size).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if shape.convolution:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, table), rotate(k, table)
        share = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(rows, length, -1))


class ConvolutionBlock(Block):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.in_proj = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.conv = nn.Conv1d(shape.width, shape.width, shape.convolution, groups=shape.width, bias=False)
        self.out_proj = nn.Linear(shape.width, shape.width, bias=False)

    def mix(self, normed: Tensor, table: Tensor) -> Tensor:
        before, after, x = self.in_proj(normed).chunk(3, dim=-1)
        gated = F.pad(before * x, (0, 0, self.shape.convolution - 1, 0))
        # A sum of shifted copies: conv1d with a group for each channel takes longer on a CPU.
        length, kernel = normed.shape[1], self.conv.weight[:, 0]
        summed = sum(gated[:, i : i + length] * kernel[:, i] for i in range(self.shape.convolution))
        return self.out_proj(after * summed)


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(
            (AttentionBlock if shape.has_attention(layer) else ConvolutionBlock)(shape)
            for layer in range(shape.layers)
        )
        self.norm = Norm(shape, shape.width)
        self.register_buffer("table", rope_table(shape), persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.5 / math.sqrt(shape.width))
        for name, weight in self.blocks.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]))
                if name.endswith(("o.weight", "down.weight", "out_proj.weight")):
                    nn.init.zeros_(weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        table = self.table[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x, table)
        return F.linear(self.norm(x), self.embedding.weight)
