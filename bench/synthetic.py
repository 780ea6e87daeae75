"""Writes GGUF files with random weights, so that tests and benchmarks need no download.

Time does not depend on what the weights are, so a file of a real model's shape stands for that model in benchmarks.
What such a file answers means nothing: never judge answers by it.

Weights are drawn straight as Q8_0 blocks (what many users run, and 0.6B parameters take seconds), the same bytes
for the same shape each time. Three properties make them useful:

1. The tokenizer is a byte-level BPE whose words (" a" .. " zz" ..) are a space and lowercase letters. Every prefix
   of a word is a word, merges only ever extend a word to the right, and the pre-tokenizer cuts before each space:
   any sequence of words, written out and tokenized again, gives the same ids.
2. The embedding is also the output matrix, and its rows for bytes, role names and special tokens are quieter than
   those of the words (`QUIET`). The greatest logit is therefore always a word's: greedy answers survive
   re-tokenization (1) and never end by themselves.
3. Layers outweigh the embedding in the residual stream and attention is sharp (`SHARP`), so that answers wander and
   depend on what is far back, instead of repeating one token.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import string
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt
import platformdirs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from bench import sentencepiece

RECIPE = 1
"""Counted up whenever the same shape would get other bytes, so that files in caches are not mistaken."""
QUIET = 0.05
SHARP = 2.0
LOGIT_STD = 3.0
FLAT_LOGIT_STD = 1.5
"""That of `SENTENCEPIECE`: llama-server's tests expect that its default samplers leave ten tokens."""
NORM_EPS = 1e-6
CONV_KERNEL = 4
SSM_STATE = 16
SSM_TIME_RANK = 32
SHOW_PROGRESS_FROM = 50_000_000

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model; `kv_heads` may be given per layer, where 0 makes it a recurrent one."""

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


SHAPES = {
    "tiny": Shape("llama", 512, 3, 128, 256, 2, 1, 64, 4096),
    "tiny-swa": Shape("gemma3", 512, 6, 128, 128, 2, 1, 64, 4096, window=32),
    "tiny-lfm2": Shape("lfm2", 512, 4, 128, 256, 2, (0, 1, 0, 1), 64, 4096),
    "tiny-mamba": Shape("mamba", 512, 2, 128, 0, 0, 0, 0, 4096),
    "60m": Shape("qwen3", 151_936, 8, 320, 960, 8, 4, 64, 40_960, rope_base=1e6),
    "qwen3-0.6b": Shape("qwen3", 151_936, 28, 1024, 3072, 16, 8, 128, 40_960, rope_base=1e6),
    "qwen3-8b": Shape("qwen3", 151_936, 36, 4096, 12_288, 32, 8, 128, 40_960, rope_base=1e6),
}


SENTENCEPIECE = {"tiny-sentencepiece": Shape("llama", sentencepiece.SIZE, 3, 128, 256, 2, 1, 64, 32_768)}
"""Shapes with the vocabulary of `bench.sentencepiece` and without a chat template."""

BORROWING = {"tiny-qwen2": Shape("llama", 151_936, 3, 128, 256, 2, 1, 64, 4096), "60m-qwen3": SHAPES["60m"]}
"""Shapes that get the tokenizer of another file."""

ADDED_TOKENS = {
    "60m-qwen3": {
        151_657: "<tool_call>",
        151_658: "</tool_call>",
        151_665: "<tool_response>",
        151_666: "</tool_response>",
        151_667: "<think>",
        151_668: "</think>",
    }
}
"""Tokens that a shape has in place of the unused ones of its tokenizer: what Qwen3 has more than Qwen2."""


@dataclass(frozen=True)
class Drawn:
    """A matrix of random Q8_0 weights; its first `quiet` rows are `QUIET` times smaller than the rest."""

    rows: int
    columns: int
    std: float
    quiet: int = 0

    @property
    def n_bytes(self) -> int:
        """Size of the blocks: 32 weights as int8 behind one float16 scale."""
        return self.rows * self.columns // 32 * 34

    def blocks(self, seed: str) -> npt.NDArray[np.uint8]:
        """The matrix as `[rows, bytes per row]`, always the same for the same seed."""
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:16])))
        uniform_std = math.sqrt((255**2 - 1) / 12)
        scale = np.full((self.rows, self.columns // 32, 1), self.std / uniform_std, np.float16)
        scale[: self.quiet] *= np.float16(QUIET)
        weights = rng.integers(-127, 128, (self.rows, self.columns // 32, 32), np.int8)
        blocks = np.concatenate([scale.view(np.uint8), weights.view(np.uint8)], axis=2)
        return blocks.reshape(self.rows, -1)


Tensors: TypeAlias = dict[str, "Drawn | npt.NDArray[np.float32]"]
AddTokenizer: TypeAlias = Callable[[gguf.GGUFWriter], None]


def ensure(shape: str, *, folder: Path | None = None, vocabulary: Path | None = None) -> Path:
    """The GGUF file of a shape, written to `folder` (default: the user's cache) unless it is there.

    The shape is one of `SHAPES` or `SENTENCEPIECE`. One in `BORROWING` gets its tokenizer from the GGUF
    `vocabulary`, which has as many tokens as the shape.
    """
    folder = folder or platformdirs.user_cache_path("llamaslot") / "models"
    dimensions = (SHAPES | SENTENCEPIECE)[shape] if vocabulary is None else BORROWING[shape]
    mark = hashlib.sha256(repr((RECIPE, astuple(dimensions))).encode()).hexdigest()[:12]
    path = folder / f"{shape}-{mark}.gguf"
    tokenizer = _tokenizer(shape, vocabulary)
    if shape in SENTENCEPIECE:
        tensors = _tensors(dimensions, sentencepiece.N_QUIET, FLAT_LOGIT_STD)
    else:
        tensors = _tensors(dimensions, len(quiet_tokens()))
    if not _complete(path, mark, tensors):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{path.name}.{os.getpid()}"
        try:
            _write(unfinished, f"{shape} {mark}", dimensions, tensors, tokenizer)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges in GPT-2's characters for bytes: first `quiet_tokens()`, then words."""
    quiet = quiet_tokens()
    words = list(itertools.islice(_words(), size - len(quiet)))
    merges = [f"{token[:-1]} {token[-1]}" for token in words + _role_pieces()]
    return quiet + words, merges


def quiet_tokens() -> list[str]:
    """The tokens that are no words and never have the greatest logit: bytes, specials, pieces of role names."""
    return [*_byte_characters(), *SPECIALS, *_role_pieces()]


def _words() -> Iterator[str]:
    for n_letters in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=n_letters):
            yield "Ġ" + "".join(letters)


def _role_pieces() -> list[str]:
    return [role[:end] for role in ROLES for end in range(2, len(role) + 1)]


def parameters(shape: str) -> int:
    """Number of weights of a shape, the tied embedding counted once."""
    return sum(t.rows * t.columns if isinstance(t, Drawn) else t.size for t in _tensors(SHAPES[shape], 0).values())


def _byte_characters() -> Iterator[str]:
    """GPT-2's character for each byte: itself where printable, else the next free one from 256 on."""
    spare = itertools.count(256)
    for byte in range(256):
        printable = 33 <= byte <= 126 or (byte >= 161 and byte != 173)
        yield chr(byte if printable else next(spare))


def _complete(path: Path, mark: str, tensors: Tensors) -> bool:
    if not path.is_file() or path.stat().st_size < _n_bytes(tensors):
        return False
    with path.open("rb") as file:
        head = file.read(4096)
    return head.startswith(b"GGUF") and mark.encode() in head


def _n_bytes(tensors: Tensors) -> int:
    return sum(t.n_bytes if isinstance(t, Drawn) else t.nbytes for t in tensors.values())


def _write(path: Path, title: str, shape: Shape, tensors: Tensors, tokenizer: AddTokenizer) -> None:
    name, _ = title.split()
    writer = gguf.GGUFWriter(path, shape.arch)
    _add_metadata(writer, title, shape)
    tokenizer(writer)
    for tensor_name, tensor in tensors.items():
        if isinstance(tensor, Drawn):
            writer.add_tensor_info(
                tensor_name,
                (tensor.rows, tensor.columns // 32 * 34),
                np.dtype(np.uint8),
                tensor.n_bytes,
                gguf.GGMLQuantizationType.Q8_0,
            )
        else:
            writer.add_tensor_info(tensor_name, tensor.shape, tensor.dtype, tensor.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with _progress(f"writing {name}", _n_bytes(tensors)) as progress:
        for data in _in_parallel(name, tensors):
            writer.write_tensor_data(data)
            progress.advance(progress.task_ids[0], data.nbytes)
    writer.close()


def _in_parallel(name: str, tensors: Tensors) -> Iterator[npt.NDArray[Any]]:
    """The tensors' data in order; random weights are drawn on all cores, a few tensors ahead."""

    def data(tensor_name: str) -> npt.NDArray[Any]:
        tensor = tensors[tensor_name]
        return tensor.blocks(f"{name} {tensor_name}") if isinstance(tensor, Drawn) else tensor

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting: deque[Future[npt.NDArray[Any]]] = deque()
        for tensor_name in tensors:
            waiting.append(pool.submit(data, tensor_name))
            if len(waiting) > (os.cpu_count() or 1):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _progress(title: str, total: int) -> Progress:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        console=Console(stderr=True),
        disable=total < SHOW_PROGRESS_FROM,
    )
    progress.add_task(title, total=total)
    return progress


def _add_metadata(writer: gguf.GGUFWriter, title: str, shape: Shape) -> None:
    writer.add_name(f"llamaslot random weights {title}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    if shape.heads:
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_rope_dimension_count(shape.head_dim)
        writer.add_rope_freq_base(shape.rope_base)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.arch == "lfm2":
        writer.add_vocab_size(shape.vocab)
        writer.add_shortconv_l_cache(CONV_KERNEL)
    if shape.arch == "mamba":
        writer.add_ssm_conv_kernel(CONV_KERNEL)
        writer.add_ssm_inner_size(2 * shape.width)
        writer.add_ssm_state_size(SSM_STATE)
        writer.add_ssm_time_step_rank(SSM_TIME_RANK)


def _tokenizer(shape: str, vocabulary: Path | None) -> AddTokenizer:
    if vocabulary is not None:
        return partial(_copy_tokenizer, vocabulary, ADDED_TOKENS.get(shape, {}))
    if shape in SENTENCEPIECE:
        return _add_sentencepiece
    return partial(_add_tokenizer, SHAPES[shape].vocab)


def _add_tokenizer(size: int, writer: gguf.GGUFWriter) -> None:
    tokens, merges = vocabulary(size)
    control = {tokens.index(special) for special in SPECIALS}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if index in control else gguf.TokenType.NORMAL for index in range(size)]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    pieces = sentencepiece.pieces()
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.text for piece in pieces])
    writer.add_token_scores([piece.score for piece in pieces])
    writer.add_token_types([piece.kind for piece in pieces])
    unknown, start, end = range(len(sentencepiece.SPECIALS))
    writer.add_unk_token_id(unknown)
    writer.add_bos_token_id(start)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def _copy_tokenizer(vocabulary: Path, added: Mapping[int, str], writer: gguf.GGUFWriter) -> None:
    """Everything that a file says of its tokenizer, some added tokens, and this module's chat template."""
    changes = {
        "tokenizer.ggml.tokens": added,
        "tokenizer.ggml.token_type": dict.fromkeys(added, int(gguf.TokenType.USER_DEFINED)),
    }
    for key, field in gguf.GGUFReader(vocabulary).fields.items():
        if key.startswith("tokenizer.") and key != "tokenizer.chat_template":
            kind, *inner = field.types
            content = field.contents()
            for token, value in changes.get(key, {}).items():
                content[token] = value
            writer.add_key_value(key, content, kind, inner[0] if inner else None)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(shape: Shape, n_quiet: int, logit_std: float = LOGIT_STD) -> Tensors:
    """Every tensor of a model, in the order of the file."""
    output_norm = "token_embd_norm" if shape.arch == "lfm2" else "output_norm"
    embedding_std = logit_std / math.sqrt(shape.width)
    tensors: Tensors = {
        "token_embd.weight": Drawn(shape.vocab, shape.width, embedding_std, n_quiet),
        f"{output_norm}.weight": _norm(shape.width),
    }
    for index in range(shape.layers):
        kv_heads = shape.kv_heads if isinstance(shape.kv_heads, int) else shape.kv_heads[index]
        if shape.arch == "mamba":
            layer = _mamba_layer(shape.width)
        else:
            mixer = _attention(shape, kv_heads) if kv_heads else _short_convolution(shape.width)
            layer = mixer | _feed_forward(shape)
        tensors |= {f"blk.{index}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def _norm(width: int, value: float = 1.0) -> npt.NDArray[np.float32]:
    return np.full(width, value, np.float32)


def _matrix(rows: int, columns: int, gain: float = 1.0) -> Drawn:
    return Drawn(rows, columns, gain / math.sqrt(columns))


def _attention(shape: Shape, kv_heads: int) -> Tensors:
    query, key_value = shape.heads * shape.head_dim, kv_heads * shape.head_dim
    norms: Tensors = {}
    gain = SHARP
    if shape.arch != "llama":
        norms = {
            "attn_q_norm.weight": _norm(shape.head_dim, SHARP),
            "attn_k_norm.weight": _norm(shape.head_dim, SHARP),
        }
        gain = 1.0
    if shape.arch == "gemma3":
        norms["post_attention_norm.weight"] = _norm(shape.width, math.sqrt(shape.width))
    return {
        "attn_norm.weight": _norm(shape.width),
        "attn_q.weight": _matrix(query, shape.width, gain),
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
        "ffn_norm.weight": _norm(shape.width),
        "ffn_gate.weight": _matrix(shape.ff, shape.width),
        "ffn_up.weight": _matrix(shape.ff, shape.width),
        "ffn_down.weight": _matrix(shape.width, shape.ff, SHARP),
        **post,
    }


def _short_convolution(width: int) -> Tensors:
    kernel = np.linspace(0.3, 1.0, width * CONV_KERNEL, dtype=np.float32).reshape(width, CONV_KERNEL)
    return {
        "attn_norm.weight": _norm(width),
        "shortconv.conv.weight": kernel,
        "shortconv.in_proj.weight": _matrix(3 * width, width),
        "shortconv.out_proj.weight": _matrix(width, width),
    }


def _mamba_layer(width: int) -> Tensors:
    inner = 2 * width
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
