"""Images of which some ids are alike, on real models: nothing that depends on one is shared with the other."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest

from bench import synthetic
from bench.projector_files import picture, write_projector
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Vocab
from llamaslot.base.cache_ids import marked_ids
from llamaslot.base.commands import ImagePart, PromptPart, TextPart
from llamaslot.base.events import Finished
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.images import ImageSize, tile_ids
from llamaslot.base.tokens import Tokens
from tests.engine.harness import Harness, running
from tests.engine.test_token_probs import probs_of

SIZE = ImageSize(100, 60)
N_TILE = 64
BEFORE, AFTER = "please look at this picture: ", " what is it?"
SCORED = Sampling(temperature=0.0, ignore_eos=True, n_probs=10)
MAX_ROUNDED = 0.03
"""Difference of two logarithms that rounding may make: 0.02 did. One token of another image made 0.07 to 0.19."""


@pytest.fixture(scope="module", params=["tiny", "tiny-swa", "tiny-lfm2"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaSettings:
    folder = tmp_path_factory.mktemp("models")
    return LlamaSettings(
        synthetic.ensure(request.param, folder=folder, is_exact=True),
        mmproj=write_projector(folder / "mmproj.gguf", "mlp"),
        n_ctx=2048,
        n_slots=2,
        n_cache_seqs=6,
        n_ubatch=256,
        n_threads=1,
        flash_attn="on",
        cache_type_k="f32",
        cache_type_v="f32",
        checkpoints=True,
    )


def first_id_alike(digest: bytes, number: int, n_tokens: int) -> Tokens:
    """The ids of a tile, of which the first is the same for all images: a client can search for such an image."""
    ids = tile_ids(digest, number, n_tokens).copy()
    ids[0] = -77
    return ids


def digests_alike(vocab: Vocab, n: int, first: bytes) -> list[bytes]:
    """Digests of images, after one with the digest `first`, that also have the first of the marks in common."""
    tokens = np.array(vocab.tokenize(BEFORE, add_special=True, parse_special=True)[-4:], dtype=np.int32)
    found: dict[int, list[bytes]] = {}
    for i in range(10**5):
        alike = found.setdefault(int(marked_ids(first + b"%d" % i, tokens)[0]), [])
        alike.append(b"%d" % i)
        if len(alike) == n:
            return alike
    raise AssertionError


async def reply(engine: Harness, name: str, prompt: Sequence[PromptPart]) -> tuple[dict[int, float], int]:
    """Return the logarithms of the probabilities that tokens have after the prompt, and how many were cached."""
    end = await engine.submit(name, prompt, max_tokens=2, sampling=SCORED)
    assert isinstance(end, Finished), end
    top = probs_of(engine, name)[0].top
    return {each.token: each.value for each in top if each.value is not None}, end.progress.n_cached


def difference(a: dict[int, float], b: dict[int, float]) -> float:
    """The largest difference among the tokens that both name."""
    return max((abs(a[each] - b[each]) for each in a.keys() & b.keys()), default=np.inf)


@pytest.mark.parametrize("is_adjacent", [False, True])
async def test_what_depends_on_an_image_is_not_that_of_another_one(
    settings: LlamaSettings, *, is_adjacent: bool
) -> None:
    """Duplicate cells become those of another sequence, and a segment in RAM may end after the first token.

    Adjacent images have no text between them that could be marked: the marks before the first have both digests.
    """
    backend, first = LlamaBackend(settings), b"other" if is_adjacent else b""
    digests, layout = digests_alike(backend.vocab, 3, first), backend.image_layout(SIZE)
    assert layout.pieces == (N_TILE,), "what is marked is the text"

    def image(i: int, digest: bytes) -> ImagePart:
        return ImagePart(picture(i, SIZE.width, SIZE.height), digest, layout)

    prompts = [
        [TextPart(BEFORE), *([image(9, first)] if first else []), image(i, digests[i]), TextPart(AFTER)]
        for i in range(3)
    ]
    with mock.patch("llamaslot.prompts.tokenizer.tile_ids", first_id_alike):
        expected = []
        for prompt in prompts:
            async with running(LlamaBackend(settings)) as engine:
                expected.append((await reply(engine, "cold", prompt))[0])
        assert difference(expected[0], expected[1]) > 5 * MAX_ROUNDED
        async with running(backend, ram_bytes=10**9, checkpoint_bytes=10**9, checkpoints_on_path=32) as engine:
            for turn in range(3):
                for i, prompt in enumerate(prompts):
                    found, n_cached = await reply(engine, f"{turn} {i}", prompt)
                    assert difference(found, expected[i]) < MAX_ROUNDED
                    assert turn == 0 or n_cached > N_TILE
                # What was in the pool is in RAM in the last turn.
                for filler in range(4 if turn == 1 else 0):
                    await engine.submit(f"filler {filler}", f"{filler}" * 900, max_tokens=1)
