"""A server with a projector of images: flags, errors at start, and a file that changes."""

from __future__ import annotations

import json
import shutil
import urllib.error
from pathlib import Path
from typing import Any

import msgspec
import pytest

import llamaslot.demo
from bench.projector_files import write_projector
from llamaslot.app.config import Config
from llamaslot.app.model_config import check, check_projector
from llamaslot.app.model_table import ModelEntry
from llamaslot.app.served_models import create_models, device_bytes
from llamaslot.base.errors import ConfigError
from llamaslot.base.model import CPU, ProjectorInfo
from tests.app.test_crashes import STORY, engine_of, wait
from tests.fake_backend import FakeBackend
from tests.live import Server, serving

MODEL = Path(llamaslot.demo.__file__).with_name("demo.gguf")
WIDTH = 192


def complete(server: Server) -> str:
    return server.post("/completion", {"prompt": STORY, "n_predict": 8, "temperature": 0})["content"]


@pytest.mark.slow
def test_text_is_what_it_is_without_a_projector(tmp_path: Path) -> None:
    path = write_projector(tmp_path / "mmproj.gguf", "mlp", n_embd=WIDTH)
    with serving(tmp_path) as server:
        expected = complete(server)
    with serving(tmp_path, "--mmproj", path, "--no-mmproj-offload") as server:
        assert complete(server) == expected


@pytest.mark.slow
def test_a_projector_that_cannot_be_used_ends_the_start_with_an_error_that_names_the_flag(tmp_path: Path) -> None:
    path = write_projector(tmp_path / "narrow.gguf", "mlp", n_embd=64)
    crashing = write_projector(tmp_path / "crashing.gguf", "mlp", n_embd=WIDTH, dropped=["mm.2.weight"])
    for wrong in (path, crashing):
        with pytest.raises(AssertionError, match="--mmproj"), serving(tmp_path, "--mmproj", wrong):
            pass


def test_a_file_that_is_no_projector_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    audio = write_projector(tmp_path / "audio.gguf", "mlp", values={"clip.has_vision_encoder": False})
    for wrong in (tmp_path / "none.gguf", MODEL, audio, Path(__file__)):
        raises = pytest.raises(AssertionError, match="llamaslot: --mmproj: ")
        with raises as refused, serving(tmp_path, "--mmproj", wrong):
            pass
        assert "model.loading" not in str(refused.value)


def test_one_that_was_found_is_no_error(tmp_path: Path) -> None:
    path = str(tmp_path / "none.gguf")
    check_projector(Config(mmproj=path))
    with pytest.raises(ConfigError, match="--mmproj: there is no file"):
        check_projector(Config(mmproj=path, mmproj_auto=False))


@pytest.mark.slow
def test_a_model_of_several_with_a_wrong_projector_says_so(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(f"[models.a]\nmodel = '{MODEL}'\nmmproj = '{MODEL}'\n[models.b]\nmodel = '{MODEL}'\n")
    with serving(tmp_path, "--config", file, "-c", "1024") as server:
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/completion", {"model": "a", "prompt": "x"})
        assert f"--mmproj: {MODEL} is not a projector" in json.load(refused.value)["error"]["message"]
        assert not server.log_lines("model.loading")
        assert server.post("/completion", {"model": "b", "prompt": "x", "n_predict": 1})["tokens_predicted"] == 1


@pytest.mark.slow
def test_a_projector_in_a_models_folder_is_used_or_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    for name, n_embd in (("sees", WIDTH), ("reads", 64)):
        (folder / name).mkdir(parents=True)
        shutil.copy(MODEL, folder / name / "model.gguf")
        write_projector(folder / name / "mmproj-F32.gguf", "mlp", n_embd=n_embd)

    def modalities(server: Server) -> dict[str, list[str]]:
        return {each["id"]: each["architecture"]["input_modalities"] for each in server.get("/v1/models")["data"]}

    with serving(tmp_path, "--models-dir", folder, "-c", "1024") as server:
        assert set(map(tuple, modalities(server).values())) == {("text", "image")}, "as far as is known"
        for name, has_vision in (("sees", True), ("reads", False)):
            assert server.post("/completion", {"model": name, "prompt": "x", "n_predict": 1})["model"] == name
            assert server.get(f"/props?model={name}")["modalities"]["vision"] is has_vision
        assert modalities(server) == {"sees": ["text", "image"], "reads": ["text"]}
        (line,) = server.log_lines("projector.not_used")
        assert line["level"] == "warning"
        assert str(folder / "reads" / "mmproj-F32.gguf") in line["reason"]


def test_memory_for_a_model_of_several_includes_its_projector(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    with path.open("wb") as file:
        file.truncate(2**30)

    def estimate(**changes: Any) -> int:
        entry = ModelEntry(("a",), Config(model=str(MODEL), **changes))
        return create_models(Config(models_memory=600, cache_ram=8), [entry]).all[0].n_bytes

    assert estimate(mmproj=str(path)) - estimate() >= 2**30
    assert estimate(mmproj=str(tmp_path / "none.gguf")) < 2**30


def test_memory_on_a_gpu_includes_the_projector(tmp_path: Path) -> None:
    path = write_projector(tmp_path / "a.gguf", "mlp")
    config, on_cpu = Config(mmproj=str(path)), Config(mmproj=str(path), mmproj_offload=False)
    info = msgspec.structs.replace(
        FakeBackend(n_ctx=1024).info, device="CUDA0", projector=ProjectorInfo("digest", 0)
    )
    without = msgspec.structs.replace(info, projector=None)
    assert device_bytes(config, info) - device_bytes(config, without) == path.stat().st_size
    assert device_bytes(on_cpu, info) == device_bytes(config, without)
    assert device_bytes(config, msgspec.structs.replace(info, device=CPU)) == 0


@pytest.mark.slow
def test_a_projector_that_changes_in_its_sleep_is_not_used(tmp_path: Path) -> None:
    path = write_projector(tmp_path / "a.gguf", "mlp", n_embd=WIDTH)
    with serving(tmp_path, "--mmproj", path, "--sleep-idle-seconds", "1") as server:
        before = complete(server)
        wait(lambda: bool(server.get("/props")["is_sleeping"]))
        assert complete(server) == before
        wait(lambda: bool(server.get("/props")["is_sleeping"]))
        write_projector(path, "mlp", n_embd=WIDTH, seed=2)
        with pytest.raises(OSError):  # noqa: PT011 - an error of HTTP, or a connection that ends
            complete(server)
        wait(lambda: server.process.poll() is not None)
        assert "--mmproj was changed" in server.log.read_text()


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (Config(image_min_tokens=9, image_max_tokens=8), "--image-max-tokens"),
        (Config(mmproj="a.gguf", embeddings=True), "--mmproj"),
    ],
)
def test_flags_that_exclude_each_other(config: Config, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        check(config)


@pytest.mark.slow
def test_another_projector_is_not_used_after_a_crash(tmp_path: Path) -> None:
    path = write_projector(tmp_path / "a.gguf", "mlp", n_embd=WIDTH)
    with serving(tmp_path, "--mmproj", path) as server:
        complete(server)
        write_projector(path, "mlp", n_embd=WIDTH, seed=2)
        engine_of(server).kill()
        wait(lambda: "the projector cannot be used any more, or its file was changed" in server.log.read_text())
