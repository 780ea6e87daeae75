"""Files of images, decoded to the pixels that the model sees.

llama-server decodes by stb_image, and WebP by ffmpeg. Pixels are those of stb_image, to the bit for PNG, GIF and
BMP: alpha is dropped without blending, the high byte of 16 bits is kept, and the orientation in EXIF data ignored.
Where stb_image fails or mistakes the form, as of CMYK without Adobe's marker, they are Pillow's.
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
    from PIL.ImageFile import ImageFile

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
_BITS_OF_FORM = {"BGR;15": (5, 5, 5), "BGR;16": (5, 6, 5)}
"""Bits of red, green and blue in BMP files of 16 bits, by Pillow's names."""
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
        image: ImageFile = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequestError(f"is not an image in one of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise InvalidRequestError(f"has more than {MAX_PIXELS:,} pixels") from None
    with image:
        size = ImageSize(image.width, image.height)
        check_size(size)
        if image.format == "JPEG" and data.count(_START_OF_SCAN) > _MAX_SCANS:
            raise InvalidRequestError(f"has more than {_MAX_SCANS} scans")
        # Loading clears the tile, which has both.
        _, extents, _, form = image.tile[0] if image.tile else ("", None, 0, None)
        image.load()
        pixels = _rgb(image)
        if image.format == "GIF" and extents is not None:
            pixels = _as_by_stb_image(image, pixels, extents)
        if image.format == "BMP" and isinstance(form, tuple) and form[0] in _BITS_OF_FORM:
            pixels = pixels.point(_scales(_BITS_OF_FORM[form[0]]))
        return size, pixels.tobytes()


def _as_by_stb_image(image: OpenImage, pixels: OpenImage, extents: tuple[int, int, int, int]) -> OpenImage:
    """Return a GIF's first frame: black where it is transparent, the background's colour outside of its `extents`.

    Of that colour stb_image swaps red and blue, and it takes number 0 for none.
    """
    from PIL import Image  # noqa: PLC0415

    transparent, background = image.info.get("transparency"), image.info.get("background", 0)
    if transparent is not None:
        pixels.paste((0, 0, 0), mask=image.point([255 * (i == transparent) for i in range(256)], "L"))
    if extents == (0, 0, *image.size):
        return pixels
    # Without a palette, Pillow found that each colour in the file is the gray of its number.
    palette = getattr(image, "global_palette", None)
    color = palette.palette[3 * background : 3 * background + 3] if palette is not None else [background] * 3
    canvas = Image.new("RGB", pixels.size, tuple(color[::-1]) if background and color else (0, 0, 0))
    canvas.paste(pixels.crop(extents), extents[:2])
    return canvas


def _scales(bits: tuple[int, int, int]) -> list[int]:
    """Return a table for `point`: 5 or 6 bits are repeated to get 8, where Pillow has rounded down."""
    values = [(round(value * (2**n - 1) / 255), n) for n in bits for value in range(256)]
    return [value << 8 - n | value >> 2 * n - 8 for value, n in values]


def _rgb(image: OpenImage) -> OpenImage:
    from PIL import Image  # noqa: PLC0415

    if image.mode.startswith("I;16"):
        # `convert` would clip; little-endian here, whatever the file has.
        image = Image.frombytes("L", image.size, image.tobytes()[1::2])
    return image if image.mode == "RGB" else image.convert("RGB")
