"""Lines of llama.cpp's log that are errors in one process and expected in another."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bench import synthetic
from bench.projector_files import picture, write_projector
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, library
from llamaslot.base.images import ImageSize
from tests.backend.test_projector import AFTER, compute
from tests.vision_files import placed

NO_GPU = "ggml_cuda_init: failed to initialize {}: no CUDA-capable device is detected\n"
OTHER = "ggml_cuda_init: some other error\n"


@pytest.mark.parametrize("hidden", ["", "-1", None, "0"])
@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
@pytest.mark.parametrize("backend", ["CUDA", "ROCm", "MUSA"])
def test_that_there_is_no_gpu_is_no_error_where_it_is_hidden(
    variable: str, hidden: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    if hidden is not None:
        monkeypatch.setenv(variable, hidden)
    with capture_logs() as logged:
        library.on_log(library._ERROR, NO_GPU.format(backend).encode(), None)
        library.on_log(library._ERROR, OTHER.encode(), None)
    first = "debug" if hidden in {"", "-1"} else "error"
    assert [each["log_level"] for each in logged] == [first, "error"]


@pytest.mark.parametrize(("name", "level"), [("tiny-qwen35", "debug"), ("tiny-mamba", "warning")])
def test_a_gap_between_positions_is_a_warning_unless_the_model_has_mrope(
    name: str, level: str, tmp_path: Path
) -> None:
    for loaded in ("tiny-qwen35", name):
        model = synthetic.ensure(loaded, folder=tmp_path, is_exact=True)
        LlamaBackend(LlamaSettings(model, n_ctx=256, n_threads=1)).close()
    with capture_logs() as logged:
        library.on_log(library._WARN, b"find_slot: non-consecutive token position 9 after 4 for sequence 0", None)
    assert [each["log_level"] for each in logged] == [level]


def test_llama_cpp_logs_such_a_gap_after_an_image(tmp_path: Path) -> None:
    """In these words, by which it is known."""
    model = synthetic.ensure("tiny-qwen35", folder=tmp_path, is_exact=True)
    projector = write_projector(tmp_path / "mmproj.gguf", "qwen2vl_merger")
    backend = LlamaBackend(LlamaSettings(model, mmproj=projector, n_ctx=256, n_threads=1))
    size = ImageSize(150, 60)
    ids, image = placed(picture(1, size.width, size.height), backend.image_layout(size), 0)
    with capture_logs() as logged:
        compute(backend, [*ids, *AFTER], image)
    backend.close()
    assert {each["log_level"] for each in logged if library._GAP in each.get("line", "")} == {"debug"}
