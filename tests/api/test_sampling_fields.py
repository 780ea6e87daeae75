"""Sampling fields: the bounds of each, and what a reply says of them."""

from __future__ import annotations

from typing import Any

import pytest

from llamaslot.base.generation.sampling import SAMPLERS
from llamaslot.protocol.bodies import MAX_BREAKER_CHARS, MAX_BREAKERS, MAX_SAMPLERS

NATIVE = "/completion"
HELLO = {"prompt": "Hello", "n_predict": 1}
INT32_MAX = 2**31 - 1

BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("dynatemp_range", [0, 100], [-0.1, 100.1, "x"]),
    ("dynatemp_exponent", [0, 100], [-0.1, 100.1, []]),
    ("top_n_sigma", [-100, -1, 0, 100], [-100.1, 100.1, True]),
    ("xtc_probability", [0, 1], [-0.1, 1.1]),
    ("xtc_threshold", [0, 1], [-0.1, 1.1]),
    ("dry_multiplier", [0, 100], [-0.1, 100.1]),
    ("dry_base", [1, 100], [-0.1, 100.1]),
    ("dry_allowed_length", [0, INT32_MAX], [-1, INT32_MAX + 1, 0.5]),
    ("dry_penalty_last_n", [-1, 0, INT32_MAX], [-2, INT32_MAX + 1, "1"]),
    ("mirostat", [0, 1, 2], [-1, 3, "2"]),
    ("mirostat_tau", [0, 100], [-0.1, 100.1]),
    ("mirostat_eta", [0, 100], [-0.1, 100.1]),
    ("adaptive_target", [-1, 1], [-1.1, 1.1]),
    ("adaptive_decay", [0, 0.99], [-0.1, 1.0]),
    ("min_keep", [0, INT32_MAX], [-1, INT32_MAX + 1]),
    ("n_keep", [-1, 0, INT32_MAX], [-2, INT32_MAX + 1]),
    ("n_discard", [0, INT32_MAX], [-1, INT32_MAX + 1]),
]


@pytest.mark.parametrize(("field", "allowed", "refused"), BOUNDS, ids=[name for name, _, _ in BOUNDS])
async def test_each_field_has_bounds(server: Any, field: str, allowed: list[Any], refused: list[Any]) -> None:
    for value in allowed:
        reply = await server.ok(NATIVE, {**HELLO, field: value})
        assert reply["generation_settings"][field] == value
    for value in refused:
        status, reply = await server.post(NATIVE, {**HELLO, field: value})
        assert (status, reply["error"]["param"]) == (400, field), value


async def test_sequence_breakers_are_bounded(server: Any) -> None:
    async def breakers(value: Any) -> tuple[int, Any]:
        status, reply = await server.post(NATIVE, {**HELLO, "dry_sequence_breakers": value})
        if status == 200:
            return status, reply["generation_settings"]["dry_sequence_breakers"]
        assert reply["error"]["param"].startswith("dry_sequence_breakers"), reply
        return status, None

    assert await breakers(None) == (200, ["\n", ":", '"', "*"])
    for allowed in (["é"], [""], ["x" * MAX_BREAKER_CHARS], ["a"] * MAX_BREAKERS):
        assert await breakers(allowed) == (200, allowed)
    for refused in ([], "a", [1], ["x" * (MAX_BREAKER_CHARS + 1)], ["a"] * (MAX_BREAKERS + 1)):
        assert await breakers(refused) == (400, None)


async def test_samplers_are_bounded_and_shown_by_their_names(server: Any) -> None:
    async def samplers(value: Any) -> tuple[int, Any]:
        status, reply = await server.post(NATIVE, {**HELLO, "samplers": value})
        if status == 200:
            return status, reply["generation_settings"]["samplers"]
        assert reply["error"]["param"].startswith("samplers"), reply
        return status, None

    for default in (None, "", "edskypmxt", list(SAMPLERS)):
        assert await samplers(default) == (200, list(SAMPLERS))
    assert await samplers("tk") == (200, ["temperature", "top_k"])
    assert await samplers(["Top-P", "unknown", "penalties"]) == (200, ["top_p", "penalties"])
    assert await samplers([]) == (200, [])
    assert await samplers("k" * MAX_SAMPLERS) == (200, ["top_k"] * MAX_SAMPLERS)
    for refused in ("k" * (MAX_SAMPLERS + 1), ["top_k"] * (MAX_SAMPLERS + 1), ["k" * 65], [[]], 5, ["infill"]):
        assert await samplers(refused) == (400, None)


async def test_a_dry_base_below_1_is_the_default(server: Any) -> None:
    for base in (0, 0.99):
        reply = await server.ok(NATIVE, {**HELLO, "dry_base": base})
        assert reply["generation_settings"]["dry_base"] == 1.75


async def test_props_list_every_sampling_setting_and_can_be_sent_back(server: Any) -> None:
    _, props = await server.get("/props")
    params = props["default_generation_settings"]["params"]
    assert {field for field, _, _ in BOUNDS} < set(params)
    assert "dry_sequence_breakers" not in params, "it is text that another client may have sent"
    assert params["samplers"] == list(SAMPLERS)
    reply = await server.ok(NATIVE, {**HELLO, **params, "n_predict": 1, "max_tokens": 1})
    shown = reply["generation_settings"]
    for name in set(params) - {"seed", "n_predict", "max_tokens"}:
        assert shown[name] == params[name], name


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [("n_indent", [0, INT32_MAX], [-1, INT32_MAX + 1]), ("t_max_predict_ms", [-1, 0, 2**63 - 1], [-2, 2**63])],
)
async def test_limits_of_the_text_have_bounds(
    server: Any, field: str, allowed: list[int], refused: list[int]
) -> None:
    for value in allowed:
        await server.ok(NATIVE, {**HELLO, field: value})
    for value in refused:
        status, reply = await server.post(NATIVE, {**HELLO, field: value})
        assert (status, reply["error"]["param"]) == (400, field), value


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", NATIVE])
async def test_a_stream_reports_the_progress_of_its_prompt(server: Any, path: str) -> None:
    text = "word " * 20
    body = {"prompt": text, "messages": [{"role": "user", "content": text}], "max_tokens": 3, "ignore_eos": True}
    body |= {"return_progress": True}
    for n_warm in (0, 1):
        events = [event for event in await server.stream(path, body) if event != "[DONE]"]
        reports = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        total = reports[0]["total"]
        assert total > 100
        assert {(report["total"], report["cache"]) for report in reports} == {(total, (total - 1) * n_warm)}
        processed = [report["processed"] for report in reports]
        assert processed[0] == reports[0]["cache"]
        assert processed[-1] == total
        assert processed == sorted(set(processed))
        assert all(isinstance(report["time_ms"], int) for report in reports)
    if path.endswith("chat/completions"):
        roles = ["role" in event["choices"][0]["delta"] for event in events]
        assert roles == [True] + [False] * (len(events) - 1)
    plain = await server.stream(path, {**body, "return_progress": False})
    assert not any("prompt_progress" in event for event in plain if event != "[DONE]")
    assert "prompt_progress" not in await server.ok(path, body), "there is none without a stream"
