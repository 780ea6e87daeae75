"""Writes GGUF files with random weights, so that tests and benchmarks need no download.

Time does not depend on what the weights are, so a file of a real model's shape stands for that model in benchmarks.
What such a file answers means nothing: never judge answers by it.

Weights are drawn straight as Q8_0 blocks (what many users run, and 0.6B parameters take seconds), the same bytes
for the same shape each time. `bench.synthetic_layers` has the layers. Three properties make the files useful:

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
import os
import string
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy.typing as npt
import platformdirs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from bench import sentencepiece
from bench.synthetic_layers import FLAT_LOGIT_STD, Shape, add_metadata, as_chain, model_tensors
from bench.synthetic_weights import Drawn, Tensors

RECIPE = 1
"""Counted up whenever the same shape would get other bytes, so that files in caches are not mistaken."""
SHOW_PROGRESS_FROM = 50_000_000

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


SHAPES = {
    "tiny": Shape("llama", 512, 3, 128, 256, 2, 1, 64, 4096),
    "tiny-swa": Shape("gemma3", 512, 6, 128, 128, 2, 1, 64, 4096, window=32),
    "tiny-lfm2": Shape("lfm2", 512, 4, 128, 256, 2, (0, 1, 0, 1), 64, 4096),
    "tiny-mamba": Shape("mamba", 512, 2, 128, 0, 0, 0, 0, 4096),
    "tiny-oss": Shape("gpt-oss", 512, 4, 128, 128, 2, 1, 64, 4096, window=32),
    "tiny-next": Shape("qwen3next", 512, 4, 128, 128, 2, (0, 1, 0, 1), 64, 4096),
    "tiny-qwen35": Shape("qwen35", 512, 4, 128, 256, 2, (0, 1, 0, 1), 64, 4096),
    "tiny-granite": Shape("granitehybrid", 512, 4, 128, 256, 2, (0, 1, 0, 1), 64, 4096),
    "tiny-mamba2": Shape("mamba2", 512, 4, 128, 0, 0, 0, 0, 4096),
    "tiny-rwkv7": Shape("rwkv7", 512, 4, 128, 256, 0, 0, 0, 4096),
    "tiny-mla": Shape("deepseek2", 512, 4, 128, 128, 2, 1, 64, 4096),
    "60m": Shape("qwen3", 151_936, 8, 320, 960, 8, 4, 64, 40_960, rope_base=1e6),
    "60m-swa": Shape("gemma3", 151_936, 12, 256, 1024, 4, 1, 64, 40_960, window=256),
    "60m-oss": Shape("gpt-oss", 151_936, 8, 192, 320, 4, 1, 64, 40_960, window=128),
    "60m-lfm2": Shape("lfm2", 151_936, 10, 320, 960, 5, (0, 0, 1) * 3 + (0,), 64, 40_960, rope_base=1e6),
    "60m-granite": Shape("granitehybrid", 151_936, 8, 320, 640, 4, (0, 0, 0, 2) * 2, 64, 40_960),
    "60m-next": Shape("qwen3next", 151_936, 8, 256, 256, 4, (0, 1) * 4, 64, 40_960),
    "60m-qwen35": Shape("qwen35", 151_936, 8, 320, 960, 4, (0, 1) * 4, 64, 40_960),
    "60m-mamba2": Shape("mamba2", 151_936, 12, 320, 0, 0, 0, 0, 40_960),
    "60m-rwkv7": Shape("rwkv7", 151_936, 8, 192, 768, 0, 0, 0, 40_960),
    "60m-mla": Shape("deepseek2", 151_936, 8, 320, 320, 4, 1, 64, 40_960),
    "qwen3-0.6b": Shape("qwen3", 151_936, 28, 1024, 3072, 16, 8, 128, 40_960, rope_base=1e6),
    "qwen3-8b": Shape("qwen3", 151_936, 36, 4096, 12_288, 32, 8, 128, 40_960, rope_base=1e6),
}


SENTENCEPIECE = {"tiny-sentencepiece": Shape("llama", sentencepiece.SIZE, 3, 128, 256, 2, 1, 64, 32_768)}
"""Shapes with the vocabulary of `bench.sentencepiece` and without a chat template."""

BORROWING = {
    "tiny-qwen2": Shape("llama", 151_936, 3, 128, 256, 2, 1, 64, 4096),
    "60m-qwen3": SHAPES["60m"],
    "0.6b-qwen3": SHAPES["qwen3-0.6b"],
}
"""Shapes that get the tokenizer of another file."""

_QWEN3_TOKENS = {
    151_657: "<tool_call>",
    151_658: "</tool_call>",
    151_665: "<tool_response>",
    151_666: "</tool_response>",
    151_667: "<think>",
    151_668: "</think>",
}
ADDED_TOKENS = {"60m-qwen3": _QWEN3_TOKENS, "0.6b-qwen3": _QWEN3_TOKENS}
"""Tokens that a shape has in place of the unused ones of its tokenizer: what Qwen3 has more than Qwen2."""


AddTokenizer: TypeAlias = Callable[[gguf.GGUFWriter], None]


def ensure(
    shape: str,
    *,
    folder: Path | None = None,
    vocabulary: Path | None = None,
    is_exact: bool = False,
    is_chain: bool = False,
) -> Path:
    """The GGUF file of a shape, written to `folder` (default: the user's cache) unless it is there.

    The shape is one of `SHAPES` or `SENTENCEPIECE`. One in `BORROWING` gets its tokenizer from the GGUF
    `vocabulary`, which has as many tokens as the shape. An exact file has the same weights as float32, for tests
    that compare logits: with quantized weights llama.cpp also rounds the activations, the largest error of all.
    In a chain each word is followed by the next one of the vocabulary (`as_chain`), so that a text can be chosen
    whose continuation is known. Only for shapes without experts, windows, and states alone.
    """
    folder = folder or platformdirs.user_cache_path("llamaslot") / "models"
    dimensions = (SHAPES | SENTENCEPIECE)[shape] if vocabulary is None else BORROWING[shape]
    recipe = (RECIPE, astuple(dimensions), *("f32",) * is_exact, *("chain",) * is_chain)
    recipe += (sentencepiece.pieces(),) if shape in SENTENCEPIECE else ()
    mark = hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
    path = folder / f"{shape}{'-chain' * is_chain}-{mark}.gguf"
    tokenizer = _tokenizer(shape, vocabulary)
    if shape in SENTENCEPIECE:
        tensors = model_tensors(dimensions, sentencepiece.N_QUIET, FLAT_LOGIT_STD)
    else:
        tensors = model_tensors(dimensions, len(quiet_tokens()))
    if is_chain:
        tensors = as_chain(tensors, dimensions)
    if is_exact:
        tensors = {name: replace(t, is_exact=True) if isinstance(t, Drawn) else t for name, t in tensors.items()}
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
    return sum(
        t.rows * t.columns if isinstance(t, Drawn) else t.size for t in model_tensors(SHAPES[shape], 0).values()
    )


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
    is_exact = any(isinstance(tensor, Drawn) and tensor.is_exact for tensor in tensors.values())
    kind = gguf.LlamaFileType.ALL_F32 if is_exact else gguf.LlamaFileType.MOSTLY_Q8_0
    add_metadata(writer, title, shape, kind)
    tokenizer(writer)
    for tensor_name, tensor in tensors.items():
        if isinstance(tensor, Drawn):
            tensor.add_info(writer, tensor_name)
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
        if isinstance(tensor, Drawn):
            return tensor.data(f"{name} {tensor.drawn_as or tensor_name}")
        return tensor

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


def _tokenizer(shape: str, vocabulary: Path | None) -> AddTokenizer:
    if vocabulary is not None:
        return partial(_copy_tokenizer, vocabulary, ADDED_TOKENS.get(shape, {}))
    if shape in SENTENCEPIECE:
        return partial(sentencepiece.add_vocabulary, pieces=sentencepiece.pieces())
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
