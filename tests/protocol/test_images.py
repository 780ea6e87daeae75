"""Images in the bodies of all APIs: their places in prompts, and the field that is named if something is wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from PIL import Image

from llamaslot.base.errors import InvalidRequestError, LlamaslotError, NotSupportedError
from llamaslot.base.images import ImageSize
from llamaslot.base.prompt_jobs import AnswerBody, BadBody, BodyKind, Needs, Prepared
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol import images
from tests.fake_backend import FakeBackend, FakeVocab
from tests.image_bodies import (
    TEMPLATE,
    answered,
    base64_of,
    block,
    chat,
    file_of,
    item,
    layout_of,
    part,
    picture,
    prepared,
    shown,
    text,
    url_of,
    vision_info,
)
from tests.prompt_threads import LocalPrompts, parse, prompt_thread

RED, BLUE = file_of(picture((255, 0, 0))), file_of(picture((0, 0, 255), (5, 2)))
TILES = {RED: ("\1", 4, "\2", 3, "\3"), BLUE: ("\1", 5, "\2", 2, "\3")}
"""How `layout_of` has them tokenized: delimiters, and numbers of tokens."""
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}
CALLED = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}


def prompt(*pieces: str | bytes) -> list[str | int]:
    """What `shown` gives for texts and images."""
    found: list[str | int] = ["^"]
    for each in pieces:
        for piece in (each,) if isinstance(each, str) else TILES[each]:
            if isinstance(piece, str) and isinstance(found[-1], str):
                found[-1] += piece
            else:
                found.append(piece)
    return [*found, ""] if isinstance(found[-1], int) else found


@pytest.fixture
async def worker() -> AsyncIterator[LocalPrompts]:
    worker = prompt_thread(Tokenizer(FakeVocab(), 500, min_match=0.8), vision_info(n_ctx_slot=500), TEMPLATE)
    yield worker
    worker.close()


@pytest.fixture
async def blind() -> AsyncIterator[LocalPrompts]:
    """A worker whose model has no projector."""
    worker = prompt_thread(Tokenizer(FakeVocab(), 500, min_match=0.8), template=TEMPLATE)
    yield worker
    worker.close()


def of_tool(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat whose tool has returned images."""
    result = {"role": "tool", "tool_call_id": "call_1", "content": list(parts)}
    return [{"role": "user", "content": "Look"}, {"role": "assistant", "tool_calls": [CALL]}, result]


def user(data: bytes) -> dict[str, Any]:
    return {"role": "user", "content": [part(data)]}


BODIES: list[tuple[BodyKind, dict[str, Any], list[str | int]]] = [
    ("chat", chat(text("A"), part(RED), text("B")), prompt("[user]A", RED, "B[reply]")),
    ("chat", chat(part(RED)), prompt("[user]", RED, "[reply]")),
    ("chat", chat(part(RED), part(BLUE)), prompt("[user]", RED, BLUE, "[reply]")),
    ("chat", chat(part(RED), part(RED)), prompt("[user]", RED, RED, "[reply]")),
    (
        "chat",
        chat(text("A"), text("B"), part(RED), text("C"), text("D")),
        prompt("[user]A\nB", RED, "C\nD[reply]"),
    ),
    (
        "chat",
        {"messages": [user(RED), {"role": "assistant", "content": "?"}, user(BLUE)]},
        prompt("[user]", RED, "[assistant]?[user]", BLUE, "[reply]"),
    ),
    ("responses", {"input": [{"role": "user", "content": [item(RED), {"type": "input_text", "text": "A"}]}]},
     prompt("[user]", RED, "A[reply]")),
    ("responses", {"input": [{"role": "user", "content": [item(RED)]}]}, prompt("[user]", RED, "[reply]")),
    ("compact", {"input": [{"role": "user", "content": [item(RED)]}]}, []),
    ("messages", {"messages": [{"role": "user", "content": [block(RED), text("A")]}], "max_tokens": 1},
     prompt("[user]", RED, "A[reply]")),
    ("messages", {"messages": [{"role": "user", "content": [block(RED)]}], "max_tokens": 1},
     prompt("[user]", RED, "[reply]")),
    ("messages", {"messages": [{"role": "user", "content": "A"}, {"role": "user", "content": [block(RED)]}],
                  "max_tokens": 1}, prompt("[user]A", RED, "[reply]")),
    ("ollama_chat", {"messages": [{"role": "user", "content": "A", "images": [base64_of(RED), base64_of(BLUE)]}]},
     prompt("[user]", RED, BLUE, "A[reply]")),
    ("ollama_generate", {"prompt": "A", "images": [base64_of(RED)]}, prompt("[user]", RED, "A[reply]")),
    ("ollama_generate", {"images": [base64_of(RED)]}, prompt("[user]", RED, "[reply]")),
    ("native", {"prompt": {"prompt_string": "A<__media__>B", "multimodal_data": [base64_of(RED)]}},
     prompt("A", RED, "B")),
    ("native", {"prompt": {"prompt_string": "<__media__>" * 2, "multimodal_data": [base64_of(RED), url_of(BLUE)]}},
     prompt(RED, BLUE)),
    ("native", {"prompt": [{"prompt_string": "<__media__>A", "multimodal_data": [base64_of(RED)]}]},
     prompt(RED, "A")),
    ("text", {"prompt": {"prompt_string": "A<__media__>", "multimodal_data": [base64_of(RED)]}}, prompt("A", RED)),
    ("any", chat(part(RED), text("A")), prompt("[user]", RED, "A[reply]")),
    ("any", {"input": [{"role": "user", "content": [item(RED)]}]}, prompt("[user]", RED, "[reply]")),
    ("any", {"system": "A", "messages": [{"role": "user", "content": [block(RED)]}]},
     prompt("[system]A[user]", RED, "[reply]")),
    ("any", {"messages": [{"role": "user", "content": [block(RED)]}]}, prompt("[user]", RED, "[reply]")),
    ("any", {"prompt": {"prompt_string": "A<__media__>", "multimodal_data": [base64_of(RED)]}}, prompt("A", RED)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "body", "expected"), BODIES, ids=[f"{i}-{each[0]}" for i, each in enumerate(BODIES)]
)
async def test_images_are_in_their_places(
    worker: LocalPrompts, kind: BodyKind, body: dict[str, Any], expected: list[str | int]
) -> None:
    inspected = shown((await prepared(worker, kind, body, purpose="inspect")).prompts[0].prompt)
    if kind == "compact":
        assert inspected[:2] == ["^[user]\1", 4]
    else:
        assert inspected == expected
    if kind != "any":
        # Only looked up and warmed.
        assert shown((await prepared(worker, kind, body)).prompts[0].prompt) == inspected


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", {"messages": of_tool(text("A"), part(RED))}),
        ("chat", {"messages": of_tool(part(RED))}),
        ("responses", {"input": [{"role": "user", "content": "Look"}, CALLED,
                                 {"type": "function_call_output", "call_id": "call_1", "output": [item(RED)]}]}),
        ("messages", {"max_tokens": 1, "messages": [
            {"role": "user", "content": "Look"}, {"role": "assistant", "content": [USE]},
            {"role": "user",
             "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": [block(RED)]}]}]}),
        ("ollama_chat", {"messages": [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "content": "", "images": [base64_of(RED)]}]}),
    ],
)  # fmt: skip
async def test_results_of_tools_may_have_images(worker: LocalPrompts, kind: BodyKind, body: dict[str, Any]) -> None:
    found = shown((await prepared(worker, kind, body)).prompts[0].prompt)
    assert [each for each in found if isinstance(each, int)] == [4, 3]
    assert isinstance(found[-1], str)
    assert found[-1].startswith("\3")
    assert found[-1].endswith("[reply]")


@pytest.mark.parametrize(
    "given",
    [
        {"url": url_of(RED)},
        {"url": url_of(RED), "detail": "high"},
        url_of(RED),
        {"url": base64_of(RED)},
        base64_of(RED),
        {"url": "DATA:image/JPEG;base64," + base64_of(RED)},
        {"url": "data:image/png;name=a;base64," + base64_of(RED)},
        {"url": "\n".join(base64_of(RED)[i : i + 60] for i in range(0, 2000, 60))},
        {"url": base64_of(RED).rstrip("=")},
    ],
)
async def test_all_forms_of_an_image_in_a_chat(worker: LocalPrompts, given: Any) -> None:
    body = chat({"type": "image_url", "image_url": given})
    assert shown((await prepared(worker, "chat", body)).prompts[0].prompt) == prompt("[user]", RED, "[reply]")


FIELDS: list[tuple[BodyKind, str, Any]] = [
    ("chat", "messages[0].content[1].image_url.url",
     lambda data: chat(text("A"), {"type": "image_url", "image_url": {"url": data}})),
    ("chat", "messages[0].content[0].image_url", lambda data: chat({"type": "image_url", "image_url": data})),
    ("chat", "messages[2].content[0].image_url.url",
     lambda data: {"messages": of_tool({"type": "image_url", "image_url": {"url": data}})}),
    ("responses", "input[0].content[0].image_url",
     lambda data: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": data}]}]}),
    ("responses", "input[1].output[0].image_url",
     lambda data: {"input": [CALLED, {"type": "function_call_output", "call_id": "call_1",
                                      "output": [{"type": "input_image", "image_url": data}]}]}),
    ("compact", "input[0].content[0].image_url",
     lambda data: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": data}]}]}),
    ("messages", "messages[1].content[1].source.data",
     lambda data: {"max_tokens": 1, "messages": [
         {"role": "user", "content": "A"},
         {"role": "user", "content": [text("A"), {"type": "image", "source": {"type": "base64", "data": data}}]}]}),
    ("messages", "messages[0].content[0].content[0].source.data",
     lambda data: {"max_tokens": 1, "messages": [{"role": "user", "content": [
         {"type": "tool_result", "tool_use_id": "call_1",
          "content": [{"type": "image", "source": {"type": "base64", "data": data}}]}]}]}),
    ("ollama_chat", "messages[0].images[1]",
     lambda data: {"messages": [{"role": "user", "content": "A", "images": [base64_of(RED), data]}]}),
    ("ollama_generate", "images[0]", lambda data: {"prompt": "A", "images": [data]}),
    ("native", "prompt.multimodal_data[0]",
     lambda data: {"prompt": {"prompt_string": "<__media__>", "multimodal_data": [data]}}),
    ("text", "prompt[1].multimodal_data[0]",
     lambda data: {"prompt": ["A", {"prompt_string": "<__media__>", "multimodal_data": [data]}]}),
    ("any", "messages[0].content[0].image_url.url",
     lambda data: chat({"type": "image_url", "image_url": {"url": data}})),
]  # fmt: skip
WRONG: list[tuple[str, type[LlamaslotError], str]] = [
    ("https://example.org/a.png", NotSupportedError, r"is a URL \(https:\), and the server fetches nothing"),
    ("http://127.0.0.1:8080/slots", NotSupportedError, "fetches nothing"),
    ("file:///etc/passwd", NotSupportedError, "fetches nothing"),
    ("FTP://example.org/a.png", NotSupportedError, "fetches nothing"),
    ("data:audio/wav;base64,UklGRg==", InvalidRequestError, "must begin with 'data:image/"),
    ("data:text/plain;base64,QQ==", InvalidRequestError, "must begin with 'data:image/"),
    ("data:image/png," + base64_of(RED), InvalidRequestError, "must begin with 'data:image/"),
    ("data:image/png;base64", InvalidRequestError, "is empty"),
    ("data:image/png;base64,", InvalidRequestError, "is empty"),
    ("", InvalidRequestError, "is empty"),
    ("data:image/png;base64,????", InvalidRequestError, "is not valid base64"),
    ("not base64!", InvalidRequestError, "is not valid base64"),
    ("\u00e9\u00e9\u00e9\u00e9", InvalidRequestError, "is not valid base64"),
    (base64_of(b"not an image"), InvalidRequestError, "is not an image in one of the formats PNG"),
    (base64_of(file_of(Image.effect_noise((90, 70), 50))[:3000]), InvalidRequestError, "is damaged"),
]


async def refused(worker: LocalPrompts, kind: BodyKind, body: dict[str, Any]) -> LlamaslotError:
    """The error for a body."""
    try:
        answer = await answered(worker, parse(kind, body))
    except LlamaslotError as error:
        return error
    assert isinstance(answer, BadBody)
    return answer.error.exception()


@pytest.mark.parametrize(("kind", "field", "body_of"), FIELDS)
async def test_what_is_wrong_with_an_image_names_its_field(
    worker: LocalPrompts, kind: BodyKind, field: str, body_of: Any
) -> None:
    for given, error, message in WRONG:
        found = await refused(worker, kind, body_of(given))
        assert (type(found), found.param) == (error, field), given
        assert found.message.startswith(f"'{field}'")
        with pytest.raises(error, match=message):
            raise found
    for given in (5, None, {}, []):
        found = await refused(worker, kind, body_of(given))
        assert (found.param or "").startswith(field.removesuffix(".url")), given


@pytest.mark.parametrize(("kind", "field", "body_of"), FIELDS)
async def test_without_a_projector_images_are_refused(
    blind: LocalPrompts, kind: BodyKind, field: str, body_of: Any
) -> None:
    found = await refused(blind, kind, body_of(url_of(RED)))
    # llama-server's words.
    assert isinstance(found, NotSupportedError)
    assert "image input is not supported" in found.message
    assert "--mmproj" in found.message
    # Ollama's have two images.
    assert found.param == field.replace("images[1]", "images[0]")


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        ("chat", chat({"type": "input_audio", "input_audio": {"data": ""}}), "messages[0].content[0]"),
        ("chat", chat({"type": "video_url", "video_url": {"url": ""}}), "messages[0].content[0]"),
        ("chat", chat(part(RED), {"type": "input_audio"}), "messages[0].content[1]"),
        ("chat", chat(part(RED), {"type": "text"}), "messages[0].content[1].text"),
        ("chat", chat(part(RED), 5), "messages[0].content[1]"),  # type: ignore[arg-type]
        ("chat", chat({"type": "image_url"}), "messages[0].content[0].image_url"),
        ("chat", {"messages": [{"role": "pope", "content": [part(RED)]}]}, "messages[0].role"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "a"}]}]},
         "input[0].content[0].file_id"),
        ("responses", {"input": [{"role": "assistant", "content": [item(RED)]}]}, "input[0].content[0]"),
        ("messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "https://example.org"}}]}]},
         "messages[0].content[0].source.type"),
        ("messages", {"max_tokens": 1, "messages": [{"role": "assistant", "content": [block(RED)]}]},
         "messages[0].content[0].type"),
        ("messages", {"max_tokens": 1, "system": [block(RED)], "messages": []}, "system[0].type"),
        ("native", {"prompt": {"prompt_string": "A", "multimodal_data": [base64_of(RED)]}},
         "prompt.multimodal_data"),
        ("native", {"prompt": {"prompt_string": "<__media__>" * 2, "multimodal_data": [base64_of(RED)]}},
         "prompt.multimodal_data"),
        ("native", {"prompt": {"prompt_string": ["A", 5], "multimodal_data": [base64_of(RED)]}},
         "prompt.prompt_string"),
        ("native", {"prompt": {"prompt_string": "A", "multimodal_data": "x"}}, "prompt.multimodal_data"),
        ("text", {"prompt": {"prompt_string": "<__media__>", "multimodal_data": [base64_of(RED)]}, "echo": True,
                  "logprobs": 1}, "logprobs"),
        ("embeddings", {"input": {"prompt_string": "<__media__>", "multimodal_data": [base64_of(RED)]}},
         "input.multimodal_data"),
    ],
)  # fmt: skip
async def test_what_cannot_have_images_names_its_field(
    worker: LocalPrompts, kind: BodyKind, body: dict[str, Any], field: str
) -> None:
    found = await refused(worker, kind, body)
    assert found.param == field
    assert f"'{field}'" in found.message


async def test_layouts_are_asked_for_once_for_each_size(worker: LocalPrompts) -> None:
    body = chat(part(RED), part(RED), part(BLUE))
    first = await worker.call(parse("chat", body))
    assert isinstance(first, Needs)
    assert (set(first.layouts), first.may_compile) == ({ImageSize(4, 3), ImageSize(5, 2)}, False)
    layouts = {size: layout_of(size) for size in first.layouts}
    assert isinstance(await worker.call(msgspec.structs.replace(parse("chat", body), layouts=layouts)), Prepared)
    other = file_of(picture((9, 9, 9)))
    assert isinstance(await worker.call(parse("chat", chat(part(other)))), Prepared), "its size is known"


async def test_files_are_decoded_once(worker: LocalPrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    decode = images.decode

    def counted(data: bytes) -> Any:
        decoded.append(data)
        return decode(data)

    monkeypatch.setattr(images, "decode", counted)
    body = chat(part(RED), part(RED), part(BLUE))
    for _ in range(3):
        await prepared(worker, "chat", body)
    assert decoded == [RED, BLUE]


async def test_the_number_of_images_is_limited(worker: LocalPrompts) -> None:
    found = await refused(worker, "chat", chat(*[part(RED)] * (images.MAX_IMAGES + 1)))
    assert found.param == f"messages[0].content[{images.MAX_IMAGES}].image_url.url"
    assert "more than 256 images" in found.message


async def test_pixels_to_be_decoded_are_limited(worker: LocalPrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_NEW_PIXELS", 20)
    body = chat(*[part(file_of(picture((i, 0, 0)))) for i in range(3)])
    found = await refused(worker, "chat", body)
    assert found.param == "messages[0].content[2].image_url.url"
    assert "no more are decoded" in found.message
    assert isinstance(await answered(worker, parse("chat", body)), Prepared), "those before are known by then"


@pytest.mark.parametrize("apart", ["key", "salt"])
async def test_a_tenant_does_not_see_which_files_another_one_has_sent(
    worker: LocalPrompts, monkeypatch: pytest.MonkeyPatch, apart: str
) -> None:
    """Neither by the limit of pixels, nor by the time of decoding."""
    monkeypatch.setattr(images, "MAX_NEW_PIXELS", 10)
    decoded: list[int] = []
    decode = images.decode
    monkeypatch.setattr(images, "decode", lambda data: (decoded.append(1), decode(data))[1])
    both = chat(part(RED), part(BLUE))
    for tenant, n_decoded, is_refused in (("a", 1, True), ("b", 1, True), ("a", 1, False), ("a", 0, False)):
        body = {**both, "cache_salt": tenant} if apart == "salt" else both
        job = parse("chat", body)
        if apart == "key":
            job = msgspec.structs.replace(job, context=msgspec.structs.replace(job.context, key_secret=tenant))
        decoded.clear()
        answer = await worker.call(job)
        # The first image is decoded, so the second one is too much, until the tenant sends the first one again.
        assert (len(decoded), not isinstance(answer, Needs)) == (n_decoded, is_refused)


async def test_an_image_that_a_template_leaves_out_is_named() -> None:
    template = "{% for m in messages %}{% if not loop.first %}{{ m.content }}{% endif %}{% endfor %}"
    worker = prompt_thread(Tokenizer(FakeVocab(), 500, min_match=0.8), vision_info(), template)
    body = chat(part(RED))
    body["messages"] += [{"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}]
    found = await refused(worker, "chat", body)
    assert found.param == "messages[0].content[0].image_url.url"
    assert "1 times in the messages, and 0 times" in found.message
    worker.close()


async def test_a_marker_in_a_text_is_no_image(worker: LocalPrompts) -> None:
    layouts = {size: layout_of(size) for size in (ImageSize(4, 3), ImageSize(5, 2))}
    reading = images.RequestImages(worker.worker._reader._images, layouts, "\n")
    messages = reading.in_messages(chat(part(RED))["messages"])
    marker = messages[0]["content"]
    found = (await prepared(worker, "chat", chat(text(marker)))).prompts[0].prompt
    assert shown(found) == [f"^[user]{marker}[reply]"]
    found = (await prepared(worker, "chat", chat(text(marker), part(BLUE)))).prompts[0].prompt
    assert shown(found) == prompt(f"[user]{marker}", BLUE, "[reply]")
    error = await refused(worker, "chat", chat(text(marker), part(RED)))
    assert error.param == "messages[0].content[1].image_url.url"


async def test_a_template_gets_texts(blind: LocalPrompts, worker: LocalPrompts) -> None:
    def job(kind: Any, body: dict[str, Any]) -> AnswerBody:
        return AnswerBody(kind, msgspec.json.encode(body))

    body = chat(text("A"), part(RED), part(b"never read"), text("B"))
    reply = msgspec.json.decode(await worker.call(job("apply_template", body)))
    assert reply == {"prompt": "[user]A<__media__><__media__>B[reply]"}
    with pytest.raises(NotSupportedError, match="whose tokens have no ids"):
        await worker.call(job("tokenize", body))
    with pytest.raises(NotSupportedError, match="image input is not supported"):
        await blind.call(job("apply_template", body))


async def test_what_is_stored_has_the_images(worker: LocalPrompts) -> None:
    given = chat(text("A"), part(RED), store=True)
    options = (await prepared(worker, "chat", given)).options
    assert options.chat is not None
    (message,) = msgspec.json.decode(options.chat.messages)
    assert message["content_parts"] == given["messages"][0]["content"]
    own = {"role": "user", "content": [item(RED)]}
    options = (await prepared(worker, "responses", {"input": [own]})).options
    assert msgspec.json.decode(options.response.input)[0]["content"] == [item(RED)]


async def test_a_compaction_has_the_texts(worker: LocalPrompts) -> None:
    texts = [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]
    own = {"role": "user", "content": [texts[0], item(RED), texts[1]]}
    options = (await prepared(worker, "compact", {"input": [own]})).options
    assert options.response.user_texts == ("A\nB",)


async def test_a_warmed_chat_ends_before_what_follows(worker: LocalPrompts) -> None:
    body = chat(part(RED), text("A"))
    whole = (await prepared(worker, "chat", body)).prompts[0].prompt
    warmed = (await prepared(worker, "any", body, purpose="warm")).prompts[0].prompt
    assert shown(warmed) == shown(whole), "its last message is the user's"
    body["messages"].append({"role": "assistant", "content": "B"})
    warmed = (await prepared(worker, "any", body, purpose="warm")).prompts[0].prompt
    assert shown(warmed) == prompt("[user]", RED, "A[assistant]B[user]")


async def test_a_warmed_text_may_end_with_an_image(worker: LocalPrompts) -> None:
    own = {"prompt_string": "A<__media__>", "multimodal_data": [base64_of(RED)]}
    warmed = (await prepared(worker, "any", {"prompt": own}, purpose="warm")).prompts[0].prompt
    assert shown(warmed) == prompt("A", RED)


def test_the_fake_model_has_no_projector_of_its_own() -> None:
    assert FakeBackend().info.projector is None
