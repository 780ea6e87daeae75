"""Sampled conversations that come back as text: how many of their turns compute only their new text.

Sampled tokens need not be those that the vocabulary would give their text. Conversations at temperature 1 are held
over HTTP with a server that keeps text anchors for such replies, and with one that does not; text goes back as it
was sent. Without a given model, the weights are random and the vocabulary is Qwen2, from the source of llama.cpp:
hardly any reply has the tokens of its text.

Prompts go to `/completion`, as a chat template renders them. A reply in which a control token is left out of the
text or written out gets no anchor: turns after it that computed more are counted separately.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.progress import Progress
from rich.table import Table

from bench import synthetic
from bench.client import BenchmarkError
from bench.peers import build
from bench.report import console, machine, write_json
from bench.server import llamaslot, serving

TURNS = 4
REPLY = 32
"""Tokens of a reply."""
AT_ONCE = 4
_END = "<|im_end|>\n"
_WORDS = ("the", "river", "of", "small", "things", "went", "over", "a", "bridge", "and", "never", "came", "home")
_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SERVERS = {"anchors": (), "no anchors": ("--no-text-anchors",)}


def run(*, model: Path | None, title: str, folder: Path, server_flags: Sequence[str], conversations: int) -> None:
    """Hold so many conversations with each server, print what their turns computed; `retokenizing.json`."""
    model = model or synthetic.ensure("tiny-qwen2", vocabulary=build.vocabulary("qwen2"))
    about = machine()
    results = {}
    for name, flags in SERVERS.items():
        log = folder / f"retokenizing-{name.replace(' ', '-')}.log"
        command = llamaslot(model, "-np", str(AT_ONCE), "-c", "16384", *server_flags, *flags)
        results[name] = dict(asyncio.run(_held(name, command, log, conversations)))
    table = Table(title=f"{conversations} conversations of {TURNS} turns at temperature 1: {title}")
    kinds = ("only new text", "a control token in a reply", "more")
    for column in ("", "turns", *kinds, "prompt tokens computed"):
        table.add_column(column, justify="left" if not column else "right")
    for name, counts in results.items():
        n = sum(counts.get(kind, 0) for kind in kinds)
        shares = (f"{counts.get(kind, 0):,} ({counts.get(kind, 0) / n:.1%})" for kind in kinds)
        table.add_row(name, f"{n:,}", *shares, f"{counts['computed']:,} of {counts['tokens']:,}")
    console.print(table)
    found = {"machine": about, "model": title, "conversations": conversations, "results": results}
    write_json(folder / "retokenizing.json", found)


async def _held(name: str, command: Sequence[str], log: Path, conversations: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    async with serving(command, log=log) as server, aiohttp.ClientSession(server.url) as session:
        with Progress() as progress:
            task = progress.add_task(name, total=conversations)
            left = iter(range(conversations))

            async def hold() -> None:
                for i in left:
                    await _converse(session, i, counts)
                    progress.advance(task)

            await asyncio.gather(*(hold() for _ in range(AT_ONCE)))
    return counts


async def _converse(session: aiohttp.ClientSession, number: int, counts: Counter[str]) -> None:
    """A conversation; counts its turns behind a reply by what they computed."""
    rng = random.Random(number)
    text = ""
    is_hidden = False
    for turn in range(TURNS):
        said = " ".join(rng.choices(_WORDS, k=20))
        new = f"{_END if turn else ''}<|im_start|>user\n{said}{_END}<|im_start|>assistant\n"
        text += new
        body = {"prompt": text, "n_predict": REPLY, "seed": 1000 * number + turn, "return_tokens": True}
        reply = await _post(session, "/completion", body | _SAMPLING)
        if turn:
            n_new = len((await _post(session, "/tokenize", {"content": new, "parse_special": True}))["tokens"])
            # The last token of a reply is sampled and never computed.
            is_known = reply["timings"]["prompt_n"] <= n_new + 1
            kind = "only new text" if is_known else "a control token in a reply" if is_hidden else "more"
            counts[kind] += 1
            counts["computed"] += reply["timings"]["prompt_n"]
            counts["tokens"] += reply["tokens_evaluated"]
        if reply["stop_type"] not in ("limit", "eos"):
            raise BenchmarkError(f"a reply ended otherwise: {reply['stop_type']}")
        sent = reply["tokens"][: -1 if reply["stop_type"] == "eos" else None]
        is_hidden = await _hides_control(session, sent, reply["content"])
        text += reply["content"]


async def _hides_control(session: aiohttp.ClientSession, tokens: Sequence[int], content: str) -> bool:
    """True if control tokens of a reply gave no text, or if its text writes one out."""
    written = (await _post(session, "/detokenize", {"tokens": tokens}))["content"]
    return written != content or any(control in content for control in synthetic.SPECIALS)


async def _post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(path, json=body) as response:
        reply: dict[str, Any] = await response.json()
        if response.status != 200:
            raise BenchmarkError(f"{path}: {reply}")
        return reply
