"""Where a setting comes from, and what a wrong one is answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from msgspec import Meta

from llamaslot.app.config import CacheType, Config, options
from llamaslot.app.config_reader import Parser, add_flags, read_config, read_models
from llamaslot.app.model_table import ModelEntry
from llamaslot.backend.llama import CACHE_TYPES
from llamaslot.base.errors import ConfigError


def read(argv: list[str], environ: dict[str, str] | None = None) -> Config:
    parser = Parser(allow_abbrev=False)
    add_flags(parser)
    return read_config(parser.parse(argv), environ or {})


def test_the_defaults_are_llama_servers() -> None:
    config = read([])
    assert (config.port, config.parallel, config.ctx_size, config.cache_prompt) == (8080, 4, 0, True)
    assert config == Config()


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "llamaslot.toml"
    file.write_text("port = 1\nparallel = 2\nctx-size = 3\ncache_prompt = false\n")
    environ = {"LLAMA_ARG_PORT": "10", "LLAMA_ARG_N_PARALLEL": "20"}
    config = read(["--config", str(file), "--port", "100"], environ)
    assert (config.port, config.parallel, config.ctx_size, config.cache_prompt) == (100, 20, 3, False)
    assert read([], {"LLAMASLOT_CONFIG": str(file)}).port == 1


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["-m", "x.gguf"], "model", "x.gguf"),
        (["x.gguf"], "model", "x.gguf"),
        (["-np", "8"], "parallel", 8),
        (["-c", "4096"], "ctx_size", 4096),
        (["--kv-mem-fraction", "0.5"], "kv_mem_fraction", 0.5),
        (["--kv-mem-fraction", "1"], "kv_mem_fraction", 1.0),
        (["--cache-seqs", "0"], "cache_seqs", 0),
        (["--cache-seqs", "-1"], "cache_seqs", -1),
        ([], "cache_idle_cells", "auto"),
        ([], "ctx_checkpoints", 32),
        (["-ctxcp", "0"], "ctx_checkpoints", 0),
        (["--swa-checkpoints", "7"], "ctx_checkpoints", 7),
        ([], "checkpoint_min_step", 1024),
        (["-cms", "8192"], "checkpoint_min_step", 8192),
        ([], "checkpoint_ram", "auto"),
        (["--checkpoint-ram", "100"], "checkpoint_ram", 100),
        ([], "cache_ram", "auto"),
        (["--cache-ram", "100"], "cache_ram", 100),
        (["-cram", "-1"], "cache_ram", -1),
        (["--cache-idle-cells", "auto"], "cache_idle_cells", "auto"),
        (["--cache-idle-cells", "0"], "cache_idle_cells", 0),
        (["--cache-idle-cells", "all"], "cache_idle_cells", "all"),
        (["--cache-idle-cells", "-1"], "cache_idle_cells", "all"),
        (["--cache-salt-from-api-key"], "cache_salt_from_api_key", True),
        (["--cache-debug-text"], "cache_debug_text", True),
        (["--no-cache-debug-text"], "cache_debug_text", False),
        (["--debug-invariants"], "debug_invariants", True),
        (["--drop-volatile", "off"], "drop_volatile", "off"),
        (["--no-text-anchors"], "text_anchors", False),
        (["--no-escape-special"], "escape_special", False),
        (["--slot-save-path", "/tmp/x"], "slot_save_path", "/tmp/x"),
        (["--session-min-match", "0.5"], "session_min_match", 0.5),
        (["--warm-ahead", "auto"], "n_warm_ahead", 50_000),
        (["--warm-ahead", "off"], "n_warm_ahead", 0),
        (["--warm-ahead", "7000"], "n_warm_ahead", 7000),
        (["-n", "-1"], "n_predict", -1),
        (["-ngl", "99"], "gpu_layers", 99),
        (["-ngl", "all"], "gpu_layers", "all"),
        (["-fa", "on"], "flash_attn", "on"),
        (["-ctk", "q8_0"], "cache_type_k", "q8_0"),
        (["--no-kv-unified"], "kv_unified", False),
        (["-kvu"], "kv_unified", True),
        (["--no-cache-prompt"], "cache_prompt", False),
        (["--cache-prompt"], "cache_prompt", True),
        ([], "speculate", "auto"),
        (["--spec-type", "ngram-mod"], "speculate", "auto"),
        (["--spec-type", "none"], "speculate", "off"),
        (["--speculate", "8"], "speculate", 8),
        (["--metrics"], "metrics", True),
        (["--no-slots"], "slots", False),
        (["-no-kvu"], "kv_unified", False),
        (["-np", "-1"], "parallel", 4),
        (["-fa", "1"], "flash_attn", "on"),
        (["-fa", "disabled"], "flash_attn", "off"),
        (["--temp", "0"], "temperature", 0.0),
        (["--seed", "42"], "seed", 42),
        ([], "temperature", None),
        (["--temp", "0.8"], "temperature", 0.8),
        (["-l", "5+1", "--logit-bias", "6-1"], "logit_bias", ("5+1", "6-1")),
        ([], "logit_bias", ()),
        (["--no-mmap"], "mmap", False),
        (["--mlock"], "mlock", True),
        ([], "weights_load_mode", "auto"),
        (["--mmap"], "weights_load_mode", "auto"),
        (["--no-mmap"], "weights_load_mode", "none"),
        (["--load-mode", "mmap+mlock"], "weights_load_mode", "mmap+mlock"),
        (["--direct-io", "--no-mmap"], "weights_load_mode", "dio"),
        (["--load-mode", "mmap"], "maps_weights", True),
        (["--mlock"], "maps_weights", False),
        (["-dio"], "maps_weights", False),
        (["--no-host"], "no_host", True),
        (["--no-kv-offload"], "kv_offload", False),
        (["-nkvo"], "kv_offload", False),
        (["-kvo"], "kv_offload", True),
        (["--no-ui"], "webui", False),
        (["--device", "none", "-ngl", "9"], "wanted_gpu_layers", 0),
        (["-hf", "a/b:Q8_0"], "hf_repo", "a/b:Q8_0"),
        (["--log-verbose"], "verbose", True),
        (["--swa-full"], "swa_full", True),
        (["--no-jinja"], "jinja", False),
        (["-v"], "verbose", True),
    ],
)
def test_flags(argv: list[str], name: str, value: object) -> None:
    assert getattr(read(argv), name) == value


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--prot", "1"], {}, ["--prot", "did you mean --port"]),
        (["--pooling", "max"], {}, ["--pooling", "auto, none, mean, cls, last, rank"]),
        (["--reranking", "--pooling", "last"], {}, ["--reranking", "--pooling last"]),
        (["--embedding", "-no-kvu"], {}, ["--embeddings", "--no-kv-unified"]),
        (["--embd-normalize", "-2"], {}, ["--embd-normalize", "-1"]),
        (["--no-kv-unifed"], {}, ["did you mean --no-kv-unified"]),
        (["--model-draft", "x"], {}, ["--model-draft is a flag of llama-server", "remove it"]),
        (["--port", "x"], {}, ["--port", "'x'", "int"]),
        (["--port", "70000"], {}, ["--port", "65535"]),
        (["--port"], {}, ["--port"]),
        (["-np", "0"], {}, ["--parallel"]),
        (["-np", "257"], {}, ["--parallel", "256"]),
        (["-c", "99999999999"], {}, ["--ctx-size", "2147483647"]),
        (["--kv-mem-fraction", "0"], {}, ["--kv-mem-fraction", "greater than 0"]),
        (["--kv-mem-fraction", "1.01"], {}, ["--kv-mem-fraction", "1.0"]),
        (["--kv-mem-fraction", "-0.5"], {}, ["--kv-mem-fraction", "0.0"]),
        (["--kv-mem-fraction", "nan"], {}, ["--kv-mem-fraction"]),
        (["--kv-mem-fraction", "85%"], {}, ["--kv-mem-fraction", "85%"]),
        ([], {"LLAMASLOT_KV_MEM_FRACTION": "2"}, ["LLAMASLOT_KV_MEM_FRACTION", "1.0"]),
        (["-ctxcp", "-1"], {}, ["--ctx-checkpoints", ">= 0"]),
        (["--checkpoint-min-step", "63"], {}, ["--checkpoint-min-step", ">= 64"]),
        ([], {"LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT": "0"}, ["LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT", ">= 64"]),
        (["--checkpoint-ram", "0"], {}, ["--checkpoint-ram", "auto, N"]),
        ([], {"LLAMASLOT_CHECKPOINT_RAM": "much"}, ["LLAMASLOT_CHECKPOINT_RAM", "auto, N"]),
        (["--cache-seqs", "-2"], {}, ["--cache-seqs", "-1"]),
        (["--cache-seqs", "256"], {}, ["--cache-seqs", "255"]),
        (["--cache-idle-cells", "-2"], {}, ["--cache-idle-cells", "-2", ">= 0"]),
        (["--cache-idle-cells", "few"], {}, ["--cache-idle-cells", "few", "auto, all, N"]),
        ([], {"LLAMASLOT_CACHE_IDLE_CELLS": "few"}, ["LLAMASLOT_CACHE_IDLE_CELLS", "few"]),
        ([], {"LLAMASLOT_CACHE_DEBUG_TEXT": "maybe"}, ["LLAMASLOT_CACHE_DEBUG_TEXT", "maybe"]),
        ([], {"LLAMASLOT_CACHE_SEQS": "some"}, ["LLAMASLOT_CACHE_SEQS", "some"]),
        (["-fa", "maybe"], {}, ["--flash-attn", "auto, on, off"]),
        ([], {"LLAMA_ARG_ENDPOINT_METRICS": "maybe"}, ["LLAMA_ARG_ENDPOINT_METRICS", "maybe"]),
        (["-ctv", "q9"], {}, ["--cache-type-v", "q9"]),
        (["-ub", "2", "-np", "4"], {}, ["--ubatch-size", "--parallel"]),
        (["-b", "2", "-np", "4"], {}, ["--batch-size", "--parallel"]),
        (["-fa", "off", "-ctv", "q8_0"], {}, ["--cache-type-v", "flash attention"]),
        (["a.gguf", "b.gguf"], {}, ["b.gguf"]),
        (["a.gguf", "-m", "b.gguf"], {}, ["a.gguf", "b.gguf"]),
        (["--temp", "nan"], {}, ["--temp"]),
        (["--repeat-penalty", "0"], {}, ["--repeat-penalty", "0.01"]),
        (["--mirostat", "3"], {}, ["--mirostat", "2"]),
        ([], {"LLAMA_ARG_CTX_SIZE": "many"}, ["LLAMA_ARG_CTX_SIZE", "many"]),
        ([], {"LLAMASLOT_CONFIG": "/nowhere.toml"}, ["/nowhere.toml"]),
    ],
)
def test_wrong_values_are_named(argv: list[str], environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(argv, environ)
    assert "\n" not in caught.value.message
    for word in words:
        assert word in caught.value.message


def test_sampling_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'logit-bias = ["5+1", "6-1"]\ndry_sequence_breaker = "x"\nrepeat-penalty = 1.5\nignore-eos = true'
    )
    config = read(["--config", str(file), "--repeat-penalty", "1.25"])
    assert (config.logit_bias, config.dry_sequence_breaker) == (("5+1", "6-1"), ("x",))
    assert (config.repeat_penalty, config.ignore_eos) == (1.25, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", ["prot", "port"]),
        ("port = 'x'", ["port in"]),
        ("port = ", ["TOML"]),
        ("port = true", ["port in"]),
        ("model-draft = 'x'", ["model-draft", "remove it"]),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(["--config", str(file)])
    for word in [str(file), *words]:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("environ", "name", "value"),
    [
        ({"LLAMA_ARG_ENDPOINT_METRICS": "on"}, "metrics", True),
        ({"LLAMA_ARG_ENDPOINT_METRICS": "1"}, "metrics", True),
        ({"LLAMA_ARG_ENDPOINT_SLOTS": "disabled"}, "slots", False),
        ({"LLAMA_ARG_NO_ENDPOINT_SLOTS": "1"}, "slots", False),
        ({"LLAMA_ARG_NO_CACHE_PROMPT": "1"}, "cache_prompt", False),
        ({"LLAMA_ARG_PORT": ""}, "port", 8080),
        ({"LLAMA_ARG_SPEC_TYPE": "none"}, "speculate", "off"),
        ({"LLAMASLOT_CACHE_SEQS": "9"}, "cache_seqs", 9),
        ({"LLAMA_ARG_CTX_CHECKPOINTS": "9"}, "ctx_checkpoints", 9),
        ({"LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT": "900"}, "checkpoint_min_step", 900),
        ({"LLAMASLOT_CHECKPOINT_RAM": "9"}, "checkpoint_ram", 9),
        ({"LLAMASLOT_CACHE_IDLE_CELLS": "100"}, "cache_idle_cells", 100),
        ({"LLAMASLOT_CACHE_SALT_FROM_API_KEY": "1"}, "cache_salt_from_api_key", True),
        ({"LLAMASLOT_CACHE_DEBUG_TEXT": "on"}, "cache_debug_text", True),
        ({"LLAMASLOT_CACHE_DEBUG_TEXT": "off"}, "cache_debug_text", False),
        ({"LLAMASLOT_DEBUG_INVARIANTS": "true"}, "debug_invariants", True),
        ({"LLAMASLOT_KV_MEM_FRACTION": "0.25"}, "kv_mem_fraction", 0.25),
        ({"LLAMA_ARG_NO_HOST": "1"}, "no_host", True),
        ({"LLAMA_ARG_KV_OFFLOAD": "0"}, "kv_offload", False),
        ({"LLAMA_ARG_NO_KV_OFFLOAD": "1"}, "kv_offload", False),
        ({"LLAMA_ARG_HF_REPO": "a/b"}, "hf_repo", "a/b"),
        ({"HF_TOKEN": "x"}, "hf_token", "x"),
        ({"LLAMA_ARG_TEMPERATURE": "0.5"}, "temperature", 0.5),
        ({"LLAMA_ARG_REPEAT_PENALTY": "1.5"}, "repeat_penalty", 1.5),
        ({"LLAMA_ARG_PRESENCE_PENALTY": "0.5"}, "presence_penalty", 0.5),
        ({"LLAMA_ARG_FREQUENCY_PENALTY": "0.5"}, "frequency_penalty", 0.5),
        ({"LLAMA_ARG_LOGIT_BIAS": "5+1"}, "logit_bias", ("5+1",)),
    ],
)
def test_the_environment(environ: dict[str, str], name: str, value: object) -> None:
    assert getattr(read([], environ), name) == value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("-tz 4", ["there is no flag -tz"]),
        ("-t4", ["there is no flag -t4", "did you mean -t"]),
        ("-np4", ["there is no flag -np4", "did you mean -np"]),
        ("--para 4", ["there is no flag --para", "did you mean --parallel"]),
        ("-vh", ["there is no flag -vh"]),
    ],
)
def test_a_flag_that_is_not_an_option_here_is_refused_by_its_name(argv: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(argv.split())
    for word in words:
        assert word in caught.value.message


def test_underscores_in_a_flag_are_dashes_as_in_llama_server() -> None:
    assert read(["--ctx_size", "4096", "--alias=a_b", "--no_mmap"]) == Config(
        ctx_size=4096, alias="a_b", mmap=False
    )
    with pytest.raises(ConfigError, match="there is no flag --ctx-sizes"):
        read(["--ctx_sizes", "4096"])


def test_without_jinja_a_template_has_to_be_a_built_in_one() -> None:
    assert read(["--no-jinja", "--chat-template", "llama3"]).chat_template == "llama3"
    for argv in (["--chat-template", "{{ x }}"], ["--chat-template-file", "x.jinja"]):
        with pytest.raises(ConfigError, match="--no-jinja allows only built-in templates"):
            read(["--no-jinja", *argv])


def test_cache_types_are_those_of_the_backend() -> None:
    assert set(get_args(CacheType)) == set(CACHE_TYPES)


def test_every_option_has_flags_a_variable_and_a_text_of_its_own() -> None:
    rows = list(options())
    flags = [flag for row in rows for flag in row.flags]
    assert len(flags) == len(set(flags))
    assert len({row.env for row in rows}) == len(rows)
    assert all(row.text and row.flag.startswith("--") for row in rows)


def models(argv: list[str], environ: dict[str, str] | None = None) -> list[ModelEntry]:
    parser = Parser(allow_abbrev=False)
    add_flags(parser)
    return read_models(parser.parse(argv), environ or {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of models, and of what is none."""
    for name in (
        "b.gguf",
        "a.gguf",
        "mmproj-a.gguf",
        "notes.txt",
        "big-00001-of-00002.gguf",
        "big-00002-of-00002.gguf",
    ):
        (tmp_path / name).touch()
    (tmp_path / "in-folder").mkdir()
    (tmp_path / "in-folder" / "model-q4.gguf").touch()
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_each_model_of_a_folder_is_named_after_its_file_or_folder(folder: Path) -> None:
    found = models(["--models-dir", str(folder), "-c", "4096"], {"LLAMA_ARG_N_PARALLEL": "2"})
    assert [each.names for each in found] == [("a",), ("b",), ("big",), ("in-folder",)]
    assert {(each.config.ctx_size, each.config.parallel) for each in found} == {(4096, 2)}
    assert found[2].config.model == str(folder / "big-00001-of-00002.gguf")
    assert found[3].config.model == str(folder / "in-folder" / "model-q4.gguf")
    assert not any(each.is_default for each in found)


def test_a_model_in_a_folder_of_its_own_comes_with_its_projector(folder: Path) -> None:
    own = folder / "in-folder"
    for name in ("mmproj-F32.gguf", "mmproj-Q4_0.gguf", "model.mmproj-F16.gguf"):
        (own / name).touch()
    argv = ["--models-dir", str(folder)]
    found = {each.names[0]: each.config for each in models(argv)}
    assert {name: each.mmproj for name, each in found.items()} == {
        **dict.fromkeys(("a", "b", "big"), ""),
        "in-folder": str(own / "mmproj-Q4_0.gguf"),
    }
    assert found["in-folder"].model == str(own / "model-q4.gguf")
    assert found["in-folder"].has_found_mmproj
    for without in (["--no-mmproj"], ["--no-mmproj-auto"], ["--embeddings"]):
        assert not any(each.config.mmproj for each in models([*argv, *without]))
    assert not any(each.config.mmproj for each in models(argv, {"LLAMA_ARG_NO_MMPROJ_AUTO": ""}))
    file = folder / "models.toml"
    for line, expected in (
        ("mmproj = 'x.gguf'", ("x.gguf", False)),
        ("mmproj-auto = false", ("", False)),
        (f"model = '{folder / 'b.gguf'}'", ("", False)),
        ("ctx-size = 512", (str(own / "mmproj-Q4_0.gguf"), True)),
    ):
        file.write_text(f"[models.in-folder]\n{line}\n")
        (config,) = (each.config for each in models([*argv, "--config", str(file)]) if each.names[0] == "in-folder")
        assert (config.mmproj, config.has_found_mmproj) == expected


def test_one_model_is_no_table() -> None:
    assert models([]) == models(["-m", "a.gguf"]) == models(["a.gguf"]) == []


def test_the_first_of_several_models_is_the_default() -> None:
    found = models(["-m", "some/a.gguf", "-m", "b.gguf"])
    assert [(each.names, each.config.model, each.is_default) for each in found] == [
        (("a",), "some/a.gguf", True),
        (("b",), "b.gguf", False),
    ]


def test_a_table_changes_a_model_or_adds_one(folder: Path) -> None:
    file = folder / "models.toml"
    file.write_text(
        f"parallel = 3\n[models.a]\nctx-size = 512\nalias = 'x,y'\npin = true\n"
        f"[models.new]\nmodel = '{folder / 'b.gguf'}'\ntemperature = 0.5\n"
    )
    found = {
        each.names[0]: each for each in models(["--config", str(file), "--models-dir", str(folder), "-np", "5"])
    }
    assert found["a"].names == ("a", "x", "y")
    assert (found["a"].config.ctx_size, found["a"].config.parallel, found["a"].is_pinned) == (512, 5, True)
    assert (found["new"].config.temperature, found["new"].is_pinned) == (0.5, False)
    assert found["b"].config.ctx_size == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[models.a]\n", ["[models.a] has no model"]),
        ("models = 3\n", ["[models.NAME]"]),
        ("[models]\na = 3\n", ["[models.a] is not a table"]),
        ("[models.a]\nmodel = 'x.gguf'\nport = 3\n", ["[models.a]", "port", "outside"]),
        ("[models.a]\nmodel = 'x.gguf'\nprot = 3\n", ["[models.a]", "prot"]),
        ("[models.a]\nmodel = 'x.gguf'\npin = 3\n", ["[models.a]", "pin"]),
        ("[models.a]\nmodel = 'x.gguf'\nparallel = 'x'\n", ["parallel of [models.a]", "invalid"]),
        ("[models.a]\nmodel = 'x.gguf'\nalias = 'b'\n[models.b]\nmodel = 'y.gguf'\n", ["name b"]),
        ("hf-repo = 'a/b'\n[models.a]\nmodel = 'x.gguf'\n", ["--hf-repo"]),
    ],
)
def test_wrong_tables_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        models(["--config", str(file)])
    assert all(word in caught.value.message for word in words), caught.value.message


PRESETS = """
version = 1
; for all models
[*]
c = 8192   # inline
n-gpu-layers = 8
stop-timeout = 3

[coder]
model = {folder}/b.gguf
alias = x,y
c = 4096
LLAMA_ARG_N_PARALLEL = 2
seed = 9
no-mmap = true
jinja = on
load-on-startup = true
no-perf = true
no-cont-batching = 0

[a] ; also in the folder
temp = 0.5
no-context-shift = false
[owner/Some-GGUF:Q8_0]
[hub]
hf-repo = owner/Other-GGUF
np = 1
"""


def test_presets_of_llama_server_are_models(folder: Path) -> None:
    file = folder / "presets.ini"
    file.write_text(PRESETS.format(folder=folder))
    argv = ["--models-preset", str(file), "--models-dir", str(folder), "--seed", "5"]
    environ = {"LLAMA_ARG_N_GPU_LAYERS": "3", "LLAMA_ARG_N_PREDICT": "7"}
    found = {each.names[0]: each for each in models(argv, environ)}
    assert list(found) == ["a", "b", "big", "in-folder", "coder", "owner/Some-GGUF:Q8_0", "hub"]
    # As in llama-server, flags come first, then sections, [*], and variables.
    assert {(each.config.seed, each.config.gpu_layers, each.config.n_predict) for each in found.values()} == {
        (5, 8, 7)
    }
    coder = found["coder"]
    assert (coder.names, coder.loads_at_start, coder.is_pinned) == (("coder", "x", "y"), True, False)
    assert coder.config.model == f"{folder}/b.gguf"
    assert (coder.config.ctx_size, coder.config.parallel, coder.config.mmap) == (4096, 2, False)
    assert (found["a"].config.ctx_size, found["a"].config.temperature) == (8192, 0.5)
    assert found["a"].config.context_shift
    assert not found["a"].loads_at_start
    assert found["b"].config.ctx_size == 8192
    hub = found["hub"].config
    assert (hub.hf_repo, hub.parallel, hub.model) == ("owner/Other-GGUF", 1, "auto")
    assert found["owner/Some-GGUF:Q8_0"].config.hf_repo == "owner/Some-GGUF:Q8_0"
    (alone,) = models([], {"LLAMA_ARG_MODELS_PRESET": str(written(file, "[a]\nm = x.gguf\n"))})
    assert (alone.names, alone.config.model) == (("a",), "x.gguf")
    # With a table of the same name, and one of -m.
    table = written(folder / "models.toml", "[models.a]\nparallel = 7\nhf-repo = 'o/r'\n[models.b]\nparallel = 8\n")
    file.write_text("[a]\nc = 512\n")
    first, second = models(["--config", str(table), "--models-preset", str(file), "-m", "b.gguf"])
    assert (first.names, first.config.model, first.is_default) == (("b",), "b.gguf", True)
    assert (second.config.ctx_size, second.config.parallel, second.config.hf_repo) == (512, 7, "o/r")


def test_presets_are_read_as_by_llama_server(tmp_path: Path) -> None:
    text = "[*]\r\nload-on-startup = true\r\n[b]\rm = old.gguf\r[ b ]\nversion = 2\n m=  y z.gguf\t; comment\n"
    text += "load-on-startup = off\n[o/r:UD-q4_k_xl]\n[team/coder:x]\nmodel = c.gguf\n[d:q8_0]\nhf-repo = o/r\n"
    found = models(["--models-preset", str(written(tmp_path / "presets.ini", text))])
    names = ("b",), ("o/r:Q4_K_XL", "o/r:UD-q4_k_xl"), ("team/coder:X", "team/coder:x"), ("d:Q8_0", "d:q8_0")
    assert tuple(each.names for each in found) == names
    assert [each.loads_at_start for each in found] == [False, True, True, True]
    assert [each.config.model for each in found] == ["y z.gguf", "auto", "c.gguf", "auto"]
    assert [each.config.hf_repo for each in found] == ["", "o/r:UD-q4_k_xl", "", "o/r"]


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\nm = x.gguf\nctx-sice = 3\n", ["ctx-sice of [a]", "did you mean ctx-size"]),
        ("[a]\nm = x.gguf\nc = x\n", ["model a", "c of [a]", "'x' is invalid"]),
        ("[*]\nc = x\n[a]\nm = x.gguf\n", ["model a", "c of [*]", "'x' is invalid"]),
        ("[a]\nm = x.gguf\nport = 3\n", ["port of [a]", "whole server", "--port"]),
        ("[*]\nLLAMA_ARG_CACHE_RAM = 0\n", ["LLAMA_ARG_CACHE_RAM of [*]", "--cache-ram"]),
        ("[*]\nmodel = x.gguf\n", ["model of [*]", "one model"]),
        ("[*]\nalias = x\n", ["alias of [*]", "one model"]),
        ("[a]\nm = x.gguf\nmd = y.gguf\n", ["md of [a]", "no draft models"]),
        ("[a]\nm = x.gguf\nno-mmap = 2\n", ["no-mmap of [a]", "'2' is invalid"]),
        ("[a]\nm = x.gguf\nload-on-startup = maybe\n", ["load-on-startup of [a]", "'maybe' is invalid"]),
        ("[a]\nc = 512\n", ["[a] has no model"]),
        ("[a,b]\nm = x.gguf\n", ["[a,b]", "no comma"]),
        ("[a]\nm = x.gguf\n[ ]\nc = 512\n", ["[]", "not empty"]),
        ("c = 512\n[a]\nm = x.gguf\n", ["c in", "before the first section"]),
        ("[a]\nm x.gguf\n", ["line 2"]),
        ("[*]\nc = 512\n", ["there is no model in"]),
        ("[a]\nm = x.gguf\nalias = b\n[b]\nm = y.gguf\n", ["name b"]),
    ],
)
def test_wrong_presets_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    file = written(tmp_path / "presets.ini", text)
    with pytest.raises(ConfigError) as caught:
        models(["--models-preset", str(file)])
    assert all(word in caught.value.message for word in words), caught.value.message
    if not {"model a", "name b"} & {*words}:
        assert caught.value.param == "--models-preset"
    with pytest.raises(ConfigError, match="--models-preset"):
        models(["--models-preset", str(tmp_path / "none.ini")])


def test_models_that_cannot_be_told_apart_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="have the name a"):
        models(["-m", "x/a.gguf", "-m", "y/a.gguf"])
    with pytest.raises(ConfigError, match=r"--models-dir: .* cannot be read"):
        models(["--models-dir", str(folder / "nowhere")])
    with pytest.raises(ConfigError, match="there is no model"):
        models(["--models-dir", str(folder / "empty")])


def is_unbounded(annotation: Any) -> bool:
    """True if an option may be a number without a lower and an upper bound."""
    if get_origin(annotation) is Annotated:
        number, *metas = get_args(annotation)
        bounds = [each for each in metas if isinstance(each, Meta)]
        has_least = any(each.ge is not None or each.gt is not None for each in bounds)
        has_most = any(each.le is not None or each.lt is not None for each in bounds)
        return number in (int, float) and not (has_least and has_most)
    return annotation in (int, float) or any(map(is_unbounded, get_args(annotation)))


def test_each_number_is_bounded() -> None:
    # ctypes keeps the lowest bits of a number that is too large: none of the layers on a GPU instead of all.
    hints = get_type_hints(Config, include_extras=True)
    assert [name for name, annotation in hints.items() if is_unbounded(annotation)] == []
    assert is_unbounded(int | None)
    assert is_unbounded(Annotated[int, Meta(ge=0)] | str)
