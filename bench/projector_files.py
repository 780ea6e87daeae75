"""Writes projectors of images (mmproj files) with random weights for the GGUF files of tests, and images."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
from PIL import Image

from bench.lora_files import add_value

Kind = Literal["mlp", "idefics3", "gemma3", "lfm2", "qwen2vl_merger"]
WIDTH, N_HEADS, N_LAYERS = 64, 2, 2
SIZE, PATCH, MERGE = 64, 8, 2
"""Pixels of a tile's edge, and of a patch's; patches that become one token in each direction."""
N_PATCHES = (SIZE // PATCH) ** 2
LONGEST_EDGE = 256
"""Pixels of the longest edge that an image has before it is cut to tiles (`idefics3`)."""


def write_projector(
    path: Path,
    kind: Kind,
    *,
    n_embd: int = 128,
    seed: int = 1,
    values: Mapping[str, Any] | None = None,
    tensors: Mapping[str, npt.NDArray[Any]] | None = None,
    dropped: Iterable[str] = (),
    architecture: str = "clip",
) -> Path:
    """Write a projector for models of a width. `mlp` is LLaVA's: one tile of 64 tokens; `gemma3` one of 16 that
    attend to each other; `idefics3` cuts larger images to tiles of 16; `lfm2` has one of 64 to 256;
    `qwen2vl_merger` one of any shape, for models with M-RoPE.

    `values` and `tensors` are further ones, or in place of those; None stands for one that is missing.
    """
    chance = np.random.default_rng(seed)
    chosen: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.use_gelu": True,
        "clip.vision.embedding_length": WIDTH,
        "clip.vision.feed_forward_length": 2 * WIDTH,
        "clip.vision.block_count": N_LAYERS,
        "clip.vision.attention.head_count": N_HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.projection_dim": n_embd,
        "clip.vision.image_size": SIZE,
        "clip.vision.patch_size": PATCH,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
        **({"clip.vision.projector.scale_factor": MERGE} if kind in ("idefics3", "gemma3", "lfm2") else {}),
        **({"clip.vision.preproc_image_size": LONGEST_EDGE} if kind == "idefics3" else {}),
        **(values or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in chosen.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif value is not None:
            add_value(writer, key, value)

    def drawn(*shape: int) -> npt.NDArray[np.float32]:
        return chance.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32)

    for name, tensor in {**dict(_tensors(kind, n_embd, drawn)), **(tensors or {})}.items():
        if name not in {*dropped}:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(kind: Kind, n_embd: int, drawn: Any) -> Iterable[tuple[str, npt.NDArray[np.float32]]]:
    def norm(name: str) -> Iterable[tuple[str, npt.NDArray[np.float32]]]:
        yield f"{name}.weight", np.ones(WIDTH, dtype=np.float32)
        yield f"{name}.bias", np.zeros(WIDTH, dtype=np.float32)

    yield "v.patch_embd.weight", 10 * drawn(WIDTH, 3, PATCH, PATCH)
    if kind == "qwen2vl_merger":
        yield "v.patch_embd.weight.1", 10 * drawn(WIDTH, 3, PATCH, PATCH)
    for i in range(N_LAYERS):
        for name in ("q", "k", "v", "out"):
            yield f"v.blk.{i}.attn_{name}.weight", drawn(WIDTH, WIDTH)
            if kind == "qwen2vl_merger":
                yield f"v.blk.{i}.attn_{name}.bias", drawn(WIDTH)
        yield f"v.blk.{i}.ffn_up.weight", drawn(2 * WIDTH, WIDTH)
        yield f"v.blk.{i}.ffn_down.weight", drawn(WIDTH, 2 * WIDTH)
        yield from norm(f"v.blk.{i}.ln1")
        yield from norm(f"v.blk.{i}.ln2")
    if kind != "qwen2vl_merger":
        yield "v.position_embd.weight", drawn(N_PATCHES, WIDTH)
    yield from norm("v.post_ln")
    match kind:
        case "mlp":
            yield "mm.0.weight", drawn(n_embd, WIDTH)
            yield "mm.0.bias", drawn(n_embd)
            yield "mm.2.weight", drawn(n_embd, n_embd)
            yield "mm.2.bias", drawn(n_embd)
        case "qwen2vl_merger":
            yield "mm.0.weight", drawn(n_embd, WIDTH * MERGE**2)
            yield "mm.0.bias", drawn(n_embd)
            yield "mm.2.weight", drawn(n_embd, n_embd)
            yield "mm.2.bias", drawn(n_embd)
        case "idefics3":
            yield "mm.model.fc.weight", drawn(n_embd, WIDTH * MERGE**2)
        case "gemma3":
            yield "mm.input_projection.weight", drawn(WIDTH, n_embd)
            yield "mm.soft_emb_norm.weight", np.ones(WIDTH, dtype=np.float32)
        case "lfm2":
            yield "mm.1.weight", drawn(n_embd, WIDTH * MERGE**2)
            yield "mm.1.bias", drawn(n_embd)
            yield "mm.2.weight", drawn(n_embd, n_embd)
            yield "mm.2.bias", drawn(n_embd)


def picture(seed: int, width: int = 64, height: int = 64) -> bytes:
    """Return a PNG file of coarse random colours."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
