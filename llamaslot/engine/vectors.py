"""Vectors of prompts in the form that clients ask for."""

from __future__ import annotations

import numpy as np

from llamaslot.base.commands import VectorParams

_LARGEST_INT16 = 32760.0
"""Greatest absolute value after `VectorParams.normalize` 0, as in llama.cpp."""


def formed(vector: bytes, params: VectorParams) -> bytes:
    """Return the leading numbers of a vector (float32, little-endian), normalized as by `common_embd_normalize`.

    Sums are of float64, as there. A vector of zeros stays one.
    """
    values = np.frombuffer(vector, dtype="<f4")[: params.dimensions or None]
    sizes, p = np.abs(values).astype(np.float64), params.normalize
    # High powers, and factors of tiny numbers, may be too large or too small for a float.
    with np.errstate(all="ignore"):
        if p < 0:
            norm = 1.0
        elif p == 0:
            norm = float(sizes.max(initial=0.0)) / _LARGEST_INT16
        else:
            norm = float(np.power(np.power(sizes, p).sum(), 1.0 / p))
        scaled = values * np.float32(1.0 / norm if norm > 0 else 0.0)
    return scaled.astype("<f4").tobytes()
