"""Decoding of images: the pixels of stb_image, by which llama-server decodes; what is no image is an error."""

from __future__ import annotations

import ctypes
import random
import struct
import warnings
import zlib
from collections.abc import Iterable
from typing import Any

import llama_cpp.mtmd_cpp as mtmd
import numpy as np
import pytest
from PIL import Image

from llamaslot.base import image_files
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.image_files import MAX_PIXELS, decode
from llamaslot.base.images import ImageSize
from tests.image_bodies import file_of

RANDOM = np.random.default_rng(7)
NOISE = Image.fromarray(RANDOM.integers(0, 256, (9, 11, 3), dtype=np.uint8))
WITH_ALPHA = Image.fromarray(RANDOM.integers(0, 256, (9, 11, 4), dtype=np.uint8))
SMOOTH = Image.fromarray(np.add.outer(np.arange(64), np.arange(48)).astype(np.uint8)).convert("RGB")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    depth: int, color: int, others: Iterable[tuple[bytes, bytes]] = (), *, width: int = 13, height: int = 7
) -> bytes:
    """A PNG of random pixels; `color` is PNG's number of a form of pixels."""
    n_row = (width * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color] * depth + 7) // 8
    rows = b"".join(b"\0" + RANDOM.bytes(n_row) for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    before = b"".join(chunk(*each) for each in others)
    image = chunk(b"IHDR", head) + before + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + image


def gif(
    extents: tuple[int, int, int, int],
    *,
    transparent: int | None = None,
    background: int = 0,
    palette: bytes = b"",
    own_palette: bytes = b"",
    interlace: bool = False,
) -> bytes:
    """A GIF of 12 x 10 pixels, whose frame has random ones of 8 colours in a part of them (left, top, size)."""
    data = b"GIF89a" + struct.pack("<HHBBB", 12, 10, 0xF7 if palette else 0x70, background, 0) + palette
    if transparent is not None:
        data += struct.pack("<BBBBHBB", 0x21, 0xF9, 4, 1, 0, transparent, 0)
    data += b"\x2c" + struct.pack("<HHHHB", *extents, 0x87 * bool(own_palette) | 0x40 * interlace) + own_palette
    # Codes of 9 bits: a decoder expects longer ones behind 256 of them.
    codes = [256, *RANDOM.integers(0, 8, extents[2] * extents[3]).tolist(), 257]
    bits = sum(code << 9 * i for i, code in enumerate(codes))
    raster = bits.to_bytes(-(-9 * len(codes) // 8), "little")
    return data + b"\x08" + bytes([len(raster)]) + raster + b"\0;"


def bmp(n_bits: int, masks: tuple[int, ...] = ()) -> bytes:
    """A BMP of 7 x 5 random pixels, with bit masks of red, green and blue or without."""
    raster = RANDOM.bytes((7 * n_bits + 31) // 32 * 4 * 5)
    head = struct.pack("<IiiHHIIiiII", 40, 7, 5, 1, n_bits, 3 if masks else 0, len(raster), 0, 0, 0, 0)
    head += struct.pack(f"<{len(masks)}I", *masks)
    return b"BM" + struct.pack("<IHHI", 14 + len(head) + len(raster), 0, 0, 14 + len(head)) + head + raster


def adobe(data: bytes, transform: int) -> bytes:
    """A JPEG whose four colours Adobe's marker gives another meaning: 0 is CMYK, 2 YCCK."""
    at = data.index(b"Adobe") + 11
    return data[:at] + bytes([transform]) + data[at + 1 :]


def huge(width: int, height: int) -> bytes:
    """A PNG that has nothing of its pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def of_llama_server(data: bytes) -> tuple[ImageSize, bytes]:
    """What libmtmd decodes a file to."""
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(None, buffer, len(data), False)  # type: ignore[arg-type]
    assert bitmap
    size = ImageSize(mtmd.mtmd_bitmap_get_nx(bitmap), mtmd.mtmd_bitmap_get_ny(bitmap))
    pointer = ctypes.cast(mtmd.mtmd_bitmap_get_data(bitmap), ctypes.c_void_p)
    pixels = ctypes.string_at(pointer, mtmd.mtmd_bitmap_get_n_bytes(bitmap))
    mtmd.mtmd_bitmap_free(bitmap)
    return size, pixels


TURNED = Image.Exif()
TURNED[274] = 6
COLORS = RANDOM.bytes(3 * 256)
PALETTE = (b"PLTE", COLORS)
WHOLE, PART = (0, 0, 12, 10), (2, 3, 5, 4)
GRAYS = bytes(i for i in range(256) for _ in range(3))
CMYK = Image.merge("CMYK", [SMOOTH.getchannel(0), *SMOOTH.transpose(Image.Transpose.ROTATE_180).split()])
EQUAL = {
    **{f"gray of {depth} bits": png(depth, 0) for depth in (1, 2, 4, 8, 16)},
    **{f"RGB of {depth} bits": png(depth, 2) for depth in (8, 16)},
    **{f"gray with alpha of {depth} bits": png(depth, 4) for depth in (8, 16)},
    **{f"RGBA of {depth} bits": png(depth, 6) for depth in (8, 16)},
    **{
        f"palette of {depth} bits": png(depth, 3, [(b"PLTE", RANDOM.bytes(3 * 2**depth))]) for depth in (1, 2, 4, 8)
    },
    "palette with alpha": png(8, 3, [PALETTE, (b"tRNS", RANDOM.bytes(256))]),
    "palette with one alpha": png(8, 3, [PALETTE, (b"tRNS", b"\xff\x00")]),
    "gray with a transparent value": png(8, 0, [(b"tRNS", b"\0\x10")]),
    "RGB with a transparent value": png(8, 2, [(b"tRNS", b"\0\x10\0\x20\0\x30")]),
    "RGB of 16 bits with a transparent value": png(16, 2, [(b"tRNS", b"\0\x10\0\x20\0\x30")]),
    "gamma": png(8, 2, [(b"gAMA", struct.pack(">I", 100_000))]),
    "PNG with an orientation": file_of(SMOOTH, "PNG", exif=TURNED),
    "one pixel": png(8, 2, width=1, height=1),
    "BMP": file_of(NOISE, "BMP"),
    "BMP with alpha": file_of(WITH_ALPHA, "BMP"),
    "BMP in gray": file_of(NOISE.convert("L"), "BMP"),
    "BMP of one bit": file_of(NOISE.convert("1"), "BMP"),
    "BMP with a palette": file_of(NOISE.quantize(16), "BMP"),
    "GIF": file_of(NOISE.quantize(16), "GIF"),
    "GIF in gray": file_of(NOISE.convert("L"), "GIF"),
    "GIF of frames": file_of(
        NOISE.quantize(16), "GIF", save_all=True, append_images=[NOISE.transpose(Image.Transpose.ROTATE_180)]
    ),
    **{
        f"GIF of frames with a transparent colour, disposal {i}": file_of(
            NOISE.quantize(16),
            "GIF",
            save_all=True,
            append_images=[NOISE.transpose(Image.Transpose.ROTATE_180).quantize(16)],
            transparency=2,
            disposal=i,
        )
        for i in range(4)
    },
    "GIF with a transparent colour": gif(WHOLE, transparent=3, palette=COLORS),
    "interlaced GIF with a transparent colour": gif(WHOLE, transparent=3, palette=COLORS, interlace=True),
    "GIF with a transparent colour and a background": gif(WHOLE, transparent=3, background=5, palette=COLORS),
    "GIF in gray with a transparent colour": gif(PART, transparent=3, background=5, palette=GRAYS),
    "GIF whose frame has a palette": gif(WHOLE, transparent=0, palette=GRAYS, own_palette=COLORS),
    "GIF whose frame alone has a palette": gif(PART, transparent=0, background=5, own_palette=COLORS),
    "GIF of a part with a palette": gif(PART, background=5, palette=COLORS, own_palette=COLORS[::-1]),
    **{
        f"GIF of a part, background {background}, transparent {transparent}": gif(
            PART, transparent=transparent, background=background, palette=COLORS
        )
        for background in (0, 5)
        for transparent in (None, 0, 5, 7)
    },
    "PNG of frames": file_of(WITH_ALPHA, "PNG", save_all=True, append_images=[WITH_ALPHA.rotate(180)]),
    "BMP of 16 bits": bmp(16),
    "BMP of 16 bits with masks": bmp(16, (0xF800, 0x7E0, 0x1F)),
    "BMP of 32 bits with masks": bmp(32, (0xFF0000, 0xFF00, 0xFF)),
}
CLOSE = {
    "JPEG": file_of(SMOOTH, "JPEG", quality=95),
    "JPEG of noise": file_of(NOISE, "JPEG", quality=95, subsampling=0),
    "progressive JPEG": file_of(SMOOTH, "JPEG", progressive=True),
    "JPEG in gray": file_of(SMOOTH.convert("L"), "JPEG"),
    "JPEG in RGB": file_of(SMOOTH, "JPEG", keep_rgb=True),
    "JPEG in CMYK": file_of(CMYK, "JPEG", quality=95, subsampling=0),
    "JPEG in YCCK": adobe(file_of(CMYK, "JPEG", quality=95, subsampling=0), 2),
    "JPEG with an orientation": file_of(SMOOTH, "JPEG", exif=TURNED),
}


@pytest.mark.parametrize("name", EQUAL)
def test_pixels_are_those_of_llama_server(name: str) -> None:
    assert decode(EQUAL[name]) == of_llama_server(EQUAL[name])


@pytest.mark.parametrize("name", CLOSE)
def test_jpegs_differ_from_llama_servers_by_rounding(name: str) -> None:
    (size, pixels), (own_size, own) = of_llama_server(CLOSE[name]), decode(CLOSE[name])
    difference = np.frombuffer(own, np.uint8).astype(int) - np.frombuffer(pixels, np.uint8)
    assert own_size == size
    assert np.abs(difference).max() <= 3


def test_cmyk_without_adobes_marker_is_still_cmyk() -> None:
    """stb_image takes it for YCbCr."""
    data = file_of(CMYK, "JPEG", quality=95, subsampling=0)
    start = data.index(b"\xff\xee")
    end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
    assert decode(data[:start] + data[end:]) == decode(data)


def test_of_several_frames_webp_gives_the_first() -> None:
    data = file_of(NOISE, "WEBP", save_all=True, append_images=[NOISE.rotate(180)], lossless=True)
    assert decode(data) == (ImageSize(11, 9), NOISE.tobytes())


def test_webp_without_loss_has_its_pixels_without_alpha() -> None:
    assert decode(file_of(NOISE, "WEBP", lossless=True)) == (ImageSize(11, 9), NOISE.tobytes())
    image = file_of(WITH_ALPHA, "WEBP", lossless=True, exact=True)
    assert decode(image) == (ImageSize(11, 9), WITH_ALPHA.convert("RGB").tobytes())


def test_rows_come_from_the_top_and_red_first() -> None:
    image = Image.new("RGB", (2, 2))
    image.putpixel((1, 0), (1, 2, 3))
    assert decode(file_of(image)) == (ImageSize(2, 2), bytes((0, 0, 0, 1, 2, 3)) + bytes(6))


LARGER = NOISE.resize((90, 70))
FILES = {kind: file_of(LARGER, kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP")}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9])
def test_a_part_of_a_file_is_refused(kind: str, share: float) -> None:
    with pytest.raises(InvalidRequestError):
        decode(FILES[kind][: int(len(FILES[kind]) * share)])


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_decoded_or_refused(kind: str) -> None:
    draw = random.Random(3)
    for _ in range(200):
        data = bytearray(FILES[kind])
        for _ in range(draw.choice((1, 3, 30))):
            data[draw.randrange(draw.choice((60, len(data))))] = draw.randrange(256)
        try:
            size, pixels = decode(bytes(data))
        except InvalidRequestError:
            continue
        assert len(pixels) == 3 * size.width * size.height


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not an image",
        b"\x89PNG\r\n\x1a\n",
        b'<svg xmlns="http://www.w3.org/2000/svg" width="4" height="4"/>',
        b"%PDF-1.7\n%",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n",
        b"RIFF\x24\0\0\0WAVEfmt ",
        bytes(1000),
    ],
    ids=repr,
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"is not an image in one of the formats|is damaged"):
        decode(data)


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "TGA", "PCX", "DIB", "JPEG2000", "AVIF", "EPS", "PDF"])
def test_other_formats_are_not_even_tried(kind: str) -> None:
    try:
        data = file_of(SMOOTH, kind)
    except (OSError, KeyError, ValueError):
        pytest.skip("this Pillow does not write it")
    with pytest.raises(InvalidRequestError, match="is not an image in one of the formats"):
        decode(data)


@pytest.mark.parametrize(
    ("width", "height"), [(MAX_PIXELS + 1, 1), (2**13, 2**12 + 1), (2**15, 2**15), (2**31 - 1, 2**31 - 1)]
)
def test_pixels_are_limited_by_the_header_alone(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: Any) -> None:
        raise AssertionError("the pixels were decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(InvalidRequestError, match="pixels"):
        decode(huge(width, height))


@pytest.mark.parametrize(("width", "height"), [(0, 0), (0, 5), (5, 0)])
def test_an_image_without_pixels_is_refused(width: int, height: int) -> None:
    with pytest.raises(InvalidRequestError):
        decode(huge(width, height))


def test_a_gif_cannot_hide_a_larger_frame() -> None:
    data = bytearray(file_of(NOISE.quantize(16), "GIF"))
    at = data.index(b"\x2c")
    data[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    with pytest.raises(InvalidRequestError, match="pixels"):
        decode(bytes(data))


def test_the_most_pixels_are_decoded() -> None:
    size, pixels = decode(file_of(Image.new("1", (2**13, 2**12))))
    assert (size, len(pixels)) == (ImageSize(2**13, 2**12), 3 * MAX_PIXELS)


def test_bytes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(NOISE)
    monkeypatch.setattr(image_files, "MAX_FILE_BYTES", len(data) - 1)
    with pytest.raises(InvalidRequestError, match=f"has {len(data)} bytes"):
        decode(data)


def test_a_jpeg_of_many_scans_is_refused() -> None:
    data = file_of(SMOOTH, "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    with pytest.raises(InvalidRequestError, match="scans"):
        decode(data[:start] + data[start:-2] * 100 + data[-2:])


def test_a_damaged_profile_does_not_matter_nor_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(file_of(SMOOTH, "PNG", exif=b"Exif\0\0II*\0\xff"))[0] == ImageSize(48, 64)
        assert decode(png(8, 3, [PALETTE, (b"tRNS", RANDOM.bytes(256))]))[0] == ImageSize(13, 7)
