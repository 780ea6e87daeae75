"""Files that flags name, which are not trusted: keys, certificates and templates, and checks of model files.

Only regular files are read: a pipe may never end.

A model file is downloaded and not trusted, nor is a LoRA adapter or a projector. llama.cpp reads what its metadata
announces into memory, several times larger than in the file, and a sparse file can announce what no disk would
hold; so the metadata is bounded first. Models that cannot be served are refused by their metadata too, before their
weights are read.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from llamaslot.base.errors import ConfigError

MAX_METADATA_BYTES = 2**27
"""Most bytes before the weights, mainly the vocabulary; known models have up to 20 MiB."""
MAX_KEYS = 2**14
MAX_TENSORS = 2**17
MAX_KEY_BYTES = 2**16 - 1
MAX_STRING_BYTES = 2**26
"""Most bytes of a string; some files contain the tokenizer's whole JSON (20 MiB)."""
MAX_TEMPLATE_BYTES = 2**20
"""Known chat templates have up to 100 KiB."""
MAX_ARRAY_ITEMS = 2**24
MAX_TOKENS = 2**22
MAX_TENSOR_NAME_BYTES = 63
MAX_DIMENSIONS = 4

MetadataValue: TypeAlias = int | float | bool | str
"""A value that overrides one of a model file's metadata."""
_NO_OVERRIDES: Mapping[str, MetadataValue] = MappingProxyType({})
_TOKENS_KEY = "tokenizer.ggml.tokens"
_TYPES_KEY, _BYTE_TOKEN = "tokenizer.ggml.token_type", 6
_TOKENIZER_KEY, _WORD_PIECES = "tokenizer.ggml.model", "bert"
_READ_BYTES = 2**22
_MAX_SHOWN_BYTES = 100
"""Bytes of a token in an error message."""
_VERSIONS = (2, 3)
"""Versions of the format that llama.cpp reads."""
_INT32, _STRING, _ARRAY = 5, 8, 9
_VALUES = {
    kind: struct.Struct(f"<{form}") for kind, form in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
"""Forms of values by their type; strings and arrays have a length of their own."""
_MOST_LAYERS, _MOST_EXPERTS = 512, 1024
"""Those for which llama.cpp has room; it aborts beyond them."""
_MAX_LAYERS = 2**16
"""Most items that are read of an array with a number for each layer."""
_KEPT = (
    *("attention.causal", "block_count", "nextn_predict_layers"),
    *("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count"),
    *("general.alignment", "clip.has_vision_encoder"),
)
"""Keys whose numbers are checked, without the architecture's name."""
_ARCHITECTURE = "general.architecture"
_TEXTS = (
    *(_ARCHITECTURE, _TOKENIZER_KEY, "general.type", "adapter.type"),
    *("adapter.lora.task_name", "adapter.lora.prompt_prefix", "clip.projector_type", "clip.vision.projector_type"),
)
"""Keys whose texts are kept."""
_ALPHA = "adapter.lora.alpha"
_FLOAT = 6
"""Type of a value that is a 32-bit float."""
_ADAPTER_TYPES = (0, 1, 8, 30)
"""Types of an adapter's tensors: F32, F16, Q8_0 and BF16, which llama.cpp's converter writes."""
_NVFP4 = 40
"""A type of tensors to which llama.cpp cannot apply adapters."""
_LORA_A, _LORA_B = ".lora_a", ".lora_b"
_EMBEDDING_TENSOR, _OUTPUT_TENSOR = "token_embd.weight", "output.weight"
_ALIGNMENT = 32
"""Bytes to whose multiples tensors are aligned, unless a file has another number."""
_HEADER = struct.Struct("<4sIQQ")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

_DIFFUSION = "is a diffusion model ({}); only models that generate token by token are served"
_ENCODER_DECODER = "is an encoder-decoder model ({}); only models with a decoder alone are served"
_DRAFT = "is a draft model ({}), which needs another model; only models that generate text alone are served"
_NO_TEXT = "is {} ({{}}); only models that generate text are served"
_ONLY_EMBEDS = "generates no text: start the server with --embeddings, or for its scores with --reranking"
ENCODERS = frozenset({
    *("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert"),
    *("neo-bert", "nomic-bert", "nomic-bert-moe"),
})  # fmt: skip
"""Architectures in which all tokens of a step attend to each other, and to none of earlier steps (fact 40)."""
_NOT_SERVED = {
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    **dict.fromkeys(("dflash", "eagle3", "gemma4-assistant"), _DRAFT),
    **dict.fromkeys(("pockettts", "wavtokenizer-dec"), _NO_TEXT.format("an audio model")),
    "clip": _NO_TEXT.format("a projector for images or audio"),
    "t5": _ENCODER_DECODER,
    "t5encoder": _NO_TEXT.format("an encoder"),
}
"""Reasons by architecture; `{}` stands for its name."""
_PROJECTORS_NOT_SERVED = {
    "deepseek4v": "how many tokens an image has depends on its place in the prompt",
    "hunyuanvl": "positions within an image depend on how many images precede it",
}
"""Reasons by type (fact 45)."""
_ROPE_SCALING = ("none", "linear", "yarn", "longrope")
"""At any other type llama.cpp aborts (fact 39)."""
_WITHOUT_EXPERTS = ("hunyuan-dense", "hunyuan_vl")
"""Architectures for which llama.cpp treats a single expert as none."""
MAX_BYTES = 16 * 2**20
"""Largest file that is not a model."""


def check_file(path: Path) -> None:
    """Raise `ConfigError` unless a path leads to a readable GGUF file."""
    with _opened(path) as file:
        if _read(file, 4, path) != b"GGUF":
            raise ConfigError(f"{path} is not a GGUF file", param="--model")


def check_metadata(
    path: Path, overrides: Mapping[str, MetadataValue] = _NO_OVERRIDES, *, embeds: bool = False
) -> None:
    """Raise `ConfigError` if one of a model's files is not a GGUF file, or its metadata exceeds a limit.

    `overrides` are in place of the file's own values (`--override-kv`); with `embeds` the model is not to generate
    text. Time and memory are bounded. A version of the format that llama.cpp refuses is not checked here.
    """
    for part in parts(path):
        check_file(part)
        with _opened(part) as file:
            _Metadata(file, part, overrides, embeds=embeds).check()


def has_tensor(path: Path, prefix: str, overrides: Mapping[str, MetadataValue] = _NO_OVERRIDES) -> bool:
    """Return True if files of a model that embeds have a tensor whose name begins with a prefix.

    Raises as `check_metadata`.
    """
    for part in parts(path):
        with _opened(part) as file:
            metadata = _Metadata(file, part, overrides, embeds=True)
            metadata.check()
            if any(name.startswith(prefix) for name in metadata.tensors):
                return True
    return False


def read_adapter(path: Path, model: Path) -> Mapping[str, str]:
    """Return texts of a LoRA adapter's metadata by key; raises `ConfigError` if it cannot be applied to a model.

    llama.cpp refuses tensors that the model does not have, and compares their first two dimensions. For most of
    what is checked here it would abort, at once or when it computes (fact 42).
    """
    flag = "--lora"
    if not path.exists():
        raise ConfigError(f"{flag}: there is no file {path}", param=flag)
    try:
        adapter, *of_model = map(_read_metadata, (path, *parts(model)))
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error.message}", param=flag) from None
    architecture = of_model[0].texts.get(_ARCHITECTURE, "")
    tensors = {name: tensor for part in of_model for name, tensor in part.tensors.items()}
    if reason := _why_no_adapter(adapter, architecture) or _why_unfitting(adapter.tensors, tensors):
        raise ConfigError(f"{flag}: {path} {reason}", param=flag)
    return adapter.texts


def read_projector(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a projector of images by name; raises `ConfigError` if it is none, or not supported."""
    flag = "--mmproj"
    if not path.exists():
        raise ConfigError(f"{flag}: there is no file {path}", param=flag)
    try:
        found = _read_metadata(path)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error.message}", param=flag) from None
    kind = found.texts.get("clip.projector_type") or found.texts.get("clip.vision.projector_type", "")
    reason = ""
    if found.texts.get(_ARCHITECTURE) != "clip":
        reason = "is not a projector (mmproj file)"
    elif not found.number("clip.has_vision_encoder"):
        reason = "is not for images, but for audio, which is not supported"
    elif kind in _PROJECTORS_NOT_SERVED:
        reason = f"is of a kind that is not supported ({kind}): {_PROJECTORS_NOT_SERVED[kind]}"
    if reason:
        raise ConfigError(f"{flag}: {path} {reason}", param=flag)
    return found.tensors


def _why_no_adapter(adapter: _Metadata, architecture: str) -> str:
    """Return why a file is no adapter for models of an architecture; empty if it is one."""
    kind, own = adapter.texts.get("adapter.type"), adapter.texts.get(_ARCHITECTURE)
    if adapter.texts.get("general.type") != "adapter" or kind != "lora":
        return "is not a LoRA adapter"
    if own != architecture:
        return f"is an adapter for models of the architecture {own}, not {architecture}"
    return "" if adapter.kinds.get(_ALPHA, _FLOAT) == _FLOAT else f"is damaged or hostile: {_ALPHA} is not a float"


def _why_unfitting(adapter: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> str:
    """Return why an adapter's tensors do not fit those of a model; empty if they do, or if llama.cpp says it."""
    for name in adapter:
        stem = name.removesuffix(_LORA_A).removesuffix(_LORA_B)
        if _LORA_A in stem or _LORA_B in stem:
            # llama.cpp removes each of them, and so takes the tensor for another one's.
            return f"is damaged or hostile: the name {name}"
    for name, tensor in model.items():
        a, b = adapter.get(name + _LORA_A), adapter.get(name + _LORA_B)
        if a is None or b is None:
            continue
        if not {a.kind, b.kind} <= {*_ADAPTER_TYPES}:
            return f"has tensors of another type than F32, F16, BF16 and Q8_0, such as {name}{_LORA_A}"
        if tensor.kind == _NVFP4:
            return f"cannot be applied to {name}, which has the type NVFP4"
        if name == _EMBEDDING_TENSOR and _OUTPUT_TENSOR not in model:
            return f"changes {name}, which is the output matrix too: llama.cpp cannot apply it"
        # That of the embedding is transposed.
        n_rank = a.shape[name != _EMBEDDING_TENSOR]
        is_whole = n_rank == b.shape[0] and 0 < n_rank <= max(tensor.shape)
        if not is_whole or not a.shape[2:] == tensor.shape[2:] == b.shape[2:]:
            return f"has another shape than the model's {name}"
    return ""


def _read_metadata(path: Path) -> _Metadata:
    """Return the metadata of a file, within its bounds; raises `ConfigError`."""
    check_file(path)
    with _opened(path) as file:
        metadata = _Metadata(file, path, _NO_OVERRIDES, embeds=False)
        metadata.read()
    return metadata


def why_not_served(architecture: str, *, is_causal: bool = True, embeds: bool = False) -> str:
    """Return why models of an architecture are not served; empty if they are.

    Without causal attention each token sees those after it too, so KV of a prefix is not that of a longer prompt:
    such a model can compute the vector of a whole text, but generates none.
    """
    if reason := _NOT_SERVED.get(architecture, "").format(architecture):
        return reason
    if architecture in ENCODERS and not embeds:
        return f"is an embedding model ({architecture}), which {_ONLY_EMBEDS}"
    return "" if is_causal or embeds else f"has no causal attention, so it {_ONLY_EMBEDS}"


def parts(path: Path) -> list[Path]:
    """Return all files of a model, given the first; llama.cpp finds the others by their names."""
    found = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if found is None or not int(found[2]):
        return [path]
    name, n_parts = found[1], int(found[2])
    return [path.with_name(f"{name}-{i:05}-of-{n_parts:05}.gguf") for i in range(1, n_parts + 1)]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file."""

    shape: tuple[int, ...]
    """`MAX_DIMENSIONS` numbers; those after its own dimensions are 1."""
    kind: int
    start: int
    """Bytes of the file before its data."""


class _Metadata:
    """Incremental reader of a GGUF file's header, metadata and tensor list, which precede the weights."""

    def __init__(
        self, file: BufferedReader, path: Path, overrides: Mapping[str, MetadataValue], *, embeds: bool
    ) -> None:
        self._file = file
        self._path = path
        self._overrides = overrides
        self._embeds = embeds
        self._data = b""
        """Bytes around the current position `_at`: older ones are discarded."""
        self._at = 0
        self._n_passed = 0
        """Bytes of the file before `_data`."""
        self._has_byte_tokens = False
        self.texts: dict[str, str] = {}
        """Those of `_TEXTS`."""
        self.kinds: dict[str, int] = {}
        """Types of values by key."""
        self._numbers: dict[str, int] = {}
        """Integers and booleans by key; of a list of them by layer, the largest."""
        self.tensors: dict[str, Tensor] = {}

    def read(self) -> bool:
        """Read it; returns False for another version of the format. Raises `ConfigError` if it is out of bounds."""
        self._need(_HEADER.size)
        _, version, n_tensors, n_keys = _HEADER.unpack_from(self._data)
        if version not in _VERSIONS:
            return False
        self._at = _HEADER.size
        self._bound(n_tensors, MAX_TENSORS, "tensors")
        self._bound(n_keys, MAX_KEYS, "metadata keys")
        for _ in range(n_keys):
            self._pass_value(self._text(MAX_KEY_BYTES, "bytes in a metadata key"))
        for _ in range(n_tensors):
            name = self._text(MAX_TENSOR_NAME_BYTES, "bytes in a tensor's name")
            n_dimensions = self._number(_U32)
            self._bound(n_dimensions, MAX_DIMENSIONS, f"dimensions in tensor {name}")
            shape = [self._number(_U64) for _ in range(n_dimensions)]
            more = [1] * (MAX_DIMENSIONS - n_dimensions)
            self.tensors[name] = Tensor((*shape, *more), self._number(_U32), self._number(_U64))
        alignment = self.number("general.alignment") or _ALIGNMENT
        first = -(-(self._n_passed + self._at) // alignment) * alignment
        self.tensors = {name: replace(each, start=first + each.start) for name, each in self.tensors.items()}
        return True

    def number(self, key: str) -> int:
        """Return a number; 0 if it is missing."""
        return self._numbers.get(key, 0)

    def check(self) -> None:
        """Read a model's, and raise `ConfigError` for what is out of bounds, or cannot be served."""
        if not self.read():
            return
        self._numbers |= {key: int(value) for key, value in self._overrides.items() if isinstance(value, int)}
        is_causal = self._model_number("attention.causal", 1) != 0
        if reason := why_not_served(self._architecture, is_causal=is_causal, embeds=self._embeds):
            raise ConfigError(f"{self._path} {reason}", param="--model")
        if self._has_byte_tokens and self.texts.get(_TOKENIZER_KEY) == _WORD_PIECES:
            # At which llama.cpp would abort (fact 40).
            raise self._error("its vocabulary of word pieces has tokens of bytes")
        self._check_layers()
        scaling = self._overrides.get(f"{self._architecture}.rope.scaling.type", _ROPE_SCALING[0])
        if scaling not in _ROPE_SCALING:
            raise self._override_error(f"'{scaling}' is no type of RoPE scaling; use {', '.join(_ROPE_SCALING)}")

    def _pass_value(self, key: str) -> None:
        self.kinds[key] = kind = self._number(_U32)
        limit = MAX_TEMPLATE_BYTES if key.startswith("tokenizer.chat_template") else MAX_STRING_BYTES
        if kind == _STRING and key in _TEXTS:
            self.texts[key] = self._text(MAX_KEY_BYTES, f"bytes in {key}")
        elif kind == _STRING:
            self._skip_strings(1, key, limit)
        elif kind == _ARRAY:
            item = self._number(_U32)
            n_items = self._number(_U64)
            self._bound(n_items, MAX_TOKENS if key == _TOKENS_KEY else MAX_ARRAY_ITEMS, f"items in {key}")
            if item == _STRING and key == _TOKENS_KEY:
                tokens: list[bytes] = []
                self._skip_strings(n_items, key, limit, tokens)
                self._check_tokens(tokens)
            elif item == _STRING:
                self._skip_strings(n_items, key, limit)
            elif item == _INT32 and key == _TYPES_KEY:
                self._bound(n_items, MAX_TOKENS, f"items in {key}")
                self._need(4 * n_items)
                types = memoryview(self._data)[self._at : self._at + 4 * n_items].cast("i")
                self._has_byte_tokens = _BYTE_TOKEN in types
                self._skip(4 * n_items)
            elif key.endswith(".expert_used_count") and n_items <= _MAX_LAYERS:
                self._numbers[key] = max((self._value(item, key) for _ in range(n_items)), default=0)
            else:
                self._skip(n_items * self._form_of(item, key).size)
        else:
            value = self._value(kind, key)
            if key.endswith(_KEPT):
                self._numbers[key] = value

    def _skip_strings(self, count: int, key: str, limit: int, kept: list[bytes] | None = None) -> None:
        """Skip strings; append them to `kept`, if given."""
        # There are hundreds of thousands in a vocabulary.
        unpack, at, data = _U64.unpack_from, self._at, self._data
        for _ in range(count):
            if at + 8 > len(data):
                self._at = at
                self._need(8)
                at, data = self._at, self._data
            (n_bytes,) = unpack(data, at)
            if n_bytes > limit:
                self._bound(n_bytes, limit, f"bytes in {key}")
            at += 8 + n_bytes
            if at > len(data):
                self._at = at - n_bytes
                if kept is not None:
                    self._need(n_bytes)
                self._skip(n_bytes)
                at, data = self._at, self._data
            if kept is not None:
                kept.append(data[at - n_bytes : at])
        self._at = at

    def _check_tokens(self, tokens: list[bytes]) -> None:
        """Refuse duplicate tokens, at which llama.cpp would abort (fact 29)."""
        known = set(tokens)
        if len(known) == len(tokens) and b"" not in known and b"\0" not in b"".join(tokens):
            return
        ids: dict[bytes, int] = {}
        for token, text in enumerate(tokens):
            # As llama.cpp reads it.
            read = text.partition(b"\0")[0] or b"[EMPTY_%d]" % token
            if (first := ids.setdefault(read, token)) != token:
                shown = _printable(read[:_MAX_SHOWN_BYTES])
                raise self._error(f"its tokens {first} and {token} are the same: {shown}")

    def _check_layers(self) -> None:
        """Refuse numbers of layers and experts at which llama.cpp would abort (fact 31)."""
        n_layers, n_nextn = self._model_number("block_count", 1), self._model_number("nextn_predict_layers")
        n_experts, n_used = self._model_number("expert_count"), self._model_number("expert_used_count")
        n_groups, n_used_groups = (self._model_number(f"expert_group_{name}") for name in ("count", "used_count"))
        if n_experts <= 1 and self._architecture in _WITHOUT_EXPERTS:
            n_experts = n_used = 0
        for key, number, other, is_right in (
            ("block_count", n_layers, "", 0 < n_layers <= _MOST_LAYERS),
            ("expert_count", n_experts, "", n_experts <= _MOST_EXPERTS),
            ("nextn_predict_layers", n_nextn, "block_count", n_nextn <= n_layers),
            ("expert_used_count", n_used, "expert_count", bool(n_experts) <= n_used <= n_experts),
            ("expert_group_count", n_groups, "expert_count", n_groups < max(n_experts, 1)),
            ("expert_group_count", n_groups, "expert_count", n_groups <= 1 or n_experts % n_groups == 0),
            (
                "expert_group_used_count",
                n_used_groups,
                "expert_group_count",
                n_groups <= 1 or 0 < n_used_groups < n_groups,
            ),
        ):
            if not is_right:
                name, other_name = f"{self._architecture}.{key}", f"{self._architecture}.{other}"
                beside = f" with {other_name} {self._model_number(other)}" if other else ""
                if name in self._overrides or other_name in self._overrides:
                    raise self._override_error(f"llama.cpp cannot load {name} {number}{beside}")
                raise self._error(f"its key {name} is {number}{beside}")

    @property
    def _architecture(self) -> str:
        return self.texts.get(_ARCHITECTURE, "")

    def _model_number(self, key: str, default: int = 0) -> int:
        return self._numbers.get(f"{self._architecture}.{key}", default)

    def _value(self, kind: int, key: str) -> int:
        """Read a value; returns 0 for one that is not an integer."""
        form = self._form_of(kind, key)
        self._need(form.size)
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return int(value) if isinstance(value, int) else 0

    def _form_of(self, kind: int, key: str) -> struct.Struct:
        """Return the form of a value; an array in an array has none, and llama.cpp reads none either."""
        if kind not in _VALUES:
            raise self._error(f"its key {key} has a type that is not supported ({kind})")
        return _VALUES[kind]

    def _text(self, limit: int, what: str) -> str:
        n_bytes = self._number(_U64)
        self._bound(n_bytes, limit, what)
        self._need(n_bytes)
        raw = self._data[self._at : self._at + n_bytes]
        self._at += n_bytes
        return _printable(raw)

    def _number(self, form: struct.Struct) -> int:
        self._need(form.size)
        (number,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return int(number)

    def _skip(self, n_bytes: int) -> None:
        while (n_here := len(self._data) - self._at) < n_bytes:
            n_bytes -= n_here
            self._at += n_here
            self._need(1)
        self._at += n_bytes

    def _need(self, n_bytes: int) -> None:
        """Read until `n_bytes` unread bytes are buffered."""
        n_here = len(self._data) - self._at
        if n_here >= n_bytes:
            return
        self._n_passed += self._at
        if self._n_passed + n_bytes > MAX_METADATA_BYTES:
            raise self._error(f"its metadata is longer than {MAX_METADATA_BYTES >> 20} MiB")
        more = _read(self._file, max(n_bytes - n_here, _READ_BYTES), self._path)
        self._data = self._data[self._at :] + more
        self._at = 0
        if len(self._data) < n_bytes:
            raise self._error("it ends within its metadata")

    def _bound(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise self._error(f"it has {count:,} {what[:200]}, and at most {most:,} are accepted")

    def _override_error(self, reason: str) -> ConfigError:
        return ConfigError(f"--override-kv: {reason}", param="--override-kv")

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._path} is damaged or hostile: {reason}", param="--model")


def _printable(raw: bytes) -> str:
    """Return a text that can be shown in an error message."""
    text = raw.decode(errors="replace")
    return text if text.isprintable() else ascii(text)


def _opened(path: Path) -> BufferedReader:
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no model file {path}", param="--model") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="--model") from None


def _read(file: BufferedReader, n_bytes: int, path: Path) -> bytes:
    try:
        return file.read(n_bytes)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="--model") from None


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read it, without waiting for the writer of a pipe; raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    error = IsADirectoryError if stat.S_ISDIR(mode) else OSError
    raise error(None, "Is a directory" if stat.S_ISDIR(mode) else "it is not a regular file", str(path))


def read_named(path: Path, flag: str) -> bytes:
    """Return the content of a file that a flag names; raises `ConfigError`."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {reason} ({flag})", param=flag) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"cannot read {path}: it has more than {MAX_BYTES // 2**20} MiB ({flag})", param=flag)
    return data


def read_named_text(path: Path, flag: str) -> str:
    """Return the text of a file that a flag names; raises `ConfigError`."""
    try:
        return read_named(path, flag).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text ({flag})", param=flag) from None
