"""Bodies of every API that have images, and what else may stand in place of one: damaged, huge, odd or no image."""

from __future__ import annotations

import io
import random
from typing import Any

from PIL import Image

from tests.fuzz.mutations import damaged
from tests.image_bodies import base64_of, block, chat, file_of, item, part, picture, text, url_of

KINDS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
"""Formats of files; the last two are never decoded."""
_FILE = file_of(picture(size=(70, 40)))
_BASE64 = base64_of(_FILE)
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
_CHAT = chat(text("Look"), part(_FILE), text("at it"), max_tokens=4)
_TOOLS: dict[str, Any] = {
    "messages": [
        *_CHAT["messages"],
        {"role": "assistant", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "a", "content": [part(_FILE)]},
    ],
    "max_tokens": 4,
}
_MESSAGES: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [block(_FILE), text("Look")]},
        {"role": "assistant", "content": [_USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [block(_FILE)]}]},
    ]
}
_RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}, item(_FILE)]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [item(_FILE)]},
    ]
}
_NATIVE: dict[str, Any] = {"prompt": {"prompt_string": "Look <__media__> at", "multimodal_data": [_BASE64]}}
_OLLAMA: dict[str, Any] = {"messages": [{"role": "user", "content": "Look", "images": [_BASE64, url_of(_FILE)]}]}
_SHORT: dict[str, Any] = {"options": {"num_predict": 2}, "stream": False}
WITH_IMAGES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [_CHAT, {**_CHAT, "n": 2, "stream": True, "store": True}, _TOOLS],
    "/v1/chat/completions/input_tokens": [_CHAT],
    "/v1/messages": [{**_MESSAGES, "max_tokens": 4}],
    "/v1/messages/count_tokens": [_MESSAGES],
    "/v1/responses": [{**_RESPONSES, "max_output_tokens": 4}],
    "/v1/responses/input_tokens": [_RESPONSES],
    "/v1/responses/compact": [_RESPONSES],
    "/api/chat": [{**_OLLAMA, **_SHORT}],
    "/api/generate": [{"prompt": "Look", "images": [_BASE64], **_SHORT}, {"images": [_BASE64], **_SHORT}],
    "/completion": [
        {**_NATIVE, "n_predict": 2, "id_slot": 1},
        {"prompt": ["a", _NATIVE["prompt"]], "n_predict": 2, "n_probs": 1, "stream": True},
    ],
    "/v1/completions": [{**_NATIVE, "max_tokens": 2}, {"prompt": [_NATIVE["prompt"]] * 2, "max_tokens": 2}],
    "/apply-template": [_CHAT],
    "/cache/probe": [_NATIVE, _CHAT],
    "/cache/warm": [{**_NATIVE, "pin": True}, _TOOLS],
}  # fmt: skip
"""Valid bodies by the path in the route table."""
_PNG = "data:image/png;base64,"
_URLS = (
    "http://127.0.0.1:1/a.png", "https://[::1", "file:///etc/passwd", "ftp://a", "data:", "data:,", "data:;base64,",
    "data:image/png;base64", f"data:image/png,{_BASE64}", f"data:image/png;base64;,{_BASE64}",
    f"data:image/png;charset=utf-8;base64,{_BASE64}", f"data:text/plain;base64,{_BASE64}", f" {_PNG}{_BASE64}",
    f"data:image/svg+xml;base64,{_BASE64}", f"DATA:IMAGE/PNG;BASE64, {_BASE64}\n", f"{_PNG}{_BASE64[:-3]}",
    f"{_PNG}{_BASE64}=", f"{_BASE64}{_PNG}", "iVBORw0KGgo=", "==", "\u00e9", "\0", "a", "../../etc/passwd",
    "<__media__>", "<__image_" + "0" * 64 + "__>",
)  # fmt: skip


def is_image(value: Any) -> bool:
    """True for the image of a body."""
    return isinstance(value, str) and value.endswith(_BASE64)


def other_image(chance: random.Random) -> Any:
    """Return what may stand in place of an image, as a `data:` URL or as base64; half of it is one."""
    match chance.randrange(8):
        case 0:
            return chance.choice(_URLS)
        case 1:
            return chance.choice((None, True, 5, 0.5, "", [], {}, [_BASE64], {"url": url_of(_FILE)}))
        case 2:
            data = damaged(_drawn(chance), chance, _drawn(chance), chance.choice((None, 64)))
        case 3:
            data = _huge(chance)
        case _:
            data = _drawn(chance)
    return chance.choice((url_of, base64_of))(data)


def _drawn(chance: random.Random) -> bytes:
    """Return the file of an image of any kind and size."""
    size = width, height = tuple(chance.choice((1, 2, 63, 64, 65, chance.randint(1, 150))) for _ in range(2))
    image = Image.frombytes("L", size, chance.randbytes(width * height)).convert(chance.choice(("RGB", "L", "1")))
    return file_of(image, chance.choice((*KINDS[:5], *KINDS)))


def _huge(chance: random.Random) -> bytes:
    """Return a file of few bytes with too many pixels, or with an edge that is too long."""
    size = chance.choice(((100_000, 1), (1, 60_000), (6_000, 6_000)))
    file = io.BytesIO()
    Image.new("1", size).save(file, chance.choice(("PNG", "GIF") if max(size) < 2**16 else ("PNG",)))
    return file.getvalue()
