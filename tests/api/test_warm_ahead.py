"""The next turn of a conversation is computed ahead, if it came back before, and changes nothing but its time."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from llamaslot.base.adapters import applied
from llamaslot.base.commands import CacheCleared, ClearCache, DropPaths, Generate, GenerateParams
from llamaslot.base.namespaces import salt_namespace
from llamaslot.base.prompt_jobs import ClearTexts
from llamaslot.base.tokens import TokenizedPrompt, ids_of, packed
from llamaslot.prompts import lanes
from llamaslot.prompts.prompt_worker import MIN_NEW_TOKENS, PromptWorker
from tests.api.test_restored_messages import CALL, QUESTION, TEMPLATE, chats, reply_of, results, without_reasoning
from tests.fake_backend import FakeBackend

ANSWERS = [f"Answer {i}: " + "the wall is long and made of old stones. " * 3 for i in range(4)]
REPLIES = [f"<think>{'I should look at it. ' * 4}</think>{answer}" for answer in ANSWERS]
AGAIN = {"role": "user", "content": "And now?"}


class Conversation:
    """A conversation with a server that computes ahead, unless told otherwise."""

    def __init__(self, chat: Any, **fields: Any) -> None:
        self.chat = chat
        self.fields = fields
        self.messages: list[dict[str, Any]] = []

    async def turn(self, *messages: dict[str, Any]) -> dict[str, Any]:
        """Send the conversation with further messages, and wait until the server idles."""
        self.messages += messages or (QUESTION,)
        reply = await self.chat.ask(*self.messages, **self.fields)
        self.messages.append(without_reasoning(reply_of(reply)))
        await settled(self.chat.server)
        return reply


async def settled(server: Any) -> int:
    """Wait until nothing runs, not even in the background; return the tokens that were computed ahead."""
    async with asyncio.timeout(20):
        while server.local.prompts.lanes.jobs or server.service._tasks:
            await asyncio.sleep(0.005)
        while (await server.idle()).n_queued or server.local.engine.scheduler.admission.background is not None:
            await asyncio.sleep(0.005)
    assert server.local.prompts.n_kept == 0
    return (await server.service.engine_state()).cache.prompt_tokens.ahead


async def test_a_turn_finds_its_prompt_computed_once_the_conversation_has_come_back(start: Any) -> None:
    chat = await chats(start, *REPLIES, warm_ahead=10_000)
    plain = await chats(start, *REPLIES)
    ours, theirs = Conversation(chat), Conversation(plain)
    computed = []
    for i in range(4):
        ahead = await settled(chat.server)
        mine, other = await ours.turn(), await theirs.turn()
        assert reply_of(mine)["content"] == reply_of(other)["content"]
        assert reply_of(mine)["content"].strip() == ANSWERS[i].strip()
        assert mine["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
        computed.append((ahead, mine["timings"]["prompt_n"], other["timings"]["prompt_n"]))
    # Nothing is computed ahead of the second turn: nobody knows yet whether it will come.
    assert computed[1][0] == 0
    assert computed[1][1] == computed[1][2]
    # The template strips the reasoning, so without this a turn computes the answer before it again.
    for ahead, mine, other in computed[2:]:
        assert ahead > len(ANSWERS[0])
        assert mine < len("</s>\n[user]What is there?</s>\n[assistant]") + 5 < 60 < other
    state = (await chat.server.service.engine_state()).cache
    assert state.requests.hits + state.requests.misses == 4
    assert (await settled(plain.server)) == 0
    _, metrics = 0, (await chat.server.service.exposition()).decode()
    assert f"llamaslot_ahead_tokens_total {state.prompt_tokens.ahead}.0" in metrics


@pytest.mark.parametrize(
    "change",
    [
        {"role": "user", "content": "What was there?"},
        {"role": "assistant", "content": "Something else."},
    ],
    ids=["question", "reply"],
)
async def test_nothing_is_computed_ahead_if_the_conversation_did_not_come_back_as_it_was(
    start: Any, change: dict[str, Any]
) -> None:
    chat = await chats(start, *REPLIES, warm_ahead=10_000)
    ours = Conversation(chat)
    await ours.turn()
    ours.messages[change["role"] == "assistant"] = change
    await ours.turn()
    assert await settled(chat.server) == 0
    await ours.turn()
    assert await settled(chat.server) > 0


async def test_in_a_tool_loop_only_the_turn_after_it_is_computed_ahead(start: Any) -> None:
    thought = "I should look further. " * 5
    calls = [f"<think>{i}. {thought}</think>\n{CALL}" for i in range(2)]
    chat = await chats(start, *calls, *REPLIES[:2], warm_ahead=10_000)
    ours = Conversation(chat)
    for _ in range(2):
        await ours.turn(*(results(ours.messages[-1]) if ours.messages else [QUESTION]))
    # The calls are restored as they were generated, with their reasoning: nothing is new.
    assert await settled(chat.server) == 0
    await ours.turn(*results(ours.messages[-1]))
    # After the next question the template leaves out all reasoning.
    assert await settled(chat.server) > 2 * len(CALL) - 20
    reply = await ours.turn(AGAIN)
    assert reply["timings"]["prompt_n"] < 60


async def test_the_budget_bounds_what_is_computed_ahead(start: Any) -> None:
    chat = await chats(start, *REPLIES, warm_ahead=MIN_NEW_TOKENS + 20)
    ours = Conversation(chat)
    for _ in range(4):
        await ours.turn()
    assert await settled(chat.server) == 0
    chat = await chats(start, *REPLIES, warm_ahead=250)
    ours = Conversation(chat)
    for _ in range(4):
        await ours.turn()
    assert 0 < await settled(chat.server) <= 250


async def test_short_answers_are_not_worth_it(start: Any) -> None:
    chat = await chats(start, *(f"<think>{'hm ' * 40}</think>Yes {i}." for i in range(4)), warm_ahead=10_000)
    ours = Conversation(chat)
    for _ in range(4):
        await ours.turn()
    assert await settled(chat.server) == 0


async def test_salts_and_sessions_are_kept(start: Any) -> None:
    chat = await chats(start, *REPLIES, warm_ahead=10_000)
    sent: list[Generate] = []
    send = chat.server.service._send
    chat.server.service.connect(lambda command: (sent.append(command), send(command)))
    ours = Conversation(chat, cache_salt="pepper", session_id="mine")
    for _ in range(3):
        await ours.turn()
    assert await settled(chat.server) > 0
    background = [each for each in sent if isinstance(each, Generate) and each.params.is_background]
    assert [each.params.cache_salt for each in background] == ["pepper"] * 2
    # Dropping the session drops what was computed ahead, too.
    last = background[-1]
    probe = {"prompt": ids_of(last.prompt.packed_tokens), "cache_salt": "pepper"}
    assert (await chat.server.ok("/cache/probe", probe))["computed"] == 1
    async with chat.server.session.delete(
        chat.server.url + "/sessions/mine", json={"cache_salt": "pepper"}
    ) as response:
        assert response.status == 200
    assert (await chat.server.ok("/cache/probe", probe))["cells"] < 40


async def test_the_next_turn_is_computed_with_the_adapters_of_its_conversation(start: Any) -> None:
    chat = await chats(start, *REPLIES, warm_ahead=10_000, n_adapters=1)
    sent: list[Generate] = []
    send = chat.server.service._send
    chat.server.service.connect(lambda command: (sent.append(command), send(command)))
    ours = Conversation(chat, lora=[{"id": 0, "scale": 0.5}])
    for _ in range(3):
        reply = await ours.turn()
    assert await settled(chat.server) > 0
    background = [each for each in sent if isinstance(each, Generate) and each.params.is_background]
    adapters = applied(chat.server.service.info.adapters, [0.5])
    assert [each.params.adapters for each in background] == [adapters] * 2
    assert reply["timings"]["prompt_n"] < 60


async def test_what_is_computed_ahead_is_what_precedes_the_next_invocation(start: Any) -> None:
    """Each reply is invoked, and computed again without the adapter once another one follows it."""
    chat = await chats(start, *REPLIES, warm_ahead=10_000, n_adapters=1, invocation=b"\n[assistant]")
    ours = Conversation(chat, lora=[{"id": 0, "scale": 0.5}])
    for i in range(4):
        ahead = await settled(chat.server)
        reply = await ours.turn()
        assert reply_of(reply)["content"].strip() == ANSWERS[i].strip()
        if i > 1:
            assert ahead > len(ANSWERS[0])
            assert reply["timings"]["prompt_n"] < 60


async def test_nothing_is_computed_ahead_while_others_are_served(start: Any) -> None:
    chat = await chats(start, *REPLIES, warm_ahead=10_000)
    ours, capacity = Conversation(chat), chat.server.service.capacity
    for _ in range(2):
        await ours.turn()
    before = await settled(chat.server)
    assert before > 0
    # Another request is being prepared, waits or runs.
    capacity.n_of_client.add("another client", 1)
    await ours.turn()
    assert await settled(chat.server) == before
    capacity.n_of_client.add("another client", -1)
    await ours.turn()
    assert await settled(chat.server) > before


async def test_a_turn_that_follows_at_once_waits_for_no_prediction(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted = []
    predict = PromptWorker._next_turn
    monkeypatch.setattr(
        PromptWorker, "_next_turn", lambda worker, job: predicted.append(job) or predict(worker, job)
    )
    chat = await chats(start, *REPLIES, warm_ahead=10_000)
    messages: list[dict[str, Any]] = []
    for _ in range(3):
        messages.append(QUESTION)
        messages.append(without_reasoning(reply_of(await chat.ask(*messages))))
    assert not predicted
    assert await settled(chat.server) > 0
    assert len(predicted) == 1


async def test_of_a_long_body_nothing_is_kept_or_predicted(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_MAX_SHORT_BODY_BYTES", 100)
    chat = await chats(start, *REPLIES, warm_ahead=10_000)
    ours = Conversation(chat)
    for _ in range(3):
        await ours.turn()
    assert await settled(chat.server) == 0


async def test_what_runs_in_the_background_makes_way_and_leaves_nothing_behind(start: Any) -> None:
    chat = await chats(start, *REPLIES, warm_ahead=10_000, n_ctx=2048)
    ours = Conversation(chat)
    await ours.turn()
    ours.messages.append(QUESTION)
    reply = await chat.ask(*ours.messages)
    # At once, and whatever the server is at: nobody waits, and slots look idle.
    other, cleared, (_, slots) = await asyncio.gather(
        chat.server.ok("/v1/completions", {"prompt": "b" * 300, "max_tokens": 5}),
        chat.server.ok("/cache/clear", None),
        chat.server.get("/slots?fail_on_no_slot=1"),
    )
    assert other["usage"]["completion_tokens"]
    assert reply_of(reply)["content"].strip() == ANSWERS[1].strip()
    assert isinstance(slots, list)
    assert cleared["cleared_tokens"] >= 0
    await settled(chat.server)
    await chat.server.ok("/cache/clear", None)
    _, state = await chat.server.get("/cache")
    assert state["cells"]["used"] == 0


async def test_it_is_off_without_a_budget_and_for_prompts_that_reuse_nothing(start: Any) -> None:
    for warm_ahead, fields in ((0, {}), (10_000, {"cache_prompt": False}), (10_000, {"n": 2})):
        chat = await chats(start, *[each for each in REPLIES for _ in range(2)], warm_ahead=warm_ahead)
        ours = Conversation(chat, **fields)
        for _ in range(3):
            await ours.turn()
        assert await settled(chat.server) == 0
        assert TEMPLATE


async def test_nothing_is_computed_ahead_of_what_was_cleared_meanwhile(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = await chats(start, *REPLIES, warm_ahead=10_000)
    ours, service = Conversation(chat), chat.server.service
    await ours.turn()
    predict = service._compute_next_turn

    def cleared_before(*args: Any) -> None:
        chat.server.local.prompts.call(ClearTexts())
        predict(*args)

    monkeypatch.setattr(service, "_compute_next_turn", cleared_before)
    await ours.turn()
    assert await settled(chat.server) == 0


PROMPT = "<s>" + "a" * 3000


async def computing(start: Any, **fields: Any) -> Any:
    """A server that was just told to compute `PROMPT` in the background: it has begun no step of it."""
    server = await start(backend=FakeBackend(n_ctx=8192, n_slots=2))
    tokens = TokenizedPrompt(packed(np.array([*PROMPT.encode()], dtype=np.int32)))
    params = GenerateParams("ahead", max_tokens=0, is_background=True, **fields)
    server.local.engine.send(Generate(params, tokens))
    return server


@pytest.mark.parametrize(
    "query",
    [ClearCache(), DropPaths(((salt_namespace(""), packed(np.array([*PROMPT.encode()], dtype=np.int32))),), b"")],
    ids=["clear", "drop"],
)
async def test_clearing_and_dropping_end_what_runs_in_the_background(start: Any, query: Any) -> None:
    server = await computing(start)
    await server.service.ask(query, CacheCleared)
    assert await settled(server) == 0
    _, state = await server.get("/cache")
    assert state["cells"]["used"] == 0


@pytest.mark.parametrize(("rest", "is_needless"), [(" and more", True), ("", True), (None, False)])
async def test_a_request_that_continues_it_ends_it(start: Any, rest: str | None, is_needless: bool) -> None:
    server = await computing(start)
    prompt = [*(PROMPT + rest).encode()] if rest is not None else [*b"bbb"]
    reply = await server.ok("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    n_reused = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert await settled(server) == (n_reused if is_needless else len(PROMPT))


async def test_a_prompt_of_which_nothing_is_kept_is_not_computed(start: Any) -> None:
    server = await computing(start, cache_prompt=False)
    assert await settled(server) == 0
