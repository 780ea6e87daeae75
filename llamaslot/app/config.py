"""Configuration table of `llamaslot serve`: one field per option, with its flags, environment variable and help.

Names and environment variables are llama-server's where it has the same option. `flags.py` makes the command line
from this table, `config_reader.py` reads values into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from llamaslot.app.option import SWITCH, Option, llama, options_of, own

INT32_MAX = 2**31 - 1

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INT32_MAX)]
CountOrMinusOne = Annotated[int, Meta(ge=-1, le=INT32_MAX)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=0, le=100)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]
_TRISTATE = {word: "on" if on else "off" for word, on in SWITCH.items()} | {"-1": "auto"}
"""llama-server's words for yes, no and by itself."""

_ELSE = "default for requests; if unset,"
_OWN_ELSE = f"{_ELSE} the model file's, else"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration; the table that flags, variables and keys are made from."""

    model: str = llama("demo", "GGUF file, or a name from `llamaslot pull`", "-m --model")
    host: str = llama("127.0.0.1", "addresses to listen on, comma-separated")
    port: Annotated[int, Meta(ge=0, le=65535)] = llama(8080, "port to listen on; 0 for a free one")
    alias: str = llama("", "the model's name in replies", "-a --alias")
    tags: str = llama("", "what the model is good for, comma-separated: shown beside its name")
    owned_by: str = own(
        "llamaslot", "owned_by of the model in /v1/models; gateways that know vLLM's metrics look for vllm"
    )
    ctx_size: Count = llama(0, "cells of the KV pool; 0 for what fits in memory", "-c --ctx-size")
    kv_mem_fraction: Fraction = own(0.85, "fraction of memory that a KV pool without --ctx-size may fill")
    parallel: Annotated[int, Meta(ge=1, le=256)] = llama(
        4, "slots: requests that run at once", "-np --parallel", env="LLAMA_ARG_N_PARALLEL", words={"-1": 4}
    )
    cache_seqs: Annotated[int, Meta(ge=-1, le=255)] = own(
        -1,
        "spare sequence ids, which keep prefixes in addition to the slots'; -1 for 2 a slot, 4 with --cache-ram 0, "
        "none with --no-kv-unified or where checkpoints are kept",
    )
    cache_idle_cells: Count | Literal["auto", "all"] = own(
        "auto",
        "cells that idle prefixes may keep: a number; all, until requests need them; or auto: all, or fewer "
        "where offloading to RAM was measured to make prefill faster",
        words={"-1": "all"},
    )
    cache_ram: CountOrMinusOne | Literal["auto"] = llama(
        "auto",
        "MiB of RAM for prefixes offloaded from the pool; 0 for none, -1 for all that is free, auto for half of "
        "that, at most 8192; -1 and auto give memory back while it is short",
        "-cram --cache-ram",
    )
    cache_disk: str = own("", "folder for prefixes on disk, which survive a restart; empty for none")
    cache_disk_size: Positive | Literal["auto"] = own(
        "auto", "MiB that prefixes on disk may take; auto for half of what is free, at most 65536"
    )
    cache_disk_write_per_day: Count = own(
        16384,
        "MiB of KV written to --cache-disk a day, on average, since SSDs wear out; those of one day may be written "
        "at once; 0 for no limit",
    )
    cache_ram_per_key: Count = own(
        0,
        "MiB of --cache-ram that the prefixes of one API key may take, with --cache-salt-from-api-key; 0 for no "
        "limit: keys then have equal shares of what is scarce",
    )
    cache_disk_per_key: Count = own(
        0, "MiB of --cache-disk-size that the prefixes of one API key may take, as --cache-ram-per-key"
    )
    cache_remote: str = own(
        "",
        "store of prefixes that several servers share, behind RAM and disk: redis://HOST:PORT of Valkey or Redis, "
        "rediss:// for TLS, or unix:///PATH; empty for none",
    )
    cache_remote_key_file: str = own(
        "",
        "file with the secret that all servers of --cache-remote share, in its first line; else "
        "LLAMASLOT_CACHE_REMOTE_KEY has it",
    )
    cache_remote_password_file: str = own(
        "", "file with the password of --cache-remote; else LLAMASLOT_CACHE_REMOTE_PASSWORD has it, if there is one"
    )
    cache_remote_ca: str = own("", "file with the certificates that --cache-remote is verified by; empty: system's")
    cache_remote_size: Count = own(
        16384, "MiB that prefixes of a model may take in --cache-remote; 0 for no limit but the store's own"
    )
    cache_remote_ttl: Positive = own(86400, "seconds after which unused prefixes in --cache-remote expire")
    cache_remote_timeout: Positive = own(
        500, "milliseconds that a lookup in --cache-remote may take; then the prompt is computed"
    )
    ctx_checkpoints: Count = llama(
        32,
        "checkpoints of one conversation at most, by which models with sliding windows or recurrent states reuse "
        "prefixes; 0 for none, and so no reuse of such models",
        "-ctxcp --ctx-checkpoints --swa-checkpoints",
    )
    checkpoint_min_step: Annotated[int, Meta(ge=64, le=INT32_MAX)] = llama(
        1024, "tokens between two checkpoints of a long prompt", "-cms --checkpoint-min-step"
    )
    checkpoint_ram: Positive | Literal["auto"] = own(
        "auto",
        "MiB of RAM for checkpoints; auto for an eighth of what is free, at most 2048, or what 8 large ones "
        "take if that is more and at most a quarter",
    )
    reuse_self_test: Literal["auto", "on", "off"] = own(
        "auto",
        "reuse of models with sliding windows, recurrent states, MLA or M-RoPE: auto once the self-test on the "
        "loaded model has passed, on without the test or although it failed, off for none",
    )
    slot_save_path: str = llama("", "folder for what POST /slots/N?action=save writes; empty for none")
    batch_size: Positive = llama(2048, "limit of --ubatch-size", "-b --batch-size", env="LLAMA_ARG_BATCH")
    ubatch_size: Positive = llama(
        512, "tokens that one step may compute", "-ub --ubatch-size", env="LLAMA_ARG_UBATCH"
    )
    threads: CountOrMinusOne = llama(
        -1,
        "threads of a decode step; -1 for the physical cores, fewer where a CPU set or a quota allows fewer",
        "-t --threads",
    )
    threads_batch: CountOrMinusOne = llama(-1, "threads of prefill; -1 for --threads", "-tb --threads-batch")
    gpu_layers: int | Literal["auto", "all"] = llama(
        "auto", "layers on the GPU", "-ngl --gpu-layers --n-gpu-layers", env="LLAMA_ARG_N_GPU_LAYERS"
    )
    mmap: bool = llama(True, "map the weights from the file instead of reading them")
    mlock: bool = llama(False, "keep the weights in RAM, never swapped out")
    flash_attn: Literal["auto", "on", "off"] = llama("auto", "flash attention", "-fa --flash-attn", words=_TRISTATE)
    kv_unified: bool | None = llama(
        None,
        "one KV pool for all slots, off for an equal part for each; if unset, one or the other, whichever the "
        "requests of the moment are faster in",
        "-kvu --kv-unified",
    )
    swa_full: bool = llama(
        False, "give sliding-window layers as many KV cells as the others: more memory, but no more prefixes reused"
    )
    cache_type_k: CacheType = llama("f16", "element type of K in the pool", "-ctk --cache-type-k")
    cache_type_v: CacheType = llama("f16", "element type of V in the pool", "-ctv --cache-type-v")
    cache_prompt: bool = llama(True, "reuse KV unless a request says otherwise")
    cache_salt_from_api_key: bool = own(
        False, "requests share KV only with those of the same API key, and with cache_public"
    )
    cache_debug_text: bool = own(
        False, "show the text of everybody's prefixes in /cache, to administrators (without API keys: to anyone)"
    )
    debug_invariants: bool = own(
        False, "check the cache against the KV pool whenever idle; the engine ends if they differ"
    )
    n_predict: CountOrMinusOne = llama(-1, "default limit of new tokens; -1 for none", "-n --predict --n-predict")
    seed: Annotated[int, Meta(ge=-1, le=2**32 - 1)] = llama(
        -1, "default seed; -1 for another each time", "-s --seed"
    )
    temperature: Factor | None = llama(None, f"{_OWN_ELSE} 0.8; 0 for greedy", "--temp --temperature")
    top_k: CountOrMinusOne | None = llama(None, f"{_OWN_ELSE} 40; 0 for off")
    top_p: Fraction | None = llama(None, f"{_OWN_ELSE} 0.95; 1 for off")
    min_p: Fraction | None = llama(None, f"{_OWN_ELSE} 0.05; 0 for off")
    top_n_sigma: Annotated[float, Meta(ge=-100, le=100)] | None = llama(
        None, f"{_ELSE} -1; off if not positive", "--top-nsigma --top-n-sigma"
    )
    xtc_probability: Fraction | None = llama(None, f"{_OWN_ELSE} 0, which is off")
    xtc_threshold: Fraction | None = llama(None, f"{_OWN_ELSE} 0.1; above 0.5 for off")
    typical_p: Fraction | None = llama(None, f"{_ELSE} 1, which is off", "--typical --typical-p")
    repeat_last_n: CountOrMinusOne | None = llama(
        None, f"{_OWN_ELSE} 64; tokens that penalties look back on: 0 for none, -1 for the whole context"
    )
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = llama(None, f"{_OWN_ELSE} 1, which is off")
    presence_penalty: Penalty | None = llama(None, f"{_ELSE} 0")
    frequency_penalty: Penalty | None = llama(None, f"{_ELSE} 0")
    dry_multiplier: Factor | None = llama(None, f"{_ELSE} 0, which is off")
    dry_base: Factor | None = llama(None, f"{_ELSE} 1.75, also if it is below 1")
    dry_allowed_length: Count | None = llama(None, f"{_ELSE} 2")
    dry_penalty_last_n: CountOrMinusOne | None = llama(
        None, f"{_ELSE} 64; tokens that DRY looks back on: 0 for none, -1 for the whole context"
    )
    dry_sequence_breaker: tuple[str, ...] = llama(
        (), "default for requests: a text that ends repetitions, in place of those of DRY; may be repeated; or none"
    )
    dynatemp_range: Factor | None = llama(None, f"{_ELSE} 0; how far the temperature follows the entropy")
    dynatemp_exponent: Factor | None = llama(None, f"{_ELSE} 1", "--dynatemp-exp")
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = llama(
        None, f"{_OWN_ELSE} 0, which is off; 1 or 2 for that version, in place of all samplers but the temperature"
    )
    mirostat_tau: Factor | None = llama(None, f"{_OWN_ELSE} 5", "--mirostat-ent")
    mirostat_eta: Factor | None = llama(None, f"{_OWN_ELSE} 0.1", "--mirostat-lr")
    adaptive_target: Annotated[float, Meta(ge=-1, le=1)] | None = llama(None, f"{_ELSE} -1, which is off")
    adaptive_decay: Annotated[float, Meta(ge=0, le=0.99)] | None = llama(None, f"{_ELSE} 0.9")
    samplers: str = llama("", "default for requests: samplers in their order, separated by semicolons")
    sampler_seq: str = llama("", "the same as letters, such as kpmt", "--sampler-seq --sampling-seq")
    ignore_eos: bool = llama(False, "default for requests: generate on after the end of the text")
    logit_bias: tuple[str, ...] = llama(
        (),
        "default for requests: a token id and its bias, such as 15043+1 or 2-inf; may be repeated",
        "-l --logit-bias",
    )
    grammar_file: tuple[str, ...] = llama(
        (),
        "file with a grammar (GBNF or Lark) for requests that bring none; given several times: "
        "the k-th request takes the k-th file, and later ones none",
        env="LLAMASLOT_GRAMMAR_FILE",
    )
    reasoning: Literal["on", "off", "auto"] = llama(
        "auto",
        "off: the model is not to reason before it answers, if its chat template leaves the choice",
        "-rea --reasoning",
        words=_TRISTATE,
    )
    reasoning_budget: CountOrMinusOne = llama(
        -1,
        "default for requests: tokens that the model may reason; 0 for off, -1 for no limit",
        env="LLAMA_ARG_THINK_BUDGET",
    )
    reasoning_format: Literal["none", "deepseek", "auto"] = llama(
        "auto",
        "place of the reasoning in chat replies; none: in the content, else in reasoning_content",
        env="LLAMA_ARG_THINK",
    )
    chat_template: str = llama("", "name of a built-in template, or Jinja source")
    chat_template_file: str = llama("", "file with a Jinja template")
    jinja: bool = llama(
        True, "use Jinja templates; --no-jinja for the built-in template that llama.cpp takes for the model's"
    )
    api_key: str = llama("", "keys that open the server, comma-separated", env="LLAMA_API_KEY")
    api_key_file: str = llama("", "file with an API key a line, optionally followed by a space and admin or user")
    ssl_key_file: str = llama("", "file with a private key (PEM, not encrypted): serve HTTPS, with --ssl-cert-file")
    ssl_cert_file: str = llama("", "file with the certificate of that key (PEM), and then those that signed it")
    metrics: bool = llama(False, "serve /metrics", env="LLAMA_ARG_ENDPOINT_METRICS")
    slots: bool = llama(True, "serve /slots and /cache", env="LLAMA_ARG_ENDPOINT_SLOTS")
    cors_origins: str = llama(
        "auto",
        "origins of web pages that may use the server, comma-separated; localhost: any port of this machine; "
        "*: any page; auto: * with API keys, else localhost",
    )
    allowed_hosts: str = own(
        "",
        "names accepted in the Host header besides localhost, comma-separated; if empty, any but on loopback",
    )
    insecure: bool = own(False, "listen on other addresses than loopback although there is no API key")
    sse_ping_interval: CountOrMinusOne = llama(
        30, "seconds of silence after which a stream gets a comment; -1 for never"
    )
    max_queue: Count = own(256, "requests that may wait for a slot; more get a 429")
    max_queue_per_client: CountOrMinusOne = own(
        -1,
        "those of one client (an API key; without keys a session, else an address); 0 for no limit of its own, -1 "
        "for half of --max-queue with API keys and 0 without",
    )
    max_choices: Positive = own(256, "completions that a request may ask for: n for each of its prompts")
    max_reply_probs: Positive = own(
        2**19, "probabilities that a reply may have: completions x tokens x (n_probs or top_logprobs + 1)"
    )
    request_timeout: Annotated[float, Meta(ge=0, le=INT32_MAX)] = own(
        0.0, "seconds after which a request gets a 504, whether it waits or runs; 0 for never"
    )
    max_body_mb: Positive = own(64, "MiB of the largest request body")
    max_total_body_mb: Positive = own(
        64, "MiB of all request bodies that are being received or parsed; more get a 429"
    )
    body_timeout: Annotated[float, Meta(gt=0, le=INT32_MAX)] = own(60.0, "seconds for a request body to arrive")
    max_logit_bias_entries: Count = own(
        1024, "entries that a request's logit_bias may have, and tokens that they may name"
    )
    max_stop_strings: Count = own(256, "stop strings that a request may have")
    max_stop_chars: Count = own(8192, "characters that the stop strings of a request may have in all")
    max_stored_responses: Count = own(
        1024, "stored responses, and likewise stored chats, that are kept in memory; 0 for none"
    )
    max_stored_responses_mb: Positive = own(
        24, "MiB that they may take, responses and chats each; the least recently used are evicted"
    )
    max_connections: Positive = own(
        1024, "connections that may be open; a new one replaces the one that has been idle longest"
    )
    keep_alive_timeout: Annotated[float, Meta(gt=0, le=INT32_MAX)] = own(
        75.0, "seconds after which a connection without a request is closed"
    )
    write_timeout: Annotated[float, Meta(gt=0, le=INT32_MAX)] = own(
        60.0, "seconds after which a client that does not read its reply is disconnected; its request is cancelled"
    )
    max_stream_buffer_kb: Positive = own(
        4096, "KiB of a stream that may wait for its client to read them; with more, the client is disconnected"
    )
    escape_special: bool = own(
        True, "take control tokens written out in a message as plain text; llama-server takes them as real ones"
    )
    drop_volatile: str = own(
        "claude-code",
        "strip this from the start of system messages, because it differs in each session and means nothing: "
        "claude-code (its billing header), a regular expression, or off",
    )
    text_anchors: bool = own(
        True, "reuse generated token ids when a client sends a reply back as text, which may tokenize differently"
    )
    restore_messages: bool = own(
        True,
        "where a conversation contains a message that the server sent, such as a tool call, use the tokens that "
        "were generated for it",
    )
    session_min_match: Fraction = own(
        0.8,
        "if a prompt diverges from its session's text, keep the session's tokens only if at least this fraction "
        "of the text matches; 1 for never",
    )
    prefill_gap_ms: Annotated[float, Meta(ge=1, le=60000)] = own(
        100.0, "target inter-token latency of streams while other prompts are prefilled, in ms"
    )
    drain_delay: Annotated[float, Meta(ge=0, le=INT32_MAX)] = own(
        0.0,
        "seconds after SIGTERM in which /health is a 503 but requests are still served, so that a gateway sends no "
        "more before they are refused",
    )
    shutdown_timeout: Annotated[float, Meta(ge=0, le=INT32_MAX)] = own(
        30.0, "seconds for running requests to finish, after --drain-delay"
    )
    in_process: bool = own(
        False, "run engine and tokenizer in the server's own process, which then ends if llama.cpp aborts"
    )
    step_timeout: Annotated[float, Meta(ge=0, le=INT32_MAX)] = own(
        60.0,
        "seconds after which an engine whose step does not end is restarted, or 20 times what the step should "
        "take if that is longer; 0 for never (not with --in-process)",
    )
    prompt_timeout: Annotated[float, Meta(gt=0, le=INT32_MAX)] = own(
        60.0,
        "seconds that decoding a request, rendering its chat template or tokenizing may take; the request then "
        "fails (not with --in-process)",
    )
    log_format: Literal["auto", "console", "json"] = own(
        "auto", "log lines; auto is console on a terminal, else JSON"
    )
    log_level: Literal["debug", "info", "warning", "error"] = own("info", "lowest level logged")
    verbose: bool = own(False, "the same as --log-level debug, and the field's default", "-v --verbose")


def options() -> Iterator[Option]:
    """The rows of the table in their order."""
    return options_of(Config)
