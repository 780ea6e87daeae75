"""Lines of llama.cpp's log that are errors in one process and expected in another."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from llamaslot.backend.llama import library

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
