"""Each flag and variable of llama-server is an option, has no effect for a reason, or is refused by its name."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from llamaslot.app.config import Config, options
from llamaslot.app.config_reader import Parser, add_flags, read_config, without_effect
from llamaslot.app.foreign_flags import FOREIGN_FLAGS, ForeignFlag
from llamaslot.base.errors import ConfigError
from tests.app import flags_page
from tests.app.flags_page import LlamaFlag, flags_of, listed_flags
from tests.live import serving

HELP = {"-h", "--help", "--usage"}
REFUSED = [row for row in FOREIGN_FLAGS if row.is_refused]
IGNORED = [row for row in FOREIGN_FLAGS if not row.is_refused]
COPIED = (
    "-c 1024 -np 2 -cb -fa auto -b 256 -ub 128 -ngl 99 -sm layer -ts 1 -mg 0 --no-mmap --numa distribute --prio 2 "
    "--poll 50 -sps 0.5 --keep 128 --threads-http 4 --no-context-shift --no-warmup -to 600 -lv 1 --log-colors off "
    "--cpu-strict 0 --slots --jinja --no-mmproj --no-perf -e --fit off --cpu-range 0- -C ffff",
    "-c 1024 --rope-scaling linear --rope-scale 2 --rope-freq-base 10000 --yarn-orig-ctx 512 --yarn-ext-factor -1 "
    "--yarn-attn-factor 1 --yarn-beta-slow 1 --yarn-beta-fast 32 --override-kv llama.context_length=int:4096 "
    "--mmap --mlock --n-cpu-moe 4 -ot ffn_.*=CPU --no-kv-offload --no-op-offload --no-repack --check-tensors "
    "--lazy-mode off "
    '--chat-template-kwargs {"enable_thinking":false} --reasoning-effort low --poll-batch 1 -dev none -dt 0.1 '
    "--spec-type ngram-mod --spec-ngram-mod-n-match 24 --draft-max 16 --spec-default",
)
"""Lines copied from llama-server, with all flags for which one would expect an error."""


def parsed(argv: list[str], environ: dict[str, str] | None = None) -> tuple[Config, list[tuple[str, str]]]:
    parser = Parser(allow_abbrev=False)
    add_flags(parser)
    flags = parser.parse(argv)
    return read_config(flags, environ or {}), without_effect(flags, environ or {})


def test_every_name_and_variable_of_llama_server_is_known() -> None:
    """With as many values, and the same variables."""
    known = {flag: (int(not row.is_bool), row.env) for row in options() for flag in row.flags}
    known |= {flag: (len(row.values), row.env) for row in FOREIGN_FLAGS for flag in row.flags}
    off = {flag: row.env for row in options() for flag in row.negatives}
    off |= {flag: row.env for row in FOREIGN_FLAGS for flag in row.flags}
    for row in listed_flags():
        for flag in {*row.flags} - HELP:
            assert flag in known, f"{flag} is neither an option nor in foreign_flags.py"
            assert known[flag][0] == row.n_values, flag
            assert known[flag][1] == row.env or not row.env, flag
        for flag in row.negatives:
            assert off[flag] in ("", row.env, row.env.replace("_ARG_", "_ARG_NO_")) or not row.env, flag


def test_the_list_is_llama_servers() -> None:
    """Only where its source is, as of a benchmark that compares with it."""
    source = next((platformdirs.user_cache_path("llamaslot") / "peers").glob("llama.cpp-*/common/arg.cpp"), None)
    if source is None:
        pytest.skip("llama.cpp's source is not on this machine")
    assert flags_of(source.read_text()) == listed_flags(), "make flags"


def test_the_source_is_read_as_it_is_meant() -> None:
    source = """
    auto add_opt = [&](common_arg arg) {};
    add_opt(common_arg(
        // a note
        {"-a", "--aa"}, "N", "help", [](common_params & params, int value) {}
    ).set_env("LLAMA_ARG_A"));
    add_opt(common_arg({"--b"}, {"--no-b"}, "help", [](common_params & params, bool value) {})
        .set_examples({LLAMA_EXAMPLE_CLI, LLAMA_EXAMPLE_SERVER}).set_env("LLAMA_ARG_B"));
    add_opt(common_arg({"--c"}, "C", "C", "help",
        [](common_params & params, const std::string & x, const std::string & y) {}));
    add_opt(common_arg({"--d"}, "help", [](common_params & params) {}).set_examples(mmproj_examples));
    add_opt(common_arg({"--e"}, "help", [](common_params &) {}).set_examples({LLAMA_EXAMPLE_CLI}));
    add_opt(common_arg({"--f"}, "help", [](common_params &) {}).set_excludes({LLAMA_EXAMPLE_SERVER}));
}
void common_params_add_preset_options(std::vector<common_arg> & args) {
    add_opt(common_arg({"--g"}, "help", [](common_params &) {}));
"""
    assert flags_of(source) == [
        LlamaFlag(("--b",), ("--no-b",), 0, "LLAMA_ARG_B"),
        LlamaFlag(("--c",), (), 2, ""),
        LlamaFlag(("--d",), (), 0, ""),
        LlamaFlag(("-a", "--aa"), (), 1, "LLAMA_ARG_A"),
    ]


def test_the_page_is_what_the_tables_say() -> None:
    assert flags_page.PAGE.read_text() == flags_page.page(listed_flags()), "make flags"


def test_no_flag_and_no_variable_is_there_twice() -> None:
    flags = [flag for row in options() for flag in (*row.flags, *row.negatives)]
    flags += [flag for row in FOREIGN_FLAGS for flag in row.flags]
    variables = [row.env for row in (*options(), *FOREIGN_FLAGS) if row.env]
    assert len(flags) == len(set(flags))
    assert len(variables) == len(set(variables))


def test_every_refused_flag_ends_the_start_by_its_name_with_one_line() -> None:
    assert REFUSED
    parser = Parser(allow_abbrev=False)
    add_flags(parser)
    for row in REFUSED:
        for flag in row.flags:
            for argv in ([flag], [flag, *row.values], [f"{flag}=x"] if row.values else [flag]):
                with pytest.raises(ConfigError) as caught:
                    parser.parse(argv)
                assert caught.value.message == f"{flag} is a flag of llama-server: {row.reason}"
                assert "\n" not in row.reason


def test_every_refused_variable_ends_the_start_by_its_name() -> None:
    for row in REFUSED:
        if row.env:
            with pytest.raises(ConfigError) as caught:
                parsed([], {row.env: "1"})
            assert caught.value.message == f"{row.env} is a variable of llama-server: {row.reason}"


def line(row: ForeignFlag, flag: str) -> list[str]:
    return [flag, *("1" for _ in row.values)]


def test_every_flag_without_effect_is_accepted_and_noted() -> None:
    assert IGNORED
    for row in IGNORED:
        for flag in row.flags:
            assert parsed(line(row, flag)) == (Config(), [(flag, row.reason)])
        if row.env:
            assert parsed([], {row.env: "1"}) == (Config(), [(row.env, row.reason)])


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"LLAMA_ARG_CONT_BATCHING": "0"},
            "LLAMA_ARG_CONT_BATCHING is a variable of llama-server: requests are always",
        ),
        ({"LLAMA_ARG_NO_CONT_BATCHING": ""}, "LLAMA_ARG_NO_CONT_BATCHING is a variable"),
        ({"LLAMA_ARG_CONTEXT_SHIFT": "off"}, ""),
        ({"LLAMA_ARG_AGENT": "false"}, ""),
        ({"LLAMA_ARG_AGENT": "on"}, "LLAMA_ARG_AGENT is a variable"),
        ({"LLAMA_ARG_SPEC_DRAFT_MODEL": "x"}, "LLAMA_ARG_SPEC_DRAFT_MODEL is a variable"),
        ({"LLAMA_ARG_CACHE_REUSE": ""}, ""),
        ({"LLAMA_ARG_MMPROJ_AUTO": "on"}, ""),
        ({"LLAMA_ARG_MMPROJ_URL": "x"}, "LLAMA_ARG_MMPROJ_URL is a variable"),
        ({"LLAMA_ARG_THREADS_HTTP": "4"}, ""),
    ],
)
def test_a_switch_in_a_variable_is_on_or_off(environ: dict[str, str], said: str) -> None:
    if not said:
        assert parsed([], environ)[0] == Config()
        return
    with pytest.raises(ConfigError, match=said):
        parsed([], environ)


@pytest.mark.parametrize("argv", COPIED)
def test_a_line_copied_from_llama_server_starts(tmp_path: Path, argv: str) -> None:
    with serving(tmp_path, *argv.split(), "--in-process", environ={"LLAMA_ARG_TIMEOUT": "60"}) as server:
        reply = server.post("/completion", {"prompt": "Once upon a time", "n_predict": 4, "temperature": 0})
        assert reply["tokens_predicted"] == 4
        noted = {each["flag"]: each["reason"] for each in server.log_lines("flag.without_effect")}
    words = [word for word in argv.split() if word.startswith("-")]
    expected = {flag for row in IGNORED for flag in row.flags if flag in words} | {"LLAMA_ARG_TIMEOUT"}
    # What needs a GPU is noted together.
    assert {
        flag for flag in noted if not flag.startswith(("--split-mode", "--tensor-split", "--main-gpu"))
    } == expected
    assert all(noted.values())


@pytest.mark.slow
def test_overridden_metadata_counts_in_the_process_that_tokenizes_too(tmp_path: Path) -> None:
    override = "tokenizer.ggml.bos_token_id=int:5,tokenizer.ggml.add_bos_token=bool:true"
    with serving(tmp_path, "--override-kv", override, "-c", "512") as server:
        assert server.post("/tokenize", {"content": "a", "add_special": True})["tokens"][0] == 5
        assert server.post("/completion", {"prompt": "a", "n_predict": 1})["tokens_evaluated"] == 2
