"""KV of a sequence as numbers, to compare what was loaded with what is computed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamaslot.backend.llama import LlamaBackend

Rows = npt.NDArray[np.float16]


def rows_of(backend: LlamaBackend, seq: int) -> Rows:
    """Return K and V of all layers, `[tokens, all widths]` by position; needs f16 KV and flash attention."""
    context = backend._context
    data = np.empty(llama_cpp.llama_state_seq_get_size(context, seq), dtype=np.uint8)
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    assert llama_cpp.llama_state_seq_get_data(context, pointer, len(data), seq) == len(data)
    # Magic, sequence, streams, cells; position, number of ids and id of each; transposed or not, layers.
    n_cells = int(data[12:16].view(np.uint32)[0])
    cells = data[16 : 16 + 12 * n_cells].view(np.int32).reshape(n_cells, 3)
    at = 16 + 12 * n_cells
    is_transposed, n_layers = data[at : at + 8].view(np.uint32)
    assert not is_transposed
    parts = list(_parts(data[at + 8 :], n_cells))
    assert len(parts) == 2 * n_layers
    rows: Rows = np.concatenate(parts, axis=1).view(np.float16)[np.argsort(cells[:, 0])]
    return rows


def _parts(data: npt.NDArray[np.uint8], n_cells: int) -> Iterator[npt.NDArray[np.uint8]]:
    """The rows of each layer: their type (int32) and size (int64) come first."""
    while len(data):
        size = int(data[4:12].copy().view(np.uint64)[0])
        yield data[12 : 12 + n_cells * size].reshape(n_cells, size)
        data = data[12 + n_cells * size :]
