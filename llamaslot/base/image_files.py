"""Files of images, decoded to the pixels that the model sees.

llama-server decodes by stb_image, and WebP by ffmpeg. Pixels are those of stb_image, to the bit for PNG and BMP:
alpha is dropped without blending, the high byte of 16 bits is kept, and the orientation in EXIF data is ignored.
"""

from __future__ import annotations

import threading
import warnings
from io import BytesIO
from typing import TYPE_CHECKING

from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.images import ImageSize

if TYPE_CHECKING:
    from PIL.Image import Image as OpenImage

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
"""Others are never tried: some of Pillow's decoders start programs, or follow names of files."""
MAX_PIXELS = 2**25
"""Most pixels of an image: 100 MB, of which the decoder needs several times as many bytes. Models scale images down
to a few million pixels, and cameras of telephones have up to 2**24 where the user asks for no more.
"""
MAX_FILE_BYTES = 2**26
"""Most bytes of an image's file. The same pixels without any compression are 100 MB."""
MAX_RATIO = 200
"""Most times that an edge is longer than the other one. libmtmd scales the longer one to some hundred pixels, and
cannot encode an image if the other one vanishes; Qwen-VL's own preprocessing has the same limit.
"""
_MAX_SCANS = 64
"""Most scans of a JPEG. Encoders write up to a dozen; each costs as much as all pixels, and may have few bytes."""
_START_OF_SCAN = b"\xff\xda"
_ONE_AT_A_TIME = threading.Lock()
"""Held while an image is decoded, so that several threads do not need the memory at once, and for `warnings`."""


def check_size(size: ImageSize) -> None:
    """Raise `InvalidRequestError` for a size of which libmtmd cannot make tokens, or that takes too much memory."""
    least, most = sorted((size.width, size.height))
    if not 0 < least * most <= MAX_PIXELS:
        raise InvalidRequestError(f"has {size} pixels (limit: 1 to {MAX_PIXELS:,})")
    if most > MAX_RATIO * least:
        raise InvalidRequestError(f"has {size} pixels, and is too narrow: at most 1:{MAX_RATIO} is accepted")


def decode(data: bytes) -> tuple[ImageSize, bytes]:
    """Return the size of an image and its pixels, 3 bytes each (RGB), row by row from the top.

    Of several frames it is the first. Raises `InvalidRequestError` for what is no image of a known format, is
    damaged or too large; the message goes after the field's name.
    """
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequestError(f"has {len(data)} bytes, and the limit is {MAX_FILE_BYTES}")
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        # What Pillow warns of is wrong with the file, such as its EXIF data, and not with the server.
        warnings.simplefilter("ignore")
        try:
            return _decoded(data)
        except (InvalidRequestError, MemoryError):
            raise
        except Exception as error:
            # Decoders of damaged files raise exceptions of any type.
            raise InvalidRequestError(f"is damaged, and cannot be decoded ({error})") from None


def _decoded(data: bytes) -> tuple[ImageSize, bytes]:
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - processes without images do without

    # Checked by Pillow too, before it allocates anything: the frames of a GIF may be larger than its header says.
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    try:
        image: OpenImage = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequestError(f"is not an image in one of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise InvalidRequestError(f"has more than {MAX_PIXELS:,} pixels") from None
    with image:
        size = ImageSize(image.width, image.height)
        check_size(size)
        if image.format == "JPEG" and data.count(_START_OF_SCAN) > _MAX_SCANS:
            raise InvalidRequestError(f"has more than {_MAX_SCANS} scans")
        image.load()
        return size, _rgb(image).tobytes()


def _rgb(image: OpenImage) -> OpenImage:
    from PIL import Image  # noqa: PLC0415

    if image.mode.startswith("I;16"):
        # `convert` would clip; little-endian here, whatever the file has.
        image = Image.frombytes("L", image.size, image.tobytes()[1::2])
    return image if image.mode == "RGB" else image.convert("RGB")
