"""The channel: messages arrive whole and in order however their bytes are cut, and nothing else is let through."""

from __future__ import annotations

import asyncio
import random
import socket
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from llamaslot.base.commands import Cancel, Generate, GenerateParams, InspectCache, Query
from llamaslot.base.events import Finished, Progress, Started, Stopped
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.prompt_jobs import AnswerBody, Prepare
from llamaslot.base.text_records import TextAnchor
from llamaslot.base.tokens import TokenizedPrompt
from llamaslot.processes.channel import Channel
from llamaslot.processes.messages import (
    Events,
    FromEngine,
    FromPrompts,
    JobDone,
    NumberedJob,
    Stop,
    ToEngine,
    ToPrompts,
)
from tests.conftest import LONG
from tests.prompt_threads import CONTEXT

MESSAGES = [
    Cancel("abc"),
    Generate(GenerateParams("a", sampling=Sampling(logit_bias={3: 1.5})), TokenizedPrompt(b"1234")),
    Query("a", InspectCache(5)),
    Events([Started("a", 3), Finished("a", "eos", Progress(1, 2, 3, 4, 5.0, 6.0, 7.0)), Stopped("x")]),
    NumberedJob(3, Prepare("native", b"{}", CONTEXT)),
    JobDone(3, (TextAnchor(key=b"a", tokens=b"b", start=0),)),
]


class Transport(asyncio.Transport):
    """A transport that notes nothing."""

    def abort(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def write(self, data: object) -> None:
        pass


class End:
    """One end of a channel, with what arrived."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.lost: list[str] = []
        self.channel: Channel[Any] = Channel(ToEngine, self.messages.append, self.lost.append)

    async def until(self, n_messages: int = 0, n_lost: int = 0) -> None:
        async with asyncio.timeout(10):
            while len(self.messages) < n_messages or len(self.lost) < n_lost:
                await asyncio.sleep(0.001)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[End, End]]:
    ours, theirs = socket.socketpair()
    a, b = End(), End()
    await a.channel.connect(ours)
    await b.channel.connect(theirs)
    yield a, b
    await asyncio.gather(a.channel.finish(), b.channel.finish())


@pytest.fixture
async def raw() -> AsyncIterator[tuple[End, socket.socket]]:
    """A channel, and the socket of its other side."""
    ours, theirs = socket.socketpair()
    end = End()
    await end.channel.connect(ours)
    yield end, theirs
    theirs.close()
    await end.channel.finish()


def framed(message: Any) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


async def test_messages_of_all_sizes_arrive_in_order(pair: tuple[End, End]) -> None:
    a, b = pair
    sent = [Cancel("x" * n) for n in (0, 1, 1000, 70_000, 5_000_000, 3)]
    for message in sent:
        a.channel.send(message)
    await b.until(len(sent))
    assert b.messages == sent


@pytest.mark.parametrize("seed", range(5))
async def test_it_does_not_matter_how_the_bytes_are_cut(raw: tuple[End, socket.socket], seed: int) -> None:
    end, theirs = raw
    rng = random.Random(seed)
    sent = [Cancel("x" * rng.choice((0, 1, 3, 300))) for _ in range(50)]
    data = b"".join(map(framed, sent))
    while data:
        n = rng.randint(1, 200)
        theirs.sendall(data[:n])
        data = data[n:]
        await asyncio.sleep(0)
    await end.until(len(sent))
    assert end.messages == sent


@pytest.mark.parametrize(
    "data",
    [
        b"\5\0\0\0abcde",
        framed({"type": "cancel"}),
        framed({"type": "unknown", "completion_id": "a"}),
        framed([1, 2]),
    ],
)
async def test_what_is_no_message_closes_the_channel(raw: tuple[End, socket.socket], data: bytes) -> None:
    end, theirs = raw
    theirs.sendall(framed(Cancel("a")) + data + framed(Cancel("b")))
    await end.until(1, 1)
    assert end.messages == [Cancel("a")]
    assert "cannot be read" in end.lost[0]
    theirs.settimeout(5)
    assert theirs.recv(1) == b""
    end.channel.send(Stop())


async def test_a_message_that_cannot_be_handled_ends_the_channel(raw: tuple[End, socket.socket]) -> None:
    end, theirs = raw

    def fail(_: object) -> None:
        raise ZeroDivisionError("a bug")

    end.channel._on_message = fail
    theirs.sendall(framed(Cancel("a")) + framed(Cancel("b")))
    await end.until(0, 1)
    assert "a bug" in end.lost[0]
    theirs.settimeout(5)
    assert theirs.recv(1) == b""


async def test_the_end_of_the_other_side_is_reported_once(raw: tuple[End, socket.socket]) -> None:
    end, theirs = raw
    theirs.close()
    await end.until(0, 1)
    end.channel.send(Stop())
    await asyncio.sleep(0.01)
    assert len(end.lost) == 1


@pytest.mark.parametrize("has_unread", [False, True])
async def test_what_was_sent_arrives_although_a_write_failed_before_it_was_read(
    raw: tuple[End, socket.socket], has_unread: bool
) -> None:
    """A process that ends has sent which requests ran: else the next engine would get one that crashes it."""
    end, theirs = raw
    if has_unread:
        end.channel.send(Stop())
        await asyncio.sleep(0.01)
    sent = [Cancel("x" * n) for n in (3, 50_000, 0)]
    theirs.sendall(b"".join(map(framed, sent)))
    theirs.close()
    end.channel.send(Stop())
    await end.until(n_lost=1)
    assert end.messages == sent
    assert len(end.lost) == 1


async def test_what_was_sent_arrives_although_the_channel_is_finished(pair: tuple[End, End]) -> None:
    a, b = pair
    sent = [Cancel("x" * 1_000_000) for _ in range(5)]
    for message in sent:
        a.channel.send(message)
    await a.channel.finish()
    await b.until(5, 1)
    assert b.messages == sent
    assert a.lost == []


async def test_a_large_message_is_copied_once() -> None:
    """The event loop waits for each copy: memory that is new to a process is slow at first."""
    channel: Channel[Any] = Channel(ToEngine, lambda _: None)
    channel.connection_made(Transport())
    n_bytes = 8 * 2**20
    body = AnswerBody("tokenize", b"x" * n_bytes)
    tracemalloc.start()
    try:
        channel.send(Query("a", body))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.9 * n_bytes


@pytest.mark.parametrize("received", [ToEngine, FromEngine, ToPrompts, FromPrompts])
async def test_a_mutated_message_is_passed_on_or_closes_the_channel(received: Any) -> None:
    """A damaged frame is a valid message or closes the channel, and has no other effect."""
    rng = random.Random(1)
    for _ in range(10_000 if LONG else 300):
        messages: list[Any] = []
        lost: list[str] = []
        channel: Channel[Any] = Channel(received, messages.append, lost.append)
        channel.connection_made(Transport())
        data = bytearray(msgspec.msgpack.encode(rng.choice(MESSAGES)) + rng.randbytes(rng.randint(0, 9)))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        channel.data_received(len(data).to_bytes(4, "little") + data)
        assert len(messages) + len(lost) == 1
