"""Configuration table of `llamaslot serve`: one field per option, with its flags, environment variable and help.

Options that llama-server also has keep its names and environment variables. `config_reader.py` builds the command
line from this table, and fills it with values.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from msgspec import Meta

from llamaslot.base.model import MAX_DRAFT

INT32_MAX = 2**31 - 1
ImageTokens = Annotated[int, Meta(ge=0, le=2**16)]  # llama.cpp counts their pixels with 32 bits.

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INT32_MAX)]
CountOrMinusOne = Annotated[int, Meta(ge=-1, le=INT32_MAX)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=0, le=100)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]
Scale = Annotated[float, Meta(ge=0.001, le=1000)]
YarnFactor = Annotated[float, Meta(ge=-1, le=1000)]
SWITCH = dict.fromkeys(("on", "enabled", "true", "1"), True) | dict.fromkeys(
    ("off", "disabled", "false", "0"), False
)
"""Words for on and off in variables and files, as in llama-server."""
_TRISTATE = {word: "on" if on else "off" for word, on in SWITCH.items()} | {"-1": "auto"}
"""llama-server's words for the values on, off and auto."""

_NGRAM_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""llama-server's types of speculation without a second model."""
_LOAD_MODES = {(True, True): "mmap+mlock", (False, False): "none", (False, True): "mlock"}
"""Values of `--load-mode` by `--mmap` and `--mlock`."""
AUTO_WARM_AHEAD = 50_000
"""Tokens an hour of `--warm-ahead auto`."""
_ELSE = "default for requests; if unset,"
_OWN_ELSE = f"{_ELSE} the model file's value, otherwise"

_T = TypeVar("_T")


def llama(
    default: _T,
    text: str,
    flags: str = "",
    *,
    env: str = "LLAMA_ARG_{}",
    words: Mapping[str, Any] = MappingProxyType({}),
    negatives: str = "",
) -> _T:
    """Describe an option that llama-server also has, by its default and help text.

    An option `ctx_size` has the flag `--ctx-size` and the environment variable `LLAMA_ARG_CTX_SIZE` by default.
    `flags` lists other flags, separated by spaces, and `env` is another variable. `words` maps words to the values
    that they stand for, and `negatives` lists flags that turn a switch off, besides `--no-...`.
    """
    meta = {"text": text, "flags": flags, "env": env, "words": words, "negatives": negatives}
    return field(default=default, metadata=meta)


own = partial(llama, env="LLAMASLOT_{}")
"""An option that llama-server does not have."""


Values: TypeAlias = dict[str, tuple[str, Any]]
"""Values of options by their names, each with its source, such as the flag."""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table."""

    name: str
    kind: Any
    flags: list[str]
    env: str
    default: Any
    text: str
    words: Mapping[str, Any]
    """Words that stand for values."""
    negatives: list[str]
    """Flags that turn a switch off."""

    @property
    def flag(self) -> str:
        """The long flag, which messages use to name the option."""
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def is_bool(self) -> bool:
        """True for a switch without a value."""
        return self.types[0] is bool

    @property
    def is_list(self) -> bool:
        """True for an option that may be given several times."""
        return get_origin(self.kind) is tuple

    @property
    def types(self) -> tuple[Any, ...]:
        """The types of the option's values; several if both words and numbers are allowed."""
        is_one = get_origin(self.kind) in (None, Literal, Annotated, tuple)
        kinds = (self.kind,) if is_one else get_args(self.kind)
        return tuple(get_args(each)[0] if get_origin(each) is Annotated else each for each in kinds)

    @property
    def choices(self) -> list[str]:
        """The words that the option accepts, and N if it also accepts a number; empty if it accepts no words."""
        words = [word for kind in self.types if get_origin(kind) is Literal for word in get_args(kind)]
        return [*words, "N"] if words and len(self.types) > 1 else words


def hint(word: str, known: Iterable[str]) -> str:
    """Return a question for the nearest of the known words; empty if none is near."""
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The configuration; flags, environment variables and keys of the file are derived from these fields."""

    model: str = llama(
        "auto",
        "GGUF file, or a name from `llamaslot pull`; auto: smollm2-135m, which the first start downloads (93 MB), "
        "or the embedded demo if that fails",
        "-m --model",
    )
    hf_repo: str = llama(
        "",
        "model of a Hugging Face repository, OWNER/REPO[:QUANT], which is downloaded once; without QUANT Q4_K_M, "
        "Q8_0 or the first file",
        "-hf -hfr --hf-repo",
    )
    hf_file: str = llama("", "GGUF file of --hf-repo, in place of QUANT", "-hff --hf-file")
    hf_token: str = llama("", "access token for --hf-repo", "-hft --hf-token", env="HF_TOKEN")
    offline: bool = llama(False, "download no model")
    models_dir: str = llama(
        "",
        "folder of GGUF files, and of folders with one: each is a model, which is loaded when a request names it",
    )
    models_preset: str = llama(
        "", "INI file of llama-server: a section for each model, with its flags as keys, and [*] for all of them"
    )
    models_max: Count = llama(4, "with several models: how many are loaded at once at most; 0: any number")
    models_autoload: bool = llama(
        True, "with several models: load one when a request names it; otherwise only /models/load does"
    )
    models_memory: Count | Literal["auto"] = own(
        "auto",
        "with several models: MiB of host and device memory for all of them and --cache-ram; auto: 85% of the "
        "host's free memory at start, so set it with a GPU",
    )
    load_timeout: Annotated[float, Meta(gt=0, le=INT32_MAX)] = own(
        600.0, "time limit in seconds for a request to wait until its model is loaded"
    )
    host: str = llama("127.0.0.1", "addresses to listen on, comma-separated")
    port: Annotated[int, Meta(ge=0, le=65535)] = llama(8080, "port to listen on; 0: any free one")
    alias: str = llama("", "the model's name in replies", "-a --alias")
    tags: str = llama("", "tags that say what the model is good for, comma-separated; shown next to its name")
    owned_by: str = own(
        "llamaslot", "owned_by of the model in /v1/models; gateways that read vLLM's metrics expect vllm"
    )
    ctx_size: Count = llama(0, "size of the KV pool in cells (tokens); 0: as fits in memory", "-c --ctx-size")
    kv_mem_fraction: Fraction = own(0.85, "fraction of memory that the KV pool may fill without --ctx-size")
    parallel: Annotated[int, Meta(ge=1, le=256)] = llama(
        4, "slots: requests that run concurrently", "-np --parallel", env="LLAMA_ARG_N_PARALLEL", words={"-1": 4}
    )
    cache_seqs: Annotated[int, Meta(ge=-1, le=255)] = own(
        -1,
        "spare sequence ids, which hold idle prefixes in addition to the slots' own; -1: 2 per slot, 4 per slot "
        "with --cache-ram 0, none with --no-kv-unified or checkpoints",
    )
    cache_idle_cells: Count | Literal["auto", "all"] = own(
        "auto",
        "cells that idle prefixes may keep: a number; all: until requests need the cells; auto: all, or fewer if "
        "offloading to RAM makes prefill faster, as measured",
        words={"-1": "all"},
    )
    cache_ram: CountOrMinusOne | Literal["auto"] = llama(
        "auto",
        "MiB of RAM for prefixes offloaded from the pool; 0: none, -1: all free memory, auto: half of it, at most "
        "8192; with -1 and auto, memory is returned while the machine is short of it",
        "-cram --cache-ram",
    )
    cache_disk: str = own("", "folder for prefixes on disk, which survive a restart; empty: none")
    cache_disk_size: Positive | Literal["auto"] = own(
        "auto", "MiB that prefixes on disk may take; auto: half of the free space, at most 65536"
    )
    cache_disk_write_per_day: Count = own(
        16384,
        "average MiB of KV written to --cache-disk per day, because SSDs wear out; a day's amount may be "
        "written at once; 0: no limit",
    )
    cache_ram_per_key: Count = own(
        0,
        "MiB of --cache-ram that the prefixes of one API key may take, with --cache-salt-from-api-key; 0: no "
        "limit, keys share scarce memory equally",
    )
    cache_disk_per_key: Count = own(
        0, "MiB of --cache-disk-size that the prefixes of one API key may take, like --cache-ram-per-key"
    )
    cache_remote: str = own(
        "",
        "prefix store that several servers share, behind RAM and disk: redis://HOST:PORT of Valkey or Redis, "
        "rediss:// for TLS, or unix:///PATH; empty: none",
    )
    cache_remote_key_file: str = own(
        "",
        "file whose first line is the secret that all servers of --cache-remote share; alternative: the variable "
        "LLAMASLOT_CACHE_REMOTE_KEY",
    )
    cache_remote_password_file: str = own(
        "", "file with the password of --cache-remote; alternative: the variable LLAMASLOT_CACHE_REMOTE_PASSWORD"
    )
    cache_remote_ca: str = own("", "file with the CA certificates for --cache-remote; empty: the system's")
    cache_remote_size: Count = own(
        16384, "MiB that the prefixes of a model may take in --cache-remote; 0: no limit but the store's own"
    )
    cache_remote_ttl: Positive = own(86400, "seconds after which unused prefixes in --cache-remote expire")
    cache_remote_timeout: Positive = own(
        500, "time limit of a lookup in --cache-remote in ms; after that the prompt is computed"
    )
    ctx_checkpoints: Count = llama(
        32,
        "most checkpoints per conversation; models with sliding windows or recurrent states reuse prefixes through "
        "checkpoints; 0: none, so such models reuse nothing",
        "-ctxcp --ctx-checkpoints --swa-checkpoints",
    )
    checkpoint_min_step: Annotated[int, Meta(ge=64, le=INT32_MAX)] = llama(
        1024,
        "tokens between two checkpoints of a long prompt",
        "-cms --checkpoint-min-step",
        env="LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
    )
    checkpoint_ram: Positive | Literal["auto"] = own(
        "auto",
        "MiB of RAM for checkpoints; auto: an eighth of the free memory, at most 2048; or room for 8 full-size "
        "checkpoints if that is more and at most a quarter of it",
    )
    reuse_self_test: Literal["auto", "on", "off"] = own(
        "auto",
        "prefix reuse of models with sliding windows, recurrent states, MLA or M-RoPE: auto: after a self-test of "
        "the loaded model has passed; on: without the test, or although it failed; off: never",
    )
    slot_save_path: str = llama("", "folder for the files of POST /slots/N?action=save; empty: none")
    batch_size: Positive = llama(2048, "upper limit of --ubatch-size", "-b --batch-size", env="LLAMA_ARG_BATCH")
    ubatch_size: Positive = llama(
        512, "most tokens computed in one step", "-ub --ubatch-size", env="LLAMA_ARG_UBATCH"
    )
    threads: CountOrMinusOne = llama(
        -1,
        "threads of a decode step; -1: one per physical core that a CPU set and a quota allow, and fewer while "
        "other programs use them",
        "-t --threads",
    )
    threads_batch: CountOrMinusOne = llama(-1, "threads of prefill; -1: as --threads", "-tb --threads-batch")
    cpu_mask: str = llama("", "CPUs that the engine may use, as a hexadecimal mask; empty: all", "-C --cpu-mask")
    cpu_range: str = llama("", "CPUs that the engine may use, LO-HI, in addition to --cpu-mask", "-Cr --cpu-range")
    numa: Literal["off", "distribute", "isolate", "numactl"] = llama(
        "off",
        "on several NUMA nodes: distribute threads over all, isolate them on the one of the start, or use the CPUs "
        "of numactl",
    )
    gpu_layers: Annotated[int, Meta(ge=-2, le=INT32_MAX)] | Literal["auto", "all"] = llama(
        "auto", "layers on the GPU", "-ngl --gpu-layers --n-gpu-layers", env="LLAMA_ARG_N_GPU_LAYERS"
    )
    device: str = llama(
        "all",
        "GPUs to use, comma-separated (`llamaslot doctor` lists them); all: all of them; none: no GPU",
        "-dev --device",
    )
    split_mode: Literal["none", "layer", "row", "tensor"] = llama(
        "layer",
        "how several GPUs share a model: none: one GPU has it all; layer: each has some layers; row: each has rows "
        "of each weight; tensor is not supported",
        "-sm --split-mode",
    )
    tensor_split: str = llama(
        "",
        "share of the model for each GPU, comma-separated, such as 3,1; empty: by free memory",
        "-ts --tensor-split",
    )
    main_gpu: Count = llama(
        0, "GPU that has the model with --split-mode none, and KV with row; counted from 0", "-mg --main-gpu"
    )
    kv_offload: bool = llama(
        True, "keep the KV of layers on the GPU there; off: on the host", "-kvo --kv-offload", negatives="-nkvo"
    )
    op_offload: bool = llama(True, "compute large batches on the GPU also for weights on the host")
    override_tensor: tuple[str, ...] = llama(
        (),
        "memory for tensors by their names: REGEX=TYPE, comma-separated, such as ffn_.*_exps=CPU; the first match "
        "counts; may be given again",
        "-ot --override-tensor",
    )
    cpu_moe: bool = llama(False, "keep the experts of all layers on the CPU", "-cmoe --cpu-moe")
    n_cpu_moe: Count = llama(0, "keep the experts of the first N layers on the CPU", "-ncmoe --n-cpu-moe")
    n_cpu_ffn: Count = llama(
        0, "keep the dense feed-forward weights of the first N layers on the CPU", "-ncffn --n-cpu-ffn"
    )
    load_mode: Literal["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"] = llama(
        "auto",
        "how weights are loaded: none: read; mmap: mapped from their file; mlock: read, and locked in RAM; dio: "
        "read without the page cache; auto: mapped, if every device can",
        "-lm --load-mode",
    )
    mmap: bool = llama(True, "older flag for --load-mode: map the weights' file into memory instead of reading it")
    mlock: bool = llama(
        False, "older flag for --load-mode: lock the weights in RAM, so that they are never swapped out"
    )
    direct_io: bool = llama(
        False,
        "older flag for --load-mode dio: read the weights without the page cache",
        "-dio --direct-io",
        env="LLAMA_ARG_DIO",
    )
    lazy_mode: Literal["auto", "on", "off"] = llama(
        "auto",
        "read rows of certain tensors, such as per-layer embeddings, when needed; auto: of those above 4 GiB",
        "-lzm --lazy-mode",
    )
    check_tensors: bool = llama(False, "check the weights for invalid values while they are loaded")
    repack: bool = llama(True, "repack weights on the CPU so that they are computed faster", negatives="-nr")
    no_host: bool = llama(
        False,
        "do not keep weights in the GPU's buffers on the host, so that they can be repacked",
        "--no-host",
        env="LLAMA_ARG_NO_HOST",
    )
    override_kv: tuple[str, ...] = llama(
        (),
        "metadata of the model file to override: KEY=TYPE:VALUE, comma-separated, TYPE being int, float, bool or "
        "str; may be given again",
    )
    lora: tuple[str, ...] = llama(
        (),
        "LoRA adapters, GGUF files, comma-separated; requests choose them by their places; may be given again",
        env="LLAMASLOT_LORA",
    )
    lora_scaled: tuple[str, ...] = llama(
        (),
        "further adapters with their scales for requests that name none: FILE:SCALE, comma-separated; may be given "
        "again",
        env="LLAMASLOT_LORA_SCALED",
    )
    lora_init_without_apply: bool = llama(
        False,
        "scale all adapters by 0 until POST /lora-adapters; only requests that name them apply them",
        env="LLAMASLOT_LORA_INIT_WITHOUT_APPLY",
    )
    mmproj: str = llama("", "projector of the model (mmproj file), with which it takes images", "-mm --mmproj")
    mmproj_auto: bool = llama(
        True,
        "without --mmproj: use the projector in the repository of --hf-repo, which is downloaded once, or in the "
        "model's folder in --models-dir, if this server can use it; off: --no-mmproj",
        negatives="--no-mmproj",
    )
    mmproj_offload: bool = llama(True, "compute the projector on a GPU, if there is one")
    image_min_tokens: ImageTokens = llama(
        0, "fewest tokens of an image, for models that take images of any size; 0: the projector's number"
    )
    image_max_tokens: ImageTokens = llama(
        0, "most tokens of an image, for models that take images of any size; 0: the projector's number"
    )
    rope_scaling: Literal["auto", "none", "linear", "yarn"] = llama(
        "auto",
        "how RoPE is scaled for longer contexts; auto: as the model file says",
        env="LLAMA_ARG_ROPE_SCALING_TYPE",
    )
    rope_scale: Scale | None = llama(None, "factor by which RoPE expands the context; unset: the model file's")
    rope_freq_scale: Scale | None = llama(None, "1 / --rope-scale")
    rope_freq_base: Annotated[float, Meta(ge=0, le=1e12)] = llama(
        0.0, "base frequency of RoPE; 0: the model file's"
    )
    yarn_orig_ctx: Count = llama(0, "context that YaRN expands; 0: the model's training context")
    yarn_ext_factor: YarnFactor = llama(-1.0, "YaRN: weight of extrapolation, 0: none; -1: the model file's")
    yarn_attn_factor: YarnFactor = llama(-1.0, "YaRN: scale of attention; -1: the model file's")
    yarn_beta_slow: YarnFactor = llama(-1.0, "YaRN: rotations below which it interpolates; -1: the model file's")
    yarn_beta_fast: YarnFactor = llama(-1.0, "YaRN: rotations above which it extrapolates; -1: the model file's")
    flash_attn: Literal["auto", "on", "off"] = llama("auto", "flash attention", "-fa --flash-attn", words=_TRISTATE)
    backend_sampling: bool | None = llama(
        None,
        "sample tokens on the device where llama.cpp can; if unset, on a GPU where that is measured to be faster",
        "-bs --backend-sampling",
    )
    speculate: Count | Literal["auto", "off"] = llama(
        "auto",
        "speculative decoding: draft what a request's own tokens or the prefix tree say may come next, and compute "
        "it in one step; auto: as many tokens as are expected to pay; N: at most N of them (63 are the most)",
        "--speculate --spec-type",
        env="LLAMA_ARG_SPEC_TYPE",
        words={"none": "off", "default": "auto", **dict.fromkeys(_NGRAM_TYPES, "auto")},
    )
    kv_unified: bool | None = llama(
        None,
        "one KV pool shared by all slots; off: an equal part for each slot; if unset, the server switches to the "
        "layout that is faster for the current requests",
        "-kvu --kv-unified",
    )
    swa_full: bool = llama(
        False, "give sliding-window layers as many KV cells as the others: more memory, no additional reuse"
    )
    cache_type_k: CacheType = llama("f16", "element type of K in the pool", "-ctk --cache-type-k")
    cache_type_v: CacheType = llama("f16", "element type of V in the pool", "-ctv --cache-type-v")
    cache_prompt: bool = llama(True, "reuse KV; default for requests")
    cache_salt_from_api_key: bool = own(
        False, "requests share KV only within the same API key, and with requests that set cache_public"
    )
    cache_debug_text: bool = own(
        False, "show the text of all users' prefixes in /cache to administrators (without API keys: to anyone)"
    )
    debug_invariants: bool = own(
        False, "check the cache against the KV pool whenever idle; a difference ends the engine"
    )
    n_predict: CountOrMinusOne = llama(-1, "default limit of new tokens; -1: none", "-n --predict --n-predict")
    context_shift: bool = llama(
        False,
        "when a reply fills its context, discard half of it and go on; what is left is not shared, nor kept "
        "afterwards; off: the reply ends",
    )
    keep: CountOrMinusOne = llama(
        0,
        "default for requests: first tokens that --context-shift keeps, besides a BOS; -1: the prompt",
        env="LLAMASLOT_KEEP",
    )
    seed: Annotated[int, Meta(ge=-1, le=2**32 - 1)] = llama(
        -1, "default seed; -1: a random one for each request", "-s --seed"
    )
    temperature: Factor | None = llama(None, f"{_OWN_ELSE} 0.8; 0: greedy", "--temp --temperature")
    top_k: CountOrMinusOne | None = llama(None, f"{_OWN_ELSE} 40; 0: off")
    top_p: Fraction | None = llama(None, f"{_OWN_ELSE} 0.95; 1: off")
    min_p: Fraction | None = llama(None, f"{_OWN_ELSE} 0.05; 0: off")
    top_n_sigma: Annotated[float, Meta(ge=-100, le=100)] | None = llama(
        None, f"{_ELSE} -1; zero or negative: off", "--top-nsigma --top-n-sigma"
    )
    xtc_probability: Fraction | None = llama(None, f"{_OWN_ELSE} 0 (off)")
    xtc_threshold: Fraction | None = llama(None, f"{_OWN_ELSE} 0.1; above 0.5: off")
    typical_p: Fraction | None = llama(None, f"{_ELSE} 1 (off)", "--typical --typical-p")
    repeat_last_n: CountOrMinusOne | None = llama(
        None, f"{_OWN_ELSE} 64; last tokens that penalties consider; 0: none, -1: the whole context"
    )
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = llama(None, f"{_OWN_ELSE} 1 (off)")
    presence_penalty: Penalty | None = llama(None, f"{_ELSE} 0")
    frequency_penalty: Penalty | None = llama(None, f"{_ELSE} 0")
    dry_multiplier: Factor | None = llama(None, f"{_ELSE} 0 (off)")
    dry_base: Factor | None = llama(None, f"{_ELSE} 1.75; also for a value below 1")
    dry_allowed_length: Count | None = llama(None, f"{_ELSE} 2")
    dry_penalty_last_n: CountOrMinusOne | None = llama(
        None, f"{_ELSE} 64; last tokens that DRY considers; 0: none, -1: the whole context"
    )
    dry_sequence_breaker: tuple[str, ...] = llama(
        (), "default for requests: a text that ends repetitions, replacing DRY's own; may be given again; or none"
    )
    dynatemp_range: Factor | None = llama(None, f"{_ELSE} 0; how much the temperature varies with entropy")
    dynatemp_exponent: Factor | None = llama(None, f"{_ELSE} 1", "--dynatemp-exp")
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = llama(
        None, f"{_OWN_ELSE} 0 (off); 1 or 2: that version, which replaces all samplers but the temperature"
    )
    mirostat_tau: Factor | None = llama(None, f"{_OWN_ELSE} 5", "--mirostat-ent")
    mirostat_eta: Factor | None = llama(None, f"{_OWN_ELSE} 0.1", "--mirostat-lr")
    adaptive_target: Annotated[float, Meta(ge=-1, le=1)] | None = llama(None, f"{_ELSE} -1 (off)")
    adaptive_decay: Annotated[float, Meta(ge=0, le=0.99)] | None = llama(None, f"{_ELSE} 0.9")
    samplers: str = llama("", "default for requests: samplers in order, separated by semicolons")
    sampler_seq: str = llama("", "the same as letters, such as kpmt", "--sampler-seq --sampling-seq")
    ignore_eos: bool = llama(False, "default for requests: continue after the end-of-text token")
    logit_bias: tuple[str, ...] = llama(
        (),
        "default for requests: a token id and its bias, such as 15043+1 or 2-inf; may be given again",
        "-l --logit-bias",
    )
    grammar_file: tuple[str, ...] = llama(
        (),
        "file with a grammar (GBNF or Lark) for requests without one; if given several times, the k-th request "
        "uses the k-th file and later requests none",
        env="LLAMASLOT_GRAMMAR_FILE",
    )
    reasoning: Literal["on", "off", "auto"] = llama(
        "auto",
        "off: the model does not reason before it answers, if its chat template has that choice",
        "-rea --reasoning",
        words=_TRISTATE,
    )
    reasoning_budget: CountOrMinusOne = llama(
        -1,
        "default for requests: most tokens of reasoning; 0: off, -1: no limit",
        env="LLAMA_ARG_THINK_BUDGET",
    )
    reasoning_effort: str = llama(
        "default", "default for requests: level of reasoning for the chat template; default: the template's own"
    )
    reasoning_format: Literal["none", "deepseek", "auto"] = llama(
        "auto",
        "where chat replies have the reasoning; none: in the content, otherwise in reasoning_content",
        env="LLAMA_ARG_THINK",
    )
    embeddings: bool = llama(
        False,
        "compute embeddings (/v1/embeddings, /embedding) instead of text",
        "--embeddings --embedding",
    )
    reranking: bool = llama(
        False,
        "score documents for a query (/v1/rerank) instead of generating text; with a model that has a head for it",
        "--reranking --rerank",
    )
    pooling: Literal["auto", "none", "mean", "cls", "last", "rank"] = llama(
        "auto",
        "how the vectors of a text's tokens become one, with --embeddings; rank: scores, the same as --reranking; "
        "auto: as the model file says",
    )
    embd_normalize: Annotated[int, Meta(ge=-1, le=INT32_MAX)] = llama(
        2,
        "default for requests: how vectors are normalized; -1: not at all, 0: to a greatest absolute value of "
        "32,760, 1: by the sum of absolute values, 2: Euclidean, more: by that p-norm",
        env="LLAMASLOT_EMBD_NORMALIZE",
    )
    chat_template: str = llama("", "name of a built-in template, or Jinja source")
    chat_template_file: str = llama("", "file with a Jinja template")
    chat_template_kwargs: str = llama(
        "",
        'default for requests: variables of the chat template as a JSON object, such as {"enable_thinking": false}',
    )
    jinja: bool = llama(
        True, "use Jinja templates; --no-jinja: the built-in template that llama.cpp detects for the model"
    )
    api_key: str = llama("", "API keys, comma-separated", env="LLAMA_API_KEY")
    api_key_file: str = llama("", "file with one API key per line, each optionally followed by admin or user")
    ssl_key_file: str = llama("", "file with the private key for HTTPS (PEM, not encrypted)")
    ssl_cert_file: str = llama("", "file with the certificate of that key (PEM), followed by its chain of issuers")
    metrics: bool = llama(False, "serve /metrics", env="LLAMA_ARG_ENDPOINT_METRICS")
    slots: bool = llama(True, "serve /slots and /cache", env="LLAMA_ARG_ENDPOINT_SLOTS")
    webui: bool = llama(
        True, "serve a page at / with a chat and a view of the cache", "--webui --ui", env="LLAMA_ARG_UI"
    )
    cors_origins: str = llama(
        "auto",
        "origins of web pages that may use the server, comma-separated; localhost: any port of this machine; "
        "*: any page; auto: * with API keys, otherwise localhost",
    )
    allowed_hosts: str = own(
        "",
        "names accepted in the Host header besides localhost, comma-separated; if empty: any name, but on loopback "
        "addresses only localhost",
    )
    insecure: bool = own(False, "allow listening on non-loopback addresses without an API key")
    sse_ping_interval: CountOrMinusOne = llama(
        30, "seconds of silence after which a comment is sent on a stream; -1: never"
    )
    max_queue: Count = own(256, "requests that may wait for a slot; further ones get a 429")
    max_queue_per_client: CountOrMinusOne = own(
        -1,
        "the same for one client (an API key; without keys a session, otherwise an address); 0: no limit per "
        "client; -1: half of --max-queue with API keys, 0 without",
    )
    max_choices: Positive = own(256, "completions that a request may ask for: n times its prompts")
    max_reply_probs: Positive = own(
        2**19, "probabilities that a reply may contain: completions x tokens x (n_probs or top_logprobs + 1)"
    )
    request_timeout: Annotated[float, Meta(ge=0, le=INT32_MAX)] = own(
        0.0, "seconds after which a waiting or running request gets a 504; 0: never"
    )
    max_body_mb: Positive = own(64, "MiB of the largest request body")
    max_total_body_mb: Positive = own(
        64, "MiB of all request bodies that are being received or parsed; further requests get a 429"
    )
    body_timeout: Annotated[float, Meta(gt=0, le=INT32_MAX)] = own(60.0, "seconds for a request body to arrive")
    max_logit_bias_entries: Count = own(
        1024, "entries that a request's logit_bias may have, and tokens that these may name"
    )
    max_stop_strings: Count = own(256, "stop strings that a request may have")
    max_stop_chars: Count = own(8192, "total characters of the stop strings of a request")
    max_stored_responses: Count = own(1024, "most stored responses, and most stored chats, kept in memory; 0: none")
    max_stored_responses_mb: Positive = own(
        24, "MiB for stored responses, and again for stored chats; the least recently used are evicted"
    )
    max_connections: Positive = own(
        1024, "most open connections; a new one replaces the one that has been idle longest"
    )
    keep_alive_timeout: Annotated[float, Meta(gt=0, le=INT32_MAX)] = own(
        75.0, "seconds after which a connection without a request is closed"
    )
    write_timeout: Annotated[float, Meta(gt=0, le=INT32_MAX)] = own(
        60.0, "seconds after which a client that does not read its reply is disconnected and its request cancelled"
    )
    max_stream_buffer_kb: Positive = own(
        4096, "most KiB of a stream that the client has not read; beyond that, it is disconnected"
    )
    escape_special: bool = own(
        True, "treat control tokens written in a message as plain text; llama-server parses them as control tokens"
    )
    drop_volatile: str = own(
        "claude-code",
        "remove this from the start of system messages, because it differs in each session and means nothing: "
        "claude-code (its billing header), a regular expression, or off",
    )
    text_anchors: bool = own(
        True, "reuse generated token ids when a client sends a reply back as text, which may tokenize differently"
    )
    restore_messages: bool = own(
        True,
        "if a conversation contains a message that the server sent, such as a tool call, use the tokens that were "
        "generated for it",
    )
    warm_ahead: Count | Literal["off", "auto"] = own(
        "auto",
        "most tokens an hour that are computed ahead while the server idles: what a conversation's next turn will "
        "have in place of the reply that was just generated, where the template strips its reasoning, for example; "
        "only where the conversation came back unchanged before; auto: 50,000, off: none",
    )
    session_min_match: Fraction = own(
        0.8,
        "if a prompt diverges from its session's text, keep the session's tokens only if at least this fraction "
        "of the text matches; 1: never",
    )
    prefill_gap_ms: Annotated[float, Meta(ge=1, le=60000)] = own(
        200.0,
        "target inter-token latency of streams while other prompts are prefilled, in ms: smaller values make "
        "streams smoother and other users' first tokens later",
    )
    drain_delay: Annotated[float, Meta(ge=0, le=INT32_MAX)] = own(
        0.0,
        "seconds after SIGTERM in which /health returns 503 but requests are still served, so that gateways stop "
        "sending requests before they are refused",
    )
    sleep_idle_seconds: Count = llama(
        0,
        "seconds without a request after which the model is unloaded until the next one; prefixes are kept in RAM; "
        "0: never",
        words={"-1": 0},
    )
    shutdown_timeout: Annotated[float, Meta(ge=0, le=INT32_MAX)] = own(
        30.0, "seconds for running requests to finish, after --drain-delay"
    )
    step_timeout: Annotated[float, Meta(ge=0, le=INT32_MAX)] = own(
        60.0,
        "seconds after which an engine with a hanging step is restarted, or 20 times the step's expected duration "
        "if that is longer; 0: never",
    )
    prompt_timeout: Annotated[float, Meta(gt=0, le=INT32_MAX)] = own(
        60.0,
        "time limit in seconds for decoding a request, rendering its chat template and tokenizing; then it fails",
    )
    log_format: Literal["auto", "console", "json"] = own(
        "auto", "format of log lines; auto: console on a terminal, otherwise JSON"
    )
    log_level: Literal["debug", "info", "warning", "error"] = own("info", "lowest level that is logged")
    verbose: bool = own(
        False, "like --log-level debug; also the default of the request field", "-v --verbose --log-verbose"
    )

    @property
    def wanted_gpu_layers(self) -> int | Literal["auto", "all"]:
        """`--gpu-layers`, or 0 because of `--device none`."""
        return 0 if self.device == "none" else self.gpu_layers

    @property
    def weights_load_mode(self) -> str:
        """`--load-mode`, or what the older flags for it ask for."""
        if self.direct_io:
            return "dio"
        return self.load_mode if self.mmap and not self.mlock else _LOAD_MODES[self.mmap, self.mlock]

    @property
    def maps_weights(self) -> bool:
        """True if weights are mapped from their file and not locked, so that their memory counts as available."""
        return self.weights_load_mode in ("auto", "mmap")

    @property
    def max_draft(self) -> int:
        """The most tokens to draft at once, by `--speculate`."""
        if isinstance(self.speculate, int):
            return self.speculate
        return MAX_DRAFT if self.speculate == "auto" else 0

    @property
    def n_warm_ahead(self) -> int:
        """The tokens an hour of `--warm-ahead`."""
        if isinstance(self.warm_ahead, int):
            return self.warm_ahead
        return AUTO_WARM_AHEAD if self.warm_ahead == "auto" else 0

    @property
    def embeds(self) -> bool:
        """True if the server computes vectors or scores instead of text."""
        return self.embeddings or self.reranking

    @property
    def wants_mmproj(self) -> bool:
        """True if a projector is to be looked for."""
        return self.mmproj_auto and not self.mmproj and not self.embeds

    @property
    def has_found_mmproj(self) -> bool:
        """True if the projector was found, and not named by `--mmproj`, which turns `--mmproj-auto` off."""
        return self.mmproj_auto and bool(self.mmproj)

    @property
    def lowest_log_level(self) -> str:
        """The level of `--log-level`, or `debug` because of `--verbose`."""
        return "debug" if self.verbose else self.log_level


def options() -> Iterator[Option]:
    """Yield the rows of the table in order."""
    kinds = get_type_hints(Config, include_extras=True)
    for row in fields(Config):
        name, kind, meta = row.name, kinds[row.name], row.metadata
        flags = meta["flags"].split() or [f"--{name.replace('_', '-')}"]
        is_switch = kind in (bool, bool | None)
        words = SWITCH if is_switch else meta["words"]
        negatives = [*map(_negative, flags), *meta["negatives"].split()] if is_switch else []
        env = meta["env"].format(name.upper())
        yield Option(name, kind, flags, env, row.default, meta["text"], words, [*filter(None, negatives)])


def _negative(flag: str) -> str:
    """Return the flag that turns a switch off; empty for one of a single letter, and for `--no-...`."""
    if flag.startswith("--no-") or len(flag) == 2:
        return ""
    return f"--no-{flag[2:]}" if flag.startswith("--") else f"-no{flag}"
