"""Trains the demo model: `python -m bench.demo.train [--out FOLDER]`; `bench.demo.export` makes the GGUF.

A llama-architecture model as llama.cpp computes it (RMSNorm, RoPE, grouped-query attention, SwiGLU, tied
embeddings) learns to copy facts out of its context in stages of growing length. Muon drives the matrices, AdamW the
embedding and the norms. A training extra, never part of CI: it needs torch, numpy, tokenizers, gguf,
platformdirs and, for torch.compile, a C++ compiler.
"""

import argparse
import math
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import platformdirs
import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from tokenizers import Tokenizer
from torch import Tensor, nn

from bench.demo.corpus import training_talk
from bench.demo.tokenizer import TalkEncoder, load_or_train
from bench.demo.tool_talk import tool_talk
from bench.demo.weights import read_tokenizer, read_weights
from bench.demo.writer import Message

CHARACTERS_PER_TOKEN = 3.6  # a little above the mean, so that nearly every talk fills its row
CHARACTERS_PER_TOOL_TOKEN = 1.8  # names and punctuation of JSON are cut finer


@dataclass(frozen=True)
class Shape:
    """The model's hyperparameters, under llama.cpp's names where it has one."""

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


@dataclass(frozen=True)
class Stage:
    """A stretch of training at one length."""

    steps: int
    length: int
    rows: int
    far: float  # share of rows with chatter between facts and questions
    tools: float  # share of rows with tools


SHORT, MIDDLE, LONG, FULL = (
    (256, 24, 0.15, 0.2),
    (640, 10, 0.5, 0.5),
    (2304, 3, 0.8, 0.1),
    (4096, 2, 0.9, 0.0),
)
CURRICULUM = (
    Stage(900, *SHORT),
    *(Stage(10, *SHORT), Stage(4, *MIDDLE), Stage(6, *LONG), Stage(1, *FULL)) * 180,
)
AVERAGING = 0.98  # the saved weights are a running mean over about fifty steps


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(shape.width)), shape.epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


def rope_table(shape: Shape) -> Tensor:
    """Cosine and sine of every position, for the half-split layout (export interleaves the rows)."""
    rates = shape.rope_base ** (-torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size)
    angles = torch.outer(torch.arange(shape.context, dtype=torch.float32), rates)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = table[0].to(x.dtype), table[1].to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.attention_norm, self.forward_norm = Norm(shape), Norm(shape)
        self.q = nn.Linear(shape.width, queries, bias=False)
        self.k = nn.Linear(shape.width, keys, bias=False)
        self.v = nn.Linear(shape.width, keys, bias=False)
        self.o = nn.Linear(queries, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        rows, length, _ = x.shape
        shape, normed = self.shape, self.attention_norm(x)
        q, k, v = (
            layer(normed).view(rows, length, -1, shape.head_size).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = rotate(q, table), rotate(k, table)
        share = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, -1))
        normed = self.forward_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)
        self.register_buffer("table", rope_table(shape), persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.5 / math.sqrt(shape.width))
        for name, weight in self.blocks.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]))
                if name.endswith(("o.weight", "down.weight")):
                    nn.init.zeros_(weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        table = self.table[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x, table)
        return F.linear(self.norm(x), self.embedding.weight)


def orthogonalize(gradient: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, by five quintic Newton-Schulz steps."""
    x = gradient.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.T if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates, for weight matrices."""

    def __init__(
        self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
                velocity.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalize(weight.grad.lerp(velocity, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.add_(update, alpha=-group["lr"] * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)


def _talk(stage: Stage, rng: random.Random) -> list[Message]:
    if rng.random() < stage.tools:
        return tool_talk(rng, int(stage.length * CHARACTERS_PER_TOOL_TOKEN))
    return training_talk(rng, int(stage.length * CHARACTERS_PER_TOKEN), rng.random() < stage.far)


def make_rows(stage: Stage, encoder: TalkEncoder, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """One batch: a conversation a row, each from position 0, cut at the stage's length."""
    ids = np.zeros((stage.rows, stage.length + 1), np.int64)
    weights = np.zeros((stage.rows, stage.length + 1), np.float32)
    talks = [_talk(stage, rng) for _ in range(stage.rows)]
    for row, (row_ids, row_weights) in enumerate(encoder.encode(talks)):
        count = min(len(row_ids), stage.length + 1)
        ids[row, :count], weights[row, :count] = row_ids[:count], row_weights[:count]
    return ids, weights


@dataclass(frozen=True)
class Run:
    """Settings of one training run."""

    stages: tuple[Stage, ...]
    seed: int
    folder: Path
    rate: float
    decay_share: float  # of the steps, over which the rate falls to nothing
    resume: Path | None
    minutes: float

    def tokenizer(self, vocabulary: int) -> Tokenizer:
        return load_or_train(self.folder / "tokenizer.json", self.seed, vocabulary)


def _produce(queue: "multiprocessing.Queue[tuple[np.ndarray, np.ndarray]]", run: Run, vocabulary: int) -> None:
    encoder = TalkEncoder(run.tokenizer(vocabulary))
    for index, stage in enumerate(run.stages):
        rng = random.Random(f"training {run.seed} {index}")
        for _ in range(stage.steps):
            queue.put(make_rows(stage, encoder, rng))


def batches(run: Run, vocabulary: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The curriculum's batches in order, written by a process of their own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(maxsize=8)
    process = context.Process(target=_produce, args=(queue, run, vocabulary), daemon=True)
    process.start()
    try:
        for _ in range(sum(stage.steps for stage in run.stages)):
            ids, weights = queue.get()
            yield torch.from_numpy(ids), torch.from_numpy(weights)
    finally:
        process.terminate()


def weighted_loss(model: nn.Module, ids: Tensor, weights: Tensor) -> tuple[Tensor, float, float]:
    """The loss, its mean over copied values alone, and the share of copied tokens that are right."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1])
    targets, weights = ids[:, 1:].flatten(), weights[:, 1:].flatten()
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
    with torch.no_grad():
        copied = weights > 1
        right = (logits.flatten(0, 1)[copied].argmax(-1) == targets[copied]).float().mean()
    return (each * weights).sum() / weights.sum(), each[copied].mean().item(), right.item()


def rate_at(step: int, progress: float, warmup: int, decay_share: float) -> float:
    """Warm-up, plateau, and a linear way down to nothing as `progress` goes from 0 to 1."""
    return max(0.0, min(1.0, (step + 1) / warmup, (1 - progress) / decay_share))


def train(run: Run, shape: Shape) -> Model:
    """Runs through the stages, saving a checkpoint every fifty steps."""
    torch.manual_seed(run.seed)
    model = Model(shape)
    if run.resume is not None:
        model.load_state_dict(_stored(run.resume))
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [model.embedding.weight, *(p for p in model.parameters() if p.ndim == 1)]
    adam = torch.optim.AdamW(others, lr=run.rate * 0.2, betas=(0.9, 0.98), weight_decay=0.0)
    optimizers = [Muon(matrices, lr=run.rate), adam]
    compiled = torch.compile(model, dynamic=False)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    total, began, seen = sum(stage.steps for stage in run.stages), time.monotonic(), 0
    average = [p.detach().clone() for p in model.parameters()]
    for step, (ids, weights) in enumerate(batches(run, shape.vocabulary)):
        spent = time.monotonic() - began
        progress = max(step / total, spent / (60 * run.minutes))
        factor = rate_at(step, progress, 10, run.decay_share)
        for optimizer, base in zip(optimizers, (run.rate, run.rate * 0.2), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * factor
        loss, copied, right = weighted_loss(compiled, ids, weights)
        loss.backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        share = 1 - min(AVERAGING, step / (step + 10))
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], share)
        seen += ids.numel()
        is_last = step == total - 1 or progress >= 1
        if step % 10 == 0 or is_last:
            print(
                f"step {step:5d}  length {ids.shape[1] - 1:4d}  loss {loss.item():.3f}  copied {copied:.3f}"
                f" {right:.3f}  {seen / 1e6:.2f}M tokens  {seen / spent:.0f}/s  {spent:.0f}s",
                flush=True,
            )
        if step % 50 == 49 or is_last:
            save(model, average, run.folder / "checkpoint.pt")
        if is_last:
            break
    return model


def _stored(path: Path) -> dict[str, Tensor]:
    return read_weights(path) if path.suffix == ".gguf" else torch.load(path)["latest"]  # type: ignore[no-any-return]


def save(model: Model, average: list[Tensor], path: Path) -> None:
    partial = path.with_suffix(".partial")
    names = [name for name, _ in model.named_parameters()]
    torch.save(
        {
            "weights": dict(zip(names, average, strict=True)),
            "latest": model.state_dict(),
            "shape": asdict(model.shape),
        },
        partial,
    )
    partial.replace(path)


def load(path: Path) -> Model:
    stored = torch.load(path)
    model = Model(Shape(**stored["shape"]))
    model.load_state_dict(stored["weights"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=platformdirs.user_cache_path("llamaslot") / "demo")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--resume", type=Path, help="start from the weights of this checkpoint or GGUF")
    parser.add_argument("--stages", help="other stages: steps x length x rows x far x tools, comma-separated")
    parser.add_argument("--decay", type=float, default=0.4, help="share of the steps over which the rate falls")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end by then, at the rate that the end has")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    stages = CURRICULUM
    if arguments.stages:
        stages = tuple(
            Stage(int(s), int(n), int(r), float(f), float(t))
            for s, n, r, f, t in (part.split("x") for part in arguments.stages.split(","))
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = Run(
        stages,
        arguments.seed,
        arguments.out,
        arguments.rate,
        arguments.decay,
        arguments.resume,
        arguments.minutes,
    )
    if run.resume is not None and run.resume.suffix == ".gguf":
        read_tokenizer(run.resume).save(str(run.folder / "tokenizer.json"))
    run.tokenizer(Shape().vocabulary)
    train(run, Shape())


if __name__ == "__main__":
    main()
