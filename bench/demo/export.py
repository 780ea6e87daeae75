"""Writes a trained demo model as a GGUF file: `python -m bench.demo.export CHECKPOINT TOKENIZER OUTPUT`.

Matrices become F16 (as Q8_0 the model showed much more noise between chunks), norms and convolutions stay F32. The
rows of a llama's query and key matrices are reordered, because training splits a head in halves for RoPE where
llama.cpp's llama architecture pairs neighbours.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

from bench.demo.chat_template import CHAT_TEMPLATE
from bench.demo.corpus import IM_END
from bench.demo.model import Model, Shape
from bench.demo.tokenizer import END_OF_TEXT, SPECIALS
from bench.demo.weights import gguf_weights

NAMES = {
    "llama": "llamaslot demo",
    "lfm2": "llamaslot short convolutions",
    "gemma3": "llamaslot sliding windows",
}
DESCRIPTIONS = {
    "llama": "A tiny chat model that remembers facts, for trying and testing llamaslot.",
    "lfm2": "A tiny hybrid model that remembers facts, for testing llamaslot.",
    "gemma3": "A tiny model with sliding windows that remembers facts, for testing llamaslot.",
}
TEMPERATURE, MIN_P = 0.2, 0.1
"""Sampling that the file recommends: at llama-server's defaults (0.8, 0.05) 4 of 100 recalled names are wrong."""


def load(path: Path) -> Model:
    """The model of a training checkpoint, with its averaged weights."""
    stored = torch.load(path)
    model = Model(Shape(**stored["shape"]))
    model.load_state_dict(stored["weights"])
    return model


def tensors(model: Model) -> dict[str, np.ndarray]:
    """The weights under llama.cpp's names, in F32."""
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return gguf_weights(weights, model.shape.arch, model.shape.head_size)


def add_shape(writer: gguf.GGUFWriter, shape: Shape, file_type: gguf.LlamaFileType) -> None:
    writer.add_name(NAMES[shape.arch])
    writer.add_description(DESCRIPTIONS[shape.arch])
    writer.add_license("mit")
    writer.add_file_type(file_type)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    if shape.convolution:
        writer.add_shortconv_l_cache(shape.convolution)
        writer.add_head_count_kv([shape.kv_heads * shape.has_attention(layer) for layer in range(shape.layers)])
    else:
        writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_base)
    if shape.window:
        writer.add_rope_freq_base_swa(shape.rope_base)
        writer.add_sliding_window(shape.window)
        writer.add_sliding_window_pattern([shape.window_of(layer) > 0 for layer in range(shape.layers)])
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_sampling_temp(TEMPERATURE)
    writer.add_sampling_min_p(MIN_P)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    stored = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in stored["merges"]])
    writer.add_bos_token_id(tokenizer.token_to_id(END_OF_TEXT))
    writer.add_eos_token_id(tokenizer.token_to_id(IM_END))
    writer.add_pad_token_id(tokenizer.token_to_id(END_OF_TEXT))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def export(model: Model, tokenizer: Tokenizer, path: Path, matrix_type: str = "F16") -> None:
    """Writes the file beside its name first, so that no reader ever sees half of it."""
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, model.shape.arch)
    add_shape(writer, model.shape, gguf.LlamaFileType[f"MOSTLY_{matrix_type}"])
    add_tokenizer(writer, tokenizer)
    kind = gguf.GGMLQuantizationType[matrix_type]
    for name, values in tensors(model).items():
        if values.ndim == 1 or name.endswith("shortconv.conv.weight"):
            writer.add_tensor(name, values.astype(np.float32))
        else:
            data = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--type", choices=("Q8_0", "F16"), default="F16")
    arguments = parser.parse_args()
    export(
        load(arguments.checkpoint), Tokenizer.from_file(str(arguments.tokenizer)), arguments.output, arguments.type
    )
    print(f"{arguments.output}: {arguments.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
