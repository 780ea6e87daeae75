"""Encoders as GGUF files: tiny ones with random weights, and any BERT from its own tensors."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from bench import sentencepiece
from llamaslot.base.model import Pooling

Tensors = Mapping[str, npt.NDArray[np.float32]]
AddTokenizer = Callable[[gguf.GGUFWriter], None]

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    "ship", "sea", "the", "whale", "captain", "is", "where", "believe", "meaning", "of", "life", "this", "test",
    "hello",
)  # fmt: skip
TINY_TOKENS = (
    *SPECIALS,
    *dict.fromkeys(f"\u2581{each}" for each in (*string.ascii_lowercase, *string.digits, *".,?!:", *WORDS)),
    *string.ascii_lowercase,
    *string.digits,
)
"""A token for each letter, as the first one of a word and as another one; no text of letters and digits has UNK."""
TINY_CONTEXT = 128
"""Positions of the tiny model."""
_POOLINGS = {
    "none": gguf.PoolingType.NONE,
    "mean": gguf.PoolingType.MEAN,
    "cls": gguf.PoolingType.CLS,
    "last": gguf.PoolingType.LAST,
    "rank": gguf.PoolingType.RANK,
}


def tiny_bert(path: Path, pooling: Pooling = "mean", *, head: str = "", n_positions: int = TINY_CONTEXT) -> Path:
    """Write a BERT of two layers, with heads `cls` and `cls.output` of two labels if `head` names them."""
    special_ids = {"unk": UNK, "bos": CLS, "sep": SEP, "pad": PAD, "mask": MASK}
    add_tokenizer = word_pieces(TINY_TOKENS, special_ids, n_controls=len(SPECIALS))
    labels = ("yes", "no") if "cls.output" in head.split() else ()
    tensors = _drawn_tensors(len(TINY_TOKENS), n_positions, head)
    return write_bert(path, tensors, add_tokenizer, n_head=4, pooling=pooling, labels=labels)


def tiny_reranker(path: Path, words: Sequence[str], *, n_positions: int) -> Path:
    """Write a BERT that scores documents, with a SentencePiece vocabulary that has a separator.

    As Jina's rerankers it puts a BOS before and an EOS behind a text, and an EOS and a SEP between two.
    """
    pieces = sentencepiece.pieces_of(words)
    sep = len(pieces)
    pieces.append(sentencepiece.Piece("<sep>", 0.0, gguf.TokenType.CONTROL))

    def add_tokenizer(writer: gguf.GGUFWriter) -> None:
        sentencepiece.add_vocabulary(writer, pieces, adds_eos=True)
        writer.add_sep_token_id(sep)
        writer.add_add_sep_token(True)

    tensors = _drawn_tensors(len(pieces), n_positions, "cls cls.output")
    return write_bert(path, tensors, add_tokenizer, n_head=4, pooling="rank", labels=("yes", "no"))


def _drawn_tensors(n_tokens: int, n_positions: int, head: str) -> Tensors:
    """Return random weights of a BERT of two layers."""
    chance = np.random.default_rng(11)
    width, n_ff, n_layers = 64, 96, 2

    def drawn(*shape: int) -> npt.NDArray[np.float32]:
        return chance.normal(0, 0.4 / np.sqrt(shape[-1] / 16), shape).astype(np.float32)

    tensors: dict[str, npt.NDArray[np.float32]] = {
        "token_embd.weight": drawn(n_tokens, width),
        "token_types.weight": drawn(2, width),
        "position_embd.weight": drawn(n_positions, width),
    }
    layer = {"attn_output_norm": (width,), "layer_output_norm": (width,), "ffn_up": (n_ff, width)}
    layer |= {f"attn_{name}": (width, width) for name in ("q", "k", "v", "output")} | {"ffn_down": (width, n_ff)}
    shapes = {"token_embd_norm": (width,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(n_layers) for name, shape in layer.items()}
    if "cls" in head.split():
        shapes["cls"] = (width, width)
    if "cls.output" in head.split():
        shapes["cls.output"] = (2, width)
    for name, shape in shapes.items():
        is_norm = name.endswith("norm")
        tensors[f"{name}.weight"] = np.ones(shape, np.float32) if is_norm else drawn(*shape)
        tensors[f"{name}.bias"] = drawn(1, shape[0])[0] * np.float32(0.1)
    return tensors


def word_pieces(tokens: Sequence[str], special_ids: Mapping[str, int], n_controls: int = 0) -> AddTokenizer:
    """Return a vocabulary of word pieces, in which words begin with U+2581 and parts of words do not.

    The special tokens, and the first `n_controls`, are control tokens.
    """
    controls = {*range(n_controls), *special_ids.values()}
    types = [gguf.TokenType.CONTROL if i in controls else gguf.TokenType.NORMAL for i in range(len(tokens))]

    def add_tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list(list(tokens))
        writer.add_token_types(types)
        for name, token in special_ids.items():
            add: Any = getattr(writer, f"add_{name}_token_id")
            add(token)

    return add_tokenizer


def write_bert(
    path: Path,
    tensors: Tensors,
    add_tokenizer: AddTokenizer,
    *,
    n_head: int,
    pooling: Pooling,
    labels: Sequence[str] = (),
) -> Path:
    """Write a model with a vocabulary."""
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(len(tensors["position_embd.weight"]))
    writer.add_embedding_length(tensors["token_embd.weight"].shape[1])
    writer.add_feed_forward_length(tensors["blk.0.ffn_up.weight"].shape[0])
    writer.add_block_count(sum(name.endswith("attn_q.weight") for name in tensors))
    writer.add_head_count(n_head)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(_POOLINGS[pooling])
    if labels:
        writer.add_array("bert.classifier.output_labels", list(labels))
    add_tokenizer(writer)
    writer.add_token_type_count(len(tensors["token_types.weight"]))
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
