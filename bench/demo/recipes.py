"""Shapes and curricula of the models that `bench.demo.train` trains."""

from dataclasses import dataclass, replace

from bench.demo.model import Shape


@dataclass(frozen=True)
class Stage:
    """A stretch of training at one length."""

    steps: int
    length: int
    rows: int
    far: float  # share of rows with chatter between facts and questions
    tools: float  # share of rows with tools


@dataclass(frozen=True)
class Recipe:
    """A model's shape, the stages of its training and how finely its tokenizer cuts."""

    shape: Shape
    stages: tuple[Stage, ...]
    characters_per_token: float  # a little above the mean, so that nearly every talk fills its row
    characters_per_tool_token: float = 1.8  # names and punctuation of JSON are cut finer
    half: bool = True  # whether matrices are multiplied in bfloat16
    threads: int = 2


SHORT, MIDDLE, LONG, FULL = (
    (256, 24, 0.15, 0.2),
    (640, 10, 0.5, 0.5),
    (2304, 3, 0.8, 0.1),
    (4096, 2, 0.9, 0.0),
)
SMALL = Recipe(
    Shape(
        vocabulary=448,
        width=64,
        layers=4,
        heads=1,
        kv_heads=1,
        head_size=64,  # CUDA's flash attention takes no smaller one
        feed_forward=32,
        rope_base=10_000.0,
        context=2048,
    ),
    (
        Stage(2000, 256, 24, 0.05, 0.0),
        *(Stage(12, 256, 24, 0.05, 0.0), Stage(6, 640, 10, 0.3, 0.0), Stage(1, 2048, 3, 0.5, 0.0)) * 360,
    ),
    characters_per_token=2.5,
    # A model so narrow trains faster like this.
    half=False,
    threads=1,
)
RECIPES = {
    "demo": Recipe(
        Shape(),
        (
            Stage(900, *SHORT),
            *(Stage(10, *SHORT), Stage(4, *MIDDLE), Stage(6, *LONG), Stage(1, *FULL)) * 180,
        ),
        characters_per_token=3.6,
    ),
    "short-conv": replace(SMALL, shape=replace(SMALL.shape, convolution=9)),
    "window": replace(SMALL, shape=replace(SMALL.shape, window=32)),
}
