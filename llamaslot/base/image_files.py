"""Files of images that clients send."""

from __future__ import annotations

import io

from PIL import Image

from llamaslot.base.images import ImageSize


def decode(data: bytes) -> tuple[ImageSize, bytes]:
    """Return the size of an image and its pixels, row by row, with 3 bytes each (RGB)."""
    with Image.open(io.BytesIO(data)) as image:
        return ImageSize(*image.size), image.convert("RGB").tobytes()
