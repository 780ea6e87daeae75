"""Conversations with a real model about passages of the documentation: turns, forks, and edits far back."""

from __future__ import annotations

import fcntl
import pickle
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from llamaslot.text.template import ChatTemplate
from tests.real.cold import LONG_SHAPES, SHAPES, ColdModel, Control, Reply
from tests.real.conftest import REAL, path_of
from tests.text.rendering import rendered

ROOT = Path(__file__).resolve().parents[2]
GEMMA_TEMPLATE = ROOT / "llamaslot" / "text" / "templates" / "gemma.jinja"
"""Its GGUF has none."""
N_TOKENS = 32 if REAL else 10
"""Tokens of a cold reply; warm ones have as many at most."""
N_SHORT, N_LONG = (10, 2) if REAL else (2, 0)
"""Families of prompts a model."""
N_IN_BATCH = 4
"""Families of a batch, whose cold runs are its control."""
PASSAGE_CHARS = 600 if REAL else 160
"""Prompts get 60 to 330 tokens."""
LONG_CHARS = {"smollm2": (8_500, 9_500), "gemma3": (9_000, 15_500)}
"""Prompts get 2,000 to 2,400 and 2,000 to 4,000 tokens."""
QUESTIONS = (
    "What is this text about?",
    "Summarize it in one sentence.",
    "Which word is the most important one here, and why?",
    "Write a short poem about it.",
    "Explain it to a child of eight.",
    "Name three facts from the text.",
    "Who should read this?",
    "Translate the first sentence into French.",
)
REMEMBERED_TOKENS = 24
"""Tokens of a reply that the next turn repeats."""


def passages(n_chars: int, chance: random.Random, n: int) -> list[str]:
    """Return passages of the documentation of about `n_chars` characters, which begin with a paragraph."""
    text = "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    starts = [match.end() for match in re.finditer(r"\n\n(?=[A-Z])", text) if match.end() < len(text) - n_chars]
    return [text[start : start + n_chars].strip() for start in chance.sample(starts, n)]


def edited(text: str, place: float) -> str:
    """Return the text with another word at about `place`, a share of its length."""
    words = text.split(" ")
    words[min(int(place * len(words)), len(words) - 1)] = "zebras"
    return " ".join(words)


@dataclass
class Family:
    """Prompts that share prefixes, with their cold replies."""

    prompts: list[str] = field(default_factory=list)
    cold: dict[str, Reply] = field(default_factory=dict)
    others: dict[str, list[Reply]] = field(default_factory=dict)
    """Replies to the same prompts in other chunks and cells."""

    def control(self, control: Control) -> None:
        """Add what cold runs differ in."""
        for prompt in self.prompts:
            for other in self.others[prompt]:
                control.add(self.cold[prompt], other)


def family(
    model: ColdModel, template: ChatTemplate, passage: str, chance: random.Random, n_tokens: int, *, is_long: bool
) -> Family:
    """Ask about a passage: turns, a fork, an edit of the passage, and a turn behind the edit.

    Replies that later turns repeat are the model's own, so that KV of generated tokens is reused, too.
    """
    made = Family()
    first, second, third, fork = chance.sample(QUESTIONS, 4)
    shapes = LONG_SHAPES if is_long else SHAPES if REAL else (SHAPES[0], SHAPES[-1])

    def asked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the conversation with the reply to it."""
        prompt = rendered(template, messages)
        if prompt not in made.cold:
            ids = model.tokenize(prompt)
            made.prompts.append(prompt)
            made.cold[prompt] = model.reply(ids, n_tokens)
            made.others[prompt] = [model.reply(ids, n_tokens, shape) for shape in shapes[1:]]
        reply = model.text(made.cold[prompt].tokens[:REMEMBERED_TOKENS])
        return [*messages, {"role": "assistant", "content": reply}]

    def opening(text: str, question: str) -> list[dict[str, Any]]:
        return [user(f"{text}\n\n{question}")]

    turn = asked(opening(passage, first))
    if is_long:
        asked([*turn, user(second)])
        asked(opening(passage, fork))
        asked(opening(edited(passage, chance.uniform(0.3, 0.8)), first))
        return made
    turn = asked([*turn, user(second)])
    asked([*turn[:2], user(fork)])
    changed = asked(opening(edited(passage, chance.uniform(0.2, 0.9)), first))
    if REAL:
        asked([*turn, user(third)])
        asked([*changed, user(second)])
    return made


def user(content: str) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": content}


@cache
def cold_model(name: str) -> ColdModel:
    return ColdModel(path_of(name), 8192)


def families(name: str, batch: int, shared: Path, *, is_long: bool = False) -> list[Family]:
    """Return the families of a batch, with cold replies that other processes of this run may have computed."""
    total, n = (N_LONG, 2) if is_long else (N_SHORT, N_IN_BATCH)
    return [family_of(name, (batch * n + i) % total, is_long, shared) for i in range(min(n, total))]


@cache
def family_of(name: str, index: int, is_long: bool, shared: Path) -> Family:
    """Return a family of prompts."""
    path = shared / f"{name}-{index}{'-long' * is_long}.pickle"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            model, chance = cold_model(name), random.Random(index)
            template = GEMMA_TEMPLATE.read_text() if name == "gemma3" else model.backend.info.chat_template
            n_chars = chance.randint(*LONG_CHARS[name]) if is_long else PASSAGE_CHARS
            [passage] = passages(n_chars, chance, 1)
            rendering = ChatTemplate(template, bos_token="", eos_token="")
            n_tokens = 16 if is_long else N_TOKENS
            made = family(model, rendering, passage, chance, n_tokens, is_long=is_long)
            path.write_bytes(pickle.dumps(made))
    found: Family = pickle.loads(path.read_bytes())
    return found
