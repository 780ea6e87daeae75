"""Values of the flags about the model's file and devices that have a form of their own, read and checked.

llama.cpp would ignore a wrong value or end the process, so each one is a `ConfigError` that names its flag.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from llamaslot.app.config import Config
from llamaslot.base.adapters import MAX_ADAPTERS, MAX_SCALE
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import MetadataValue, check_metadata, parts, read_adapter, read_projector

_MAX_TEXT_BYTES = 127
"""Most bytes of a key or text of `--override-kv`."""
_FIXED_KEYS = (
    "general.architecture",
    *(f".attention.{name}" for name in ("causal", "indexer.top_k", "key_length_mla")),
)
"""Ends of keys from which follows how KV is reused: they are read from the file."""
_MAX_LAYERS = 512
"""llama.cpp's LLAMA_MAX_LAYERS."""
_MAX_CPUS = 4096
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_DENSE = r"\.ffn_(up|down|gate)\."
"""Names of the tensors of `--cpu-moe` and `--n-cpu-ffn`, as in llama-server."""
_CPU = "CPU"
"""ggml's name for the memory of the host."""
_BOOLEANS = {"true": True, "false": False}
_REPO = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def check(config: Config) -> None:
    """Raise `ConfigError` for a value that cannot be read, or flags that exclude each other."""
    tensor_split(config)
    tensor_overrides(config)
    metadata_overrides(config)
    engine_cpus(config)
    adapters(config)
    check_hub_model(config)
    is_older = not config.mmap or config.mlock or config.direct_io
    if config.load_mode != "auto" and is_older:
        raise _error("--load-mode", "it replaces --mmap, --mlock and --direct-io; give only one of them")
    if config.direct_io and config.mlock:
        raise _error(
            "--direct-io", "what is locked in RAM is not read again; give --direct-io or --mlock, not both"
        )
    if config.split_mode == "tensor":
        raise _error("--split-mode", "'tensor', an experiment of llama.cpp, is not supported; use layer or row")
    if 0 < config.image_max_tokens < config.image_min_tokens:
        raise _error("--image-max-tokens", "it is less than --image-min-tokens")
    if config.mmproj and config.embeds:
        raise _error("--mmproj", "vectors and scores are of texts alone; remove it, or --embeddings or --reranking")
    if config.rope_scale is not None and config.rope_freq_scale is not None:
        raise _error("--rope-scale", "give --rope-scale or --rope-freq-scale, which is 1 / --rope-scale, not both")


def tensor_split(config: Config) -> tuple[float, ...]:
    """Return the share of each GPU; empty for llama.cpp's choice."""
    flag = "--tensor-split"
    try:
        shares = (
            tuple(float(each) for each in re.split("[,/]+", config.tensor_split)) if config.tensor_split else ()
        )
    except ValueError:
        raise _error(flag, f"'{config.tensor_split}' is not a list of numbers, such as 3,1") from None
    if not all(0 <= share < 1e9 for share in shares) or (shares and not any(shares)):
        raise _error(flag, f"'{config.tensor_split}' has no share above 0, or one below it")
    return shares


def tensor_overrides(config: Config) -> tuple[tuple[str, str], ...]:
    """Return pairs of a regular expression for names of tensors and the type of their memory, the first first."""
    found = []
    for each in (item for text in config.override_tensor for item in text.split(",")):
        pattern, _, kind = each.partition("=")
        try:
            re.compile(pattern)
        except re.error as error:
            raise _error("--override-tensor", f"'{pattern}' is no regular expression: {error}") from None
        if not pattern or not kind:
            raise _error("--override-tensor", f"'{each}' is not REGEX=TYPE, such as ffn_.*_exps=CPU")
        found.append((pattern, kind))
    if config.cpu_moe:
        found.append((_EXPERTS, _CPU))
    some = (config.n_cpu_moe, _EXPERTS), (config.n_cpu_ffn, _DENSE)
    return (*found, *((_of_layers(n, names), _CPU) for n, names in some if n))


def _of_layers(n: int, names: str) -> str:
    """Return an expression for the tensors of the first `n` layers; one, since each is compiled for each tensor."""
    return rf"blk\.({'|'.join(map(str, range(min(n, _MAX_LAYERS))))}){names}"


def metadata_overrides(config: Config) -> dict[str, MetadataValue]:
    """Return the values of `--override-kv` by key; the first one counts, as in llama-server."""
    found: dict[str, MetadataValue] = {}
    for text in config.override_kv:
        for item in _items(text, "--override-kv"):
            key, equals, typed = item.partition("=")
            kind, colon, value = typed.partition(":")
            if not equals or not colon:
                raise _error("--override-kv", f"'{item}' is not KEY=TYPE:VALUE, such as x.context_length=int:8192")
            if not 0 < len(os.fsencode(key)) <= _MAX_TEXT_BYTES:
                raise _error("--override-kv", f"'{key}' is not a key of 1 to {_MAX_TEXT_BYTES} bytes")
            if key.endswith(_FIXED_KEYS):
                raise _error("--override-kv", f"{key} cannot be changed")
            found.setdefault(key, _value(key, kind, value))
    return found


def _items(text: str, flag: str) -> Iterable[str]:
    """Return the items of a comma-separated list in which quotes may stand around an item."""
    try:
        return next(csv.reader([text], strict=True), [])
    except csv.Error:
        raise _error(flag, f"'{text}' has a quote that does not end") from None


def adapters(config: Config) -> tuple[tuple[Path, float], ...]:
    """Return the files of `--lora`, then those of `--lora-scaled`, each with its scale at start."""
    found = [(item, 1.0) for text in config.lora for item in _items(text, "--lora")]
    for item in (item for text in config.lora_scaled for item in _items(text, "--lora-scaled")):
        name, _, text = item.rpartition(":")
        scale = _number(text)
        if not name or scale is None or abs(scale) > MAX_SCALE:
            raise _error("--lora-scaled", f"'{item}' is not FILE:SCALE, such as adapter.gguf:0.5")
        found.append((name, scale))
    if len(found) > MAX_ADAPTERS:
        raise _error("--lora", f"{len(found)} adapters are more than {MAX_ADAPTERS}")
    is_applied = not config.lora_init_without_apply
    return tuple((Path(name).expanduser(), scale * is_applied) for name, scale in found)


def _value(key: str, kind: str, text: str) -> MetadataValue:
    match kind:
        case "int" if key.endswith(".context_length") and not 0 < _integer(text) < 2**31:
            raise _error("--override-kv", f"'{text}' for {key} is not a number of 1 to {2**31 - 1}")
        # llama.cpp cuts off the other bits.
        case "int" if -(2**31) <= _integer(text) < 2**32:
            return _integer(text)
        case "float" if key.endswith("epsilon") and not (_number(text) or 0.0) >= 0:
            raise _error("--override-kv", f"'{text}' for {key} is less than 0")
        case "float" if (number := _number(text)) is not None:
            return number
        case "bool" if text in _BOOLEANS:
            return _BOOLEANS[text]
        case "str" if len(os.fsencode(text)) <= _MAX_TEXT_BYTES and "\0" not in text:
            return text
        case "int" | "float" | "bool" | "str":
            limit = f" of at most {_MAX_TEXT_BYTES} bytes" if kind == "str" else ""
            raise _error("--override-kv", f"'{text}' is no value{limit} of type {kind} for {key}")
    raise _error("--override-kv", f"'{kind}' for {key} is not one of int, float, bool, str")


def _integer(text: str) -> int:
    """Return an integer; one that fits nowhere for what is none."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,19}", text) else 2**64


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def engine_cpus(config: Config) -> set[int]:
    """Return the CPUs of `--cpu-mask` and `--cpu-range`; empty without them."""
    cpus: set[int] = set()
    if config.cpu_mask:
        digits = config.cpu_mask.lower().removeprefix("0x")
        if not re.fullmatch(rf"[0-9a-f]{{1,{_MAX_CPUS // 4}}}", digits):
            raise _error("--cpu-mask", f"'{config.cpu_mask}' is not a hexadecimal number")
        mask = int(digits, 16)
        cpus = {cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1}
        if not cpus:
            raise _error("--cpu-mask", f"'{config.cpu_mask}' names no CPU")
    if config.cpu_range:
        found = re.fullmatch(r"(\d{0,4})-(\d{0,4})", config.cpu_range)
        low, high = (int(found[1] or 0), int(found[2] or _MAX_CPUS - 1)) if found else (1, 0)
        if low > high:
            raise _error("--cpu-range", f"'{config.cpu_range}' is not LO-HI, such as 0-3")
        cpus |= set(range(low, high + 1))
    return cpus


def check_hub_model(config: Config) -> None:
    """Raise `ConfigError` unless `--hf-repo` names a model, if it is given."""
    if not config.hf_repo:
        if config.hf_file:
            raise _error("--hf-file", "give its repository too, as --hf-repo OWNER/REPO")
        return
    if not _REPO.fullmatch(config.hf_repo):
        raise _error("--hf-repo", f"'{config.hf_repo}' is not OWNER/REPO or OWNER/REPO:QUANT")
    if config.model != Config().model:
        raise _error("--hf-repo", f"--model names another model, {config.model}; give only one of them")
    if config.hf_file and not config.hf_file.endswith(".gguf"):
        raise _error("--hf-file", f"'{config.hf_file}' is not a .gguf file")


def with_hub_model(
    config: Config, *, offline: bool, download: Callable[[str], None] = lambda _name: None
) -> Config:
    """Return the configuration with the model of `--hf-repo` as `--model`, and with its projector.

    Asks the hub unless `offline`, and calls `download` with the name of each file. Raises `ConfigError`.
    """
    # Imported only if needed: few servers need huggingface_hub.
    from llamaslot.app import hub  # noqa: PLC0415

    repo, _, quantization = config.hf_repo.partition(":")
    file = config.hf_file or hub.find_file(repo, quantization, offline=offline)
    for part in parts(Path(file)):
        download(f"{repo}:{part}")
    config = replace(config, model=f"{repo}:{file}")
    if not config.wants_mmproj:
        return config
    try:
        projector = hub.find_projector(repo, file, offline=offline)
        if projector:
            download(f"{repo}:{projector}")
    except ConfigError as error:
        # Without a network the model is served nevertheless.
        from llamaslot.app.logs import get_logger  # noqa: PLC0415 - main programs import it first

        advice = "--no-mmproj or --offline serves the model without asking"
        get_logger(__name__).warning("projector.not_found", reason=error.message, advice=advice)
        return config
    path = hub.cached(repo, projector) if projector else None
    return replace(config, mmproj=str(path)) if path is not None else config


def projector_file(config: Config) -> Path | None:
    """Return the file of the projector; None without one."""
    return Path(config.mmproj).expanduser() if config.mmproj else None


def check_files(config: Config, model: Path) -> None:
    """Raise `ConfigError` for a broken file of the model, its adapters or its projector, before it is loaded."""
    check_metadata(model, metadata_overrides(config), embeds=config.embeds)
    for adapter, _ in adapters(config):
        read_adapter(adapter, model)
    check_projector(config)


def check_projector(config: Config) -> None:
    """Raise `ConfigError` for a file of `--mmproj` that is no projector of images.

    One that was found is not checked: the server starts without it where it cannot be used.
    """
    path = projector_file(config)
    if path is not None and not config.has_found_mmproj:
        read_projector(path)


def _error(flag: str, message: str) -> ConfigError:
    return ConfigError(f"{flag}: {message}", param=flag)
