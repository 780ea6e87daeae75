"""The trained models' layers as llama.cpp computes them.

RMSNorm, RoPE, grouped-query attention and a gated feed-forward; the embedding is the output matrix too. A shape
with convolutions is an LFM2: they are gated and alternate with attention whose queries and keys have norms of their
own. One with a window is a Gemma 3: layers that attend to the last tokens only alternate with layers that attend to
all, and what each adds has a norm, too. One with neither is a llama.
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
    window: int = 0  # tokens that every other layer attends to, beginning with the first; 0 for all

    @property
    def arch(self) -> str:
        return "lfm2" if self.convolution else "gemma3" if self.window else "llama"

    def window_of(self, layer: int) -> int:
        """Tokens that a layer attends to, 0 for all."""
        return self.window if layer % 2 == 0 else 0

    def has_attention(self, layer: int) -> bool:
        return not self.convolution or layer % 2 == 1


class Norm(nn.Module):
    def __init__(self, shape: Shape, size: int, initial: float = 1.0) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.full((size,), initial)), shape.epsilon

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


POST_NORM = 0.25
"""What a layer of Gemma 3 adds at first; the others add nothing, which a norm would undo."""


class Block(nn.Module):
    """A layer: what mixes positions, then a gated feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm, self.forward_norm = Norm(shape, shape.width), Norm(shape, shape.width)
        self.gate = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.width, bias=False)
        if shape.window:
            self.attention_post_norm = Norm(shape, shape.width, POST_NORM)
            self.forward_post_norm = Norm(shape, shape.width, POST_NORM)

    def mix(self, normed: Tensor, table: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        mixed = self.mix(self.attention_norm(x), table)
        x = x + (self.attention_post_norm(mixed) if self.shape.window else mixed)
        normed = self.forward_norm(x)
        if self.shape.window:
            gated = F.gelu(self.gate(normed), approximate="tanh") * self.up(normed)
            return x + self.forward_post_norm(self.down(gated))
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class AttentionBlock(Block):
    def __init__(self, shape: Shape, window: int) -> None:
        super().__init__(shape)
        self.window = window
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.q = nn.Linear(shape.width, queries, bias=False)
        self.k = nn.Linear(shape.width, keys, bias=False)
        self.v = nn.Linear(shape.width, keys, bias=False)
        self.o = nn.Linear(queries, shape.width, bias=False)
        if shape.arch != "llama":
            self.q_norm, self.k_norm = Norm(shape, shape.head_size), Norm(shape, shape.head_size)

    def mix(self, normed: Tensor, table: Tensor) -> Tensor:
        rows, length, _ = normed.shape
        shape = self.shape
        q, k, v = (
            layer(normed).view(rows, length, -1, shape.head_size).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if shape.arch != "llama":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, table), rotate(k, table)
        share = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        if self.window:
            seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - self.window)
            mixed = F.scaled_dot_product_attention(q, k, v, seen)
        else:
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
            AttentionBlock(shape, shape.window_of(layer)) if shape.has_attention(layer) else ConvolutionBlock(shape)
            for layer in range(shape.layers)
        )
        self.norm = Norm(shape, shape.width)
        self.register_buffer("table", rope_table(shape), persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.5 / math.sqrt(shape.width))
        for name, weight in self.blocks.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]))
                if name.endswith(("o.weight", "down.weight", "out_proj.weight")) and not shape.window:
                    nn.init.zeros_(weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.shape.window:
            x = x * math.sqrt(self.shape.width)
        table = self.table[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x, table)
        return F.linear(self.norm(x), self.embedding.weight)
