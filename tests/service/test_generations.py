"""Completions read as one sequence of events: nothing before a failure is lost, and leaving cancels the rest."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest

from llamaslot.base.commands import Cancel, Submit
from llamaslot.base.errors import ErrorInfo, InvalidRequestError, ServerError
from llamaslot.base.events import Accepted, Cancelled, Failed, Finished, Output, Progress
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.token_probs import FLOAT_MIN, TokenProbs, TokenScore
from llamaslot.service.generations import Generation, Generations
from llamaslot.service.reply_budget import ProbsLimit
from tests.service.test_service import Wire, submit

PROGRESS = Progress(**dict.fromkeys(Progress.__struct_fields__, 1))
OUT_OF_LUCK = ErrorInfo("server_error", "out of luck")


async def accepted(wire: Wire, n: int) -> tuple[Generations, list[str]]:
    """Completions of one prompt that the engine has accepted, and their ids."""
    generations = wire.service.generate([msgspec.structs.replace(submit(), n=n)], probs=ProbsLimit(1000, ["n"]))
    names = [each.submit.request_id for each in generations.all]
    wire.service.receive([Accepted(name, 5) for name in names])
    await generations.__aenter__()
    return generations, names


async def test_events_before_a_failure_are_delivered_first() -> None:
    wire = Wire()
    generations, (first, second) = await accepted(wire, 2)
    wire.service.receive([Output(first, "a", (), PROGRESS), Output(second, "b", (), PROGRESS)])
    wire.service.receive([Output(first, "c", (), PROGRESS), Failed(first, OUT_OF_LUCK)])
    wire.service.receive([Finished(second, "limit", PROGRESS)])
    batch = await generations.next_batch()
    assert [(each.index, event.content) for each, event in batch] == [(0, "a"), (1, "b"), (0, "c")]
    for _ in range(2):
        with pytest.raises(ServerError, match="out of luck"):
            await generations.next_batch()


async def test_text_that_arrives_before_the_last_is_accepted_is_not_lost() -> None:
    wire = Wire()
    generations = wire.service.generate([submit(), submit()])
    first, second = (each.submit.request_id for each in generations.all)
    wire.service.receive([Accepted(first, 5), Output(first, "a", (1,), PROGRESS)])
    wire.service.receive([Finished(first, "limit", PROGRESS, "b", (2,)), Accepted(second, 5)])
    wire.service.receive([Finished(second, "limit", PROGRESS)])
    async with generations:
        batch = await generations.next_batch()
        assert [(each.index, event.content) for each, event in batch] == [(0, "a"), (0, "b"), (1, "")]
        assert await generations.next_batch() == []
        assert generations.done


async def test_output_is_passed_on_at_once_unless_earlier_output_waits() -> None:
    wire = Wire()
    generations, (name,) = await accepted(wire, 1)
    seen: list[str] = []
    is_free = True

    generations.listen(lambda _, output: seen.append(output.content), lambda: is_free)
    wire.service.receive([Output(name, "a", (1,), PROGRESS)])
    is_free = False
    wire.service.receive([Output(name, "b", (2,), PROGRESS)])
    is_free = True
    wire.service.receive([Output(name, "c", (3,), PROGRESS)])
    assert seen == ["a"]
    assert [event.content for _, event in await generations.next_batch()] == ["b", "c"]
    wire.service.receive([Output(name, "d", (4,), PROGRESS), Finished(name, "limit", PROGRESS, "e", (5,))])
    assert seen == ["a", "d"]
    assert [event.content for _, event in await generations.next_batch()] == ["e"]
    assert generations.done
    assert (generations.all[0].text, generations.all[0].tokens.tolist()) == ("abcde", [1, 2, 3, 4, 5])


async def test_an_error_of_the_sink_is_raised_to_the_reader_and_not_to_the_engine() -> None:
    wire = Wire()
    generations, names = await accepted(wire, 2)

    def sink(generation: Generation, output: Output) -> None:
        raise ZeroDivisionError

    generations.listen(sink, lambda: True)
    wire.service.receive([Output(name, "a", (), PROGRESS) for name in names])
    with pytest.raises(ZeroDivisionError):
        await generations.next_batch()


async def test_leaving_cancels_only_what_has_not_ended() -> None:
    wire = Wire()
    generations, (first, second) = await accepted(wire, 2)
    async with generations:
        wire.service.receive([Finished(first, "limit", PROGRESS)])
    (command, cancel) = wire.sent
    assert isinstance(command, Submit)
    assert cancel == Cancel(second)
    assert wire.service.n_in_flight == 1
    wire.service.receive([Cancelled(second)])
    assert wire.service.n_in_flight == 0
    assert [event.content for _, event in await generations.next_batch()] == [""]
    with pytest.raises(ServerError, match="cancelled"):
        await generations.next_batch()


async def test_the_refusal_of_one_completion_cancels_the_others() -> None:
    wire = Wire()
    generations = wire.service.generate([submit(), submit()])
    first, second = (each.submit.request_id for each in generations.all)
    entering = asyncio.create_task(generations.__aenter__())
    refusal = Failed(second, ErrorInfo("invalid_request_error", "no", "prompt"))
    wire.service.receive([Accepted(first, 5), refusal])
    with pytest.raises(InvalidRequestError):
        await entering
    assert wire.sent[2:] == [Cancel(first)]


def test_the_mean_log_probability_of_a_completion() -> None:
    def mean(*values: float, is_sampled: bool = False) -> float:
        sampling = Sampling(n_probs=0, post_sampling_probs=is_sampled)
        generation = Generation(0, msgspec.structs.replace(submit(), sampling=sampling), lambda *_: None)
        scores = [TokenScore(1, value, [2], [9.0]) for value in values]
        generation.probs.extend(TokenProbs.of(scores, lambda _: b"a"))
        return generation.mean_logprob

    assert mean(-1, -2, -6) == -3
    assert mean(0.5, 0.125, is_sampled=True) == pytest.approx(math.log(0.25))
    assert mean(0.0, is_sampled=True) == FLOAT_MIN
    assert mean() == -math.inf


async def test_what_waits_to_be_read_is_charged_with_the_probabilities_of_the_prompt() -> None:
    wire = Wire()
    generations = wire.service.generate([submit()])
    (name,) = (each.submit.request_id for each in generations.all)
    wire.service.receive([Accepted(name, 5)])
    async with generations:
        charged = []
        for probs in (None, TokenProbs.of([TokenScore(token, 0.0) for token in range(1000)], lambda _: b"a")):
            before = wire.service.reply_budget.n_bytes
            wire.service.receive([Output(name, "", (), PROGRESS, prompt_probs=probs)])
            charged.append(wire.service.reply_budget.n_bytes - before)
        assert charged[1] > charged[0] + 10_000
    assert wire.service.reply_budget.n_bytes == 0
