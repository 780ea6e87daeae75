"""Compares the replies of llama-server and llamaslot to the same 60 greedy requests.

Without a constraint both must generate the same token ids. Where they diverge, the logits of llama-server's two
best tokens at that place must be closer together than rounding moves them (`NOISE`): such requests are counted, and
not compared further. With a schema both replies must be valid and end for the same reason: the two follow the same
schema with different masks, which allow whitespace in different places.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
from rich.table import Table

from bench.peers import build
from bench.report import console, machine, notes, write_json
from bench.server import llamaslot, serving

NOISE = 0.1
"""Logits: twice what chunking alone moves the distance of two tokens on the embedded model (MODEL_CARD.md)."""
PEER, OWN = "llama-server", "llamaslot"

_NAMES = ("Ada", "Bruno", "Clara", "Diego", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas")
_ANIMALS = ("dog", "cat", "horse", "parrot", "rabbit")
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 4},
    {"enum": ["red", "green", "blue"]},
    {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}}, "required": ["ok", "n"]},
)

_SCORED = {"logprobs": True, "top_logprobs": 2}


@dataclass(frozen=True)
class Case:
    """One request, and the schema that its reply must match, if there is one."""

    path: str
    body: Mapping[str, Any]
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Difference:
    """A request to which the two servers replied differently."""

    case: int
    what: str
    peer: str
    own: str


def cases() -> list[Case]:
    """Return the requests: 20 texts, 20 chats, and 20 with a schema."""
    greedy = {"temperature": 0, "n_probs": 2}
    result = []
    for i in range(20):
        name, animal = _NAMES[i % 10], _ANIMALS[i % 5]
        told = [
            {"role": "user", "content": f"My {animal} is called {name}."},
            {"role": "assistant", "content": f"Your {animal} is called {name}."},
            {"role": "user", "content": f"What is my {animal} called?"},
        ]
        more: dict[str, Any] = {"n_predict": 8 + 4 * (i % 4)} | (
            {"stop": [" is"]} if i % 3 == 0 else {"ignore_eos": i % 3 == 1}
        )
        result.append(Case("/completion", {"prompt": f"{name} has a {animal}. The {animal}", **greedy, **more}))
        result.append(
            Case("/v1/chat/completions", {"messages": told, "temperature": 0, "max_tokens": 40, **_SCORED})
        )
        schema = _SCHEMAS[i % len(_SCHEMAS)]
        form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
        constrained = {"messages": told, "temperature": 0, "max_tokens": 100, "response_format": form}
        result.append(Case("/v1/chat/completions", constrained, schema))
    return result


def run(*, model: Path, title: str, threads: int, folder: Path, server_flags: Sequence[str]) -> int:
    """Run the comparison; returns the exit status."""
    return asyncio.run(_run(model, title=title, threads=threads, folder=folder, server_flags=server_flags))


async def _run(model: Path, *, title: str, threads: int, folder: Path, server_flags: Sequence[str]) -> int:
    """Send the requests to both servers, print and write what differs; 1 if noise does not explain all of it."""
    facts = machine()
    common = ["-c", "16384", "-np", "4", "-t", str(threads), "-fa", "on", *server_flags]
    commands = {
        PEER: [str(build.llama_server()), "-m", str(model), *common],
        OWN: llamaslot(model, *common),
    }
    asked = cases()
    replies: dict[str, list[dict[str, Any]]] = {}
    for name, command in commands.items():
        notes.print(f"{name}: {len(asked)} requests")
        async with serving(command, log=folder / f"{name}.log") as server:
            replies[name] = [await server.client.post(case.path, **case.body) for case in asked]
    differences: list[Difference] = []
    counts: Counter[str] = Counter()
    for i, case in enumerate(asked):
        found = _compared(i, case, replies[PEER][i], replies[OWN][i])
        counts["equal" if not found else "near-tie" if found[0].what == "near-tie" else "different"] += 1
        differences += found
    console.print(_table(counts, differences, title))
    write_json(
        folder / "parity.json",
        {"machine": facts, "model": title, "counts": counts, "differences": [asdict(each) for each in differences],
         "replies": replies},
    )  # fmt: skip
    return int(counts["different"] > 0)


def _compared(number: int, case: Case, peer: Mapping[str, Any], own: Mapping[str, Any]) -> list[Difference]:
    """Return how two replies differ."""
    if case.schema is not None:
        return _differences(number, _constrained_facts(peer, case.schema), _constrained_facts(own, case.schema))
    peer_row, own_row = _tokens(peer), _tokens(own)
    pairs = enumerate(zip(peer_row, own_row, strict=False))
    n = next((i for i, (a, b) in pairs if a["id"] != b["id"]), None)
    if n is None:
        return _differences(number, _facts(peer), _facts(own))
    best = [each["logprob"] for each in peer_row[n]["top_logprobs"]]
    gap = best[0] - best[1]
    what = "near-tie" if gap < NOISE else "tokens"
    return [Difference(number, what, f"{peer_row[n]['id']} at {n}, {gap:.3f} apart", str(own_row[n]["id"]))]


def _differences(number: int, peer: Mapping[str, Any], own: Mapping[str, Any]) -> list[Difference]:
    """Return the facts of two replies that are not equal."""
    return [Difference(number, name, str(peer[name]), str(own[name])) for name in peer if peer[name] != own[name]]


def _tokens(reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens of a reply with their two best alternatives."""
    if "choices" in reply:
        return list(reply["choices"][0]["logprobs"]["content"])
    return list(reply.get("completion_probabilities", ()))


def _facts(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return text, counts and reasons of a reply."""
    if "choices" in reply:
        choice, usage = reply["choices"][0], reply["usage"]
        return {
            "content": choice["message"]["content"],
            "finish_reason": choice["finish_reason"],
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
        }
    names = ("content", "stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated", "truncated")
    return {name: reply[name] for name in names}


def _constrained_facts(reply: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal in replies with a schema."""
    choice = reply["choices"][0]
    return {
        "valid": _is_valid(choice, schema),
        "finish_reason": choice["finish_reason"],
        "prompt_tokens": reply["usage"]["prompt_tokens"],
    }


def _is_valid(choice: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """Return True if the content matches the schema, according to a validator that has no part in decoding."""
    try:
        jsonschema.validate(msgspec.json.decode(choice["message"]["content"]), schema)
    except (msgspec.DecodeError, jsonschema.ValidationError):
        return False
    return True


def _table(counts: Mapping[str, int], differences: Sequence[Difference], title: str) -> Table:
    shown = ", ".join(f"{n} {what}" for what, n in counts.items())
    table = Table("request", "what", PEER, OWN, title=f"{title}: {shown}", title_justify="left")
    for each in differences:
        table.add_row(str(each.case), each.what, each.peer[:50], each.own[:50])
    return table
