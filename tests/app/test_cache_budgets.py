"""Defaults of the RAM tier and of checkpoints: sizes, and when idle prefixes are offloaded, by model and flags."""

from __future__ import annotations

import msgspec
import pytest

from llamaslot.app.cache_budgets import choose_budgets, restart_flags, with_budgets
from llamaslot.app.config import Config
from llamaslot.app.start_lines import ram_line
from llamaslot.base.errors import ConfigError
from llamaslot.base.model import Capabilities, CheckpointSize, KvCost, ModelInfo, SegmentSize, StateKind
from tests.fake_backend import FakeBackend

MIB = 2**20
COST = KvCost(
    n_idle_cells=8192, prefill_slowdown=2.0, prefill_us=100.0, save_us=0.4, first_save_us=0.4, load_us=0.6
)


def info(**changes: object) -> ModelInfo:
    """A pool of 1,024 cells of 1,000 bytes."""
    fake = FakeBackend(n_ctx=1024, segment_size=SegmentSize(100, 1000)).info
    return msgspec.structs.replace(fake, **{"kv_cost": COST} | changes)


@pytest.mark.parametrize(
    ("given", "n_free", "ram"),
    [
        ("auto", 100 * MIB, 50 * MIB),
        ("auto", 100 * 2**30, 8192 * MIB),
        (0, 100 * MIB, 0),
        (7, 100 * MIB, 7 * MIB),
        (70_000, 100 * MIB, 70_000 * MIB),
        (-1, 100 * MIB, 100 * MIB),
    ],
)
def test_ram_is_what_was_asked_for_or_half_of_what_is_free(given: int | str, n_free: int, ram: int) -> None:
    assert choose_budgets(Config(cache_ram=given), info(), n_free).ram_bytes == ram


def partial(**changes: object) -> ModelInfo:
    """A hybrid model whose checkpoints have 10 MiB."""
    return info(
        **{
            "reuse_reason": "hybrid model",
            "state": Capabilities(kind=StateKind.HYBRID, can_trim=False),
            "keeps_checkpoints": True,
            "checkpoint_size": CheckpointSize(10 * MIB),
        }
        | changes
    )


@pytest.mark.parametrize(
    ("given", "n_free", "expected"),
    [
        ("auto", 1600 * MIB, 200 * MIB),
        ("auto", 2**40, 2048 * MIB),
        ("auto", 400 * MIB, 80 * MIB),
        ("auto", 300 * MIB, 38 * MIB),
        ("auto", 0, MIB),
        (10, 0, 10 * MIB),
        (70_000, 0, 70_000 * MIB),
    ],
    ids=["an eighth", "2 GiB", "8 of the largest size", "too little for 8", "nothing is free", "one", "a number"],
)
def test_checkpoints_have_an_eighth_of_what_is_free_or_room_for_8(
    given: int | str, n_free: int, expected: int
) -> None:
    budgets = choose_budgets(Config(checkpoint_ram=given), partial(), n_free)
    assert budgets.checkpoints is not None
    assert budgets.checkpoints.ram_bytes == expected
    assert budgets.ram_bytes == min(max(n_free - expected, 0) // 2, 8192 * MIB), "the rest counts as free"


def test_a_model_without_kv_of_every_token_has_no_number_of_tokens_that_fit() -> None:
    config, model = Config(), partial(segment_size=SegmentSize(68, 0))
    line = ram_line(config, model, choose_budgets(config, model, 100 * MIB))
    assert line.startswith("RAM: 44 MiB for prefixes (1,000 take ")


def test_ram_for_less_than_one_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--checkpoint-ram 9 is less than one checkpoint .* \(10\.0 MiB\)"):
        choose_budgets(Config(checkpoint_ram=9), partial(), 100 * MIB)


@pytest.mark.parametrize("n_free", [0, 60 * MIB, 80 * MIB, 400 * MIB])
def test_an_engine_that_is_started_again_accepts_what_was_chosen_for_it(n_free: int) -> None:
    described = with_budgets(Config(), partial(), choose_budgets(Config(), partial(), n_free))
    again = choose_budgets(Config(**restart_flags(described)), partial(), n_free)
    assert again.checkpoints == described.checkpoint_limits


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (Config(ctx_checkpoints=0), {}, "hybrid model; --ctx-checkpoints 0 turns checkpoints off"),
        (
            Config(kv_unified=False),
            {"unified": False},
            "hybrid model; checkpoints need a pool shared by all slots (--kv-unified)",
        ),
        (Config(), {}, "hybrid model; checkpoints need a spare sequence id: lower --parallel"),
        (
            Config(),
            {"state": Capabilities(kind=StateKind.HYBRID, can_trim=False, has_own_cache=True)},
            "hybrid model",
        ),
        (Config(), {"state": Capabilities(can_trim=False)}, "hybrid model"),
        (Config(), {"self_test": "failed"}, "hybrid model"),
    ],
)
def test_a_model_without_checkpoints_has_a_reason(config: Config, changes: dict[str, object], reason: str) -> None:
    model = partial(keeps_checkpoints=False, checkpoint_size=None, **changes)
    described = with_budgets(config, model, choose_budgets(config, model, 100 * MIB))
    assert (described.checkpoint_limits, described.reuse_reason) == (None, reason)


def test_weights_that_are_mapped_are_not_free() -> None:
    assert choose_budgets(Config(), info(size_bytes=40 * MIB), 100 * MIB).ram_bytes == 30 * MIB


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": Capabilities(can_trim=False)}, "no prefix of this model can be reused"),
        ({"flash_attn": False}, "flash attention"),
        ({"segment_size": None}, "no sequence id is left"),
    ],
)
def test_nothing_is_stored_where_it_cannot_be(changes: dict[str, object], words: str) -> None:
    config, model = Config(), info(**changes)
    budgets = choose_budgets(config, model, 100 * MIB)
    assert (budgets.ram_bytes, budgets.offload_after) == (0, None)
    assert words in ram_line(config, model, budgets)


def test_idle_prefixes_live_in_ram_where_that_is_cheaper() -> None:
    budgets = choose_budgets(Config(), info(), 100 * MIB)
    assert (budgets.idle_cells, budgets.offload_after) == (None, 82)
    assert "offloaded after 82 further prompt tokens" in ram_line(Config(), info(), budgets)


@pytest.mark.parametrize(
    ("config", "changes", "idle_cells", "words"),
    [
        (Config(cache_idle_cells="all"), {}, None, "when their cells are needed"),
        (Config(cache_idle_cells=99), {}, 99, "keep 99 cells"),
        (Config(), {"kv_cost": None}, None, "when their cells are needed"),
        (
            Config(),
            {"kv_cost": msgspec.structs.replace(COST, prefill_slowdown=1.0)},
            None,
            "when their cells are needed",
        ),
        (Config(cache_ram=1), {}, None, "when their cells are needed"),
    ],
    ids=["all", "a number", "unmeasured", "idle cells cost nothing", "less RAM than twice the pool"],
)
def test_they_stay_in_the_pool_otherwise(
    config: Config, changes: dict[str, object], idle_cells: int | None, words: str
) -> None:
    budgets = choose_budgets(config, info(**changes), 100 * MIB)
    assert (budgets.idle_cells, budgets.offload_after) == (idle_cells, None)
    assert budgets.ram_bytes > 0
    assert words in ram_line(config, info(**changes), budgets)


@pytest.mark.parametrize(
    ("ratio", "life"), [(1.0, None), (1.02, None), (1.1, 8192), (1.5, 1638), (2.0, 819), (5.0, 205), (9e9, 1)]
)
def test_idle_cells_have_cost_what_saving_and_loading_does_after_so_many_tokens(
    ratio: float, life: int | None
) -> None:
    cost = KvCost(
        n_idle_cells=8192, prefill_slowdown=ratio, prefill_us=100.0, save_us=4.0, first_save_us=4.0, load_us=6.0
    )
    assert cost.break_even_tokens == life
