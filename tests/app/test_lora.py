"""A server with LoRA adapters: flags, errors at start, and prefixes of each set in RAM, on disk and after sleep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import llamaslot.demo
from bench.lora_files import write_adapter
from llamaslot.app.config import Config
from llamaslot.app.model_config import adapters
from llamaslot.base.errors import ConfigError
from tests.app.test_crashes import STORY, engine_of, wait
from tests.live import WRITE_SOON, Server, serving

MODEL = Path(llamaslot.demo.__file__).with_name("demo.gguf")
SCALES = ((0.0, 0.0), (1.0, 0.0), (0.0, 0.5), (1.0, 0.5))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"{i}.gguf", MODEL, i, strength=0.5) for i in range(2)]


def complete(server: Server, scales: Sequence[float] | None = None, prompt: str = STORY * 10) -> tuple[str, int]:
    """The text of a greedy completion, and the prompt's tokens that were reused."""
    lora = [] if scales is None else [{"id": i, "scale": scale} for i, scale in enumerate(scales)]
    body = server.post("/completion", {"prompt": prompt, "n_predict": 16, "temperature": 0, "lora": lora})
    return body["content"], body["timings"]["cache_n"]


def test_files_and_scales_of_the_flags() -> None:
    config = Config(lora=("a.gguf,b.gguf", '"c,d.gguf"'), lora_scaled=("e.gguf:0.5,C:/f.gguf:-2",))
    expected = [("a.gguf", 1.0), ("b.gguf", 1.0), ("c,d.gguf", 1.0), ("e.gguf", 0.5), ("C:/f.gguf", -2.0)]
    assert [(str(path), scale) for path, scale in adapters(config)] == expected
    unapplied = adapters(Config(lora=("a.gguf",), lora_scaled=("b.gguf:0.5",), lora_init_without_apply=True))
    assert [scale for _, scale in unapplied] == [0.0, 0.0]
    for wrong in ("a.gguf", "a.gguf:much", ":1", "a.gguf:1e9", "a.gguf:nan"):
        with pytest.raises(ConfigError, match="--lora-scaled"):
            adapters(Config(lora_scaled=(wrong,)))


@pytest.mark.slow
def test_prefixes_of_each_set_survive_sleep_and_a_restart_and_are_found_by_it_alone(
    tmp_path: Path, files: list[Path]
) -> None:
    flags = ("--cache-disk", tmp_path / "disk", "--sleep-idle-seconds", "1", "--debug-invariants", "--metrics")
    own = ("--lora", files[0], "--lora-scaled", f"{files[1]}:0.5", "--lora-init-without-apply")
    with serving(tmp_path, *flags, *own, fault=WRITE_SOON) as server:
        assert [each["scale"] for each in server.get("/lora-adapters")] == [0.0, 0.0]
        found = [complete(server, scales) for scales in SCALES]
        assert len({text for text, _ in found}) == len(SCALES)
        assert {n for _, n in found} == {0}
        assert complete(server) == (found[0][0], complete(server, SCALES[0])[1])
        wait(lambda: bool(server.get("/props")["is_sleeping"]))
        for scales, (text, _) in zip(SCALES, found, strict=True):
            again, n_cached = complete(server, scales)
            assert again == text
            assert n_cached > 100
        n_tokens = server.get("/cache")["ram"]["tokens"]
        wait(lambda: server.get("/cache")["disk"]["tokens"] >= n_tokens)
        assert server.stop() == 0
    # Other ids, and no other scales.
    turned = ("--lora", f"{files[1]},{files[0]}")
    with serving(tmp_path, *flags, *turned) as server:
        assert [each["scale"] for each in server.get("/lora-adapters")] == [1.0, 1.0]
        for scales, (text, _) in zip(SCALES, found, strict=True):
            again, n_cached = complete(server, scales[::-1])
            assert again == text
            assert n_cached > 100
        assert complete(server)[1] == 0


@pytest.mark.slow
def test_scales_that_were_set_are_those_of_the_next_engine(tmp_path: Path, files: list[Path]) -> None:
    with serving(tmp_path, "--lora", f"{files[0]},{files[1]}") as server:
        expected = complete(server, (0.0, 0.5))[0]
        assert complete(server)[0] != expected
        server.post("/lora-adapters", [{"id": 1, "scale": 0.5}])
        engine_of(server).kill()
        wait(lambda: len(server.log_lines("engine.restarted")) == 1)
        assert [each["scale"] for each in server.get("/lora-adapters")] == [0.0, 0.5]
        assert complete(server) == (expected, 0)


@pytest.mark.slow
def test_what_cannot_be_applied_ends_the_start_with_an_error_that_names_the_flag(
    tmp_path: Path, files: list[Path]
) -> None:
    other = write_adapter(tmp_path / "other.gguf", MODEL, 1, values={"general.architecture": "gemma3"})
    for value in (other, tmp_path / "none.gguf", MODEL):
        with pytest.raises(AssertionError, match="--lora"), serving(tmp_path, "--lora", f"{files[0]},{value}"):
            pass


@pytest.mark.slow
def test_a_file_that_changes_in_its_sleep_is_not_used(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", MODEL, 1)
    with serving(tmp_path, "--lora", path, "--sleep-idle-seconds", "1") as server:
        complete(server)
        wait(lambda: bool(server.get("/props")["is_sleeping"]))
        write_adapter(path, MODEL, 2)
        with pytest.raises(OSError):  # noqa: PT011 - an error of HTTP, or a connection that ends
            complete(server)
        wait(lambda: server.process.poll() is not None)
        assert "--lora was changed" in server.log.read_text()
