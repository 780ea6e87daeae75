"""Facts about llama.cpp that checkpoints rely on: what it refuses, what it moves, and what it leaves wrong.

Each test calls llama.cpp directly and names the rule that follows. A test that fails after an update of llama.cpp
shows which rule must be reconsidered.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from bench import synthetic
from tests.conftest import LONG
from tests.gguf_copies import rewritten
from tests.raw_context import Logits, RawContext, RawModel
from tests.state_noise import N_COMPARED, ColdRun, distance, opened

pytestmark = pytest.mark.cpu_only
"""These facts were found in float32, and with a callback that aborts a graph on the CPU."""
ALL_WINDOWS = ("tiny-oss", "tiny-swa")
ALL_HYBRIDS = ("tiny-next", "tiny-lfm2", "tiny-qwen35", "tiny-granite")
ALL_RECURRENT = ("tiny-mamba2", "tiny-mamba", "tiny-rwkv7")
ALL_STATEFUL = (*ALL_WINDOWS, *ALL_HYBRIDS, *ALL_RECURRENT)
WINDOWS = ALL_WINDOWS if LONG else ALL_WINDOWS[:1]
HYBRIDS = ALL_HYBRIDS if LONG else ALL_HYBRIDS[:1]
RECURRENT = ALL_RECURRENT if LONG else ALL_RECURRENT[:1]
ALL_ROLLED_BACK = ("tiny-lfm2", "tiny-qwen35")
ROLLED_BACK = ALL_ROLLED_BACK if LONG else ALL_ROLLED_BACK[:1]
N_ROLLBACK = 7
STATEFUL = (*WINDOWS, *HYBRIDS, *RECURRENT)
"""The short form takes one model for each of llama.cpp's kinds of memory, where no more is needed."""
SERVED = {
    "type_k": llama_cpp.GGML_TYPE_F16,
    "type_v": llama_cpp.GGML_TYPE_F16,
    "flash_attn_type": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
}
"""Settings of servers, under which logits move farther without an error."""
N_SEQS = 6
OBVIOUS = 10
"""Multiple of the bound that a real error exceeds."""
SCRATCH = 5
REUSED = 150
"""Far past the window of 32 tokens."""
RNG = np.random.default_rng(7)
IDS = RNG.integers(300, 512, REUSED + N_COMPARED).tolist()
BRANCH = RNG.integers(300, 512, REUSED).tolist()


class Models:
    """Models and their cold runs, made when a test asks for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, RawModel] = {}
        self._cold: dict[str, ColdRun] = {}

    def __getitem__(self, name: str) -> RawModel:
        """Return a model with exact weights."""
        if name not in self._models:
            self._models[name] = RawModel(synthetic.ensure(name, folder=self._folder, is_exact=True))
        return self._models[name]

    def cold(self, name: str) -> ColdRun:
        """Return the cold run of `IDS`."""
        if name not in self._cold:
            self._cold[name] = ColdRun(self[name], IDS, REUSED)
        return self._cold[name]

    def close(self) -> None:
        """Free all models."""
        for model in self._models.values():
            model.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    models = Models(tmp_path_factory.mktemp("models"))
    yield models
    models.close()


def one_token(context: RawContext, seq: int) -> bytes:
    """Return the partial state of a sequence of one token; the sequence is empty before and after."""
    assert context.last(seq) == -1
    context.feed(seq, 0, IDS[:1])
    blob = context.take(seq)
    assert context.remove(seq)
    return blob


def strip(context: RawContext, seq: int, empty_id: int) -> None:
    """Remove the partial state of a sequence; a window keeps one token, as an empty state has no effect on it."""
    if context.model.window:
        assert context.restore(seq, one_token(context, empty_id))
    else:
        assert context.restore(seq, context.take(empty_id))


def go_on(context: RawContext, seq: int, n_steps: int) -> None:
    """Decode 70 other tokens in each step. From the sixth on they get cells of the first ones in a window cache."""
    for at in range(REUSED, REUSED + 70 * n_steps, 70):
        context.feed(seq, at, BRANCH[:70])


def continued(context: RawContext, seq: int) -> Logits:
    """Return the logits of each position after the reused ones."""
    return context.feed(seq, REUSED, IDS[REUSED:])


@pytest.mark.parametrize("fields", [{}, SERVED] if LONG else [{}], ids=["exact", "served"][: 1 + LONG])
@pytest.mark.parametrize("name", ALL_STATEFUL)
def test_a_checkpoint_serves_its_own_sequence_and_others(models: Models, name: str, fields: dict[str, Any]) -> None:
    """Go on after it, go back to it, and use it in a sequence that got the attention cells of the first one."""
    cold = ColdRun(models[name], IDS, REUSED, **fields) if fields else models.cold(name)
    with opened(models[name], **fields) as context:
        context.feed(0, 0, IDS[:REUSED])
        blob = context.take(0)
        go_on(context, 0, 7)
        context.copy(0, 1, 0, REUSED)
        assert context.restore(1, blob)
        assert cold.share(continued(context, 1)) <= 1
        assert context.restore(0, blob)
        assert context.remove(0, REUSED)
        assert cold.share(continued(context, 0)) <= 1


@pytest.mark.parametrize("name", ALL_STATEFUL)
def test_the_oracle_tells_another_token_before_the_checkpoint(models: Models, name: str) -> None:
    """A planted bug: a checkpoint of the same position, one token before it was another one."""
    with opened(models[name]) as context:
        context.feed(1, 0, [*IDS[: REUSED - 1], BRANCH[0]])
        wrong = context.take(1)
        context.feed(0, 0, IDS[:REUSED])
        assert context.restore(0, wrong)
        assert models.cold(name).share(continued(context, 0)) > OBVIOUS


@pytest.mark.parametrize("name", STATEFUL)
def test_the_oracle_tells_the_checkpoint_of_another_branch(models: Models, name: str) -> None:
    """A planted bug: the same position of other text."""
    with opened(models[name]) as context:
        context.feed(1, 0, BRANCH)
        wrong = context.take(1)
        context.feed(0, 0, IDS[:REUSED])
        assert len(wrong) == len(context.take(0))
        assert context.restore(0, wrong)
        assert models.cold(name).share(continued(context, 0)) > OBVIOUS


@pytest.mark.parametrize(("n_steps", "last"), [(7, REUSED - 1), (9, -1)])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_that_has_moved_is_trimmed_without_complaint(
    models: Models, name: str, n_steps: int, last: int
) -> None:
    """llama.cpp returns True, though some or all cells that the next token should see are gone."""
    with opened(models[name]) as context:
        context.feed(0, 0, IDS[:REUSED])
        go_on(context, 0, n_steps)
        assert context.first(0) > REUSED - models[name].window
        assert context.remove(0, REUSED)
        assert context.last(0) == last
        assert models.cold(name).share(continued(context, 0)) > OBVIOUS


@pytest.mark.parametrize("name", [*HYBRIDS, *RECURRENT])
def test_a_copy_in_part_takes_over_a_state_of_another_position(models: Models, name: str) -> None:
    """llama.cpp ignores the range for the recurrent part; a hybrid then claims the position of the copied cells."""
    with opened(models[name]) as context:
        context.feed(0, 0, IDS[:REUSED])
        context.feed(0, REUSED, BRANCH[:20])
        context.copy(0, 1, 0, REUSED)
        if name in HYBRIDS:
            assert context.last(1) == REUSED - 1
            assert models.cold(name).share(continued(context, 1)) > OBVIOUS
        else:
            assert context.last(1) == REUSED + 19
            assert context.decode((1, REUSED, IDS[REUSED:])) == -1


@pytest.mark.parametrize("name", [*HYBRIDS, *RECURRENT])
def test_a_sequence_without_its_state_is_decoded_without_complaint(models: Models, name: str) -> None:
    """Nothing but our own record keeps wrong logits from users: llama.cpp compares positions only if it has one."""
    with opened(models[name]) as context:
        context.feed(0, 0, IDS[:REUSED])
        strip(context, 0, SCRATCH)
        assert context.last(0) == -1
        assert models.cold(name).share(continued(context, 0)) > OBVIOUS


@pytest.mark.parametrize("name", WINDOWS)
def test_a_sequence_with_one_token_of_its_window_is_not_decoded(models: Models, name: str) -> None:
    with opened(models[name]) as context:
        context.feed(0, 0, IDS[:REUSED])
        strip(context, 0, SCRATCH)
        assert context.last(0) == 0
        assert context.decode((0, REUSED, IDS[REUSED : REUSED + 1])) == -1


def three_sequences(context: RawContext) -> None:
    """Fill 0 and 1, whose recurrent states are not neighbours, and 2, whose state lies between theirs."""
    for seq in (0, 2, 1):
        context.feed(seq, 0, IDS[:REUSED] if seq == 2 else BRANCH)


@pytest.mark.parametrize("is_failing", [False, True])
@pytest.mark.parametrize("name", [*HYBRIDS, *RECURRENT])
def test_a_failed_step_damages_a_sequence_that_was_not_in_it(models: Models, name: str, is_failing: bool) -> None:
    """A step of 0 and 1 needs neighbouring states, so 2 gets another place, but its data moves in the graph."""
    step = (0, REUSED, BRANCH[:2]), (1, REUSED, BRANCH[:2])
    with opened(models[name]) as context:
        three_sequences(context)
        if is_failing:
            with context.failing(1):
                assert context.decode(*step) == 2
            # llama.cpp's own clean-up fails silently: these two report tokens that were never computed.
            assert (context.last(0), context.last(1)) == (REUSED + 1, REUSED + 1)
        else:
            assert context.decode(*step) == 0
        assert context.last(2) == REUSED - 1
        share = models.cold(name).share(continued(context, 2))
        assert share > OBVIOUS if is_failing else share <= 1


@pytest.mark.parametrize("name", [*HYBRIDS, *RECURRENT])
def test_checkpoints_mend_what_a_failed_step_has_damaged(models: Models, name: str) -> None:
    """Also in the sequences of the step, which lose the attention cells after the checkpoint."""
    with opened(models[name]) as context:
        context.feed(3, 0, IDS[:REUSED])
        good, bad = context.take(3), [(seq, REUSED, BRANCH[:2]) for seq in (0, 1)]
        assert context.remove(3)
        for seq in (0, 2, 1):
            context.feed(seq, 0, IDS[:REUSED])
        with context.failing(40):
            assert context.decode(*bad) == 2
        for seq in range(3):
            assert context.restore(seq, good)
            assert context.remove(seq, REUSED)
            assert models.cold(name).share(continued(context, seq)) <= 1


@pytest.mark.parametrize("is_failing", [False, True])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_new_sequence_may_begin_with_the_state_of_another_one_after_a_failed_step(
    models: Models, name: str, is_failing: bool
) -> None:
    """The step moves the state of 2 next to that of 0. Where it was is then a free one that counts as clear."""
    cold = models.cold(name)
    with opened(models[name]) as context:
        expected = context.feed(0, 0, IDS[:8])
        assert context.remove(0)
        for seq in range(3):
            context.feed(seq, 0, BRANCH)
        assert context.remove(1)
        with context.failing(1 if is_failing else -1):
            assert context.decode((0, REUSED, BRANCH[:2]), (2, REUSED, BRANCH[:2])) == (2 if is_failing else 0)
        for seq in range(N_SEQS):
            assert context.remove(seq)
        farthest = max(distance(context.feed(seq, 0, IDS[:8]), expected).max() for seq in range(N_SEQS))
        assert farthest > OBVIOUS * cold.bound if is_failing else farthest <= cold.bound


@pytest.mark.parametrize("name", WINDOWS)
def test_a_failed_step_damages_no_window(models: Models, name: str) -> None:
    """Only cells that no next token sees were given to its tokens, in the sequences of the step as in others."""
    with opened(models[name]) as context:
        for seq in range(3):
            context.feed(seq, 0, IDS[:REUSED])
        with context.failing(40):
            assert context.decode((0, REUSED, BRANCH[:100]), (1, REUSED, BRANCH[:100])) == 2
        for seq in range(3):
            assert context.last(seq) == REUSED - 1
            assert models.cold(name).share(continued(context, seq)) <= 1


@pytest.mark.parametrize("name", STATEFUL)
def test_steps_are_split_where_there_are_recurrent_states(models: Models, name: str) -> None:
    """Streams beside a prompt are a micro-batch of their own; without attention so is each of scattered ids."""
    with opened(models[name], is_watched=True) as context:
        for seq in range(5):
            context.feed(seq, 0, IDS[:20])
        context.micro_batches.clear()
        streams = [(seq, 20, IDS[:1]) for seq in range(3)]
        assert context.decode(*streams, (3, 20, IDS[:100])) == 0
        assert context.decode((0, 21, IDS[:1]), (2, 21, IDS[:1]), (4, 20, IDS[:1])) == 0
        mixed = [103] if name in WINDOWS else [4, 99]
        assert context.micro_batches == [*mixed, *([1, 1, 1] if name in RECURRENT else [3])]


@pytest.mark.parametrize(("n_tokens", "is_split"), [(44, True), (32, False)])
def test_a_window_loses_cells_in_a_step_of_several_micro_batches(
    tmp_path: Path, n_tokens: int, is_split: bool
) -> None:
    """Only where there is a recurrent state too: steps of window models are one micro-batch.

    llama.cpp chooses the cells of all micro-batches before it computes the first. A cell that the last one would
    take costs its sequence all older positions, and only the chosen cells are put back. Here the restored cells lie
    in another order than their positions: a newer one is taken, and older ones that the first still needs are lost.
    """
    source = synthetic.ensure("tiny-lfm2", folder=tmp_path, is_exact=True)
    window = {"attention.sliding_window": 32}
    model = RawModel(rewritten(source, tmp_path / "window.gguf", "lfm2", values=window))
    cold = ColdRun(model, IDS, REUSED)
    with opened(model, n_ubatch=64, is_watched=True) as context:
        context.feed(1, 0, (BRANCH * 2)[:121], 20)
        context.feed(0, 0, IDS[:REUSED], 50)
        assert context.restore(0, context.take(0))
        for start in range(121, 301, 20):
            context.feed(1, start, BRANCH[:20])
        context.micro_batches.clear()
        step = (0, REUSED, IDS[REUSED : REUSED + n_tokens]), (1, 301, BRANCH[: 64 - n_tokens])
        assert context.decode(*step) == 0
        assert context.micro_batches == ([40, 24] if is_split else [64])
        moved = distance(context.logits(64)[:n_tokens], cold.logits[:n_tokens]).max() / cold.bound
        assert moved > OBVIOUS if is_split else moved <= 1
    model.close()


@pytest.mark.parametrize("name", ROLLED_BACK)
def test_a_state_goes_back_by_the_last_tokens_of_a_step_once(models: Models, name: str) -> None:
    """Beside another sequence, whose tokens llama.cpp then computes in a micro-batch of their own."""
    with opened(models[name], n_rs_seq=N_ROLLBACK, is_watched=True) as context:
        context.feed(0, 0, IDS[: REUSED - 1])
        context.feed(1, 0, BRANCH[:20])
        context.micro_batches.clear()
        run = [IDS[REUSED - 1], *BRANCH[:N_ROLLBACK]]
        assert context.decode((0, REUSED - 1, run), (1, 20, BRANCH[20:21])) == 0
        assert sorted(context.micro_batches) == [1, len(run)]
        assert not context.remove(0, REUSED - 1)
        assert context.remove(0, REUSED)
        assert not context.remove(0, REUSED - 1)
        blob = context.take(0)
        assert models.cold(name).share(continued(context, 0)) <= 1
        # What is saved after going back is right too.
        context.copy(0, 2, 0, REUSED)
        assert context.restore(2, blob)
        assert models.cold(name).share(continued(context, 2)) <= 1


@pytest.mark.parametrize("name", ROLLED_BACK)
def test_a_copy_of_a_state_that_went_back_is_wrong_until_it_is_loaded_again(models: Models, name: str) -> None:
    for is_settled in (False, True):
        with opened(models[name], n_rs_seq=N_ROLLBACK) as context:
            context.feed(0, 0, IDS[: REUSED - 1])
            context.feed(0, REUSED - 1, [IDS[REUSED - 1], *BRANCH[:N_ROLLBACK]])
            assert context.remove(0, REUSED)
            if is_settled:
                assert context.restore(0, context.take(0))
            context.copy(0, 1)
            share = models.cold(name).share(continued(context, 1))
            assert share <= 1 if is_settled else share > OBVIOUS
            if is_settled:
                assert models.cold(name).share(continued(context, 0)) <= 1


@pytest.mark.parametrize("name", ROLLED_BACK)
def test_a_later_micro_batch_of_other_sequences_spoils_earlier_states(models: Models, name: str) -> None:
    """Between the runs of two prompts, that of a draft is one micro-batch, and the rest of the prompts the next."""
    with opened(models[name], n_rs_seq=N_ROLLBACK) as context:
        for seq in range(3):
            context.feed(seq, 0, IDS[:1])
            assert context.remove(seq)
        context.feed(1, 0, IDS[: REUSED - 1])
        prompts = (0, 0, BRANCH[:60]), (2, 0, BRANCH[60:120])
        draft = 1, REUSED - 1, [IDS[REUSED - 1], *BRANCH[:N_ROLLBACK]]
        assert context.decode(prompts[0], draft, prompts[1]) == 0
        assert context.remove(1, REUSED)
        assert models.cold(name).share(continued(context, 1)) > OBVIOUS


@pytest.mark.parametrize("name", ROLLED_BACK)
def test_with_earlier_states_the_shortest_runs_should_come_first(models: Models, name: str) -> None:
    with opened(models[name], n_rs_seq=N_ROLLBACK, is_watched=True) as context:
        for lengths, micro_batches in (((1, 1, 5, 20), [2, 10, 15]), ((20, 5, 1, 1), [*[1] * 12, 8, 5, 2])):
            context.micro_batches.clear()
            assert context.decode(*((seq, 0, IDS[:n]) for seq, n in enumerate(lengths))) == 0
            assert context.micro_batches == micro_batches
            assert all(context.remove(seq) for seq in range(4))


@pytest.mark.parametrize("name", ROLLED_BACK)
def test_states_of_runs_of_one_length_go_back(models: Models, name: str) -> None:
    with opened(models[name], n_rs_seq=N_ROLLBACK, is_watched=True) as context:
        for seq in (2, 0, 1):
            context.feed(seq, 0, IDS[: REUSED - 1])
        context.micro_batches.clear()
        run = [IDS[REUSED - 1], *BRANCH[:N_ROLLBACK]]
        assert context.decode(*((seq, REUSED - 1, run) for seq in range(3))) == 0
        assert context.micro_batches == [3 * len(run)]
        for seq in (1, 2, 0):
            assert context.remove(seq, REUSED)
        for seq in (0, 2, 1):
            assert models.cold(name).share(continued(context, seq)) <= 1


@pytest.mark.parametrize("name", sorted({*ALL_HYBRIDS, *ALL_RECURRENT} - {*ALL_ROLLED_BACK}))
def test_other_states_do_not_go_back(models: Models, name: str) -> None:
    with opened(models[name], n_rs_seq=N_ROLLBACK) as context:
        context.feed(0, 0, IDS[:REUSED])
        assert not context.remove(0, REUSED - 1)


@pytest.mark.parametrize("name", [*WINDOWS, *HYBRIDS])
def test_a_step_without_room_changes_nothing(models: Models, name: str) -> None:
    with opened(models[name], n_ctx=512) as context:
        for seq in range(3):
            context.feed(seq, 0, IDS[:REUSED])
        assert context.decode((0, REUSED, BRANCH[:40]), (2, REUSED, BRANCH[:40])) == 1
        assert [context.last(seq) for seq in range(3)] == [REUSED - 1] * 3
        assert context.remove(1)
        for seq in (0, 2):
            assert models.cold(name).share(continued(context, seq)) <= 1
            assert context.remove(seq)


@pytest.mark.parametrize("swa_full", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_cells_outside_of_a_window_are_taken_by_others(models: Models, name: str, swa_full: bool) -> None:
    """Also where empty ones are left. What the next token still sees stays, which is one token less than n_swa."""
    window = models[name].window
    with opened(models[name], swa_full=swa_full) as context:
        context.feed(1, 0, BRANCH[:100])
        context.feed(0, 0, IDS[:REUSED])
        assert context.remove(1)
        assert context.first(0) == 0
        context.feed(1, 0, BRANCH)
        context.feed(1, REUSED, BRANCH[:100])
        assert context.first(0) == REUSED - (window - 1)
        assert models.cold(name).share(continued(context, 0)) <= 1


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_loses_its_oldest_cell_to_others_before_it_is_saved(models: Models, name: str) -> None:
    """A checkpoint has n_swa tokens or one less, so its size does not follow from its position alone."""
    with opened(models[name]) as context:
        context.feed(0, 0, IDS[:REUSED])
        whole = context.take(0)
        for at in range(0, 600, 100):
            context.feed(1, at, BRANCH[:100])
        shorter = context.take(0)
        assert n_cells(whole) == context.model.window
        assert n_cells(shorter) == context.model.window - 1
        for blob in (whole, shorter):
            context.copy(0, 2, 0, REUSED)
            assert context.restore(2, blob)
            assert models.cold(name).share(continued(context, 2)) <= 1
            assert context.remove(2)


def n_cells(blob: bytes) -> int:
    """Number of cells in the partial state of a window: after magic, sequence and number of streams."""
    return int.from_bytes(blob[12:16], "little")


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("is_shared", [True, False])
def test_window_cells_with_two_owners_are_never_free_again(models: Models, name: str, is_shared: bool) -> None:
    """A fork by a plain copy fills the window cache for good; one that gets its own window goes on."""
    with opened(models[name], n_seq_max=2, n_ubatch=32) as context:
        context.feed(0, 0, IDS[:200])
        context.copy(0, 1, 0, 200)
        if not is_shared:
            assert context.restore(1, context.take(0))
        statuses = set()
        for at in range(200, 200 + 4 * context.model.window, 16):
            statuses |= {context.decode((seq, at, BRANCH[:16])) for seq in (0, 1)}
            if 1 in statuses:
                break
        assert statuses == ({0, 1} if is_shared else {0})


@pytest.mark.parametrize("name", [*HYBRIDS, *RECURRENT])
def test_a_fork_at_the_tip_shares_the_state_until_one_goes_on(models: Models, name: str) -> None:
    """All ids at once: each gets a state of its own from the first step on, as there is one for each id."""
    cold = models.cold(name)
    with opened(models[name]) as context:
        context.feed(0, 0, IDS[:REUSED])
        for seq in range(1, N_SEQS):
            context.copy(0, seq)
        for seq in range(1, N_SEQS - 1):
            context.feed(seq, REUSED, BRANCH[seq : seq + 10])
        assert cold.share(continued(context, N_SEQS - 1)) <= 1
        assert cold.share(continued(context, 0)) <= 1


@pytest.mark.parametrize("name", STATEFUL)
def test_segments_of_attention_alone_compose(models: Models, name: str) -> None:
    """Saved in two ranges, each without state, loaded elsewhere, and the checkpoint last."""
    with opened(models[name]) as context:
        context.feed(0, 0, IDS[:REUSED])
        checkpoint = context.take(0)
        stripped = []
        for start, end in ((0, 100), (100, REUSED)):
            context.copy(0, SCRATCH, start, end)
            whole = context.save(SCRATCH)
            strip(context, SCRATCH, 4)
            stripped.append(context.save(SCRATCH))
            assert len(stripped[-1]) < len(whole)
            assert context.remove(SCRATCH)
        assert context.remove(0)
        for blob, start, end in ((stripped[0], 0, 100), (stripped[1], 100, REUSED)):
            assert context.load(SCRATCH, blob)
            context.copy(SCRATCH, 1, start, end)
            assert context.remove(SCRATCH)
        assert context.restore(1, checkpoint)
        assert models.cold(name).share(continued(context, 1)) <= 1


@pytest.mark.parametrize("name", [*HYBRIDS, *RECURRENT])
def test_attention_is_truncated_anywhere_once_the_state_is_gone(models: Models, name: str) -> None:
    with opened(models[name]) as context:
        context.feed(0, 0, IDS[:REUSED])
        checkpoint = context.take(0)
        context.feed(0, REUSED, BRANCH[:50])
        size = len(context.save(0))
        assert not context.remove(0, REUSED)
        assert len(context.save(0)) == size
        strip(context, 0, SCRATCH)
        size = len(context.save(0))
        assert context.remove(0, REUSED)
        assert len(context.save(0)) < size or name in RECURRENT
        assert context.restore(0, checkpoint)
        assert models.cold(name).share(continued(context, 0)) <= 1


@pytest.mark.parametrize("name", WINDOWS)
def test_the_state_of_an_empty_sequence_does_not_clear_a_window(models: Models, name: str) -> None:
    """So one with a token is loaded where cells have to go."""
    with opened(models[name]) as context:
        context.feed(0, 0, IDS[:REUSED])
        assert context.restore(0, context.take(SCRATCH))
        assert models.cold(name).share(continued(context, 0)) <= 1


@pytest.mark.parametrize("name", STATEFUL)
def test_a_checkpoint_that_cannot_be_loaded_leaves_no_state(models: Models, name: str) -> None:
    """The last byte is missing. Other sequences keep theirs; the damaged one serves again once it was emptied."""
    with opened(models[name]) as context:
        for seq in (0, 1):
            context.feed(seq, 0, IDS[:REUSED])
        blob = context.take(0)
        assert not context.restore(0, blob[:-1])
        assert context.last(0) == -1
        assert models.cold(name).share(continued(context, 1)) <= 1
        assert context.remove(0)
        context.feed(0, 0, IDS[:REUSED])
        assert models.cold(name).share(continued(context, 0)) <= 1


@pytest.mark.parametrize("name", STATEFUL)
def test_a_segment_that_cannot_be_loaded_may_leave_cells_without_state(models: Models, name: str) -> None:
    """A window model keeps those of the other layers though it tells of no position, until they are removed."""
    with opened(models[name]) as context:
        for seq in (0, 1):
            context.feed(seq, 0, IDS[:REUSED])
        nothing = len(context.save(SCRATCH))
        assert not context.load(0, context.save(0)[:-1])
        assert context.last(0) == -1
        assert (len(context.save(0)) > nothing) == (name in WINDOWS)
        assert context.remove(0)
        assert len(context.save(0)) == nothing
        assert models.cold(name).share(continued(context, 1)) <= 1


def test_latent_attention_is_trimmed_and_copied_like_any_other(models: Models) -> None:
    """Models with MLA have no state besides their cells."""
    cold = models.cold("tiny-mla")
    with opened(models["tiny-mla"]) as context:
        context.feed(0, 0, IDS[:REUSED])
        context.feed(0, REUSED, BRANCH[:50])
        context.copy(0, 1, 0, REUSED)
        assert cold.share(continued(context, 1)) <= 1
        assert context.remove(0, REUSED)
        assert cold.share(continued(context, 0)) <= 1
        context.copy(0, 2, 0, REUSED - 1)
        context.feed(2, REUSED - 1, BRANCH[:1])
        assert cold.share(continued(context, 2)) > OBVIOUS
