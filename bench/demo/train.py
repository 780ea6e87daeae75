"""Trains a demo model: `python -m bench.demo.train [--model NAME] [--gguf PATH]`.

A model of `bench.demo.recipes` learns to copy facts out of its context in stages of growing length. Muon drives the
matrices, AdamW the embedding, the norms and the convolutions. A training extra, never part of CI: it needs torch,
numpy, tokenizers, gguf, platformdirs and, for torch.compile, a C++ compiler.
"""

import argparse
import math
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import platformdirs
import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from tokenizers import Tokenizer
from torch import Tensor, nn

from bench.demo.corpus import training_talk
from bench.demo.export import export, load
from bench.demo.model import Model
from bench.demo.recipes import RECIPES, Recipe, Stage
from bench.demo.tokenizer import TalkEncoder, load_or_train
from bench.demo.tool_talk import tool_talk
from bench.demo.weights import read_tokenizer, read_weights
from bench.demo.writer import Message

AVERAGING = 0.98  # the saved weights are a running mean over about fifty steps


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


def _talk(stage: Stage, recipe: Recipe, rng: random.Random) -> list[Message]:
    if rng.random() < stage.tools:
        return tool_talk(rng, int(stage.length * recipe.characters_per_tool_token))
    return training_talk(rng, int(stage.length * recipe.characters_per_token), rng.random() < stage.far)


def make_rows(
    stage: Stage, recipe: Recipe, encoder: TalkEncoder, rng: random.Random
) -> tuple[np.ndarray, np.ndarray]:
    """One batch: a conversation a row, each from position 0, cut at the stage's length."""
    ids = np.zeros((stage.rows, stage.length + 1), np.int64)
    weights = np.zeros((stage.rows, stage.length + 1), np.float32)
    talks = [_talk(stage, recipe, rng) for _ in range(stage.rows)]
    for row, (row_ids, row_weights) in enumerate(encoder.encode(talks)):
        count = min(len(row_ids), stage.length + 1)
        ids[row, :count], weights[row, :count] = row_ids[:count], row_weights[:count]
    return ids, weights


@dataclass(frozen=True)
class Run:
    """Settings of one training run."""

    recipe: Recipe
    seed: int
    folder: Path
    rate: float
    decay_share: float  # of the steps, over which the rate falls to nothing
    resume: Path | None
    minutes: float

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def tokenizer(self) -> Tokenizer:
        return load_or_train(self.folder / "tokenizer.json", self.seed, self.recipe.shape.vocabulary)


def _produce(queue: "multiprocessing.Queue[tuple[np.ndarray, np.ndarray]]", run: Run) -> None:
    encoder = TalkEncoder(run.tokenizer())
    for index, stage in enumerate(run.recipe.stages):
        rng = random.Random(f"training {run.seed} {index}")
        for _ in range(stage.steps):
            queue.put(make_rows(stage, run.recipe, encoder, rng))


def batches(run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """The curriculum's batches in order, written by a process of their own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(maxsize=8)
    process = context.Process(target=_produce, args=(queue, run), daemon=True)
    process.start()
    try:
        for _ in range(sum(stage.steps for stage in run.recipe.stages)):
            ids, weights = queue.get()
            yield torch.from_numpy(ids), torch.from_numpy(weights)
    finally:
        process.terminate()


def weighted_loss(model: nn.Module, ids: Tensor, weights: Tensor, *, half: bool) -> tuple[Tensor, float, float]:
    """The loss, its mean over copied values alone, and the share of copied tokens that are right."""
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
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


def train(run: Run) -> Model:
    """Runs through the stages, saving a checkpoint every fifty steps."""
    torch.manual_seed(run.seed)
    model = Model(run.recipe.shape)
    if run.resume is not None:
        model.load_state_dict(_stored(run.resume))
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [model.embedding.weight, *(p for p in model.parameters() if p.ndim != 2)]
    adam = torch.optim.AdamW(others, lr=run.rate * 0.2, betas=(0.9, 0.98), weight_decay=0.0)
    optimizers = [Muon(matrices, lr=run.rate), adam]
    compiled = torch.compile(model, dynamic=False)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    total, began, seen = sum(stage.steps for stage in run.recipe.stages), time.monotonic(), 0
    average = [p.detach().clone() for p in model.parameters()]
    for step, (ids, weights) in enumerate(batches(run)):
        spent = time.monotonic() - began
        progress = max(step / total, spent / (60 * run.minutes))
        factor = rate_at(step, progress, 10, run.decay_share)
        for optimizer, base in zip(optimizers, (run.rate, run.rate * 0.2), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * factor
        loss, copied, right = weighted_loss(compiled, ids, weights, half=run.recipe.half)
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
            save(model, average, run.checkpoint)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=RECIPES, default="demo")
    parser.add_argument("--out", type=Path, help="default: a folder of the model's name in the user's cache")
    parser.add_argument("--gguf", type=Path, help="also write the trained model there, as bench.demo.export does")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--resume", type=Path, help="start from the weights of this checkpoint or GGUF")
    parser.add_argument("--stages", help="other stages: steps x length x rows x far x tools, comma-separated")
    parser.add_argument("--decay", type=float, default=0.4, help="share of the steps over which the rate falls")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end by then, at the rate that the end has")
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.model]
    torch.set_num_threads(recipe.threads)
    if arguments.stages:
        stages = tuple(
            Stage(int(s), int(n), int(r), float(f), float(t))
            for s, n, r, f, t in (part.split("x") for part in arguments.stages.split(","))
        )
        recipe = replace(recipe, stages=stages)
    folder = arguments.out or platformdirs.user_cache_path("llamaslot") / arguments.model
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(
        recipe,
        arguments.seed,
        folder,
        arguments.rate,
        arguments.decay,
        arguments.resume,
        arguments.minutes,
    )
    if run.resume is not None and run.resume.suffix == ".gguf":
        read_tokenizer(run.resume).save(str(run.folder / "tokenizer.json"))
    run.tokenizer()
    train(run)
    if arguments.gguf:
        export(load(run.checkpoint), run.tokenizer(), arguments.gguf)


if __name__ == "__main__":
    main()
