"""Prompt tokens computed and time to first token in an agent's tool loop, with and without restored messages.

A grammar makes random weights call one tool in every step, with arguments and spacing of their own: the template
renders the call in another way when it comes back. As many agents do, the client sends back the calls and drops the
reasoning. The vocabulary is Qwen3's and so is the template, from the source of llama.cpp.

All servers run at once, and one after the other takes each step, in random order: so a machine whose speed changes
within minutes is equally fast for all.

llama-server takes no grammar beside tools. There the template gets the tools as a variable, and the client reads
the call from the text: prompts are the same.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import secrets
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import synthetic
from bench.client import Answer, BenchmarkError, Client, Message
from bench.peers import build
from bench.peers.servers import CommonSettings, ServerSetup
from bench.progress import progress
from bench.report import Summary, console, machine, write_json
from bench.server import Server, serving
from bench.tokens import Tokens

SHAPE = "60m-qwen3"
TEMPLATE = "Qwen-Qwen3-0.6B"
STEPS = 10
SYSTEM_TOKENS, TASK_TOKENS, RESULT_TOKENS = 3000, 60, 200
CONTEXT = 16_384
MAX_TOKENS = 256
TEXT_CALL = re.compile("<tool_call>(.*)</tool_call>", re.DOTALL)
TEXT_NAME = re.compile(r'<tool_call>\s*{\s*"name":\s*"[^"]*"')
"""A call in text up to the end of the tool's name."""
_CALL = r"""
call ::= "<tool_call>\n{" s "\"name\":" s "\"read_file\"," s "\"arguments\":" s arguments s "}\n</tool_call>"
arguments ::= "{" s "\"path\":" s path "," s "\"lines\":" s "[" number "," s number "]" s "}"
path ::= "\"src/module_" [a-z] [a-z] ".py\""
number ::= [1-9] [0-9] [0-9]?
s ::= " "?
"""
GRAMMARS = {
    False: "root ::= call" + _CALL,
    True: r'root ::= "<think>\n" [a-z ]{60,90} "\n</think>\n\n" call' + _CALL,
}
"""GBNF of a step, without and with reasoning."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read lines of a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "lines": {"type": "array", "items": {"type": "integer"}, "description": "First and last."},
            },
            "required": ["path", "lines"],
        },
    },
}
SERVERS = (
    ServerSetup("llama-server", "llama-server", ("-kvu",)),
    ServerSetup("llamaslot, nothing restored", "llamaslot", ("--no-restore-messages",)),
    ServerSetup("llamaslot", "llamaslot"),
)


@dataclass(frozen=True)
class Step:
    """One request of a loop; times in seconds."""

    server: str
    reasons: bool
    repeat: int
    number: int
    prompt_tokens: int
    computed_tokens: int
    restored_tokens: int
    """Of calls and reasoning, from remembered messages."""
    ttft: float
    """Until the first event with reasoning, or the one that completes the tool's name."""
    prefill: float
    """As the server measures it."""


def run(
    *, model: Path | None, title: str, repeats: int, threads: int, folder: Path, server_flags: Sequence[str]
) -> None:
    """Measure, print a table for each kind of loop, write `toolloop.json` and the servers' logs.

    A given model needs a chat template in which tools are called in Hermes' form, as Qwen3 and Hermes do.
    """
    facts = machine()
    template = []
    if model is None:
        model = synthetic.ensure(SHAPE, vocabulary=build.vocabulary("qwen2"))
        template = ["--chat-template-file", str(build.chat_template(TEMPLATE))]
    common = CommonSettings(model, 1, threads, CONTEXT, ("--jinja", *template, *server_flags))
    steps = asyncio.run(_measure(common, Tokens(model), repeats, folder))
    for reasons in (False, True):
        console.print(table([step for step in steps if step.reasons is reasons], title, reasons=reasons))
    settings = {
        "model": title,
        "template": Path(template[-1]).name if template else "",
        "flags": " ".join(server_flags),
        "repeats": repeats,
    }
    settings |= {"threads": threads, "steps": STEPS, "result_tokens": RESULT_TOKENS}
    content = {"benchmark": "toolloop", "settings": settings, "machine": facts}
    write_json(folder / "toolloop.json", content | {"steps": [asdict(step) for step in steps]})


async def _measure(common: CommonSettings, tokens: Tokens, repeats: int, folder: Path) -> list[Step]:
    steps: list[Step] = []
    run_id = secrets.token_hex(8)
    order = random.Random(run_id)
    with progress("tool loops", 2 * repeats * STEPS) as advance:
        for repeat, reasons in itertools.product(range(repeats), GRAMMARS):
            async with AsyncExitStack() as running:
                loops = {}
                for setup in SERVERS:
                    server = await running.enter_async_context(_serving(setup, common, folder, reasons=reasons))
                    client = server.client
                    # The first constraint waits for the grammar's tokenizer.
                    await _Loop(client, tokens, "warm-up", reasons=reasons, is_peer=setup.is_peer).step()
                    words = f"{run_id} {repeat} {reasons}"
                    loops[setup.name] = _Loop(client, tokens, words, reasons=reasons, is_peer=setup.is_peer)
                for number in range(1, STEPS + 1):
                    for name in order.sample(list(loops), len(loops)):
                        steps.append(_step(await loops[name].step(), name, reasons, repeat, number))
                    advance(f"step {number}")
    return steps


def _serving(
    setup: ServerSetup, common: CommonSettings, folder: Path, *, reasons: bool
) -> AbstractAsyncContextManager[Server]:
    command = setup.command(common)
    if not setup.is_peer:
        grammar = folder / f"toolloop-{'reasoning' if reasons else 'call'}.gbnf"
        grammar.write_text(GRAMMARS[reasons])
        command += ["--grammar-file", str(grammar)]
    return serving(command, log=folder / f"toolloop-{'-'.join((setup.kind, *setup.flags))}.log")


class _Loop:
    """An agent that calls the tool in every step; `words` is the seed of its texts."""

    def __init__(self, client: Client, tokens: Tokens, words: str, *, reasons: bool, is_peer: bool) -> None:
        self._client = client
        self._tokens = tokens
        self._is_peer = is_peer
        variables: dict[str, Any] = {"enable_thinking": reasons}
        self._fields: dict[str, Any] = {"tools": [_TOOL], "chat_template_kwargs": variables}
        if is_peer:
            self._fields = {"grammar": GRAMMARS[reasons], "chat_template_kwargs": variables | {"tools": [_TOOL]}}
        self._words = random.Random(words)
        self._messages: list[Message] = [
            {"role": "system", "content": tokens.draw(self._words, SYSTEM_TOKENS)},
            {"role": "user", "content": tokens.draw(self._words, TASK_TOKENS)},
        ]

    async def step(self) -> Answer:
        """Send the conversation, and add the call and its result to it."""
        seed = self._words.randrange(2**31)
        answer = await self._client.chat(
            self._messages, max_tokens=MAX_TOKENS, temperature=1.0, seed=seed, **self._fields
        )
        call = self._call(answer, len(self._messages))
        self._messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        result = self._tokens.draw(self._words, RESULT_TOKENS)
        self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return answer

    def _call(self, answer: Answer, number: int) -> dict[str, Any]:
        if self._is_peer and (found := TEXT_CALL.search(answer.text)):
            call = json.loads(found[1])
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            return {"id": f"call_{number}", "type": "function", "function": function}
        if len(answer.tool_calls) != 1:
            raise BenchmarkError(
                f"a step did not call the tool but ended for {answer.finish_reason!r}: {answer.text}"
            )
        return answer.tool_calls[0]


def _step(answer: Answer, server: str, reasons: bool, repeat: int, number: int) -> Step:
    return Step(
        server=server,
        reasons=reasons,
        repeat=repeat,
        number=number,
        prompt_tokens=answer.prompt_tokens,
        computed_tokens=answer.computed,
        restored_tokens=answer.restored_tokens,
        ttft=_ttft(answer),
        prefill=answer.timings["prompt_ms"] / 1000,
    )


def _ttft(answer: Answer) -> float:
    """Time until the client has reasoning to show or knows which tool is called, whatever it gets first.

    llamaslot sends the first part of a call once the tool's name is complete, so text counts from there on too.
    """
    seen = ""
    for came, piece in zip(answer.arrivals, answer.pieces, strict=True):
        seen += piece
        if not "<tool_call>".startswith(seen[: len("<tool_call>")]) or not piece or TEXT_NAME.match(seen):
            return came - answer.started
    return answer.total


def table(steps: Sequence[Step], title: str, *, reasons: bool) -> Table:
    """A line for each server: the first step, and the median of those after it."""
    kind = "reasoning that the client drops" if reasons else "no reasoning"
    result = Table(
        title=f"{STEPS} tool steps, {kind}: {title}",
        caption=f"median (range) of steps 2 to {STEPS}; a tool result has {RESULT_TOKENS} tokens; times in ms",
    )
    for heading in ("server", "computed, step 1", "computed", "prefill", "TTFT"):
        result.add_column(heading, justify="left" if heading == "server" else "right")
    for name in dict.fromkeys(step.server for step in steps):
        own = [step for step in steps if step.server == name]
        later = [step for step in own if step.number > 1]
        computed = Summary.of([step.computed_tokens for step in later])
        times = [Summary.of(values).milliseconds() for values in _times(later)]
        result.add_row(
            name,
            f"{Summary.of([step.computed_tokens for step in own if step.number == 1]).median:,.0f}",
            f"{computed.median:,.0f} ({computed.low:,.0f}-{computed.high:,.0f})",
            *(f"{median} ({spread})" for median, _, spread in times),
        )
    return result


def _times(steps: Sequence[Step]) -> list[list[float]]:
    return [[step.prefill for step in steps], [step.ttft for step in steps]]
