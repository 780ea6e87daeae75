"""Live requests: the events of several completions read as one sequence; leaving cancels what has not ended."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from structlog.testing import capture_logs

from llamaslot.base.callers import Caller
from llamaslot.base.commands import Cancel, VectorParams
from llamaslot.base.errors import ErrorInfo, IllegalTransitionError, ServerError
from llamaslot.base.events import Cancelled, Failed, Finished, Output, Progress
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.token_probs import FLOAT_MIN, TokenProbs, TokenScore
from llamaslot.base.tokens import TokenizedPrompt
from llamaslot.service import live_request
from llamaslot.service.limits import Capacity, ProbsLimit, ReplyBudget
from llamaslot.service.live_request import (
    COMPLETION_TABLE,
    Completion,
    CompletionEvent,
    CompletionState,
    LiveRequest,
)
from llamaslot.service.metrics import Metrics
from tests.prompt_threads import text_request
from tests.service.live import Wire, begin, leave

PROGRESS = Progress(**dict.fromkeys(Progress.__struct_fields__, 1))
OUT_OF_LUCK = ErrorInfo("server_error", "out of luck")


async def begun(wire: Wire, n: int) -> tuple[LiveRequest, list[str]]:
    """A request for completions of one prompt that the engine has, and their ids."""
    live = await begin(wire.service, text_request("r", "hello", n=n), probs=ProbsLimit(1000, ["n"]))
    return live, [each.id for each in live.completions]


async def test_events_before_a_failure_are_delivered_first() -> None:
    wire = Wire()
    live, (first, second) = await begun(wire, 2)
    wire.receive(Output(first, "a", (), PROGRESS), Output(second, "b", (), PROGRESS))
    wire.receive(Output(first, "c", ()), Failed(first, OUT_OF_LUCK))
    wire.receive(Finished(second, "limit", PROGRESS))
    batch = await live.next_batch()
    assert [(each.index, event.content) for each, event in batch] == [(0, "a"), (1, "b"), (0, "c")]
    for _ in range(2):
        with pytest.raises(ServerError, match="out of luck"):
            await live.next_batch()
    await wire.close([live])


async def test_the_completions_of_several_prompts_are_read_together() -> None:
    wire = Wire()
    live = await begin(wire.service, text_request("r-0", "a"), text_request("r-1", "b", n=2))
    assert wire.generates == ["r-0", "r-1-0", "r-1-1"]
    assert [each.prompt_number for each in live.completions] == [0, 1, 1]
    wire.receive(Output("r-1-0", "a", (1,), PROGRESS), Finished("r-0", "limit", PROGRESS, "b", (2,)))
    batch = await live.next_batch()
    assert [(each.index, event.content) for each, event in batch] == [(1, "a"), (0, "b")]
    wire.receive(Finished("r-1-0", "limit", PROGRESS), Finished("r-1-1", "limit", PROGRESS))
    assert len(await live.next_batch()) == 2
    assert live.is_done
    assert await live.next_batch() == []
    await wire.close([live])
    assert wire.prompts.n_kept == 0


async def test_output_is_passed_on_at_once_unless_earlier_output_waits() -> None:
    wire = Wire()
    live, (name,) = await begun(wire, 1)
    seen: list[str] = []
    is_free = True

    live.listen(lambda _, output: seen.append(output.content), lambda: is_free)
    wire.receive(Output(name, "a", (1,), PROGRESS))
    is_free = False
    wire.receive(Output(name, "b", (2,)))
    is_free = True
    wire.receive(Output(name, "c", (3,)))
    assert seen == ["a"]
    assert [event.content for _, event in await live.next_batch()] == ["b", "c"]
    wire.receive(Output(name, "d", (4,)), Finished(name, "limit", PROGRESS, "e", (5,)))
    assert seen == ["a", "d"]
    assert [event.content for _, event in await live.next_batch()] == ["e"]
    assert live.is_done
    assert (live.completions[0].text, live.completions[0].tokens.tolist()) == ("abcde", [1, 2, 3, 4, 5])
    await wire.close([live])


async def test_an_error_of_the_sink_is_raised_to_the_reader_and_not_to_the_engine() -> None:
    wire = Wire()
    live, names = await begun(wire, 2)

    def sink(completion: Completion, output: Output) -> None:
        raise ZeroDivisionError

    live.listen(sink, lambda: True)
    wire.receive(*(Output(name, "a", (), PROGRESS) for name in names))
    with pytest.raises(ZeroDivisionError):
        await live.next_batch()
    await wire.close([live])


async def test_leaving_cancels_only_what_has_not_ended() -> None:
    wire = Wire()
    live, (first, second) = await begun(wire, 2)
    wire.receive(Finished(first, "limit", PROGRESS))
    await leave(live)
    assert wire.sent[2:] == [Cancel(second)]
    assert wire.service.capacity.n_in_flight == 1
    wire.receive(Output(second, "late", ()), Cancelled(second))
    assert wire.service.capacity.n_in_flight == 0
    assert wire.service.reply_budget.n_bytes == 0
    await wire.close()
    assert wire.prompts.n_kept == 0


INPUTS = [f"r-{i}" for i in range(9)]


async def embedding(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> LiveRequest:
    """A request for the vectors of nine inputs, of which the engine gets four at a time."""
    monkeypatch.setattr(live_request, "MAX_INPUTS_SENT", 4)
    vector = VectorParams()
    return await begin(wire.service, *(text_request(name, "a", vector=vector, max_tokens=0) for name in INPUTS))


async def test_of_many_inputs_the_engine_gets_some_at_a_time_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(n_slots=1, max_queue=0)
    with capture_logs() as logs:
        live = await embedding(wire, monkeypatch)
        assert wire.generates == INPUTS[:4]
        assert wire.service.capacity.n_in_flight == 1
        wire.receive(Finished(INPUTS[1], "limit", PROGRESS), Finished(INPUTS[0], "limit", PROGRESS))
        assert wire.generates == INPUTS[:6]
        # The next engine gets what this one had, and no more.
        wire.service.engine_lost(is_crash=False)
        wire.service.engine_restarted()
        assert wire.generates[6:] == INPUTS[2:6]
        for name in INPUTS[2:]:
            wire.receive(Finished(name, "limit", PROGRESS))
        assert wire.generates[10:] == INPUTS[6:]
        found = [completion.index for completion, _ in await live.next_batch()]
    assert found == [1, 0, *range(2, 9)]
    assert live.is_done
    assert len([each for each in logs if each["event"] == "request.done"]) == 1
    assert wire.service.capacity.n_in_flight == 0
    await wire.close([live])


async def test_vectors_are_charged_as_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    live = await embedding(wire, monkeypatch)
    n_before = wire.service.reply_budget.n_bytes
    wire.receive(*(Finished(name, "limit", PROGRESS, vector=bytes(1000)) for name in INPUTS))
    assert wire.service.reply_budget.n_bytes == n_before + 9000
    assert len(await live.next_batch()) == 9
    assert wire.service.reply_budget.n_bytes == n_before + 9000
    await wire.close([live])
    assert wire.service.reply_budget.n_bytes == 0


@pytest.mark.parametrize("fails", [False, True])
async def test_inputs_that_the_engine_has_not_got_end_with_their_request(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    wire = Wire(n_slots=1)
    with capture_logs() as logs:
        live = await embedding(wire, monkeypatch)
        if fails:
            wire.receive(Failed(INPUTS[0], OUT_OF_LUCK))
            with pytest.raises(ServerError, match="out of luck"):
                await live.next_batch()
        await leave(live)
        assert wire.generates == INPUTS[:4]
        assert wire.sent[4:] == [Cancel(name) for name in INPUTS[fails:4]]
        # One had ended before the engine learned of that.
        wire.receive(Finished(INPUTS[1], "limit", PROGRESS))
        assert wire.service.capacity.n_in_flight == 1
        wire.receive(*(Cancelled(name) for name in (INPUTS[0], *INPUTS[2:4])))
    assert wire.generates == INPUTS[:4]
    assert wire.service.capacity.n_in_flight == 0
    assert not wire.service._completions
    (done,) = [each for each in logs if each["event"] == "request.done"]
    assert done["finish_reason"] == ("error" if fails else "cancelled")
    await wire.close()
    assert wire.prompts.n_kept == 0


def test_every_pair_of_state_and_event_is_a_transition_or_raises_and_changes_nothing() -> None:
    live = LiveRequest(Caller(), None, Capacity(1, 1, 0, Metrics()), ReplyBudget())
    params = text_request("r", "").params
    for state, change in itertools.product(CompletionState, CompletionEvent):
        completion = Completion(0, params, TokenizedPrompt(b""), 0, live)
        completion.state = state
        after = COMPLETION_TABLE.get((state, change))
        if after is not None:
            completion.handle(change)
        else:
            with pytest.raises(IllegalTransitionError):
                completion.handle(change)
        assert completion.state is (after or state)
    assert not any(state is CompletionState.DONE for state, _ in COMPLETION_TABLE)


def test_the_mean_log_probability_of_a_completion() -> None:
    live = LiveRequest(Caller(), None, Capacity(1, 1, 0, Metrics()), ReplyBudget())

    def mean(*values: float, is_sampled: bool = False) -> float:
        sampling = Sampling(n_probs=0, post_sampling_probs=is_sampled)
        params = msgspec.structs.replace(text_request("r", "").params, sampling=sampling)
        completion = Completion(0, params, TokenizedPrompt(b""), 0, live)
        scores = [TokenScore(1, value, [2], [9.0]) for value in values]
        completion.probs.extend(TokenProbs.of(scores, lambda _: b"a"))
        return completion.mean_logprob

    assert mean(-1, -2, -6) == -3
    assert mean(0.5, 0.125, is_sampled=True) == pytest.approx(math.log(0.25))
    assert mean(0.0, is_sampled=True) == FLOAT_MIN
    assert mean() == -math.inf


async def test_what_waits_to_be_read_is_charged_with_the_probabilities_of_the_prompt() -> None:
    wire = Wire()
    live = await begin(wire.service, text_request("r", "hello"))
    charged = []
    for probs in (None, TokenProbs.of([TokenScore(token, 0.0) for token in range(1000)], lambda _: b"a")):
        before = wire.service.reply_budget.n_bytes
        wire.receive(Output("r", "", (), PROGRESS, prompt_probs=probs))
        charged.append(wire.service.reply_budget.n_bytes - before)
    assert charged[1] > charged[0] + 10_000
    await wire.close([live])
    assert wire.service.reply_budget.n_bytes == 0
