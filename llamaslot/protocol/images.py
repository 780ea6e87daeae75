"""Images of requests: taken out of a body before the chat template sees it, and put into the prompt behind it.

    message     [text "Which is" | image | image | text "older?"]
    to template "Which is<__image_a1..__><__image_b2..__>older?"
    prompt      TextPart "..user\\nWhich is", ImagePart, ImagePart, TextPart "older?<end of turn>.."

A marker has a digest of its image's file, so that the template, and all that reads messages, sees text alone. As
in llama-server, a message with images becomes one text, with line breaks between its texts and none around images.

A file is decoded once, for its size and the digest of its pixels: later turns of a conversation send all of its
images again, which are only hashed. The tokens of an image depend on its size, and are for the engine to say, once
for each size (`UnknownSizesError`). Images come with the body: a server that fetches URLs lends out its network.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from llamaslot.base.commands import ImagePart, PromptPart, TextPart
from llamaslot.base.errors import InvalidRequestError, NotSupportedError
from llamaslot.base.image_files import decode
from llamaslot.base.images import ImageLayout, ImageSize
from llamaslot.base.model import ProjectorInfo
from llamaslot.text.conversation import checked_list, clean_part, refuse_field

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
TextOf: TypeAlias = Callable[[Mapping[str, Any], str], str]
"""Returns the text that stands for the image of a part, which is at a place in the body."""

MEDIA_MARKER = "<__media__>"
"""The place of an image in a prompt that is a text, as in llama-server."""
MAX_IMAGES = 256
"""Most images of a request. Each has dozens of tokens at least, so that hardly any context has room for more."""
MAX_NEW_PIXELS = 2**28
"""Pixels of a request's images after which no more are decoded: PNG takes about 10 s for them on one core, WebP 25.
A job of the prompt worker may take 60 s (--prompt-timeout), and others wait for it. 64 photographs of 4 million
pixels are as many. Images that were decoded before do not count, so a refused request gets further if sent again.
"""
_MAX_KNOWN = 2**14
"""Files, and sizes, that are remembered: a few MiB, and many times `MAX_IMAGES`, so that a request that asks for
layouts finds all of its images decoded when it comes again.
"""
_DIGEST_BYTES = 32
_MARKER = re.compile(r"<__image_[0-9a-f]{64}__>")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class UnknownSizesError(Exception):
    """The engine must say which tokens images of some sizes have."""

    def __init__(self, sizes: Iterable[ImageSize]) -> None:
        super().__init__()
        self.sizes = tuple(sizes)


class GivenImage(msgspec.Struct, frozen=True):
    """An image of another API's body: the `image_url` of a part of the chat that the body is converted to."""

    text: str
    """Base64, or a `data:` URL."""
    field: str
    """Its field in the body, for errors."""


def image_part(text: Any, field: str) -> dict[str, Any]:
    """Return the part of a chat for an image; raises `InvalidRequestError` if it is not a text."""
    if not isinstance(text, str):
        refuse_field(field, "must be text: base64, or a data: URL")
    return {"type": "image_url", "image_url": GivenImage(text, field)}


@dataclass(frozen=True, slots=True)
class _Image:
    """An image as it was read."""

    marker: str
    file: bytes
    size: ImageSize
    digest: bytes
    field: str


class ImageReader:
    """Reads images, and remembers their digests and sizes; for one projector, or none. Usable on any thread."""

    def __init__(self, projector: ProjectorInfo | None) -> None:
        self._projector = projector
        self._files: _Recent[bytes, tuple[ImageSize, bytes]] = _Recent()
        """Size and digest of the pixels, by the digest of the file."""
        self._layouts: _Recent[ImageSize, ImageLayout] = _Recent()

    def check_supported(self, field: str) -> None:
        """Raise `NotSupportedError` without a projector."""
        if self._projector is None:
            # llama-server's words, from which its clients recognise a model without vision.
            why = ": image input is not supported, since the server was started without a projector (--mmproj)"
            refuse_field(field, why, NotSupportedError)

    def read(self, text: str, field: str, tenant: bytes, *, may_decode: bool) -> tuple[_Image, int]:
        """Return an image, and the pixels that were decoded for it; raises `InvalidRequestError`.

        Files are remembered by tenant: nobody sees, by time or by `may_decode`, what another one has sent.
        """
        self.check_supported(field)
        assert self._projector is not None
        file = _file(text, field)
        key = hashlib.blake2b(file, digest_size=_DIGEST_BYTES, key=tenant).digest()
        known, n_new = self._files.get(key), 0
        if known is None:
            if not may_decode:
                why = f": the images before it have {MAX_NEW_PIXELS} pixels, and no more are decoded of a request"
                refuse_field(field, f"{why}; those are known now, if it is sent again")
            try:
                known = _size_and_digest(file, self._projector)
            except InvalidRequestError as error:
                refuse_field(field, error.message)
            self._files.add(key, known)
            n_new = known[0].width * known[0].height
        return _Image(f"<__image_{key.hex()}__>", file, *known, field), n_new

    def layouts(
        self, sizes: Iterable[ImageSize], told: Mapping[ImageSize, ImageLayout]
    ) -> dict[ImageSize, ImageLayout]:
        """Return the layouts of images, some of which the engine has `told`; raises `UnknownSizesError`."""
        for size, layout in told.items():
            self._layouts.add(size, layout)
        found = {size: told.get(size) or self._layouts.get(size) for size in sizes}
        if unknown := [size for size, layout in found.items() if layout is None]:
            raise UnknownSizesError(unknown)
        return {size: layout for size, layout in found.items() if layout is not None}


class RequestImages:
    """The images of a request, which belongs to `tenant`. `told` has layouts that the engine has told for it."""

    def __init__(self, reader: ImageReader, told: Mapping[ImageSize, ImageLayout], tenant: str) -> None:
        self._reader = reader
        self._told = told
        self._tenant = hashlib.sha256(tenant.encode()).digest()
        self._images: list[_Image] = []
        """Those that were read so far, in their order."""
        self._n_new = 0
        """Pixels that were decoded for them."""

    def __bool__(self) -> bool:
        """True if there are any."""
        return bool(self._images)

    # --- chats ---

    def in_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Read the images of a chat, and return its messages with markers in place of them."""
        changed = with_texts(messages, lambda part, where: self._read(*given_image(part, where)).marker)
        # An image that no prompt may have is refused before anything is rendered.
        self._parts(self._images)
        return changed

    def put_into(self, rendered: Sequence[TextPart]) -> tuple[PromptPart, ...]:
        """Return a chat's prompt with the images in place of their markers; those of other images are text.

        Raises `InvalidRequestError` if the template has left out an image, or if a text of the chat has its marker.
        """
        if not self._images:
            return tuple(rendered)
        images = self._parts(self._images)
        found: list[PromptPart] = []
        n_found: Counter[str] = Counter()
        for part in rendered:
            done = 0
            for match in _MARKER.finditer(part.text):
                image = images.get(match[0])
                if image is not None:
                    n_found[match[0]] += 1
                    found += [msgspec.structs.replace(part, text=part.text[done : match.start()]), image]
                    done = match.end()
            found.append(msgspec.structs.replace(part, text=part.text[done:]))
        n_given = Counter(each.marker for each in self._images)
        for each in self._images:
            if n_found[each.marker] != n_given[each.marker]:
                n, n_rendered = n_given[each.marker], n_found[each.marker]
                why = f": the image is {n} times in the messages, and {n_rendered} times in the template's prompt"
                refuse_field(each.field, why)
        return _without_empty(found)

    # --- prompts ---

    def in_prompt(self, text: Any, data: Any, param: str) -> tuple[PromptPart, ...]:
        """Return a prompt that has an image for each `MEDIA_MARKER`, in llama-server's form."""
        if not isinstance(text, str):
            refuse_field(f"{param}.prompt_string", "must be text beside 'multimodal_data'")
        field = f"{param}.multimodal_data"
        images = [
            self._read(each if isinstance(each, str) else "", f"{field}[{i}]")
            for i, each in enumerate(checked_list(data, field))
        ]
        before, *texts = text.split(MEDIA_MARKER)
        if len(texts) != len(images):
            refuse_field(field, f"has {len(images)} images, and the prompt {len(texts)} times {MEDIA_MARKER}")
        parts = self._parts(images)
        found: list[PromptPart] = [TextPart(before)]
        for image, after in zip(images, texts, strict=True):
            found += [parts[image.marker], TextPart(after)]
        return _without_empty(found)

    # --- inside ---

    def _read(self, text: str, field: str) -> _Image:
        if len(self._images) == MAX_IMAGES:
            refuse_field(field, f": the request has more than {MAX_IMAGES} images")
        image, n_new = self._reader.read(text, field, self._tenant, may_decode=self._n_new < MAX_NEW_PIXELS)
        self._images.append(image)
        self._n_new += n_new
        return image

    def _parts(self, images: Sequence[_Image]) -> dict[str, ImagePart]:
        """Return the parts of a prompt that images are, by marker."""
        layouts = self._reader.layouts({each.size for each in images}, self._told)
        for each in images:
            if why := layouts[each.size].refusal:
                refuse_field(each.field, f": {why}")
        return {each.marker: ImagePart(each.file, each.digest, layouts[each.size]) for each in images}


def _without_empty(parts: Iterable[PromptPart]) -> tuple[PromptPart, ...]:
    return tuple(part for part in parts if not isinstance(part, TextPart) or part.text)


def with_texts(messages: Sequence[dict[str, Any]], text_of: TextOf) -> list[dict[str, Any]]:
    """Return messages in which those with images have one text, with what `text_of` returns for each image."""
    changed: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        where = f"messages[{i}].content"
        parts = content if isinstance(content, list) else ()
        if not any(map(_is_image, parts)):
            changed.append(message)
            continue
        text, follows_image = "", False
        for j, part in enumerate(parts):
            if _is_image(part):
                text += text_of(part, f"{where}[{j}]")
            else:
                own = clean_part(part, f"{where}[{j}]")["text"]
                text += own if follows_image or not text else f"\n{own}"
            follows_image = _is_image(part)
        changed.append({**message, "content": text})
    return changed


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def given_image(part: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Return the text of a part's image, and its field."""
    image, field = part.get("image_url"), f"{where}.image_url"
    if isinstance(image, GivenImage):
        return image.text, image.field
    if isinstance(image, Mapping):
        image, field = image.get("url"), f"{field}.url"
    if not isinstance(image, str):
        refuse_field(field, "must be text: a data: URL")
    return image, field


def _size_and_digest(file: bytes, projector: ProjectorInfo) -> tuple[ImageSize, bytes]:
    """Decode an image, and return its size and the digest of its pixels; raises `InvalidRequestError`."""
    size, pixels = decode(file)
    head = f"{projector.digest} {size.width} {size.height} "
    digest = hashlib.blake2b(head.encode(), digest_size=_DIGEST_BYTES)
    digest.update(pixels)
    return size, digest.digest()


def _file(text: str, field: str) -> bytes:
    """Return the bytes of an image that is given as a `data:` URL or as base64."""
    head, _, data = text.partition(",") if (is_url := text[:5].lower() == "data:") else ("", "", text)
    if is_url:
        kind, *parameters = head[5:].lower().split(";")
        if not kind.strip().startswith("image/") or parameters[-1:] != ["base64"]:
            refuse_field(field, "must begin with 'data:image/...;base64,' as a data: URL")
    elif scheme := _SCHEME.match(text):
        why = f"is a URL ({scheme[0]}), and the server fetches nothing: send the image as a data: URL"
        refuse_field(field, why, NotSupportedError)
    # Encoders for mail write line breaks, and some leave out the padding.
    data = "".join(data.split()).rstrip("=")
    try:
        file = base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except ValueError:
        refuse_field(field, "is not valid base64")
    return file or refuse_field(field, "is empty")


class _Recent(Generic[K, V]):
    """The values that were used most recently."""

    def __init__(self) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Return a value."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def add(self, key: K, value: V) -> None:
        """Add a value."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > _MAX_KNOWN:
                self._values.popitem(last=False)
