"""Every message between service and engine survives encoding, so that the engine can become another process."""

from __future__ import annotations

import math
import time
from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import asdict

from llamaslot.base import prompt_jobs
from llamaslot.base.adapters import AppliedAdapter
from llamaslot.base.advice import Divergence, HitCurve, SizeAdvice
from llamaslot.base.callers import Caller
from llamaslot.base.commands import (
    CacheCleared,
    Cancel,
    ClearCache,
    DropPaths,
    EngineCommand,
    EngineQuery,
    Generate,
    GenerateParams,
    InspectCache,
    InspectEngine,
    InspectHitCurve,
    LayOutImages,
    Load,
    ProbePrompt,
    Query,
    SlotAction,
    SlotActionDone,
    Unload,
    VectorParams,
    WriteTexts,
)
from llamaslot.base.errors import ErrorInfo
from llamaslot.base.events import Event, Generated, Progress, Reply
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.tools import ParserOptions, Tool, encoded_tools
from llamaslot.base.images import ImageSize
from llamaslot.base.model import Capabilities, CheckpointLimits, ModelInfo, StateKind
from llamaslot.base.prompt_jobs import (
    AnswerBody,
    BadBody,
    DropSession,
    ListItems,
    Needs,
    Prepare,
    Prepared,
    References,
    ReplyOptions,
    RequestContext,
    VectorReply,
)
from llamaslot.base.stats import CachePrefix, CacheState, CacheStats, CellStats, DiskStats, EngineState, SlotState
from llamaslot.base.text_records import Session, TextAnchor
from llamaslot.base.tokens import TokenizedPrompt
from llamaslot.kvcache.cache_settings import Budgets
from llamaslot.processes.messages import DiskUse, FromEngine, Loaded
from tests.prompts.test_token_memory import reply

SAMPLING = Sampling(seed=7, logit_bias={5: -math.inf, 9: 1.5})
PROGRESS = Progress(
    session_match="diverge",
    miss="changed",
    diverged_at=12,
    n_prompt=9,
    n_cached=4,
    n_prompt_computed=5,
    n_generated=3,
    queue_ms=0.1,
    prompt_ms=2.5,
    predicted_ms=9.0,
    slot=2,
)
VALUES: dict[str, Any] = {
    "completion_id": "r-1",
    "query_id": "q",
    "generated": Generated(b"\1\0\0\0", 3),
    "sampling": SAMPLING,
    "progress": PROGRESS,
    "stop": ("x", "\n"),
    "tokens": (3, 4),
    "reason": "word",
    "content": "text",
    "vector": b"\0\0\0\0",
    "n_prompt": 9,
    "error": ErrorInfo("exceed_context_size_error", "too long", n_prompt_tokens=9, n_ctx=8, at_least=True),
}
CACHE = CacheStats(cells=CellStats(total=64), disk=DiskStats(corrupt_files=3), miss_reasons={"cold": 2})
PREFIX = CachePrefix(
    parent=None,
    namespace=0,
    tokens=7,
    edge_tokens=7,
    ram_tokens=5,
    disk_tokens=0,
    hits=2,
    holders=(0, 5),
    pinned=True,
    last_used=1,
    checkpoint=64,
    text="a€",
)
PROMPT_JOBS = [
    Prepare(
        "chat",
        b"{}",
        RequestContext("r", Caller("k", "a", "mine"), key_secret="a b", adapter_scales=(0.5, 0.0)),
    ),
    AnswerBody("tokenize", b"\xff"),
    ListItems((b"[]", b'[{"id": "a"}]'), 20, is_descending=True),
]
QUERIES = [
    InspectEngine(),
    InspectCache(5, text=True),
    ProbePrompt(
        Generate(GenerateParams("p", sampling=SAMPLING), TokenizedPrompt(b"\1\0\0\0", session_match="new"))
    ),
    InspectHitCurve(),
    LayOutImages((ImageSize(30, 40),)),
    SlotAction(1, "restore", "a.bin"),
    ClearCache(),
    DropPaths((("space", b"\1\0\0\0"),), b"digest"),
]
RECORDS = (
    TextAnchor(key=b"key", tokens=b"abcd", parent=b"parent", start=3),
    Session(
        key=b"key", tokens=b"abcd", session=b"key", n_added=0, n_prompt=1, n_text=1, branches=((0, b"efgh", "key"),)
    ),
    reply(b"key", owner="one"),
)
PARAMS = GenerateParams("r", sampling=SAMPLING, adapters=(AppliedAdapter(1, 0.5, "digest"),))
JOBS = [
    prompt_jobs.Remember("r", b"\1\0\0\0", 3),
    prompt_jobs.NextTurn("r", b"\1\0\0\0", 3, "chatcmpl-1", 100),
    prompt_jobs.Release("r"),
    prompt_jobs.Locate("r", 3),
    prompt_jobs.ClearTexts(),
    DropSession("mine", "salt"),
    *PROMPT_JOBS,
]
RESULTS = [
    Prepared(
        (Generate(PARAMS, TokenizedPrompt(b"\1\0\0\0")),),
        ("text",),
        ("echo",),
        ReplyOptions(stream=True, response_fields=("content",), sse_ping_interval=3),
    ),
    Prepared(
        (Generate(GenerateParams("r", max_tokens=0, vector=VectorParams(2, 3)), TokenizedPrompt(b"\1\0\0\0")),),
        ("",),
        ("",),
        ReplyOptions(vectors=VectorReply("tei", top_n=3, texts=("a",))),
    ),
    Needs(may_compile=True),
    BadBody(ErrorInfo("invalid_request_error", "'prompt' is required", "prompt")),
    Needs(References("resp_1", ("item_1",))),
    b"{}",
    prompt_jobs.PredictedPrompt(Generate(PARAMS, TokenizedPrompt(b"\1\0\0\0")), 64),
    prompt_jobs.Located(7, Divergence("date", 100, "system", 7, "Today is ", "Friday", "Saturday")),
]
REPLIES = [
    SlotActionDone(3, 4, 0.5),
    CacheCleared(3),
    HitCurve(0.5, (SizeAdvice(7, 0.5, is_current=True), SizeAdvice(14, 0.75))),
    EngineState(slots=(SlotState(0, 128, 7, sampling=SAMPLING),), n_queued=2, cache=CACHE),
    CacheState(**asdict(CACHE), namespaces=1, nodes=1, leaves=1, tokens=7, tokens_pinned=0, prefixes=(PREFIX,)),
]


def example(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Return a message with a value in every field that has no default, and in some more."""
    fields = {f.name: f for f in msgspec.structs.fields(kind)}
    values = {name: VALUES[name] for name in fields if name in VALUES}
    for name, field in fields.items():
        if field.required and name not in values:
            if field.type is ModelInfo:
                values[name] = msgspec.structs.replace(example(ModelInfo), sampling={"top_k": 5})
                continue
            values[name] = {str: "s", int: 3, bool: True, "str": "s", "int": 3}[field.type]
    return kind(**values)


@pytest.mark.parametrize("kind", [Cancel, *get_args(Event)], ids=lambda kind: kind.__name__)
def test_a_message_comes_back_equal(kind: type[msgspec.Struct]) -> None:
    union = EngineCommand if kind in get_args(EngineCommand) else Event
    message = example(kind)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


@pytest.mark.parametrize("body", QUERIES, ids=lambda body: type(body).__name__)
def test_a_query_comes_back_equal(body: Any) -> None:
    query = Query("q", body)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(query), type=EngineCommand) == query


@pytest.mark.parametrize(
    "command",
    [
        Generate(PARAMS, TokenizedPrompt(b"\1\0\0\0", session_match="diverge", n_approximate=1), 0.5),
        WriteTexts(RECORDS),
        Cancel("r"),
        Unload(),
        Load(),
    ],
    ids=repr,
)
def test_a_command_to_the_engine_comes_back_equal(command: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=EngineCommand) == command


@pytest.mark.parametrize("job", JOBS, ids=lambda job: type(job).__name__)
def test_a_job_comes_back_equal(job: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=prompt_jobs.Job) == job


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_the_result_of_a_job_comes_back_equal(result: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=prompt_jobs.JobResult) == result


def test_every_query_and_job_is_tried() -> None:
    assert {type(body) for body in QUERIES} == {*get_args(EngineQuery)}
    assert {type(job) for job in JOBS} == {*get_args(prompt_jobs.Job)}


@pytest.mark.parametrize("body", REPLIES, ids=lambda body: type(body).__name__)
def test_a_reply_comes_back_equal(body: Any) -> None:
    reply = msgspec.msgpack.decode(msgspec.msgpack.encode(Reply("q", body)), type=Event)
    assert msgspec.convert(reply.body, type(body)) == body


def test_the_completions_of_a_prompt_have_ids_and_seeds_of_their_own_and_one_group() -> None:
    params = GenerateParams("r", sampling=Sampling(seed=2**32 - 2), n=3)
    completions = params.completions()
    assert [each.completion_id for each in completions] == ["r-0", "r-1", "r-2"]
    assert [each.sampling.seed for each in completions] == [2**32 - 2, 0, 1]
    assert {(each.group, each.n) for each in completions} == {("r", 1)}
    assert [each.group for each in GenerateParams("r").completions()] == [""]


def test_what_an_engine_tells_at_start_comes_back_equal() -> None:
    budgets = Budgets(ram_bytes=2**20, offload_after=13, checkpoints=CheckpointLimits(2**20, 32, 1024))
    info = msgspec.structs.replace(example(ModelInfo), sampling={"top_k": 5})
    loaded = Loaded(info, budgets, RECORDS, DiskUse("/cache", 3, 2, 1), "redis://127.0.0.1")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(loaded), type=FromEngine) == loaded


def test_the_facts_about_a_model_come_back_equal() -> None:
    state = Capabilities(kind=StateKind.HYBRID_WINDOW, can_trim=False, n_swa=32, n_layers=4, n_attention_layers=2)
    limits = CheckpointLimits(2**20, 32, 1024)
    info = msgspec.structs.replace(example(ModelInfo), state=state, sampling={"top_k": 5}, checkpoint_limits=limits)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=ModelInfo) == info
    assert msgspec.to_builtins(state)["kind"] == "hybrid_window"


@pytest.mark.slow
def test_schemas_of_tools_are_passed_on_without_being_decoded() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)}}
    tools = tuple(Tool(f"f{i}", schema) for i in range(20_000))
    parsed = Prepared((), (), (), ReplyOptions(parser=ParserOptions(encoded_tools(tools))))
    raw = msgspec.msgpack.encode(parsed)
    started = time.process_time()
    decoded = msgspec.msgpack.decode(raw, type=Prepared)
    assert time.process_time() - started < 0.3, "objects for each of 2,000,000 schemas take ten times as long"
    assert decoded == parsed
    assert list(decoded.options.parser.tools_by_name.values()) == list(tools)
