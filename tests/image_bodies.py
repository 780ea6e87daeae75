"""Small images, the fields of each API that hold one, and answers to what a prompt worker asks about them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import msgspec
from PIL import Image

from llamaslot.base.images import ImageLayout, ImageSize
from llamaslot.base.model import ModelInfo, ProjectorInfo
from llamaslot.base.prompt_jobs import BodyKind, Needs, Prepare, Prepared
from tests.fake_backend import FakeBackend
from tests.prompt_threads import LocalPrompts, parse

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[reply]"
PROJECTOR = ProjectorInfo("projector", 512)
BEGIN, BETWEEN, END = 1, 2, 3
"""Delimiters of images."""
CHAT: BodyKind = "chat"


def vision_info(**fields: Any) -> ModelInfo:
    """The fake model with a projector."""
    return msgspec.structs.replace(FakeBackend().info, projector=PROJECTOR, **fields)


def layout_of(size: ImageSize) -> ImageLayout:
    """Two tiles, the first with a token for each column and the second with one for each row."""
    return ImageLayout(((BEGIN,), size.width, (BETWEEN,), size.height, (END,)))


def picture(color: Sequence[int] = (10, 20, 30), size: tuple[int, int] = (4, 3)) -> Image.Image:
    """An image of one colour."""
    return Image.new("RGB", size, tuple(color))


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """An image as a file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    """A `data:` URL."""
    return f"data:image/png;base64,{base64_of(data)}"


def part(data: bytes) -> dict[str, Any]:
    """A part of an OpenAI chat."""
    return {"type": "image_url", "image_url": {"url": url_of(data)}}


def text(each: str) -> dict[str, Any]:
    """A text part or block."""
    return {"type": "text", "text": each}


def block(data: bytes) -> dict[str, Any]:
    """A content block of Anthropic's API."""
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(data)}}


def item(data: bytes) -> dict[str, Any]:
    """A part of an item of the Responses API."""
    return {"type": "input_image", "image_url": url_of(data), "detail": "auto"}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The body of a chat of one message."""
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


async def prepared(worker: LocalPrompts, kind: BodyKind, body: dict[str, Any], **fields: Any) -> Prepared:
    """Have a body read, telling the worker what layouts it asks for."""
    job = msgspec.structs.replace(parse(kind, body), **fields)
    answer = await answered(worker, job)
    assert isinstance(answer, Prepared), answer
    return answer


async def answered(worker: LocalPrompts, job: Prepare) -> Any:
    """Call a worker with a job, and again with the layouts that it asks for."""
    answer = await worker.call(job)
    while isinstance(answer, Needs):
        assert answer.layouts, "of images and nothing else"
        layouts = {size: layout_of(size) for size in answer.layouts}
        answer = await worker.call(msgspec.structs.replace(job, layouts=layouts))
    return answer


def shown(prompt: Any) -> list[str | int]:
    """The texts of a prompt, and the numbers of tokens of its tiles."""
    found: list[str | int] = []
    start, tokens = 0, prompt.tokens.tolist()
    for first, end in (tile for image in prompt.images for tile in image.tiles):
        found += [_written(tokens[start:first]), end - first]
        assert max(tokens[first:end]) < 0
        start = end
    found.append(_written(tokens[start:]))
    return found


def _written(tokens: Sequence[int]) -> str:
    assert min(tokens, default=0) >= 0
    return "".join("^" if token == FakeBackend().vocab.named_tokens["<s>"] else chr(token) for token in tokens)
