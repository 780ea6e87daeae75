"""Configuration table of `llamaslot serve`: one field per option, with its flags, environment variable and help.

Names and environment variables are llama-server's where it has the same option. `flags.py` makes the command line
from this table, `config_reader.py` reads values into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]


_INT32 = 2**31 - 1
_SWITCH = dict.fromkeys(("on", "enabled", "true", "1"), True) | dict.fromkeys(
    ("off", "disabled", "false", "0"), False
)
_TRISTATE = {word: "on" if on else "off" for word, on in _SWITCH.items()} | {"-1": "auto"}
"""llama-server's words for yes, no and by itself."""


def _row(
    flags: str,
    env: str,
    text: str,
    *,
    ge: float | None = None,
    le: float | None = None,
    words: Mapping[str, Any] | None = None,
) -> msgspec.Meta:
    """One option: its flags, environment variable, help text, bounds, and words that stand for a value."""
    if ge is not None and le is None:
        le = _INT32
    extra = {"flags": flags.split(), "env": env, "words": words or {}}
    return msgspec.Meta(ge=ge, le=le, description=text, extra=extra)


_OWN_ELSE = "default for requests; without it the one in the model file, else"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration; the table that flags, variables and keys are made from."""

    model: Annotated[str, _row("-m --model", "LLAMA_ARG_MODEL", "GGUF file, or a name from `llamaslot pull`")] = (
        "demo"
    )
    host: Annotated[str, _row("--host", "LLAMA_ARG_HOST", "addresses to listen on, comma-separated")] = "127.0.0.1"
    port: Annotated[
        int, _row("--port", "LLAMA_ARG_PORT", "port to listen on; 0 for a free one", ge=0, le=65535)
    ] = 8080
    alias: Annotated[str, _row("-a --alias", "LLAMA_ARG_ALIAS", "the model's name in replies")] = ""
    ctx_size: Annotated[
        int, _row("-c --ctx-size", "LLAMA_ARG_CTX_SIZE", "cells of the KV pool; 0 for what fits in memory", ge=0)
    ] = 0
    kv_mem_fraction: Annotated[
        float,
        _row(
            "--kv-mem-fraction",
            "LLAMASLOT_KV_MEM_FRACTION",
            "share of memory that a KV pool without --ctx-size may fill",
            ge=0,
            le=1,
        ),
    ] = 0.85
    parallel: Annotated[
        int,
        _row(
            "-np --parallel",
            "LLAMA_ARG_N_PARALLEL",
            "slots: requests that run at once",
            ge=1,
            le=256,
            words={"-1": 4},
        ),
    ] = 4
    cache_seqs: Annotated[
        int,
        _row(
            "--cache-seqs",
            "LLAMASLOT_CACHE_SEQS",
            "sequence ids that keep prefixes beside the slots'; -1 for 2 a slot, 4 with --cache-ram 0, none "
            "without --kv-unified",
            ge=-1,
            le=255,
        ),
    ] = -1
    cache_idle_cells: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=_INT32)] | Literal["auto", "all"],
        _row(
            "--cache-idle-cells",
            "LLAMASLOT_CACHE_IDLE_CELLS",
            "cells that idle prefixes may keep: a number; all that nothing else needs; or auto: all, unless "
            "offloading them to RAM makes prefill faster, as measured at start",
            words={"-1": "all"},
        ),
    ] = "auto"
    cache_ram: Annotated[
        Annotated[int, msgspec.Meta(ge=-1, le=_INT32)] | Literal["auto"],
        _row(
            "-cram --cache-ram",
            "LLAMA_ARG_CACHE_RAM",
            "MiB of RAM for prefixes that leave the pool; 0 for none, -1 for all that is free, auto for half of "
            "that, at most 8192",
        ),
    ] = "auto"
    cache_disk: Annotated[
        str,
        _row(
            "--cache-disk",
            "LLAMASLOT_CACHE_DISK",
            "folder in which prefixes outlive the server; empty for none",
        ),
    ] = ""
    cache_disk_size: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=_INT32)] | Literal["auto"],
        _row(
            "--cache-disk-size",
            "LLAMASLOT_CACHE_DISK_SIZE",
            "MiB that they may take there; auto for half of what is free, at most 65536",
        ),
    ] = "auto"
    slot_save_path: Annotated[
        str,
        _row(
            "--slot-save-path",
            "LLAMA_ARG_SLOT_SAVE_PATH",
            "folder for what POST /slots/N?action=save writes; empty for none",
        ),
    ] = ""
    batch_size: Annotated[int, _row("-b --batch-size", "LLAMA_ARG_BATCH", "logical batch size", ge=1)] = 2048
    ubatch_size: Annotated[
        int, _row("-ub --ubatch-size", "LLAMA_ARG_UBATCH", "tokens that one step may compute", ge=1)
    ] = 512
    threads: Annotated[
        int, _row("-t --threads", "LLAMA_ARG_THREADS", "threads of a decode step; -1 for the physical cores", ge=-1)
    ] = -1
    threads_batch: Annotated[
        int, _row("-tb --threads-batch", "LLAMA_ARG_THREADS_BATCH", "threads of prefill; -1 for --threads", ge=-1)
    ] = -1
    gpu_layers: Annotated[
        int | Literal["auto", "all"],
        _row("-ngl --gpu-layers --n-gpu-layers", "LLAMA_ARG_N_GPU_LAYERS", "layers on the GPU"),
    ] = "auto"
    mmap: Annotated[
        bool, _row("--mmap", "LLAMA_ARG_MMAP", "map the weights from the file instead of reading them")
    ] = True
    mlock: Annotated[bool, _row("--mlock", "LLAMA_ARG_MLOCK", "keep the weights in RAM, never swapped out")] = False
    flash_attn: Annotated[
        Literal["auto", "on", "off"],
        _row("-fa --flash-attn", "LLAMA_ARG_FLASH_ATTN", "flash attention", words=_TRISTATE),
    ] = "auto"
    kv_unified: Annotated[bool, _row("-kvu --kv-unified", "LLAMA_ARG_KV_UNIFIED", "one KV pool for all slots")] = (
        True
    )
    swa_full: Annotated[
        bool,
        _row(
            "--swa-full",
            "LLAMA_ARG_SWA_FULL",
            "as many cells for layers with a sliding window as for the others; nothing makes use of them yet",
        ),
    ] = False
    cache_type_k: Annotated[
        CacheType, _row("-ctk --cache-type-k", "LLAMA_ARG_CACHE_TYPE_K", "element type of K in the pool")
    ] = "f16"
    cache_type_v: Annotated[
        CacheType, _row("-ctv --cache-type-v", "LLAMA_ARG_CACHE_TYPE_V", "element type of V in the pool")
    ] = "f16"
    cache_prompt: Annotated[
        bool, _row("--cache-prompt", "LLAMA_ARG_CACHE_PROMPT", "reuse KV unless a request says otherwise")
    ] = True
    cache_salt_from_api_key: Annotated[
        bool,
        _row(
            "--cache-salt-from-api-key",
            "LLAMASLOT_CACHE_SALT_FROM_API_KEY",
            "requests share KV only with those of the same API key",
        ),
    ] = False
    cache_debug_text: Annotated[
        bool,
        _row("--cache-debug-text", "LLAMASLOT_CACHE_DEBUG_TEXT", "show the text of prefixes in /cache, to anyone"),
    ] = False
    debug_invariants: Annotated[
        bool,
        _row(
            "--debug-invariants",
            "LLAMASLOT_DEBUG_INVARIANTS",
            "check the cache against the KV pool whenever idle, and end if they differ",
        ),
    ] = False
    n_predict: Annotated[
        int,
        _row("-n --predict --n-predict", "LLAMA_ARG_N_PREDICT", "default limit of new tokens; -1 for none", ge=-1),
    ] = -1
    seed: Annotated[
        int, _row("-s --seed", "LLAMA_ARG_SEED", "default seed; -1 for another each time", ge=-1, le=2**32 - 1)
    ] = -1
    temperature: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=100)] | None,
        _row("--temp --temperature", "LLAMA_ARG_TEMPERATURE", f"{_OWN_ELSE} 0.8; 0 for greedy"),
    ] = None
    top_k: Annotated[
        Annotated[int, msgspec.Meta(ge=-1, le=_INT32)] | None,
        _row("--top-k", "LLAMA_ARG_TOP_K", f"{_OWN_ELSE} 40; 0 for off"),
    ] = None
    top_p: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1)] | None,
        _row("--top-p", "LLAMA_ARG_TOP_P", f"{_OWN_ELSE} 0.95; 1 for off"),
    ] = None
    min_p: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1)] | None,
        _row("--min-p", "LLAMA_ARG_MIN_P", f"{_OWN_ELSE} 0.05; 0 for off"),
    ] = None
    chat_template: Annotated[
        str, _row("--chat-template", "LLAMA_ARG_CHAT_TEMPLATE", "name of a built-in template, or Jinja source")
    ] = ""
    chat_template_file: Annotated[
        str, _row("--chat-template-file", "LLAMA_ARG_CHAT_TEMPLATE_FILE", "file with a Jinja template")
    ] = ""
    jinja: Annotated[
        bool,
        _row(
            "--jinja",
            "LLAMA_ARG_JINJA",
            "use Jinja templates; --no-jinja for the built-in template that llama.cpp takes for the model's",
        ),
    ] = True
    api_key: Annotated[str, _row("--api-key", "LLAMA_API_KEY", "keys that open the server, comma-separated")] = ""
    api_key_file: Annotated[str, _row("--api-key-file", "LLAMA_ARG_API_KEY_FILE", "file with a key a line")] = ""
    metrics: Annotated[bool, _row("--metrics", "LLAMA_ARG_ENDPOINT_METRICS", "serve /metrics")] = False
    slots: Annotated[bool, _row("--slots", "LLAMA_ARG_ENDPOINT_SLOTS", "serve /slots and /cache")] = True
    cors_origins: Annotated[
        str,
        _row("--cors-origins", "LLAMA_ARG_CORS_ORIGINS", "origins that browsers may call from, comma-separated"),
    ] = "*"
    sse_ping_interval: Annotated[
        int,
        _row(
            "--sse-ping-interval",
            "LLAMA_ARG_SSE_PING_INTERVAL",
            "seconds of silence after which a stream gets a comment; -1 for never",
            ge=-1,
        ),
    ] = 30
    max_queue: Annotated[
        int, _row("--max-queue", "LLAMASLOT_MAX_QUEUE", "requests that may wait for a slot; more get a 429", ge=0)
    ] = 256
    max_body_mb: Annotated[int, _row("--max-body-mb", "LLAMASLOT_MAX_BODY_MB", "largest request body", ge=1)] = 64
    escape_special: Annotated[
        bool,
        _row(
            "--escape-special",
            "LLAMASLOT_ESCAPE_SPECIAL",
            "take control tokens written out in a message as plain text; llama-server takes them as real ones",
        ),
    ] = True
    drop_volatile: Annotated[
        str,
        _row(
            "--drop-volatile",
            "LLAMASLOT_DROP_VOLATILE",
            "what to leave out where a system message begins with it, as it is new in each request: claude-code, "
            "or a regular expression",
        ),
    ] = ""
    text_anchors: Annotated[
        bool,
        _row(
            "--text-anchors",
            "LLAMASLOT_TEXT_ANCHORS",
            "let a conversation that comes back as text continue from the tokens that were generated for it",
        ),
    ] = True
    session_min_match: Annotated[
        float,
        _row(
            "--session-min-match",
            "LLAMASLOT_SESSION_MIN_MATCH",
            "share of a session's text that a prompt must begin with for its tokens to be used where it then "
            "differs; 1 for never",
            ge=0,
            le=1,
        ),
    ] = 0.8
    prefill_gap_ms: Annotated[
        float,
        _row(
            "--prefill-gap-ms",
            "LLAMASLOT_PREFILL_GAP_MS",
            "about how long the time between two tokens of a stream may become by other requests' prompts, in ms",
            ge=1,
            le=60000,
        ),
    ] = 100.0
    shutdown_timeout: Annotated[
        float,
        _row("--shutdown-timeout", "LLAMASLOT_SHUTDOWN_TIMEOUT", "seconds for running requests to finish", ge=0),
    ] = 30.0
    log_format: Annotated[
        Literal["auto", "console", "json"],
        _row("--log-format", "LLAMASLOT_LOG_FORMAT", "log lines; auto is console on a terminal, else JSON"),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        _row("--log-level", "LLAMASLOT_LOG_LEVEL", "lowest level logged"),
    ] = "info"
    verbose: Annotated[bool, _row("-v --verbose", "LLAMASLOT_VERBOSE", "the same as --log-level debug")] = False


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
    """Values by the words that stand for them."""

    @property
    def flag(self) -> str:
        """The long flag by which messages name the option."""
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def is_bool(self) -> bool:
        """True for a switch: on or off, without a value."""
        return self.types[0] is bool

    @property
    def types(self) -> tuple[Any, ...]:
        """The types of its values; several where words stand beside numbers."""
        kind = self.kind.__origin__
        kinds = (kind,) if get_origin(kind) is Literal else get_args(kind) or (kind,)
        return tuple(get_args(each)[0] if get_origin(each) is Annotated else each for each in kinds)

    @property
    def choices(self) -> list[str]:
        """Its words, and N where it takes a number too; empty where it takes no words."""
        words = [word for kind in self.types if get_origin(kind) is Literal for word in get_args(kind)]
        return [*words, "N"] if words and len(self.types) > 1 else words


def options() -> Iterator[Option]:
    """The rows of the table in their order."""
    hints = get_type_hints(Config, include_extras=True)
    for field in msgspec.structs.fields(Config):
        kind = hints[field.name]
        meta: msgspec.Meta = kind.__metadata__[0]
        extra = meta.extra or {}
        words = _SWITCH if kind.__origin__ is bool else extra["words"]
        yield Option(field.name, kind, extra["flags"], extra["env"], field.default, meta.description or "", words)
