"""Every message between service and engine survives encoding, so that the engine could be another process."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import pytest

from llamaslot.base.commands import Command, Sampling, Submit, TextPart, TokensPart
from llamaslot.base.events import TERMINAL, Event, Progress
from llamaslot.base.stats import CacheFigures, CachePrefix, SlotReport

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
    "request_id": "r-1",
    "prompt": (TextPart("a\u20ac", special=False), TokensPart((1, 2))),
    "sampling": SAMPLING,
    "progress": PROGRESS,
    "slots": (SlotReport(0, 128, 7), SlotReport(1, 128, 9, request_id="r-1", sampling=SAMPLING)),
    "stop": ("x", "\n"),
    "pieces": (b"\xff", b"a"),
    "tokens": (3, 4),
    "reason": "word",
    "action": "restore",
    "filename": "a.bin",
    "content": "text",
    "n_prompt": 9,
    "submits": (Submit("r-1", (TextPart("a"),), group="g"), Submit("r-2", (TextPart("a"),), group="g")),
    "cache": CacheFigures(cells_total=64, n_hits=3),
    "figures": CacheFigures(cells_used=9),
    "prefixes": (
        CachePrefix(
            parent=-1,
            namespace=0,
            n_tokens=7,
            n_edge=7,
            hits=2,
            holders=(0, 5),
            pinned=True,
            last_used=1,
            text="a\u20ac",
        ),
    ),
}


def example(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """A message of a kind with a value in every field that has none by itself, and some more."""
    fields = {f.name: f for f in msgspec.structs.fields(kind)}
    values = {name: VALUES[name] for name in fields if name in VALUES}
    for name, field in fields.items():
        if field.required and name not in values:
            values[name] = {str: "s", int: 3, bool: True, "str": "s", "int": 3}[field.type]
    return kind(**values)


@pytest.mark.parametrize("kind", [*get_args(Command), *get_args(Event)], ids=lambda kind: kind.__name__)
def test_a_message_comes_back_equal(kind: type[msgspec.Struct]) -> None:
    union = Command if kind in get_args(Command) else Event
    message = example(kind)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


def test_every_terminal_event_is_an_event() -> None:
    assert set(TERMINAL) <= set(get_args(Event))
