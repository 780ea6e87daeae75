"""Wiring of settings to the parts that they are for, and shutdown; in this process, on the fake model."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import msgspec
import pytest
from structlog.testing import capture_logs

from llamaslot.api.context import ApiSettings
from llamaslot.app import composition
from llamaslot.app.cache_budgets import choose_budgets
from llamaslot.app.config import Config, options
from llamaslot.app.config_reader import Parser, add_flags, read_config, read_template
from llamaslot.app.http_config import api_settings, check_vocabulary, max_queue_per_client
from llamaslot.app.runtime.engine_host import llama_settings
from llamaslot.backend.llama import LlamaSettings
from llamaslot.backend.llama.loading import Rope
from llamaslot.base.backend import Decoded, Draws, Run
from llamaslot.base.errors import ConfigError
from llamaslot.base.model import CheckpointLimits, KvCost, StateKind
from llamaslot.base.prompt_jobs import Prepare
from llamaslot.engine import engine as engine_module
from llamaslot.kvcache import cache_settings as settings_module
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.text.builtin_templates import resolve
from tests.fake_backend import EOS, FakeBackend
from tests.in_process_runtime import InProcessRuntime
from tests.prompt_threads import LocalPrompts

MODEL = Path("some.gguf")


def configured(argv: str | Sequence[str]) -> Config:
    """The configuration that a command line gives."""
    parser = Parser(allow_abbrev=False)
    add_flags(parser)
    return read_config(parser.parse(argv.split() if isinstance(argv, str) else argv), {})


LLAMA: dict[str, tuple[str, object]] = {
    "--reuse-self-test on": ("reuse_self_test", "on"),
    "-bs": ("backend_sampling", True),
    "-c 1234": ("n_ctx", 1234),
    "--kv-mem-fraction 0.5": ("kv_mem_fraction", 0.5),
    "-np 7": ("n_slots", 7),
    "--sleep-idle-seconds 60": ("may_unload", True),
    "--cache-seqs 9": ("n_cache_seqs", 9),
    "--cache-seqs 0": ("n_cache_seqs", 0),
    "--cache-seqs -1": ("n_cache_seqs", None),
    "--cache-ram 0": ("n_cache_seqs_a_slot", 4),
    "-b 1000": ("n_batch", 1000),
    "-ub 300": ("n_ubatch", 300),
    "-t 3": ("n_threads", 3),
    "-t -1": ("n_threads", 0),
    "-tb 5": ("n_threads_batch", 5),
    "-tb -1": ("n_threads_batch", 0),
    "-ngl 9": ("n_gpu_layers", 9),
    "-ngl 0": ("n_gpu_layers", 0),
    "-ngl all": ("n_gpu_layers", -1),
    "-ngl auto": ("n_gpu_layers", -1),
    "-fa on": ("flash_attn", "on"),
    "-fa off": ("flash_attn", "off"),
    "--no-mmap": ("load_mode", "none"),
    "--mlock": ("load_mode", "mmap+mlock"),
    "--no-mmap --mlock": ("load_mode", "mlock"),
    "--direct-io": ("load_mode", "dio"),
    "-lm mmap": ("load_mode", "mmap"),
    "-lzm on": ("lazy_mode", "on"),
    "--check-tensors": ("check_tensors", True),
    "-nr": ("repack", False),
    "--no-host": ("no_host", True),
    "-nkvo": ("kv_offload", False),
    "--no-op-offload": ("op_offload", False),
    "-dev none": ("devices", ()),
    "-dev CUDA1,CUDA0": ("devices", ("CUDA1", "CUDA0")),
    "-sm row": ("split_mode", "row"),
    "-ts 3,1": ("tensor_split", (3.0, 1.0)),
    "-ts 0.5/0/2": ("tensor_split", (0.5, 0.0, 2.0)),
    "-mg 1": ("main_gpu", 1),
    "--numa distribute": ("numa", "distribute"),
    "-cmoe": ("tensor_overrides", ((r"\.ffn_(up|down|gate|gate_up)_(ch|)exps", "CPU"),)),
    "-ncmoe 2 -ot a.*=CUDA0,b=CPU": (
        "tensor_overrides",
        (("a.*", "CUDA0"), ("b", "CPU"), (r"blk\.(0|1)\.ffn_(up|down|gate|gate_up)_(ch|)exps", "CPU")),
    ),
    "-ncffn 1": ("tensor_overrides", ((r"blk\.(0)\.ffn_(up|down|gate)\.", "CPU"),)),
    "--override-kv a=int:-3,b=bool:true --override-kv c=float:0.5,d=str:x=y:z": (
        "overrides",
        (("a", -3), ("b", True), ("c", 0.5), ("d", "x=y:z")),
    ),
    "--lora a.gguf,b.gguf": ("adapters", ((Path("a.gguf"), 1.0), (Path("b.gguf"), 1.0))),
    "--lora-scaled a.gguf:0.5": ("adapters", ((Path("a.gguf"), 0.5),)),
    "--lora a.gguf --lora-init-without-apply": ("adapters", ((Path("a.gguf"), 0.0),)),
    "--mmproj a.gguf": ("mmproj", Path("a.gguf")),
    "--no-mmproj-offload": ("mmproj_offload", False),
    "--image-min-tokens 64": ("image_min_tokens", 64),
    "--image-max-tokens 256": ("image_max_tokens", 256),
    "--rope-scaling yarn": ("rope", Rope(scaling="yarn")),
    "--rope-scale 4": ("rope", Rope(freq_scale=0.25)),
    "--rope-freq-scale 0.25": ("rope", Rope(freq_scale=0.25)),
    "--rope-freq-base 50000": ("rope", Rope(freq_base=50_000.0)),
    "--yarn-orig-ctx 4096": ("rope", Rope(yarn_orig_ctx=4096)),
    "--yarn-ext-factor 0": ("rope", Rope(yarn_ext_factor=0.0)),
    "--yarn-attn-factor 0.5": ("rope", Rope(yarn_attn_factor=0.5)),
    "--yarn-beta-slow 2": ("rope", Rope(yarn_beta_slow=2.0)),
    "--yarn-beta-fast 16": ("rope", Rope(yarn_beta_fast=16.0)),
    "--swa-full": ("swa_full", True),
    "-ctxcp 0": ("checkpoints", False),
    "--speculate 9": ("max_draft", 9),
    "--speculate off": ("max_draft", 0),
    "--context-shift": ("context_shift", True),
    "-no-kvu": ("unified", False),
    "-ctk q8_0": ("cache_type_k", "q8_0"),
    "-ctv q4_1": ("cache_type_v", "q4_1"),
    "--embeddings": ("embeds", True),
    "--embedding": ("embeds", True),
    "--pooling last": ("pooling", "last"),
    "--pooling auto": ("pooling", None),
}

API: dict[str, tuple[str, object]] = {
    "--api-key one,,two --cors-origins localhost": ("api_keys", ("one", "two")),
    "--api-key-file keys --cors-origins localhost": ("api_key_file", "keys"),
    "--max-body-mb 3": ("max_body_bytes", 3 * 2**20),
    "--max-total-body-mb 5": ("max_total_body_bytes", 5 * 2**20),
    "--body-timeout 7.5": ("body_timeout", 7.5),
    "--max-connections 11": ("max_connections", 11),
    "--max-logit-bias-entries 17": ("max_logit_bias_entries", 17),
    "--max-stream-buffer-kb 17": ("max_stream_buffer_bytes", 17 * 2**10),
    "--write-timeout 17": ("write_timeout", 17.0),
    "--max-choices 17": ("max_choices", 17),
    "--max-reply-probs 18": ("max_reply_probs", 18),
    "--max-stop-strings 17": ("max_stop_strings", 17),
    "--max-stop-chars 17": ("max_stop_chars", 17),
    "--max-stored-responses 17": ("max_stored_responses", 17),
    "--max-stored-responses-mb 3": ("max_stored_responses_bytes", 3 * 2**20),
    "--keep-alive-timeout 13": ("keep_alive_timeout", 13.0),
    "-a name": ("alias", "name"),
    "--tags x,y": ("tags", "x,y"),
    "--owned-by vllm": ("owned_by", "vllm"),
    "--cors-origins *": ("cors_origins", ("*",)),
    "--cors-origins http://a,localhost": ("cors_origins", ("http://a", "localhost")),
    "--allowed-hosts a,b": ("allowed_hosts", ("localhost", "a", "b")),
    "--allowed-hosts MyBox.lan,box:8080,[FE80::1],fe80::2": (
        "allowed_hosts",
        ("localhost", "mybox.lan", "box", "fe80::1", "fe80::2"),
    ),
    "--host 0.0.0.0 --insecure": ("allowed_hosts", ()),
    "--host 0.0.0.0,127.0.0.1 --insecure --allowed-hosts a": ("allowed_hosts", ("localhost", "a", "0.0.0.0")),
    "--sse-ping-interval 7": ("sse_ping_interval", 7),
    "-v": ("verbose", True),
    "--metrics": ("metrics", True),
    "--no-slots": ("slots", False),
    "--no-webui": ("webui", False),
    "-n 11": ("n_predict", 11),
    "--context-shift --keep 0": ("context_shift", True),
    "--keep -1": ("keep", -1),
    "--no-cache-prompt": ("cache_prompt", False),
    "--cache-debug-text": ("cache_debug_text", True),
    "--reasoning off": ("reasoning", False),
    "-rea 0": ("reasoning", False),
    "--reasoning-budget 9": ("reasoning_budget", 9),
    "--reasoning-format none": ("reasoning_format", "none"),
    "--reasoning-effort high": ("template_kwargs", {"reasoning_effort": "high"}),
    '--chat-template-kwargs {"a":1,"reasoning_effort":"low"}': (
        "template_kwargs",
        {"a": 1, "reasoning_effort": "low"},
    ),
    "--embd-normalize -1": ("embd_normalize", -1),
    "--speculate 5": ("max_draft", 5),
    "--speculate off": ("max_draft", 0),
    "--spec-type none": ("max_draft", 0),
}

SAMPLING: dict[str, tuple[str, object]] = {
    "--temp 0.25": ("temperature", 0.25),
    "--top-k 17": ("top_k", 17),
    "--top-p 0.5": ("top_p", 0.5),
    "--min-p 0.125": ("min_p", 0.125),
    "-s 99": ("seed", 99),
    "--top-nsigma 1.5": ("top_n_sigma", 1.5),
    "--xtc-probability 0.25": ("xtc_probability", 0.25),
    "--xtc-threshold 0.25": ("xtc_threshold", 0.25),
    "--typical 0.5": ("typical_p", 0.5),
    "--repeat-last-n -1": ("repeat_last_n", -1),
    "--repeat-penalty 1.25": ("repeat_penalty", 1.25),
    "--presence-penalty -0.5": ("presence_penalty", -0.5),
    "--frequency-penalty 0.5": ("frequency_penalty", 0.5),
    "--dry-multiplier 0.75": ("dry_multiplier", 0.75),
    "--dry-base 2": ("dry_base", 2.0),
    "--dry-allowed-length 3": ("dry_allowed_length", 3),
    "--dry-penalty-last-n 17": ("dry_penalty_last_n", 17),
    "--dry-sequence-breaker x --dry-sequence-breaker \\n": ("dry_sequence_breakers", ("x", "\n")),
    "--dry-sequence-breaker x --dry-sequence-breaker none": ("dry_sequence_breakers", ()),
    "--dynatemp-range 0.5": ("dynatemp_range", 0.5),
    "--dynatemp-exp 2": ("dynatemp_exponent", 2.0),
    "--mirostat 2": ("mirostat", 2),
    "--mirostat-ent 4": ("mirostat_tau", 4.0),
    "--mirostat-lr 0.25": ("mirostat_eta", 0.25),
    "--adaptive-target 0.5": ("adaptive_target", 0.5),
    "--adaptive-decay 0.5": ("adaptive_decay", 0.5),
    "--samplers top_k;temp;adaptive-p": ("samplers", ("top_k", "temperature", "adaptive_p")),
    "--sampler-seq kpt": ("samplers", ("top_k", "top_p", "temperature")),
    "--ignore-eos": ("ignore_eos", True),
    "--logit-bias 5+1.5 -l 6-inf -l 7-2": ("logit_bias", {5: 1.5, 6: float("-inf"), 7: -2.0}),
}


ELSEWHERE = {
    *("cache_disk", "cache_disk_size", "cache_disk_write_per_day", "cache_ram_per_key", "cache_disk_per_key"),
    *("hf_repo", "hf_file", "hf_token", "cpu_mask", "cpu_range"),
    *("model", "offline", "port", "chat_template", "chat_template_file", "grammar_file", "restore_messages"),
    *(
        "max_queue",
        "max_queue_per_client",
        "request_timeout",
        "prefill_gap_ms",
        "drain_delay",
        "shutdown_timeout",
        "log_format",
        "log_level",
    ),
    *(
        "cache_salt_from_api_key",
        "cache_idle_cells",
        "debug_invariants",
        "text_anchors",
        "drop_volatile",
    ),
    *("checkpoint_min_step", "checkpoint_ram", "reranking"),
    *("cache_remote", "cache_remote_key_file", "cache_remote_password_file", "cache_remote_ca"),
    *("cache_remote_size", "cache_remote_ttl", "cache_remote_timeout"),
    *("session_min_match", "slot_save_path", "warm_ahead", "escape_special", "jinja"),
    *("step_timeout", "prompt_timeout", "ssl_key_file", "ssl_cert_file"),
    *("models_dir", "models_preset", "models_max", "models_autoload", "models_memory", "load_timeout"),
}
"""Options that go neither to the backend nor to the HTTP layer as they are."""


def changes(settings: Any, defaults: Any) -> dict[str, object]:
    """The fields in which settings differ."""
    names = getattr(settings, "__struct_fields__", None) or type(settings).__slots__
    pairs = {name: (getattr(settings, name), getattr(defaults, name)) for name in names}
    return {name: now for name, (now, default) in pairs.items() if now != default}


def test_the_tables_name_every_option() -> None:
    named = {field for argv in [*LLAMA, *API, *SAMPLING] for field in changes(configured(argv), Config())}
    assert named | ELSEWHERE == {option.name for option in options()}
    assert not named & ELSEWHERE


@pytest.mark.parametrize(("argv", "field", "value"), [(a, *fv) for a, fv in LLAMA.items()])
def test_a_flag_reaches_the_backend_and_nothing_else_changes(argv: str, field: str, value: object) -> None:
    defaults = llama_settings(Config(), MODEL)
    settings = llama_settings(configured(argv), MODEL)
    assert getattr(settings, field) == value
    # A layout that is asked for does not change. Without RAM the pool is not emptied for a measurement.
    others = {"unified": "may_partition", "embeds": "may_partition", "n_cache_seqs_a_slot": "measure_at_load"}
    assert set(changes(settings, defaults)) <= {field, others.get(field, field)}


def test_only_a_projector_that_was_found_is_optional() -> None:
    found = replace(configured(""), mmproj="a.gguf")
    assert llama_settings(found, MODEL).mmproj_is_optional
    assert not llama_settings(configured("--mmproj a.gguf"), MODEL).mmproj_is_optional


@pytest.mark.parametrize("argv", ["--reranking", "--rerank", "--embeddings --pooling rank"])
def test_reranking_is_a_pooling(argv: str) -> None:
    changed = changes(llama_settings(configured(argv), MODEL), llama_settings(Config(), MODEL))
    assert changed == {"embeds": True, "pooling": "rank", "may_partition": False}


@pytest.mark.parametrize("argv", ["--cache-ram 0", "--slot-save-path slots"])
def test_costs_are_measured_at_load_where_the_pool_is_not_emptied_for_it(argv: str) -> None:
    assert llama_settings(configured(argv), MODEL).measure_at_load
    assert not llama_settings(Config(), MODEL).measure_at_load


@pytest.mark.parametrize(("argv", "field", "value"), [(a, *fv) for a, fv in API.items()])
def test_a_flag_reaches_the_http_layer_and_nothing_else_changes(argv: str, field: str, value: object) -> None:
    assert changes(api_settings(configured(argv)), api_settings(Config())) == {field: value}


@pytest.mark.parametrize(("argv", "field", "value"), [(a, *fv) for a, fv in SAMPLING.items()])
def test_a_flag_reaches_the_sampling_defaults_and_nothing_else_changes(
    argv: str, field: str, value: object
) -> None:
    settings, default = api_settings(configured(argv)), api_settings(Config())
    assert changes(settings, default) == {"sampling": settings.sampling}
    assert settings.sampling == {**default.sampling, field: value}


@pytest.mark.parametrize("argv", ["--api-key one", "--api-key-file some"])
def test_with_api_keys_pages_of_any_origin_may_send_them(argv: str) -> None:
    assert api_settings(configured(argv)).cors_origins == ("*",)


def test_the_defaults_of_every_layer_are_the_same() -> None:
    assert api_settings(Config()) == ApiSettings(sampling={"seed": -1})
    settings = llama_settings(Config(), MODEL)
    assert settings.measurements is not None
    assert replace(settings, measurements=None) == LlamaSettings(
        MODEL, n_cache_seqs_a_slot=2, measure_costs=True, checkpoints=True, may_partition=True, max_draft=63
    )


def test_a_flag_beats_the_model_file_beats_llama_servers_default() -> None:
    info = msgspec.structs.replace(FakeBackend().info, sampling={"temperature": 0.25, "top_k": 7})
    default = api_settings(Config()).default_sampling(info)
    assert (default.temperature, default.top_k, default.min_p, default.seed) == (0.25, 7, 0.05, -1)
    given = api_settings(configured("--temp 0.8 --seed 5")).default_sampling(info)
    assert (given.temperature, given.top_k, given.seed) == (0.8, 7, 5), "0.8 is llama-server's default too"


def test_a_dry_base_below_1_is_the_default() -> None:
    assert "dry_base" not in api_settings(configured("--dry-base 0.5")).sampling


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--samplers top_k;bottom_k", "--samplers: unknown sampler 'bottom_k'"),
        ("--samplers top_k;infill", "--samplers: unknown sampler 'infill'"),
        ("--sampler-seq kz", "--sampler-seq: unknown sampler 'z'"),
        ("--samplers top_k --sampler-seq k", "not both"),
        ("--logit-bias 5", "--logit-bias: '5' is not a token id with a bias"),
        ("--logit-bias 5+inf", "--logit-bias: '5\\+inf' is not a token id with a bias"),
        ("--logit-bias 5+2000000", "--logit-bias: '5.2000000' is not"),
        ("--dry-sequence-breaker x " * 17, "--dry-sequence-breaker: at most 16"),
    ],
)
def test_wrong_sampling_flags_are_named(argv: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        api_settings(configured(argv))


def test_a_biased_token_that_the_model_does_not_have_is_named() -> None:
    info = FakeBackend().info
    check_vocabulary(configured(f"--logit-bias {info.n_vocab - 1}+1"), info)
    with pytest.raises(ConfigError, match=f"--logit-bias names token {info.n_vocab}"):
        check_vocabulary(configured(f"--logit-bias {info.n_vocab}+1"), info)


async def test_requests_override_the_sampling_of_flags_which_props_show(tmp_path: Path) -> None:
    options = {
        "repeat_penalty": 1.25,
        "samplers": "temperature;dry",
        "ignore_eos": True,
        "logit_bias": ("5+1.5", "6-inf"),
        "dry_sequence_breaker": ("x",),
    }
    shown = {
        "repeat_penalty": 1.25,
        "samplers": ["temperature", "dry"],
        "ignore_eos": True,
        "dry_sequence_breakers": ["x"],
    }
    other = {
        "repeat_penalty": 1.0,
        "samplers": ["top_k"],
        "ignore_eos": False,
        "logit_bias": [[7, 2.0]],
        "dry_sequence_breakers": ["y"],
    }
    async with serving(tmp_path, FakeBackend(), **options) as server:

        async def used(fields: dict[str, Any]) -> dict[str, Any]:
            body = {"prompt": "abc", "n_predict": 1, "logit_bias": None, **fields}
            async with server.session.post(f"{server.url}/completion", json=body) as reply:
                assert reply.status == 200, await reply.text()
                settings = (await reply.json())["generation_settings"]
                return {name: settings[name] for name in other}

        async with server.session.get(f"{server.url}/props") as reply:
            params = (await reply.json())["default_generation_settings"]["params"]
        biases = [{"token": token, "bias": bias} for token, bias in ((5, 1.5), (6, None), (EOS, None))]
        assert {name: params[name] for name in other} == {**shown, "logit_bias": [[5, 1.5], [6, False]]}
        assert await used({}) == {**shown, "logit_bias": biases}
        assert await used(params) == {**shown, "logit_bias": biases}
        assert await used(other) == {**other, "logit_bias": [{"token": 7, "bias": 2.0}]}


@pytest.mark.parametrize(
    ("builtin", "config", "used"),
    [
        ("llama3", {"jinja": False}, "llama3"),
        ("", {"jinja": False}, "chatml"),
        ("llama3", {"jinja": False, "chat_template": "gemma"}, "gemma"),
        ("llama3", {}, ""),
    ],
)
async def test_without_jinja_the_built_in_template_that_fits_the_model_is_used(
    tmp_path: Path, builtin: str, config: dict[str, Any], used: str
) -> None:
    backend = FakeBackend()
    own = "{{ messages[0].content }}"
    backend.info = msgspec.structs.replace(backend.info, chat_template=own, builtin_template=builtin)
    async with serving(tmp_path, backend, **config) as server, server.session.get(f"{server.url}/props") as reply:
        assert (await reply.json())["chat_template"] == (resolve(used) if used else own)


async def test_template_variables_of_flags_are_the_defaults_of_requests(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ messages[0].content }} {{ a }}/{{ b }}/{{ reasoning_effort }}/{{ enable_thinking }}",
        "chat_template_kwargs": '{"a": 1, "b": "x", "enable_thinking": true}',
        "reasoning_effort": "high",
    }

    async def prompts(*bodies: dict[str, Any], **more: Any) -> list[str]:
        async with serving(tmp_path, FakeBackend(), **config, **more) as server:
            messages = [{"role": "user", "content": "hi"}]
            replies = [await server.post("/apply-template", {"messages": messages, **body}) for body in bodies]
            return [reply["prompt"] for _, reply in replies]

    assert await prompts(
        {},
        {"chat_template_kwargs": {"a": "y"}, "reasoning_effort": "low"},
        {"reasoning_effort": "none"},
    ) == ["hi 1/x/high/True", "hi y/x/low/True", "hi 1/x/high/False"]
    assert await prompts({}, reasoning="off") == ["hi 1/x/high/False"]


@pytest.mark.parametrize(
    "text", ["{", "[]", "1", '{"a": 1} x', "{1: 2}", f'{{"a": {10**30}}}', f'{{"a": {"[" * 100_000}'], ids=range(7)
)
def test_template_variables_are_a_json_object(text: str) -> None:
    with pytest.raises(ConfigError, match="--chat-template-kwargs is not a JSON object"):
        api_settings(configured(["--chat-template-kwargs", text]))


def test_an_empty_api_key_flag_is_refused() -> None:
    for argv in (["--api-key", ","], ["--api-key", " "]):
        with pytest.raises(ConfigError, match="--api-key"):
            api_settings(configured(argv))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.9", "127.0.0.1,10.0.0.1", "box.lan"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host .* --api-key, or --insecure"):
        api_settings(configured(["--host", host]))
    assert api_settings(configured(["--host", host, "--api-key", "a"])).allowed_hosts == ()
    assert api_settings(configured(["--host", host, "--insecure"])).allowed_hosts == ()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.1,::1", "127.0.0.2"])
def test_loopback_hosts_need_no_key(host: str) -> None:
    assert api_settings(configured(["--host", host])).allowed_hosts == ("localhost",)


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ("", 0),
        ("--api-key a", 128),
        ("--api-key-file a --max-queue 9", 4),
        ("--api-key a --max-queue 1", 1),
        ("--api-key a --max-queue-per-client 0", 0),
        ("--max-queue-per-client 7", 7),
    ],
)
def test_a_client_with_a_key_may_fill_half_of_the_queue(flags: str, most: int) -> None:
    assert max_queue_per_client(configured(flags)) == most


def test_salts_from_keys_need_keys() -> None:
    assert api_settings(configured("--cache-salt-from-api-key --api-key a")).cache_salt_from_api_key
    with pytest.raises(ConfigError, match=r"--cache-salt-from-api-key needs .*--api-key"):
        api_settings(configured("--cache-salt-from-api-key"))


@pytest.mark.parametrize("flag", ["--cache-ram-per-key", "--cache-disk-per-key"])
def test_limits_of_keys_need_salts_from_keys(flag: str) -> None:
    assert api_settings(configured(f"{flag} 5 --cache-salt-from-api-key --api-key a"))
    with pytest.raises(ConfigError, match=rf"{flag} needs --cache-salt-from-api-key"):
        api_settings(configured(f"{flag} 5 --api-key a"))


def test_limits_of_keys_reach_the_cache() -> None:
    config = configured("--cache-ram-per-key 5 --cache-disk-per-key 7")
    budgets = choose_budgets(config, FakeBackend().info, 100)
    assert settings_module.cache_settings(FakeBackend(), budgets, None, gap_ms=0.0).budgets is budgets
    assert (budgets.ram_bytes_per_key, budgets.disk_bytes_per_key) == (5 * 2**20, 7 * 2**20)


def test_limits_of_checkpoints_reach_the_cache() -> None:
    config = configured("--ctx-checkpoints 5 --checkpoint-min-step 700 --checkpoint-ram 9")
    backend = FakeBackend(kind=StateKind.HYBRID)
    budgets = choose_budgets(config, backend.info, 0)
    checkpoints = settings_module.cache_settings(backend, budgets, None, gap_ms=0.0).checkpoints
    assert (checkpoints.kind, checkpoints.limits) == (StateKind.HYBRID, CheckpointLimits(9 * 2**20, 5, 700))
    assert choose_budgets(config, FakeBackend().info, 0).checkpoints is None


async def test_props_tell_the_limits_of_checkpoints(tmp_path: Path) -> None:
    backend = FakeBackend(kind=StateKind.HYBRID)
    config = {"ctx_checkpoints": 5, "checkpoint_min_step": 700, "checkpoint_ram": 9}
    async with serving(tmp_path, backend, **config) as server, server.session.get(f"{server.url}/props") as reply:
        reuse = (await reply.json())["prefix_reuse"]
    assert (reuse["enabled"], reuse["reason"], reuse["state"]["kind"]) == (True, "", "hybrid")
    assert reuse["checkpoints"] == {
        "checkpoint_bytes": 64,
        "total_bytes": 9 * 2**20,
        "max_per_path": 5,
        "interval_tokens": 700,
    }


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("from a file")
    assert read_template(configured("")) == ("", "")
    assert read_template(configured("--chat-template chatml")) == (resolve("chatml"), "--chat-template")
    source = "{{ messages[0].content }}"
    assert read_template(configured(["--chat-template", source])) == (source, "--chat-template")
    flag = "--chat-template-file"
    assert read_template(configured([flag, str(file)])) == ("from a file", flag)
    with pytest.raises(ConfigError, match="nowhere"):
        read_template(configured([flag, str(tmp_path / "nowhere")]))


class Served:
    """A server in this process: its address and, once it has ended, its exit status."""

    def __init__(self, url: str, status: asyncio.Task[int], session: aiohttp.ClientSession) -> None:
        self.url = url
        self.status = status
        self.session = session

    async def post(self, path: str, body: dict[str, object]) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as reply:
            return reply.status, await reply.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as reply:
            return reply.status, await reply.json()

    async def until(self, wanted: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until `/slots` is as wanted."""
        for _ in range(2000):
            async with self.session.get(self.url + "/slots") as reply:
                if wanted(await reply.json()):
                    return
            await asyncio.sleep(0.005)
        raise AssertionError("the slots never were as wanted")


@asynccontextmanager
async def serving(folder: Path, backend: FakeBackend, **config: Any) -> AsyncIterator[Served]:
    """A server on a free port; it is told to end when the block does."""
    model = folder / "fake.gguf"
    model.touch()
    settings = replace(Config(), model=str(model), port=0, **config)
    with (
        capture_logs() as lines,
        patch.object(composition, "Runtime", partial(InProcessRuntime, backend=backend)),
        patch.object(composition, "check_files"),
    ):
        status = asyncio.create_task(composition.serve(settings))
        async with asyncio.timeout(30), aiohttp.ClientSession() as session:
            while not (ready := [line for line in lines if line["event"] == "server.ready"]):
                assert not status.done(), status.result()
                await asyncio.sleep(0.005)
            try:
                yield Served(ready[0]["urls"][0], status, session)
            finally:
                if not status.done():
                    os.kill(os.getpid(), signal.SIGTERM)
                await status


class Slow(FakeBackend):
    """A model that takes its time, so that a request lasts longer than its test."""

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        time.sleep(0.05)
        return super().decode(runs, draws)


class Doomed(FakeBackend):
    """A model that breaks with its first step."""

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        raise RuntimeError("the device is gone")


class Leaving(FakeBackend):
    """A model that tells whether it was freed."""

    closed = False

    def close(self) -> None:
        self.closed = True


async def test_the_exit_status_tells_that_the_engine_died(tmp_path: Path) -> None:
    async with serving(tmp_path, Doomed()) as server:
        status, reply = await server.post("/completion", {"prompt": "x", "n_predict": 4})
        assert (status, reply["error"]["type"]) == (500, "server_error")
        assert await server.status == 1


async def test_a_signal_ends_it_with_status_zero_and_frees_the_model(tmp_path: Path) -> None:
    backend = Leaving()
    async with serving(tmp_path, backend) as server:
        status, reply = await server.post("/completion", {"prompt": "x", "n_predict": 4, "ignore_eos": True})
        assert (status, reply["tokens_predicted"]) == (200, 4)
        assert not backend.closed
    assert server.status.result() == 0
    assert backend.closed


async def test_a_request_that_does_not_end_is_cut_when_the_shutdown_timeout_is_over(tmp_path: Path) -> None:
    async with serving(tmp_path, Slow(n_ctx=512), shutdown_timeout=0.2) as server:
        body = {"prompt": "x", "n_predict": -1, "ignore_eos": True}
        reply = asyncio.create_task(server.post("/completion", body))
        await server.until(lambda slots: any(slot["is_processing"] for slot in slots))
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server.status == 0
        status, error = await reply
        assert (status, error["error"]["type"]) == (503, "unavailable_error")


async def test_a_request_may_end_within_the_shutdown_timeout(tmp_path: Path) -> None:
    async with serving(tmp_path, Slow(n_ctx=512), shutdown_timeout=20.0) as server:
        body = {"prompt": "x", "n_predict": 8, "ignore_eos": True}
        reply = asyncio.create_task(server.post("/completion", body))
        await server.until(lambda slots: any(slot["is_processing"] for slot in slots))
        os.kill(os.getpid(), signal.SIGTERM)
        status, answer = await reply
        assert (status, answer["tokens_predicted"]) == (200, 8)
        assert await server.status == 0


async def test_requests_that_wait_or_are_being_prepared_as_it_begins_to_drain_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[LocalPrompts] = []
    body = {"prompt": "x", "n_predict": 4, "ignore_eos": True}
    async with serving(tmp_path, Slow(n_ctx=512, n_slots=1), shutdown_timeout=20.0) as server:
        replies = [asyncio.create_task(server.post("/completion", body)) for _ in range(2)]
        await server.until(lambda slots: any(slot["is_processing"] for slot in slots))
        with monkeypatch.context() as patched:
            patched.setattr(LocalPrompts, "_begin_jobs", lambda prompts: held.append(prompts))  # noqa: PLW0108 - binds
            replies.append(asyncio.create_task(server.post("/completion", body)))
            while not held or not any(isinstance(each.job, Prepare) for each in held[0].lanes.jobs.values()):
                await asyncio.sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)
            while (await server.get("/health"))[0] == 200:
                await asyncio.sleep(0.001)
            assert (await server.post("/completion", body))[0] == 503
        held[0]._begin_jobs()
        assert [(await each)[0] for each in replies] == [200] * 3
        assert await server.status == 0


async def test_while_it_drains_it_is_unhealthy_and_serves_until_the_drain_delay_is_over(tmp_path: Path) -> None:
    """A gateway has that time to notice; a second signal cuts it short."""
    async with serving(tmp_path, Slow(n_ctx=512), drain_delay=600.0) as server:
        assert (await server.get("/health"))[0] == 200
        body = {"prompt": "x", "n_predict": -1, "ignore_eos": True}
        running = asyncio.create_task(server.post("/completion", body))
        await server.until(lambda slots: any(slot["is_processing"] for slot in slots))
        os.kill(os.getpid(), signal.SIGTERM)
        while (found := await server.get("/health"))[0] == 200:
            await asyncio.sleep(0.01)
        assert (found[0], found[1]["error"]["type"]) == (503, "unavailable_error")
        assert (await server.post("/completion", {"prompt": "y", "n_predict": 2}))[0] == 200
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server.status == 0
        assert (await running)[0] == 503


async def test_what_is_refused_after_the_drain_delay_says_when_to_try_again(tmp_path: Path) -> None:
    async with serving(tmp_path, Slow(n_ctx=512), drain_delay=0.05, shutdown_timeout=30.0) as server:
        body = {"prompt": "x", "n_predict": -1, "ignore_eos": True}
        running = asyncio.create_task(server.post("/completion", body))
        await server.until(lambda slots: any(slot["is_processing"] for slot in slots))
        os.kill(os.getpid(), signal.SIGTERM)
        found: tuple[int, str | None] = (200, None)
        while found[0] == 200:
            small = {"prompt": "y", "n_predict": 1}
            async with server.session.post(f"{server.url}/completion", json=small) as reply:
                found = reply.status, reply.headers.get("Retry-After")
        assert found == (503, "1")
        os.kill(os.getpid(), signal.SIGTERM)
        await running


def cache_settings(monkeypatch: pytest.MonkeyPatch) -> list[CacheSettings]:
    """The cache's settings of the servers that start from now on."""
    made: list[CacheSettings] = []

    def recorded(*args: Any, **fields: Any) -> CacheSettings:
        made.append(make(*args, **fields))
        return made[-1]

    make = engine_module.cache_settings
    monkeypatch.setattr(engine_module, "cache_settings", recorded)
    return made


@pytest.mark.parametrize(("given", "kept"), [("auto", None), ("all", None), (0, 0), (99, 99)])
async def test_what_the_engine_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int | str, kept: int | None
) -> None:
    made = cache_settings(monkeypatch)
    async with serving(tmp_path, FakeBackend(), prefill_gap_ms=7.0, cache_idle_cells=given):
        [settings] = made
        assert (settings.gap_ms, settings.budgets.idle_cells) == (7.0, kept)


async def test_where_idle_prefixes_live_is_said_and_kept_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = FakeBackend()
    cost = KvCost(
        n_idle_cells=8192, prefill_slowdown=1.5, prefill_us=100.0, save_us=0.4, first_save_us=0.4, load_us=0.6
    )
    backend.info = msgspec.structs.replace(backend.info, kv_cost=cost)
    made = cache_settings(monkeypatch)
    async with serving(tmp_path, backend, cache_ram=3):
        [settings] = made
    budgets = settings.budgets
    assert (budgets.ram_bytes, budgets.offload_after, budgets.idle_cells) == (3 * 2**20, 164, None)
    assert (settings.segment_size, settings.cost) == (backend.info.segment_size, cost)
    assert "RAM: 3 MiB for prefixes" in capfd.readouterr().out


async def test_a_cache_that_is_not_what_the_pool_holds_ends_the_server(tmp_path: Path) -> None:
    class Wrong(FakeBackend):
        def seq_range(self, seq: int) -> range:
            return range(super().seq_range(seq).stop + (seq == 3 and self.n_decoded > 0))

    async with serving(tmp_path, Wrong(), debug_invariants=True) as server:
        await server.post("/completion", {"prompt": "x", "n_predict": 1})
        assert await server.status == 1


@pytest.mark.parametrize("is_on", [True, False])
async def test_replies_are_remembered_unless_it_is_turned_off(tmp_path: Path, is_on: bool) -> None:
    """Bytes that are no text come back as others."""

    class Garbled(FakeBackend):
        def sample(self, draws: Draws) -> list[tuple[int, ...]]:
            return [(0x80,) for _ in super().sample(draws)]

    async with serving(tmp_path, Garbled(), text_anchors=is_on) as server:
        status, reply = await server.post("/completion", {"prompt": "x", "n_predict": 30, "ignore_eos": True})
        assert status == 200
        assert "\ufffd" in reply["content"]
        again = {"prompt": f"x{reply['content']}</s>", "n_predict": 1}
        assert (await server.post("/completion", again))[1]["timings"]["cache_n"] == (31 if is_on else 2)


@pytest.mark.parametrize("is_on", [True, False])
async def test_a_control_token_that_is_written_out_in_a_message_is_plain_text_unless_that_is_turned_off(
    tmp_path: Path, is_on: bool
) -> None:
    backend = FakeBackend(n_slots=1, n_ctx=512)
    backend.info = msgspec.structs.replace(backend.info, control_tokens=("</s>",))
    async with serving(tmp_path, backend, escape_special=is_on) as server:
        counts = []
        for content in ("a</s>b", "ab"):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            status, reply = await server.post("/v1/chat/completions", body)
            assert status == 200, reply
            counts.append(reply["usage"]["prompt_tokens"])
        assert counts[0] - counts[1] == (len("</s>") if is_on else 1)


async def test_the_queue_of_a_server_is_as_long_as_configured(tmp_path: Path) -> None:
    async with serving(tmp_path, Slow(n_slots=1, n_ctx=512), max_queue=0, shutdown_timeout=0.0) as server:
        body = {"prompt": "x", "n_predict": -1, "ignore_eos": True}
        first = asyncio.create_task(server.post("/completion", body))
        await server.until(lambda slots: any(slot["is_processing"] for slot in slots))
        status, reply = await server.post("/completion", body)
        assert (status, reply["error"]["type"]) == (429, "rate_limit_error")
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await first)[0] == 503


def test_a_small_batch_limits_the_tokens_of_a_step() -> None:
    for argv, n_ubatch in (("-b 200", 200), ("-ub 300 -b 200", 200), ("-ub 100 -b 200", 100)):
        assert llama_settings(configured(argv), MODEL).n_ubatch == n_ubatch
