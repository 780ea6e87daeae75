"""Images in the pool: sequences never end within one, since llama.cpp cannot cut it in models with M-RoPE."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest

from llamaslot.base.cache_ids import MAX_MARKED_FOR_IMAGE
from llamaslot.base.commands import GenerateParams
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.images import ImageLayout
from llamaslot.base.kv_ops import Load
from llamaslot.base.model import StateKind
from llamaslot.base.tokens import WIDTH, TokenizedPrompt, Tokens, packed
from llamaslot.kvcache.nodes import checkpoints_on
from llamaslot.scheduler.request import Request
from tests.scheduler.test_scheduler import Driver, TimedBackend, as_tokens
from tests.vision_files import placed

N_TILE, N_TEXT = 23, 9
"""Tokens of an image, and of the text before and after it."""


class Images(Driver):
    """A scheduler for prompts with images on a backend that refuses to cut them."""

    def __init__(self, **settings: Any) -> None:
        shape = {name: settings.pop(name) for name in ("n_ctx", "n_slots", "kind", "unified") if name in settings}
        backend = TimedBackend(**{"n_ubatch": 64, "n_reserved": 4, "projector": "joint"} | shape)
        super().__init__(backend=backend, **settings)

    def submit_image(
        self,
        name: str,
        *,
        n_tiles: int = 1,
        max_tokens: int = 1,
        n_before: int = N_TEXT,
        after: str = "c",
        **fields: Any,
    ) -> Request:
        """Queue a request for a prompt of text, an image, and text."""
        self.n_submitted += 1
        params = GenerateParams(
            f"request {self.n_submitted}",
            sampling=Sampling(temperature=0.0, ignore_eos=True),
            max_tokens=max_tokens,
            **fields,
        )
        layout = ImageLayout((N_TILE, *(((124,), N_TILE) * (n_tiles - 1))))
        ids, image = placed(name.encode(), layout, n_before)
        tokens = [*as_tokens("b" * n_before).tolist(), *ids, *as_tokens(after * N_TEXT).tolist()]
        prompt = TokenizedPrompt(packed(np.array(tokens, dtype=np.int32)), images=(image,))
        now, can_reuse = self.backend.now, self.backend.info.can_reuse
        request = Request(params, prompt, arrival=self.n_submitted, now=now, can_reuse=can_reuse)
        self.scheduler.submit(request)
        return request

    def run_image(self, name: str, **fields: Any) -> Request:
        request = self.submit_image(name, **fields)
        self.finish(request)
        return request


@pytest.mark.parametrize("ram_bytes", [0, 10**6])
@pytest.mark.parametrize("segment_tokens", [7, 512])
def test_eviction_leaves_no_part_of_an_image(ram_bytes: int, segment_tokens: int) -> None:
    n_cut = 0
    for n_filler in range(20, 64, 3):
        driver = Images(n_ctx=80, n_slots=2, ram_bytes=ram_bytes, segment_tokens=segment_tokens)
        first = driver.run_image("1")
        # Cells for it must be taken from the end of the first path.
        driver.run("f" * n_filler)
        kept = driver.cache.length(first.slot)
        n_cut += kept == N_TEXT
        assert kept <= N_TEXT or kept >= N_TEXT + N_TILE
        again = driver.run_image("1")
        if ram_bytes:
            assert again.n_prompt_computed == 1
            assert driver.backend.n_tiles_encoded == 1
    assert n_cut > 3


def test_all_segments_of_an_image_are_loaded_at_once() -> None:
    """Though no more than a few tokens may be loaded in a step beside a stream."""
    driver = Images(n_ctx=400, n_slots=2, ram_bytes=10**6, segment_tokens=8, load_us=1000.0, prefill_us=10**5)
    driver.run_image("1", n_tiles=3)
    driver.run("f" * 390)
    stream = driver.submit("s" * 3, max_tokens=100)
    driver.step()
    driver.cache.settings.gap_ms = 2.0
    del driver.plans[:]
    request = driver.submit_image("1", n_tiles=3)
    driver.finish(request)
    ends = [each.end for plan in driver.plans for each in plan.operations if isinstance(each, Load)]
    assert len(ends) > 3
    assert max(b - a for a, b in pairwise(ends)) >= N_TILE
    assert driver.backend.n_tiles_encoded == 3
    assert request.n_prompt_computed == 1
    assert stream.n_generated < 100


def test_a_segment_of_which_little_is_wanted_is_loaded_for_the_rest_of_an_image() -> None:
    driver = Images(n_ctx=80, n_slots=1, ram_bytes=10**6, segment_tokens=7, load_us=7.0, prefill_us=10.0)
    driver.run_image("1")
    driver.run("f" * 78)
    assert driver.run_image("1", after="z").n_loaded > N_TILE
    assert driver.backend.n_tiles_encoded == 1


def test_a_checkpoint_before_an_image_ends_a_message_if_the_image_begins_the_next_one() -> None:
    """So it is stored as the end of a system prompt, though the cache knows the control token by another id."""
    driver = Images(kind=StateKind.RECURRENT, n_slots=1, checkpoints={"step": 999})
    driver.scheduler._taker._control = np.array([ord("b")], dtype=np.int32)
    driver.finish(driver.submit_image("1"))
    found = {each.end: each.ends_message for each in checkpoints_on(driver.cache._sequences.end(0))}
    n_before = N_TEXT - MAX_MARKED_FOR_IMAGE
    assert (found[n_before], found[N_TEXT + N_TILE]) == (True, False)


def test_a_turn_with_an_image_continues_what_was_computed_ahead_of_it() -> None:
    driver = Images()
    ahead = driver.submit("b" * N_TEXT, max_tokens=0, is_background=True)
    other = driver.submit("b" * (N_TEXT - 1) + "c", max_tokens=0, is_background=True)
    request = driver.submit_image("1")
    assert request.continues(ahead)
    assert not request.continues(other)


def test_the_pool_pins_a_prompt_with_an_image_by_the_ids_that_it_knows() -> None:
    driver = Images()
    for n_before in (N_TEXT, 0):
        request = driver.run_image("1", n_before=n_before, max_tokens=0, pin=True)
        assert driver.cache.pins.why_not(request.namespace, packed(request.tokens.view()), 99, 0) == "", (
            "it is pinned"
        )
        driver.run_image("1", n_before=n_before, max_tokens=0, pin=False)
        assert not driver.cache.pins.stats.prefixes


def test_only_the_cache_knows_marks() -> None:
    """Penalties, and the scores of a prompt, are by its tokens."""
    driver, histories = Images(), []
    new_sampler = driver.backend.new_sampler

    def recorded(sampling: Sampling, history: Tokens, *args: Any) -> Any:
        histories.append(history.tolist())
        return new_sampler(sampling, history, *args)

    with mock.patch.object(driver.backend, "new_sampler", recorded):
        request = driver.run_image("1")
    tokens = request.prompt.tokens
    assert request.tokens.view(0, N_TEXT).tolist() != tokens[:N_TEXT].tolist()
    assert histories == [tokens.tolist()]
    scored = driver.submit_image("1", n_before=2, prompt_probs=0)
    targets = scored.targets(0, 2)
    assert targets is not None
    assert targets.tolist() == scored.prompt.tokens[1:3].tolist()
    assert scored.new_scores(0, [])[0].token == ord("b")


def test_a_distrusted_prefix_is_dropped_in_the_namespace_of_its_image() -> None:
    driver = Images()
    first = driver.run_image("1", n_before=0)
    request = driver.submit_image("1", n_before=0)
    path = request.prefix[: N_TILE * WIDTH]
    assert first.namespace == request.namespace != request.params.namespace
    request.isolate(path)
    driver.finish(request)
    assert driver.cache.match(first.namespace, path).n_matched < N_TILE
