"""The projector of images (`--mmproj`), which llama.cpp's libmtmd loads and computes.

libmtmd checks little of a file: at shapes, types and numbers that it does not expect it ends the process. So a file
is tried in a process of its own before it is loaded here, with the model's vocabulary alone and images of many
sizes (`_try`, fact 45).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import llama_cpp
import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from llamaslot.backend.llama import library, loading
from llamaslot.backend.llama.loading import LlamaSettings
from llamaslot.base.errors import ConfigError, InvalidRequestError, UnavailableError
from llamaslot.base.files import Tensor, open_regular, read_projector
from llamaslot.base.image_files import check_size, decode
from llamaslot.base.images import Delimiters, ImageLayout, ImageSize, PromptImage, Tile
from llamaslot.base.kv_ops import IllegalCallError
from llamaslot.base.model import ModelFile, ProjectorInfo

_log = structlog.get_logger(__name__)

_MIN_TILE = 4
"""Fewest tokens of a tile: their ids have 30 bits of its digest each, of which a client can search 60."""
_TRY_TIMEOUT_S = 120
_MAX_TRIED_PIXELS = 2**16
"""Most pixels of an image that is also scaled when a projector is tried."""
_NO_WEIGHTS = range(24, 29)
"""ggml's types of integers, and of 64-bit floats, for which it has no products."""
_FLAG = "--mmproj"


class EncodedTile(NamedTuple):
    """Input of llama.cpp in place of a tile's tokens; valid until the next tile is encoded."""

    embeddings: npt.NDArray[np.float32]
    """`[tokens, width of the model's input]`."""
    is_causal: bool
    """False if its tokens also attend to those after them."""
    places: npt.NDArray[np.int32] | None = None
    """Position, row, column and a 0 of each token, counted from the tile's first one, `[4, tokens]`.

    None for a model without M-RoPE.
    """
    n_positions: int = 0
    """With M-RoPE: positions from the first token to the one after the tile."""

    def part(self, start: int, end: int) -> EncodedTile:
        """Return tokens `[start, end)`."""
        places = self.places[:, start:end] if self.places is not None else None
        return self._replace(embeddings=self.embeddings[start:end], places=places)


class Projector:
    """A loaded projector. `layout` may be called from any thread, the others from that of the backend."""

    def __init__(self, handle: Any, info: ProjectorInfo, *, width: int, is_causal: bool) -> None:
        self._handle = handle
        self.info = info
        self._width = width
        self._is_causal = is_causal
        self._lock = Lock()
        """Held while a layout is made, so that nothing is freed meanwhile."""
        self._image: tuple[bytes, Any] | None = None
        """Digest and preprocessed tiles (libmtmd's chunks) of the last image, for its further tiles."""

    def layout(self, size: ImageSize) -> ImageLayout:
        """Return the tokens of an image of a size; raises `InvalidRequestError`."""
        check_size(size)
        with self._lock:
            if self._handle is None:
                # A query may come while the model is being unloaded.
                raise UnavailableError("the model is not loaded", retry_after=1)
            with _tokenized(self._handle, size, None) as chunks:
                pieces = tuple(piece for piece, _ in _pieces(chunks))
        tiles = [piece for piece in pieces if isinstance(piece, int)]
        if min(tiles, default=0) < _MIN_TILE:
            raise InvalidRequestError(
                f"the model makes fewer than {_MIN_TILE} tokens of a part of an image of {size} pixels"
            )
        if 0 < self.info.max_tile < max(tiles):
            raise InvalidRequestError(
                f"an image of {size} pixels has {max(tiles)} tokens that must be computed in one step, "
                f"and a step has {self.info.max_tile}: raise --ubatch-size, or lower --image-max-tokens"
            )
        return ImageLayout(pieces)

    def encode(self, tile: Tile) -> EncodedTile | None:
        """Return what is computed in place of a tile's tokens.

        None, with the reason in the log, if the file cannot be decoded, or llama.cpp cannot compute them.
        """
        mtmd = _mtmd()
        if not tile.number:
            # Else it would show by its time that another client has just sent the same image.
            self._drop_image()
        try:
            chunks = self._chunks(tile.image)
        except (InvalidRequestError, MemoryError) as error:
            _log.error("an image cannot be decoded", error=str(error))
            return None
        tiles = [chunk for piece, chunk in _pieces(chunks) if isinstance(piece, int)]
        if tile.number >= len(tiles):
            raise IllegalCallError(f"the image has {len(tiles)} tiles, so none of number {tile.number}")
        chunk = tiles[tile.number]
        n = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        if n != tile.end - tile.start:
            raise IllegalCallError(f"a tile of {n} tokens at {tile.end - tile.start} positions")
        if mtmd.mtmd_encode_chunk(self._handle, chunk):
            _log.error("llama.cpp cannot encode an image")
            return None
        embeddings = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self._handle), (n, self._width))
        if not mtmd.mtmd_decode_use_mrope(self._handle):
            return EncodedTile(embeddings, self._is_causal)
        found = (mtmd.mtmd_decoder_pos * n)()
        mtmd.mtmd_helper_image_get_decoder_pos(mtmd.mtmd_input_chunk_get_tokens_image(chunk), 0, found)
        # llama.cpp takes the row before the column.
        places = np.ctypeslib.as_array(found).view(np.int32).reshape(n, 4)[:, [0, 2, 1, 3]].T
        if places[0].any() or places[3].any():
            raise IllegalCallError("tokens of a tile at several positions")
        return EncodedTile(embeddings, self._is_causal, places, mtmd.mtmd_input_chunk_get_n_pos(chunk))

    def _chunks(self, image: PromptImage) -> Any:
        """Return the preprocessed tiles of an image, which are kept until those of another are asked for."""
        if self._image is not None and self._image[0] == image.digest:
            return self._image[1]
        self._drop_image()
        size, pixels = decode(image.data)
        chunks = _tokenize(self._handle, size, pixels)
        self._image = image.digest, chunks
        return chunks

    def _drop_image(self) -> None:
        if self._image is not None:
            _mtmd().mtmd_input_chunks_free(self._image[1])
            self._image = None

    def close(self) -> None:
        """Free it, before the model. May be called again."""
        self._drop_image()
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            _mtmd().mtmd_free(handle)


def load(model: Any, settings: LlamaSettings, n_threads: int) -> Projector:
    """Load the projector of `settings.mmproj` for a model; raises `ConfigError`."""
    path = settings.mmproj
    assert path is not None
    before = ModelFile.of(path)
    read_projector(path)
    digest = _digest(path, settings)
    _try(path, settings, digest)
    handle = _open(path, model, settings, n_threads)
    if ModelFile.of(path) != before:
        _mtmd().mtmd_free(handle)
        raise _error(f"{path} was changed while it was loaded")
    width = llama_cpp.llama_model_n_embd_inp(model)
    is_causal = not _mtmd().mtmd_decode_use_non_causal(handle, None)
    # Cells are counted for the tokens of one micro-batch where a window keeps only the last ones.
    is_one_step = not is_causal or llama_cpp.llama_model_n_swa(model) > 0
    info = ProjectorInfo(digest, settings.n_ubatch if is_one_step else 0)
    return Projector(handle, info, width=width, is_causal=is_causal)


def _error(reason: str) -> ConfigError:
    return ConfigError(f"{_FLAG}: {reason}", param=_FLAG)


def _mtmd() -> Any:
    """Return the bindings of libmtmd, which is loaded only if there is a projector."""
    from llama_cpp import mtmd_cpp  # noqa: PLC0415 - costs time and memory

    return mtmd_cpp


def _digest(path: Path, settings: LlamaSettings) -> str:
    """Return `ProjectorInfo.digest`; raises `ConfigError`."""
    try:
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    except OSError as error:
        raise _error(f"cannot read {path}: {error.strerror}") from None
    digest.update(f"{settings.image_min_tokens} {settings.image_max_tokens}".encode())
    return digest.hexdigest()


def _open(path: Path, model: Any, settings: LlamaSettings, n_threads: int) -> Any:
    """Return a context of libmtmd; raises `ConfigError`."""
    mtmd = _mtmd()
    library.initialise()
    mtmd.mtmd_log_set(library.on_log, ctypes.c_void_p(0))
    params = mtmd.mtmd_context_params_default()
    gpus = loading.gpus(settings) if settings.mmproj_offload else []
    params.use_gpu = bool(gpus)
    params.device = gpus[0].handle if gpus else None
    params.print_timings = False
    params.n_threads = settings.n_threads_batch or n_threads
    params.flash_attn_type = loading.FLASH_ATTN[settings.flash_attn]
    # -1 stands for the numbers of the file.
    params.image_min_tokens = settings.image_min_tokens or -1
    params.image_max_tokens = settings.image_max_tokens or -1
    with library.watched() as (_, errors):
        handle = mtmd.mtmd_init_from_file(os.fsencode(path), model, params)
        if not handle:
            reason = loading.reason_of(errors).splitlines()[0]
            raise _error(f"cannot load {path} for {settings.model}: {reason}")
    if not mtmd.mtmd_support_vision(handle):
        mtmd.mtmd_free(handle)
        raise _error(f"{path} is not for images")
    return handle


def _tokenize(handle: Any, size: ImageSize, pixels: bytes | None) -> Any:
    """Return libmtmd's chunks of an image, to be freed; without pixels they only have numbers of tokens.

    Raises `InvalidRequestError`.
    """
    mtmd = _mtmd()
    if pixels is not None and len(pixels) != 3 * size.width * size.height:
        raise IllegalCallError("an image of another size than its pixels")
    data = ctypes.cast(ctypes.c_char_p(pixels), ctypes.POINTER(ctypes.c_uint8)) if pixels is not None else None
    bitmap = mtmd.mtmd_bitmap_init(size.width, size.height, data)
    chunks = mtmd.mtmd_input_chunks_init()
    part = mtmd.mtmd_input_part(None, bitmap)
    parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
    failed = mtmd.mtmd_tokenize_from_parts(handle, chunks, parts, 1, False)
    mtmd.mtmd_bitmap_free(bitmap)
    if failed:
        mtmd.mtmd_input_chunks_free(chunks)
        raise InvalidRequestError(f"llama.cpp makes no tokens of an image of {size} pixels")
    return chunks


@contextlib.contextmanager
def _tokenized(handle: Any, size: ImageSize, pixels: bytes | None) -> Iterator[Any]:
    chunks = _tokenize(handle, size, pixels)
    try:
        yield chunks
    finally:
        _mtmd().mtmd_input_chunks_free(chunks)


def _pieces(chunks: Any) -> Iterator[tuple[Delimiters | int, Any]]:
    """Yield the delimiters, or the number of tokens of a tile, of each chunk, and the chunk."""
    mtmd = _mtmd()
    for i in range(mtmd.mtmd_input_chunks_size(chunks)):
        chunk = mtmd.mtmd_input_chunks_get(chunks, i)
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            n = ctypes.c_size_t()
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
            yield tuple(tokens[: n.value]), chunk
        else:
            yield int(mtmd.mtmd_input_chunk_get_n_tokens(chunk)), chunk


@lru_cache(maxsize=8)  # A reload of the same file need not try it again.
def _tried(path: Path, model: Path, limits: tuple[int, int], _digest: str) -> str:
    """Return why a projector cannot be used; empty if it can."""
    command = [sys.executable, "-P", "-m", __name__, str(path), str(model), *map(str, limits)]
    # It needs no GPU, and to begin with one takes time and memory.
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_TRY_TIMEOUT_S, check=False, env=os.environ | hidden
        )
    except subprocess.TimeoutExpired:
        return f"{path} is damaged or hostile: llama.cpp does not finish loading it"
    if done.returncode == 0:
        return ""
    if done.returncode == 2:
        # What is logged comes before.
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=str)
    if done.returncode == -signal.SIGKILL:
        return f"{path} cannot be tried: the process that loads it was killed, perhaps for lack of memory"
    lines = done.stderr.decode(errors="replace").splitlines()
    if done.returncode > 0:
        return f"{path} cannot be tried: {lines[-1] if lines else f'exit status {done.returncode}'}"
    why = next((f" ({line[line.index('GGML_') :].strip()})" for line in lines if "GGML_" in line), "")
    return f"{path} is damaged, hostile or not supported: llama.cpp ends its process at it{why}"


def _try(path: Path, settings: LlamaSettings, digest: str) -> None:
    """Raise `ConfigError` if a process that loads a projector fails, or ends."""
    if reason := _tried(path, settings.model, (settings.image_min_tokens, settings.image_max_tokens), digest):
        raise _error(reason)


def _check_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ConfigError` for tensors that cannot be computed with.

    If the file ends within them, libmtmd computes with what is in memory.
    """
    n_bytes = path.stat().st_size
    for name, each in tensors.items():
        if each.kind in _NO_WEIGHTS:
            raise _error(f"{path} is damaged or hostile: {name} is of type {each.kind}")
        if each.start + library.row_bytes(each.kind, each.shape[0]) * math.prod(each.shape[1:]) > n_bytes:
            raise _error(f"{path} is incomplete: it ends within {name}")


def main(path: Path, model: Path, n_min: int, n_max: int) -> int:
    """Load a projector as the server would, and lay out images of many sizes; returns an exit status."""
    settings = LlamaSettings(
        model, mmproj=path, mmproj_offload=False, n_gpu_layers=0, image_min_tokens=n_min, image_max_tokens=n_max
    )
    try:
        library.initialise()
        _check_tensors(path, read_projector(path))
        handle = _open(path, loading.load_vocab(model), settings, n_threads=1)
        edges = (1, 7, 30, 100, 256, 500, 1000, 4000, 8192, 2**16)
        for size in (ImageSize(width, height) for width in edges for height in edges):
            with contextlib.suppress(InvalidRequestError):
                check_size(size)
                n = size.width * size.height
                pixels = bytes(3 * n) if n <= _MAX_TRIED_PIXELS else None
                with _tokenized(handle, size, pixels) as chunks:
                    delimiters = [piece for piece, _ in _pieces(chunks) if not isinstance(piece, int)]
                if min(itertools.chain(*delimiters), default=0) < 0:
                    raise _error(
                        f"the vocabulary of {model} lacks tokens that {path} puts between tiles: they do not "
                        "belong together"
                    )
    except ConfigError as error:
        print(msgspec.json.encode(error.message.removeprefix(f"{_FLAG}: ")).decode())
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])))
