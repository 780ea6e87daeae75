"""llama.cpp's calls on sequences without this project's backend, for tests of what llama.cpp itself does."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp._ggml import libggml

FIRST_NORMS = (b"attn_norm-0", b"model.layers.{}.operator_norm-0")
"""Names of the first norm of the first layer, which has a row for each token."""
PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY

Logits = npt.NDArray[np.float32]


libggml.ggml_get_name.argtypes, libggml.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
libggml.ggml_nelements.argtypes, libggml.ggml_nelements.restype = [ctypes.c_void_p], ctypes.c_int64


@llama_cpp.llama_log_callback
def _ignore(_level: int, _text: bytes, _user: Any) -> None:
    """Drop a line of llama.cpp's log, which tells of each refusal that a test provokes."""


class RawModel:
    """A loaded model file."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_log_set(_ignore, None)
        self.handle = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        assert self.handle
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.handle))
        self.width = llama_cpp.llama_model_n_embd(self.handle)
        self.window = llama_cpp.llama_model_n_swa(self.handle)

    def close(self) -> None:
        """Free the model, after all contexts on it."""
        llama_cpp.llama_model_free(self.handle)


class RawContext:
    """A context with one pool of cells, in which hardly anything is rounded.

    Ids are checked, as llama.cpp ends the process on those that it does not have. If it is watched, `micro_batches`
    gets the number of tokens of each.
    """

    def __init__(self, model: RawModel, *, is_watched: bool = False, **fields: Any) -> None:
        self.model = model
        self.micro_batches: list[int] = []
        params = llama_cpp.llama_context_default_params()
        settings = {
            "n_ctx": 1024,
            "n_seq_max": 6,
            "n_batch": 256,
            "n_ubatch": 256,
            "n_threads": 1,
            "n_threads_batch": 1,
            "kv_unified": True,
            "swa_full": False,
            "type_k": llama_cpp.GGML_TYPE_F32,
            "type_v": llama_cpp.GGML_TYPE_F32,
            "flash_attn_type": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        }
        for name, value in (settings | fields).items():
            setattr(params, name, value)
        self._on_node = llama_cpp.ggml_backend_sched_eval_callback(self._see_node)
        if is_watched:
            params.cb_eval = self._on_node
        self.n_seqs, self.n_ubatch = params.n_seq_max, params.n_ubatch
        self._context = llama_cpp.llama_init_from_model(model.handle, params)
        assert self._context
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._abort = llama_cpp.ggml_abort_callback(self._has_failed)
        self._n_left = -1

    def close(self) -> None:
        """Free the context."""
        llama_cpp.llama_free(self._context)

    def decode(self, *runs: tuple[int, int, Sequence[int]]) -> int:
        """Decode tokens of several sequences, each from a position on, in one step; return llama.cpp's status."""
        n_tokens = sum(len(tokens) for _, _, tokens in runs)
        assert 0 < n_tokens <= self.n_ubatch
        batch = llama_cpp.llama_batch_init(n_tokens, 0, 1)
        for seq, start, tokens in runs:
            self._check(seq)
            for position, token in enumerate(tokens, start):
                assert 0 <= token < self.model.n_vocab
                at = batch.n_tokens
                batch.token[at], batch.pos[at], batch.logits[at] = int(token), position, True
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, seq
                batch.n_tokens += 1
        try:
            return int(llama_cpp.llama_decode(self._context, batch))
        finally:
            llama_cpp.llama_batch_free(batch)

    def feed(self, seq: int, start: int, tokens: Sequence[int], chunk: int = 0) -> Logits:
        """Decode tokens of one sequence, in chunks, and return the logits after each."""
        chunk = chunk or self.n_ubatch
        rows = []
        for at in range(0, len(tokens), chunk):
            part = tokens[at : at + chunk]
            assert self.decode((seq, start + at, part)) == 0
            rows.append(self.logits(len(part)))
        return np.concatenate(rows)

    def logits(self, n: int) -> Logits:
        """Return the logits after each of the `n` tokens of the last step."""
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (n, self.model.n_vocab)).copy()

    @contextmanager
    def failing(self, n_nodes: int) -> Iterator[None]:
        """Abort each graph in here after that many of its operations, which follow the choice of cells."""
        llama_cpp.llama_set_abort_callback(self._context, self._abort, None)
        self._n_left = n_nodes
        try:
            yield
        finally:
            self._n_left = -1

    def _see_node(self, tensor: int, is_question: bool, _: Any) -> bool:
        if is_question and libggml.ggml_get_name(tensor) in FIRST_NORMS:
            n_values: int = libggml.ggml_nelements(tensor)
            self.micro_batches.append(n_values // self.model.width)
        return False

    def _has_failed(self, _: Any) -> bool:
        self._n_left -= self._n_left > 0
        return self._n_left == 0

    def remove(self, seq: int, start: int = -1) -> bool:
        """Remove the positions from `start` on, or all."""
        self._check(seq)
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, seq, start, -1))

    def copy(self, src: int, dst: int, start: int = -1, end: int = -1) -> None:
        """Let `dst` hold the cells of `src` in a range as well."""
        self._check(src)
        self._check(dst)
        llama_cpp.llama_memory_seq_cp(self._memory, src, dst, start, end)

    def last(self, seq: int) -> int:
        """Return the greatest position that llama.cpp tells, or -1."""
        self._check(seq)
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, seq))

    def first(self, seq: int) -> int:
        """Return the least position that llama.cpp tells, or -1."""
        self._check(seq)
        return int(llama_cpp.llama_memory_seq_pos_min(self._memory, seq))

    def save(self, seq: int, flags: int = 0) -> bytes:
        """Return the state of a sequence."""
        self._check(seq)
        size = llama_cpp.llama_state_seq_get_size_ext(self._context, seq, flags)
        data = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_seq_get_data_ext(self._context, data, size, seq, flags) == size
        return bytes(data)

    def load(self, seq: int, blob: bytes, flags: int = 0) -> bool:
        """Replace the state of a sequence; False if llama.cpp refused it."""
        self._check(seq)
        data = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
        n = llama_cpp.llama_state_seq_set_data_ext(self._context, data, len(blob), seq, flags)
        assert n in (0, len(blob))
        return bool(n)

    def take(self, seq: int) -> bytes:
        """Return the partial state of a sequence."""
        return self.save(seq, PARTIAL)

    def restore(self, seq: int, blob: bytes) -> bool:
        """Replace the partial state of a sequence."""
        return self.load(seq, blob, PARTIAL)

    def _check(self, seq: int) -> None:
        assert 0 <= seq < self.n_seqs
