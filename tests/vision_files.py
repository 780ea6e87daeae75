"""Models that images need, as copies of those of `bench.synthetic`, and places of images in prompts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import gguf

from llamaslot.base.images import ImageLayout, PromptImage, tile_ids
from tests.gguf_copies import rewritten

TOKENS = ("\n\n", "<fake_token_around_image>", "<global-img>", "<|img_thumbnail|>")
"""Delimiters of the projectors `idefics3` and `lfm2` that a model must have as tokens."""


def with_tokens(source: Path, path: Path, tokens: Iterable[str] = TOKENS) -> Path:
    """Write a copy of a model of `bench.synthetic` that has some control tokens in place of its last words."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    added = list(tokens)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind, *inner = field.types
        content = field.contents()
        if key == "tokenizer.ggml.tokens":
            content = [*content[: -len(added)], *(text.replace("\n", "Ċ") for text in added)]
        elif key == "tokenizer.ggml.token_type":
            kinds = [1 if text.isspace() else 3 for text in added]
            content = [*content[: -len(added)], *kinds]
        writer.add_key_value(key, content, kind, inner[0] if inner else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_mrope(source: Path, path: Path) -> Path:
    """Write a copy of a model of `bench.synthetic` as one with M-RoPE."""
    return rewritten(source, path, "qwen2vl", values={"rope.dimension_sections": [8, 12, 12, 0]})


def placed(data: bytes, layout: ImageLayout, start: int) -> tuple[list[int], PromptImage]:
    """Return the ids of an image at a position of a prompt, and the image with the places of its tiles."""
    digest = b"digest" + data
    ids: list[int] = []
    tiles: list[tuple[int, int]] = []
    for piece in layout.pieces:
        if isinstance(piece, int):
            at = start + len(ids)
            ids += tile_ids(digest, len(tiles), piece).tolist()
            tiles.append((at, at + piece))
        else:
            ids += piece
    return ids, PromptImage(data, digest, tuple(tiles))
