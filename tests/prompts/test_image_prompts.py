"""Prompts with images: ids and places of their tokens, and that nothing takes their tokens for text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.commands import ImagePart, TextPart, TokensPart
from llamaslot.base.errors import ContextSizeError
from llamaslot.base.images import ImageLayout, ImageSize, tile_ids
from llamaslot.base.model import ProjectorInfo
from llamaslot.base.prompt_jobs import BadBody, Locate, Located, NextTurn, Prepared, Release, Remember
from llamaslot.base.text_records import Session
from llamaslot.base.tokens import TokenizedPrompt, n_common, packed
from llamaslot.prompts.divergences import EarlierPrompts
from llamaslot.prompts.remembering import PromptContext
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol import text_requests
from tests.fake_backend import BOS, FakeVocab
from tests.image_bodies import (
    BEGIN,
    BETWEEN,
    END,
    PROJECTOR,
    TEMPLATE,
    answered,
    base64_of,
    chat,
    file_of,
    layout_of,
    part,
    picture,
    prepared,
    shown,
    text,
    vision_info,
)
from tests.prompt_threads import LocalPrompts, parse, prompt_thread, text_request

RED = file_of(picture((255, 0, 0)))
DIGEST = bytes(range(32))


def image(digest: bytes = DIGEST, *runs: tuple[int, ...] | int) -> ImagePart:
    return ImagePart(b"file", digest, ImageLayout(runs or ((BEGIN,), 4, (BETWEEN,), 3, (END,))))


def new_worker(n_ctx: int = 500, projector: ProjectorInfo = PROJECTOR, **options: Any) -> LocalPrompts:
    vocab = FakeVocab()
    info = vision_info(n_ctx_slot=n_ctx)
    info = msgspec.structs.replace(info, projector=projector)
    return prompt_thread(Tokenizer(vocab, n_ctx, min_match=0.8), info, TEMPLATE, restoring=vocab, **options)


@pytest.fixture
async def worker() -> AsyncIterator[LocalPrompts]:
    worker = new_worker(predicts=True)
    yield worker
    worker.close()


async def prompt_of(worker: LocalPrompts, *parts: dict[str, Any], **fields: Any) -> TokenizedPrompt:
    return (await prepared(worker, "chat", chat(*parts, **fields))).prompts[0].prompt


async def image_ids(worker: LocalPrompts, data: bytes) -> list[int]:
    """The ids of an image's tiles."""
    tokens = (await prompt_of(worker, part(data))).tokens
    return list(tokens[tokens < 0].tolist())


def test_tiles_have_their_places_after_bos_and_all_text_before() -> None:
    tokenizer = Tokenizer(FakeVocab(), 500, min_match=0.8)
    other = bytes(32)
    request = text_request("r", [TextPart("ab"), image(), TextPart("c"), image(other, 2)])
    prompt = tokenizer.tokenize_prompt(request).prompt
    expected = [BOS, *b"ab", BEGIN, *tile_ids(DIGEST, 0, 4), BETWEEN, *tile_ids(DIGEST, 1, 3), END, *b"c"]
    assert prompt.tokens.tolist() == [*expected, *tile_ids(other, 0, 2)]
    assert [each.tiles for each in prompt.images] == [((4, 8), (9, 12)), ((14, 16),)]
    assert {(each.data, each.digest) for each in prompt.images} == {(b"file", DIGEST), (b"file", other)}


def test_bos_goes_before_an_image_but_not_before_token_ids() -> None:
    tokenizer = Tokenizer(FakeVocab(), 500, min_match=0.8)

    def first(*parts: Any) -> list[int]:
        return list(tokenizer.tokenize_prompt(text_request("r", parts)).prompt.tokens[:2].tolist())

    assert first(image()) == [BOS, BEGIN]
    assert first(TextPart(""), image()) == [BOS, BEGIN]
    assert first(TokensPart((7,)), image()) == [7, BEGIN]


@pytest.mark.parametrize("before", ["", "Look at this ", "a"])
@pytest.mark.parametrize("after", ["", " and say", "b\n"])
def test_text_beside_an_image_is_tokenized_apart(vocab: LlamaVocab, before: str, after: str) -> None:
    tokenizer = Tokenizer(vocab, 500, min_match=0.8)
    parts = [TextPart(before), image(DIGEST, 5), TextPart(after)]
    found = tokenizer.tokenize_prompt(text_request("r", parts)).prompt.tokens.tolist()
    head = vocab.tokenize(before, add_special=True, parse_special=True).tolist()
    tail = vocab.tokenize(after, add_special=False, parse_special=True).tolist()
    assert found == [*head, *tile_ids(DIGEST, 0, 5), *tail]


async def test_equal_pixels_have_equal_ids_whatever_their_file(worker: LocalPrompts) -> None:
    noise = Image.effect_noise((9, 7), 60).convert("RGB")
    files = [
        file_of(noise),
        file_of(noise, compress_level=0),
        file_of(noise, "BMP"),
        file_of(noise, "WEBP", lossless=True),
        file_of(noise.convert("RGBA")),
    ]
    assert len(set(files)) == len(files)
    found = [await image_ids(worker, each) for each in files]
    assert len(found[0]) == 9 + 7
    assert all(each == found[0] for each in found)
    other = new_worker()
    assert await image_ids(other, files[0]) == found[0], "also in another process"
    other.close()


async def test_other_pixels_have_other_ids(worker: LocalPrompts) -> None:
    changed = [picture((255, 0, 0)) for _ in range(4)]
    for each, at in zip(changed, ((0, 0), (3, 2), (1, 1), (2, 0)), strict=True):
        each.putpixel(at, (254, 0, 0))
    turned = [picture((255, 0, 0), size) for size in ((3, 4), (12, 1), (1, 12), (6, 2))]
    files = [RED, *map(file_of, changed), *map(file_of, turned)]
    found = [await image_ids(worker, each) for each in files]
    assert len({token for ids in found for token in ids}) == sum(map(len, found)), "none in common"


async def test_other_projectors_have_other_ids() -> None:
    found = []
    for digest in ("a", "b"):
        worker = new_worker(projector=msgspec.structs.replace(PROJECTOR, digest=digest))
        found += await image_ids(worker, RED)
        worker.close()
    assert len(set(found)) == len(found)


async def test_a_conversation_begins_as_its_last_turn(worker: LocalPrompts) -> None:
    first = await prompt_of(worker, text("A"), part(RED))
    messages = [*chat(text("A"), part(RED))["messages"], {"role": "assistant", "content": "B"}]
    body = {"messages": [*messages, {"role": "user", "content": "C"}]}
    second = (await prepared(worker, "chat", body)).prompts[0].prompt
    n = first.n_tokens - len("[reply]")
    assert second.tokens[:n].tolist() == first.tokens[:n].tolist()
    assert second.images == first.images


async def test_images_count_for_the_context() -> None:
    n_text, n_image = len("^[user][reply]"), 4 + 3 + 3
    for n_ctx, n_given in ((n_text + n_image, None), (n_text + n_image + 1, 1), (n_text + 2 * n_image, 2)):
        worker = new_worker(n_ctx)
        if n_given == 1:
            assert (await prompt_of(worker, part(RED))).n_tokens == n_text + n_image
        else:
            with pytest.raises(ContextSizeError) as error:
                await prompt_of(worker, *[part(RED)] * (n_given or 1))
            assert error.value.n_prompt_tokens >= n_ctx
        worker.close()


async def test_an_image_that_is_too_large_is_not_tokenized(worker: LocalPrompts) -> None:
    large = file_of(picture(size=(490, 30)))
    for purpose in ("run", "inspect", "warm"):
        job = msgspec.structs.replace(parse("chat", chat(part(large))), purpose=purpose)
        with pytest.raises(ContextSizeError) as error:
            await answered(worker, job)
        assert (error.value.n_prompt_tokens, error.value.at_least) == (490 + 30 + 3 + 2, True)


async def test_places_count_no_characters_of_images(worker: LocalPrompts) -> None:
    await prompt_of(worker, text("ab"), part(RED), text("cd"))
    n_before = len("^[user]ab")
    for n_tokens, n_characters in (
        (n_before, n_before - 1),
        (n_before + 1, n_before),
        (n_before + 4, n_before),
        (n_before + 10 + 1, n_before - 1 + 3 + 1),
    ):
        assert await worker.call(Locate("r", n_tokens, explains=True)) == Located(n_characters)


async def test_replies_are_remembered_by_tokens_in_a_session_alone(worker: LocalPrompts) -> None:
    reply = packed(np.array([0x80, 0x80], dtype=np.int32))
    await prompt_of(worker, part(RED))
    assert await worker.call(Remember("r", reply, 2, "chatcmpl-r")) == ()
    prompt = await prompt_of(worker, part(RED), session_id="mine")
    assert prompt.session_match == "new"
    (record,) = await worker.call(Remember("r", reply, 2, "chatcmpl-r"))
    assert isinstance(record, Session)
    assert not record.is_text
    assert record.tokens == prompt.packed_tokens + reply
    again = await prompt_of(worker, part(RED), session_id="mine")
    assert (again.session_match, again.packed_tokens) == ("tokens", prompt.packed_tokens)
    plain = await prepared(worker, "chat", {"messages": [{"role": "user", "content": "A"}], "session_id": "mine"})
    assert plain.prompts[0].prompt.session_match in ("new", "tokens")


async def test_no_next_turn_is_predicted(worker: LocalPrompts) -> None:
    reply = packed(np.array([*b"Hm", 257], dtype=np.int32))
    for is_image in (False, True):
        await prompt_of(worker, part(RED) if is_image else text("A"))
        await worker.call(Remember("r", reply, 2, "chatcmpl-r"))
        assert (worker.worker._requests["r"].body is None) >= is_image
        assert await worker.call(NextTurn("r", reply, 2, "chatcmpl-r", 1000)) is None


async def test_a_request_keeps_no_files_while_it_runs(worker: LocalPrompts) -> None:
    noise = file_of(Image.effect_noise((40, 30), 60))
    answer = await prepared(worker, "chat", chat(part(noise)))
    assert [each.data for each in answer.prompts[0].prompt.images] == [noise]
    (context,) = worker.worker._requests["r"].prompts
    assert b"".join(part.text.encode() for part in context.request.parts) == b"[user]<__media__>[reply]"
    assert [each.data for each in context.prompt.images] == [b""]
    await worker.call(Release("r"))


async def test_the_text_of_a_prompt_has_no_tokens_of_images(worker: LocalPrompts) -> None:
    own = {"prompt_string": "A<__media__>B", "multimodal_data": [base64_of(RED)]}
    answer = await prepared(worker, "text", {"prompt": own, "echo": True, "verbose": True})
    assert answer.echoes == ("A<__media__>B",)
    assert answer.texts == ("<s>A\1\2\3B",)


def divergence(*prompts: list[Any]) -> Any:
    """Where and why the second prompt diverges from the first."""
    vocab = FakeVocab()
    tokenizer = Tokenizer(vocab, 2000, min_match=0.8)
    earlier = EarlierPrompts()
    old, new = (tokenizer.tokenize_prompt(text_request("r", parts)) for parts in prompts)
    assert isinstance(old, PromptContext)
    earlier.add(old, b"")
    n = n_common(old.prompt.tokens, new.prompt.tokens)
    return earlier.find_divergence(new, n, tokenizer.pieces, n_added=1)


def test_a_divergence_is_explained_by_text_and_not_by_images() -> None:
    after = TextPart("and so on. " * 40)
    found = divergence(
        [image(), TextPart("Today is 2026-11-28. "), after], [image(), TextPart("Today is 2026-11-29. "), after]
    )
    assert found is not None
    assert divergence([TextPart("A"), image(), after], [TextPart("A"), image(bytes(32)), after]) is None
    assert divergence([TextPart("A"), image(), after], [TextPart("AB"), image(), after]) is not None


def test_a_vocabulary_is_never_asked_for_tokens_of_images() -> None:
    class Strict(FakeVocab):
        def piece(self, token: int) -> bytes:
            assert token >= 0
            return super().piece(token)

        def detokenize(self, tokens: Any) -> bytes:
            assert min(tokens, default=0) >= 0
            return super().detokenize(tokens)

    tokenizer = Tokenizer(Strict(), 500, min_match=0.8)
    context = tokenizer.tokenize_prompt(text_request("r", [TextPart("A"), image(), TextPart("B")], session_id="s"))
    n = context.prompt.n_tokens
    assert tokenizer.detokenize(context.prompt.tokens.tolist()) == "<s>A\1\2\3B"
    assert [tokenizer.n_characters(context, i) for i in (0, 1, 2, 5, n)] == [0, 0, 1, 2, 5]
    assert tokenizer.echo(context) == "A<__media__>B"
    assert len(tokenizer.pieces) < 10, "no entry for each token of an image"
    records = tokenizer.remember(context, np.array([65], dtype=np.int32), 1)
    assert [type(each) for each in records] == [Session]


def test_sizes_have_layouts_of_the_engine_alone() -> None:
    assert layout_of(ImageSize(4, 3)).n_tokens == 4 + 3 + 3
    prompt = Tokenizer(FakeVocab(), 500, min_match=0.8).tokenize_prompt(text_request("r", [image()])).prompt
    assert shown(prompt) == [
        "^\1", 4, "\2", 3, "\3"
    ]  # fmt: skip


async def test_a_warmed_prompt_ends_before_an_image_that_others_may_not_have(worker: LocalPrompts) -> None:
    body = chat(part(RED), text("A"))
    body["messages"].append({"role": "assistant", "content": "B"})
    job = msgspec.structs.replace(parse("chat", body), purpose="warm")
    answer = await answered(worker, job)
    assert isinstance(answer, Prepared)
    prompt = answer.prompts[0].prompt
    assert [end <= prompt.n_tokens for each in prompt.images for _, end in each.tiles] == [True, True]


async def test_choices_have_so_many_images_together(worker: LocalPrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets a copy of the files for each of them."""
    monkeypatch.setattr(text_requests, "_MAX_COPIED_BYTES", 3 * len(RED))
    for n in (1, 3):
        await prepared(worker, "chat", chat(part(RED), n=n))
    prompt = {"prompt_string": "<__media__>", "multimodal_data": [base64_of(RED)]}
    for kind, body, field in (
        ("chat", chat(part(RED), n=4), "n"),
        ("chat", chat(part(RED), n_cmpl=4), "n_cmpl"),
        ("text", {"prompt": prompt, "n": 2, "best_of": 4}, "best_of"),
    ):
        answer = await answered(worker, parse(kind, body))
        assert isinstance(answer, BadBody)
        assert answer.error.param == field
        assert answer.error.message.startswith(f"'{field}' is 4")
