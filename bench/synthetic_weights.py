"""Random weights of the models in `bench.synthetic`."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

QUIET = 0.05
"""Scale of rows whose token must never be the most likely one, see `bench.synthetic`."""


@dataclass(frozen=True)
class Drawn:
    """A matrix of random Q8_0 weights; its first `quiet` rows are `QUIET` times smaller than the rest.

    With `stack`, the tensor has three dimensions: that many matrices, `rows` in all. With `is_exact`, the
    same weights are written as float32.
    """

    rows: int
    columns: int
    std: float
    quiet: int = 0
    stack: int = 0
    is_exact: bool = False
    drawn_as: str = ""
    """Name of the tensor whose weights these are, if it is another one."""
    shift: int = 0
    """Number of rows by which the weights are moved down; those that fall out come first."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the data; a Q8_0 block is one float16 scale and 32 weights as int8."""
        n_weights = self.rows * self.columns
        return n_weights * 4 if self.is_exact else n_weights // 32 * 34

    def add_info(self, writer: gguf.GGUFWriter, name: str) -> None:
        """Announce the tensor, whose data follows later."""
        leading = (self.stack, self.rows // self.stack) if self.stack else (self.rows,)
        if self.is_exact:
            writer.add_tensor_info(name, (*leading, self.columns), np.dtype(np.float32), self.n_bytes)
        else:
            bytes_shape = (*leading, self.columns // 32 * 34)
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), self.n_bytes, kind)

    def data(self, seed: str) -> npt.NDArray[np.uint8] | npt.NDArray[np.float32]:
        """Return the tensor's data, always the same for the same seed: Q8_0 blocks, or float32 values if exact."""
        blocks = self.blocks(seed)
        if not self.is_exact:
            return blocks
        parts = blocks.reshape(-1, 34)
        scales = parts[:, :2].copy().view(np.float16).astype(np.float32)
        return scales * parts[:, 2:].view(np.int8)

    def blocks(self, seed: str) -> npt.NDArray[np.uint8]:
        """The matrix as `[rows, bytes per row]`, always the same for the same seed."""
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:16])))
        uniform_std = math.sqrt((255**2 - 1) / 12)
        scale = np.full((self.rows, self.columns // 32, 1), self.std / uniform_std, np.float16)
        scale[: self.quiet] *= np.float16(QUIET)
        weights = rng.integers(-127, 128, (self.rows, self.columns // 32, 32), np.int8)
        blocks = np.concatenate([scale.view(np.uint8), weights.view(np.uint8)], axis=2).reshape(self.rows, -1)
        return np.roll(blocks, self.shift, axis=0) if self.shift else blocks


Tensors: TypeAlias = dict[str, "Drawn | npt.NDArray[np.float32]"]
