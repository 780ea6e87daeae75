"""Positions at which a prompt stops for checkpoints, where a control token (1) begins each message."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from llamaslot.base.images import tile_ids
from llamaslot.scheduler.checkpoint_taker import prompt_stops
from llamaslot.scheduler.request import CheckpointStops
from tests.cache_settings import checkpoint_settings

STEP, GAP = 100, 10


def stops_of(
    n: int,
    messages: Sequence[int] = (),
    *,
    start: int = 0,
    matched: int = 0,
    existing: Collection[int] = (),
    tile: tuple[int, int] = (0, 0),
    forks: Collection[int] = (),
    n_ctx: int = 10_000,
    **fields: Any,
) -> CheckpointStops:
    """The stops in a prompt of `n` tokens with a control token at each of some positions, and a tile."""
    tokens = np.full(n, 7, dtype=np.int32)
    tokens[slice(*tile)] = tile_ids(b"digest", 0, tile[1] - tile[0]) if any(tile) else 7
    tokens[list(messages)] = 1
    return prompt_stops(
        tokens,
        start=start,
        matched=matched,
        existing=existing,
        control_at=np.flatnonzero(tokens == 1),
        forks=forks,
        settings=checkpoint_settings(**{"step": STEP, "min_gap": GAP} | fields),
        n_ctx_slot=n_ctx,
    )


def positions(stops: CheckpointStops, n: int) -> list[int]:
    """The stops among the first `n` positions."""
    return [each for each in range(n) if stops.has(each)]


def test_a_step_ends_at_the_next_stop() -> None:
    stops = CheckpointStops([5, 9])
    assert [stops.limit(at, 4) for at in (0, 1, 2, 4, 5, 6, 9)] == [4, 4, 3, 1, 4, 3, 4]
    stops.add(7)
    stops.add(7)
    assert positions(stops, 20) == [5, 7, 9]
    assert stops.limit(5, 4) == 2
    assert CheckpointStops().limit(3, 4) == 4


def test_stops_are_behind_the_system_prompt_and_before_the_reply() -> None:
    assert positions(stops_of(80, [0, 40, 77]), 80) == [40, 77]


def test_a_prompt_without_control_tokens_stops_a_few_tokens_before_its_end() -> None:
    """So it does where the last message is long: its end is what is asked next time."""
    assert positions(stops_of(80), 80) == [76]
    assert positions(stops_of(80, [0, 40]), 80) == [40, 76]


def test_a_stop_within_a_tile_is_behind_it_or_before_it_at_the_end_of_the_prompt() -> None:
    """A tile is computed whole, so a step would pass over the stop."""
    assert positions(stops_of(250, tile=(90, 170)), 250) == [170, 200, 246]
    assert positions(stops_of(80, tile=(50, 80)), 80) == [50]


def test_each_image_ends_with_a_stop_even_near_others() -> None:
    assert positions(stops_of(80, [0, 30, 73], tile=(31, 70), forks=[70]), 80) == [30, 70, 73]
    assert positions(stops_of(80, [40, 77], start=40, forks=[20, 44], existing=[40]), 80) == [44, 77]
    # What is left behind a checkpoint would be too little, if it were text.
    assert positions(stops_of(80, start=75, existing=[75], forks=[78]), 80) == [78]
    assert positions(stops_of(80, start=78, existing=[78], forks=[78]), 80) == []


def test_a_fork_just_before_an_image_is_a_stop_as_well() -> None:
    stops = stops_of(400, matched=40, tile=(44, 60), forks=[60], min_gap=64)
    assert positions(stops, 400) == [40, 60, 200, 300, 396]


def test_of_control_tokens_in_a_row_the_first_counts() -> None:
    assert positions(stops_of(80, [40, 41, 42, 76, 77]), 80) == [40, 76]


def test_a_short_system_prompt_is_not_worth_a_checkpoint() -> None:
    assert positions(stops_of(80, [GAP - 1, 40, 77]), 80) == [40, 77]


def test_a_short_rest_behind_a_checkpoint_is_not_worth_another() -> None:
    assert positions(stops_of(80, [77], start=75, existing=[75]), 80) == []
    assert positions(stops_of(80, [77], start=70, existing=[70]), 80) == [77]


def test_a_fork_is_a_stop_unless_one_is_near() -> None:
    assert positions(stops_of(90, [87], matched=50), 90) == [50, 87]
    assert positions(stops_of(90, [87], matched=50, existing=[45], start=45), 90) == [87]
    # What the template changes at the end of a prompt is near its last stop.
    assert positions(stops_of(90, [82], matched=86), 90) == [82, 86]
    assert positions(stops_of(90, [82], matched=85), 90) == [82]


def test_long_prompts_have_stops_at_even_distances() -> None:
    assert positions(stops_of(350), 350) == [100, 200, 300, 346]
    assert positions(stops_of(350, start=120, existing=[120]), 350) == [220, 320, 346]


def test_an_even_stop_moves_back_to_the_start_of_a_message() -> None:
    """By a quarter of the distance at most, and the next one counts from there."""
    assert positions(stops_of(250, [3, 80]), 250) == [80, 180, 246]
    assert positions(stops_of(250, [3, 74]), 250) == [74, 100, 200, 246]


def test_control_tokens_behind_an_even_stop_do_not_move_it() -> None:
    assert positions(stops_of(250, [130]), 250) == [100, 130, 200, 246]


def test_stops_go_on_in_the_reply_to_the_end_of_the_context() -> None:
    assert positions(stops_of(50, n_ctx=400), 500) == [46, 150, 250, 350]


def test_nothing_is_chosen_up_to_the_start() -> None:
    assert positions(stops_of(80, [20, 40, 77], start=40), 80) == [77]


@given(
    n=st.integers(1, 300),
    messages=st.lists(st.integers(0, 299), max_size=8),
    start=st.integers(0, 299),
    matched=st.integers(0, 299),
    existing=st.lists(st.integers(1, 299), max_size=4),
    step=st.integers(12, 120),
)
def test_stops_are_new_and_apart(
    *, n: int, messages: list[int], start: int, matched: int, existing: list[int], step: int
) -> None:
    """They lie within the prompt after its start, and apart from checkpoints on its path and from each other.

    Only those of the end of a prompt may lie closer: where it was different before, and where its reply begins.
    """
    start, matched = min(start, n - 1), min(matched, n)
    messages = [each for each in messages if each < n]
    existing = [each for each in existing if each < n]
    stops = stops_of(n, messages, start=start, matched=matched, existing=existing, step=step)
    chosen = positions(stops, n)
    assert all(start < each < n for each in chosen)
    assert not {*chosen} & {*existing}
    inner = [each for each in chosen if each < n - GAP and each != matched]
    for each in inner:
        others = {*existing, *chosen} - {each}
        assert all(abs(each - other) >= min(GAP, 4) for other in others)
    bounds = [start, *(each for each in sorted({*chosen, *existing}) if each > start), n]
    assert max(b - a for a, b in pairwise(bounds)) <= 2 * step + GAP
