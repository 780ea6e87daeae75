"""The prompt worker on the fake vocabulary: each request is answered once, and nothing is kept of ended ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest

from llamaslot.base.commands import DropSession, Submit, TextPart, Tokenize, TokensPart
from llamaslot.base.errors import InvalidRequestError, LlamaslotError
from llamaslot.base.prompt import TokenizedPrompt
from llamaslot.base.stats import AnchorStats, SessionStats
from llamaslot.base.tokens import Tokens
from llamaslot.prompts.prompt_worker import PromptWorker
from llamaslot.prompts.sessions import Session
from llamaslot.prompts.text_anchors import TextAnchor
from llamaslot.prompts.tokenizer import Tokenizer
from tests.fake_backend import FakeVocab

BROKEN = np.array([0x80, 0x80], dtype=np.int32)
"""A reply of two invalid characters, whose text gives other tokens."""


class Store:
    """Notes what is written."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def anchors(self) -> Sequence[TextAnchor]:
        return ()

    def write_anchor(self, anchor: TextAnchor) -> None:
        self.written.append("anchor")

    def sessions(self) -> Sequence[tuple[bytes, Session]]:
        return ()

    def write_session(self, digest: bytes, session: Session) -> None:
        self.written.append("session")

    def drop_session(self, digest: bytes) -> None:
        self.written.append("drop")

    def clear_texts(self) -> None:
        self.written.append("clear")


class Engine:
    """Accepts prompts, and carries out what is posted when told to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.posted: list[Callable[[], None]] = []
        self.accepted: dict[str, TokenizedPrompt] = {}
        self.failed: dict[str, LlamaslotError] = {}
        self.worker = PromptWorker(tokenizer, post=self.posted.append, fail=self.failed.__setitem__)
        self.store = Store()
        self.worker.keep_in(self.store, lambda method, *arguments: method(*arguments))

    async def run_posted(self, n: int = 1) -> None:
        """Carry out what the next `n` calls post."""
        async with asyncio.timeout(5):
            while len(self.posted) < n:
                await asyncio.sleep(0.001)
        while self.posted:
            self.posted.pop(0)()

    async def submit(self, *request_ids: str, **fields: object) -> None:
        """Have a prompt tokenized for some requests."""
        submits = [Submit(each, (TextPart("hello"),), **fields) for each in request_ids]  # type: ignore[arg-type]
        self.worker.submit(submits, lambda submit, prompt: self.accepted.update({submit.request_id: prompt}))
        await self.run_posted()


class Failing(Tokenizer):
    """Raises what no caller expects."""

    def tokenize_prompt(self, submit: Submit) -> object:  # type: ignore[override]
        raise RuntimeError("a bug")

    def remember(self, context: object, generated: Tokens, n_sent: int) -> object:  # type: ignore[override]
        raise RuntimeError("a bug")


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine(Tokenizer(FakeVocab(), 100, min_match=0.8))
    yield engine
    engine.worker.close()


async def test_a_remembered_reply_is_written_and_its_request_released(engine: Engine) -> None:
    await engine.submit("a", "b", session_id="mine")
    assert set(engine.accepted) == set(engine.worker._contexts) == {"a", "b"}
    engine.worker.remember("a", BROKEN, 2)
    assert engine.worker.is_remembering
    await engine.run_posted()
    assert not engine.worker.is_remembering
    assert engine.store.written == ["anchor", "session"]
    anchors, sessions = engine.worker.stats
    assert (anchors.replies, sessions.known) == (1, 1)
    engine.worker.release("b")
    assert not engine.worker._contexts


async def test_a_cancelled_request_is_not_answered_and_leaves_nothing(engine: Engine) -> None:
    submits = [Submit(each, (TextPart("hello"),)) for each in ("a", "b")]
    engine.worker.submit(submits, lambda submit, prompt: engine.accepted.update({submit.request_id: prompt}))
    assert list(engine.worker._waiting) == ["a", "b"]
    assert engine.worker.cancel("a")
    assert not engine.worker.cancel("a")
    await engine.run_posted()
    assert set(engine.accepted) == set(engine.worker._contexts) == {"b"}
    assert not engine.worker.cancel("b"), "its prompt is tokenized"
    engine.worker.cancel_all()
    assert not engine.worker._contexts


async def test_a_cancelled_request_alone_is_not_answered(engine: Engine) -> None:
    engine.worker.submit([Submit("a", (TextPart("hello"),))], lambda *_: pytest.fail("it was cancelled"))
    engine.worker.cancel("a")
    await engine.run_posted()
    assert (engine.failed, engine.worker._contexts, engine.worker._waiting) == ({}, {}, {})


@pytest.mark.parametrize(
    ("part", "error"),
    [(TextPart("x" * 1000), "context"), (TokensPart((10**6,)), "vocabulary")],
    ids=["long", "ids"],
)
async def test_a_refused_request_fails_once_and_leaves_nothing(
    engine: Engine, part: TextPart | TokensPart, error: str
) -> None:
    engine.worker.submit([Submit("a", (part,))], lambda *_: pytest.fail("it was refused"))
    answers: list[object] = []
    engine.worker.answer("query", Tokenize((TokensPart((10**6,)),)), answers.append)
    await engine.run_posted(2)
    assert set(engine.failed) == {"a"}
    assert [type(answer) for answer in answers] == [InvalidRequestError]
    assert error in engine.failed["a"].message
    assert (engine.worker._contexts, engine.worker._waiting) == ({}, {})


async def test_bugs_in_the_tokenizer_end_the_request_and_nothing_else() -> None:
    engine = Engine(Failing(FakeVocab(), 100, min_match=0.8))
    await engine.submit("a")
    assert engine.failed["a"].type == "server_error"
    assert (engine.worker._contexts, engine.worker._waiting) == ({}, {})
    context = Tokenizer(FakeVocab(), 100, min_match=0.8).tokenize_prompt(Submit("b", (TextPart("hello"),)))
    engine.worker._contexts["b"] = context
    engine.worker.remember("b", BROKEN, 2)
    await engine.run_posted()
    assert not engine.worker.is_remembering
    assert engine.store.written == []
    engine.worker.close()


async def test_a_reply_that_is_being_remembered_is_cleared_too(engine: Engine) -> None:
    await engine.submit("a", session_id="mine")
    done = []
    engine.worker.remember("a", BROKEN, 2)
    engine.worker.clear(lambda: done.append("cleared"))
    await engine.run_posted(2)
    assert done == ["cleared"]
    assert engine.store.written == ["anchor", "session", "clear"]
    assert engine.worker.stats == (AnchorStats(), SessionStats())


async def test_a_dropped_session_gives_its_tokens_once(engine: Engine) -> None:
    await engine.submit("a", session_id="mine")
    engine.worker.remember("a", BROKEN, 2)
    found: list[list[bytes]] = []
    for _ in range(2):
        engine.worker.drop_session(DropSession("mine"), lambda _, paths: found.append(paths), pytest.fail)
    await engine.run_posted(3)
    prompt = engine.accepted["a"].packed_tokens
    assert found == [[prompt + BROKEN.tobytes()], []]


async def test_a_long_query_that_is_cancelled_when_it_was_just_answered_gets_no_answer(engine: Engine) -> None:
    query = Tokenize((TextPart("x" * 20_000),))
    answers: list[object] = []
    engine.worker.answer("a", query, answers.append)
    future, _ = engine.worker._queries["a"]
    await asyncio.wait([future])
    engine.worker.cancel_query("a")
    await engine.run_posted(1)
    assert answers == []
    assert not engine.worker._queries
