"""The prompt worker's process on the embedded model: a prompt that crashes or hangs it fails, and no other."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from llamaslot.app.config import Config
from llamaslot.app.model_files import resolve_model
from llamaslot.base.callers import Caller
from llamaslot.base.errors import InvalidRequestError, LlamaslotError, QueueFullError, ServerError, UnavailableError
from llamaslot.base.model import ModelInfo
from llamaslot.base.prompt_jobs import (
    AnswerBody,
    BadBody,
    ClearTexts,
    DropSession,
    Locate,
    Needs,
    NextTurn,
    Prepare,
    Prepared,
    Release,
    Remember,
)
from llamaslot.base.text_records import Session
from llamaslot.base.tokens import TokenizedPrompt
from llamaslot.processes import prompt_supervisor
from llamaslot.processes.messages import JobDone, NumberedJob, PromptWorkerReady, SetModel
from llamaslot.processes.prompt_supervisor import PromptSupervisor
from llamaslot.processes.supervisor import Exit
from tests.fake_backend import FakeBackend
from tests.fake_clock import LoopClock
from tests.processes.faults import inject
from tests.prompt_threads import SETTINGS, long_query, parse

FAULT = """
import os, time
from llamaslot.backend.llama.vocab import LlamaVocab
_tokenize = LlamaVocab.tokenize
def tokenize(self, text, **flags):
    if "CRASH" in text:
        os.abort()
    if "HANG" in text or "SLOW" in text:
        time.sleep(60 if "HANG" in text else 0.3)
    return _tokenize(self, text, **flags)
LlamaVocab.tokenize = tokenize
from llamaslot.prompts.tokenizer import Tokenizer
_add_records = Tokenizer.add_records
def add_records(self, records):
    once = os.environ.get("LLAMASLOT_TEST_CRASH_ONCE")
    if once and os.path.exists(once):
        os.remove(once)
        os.abort()
    if any(record.key == b"CRASH" for record in records):
        os.abort()
    return _add_records(self, records)
Tokenizer.add_records = add_records
from llamaslot.processes.trial_process import TrialProcess
_try = TrialProcess.__call__
def try_(self, constraint):
    if "HANG" in constraint.grammar or "SLOW" in constraint.grammar:
        time.sleep(60 if "HANG" in constraint.grammar else 0.2)
    return _try(self, constraint)
TrialProcess.__call__ = try_
"""
LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
Start = Callable[..., Awaitable[PromptSupervisor]]


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    inject(FAULT, tmp_path, monkeypatch)
    monkeypatch.setattr(prompt_supervisor, "_PAUSE_S", 0.1)
    started: list[PromptSupervisor] = []

    async def begin(limit: float = 30.0, model: Path | None = None, template: str = "") -> PromptSupervisor:
        config = msgspec.to_builtins(Config(model=str(model or resolve_model("demo"))))
        worker = PromptSupervisor("llamaslot.app.runtime.prompt_main", config, timeout=limit)
        started.append(worker)
        await worker.start()
        await worker.set_model(SetModel(info(), template, "--chat-template", SETTINGS))
        return worker

    yield begin
    for worker in started:
        await worker.stop(5)


def info() -> ModelInfo:
    return msgspec.structs.replace(FakeBackend().info, n_ctx_slot=4096)


def tokenize(request_id: str, text: str = "hello", client: str = "", **fields: str) -> Prepare:
    """Tokenize the prompt of a request."""
    return parse("native", {"prompt": text, **fields}, request_id, client)


async def tokens_of(worker: PromptSupervisor, *args: str, **fields: str) -> TokenizedPrompt:
    (prompt,) = (await worker.call(tokenize(*args, **fields))).prompts
    return prompt.prompt


async def outcomes(*futures: Any) -> list[type]:
    async with asyncio.timeout(30):
        return [type(each) for each in await asyncio.gather(*futures, return_exceptions=True)]


async def test_a_prompt_that_crashes_it_fails_and_those_around_it_do_not(start: Start) -> None:
    worker = await start()
    pid = worker.pid
    futures = [worker.call(tokenize(text, text)) for text in ("a", "CRASH", "b", "c")]
    ends = await outcomes(*futures)
    assert ends == [Prepared, ServerError, Prepared, Prepared]
    assert "SIGABRT" in str(futures[1].exception())
    assert worker.pid != pid


@pytest.mark.slow
async def test_the_error_of_a_job_that_crashes_it_says_what_the_job_did(start: Start) -> None:
    worker = await start()
    body = worker.call(parse("native", {"prompt": "x", "logit_bias": {"CRASH": 1}}))
    text = worker.call(AnswerBody("tokenize", msgspec.json.encode({"content": "CRASH"})))
    await outcomes(body, text, worker.call(tokenize("a", "a")))
    assert str(body.exception()) == "tokenizing the prompt ended the prompt worker: SIGABRT"
    assert str(text.exception()) == "tokenizing the text ended the prompt worker: SIGABRT"


@pytest.mark.slow
async def test_of_two_that_ran_at_once_the_one_that_crashes_it_fails(start: Start) -> None:
    worker = await start()
    for pair in (("SLOW", "CRASH"), ("CRASH", "SLOW")):
        futures = [
            worker.call(tokenize("1", pair[0] + " prompt")),
            worker.call(long_query(pair[1])),
            worker.call(ClearTexts()),
        ]
        ends = await outcomes(*futures)
        assert [issubclass(end, ServerError) for end in ends] == ["CRASH" in pair[0], "CRASH" in pair[1], False]


@pytest.mark.slow
async def test_a_prompt_that_takes_too_long_fails_by_the_flags_name(start: Start) -> None:
    worker = await start(limit=1.0)
    futures = [worker.call(tokenize(text, text)) for text in ("a", "HANG", "b")]
    assert await outcomes(*futures) == [Prepared, InvalidRequestError, Prepared]
    assert "tokenizing the prompt took more than 1 s (--prompt-timeout)" in str(futures[1].exception())


@pytest.mark.slow
async def test_a_worker_that_was_stopped_meanwhile_did_not_take_too_long(start: Start) -> None:
    worker = await start(limit=1.0)
    pid = worker.pid
    os.kill(pid, signal.SIGSTOP)
    future = worker.call(tokenize("a", "a"))
    await asyncio.sleep(1.5)
    assert worker.is_suspended
    os.kill(pid, signal.SIGCONT)
    assert await outcomes(future) == [Prepared]
    assert worker.pid == pid


@pytest.mark.slow
async def test_two_that_take_too_long_fail_at_once(start: Start) -> None:
    limit = 2.0
    worker = await start(limit=limit)
    futures = [worker.call(tokenize("a", "HANG")), worker.call(long_query("HANG"))]
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    # After that time, the other one would only be found to hang the next process.
    _, pending = await asyncio.wait(futures, timeout=0.9 * limit)
    assert not pending, "one hangs another process"
    assert await outcomes(*futures, worker.call(tokenize("b", "b"))) == [
        *[InvalidRequestError] * 2,
        Prepared,
    ]


async def test_what_was_remembered_survives_its_crash(start: Start) -> None:
    worker = await start()
    tokenized = await tokens_of(worker, "a", "Once upon", session_id="mine")
    again = tokenize("b", "Once upon a time", session_id="mine")
    reply = (await tokens_of(worker, "c", "Once upon a time")).packed_tokens[len(tokenized.packed_tokens) :]
    await worker.call(Remember("a", reply, len(" a time")))
    await worker.call(tokenize("open", "another", session_id="open"))
    assert worker.stats[1].known == 1
    await outcomes(worker.call(tokenize("x", "CRASH")))
    assert (await worker.call(again)).prompts[0].prompt.session_match == "exact"
    records = await worker.call(Remember("open", reply, len(" a time")))
    assert not records, "of what was prepared before the crash nothing is remembered"
    assert (await worker.call(DropSession("mine"))).paths
    await outcomes(worker.call(tokenize("x", "CRASH")))
    assert (await worker.call(again)).prompts[0].prompt.session_match == "new"


@pytest.mark.slow
async def test_what_was_remembered_of_a_branch_survives_its_crash(start: Start) -> None:
    worker = await start(template=LINES)
    question = {"role": "user", "content": "Once upon"}
    job = parse("chat", {"messages": [question], "session_id": "mine", "max_tokens": 5}, "a")
    await worker.call(job)
    (session,) = await worker.call(Remember("a", b"\5\0\0\0", 1))
    assert session.key != session.session, "it is a branch"
    await outcomes(worker.call(tokenize("x", "CRASH")))
    assert (await worker.call(job)).prompts[0].prompt.session_match != "new"
    assert (await worker.call(DropSession("mine"))).paths


@pytest.mark.slow
async def test_what_was_remembered_of_a_predicted_turn_survives_its_crash(start: Start) -> None:
    long = "{% if loop.last and messages | length > 3 %}" + "A long conversation. " * 20 + "{% endif %}"
    worker = await start(template=LINES.replace("{{ m.role", long + "{{ m.role"))
    known, messages = await reply_tokens(worker), [{"role": "user", "content": "Once upon"}]
    for name in ("first", "second"):
        await worker.call(parse("chat", {"messages": messages, "session_id": "mine"}, name))
        await worker.call(Remember(name, known, len("a  time"), name))
        messages += [{"role": "assistant", "content": "a  time"}, {"role": "user", "content": "And then?"}]
    predicted = await worker.call(NextTurn("second", known, len("a  time"), "second", 10_000))
    assert predicted.records
    await outcomes(worker.call(tokenize("x", "CRASH")))
    paths = [tokens for _, tokens in (await worker.call(DropSession("mine"))).paths]
    assert predicted.generate.prompt.packed_tokens in paths


async def remember(worker: PromptSupervisor, owner: str, question: str, known: bytes, **fields: str) -> None:
    """Have the reply "a  time" to a question remembered."""
    body = {"messages": [{"role": "user", "content": question}], **fields}
    await worker.call(parse("chat", body, question, owner))
    await worker.call(Remember(question, known, len("a  time"), question))


async def n_remembered(worker: PromptSupervisor, question: str) -> int:
    """Tokens of the reply to a question that are restored."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "a  time"}]
    job = parse("chat", {"messages": [*messages, {"role": "user", "content": "?"}]}, "asked")
    (prompt,) = (await worker.call(job)).prompts
    return prompt.prompt.n_remembered


async def reply_tokens(worker: PromptSupervisor) -> bytes:
    """The tokens of "a  time", without those that the model wants before a prompt."""
    alone, other = [(await tokens_of(worker, "r", text)).packed_tokens for text in ("a  time", "b")]
    return alone.removeprefix(other[:4]) if alone[:4] == other[:4] else alone


@pytest.mark.slow
async def test_messages_of_a_client_within_its_share_survive_its_crash(start: Start) -> None:
    worker = await start(template=LINES)
    known = await reply_tokens(worker)
    await remember(worker, "one", "Once upon", known)
    copies = worker._memory
    copies.max_bytes = 5 * copies.n_bytes // 2
    for question in ("Twice upon", "Thrice upon", "Never upon"):
        await remember(worker, "two", question, known)
    await outcomes(worker.call(tokenize("x", "CRASH")))
    for question, is_known in (("Once upon", True), ("Thrice upon", False), ("Never upon", True)):
        assert (await n_remembered(worker, question) > 0) is is_known


@pytest.mark.slow
async def test_remembered_messages_survive_its_crash(start: Start) -> None:
    worker = await start(template=LINES)
    await remember(worker, "", "Once upon", await reply_tokens(worker), session_id="mine")
    assert worker.stats[2].known == 1
    await outcomes(worker.call(tokenize("x", "CRASH")))
    assert await n_remembered(worker, "Once upon")
    await worker.call(DropSession("mine"))
    await outcomes(worker.call(tokenize("x", "CRASH")))
    assert not await n_remembered(worker, "Once upon")


@pytest.mark.slow
async def test_a_body_that_needs_something_more_is_read_when_it_comes_again(start: Start) -> None:
    worker = await start()
    for crashes in (False, True):
        job = parse("native", {"prompt": "a", "grammar": f'root ::= "{crashes}"'})
        assert await worker.call(job) == Needs(may_compile=True)
        if crashes:
            await outcomes(worker.call(tokenize("x", "CRASH")))
        (prompt,) = (await worker.call(msgspec.structs.replace(job, may_compile=True))).prompts
        assert prompt.params.constraint is not None
        await worker.call(Release("r"))


@pytest.mark.slow
async def test_a_kill_from_outside_fails_nothing(start: Start) -> None:
    worker = await start()
    futures = [worker.call(tokenize("a", "SLOW")), worker.call(tokenize("b", "b"))]
    await asyncio.sleep(0.1)
    os.kill(worker.pid, signal.SIGKILL)
    assert await outcomes(*futures) == [Prepared] * 2


async def test_released_and_cancelled_requests_leave_nothing(start: Start) -> None:
    worker = await start()
    pid = worker.pid
    slow = worker.call(tokenize("a", "SLOW"))
    waiting = worker.call(tokenize("b", "CRASH"))
    waiting.cancel()
    await slow
    await worker.call(Release("a"))
    assert await outcomes(worker.call(tokenize("c", "c"))) == [Prepared]
    assert worker.pid == pid
    assert not worker.lanes.jobs
    assert (await worker.call(Locate("a", 1))).n_characters == -1
    assert (await worker.call(Locate("c", 1))).n_characters != -1


def chat(text: str) -> Prepare:
    return parse("chat", {"messages": [{"role": "user", "content": text}]})


TEMPLATE = """
{%- if 'ENDLESS' in messages[0].content %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}
{%- endfor %}{% endif %}{{ messages[0].content }}
"""


@pytest.mark.slow
async def test_a_template_that_does_not_end_fails_its_request_only(start: Start) -> None:
    worker = await start(1.0, template=TEMPLATE)
    assert worker.chat_template == TEMPLATE
    assert await outcomes(worker.call(chat("a"))) == [Prepared]
    endless = worker.call(chat("ENDLESS"))
    beside = worker.call(long_query(""))
    assert await outcomes(endless, beside, worker.call(chat("b"))) == [InvalidRequestError, bytes, Prepared]
    error = endless.exception()
    assert isinstance(error, LlamaslotError)
    assert "rendering and tokenizing the messages took more than 1 s (--prompt-timeout)" in str(error)
    assert error.param is None


@pytest.mark.slow
async def test_a_grammar_whose_check_does_not_end_fails_its_request_only(start: Start) -> None:
    limit = 6.0
    worker = await start(limit)
    pid = worker.pid

    def read(text: str, client: str = "a", *, may_compile: bool) -> asyncio.Future[Prepared]:
        job = parse("native", {"prompt": "a", "grammar": f'root ::= "{text}"'}, request_id=text)
        context = msgspec.structs.replace(job.context, caller=Caller(address=client))
        return worker.call(msgspec.structs.replace(job, may_compile=may_compile, context=context))

    assert await read("HANG", may_compile=False) == Needs(may_compile=True)
    hanging = read("HANG", may_compile=True)
    async with asyncio.timeout(0.9 * limit):
        # Each client waits for its own only, of which one is checked at a time.
        waits = read("fine too", may_compile=True)
        slow, fine = (read(text, "b", may_compile=True) for text in ("SLOW", "fine"))
        assert (await fine).prompts[0].params.constraint is not None
        assert slow.done()
        assert not waits.done()
        # It is known by now.
        assert (await read("fine", may_compile=False)).prompts[0].params.constraint is not None
        assert await outcomes(*(worker.call(chat(text)) for text in "abc")) == [Prepared] * 3
    assert not hanging.done()
    assert await outcomes(hanging) == [InvalidRequestError]
    assert f"took more than {limit:g} s (--prompt-timeout)" in str(hanging.exception())
    assert await outcomes(waits, worker.call(tokenize("b", "b"))) == [Prepared, Prepared]
    assert worker.pid != pid


@pytest.mark.slow
async def test_a_template_that_does_not_end_when_it_is_tried_is_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_supervisor, "_READY_TIMEOUT_S", 2.0)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(LlamaslotError, match=r"--chat-template.*--prompt-timeout"):
        await start(1.0, template=endless)


async def test_what_is_no_valid_unicode_is_refused(start: Start) -> None:
    worker = await start(template="{{ '\\ud800' if messages[0].content == 'broken' else 'fine' }}")
    assert await outcomes(worker.call(chat("broken")), worker.call(chat("a"))) == [BadBody, Prepared]


async def test_errors_cross_the_process_boundary(start: Start) -> None:
    worker = await start()
    too_long = worker.call(tokenize("a", "word " * 100_000))
    assert issubclass((await outcomes(too_long))[0], LlamaslotError)
    error = too_long.exception()
    assert isinstance(error, LlamaslotError)
    assert error.n_ctx == 4096
    invalid = worker.call(parse("native", {"prompt": {"a": 1}}))
    assert await outcomes(invalid, worker.call(tokenize("b", "b"))) == [BadBody, Prepared]
    assert invalid.result().error.param == "prompt.prompt_string"


@pytest.mark.slow
async def test_long_queries_are_limited(start: Start) -> None:
    worker = await start()
    queries = [worker.call(long_query("SLOW")) for _ in range(5)]
    ends = await outcomes(*queries)
    assert ends.count(QueueFullError) == 1


@pytest.mark.slow
async def test_it_ends_although_a_prompt_hangs(start: Start) -> None:
    worker = await start()
    worker.call(tokenize("a", "HANG"))
    async with asyncio.timeout(3):
        await worker.stop(1)
    assert await outcomes(worker.call(ClearTexts())) == [UnavailableError]


async def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    worker = PromptSupervisor(
        "llamaslot.app.runtime.prompt_main",
        msgspec.to_builtins(Config(model=str(tmp_path / "none.gguf"))),
        timeout=10,
    )
    await worker.start()
    with pytest.raises(LlamaslotError, match="no model file"):
        await worker.set_model(SetModel(info(), "", "", SETTINGS))
    await worker.stop(5)


async def test_a_worker_that_cannot_start_again_fails_its_jobs(tmp_path: Path, start: Start) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(resolve_model("demo"), model)
    worker = await start(model=model)
    model.unlink()
    os.kill(worker.pid, signal.SIGKILL)
    ends = await outcomes(worker.call(tokenize("a", "a")))
    assert ends == [UnavailableError]


@pytest.mark.slow
async def test_a_record_that_crashes_it_is_not_restored_for_ever(start: Start) -> None:
    worker = await start()
    await worker.call(tokenize("a", "Once upon", session_id="mine"))
    await worker.call(Remember("a", b"\5\0\0\0", 1))
    worker._memory.add(Session(key=b"CRASH", tokens=b"", n_added=0, n_prompt=0, n_text=0))
    await outcomes(worker.call(tokenize("x", "CRASH")))
    assert await outcomes(worker.call(tokenize("b", "b"))) == [Prepared]
    assert worker.stats[1].known == 0


@pytest.mark.slow
async def test_one_crash_while_it_starts_forgets_nothing(tmp_path: Path, start: Start) -> None:
    worker = await start()
    worker._memory.add(Session(key=b"key", tokens=b"", n_added=0, n_prompt=0, n_text=0))
    once = tmp_path / "crashes-once"
    once.touch()
    os.environ["LLAMASLOT_TEST_CRASH_ONCE"] = str(once)
    try:
        os.kill(worker.pid, signal.SIGKILL)
        assert await outcomes(worker.call(tokenize("a"))) == [Prepared]
    finally:
        del os.environ["LLAMASLOT_TEST_CRASH_ONCE"]
    assert not once.exists()
    assert worker.stats[1].known == 1


@pytest.mark.slow
async def test_processes_that_answer_nothing_are_started_later_and_later(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start()
    pauses: list[float | None] = []
    on_ended = worker._on_ended

    def noting(end: Any) -> float | None:
        pauses.append(on_ended(end))
        return pauses[-1] and 0.01

    monkeypatch.setattr(worker, "_on_ended", noting)
    for i in range(3):
        assert await outcomes(worker.call(tokenize(f"{i}", "CRASH"))) == [ServerError]
    assert await outcomes(worker.call(tokenize("a"))) == [Prepared]
    assert await outcomes(worker.call(tokenize("b", "CRASH"))) == [ServerError]
    assert pauses == pytest.approx([0.1, 0.2, 0.3, 0.0])


async def test_many_prompts_of_one_client_delay_another_by_one_job(start: Start) -> None:
    worker = await start()
    order: list[str] = []
    jobs = [("many", "SLOW"), ("many", "b"), ("many", "c"), ("one", "d"), ("many", "e"), ("other", "f")]
    futures = []
    for client, text in jobs:
        futures.append(worker.call(tokenize(text, text, client=client)))
        futures[-1].add_done_callback(lambda _, text=text: order.append(text))
    await outcomes(*futures)
    assert order == ["SLOW", "d", "f", "b", "c", "e"]


async def test_a_body_for_which_memory_is_lacking_fails_alone() -> None:
    worker, sent = PromptSupervisor("no.module", {}, timeout=1.0), []
    worker._is_ready = True

    def send(message: NumberedJob) -> None:
        if len(message.job.body) > 1000:
            raise MemoryError
        sent.append(message.number)

    worker.send = send  # type: ignore[method-assign]
    jobs = [worker.call(tokenize(str(len(text)), text)) for text in ("a" * 2000, "b")]
    with pytest.raises(UnavailableError, match="memory"):
        await jobs[0]
    assert sent == [2], "its lane is free again"
    worker._job_done(JobDone(2, b"", stats=worker.stats))
    assert await jobs[1] == b""
    assert not worker.lanes.jobs


async def test_a_process_that_hangs_as_it_starts_again_is_killed() -> None:
    clock, worker, n_kills = LoopClock(), PromptSupervisor("no.module", {}, timeout=1.0), 0

    def kill() -> None:
        nonlocal n_kills
        n_kills += 1

    async def wait(seconds: float) -> None:
        clock.advance(seconds)
        for _ in range(3):
            await asyncio.sleep(0)

    def begin() -> None:
        worker._child = SimpleNamespace(pid=2**30, kill=kill, send=lambda _: None)  # type: ignore[assignment]
        worker._on_started()

    def end(status: int) -> None:
        worker._child = None
        worker._on_ended(Exit(status, was_killed=status < 0))

    begin()
    loading = asyncio.create_task(worker.set_model(SetModel(info(), "", "", SETTINGS)))
    await wait(1)
    for _ in range(3):
        worker._receive(PromptWorkerReady("", worker.stats))
        await loading
        await wait(60)
        assert n_kills == 0, "it is ready"
        end(1)
        await wait(60)
        begin()
    await wait(29.9)
    assert n_kills == 0
    await wait(0.2)
    assert n_kills == 1
    end(-9)
    begin()
    await wait(130)
    assert n_kills == 1, "for 100 s this process was stopped"
    await wait(100.1)
    assert n_kills == 2
    worker.kill()
    end(-9)
