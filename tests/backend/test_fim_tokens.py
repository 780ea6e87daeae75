"""Fill-in-the-middle tokens are read from the vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.model import FimTokens

KEYS = ("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep")


def fim_of(folder: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]) -> FimTokens | None:
    add_pad = gguf.GGUFWriter.add_pad_token_id

    def add(writer: gguf.GGUFWriter, pad: int) -> None:
        add_pad(writer, pad)
        for token, key in enumerate(keys, start=40):
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)

    monkeypatch.setattr(gguf.GGUFWriter, "add_pad_token_id", add)
    backend = LlamaBackend(LlamaSettings(synthetic.ensure("tiny", folder=folder), n_ctx=64, n_slots=1, n_threads=1))
    try:
        return backend.info.fim
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("n_keys", "expected"),
    [(0, None), (2, None), (3, FimTokens(40, 41, 42)), (5, FimTokens(40, 41, 42, 43, 44))],
)
def test_tokens_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_keys: int, expected: FimTokens | None
) -> None:
    assert fim_of(tmp_path, monkeypatch, KEYS[:n_keys]) == expected


def test_the_bos_is_given_where_the_tokenizer_adds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_flag = gguf.GGUFWriter.add_add_bos_token
    monkeypatch.setattr(gguf.GGUFWriter, "add_add_bos_token", lambda writer, _value: write_flag(writer, True))
    found = fim_of(tmp_path, monkeypatch, KEYS)
    assert found is not None
    assert found.bos >= 0
