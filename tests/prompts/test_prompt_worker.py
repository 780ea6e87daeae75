"""The prompt worker on the fake vocabulary: jobs are carried out in order, and released requests leave nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import get_args

import msgspec
import numpy as np
import pytest

from llamaslot.base.callers import MAX_ROUND_TURNS, Turns
from llamaslot.base.commands import DropPaths
from llamaslot.base.errors import ContextSizeError, QueueFullError, ServerError
from llamaslot.base.prompt_jobs import (
    AnswerBody,
    BadBody,
    BodyKind,
    ClearTexts,
    DropSession,
    EarlierItems,
    Job,
    ListItems,
    Locate,
    Located,
    Needs,
    NextTurn,
    Prepare,
    Prepared,
    Release,
    Remember,
)
from llamaslot.base.stats import AnchorStats, MessageStats, SessionStats
from llamaslot.base.text_records import Session, TextAnchor
from llamaslot.base.tokens import TokenizedPrompt
from llamaslot.prompts.lanes import LONG_LANE, PROMPT_LANE, Lanes, activity_of, is_long_query, lane_of
from llamaslot.prompts.tokenizer import Tokenizer
from tests.fake_backend import FakeVocab
from tests.prompt_threads import (
    CONTEXT,
    LocalPrompts,
    long_query,
    parse,
    prompt_thread,
    tokenize,
)

BROKEN = np.array([0x80, 0x80], dtype=np.int32).tobytes()
"""A reply of two invalid characters, whose text gives other tokens."""


class GatedVocab(FakeVocab):
    """Long texts wait for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.n_waiting = 0

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> object:  # type: ignore[override]
        if len(text) > 10_000:
            self.n_waiting += 1
            assert self.gate.wait(10)
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)


async def tokens_of(worker: LocalPrompts, *args: str, **fields: str) -> TokenizedPrompt:
    """The tokens of a prompt that stays prepared."""
    (prompt,) = (await worker.call(tokenize(*args, **fields))).prompts
    return prompt.prompt


@pytest.fixture
async def worker() -> AsyncIterator[LocalPrompts]:
    worker = prompt_thread(Tokenizer(FakeVocab(), 100, min_match=0.8))
    yield worker
    worker.close()


async def test_a_reply_is_remembered_until_its_request_is_released(worker: LocalPrompts) -> None:
    prepared = await worker.call(tokenize("a", session_id="mine"))
    assert isinstance(prepared, Prepared)
    new = await worker.call(Remember("a", BROKEN, 2))
    assert [type(record) for record in new] == [TextAnchor, Session]
    anchors, sessions, _ = worker.stats
    assert (anchors.replies, sessions.known, worker.n_kept) == (1, 1, 1)
    await worker.call(Release("a"))
    assert worker.n_kept == 0


async def test_a_second_reply_to_the_same_prompt_is_remembered_too(worker: LocalPrompts) -> None:
    await worker.call(tokenize("a"))
    for reply in (BROKEN, BROKEN * 2):
        assert len(await worker.call(Remember("a", reply, len(reply) // 4))) == 1


async def test_records_are_used_by_another_worker(worker: LocalPrompts) -> None:
    await worker.call(tokenize("a", session_id="mine"))
    reply = np.array([ord("!")] * 2, dtype=np.int32).tobytes()
    new = await worker.call(Remember("a", reply, 2))
    tokenizer = Tokenizer(FakeVocab(), 100, min_match=0.8)
    tokenizer.add_records(new)
    other = prompt_thread(tokenizer)
    assert other.stats == worker.stats
    prompt = await tokens_of(other, "b", "hello!!?", session_id="mine")
    assert prompt.session_match == "extend"
    other.close()


async def test_positions_are_found_in_the_text_of_a_prompt(worker: LocalPrompts) -> None:
    prompt = await tokens_of(worker, "a", "hello")
    assert await worker.call(Locate("a", len(prompt.tokens) - 1)) == Located(4)


async def test_a_refused_prompt_leaves_nothing(worker: LocalPrompts) -> None:
    with pytest.raises(ContextSizeError, match="context"):
        await worker.call(tokenize("a", "x" * 1000))
    assert worker.n_kept == 0


async def test_a_prompt_names_only_tokens_of_the_vocabulary(worker: LocalPrompts) -> None:
    for prompt in ([10**6], ["a", 10**6]):
        refused = await worker.call(parse("native", {"prompt": prompt}))
        assert isinstance(refused, BadBody)
        assert refused.error.message == "'prompt' holds token 1000000, but the vocabulary ends at 257"


@pytest.mark.parametrize("prompt", ["x" * 1000, ["x" * 250, 1, "x" * 250]], ids=["text", "parts"])
async def test_a_prompt_that_cannot_fit_is_refused_with_its_body_and_not_tokenized(
    worker: LocalPrompts, prompt: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To pass its text on would hold up the server's event loop."""
    monkeypatch.setattr(FakeVocab, "tokenize", None)
    with pytest.raises(ContextSizeError, match="at least"):
        await worker.call(parse("native", {"prompt": prompt}))


async def test_the_error_of_a_bug_says_what_the_job_did() -> None:
    class BrokenVocab(FakeVocab):
        def detokenize(self, tokens: Sequence[int]) -> bytes:
            raise ZeroDivisionError

    worker = prompt_thread(Tokenizer(BrokenVocab(), 100, min_match=0.8))
    query = AnswerBody("detokenize", msgspec.json.encode({"tokens": [1]}))
    with pytest.raises(ServerError, match="detokenizing the tokens failed"):
        await worker.call(query)
    worker.close()


async def test_a_cancelled_job_is_not_carried_out() -> None:
    vocab = GatedVocab()
    worker = prompt_thread(Tokenizer(vocab, 10**6, min_match=0.8))
    first = worker.call(tokenize("a", "x" * 20_000))
    while not vocab.n_waiting:
        await asyncio.sleep(0.001)
    second = worker.call(tokenize("b"))
    second.cancel()
    vocab.gate.set()
    await first
    await worker.call(tokenize("c"))
    assert worker.n_kept == 2
    worker.close()


def test_errors_name_the_reading_of_a_body_of_every_kind() -> None:
    for kind in get_args(BodyKind):
        assert "tokenizing" in activity_of(parse(kind, {})), kind


class Body(str):
    """Something that can be large."""

    __slots__ = ("__weakref__",)


@pytest.mark.slow
async def test_bodies_of_clients_that_have_gone_take_no_memory() -> None:
    vocab = GatedVocab()
    worker = prompt_thread(Tokenizer(vocab, 10**6, min_match=0.8))
    first = worker.call(tokenize("a", "x" * 20_000))
    body = Body("{}")
    raw = weakref.ref(body)
    waiting = worker.call(Prepare("chat", body, CONTEXT))  # type: ignore[arg-type]
    del body
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    del waiting
    gc.collect()
    assert raw() is None
    vocab.gate.set()
    await first
    worker.close()


async def test_a_large_body_does_not_hold_up_prompts() -> None:
    vocab = GatedVocab()
    worker = prompt_thread(Tokenizer(vocab, 10**7, min_match=0.8))
    biased = {"prompt": " " * 2**20, "logit_bias": {"x" * 10_001: 1}}
    large = worker.call(parse("native", biased))
    await asyncio.wait_for(worker.call(tokenize("a")), 5)
    assert not large.done()
    vocab.gate.set()
    assert isinstance(await large, Prepared)
    worker.close()


def test_a_small_body_that_continues_a_large_response_does_not_hold_up_prompts() -> None:
    def lane(earlier: EarlierItems) -> int:
        return lane_of(Prepare("responses", b"{}", CONTEXT, earlier=earlier))

    assert lane(EarlierItems((b"[]",))) == PROMPT_LANE
    assert lane(EarlierItems((b"[]", b" " * 2**20))) == LONG_LANE
    assert lane(EarlierItems((), {"msg_1": b" " * 2**20})) == LONG_LANE


def test_a_long_list_of_items_is_a_long_query() -> None:
    assert not is_long_query(ListItems((b"[]",), 20, is_descending=True))
    assert is_long_query(ListItems((b"[]", b" " * 2**20), 20, is_descending=True))


async def test_what_is_being_remembered_is_cleared_too(worker: LocalPrompts) -> None:
    await worker.call(tokenize("a", session_id="mine"))
    jobs = [worker.call(Remember("a", BROKEN, 2)), worker.call(ClearTexts())]
    await asyncio.gather(*jobs)
    assert worker.stats == (AnchorStats(), SessionStats(), MessageStats())


async def test_a_dropped_session_gives_its_tokens_once(worker: LocalPrompts) -> None:
    prompt = await tokens_of(worker, "a", session_id="mine")
    worker.call(Remember("a", BROKEN, 2))
    found = [await worker.call(DropSession("mine")) for _ in range(2)]
    assert all(isinstance(each, DropPaths) for each in found)
    assert [each.paths for each in found] == [(("", prompt.packed_tokens + BROKEN),), ()]


async def test_a_session_is_dropped_with_its_branches(worker: LocalPrompts) -> None:
    texts = {"": "a", "title": "b", "agent": "c"}
    for branch, text in texts.items():
        await worker.call(tokenize(text, text, session_id="mine", session_branch=branch))
        await worker.call(Remember(text, BROKEN, 2))
    await worker.call(tokenize("d", session_id="other", session_branch="title"))
    await worker.call(Remember("d", BROKEN, 2))
    assert worker.stats[1].known == 4
    dropped = await worker.call(DropSession("mine"))
    assert isinstance(dropped, DropPaths)
    assert len(dropped.paths) == 3
    assert worker.stats[1].known == 1


async def test_long_queries_do_not_hold_up_prompts_and_are_limited() -> None:
    vocab = GatedVocab()
    worker = prompt_thread(Tokenizer(vocab, 100, min_match=0.8))
    queries = [worker.call(long_query()) for _ in range(4)]
    await asyncio.wait_for(worker.call(tokenize("a")), 5)
    with pytest.raises(QueueFullError):
        await worker.call(long_query())
    queries.pop().cancel()
    await asyncio.sleep(0)
    queries.append(worker.call(long_query()))
    vocab.gate.set()
    assert all(isinstance(answer, bytes) for answer in await asyncio.gather(*queries))
    assert vocab.n_waiting == 4, "the cancelled query was not worked out"
    worker.close()


async def test_many_prompts_of_one_client_delay_another_by_one_job() -> None:
    vocab = GatedVocab()
    worker = prompt_thread(Tokenizer(vocab, 10**6, min_match=0.8))
    order: list[str] = []

    def call(name: str, job: Job) -> asyncio.Future[object]:
        future = worker.call(job)
        future.add_done_callback(lambda _: order.append(name))
        return future

    jobs = [call(f"many {i}", tokenize(f"many {i}", "x" * 20_000, client="many")) for i in range(20)]
    while not vocab.n_waiting:
        await asyncio.sleep(0.001)
    jobs.append(call("one", tokenize("one", client="one")))
    jobs.append(call("query", AnswerBody("tokenize", b'{"content": "short"}', client="another")))
    jobs.append(call("remember", Remember("many 0", BROKEN, 2)))
    vocab.gate.set()
    await asyncio.gather(*jobs)
    assert order == ["many 0", "remember", "one", "query", *(f"many {i}" for i in range(1, 20))]
    worker.close()


async def test_a_prompt_that_is_cancelled_and_released_at_once_leaves_nothing() -> None:
    vocab = GatedVocab()
    worker = prompt_thread(Tokenizer(vocab, 10**6, min_match=0.8))
    first = worker.call(tokenize("a", "x" * 20_000))
    while not vocab.n_waiting:
        await asyncio.sleep(0.001)
    second = worker.call(tokenize("b"))
    second.cancel()
    released = worker.call(Release("b"))
    vocab.gate.set()
    await asyncio.gather(first, released)
    assert worker.n_kept == 1
    worker.close()


async def test_a_body_that_is_read_in_another_lane_leaves_nothing_after_its_client_has_gone() -> None:
    vocab = GatedVocab()
    worker = prompt_thread(Tokenizer(vocab, 10**6, min_match=0.8))
    biased = {"prompt": " " * 2**20, "logit_bias": {"x" * 10_001: 1}}
    large = worker.call(parse("native", biased, "large"))
    while not vocab.n_waiting:
        await asyncio.sleep(0.001)
    large.cancel()
    await worker.call(Release("large"))
    vocab.gate.set()
    while worker.lanes.running:
        await asyncio.sleep(0.001)
    assert worker.n_kept == 0
    worker.close()


async def test_a_prompt_in_another_lane_waits_until_the_reply_before_it_is_remembered() -> None:
    vocab = GatedVocab()
    worker = prompt_thread(Tokenizer(vocab, 10**7, min_match=0.8))
    await worker.call(tokenize("a", session_id="mine"))
    busy = worker.call(tokenize("busy", "x" * 20_000))
    while not vocab.n_waiting:
        await asyncio.sleep(0.001)
    remembered = worker.call(Remember("a", np.array([ord("!")] * 2, dtype=np.int32).tobytes(), 2))
    long = worker.call(parse("native", {"prompt": "hello!!" + "?" * 2**20, "session_id": "mine"}, "b"))
    await asyncio.sleep(0.05)
    assert all(each.lane == PROMPT_LANE for each in worker.lanes.running)
    vocab.gate.set()
    await asyncio.gather(busy, remembered)
    assert (await long).prompts[0].prompt.session_match == "extend"
    worker.close()


async def test_a_body_whose_grammar_is_not_known_is_not_kept_until_it_comes_again(worker: LocalPrompts) -> None:
    job = parse("native", {"prompt": "a", "grammar": 'root ::= "x"'})
    assert await worker.call(job) == Needs(may_compile=True)
    assert worker.n_kept == 0
    again = msgspec.structs.replace(job, may_compile=True)
    (prompt,) = (await worker.call(again)).prompts
    assert prompt.params.constraint is not None
    await worker.call(Release("r"))
    assert worker.n_kept == 0


async def test_the_time_limit_of_a_body_is_one_of_each_prompt(worker: LocalPrompts) -> None:
    told: list[None] = []
    job = parse("native", {"prompt": ["a", "b", "c"]})
    prepared = worker.worker.carry_out(job, lambda: told.append(None)).result()
    assert isinstance(prepared, Prepared)
    assert [each.params.completion_id for each in prepared.prompts] == ["r-0", "r-1", "r-2"]
    assert len(told) == 2


async def test_of_several_prompts_each_reply_is_remembered_after_its_own(worker: LocalPrompts) -> None:
    await worker.call(parse("native", {"prompt": ["first", "second"]}))
    new = [await worker.call(Remember("r", BROKEN, 2, prompt=prompt)) for prompt in (0, 1)]
    of_each = []
    other = prompt_thread(Tokenizer(FakeVocab(), 100, min_match=0.8))
    for text in ("first", "second"):
        await other.call(tokenize("alone", text))
        of_each.append(await other.call(Remember("alone", BROKEN, 2)))
    other.close()
    assert [[each.key for each in records] for records in new] == [
        [each.key for each in records] for records in of_each
    ]
    assert new[0] != new[1]
    await worker.call(Release("r"))


async def test_a_stream_of_new_clients_does_not_starve_another() -> None:
    turns = Turns()
    turns.take("known")
    waiting = ["known"]
    for i in range(1000):
        waiting.append(f"new {i}")
        client = turns.next(waiting, lambda each: each)
        turns.take(client)
        waiting.remove(client)
        if client == "known":
            break
    assert i <= MAX_ROUND_TURNS


async def test_what_is_predicted_goes_last() -> None:
    lanes = Lanes()
    jobs: list[Job] = [
        NextTurn("r", b"", 0, "r", 100), Locate("r", 1), tokenize("a"), ClearTexts(), Release("a"),
    ]  # fmt: skip
    for job in jobs:
        lanes.add(job)
    begun = []
    while (pending := lanes.begin_next()) is not None:
        begun.append(pending.job)
        lanes.end(pending.number)
    assert len(begun) == len(jobs)
    assert begun[-1] is jobs[0]
