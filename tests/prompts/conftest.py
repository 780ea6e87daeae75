"""The embedded model's vocabulary, without its weights' work."""

from __future__ import annotations

from collections.abc import Iterator

import llama_cpp
import pytest

from llamaslot.app.model_files import resolve_model
from llamaslot.backend.llama import library
from llamaslot.backend.llama.vocab import LlamaVocab


@pytest.fixture(scope="module")
def model() -> Iterator[int]:
    """The embedded model, as llama.cpp knows it."""
    library.initialise()
    loaded = llama_cpp.llama_model_load_from_file(
        str(resolve_model("demo")).encode(), llama_cpp.llama_model_default_params()
    )
    yield loaded
    llama_cpp.llama_model_free(loaded)


@pytest.fixture(scope="module")
def vocab(model: int) -> LlamaVocab:
    return LlamaVocab(model)
