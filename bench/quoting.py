"""Prompts for `bench.speculate`: a file to rewrite, results of tools to quote, and a chat that repeats nothing.

A trained model copies by itself, so `RealPrompts` asks it to, and begins the reply. Random weights copy nothing.
A grammar could lead them, but llamaslot appends the tokens that a grammar forces without sampling, and llama-server
takes about 20 ms for each: something else would be measured. So `ChainPrompts` is for weights in which each word
is followed by the next one of the vocabulary (`bench.synthetic`): the reply to a prompt that ends with the word
before a stretch of words is that stretch. The prompt has parts of it, changed in places, and no server knows more
than the prompt.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench import synthetic
from bench.client import BenchmarkError
from bench.report import ROOT
from bench.tokens import Tokens

FILE_TOKENS, REWRITTEN_TOKENS = 1500, 400
"""Of the file, and of the reply: the start of the rewritten file."""
CHANGED = 0.05
"""Share of the file's lines that are others in the reply."""
N_RESULTS, RESULT_TOKENS, QUOTING_TOKENS = 4, 250, 200
"""Results of tools, tokens of each, and of the reply that quotes them."""
CHAT_TOKENS, CHAT_REPLY_TOKENS = 100, 160
LONGEST = FILE_TOKENS + REWRITTEN_TOKENS
REWRITE, TOOLS, CHAT = "rewrite", "tool loop", "chat"
"""Kinds of prompts."""
_LINE = 10
"""Words of a line in a chain's file."""
_PIECE = 40
"""Words that are quoted at once, or not."""
_QUOTED_PIECES = (0, 1, 3, 4)
"""Of each five pieces of a reply, those that a result has."""
_HEAD_LINES, _HEAD_WORDS = 2, 12
"""Lines of the file, or words of the result, with which the reply of a trained model begins."""
_TOPICS = (
    *("rain", "bread", "a bicycle", "the moon", "a lighthouse", "chess", "glass", "a beehive", "tea", "a glacier"),
    *("a violin", "salt", "a library", "wool", "an orchard", "a harbour", "paper", "a compass", "snow", "a mill"),
)
_QUESTIONS = (
    "Write a short story about {}, {} and {}.",
    "Explain to a child of eight how {}, {} and {} belong together.",
    "What would a historian want to know about {}, {} and {}?",
    "Describe a day on which everything depends on {}, {} and {}.",
    "Give advice to somebody who knows nothing about {}, {} and {}.",
)


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the number of tokens of its reply."""

    ids: list[int]
    n_reply: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request."""


class Prompts(Protocol):
    """Draws prompts for a model."""

    def draw(self, kind: str, chance: random.Random) -> Prompt: ...


class ChainPrompts:
    """Prompts for a chain; `scale` shortens them and their replies."""

    def __init__(self, n_vocab: int, scale: float = 1.0) -> None:
        self._words = range(len(synthetic.quiet_tokens()), n_vocab)
        self._scale = scale

    def draw(self, kind: str, chance: random.Random) -> Prompt:
        """Return a prompt of a kind."""
        made = {REWRITE: self._rewrite, TOOLS: self._tools, CHAT: self._chat}
        return made[kind](chance)

    def _rewrite(self, chance: random.Random) -> Prompt:
        """A file of lines, of which one in 20 is another one than in the reply."""
        text = self._stretch(FILE_TOKENS, chance)
        file, every = list(text), round(_LINE / CHANGED)
        for at in range(chance.randrange(every // _LINE) * _LINE, len(file), every):
            file[at : at + _LINE] = self._noise(len(file[at : at + _LINE]), chance)
        ids = [*self._noise(32, chance), *file, *self._noise(16, chance), text[0] - 1]
        return Prompt(ids, self._scaled(REWRITTEN_TOKENS))

    def _tools(self, chance: random.Random) -> Prompt:
        """Results of tools, which have most pieces of the reply between words of their own."""
        reply = self._stretch(QUOTING_TOKENS, chance)
        pieces = [reply[at : at + _PIECE] for at in range(0, len(reply), _PIECE)]
        quoted = [piece for i, piece in enumerate(pieces) if i % 5 in _QUOTED_PIECES]
        ids = self._noise(64, chance)
        for i in range(N_RESULTS):
            own = [token for piece in quoted[i::N_RESULTS] for token in piece]
            n_other = max(self._scaled(RESULT_TOKENS) - len(own), 2)
            before = chance.randrange(1, n_other)
            call = self._noise(24, chance)
            ids += [*call, *self._noise(before, chance), *own, *self._noise(n_other - before, chance)]
        return Prompt([*ids, reply[0] - 1], len(reply))

    def _chat(self, chance: random.Random) -> Prompt:
        """Nothing of the reply."""
        reply = self._stretch(CHAT_REPLY_TOKENS, chance)
        return Prompt([*self._noise(CHAT_TOKENS, chance), reply[0] - 1], len(reply))

    def _stretch(self, n_tokens: int, chance: random.Random) -> range:
        """Return so many neighbouring words, scaled."""
        n = self._scaled(n_tokens)
        first, last = self._words.start + 1, self._words.stop - n
        if last < first:
            raise BenchmarkError(f"{len(self._words)} words are too few for a text of {n}")
        start = chance.randint(first, last)
        return range(start, start + n)

    def _noise(self, n: int, chance: random.Random) -> list[int]:
        return chance.choices(self._words, k=n)

    def _scaled(self, n_tokens: int) -> int:
        return max(round(n_tokens * self._scale), _LINE)


class RealPrompts:
    """Prompts for a trained model, of the sources and documents of this checkout; `scale` shortens them."""

    def __init__(self, tokens: Tokens, scale: float = 1.0) -> None:
        self._tokens = tokens
        self._scale = scale
        self._sources = _texts("llamaslot", "*.py")
        self._documents = _texts("docs", "*.md")

    def draw(self, kind: str, chance: random.Random) -> Prompt:
        """Return a prompt of a kind."""
        made = {REWRITE: self._rewrite, TOOLS: self._tools, CHAT: self._chat}
        return made[kind](chance)

    def _rewrite(self, chance: random.Random) -> Prompt:
        """A source file. A token of one line in 20 is forbidden, so that these lines come out otherwise."""
        lines = self._excerpt(self._sources, FILE_TOKENS, chance)
        asked = f"Here is a Python file.\n\n```python\n{_joined(lines)}```\n\nWrite the whole file again."
        head = _joined(["```python", *lines[:_HEAD_LINES]])
        forbidden = self._forbidden(lines[_HEAD_LINES:])
        return self._prompt([_user(asked)], head, REWRITTEN_TOKENS, logit_bias=[[forbidden, False]])

    def _tools(self, chance: random.Random) -> Prompt:
        """An agent's last step: it quotes one of the results."""
        messages = [_user("Read some parts of the documentation, and then quote one of them word for word.")]
        results = [_joined(self._excerpt(self._documents, RESULT_TOKENS, chance)) for _ in range(N_RESULTS)]
        for i, result in enumerate(results, start=1):
            messages += [_assistant(f"read_part({i})"), _user(f"Result {i}:\n\n{result}")]
        chosen = chance.randrange(N_RESULTS)
        words = results[chosen].split(" ")[:_HEAD_WORDS]
        return self._prompt(messages, f"Result {chosen + 1}:\n\n{' '.join(words)}", QUOTING_TOKENS)

    def _chat(self, chance: random.Random) -> Prompt:
        """A question about things that everybody knows."""
        question = chance.choice(_QUESTIONS).format(*chance.sample(_TOPICS, 3))
        return self._prompt([_user(question)], "", CHAT_REPLY_TOKENS)

    def _prompt(self, messages: Sequence[dict[str, Any]], head: str, n_reply: int, **fields: Any) -> Prompt:
        ids = [*self._tokens.prompt(messages), *self._tokens.of(head)]
        return Prompt(ids, self._scaled(n_reply), fields)

    def _excerpt(self, texts: Sequence[list[str]], n_tokens: int, chance: random.Random) -> list[str]:
        """Return lines from a place at which a paragraph begins, of so many tokens at most, scaled."""
        n = self._scaled(n_tokens)
        # A token has one character at least, so this is enough of a text; and most have four.
        long = [lines for lines in texts if sum(map(len, lines)) > 6 * n]
        lines = chance.choice(long)
        starts = [i for i, line in enumerate(lines) if line and (i == 0 or not lines[i - 1])]
        starts = [i for i in starts if sum(map(len, lines[i:])) > 5 * n] or [0]
        taken: list[str] = []
        for line in lines[chance.choice(starts) :]:
            n -= len(self._tokens.of(f"{line}\n"))
            if n < 0:
                break
            taken.append(line)
        return taken

    def _forbidden(self, lines: Sequence[str]) -> int:
        """Return the token that is in about `CHANGED` of the lines."""
        n_lines = Counter(token for line in lines for token in {*self._tokens.of(line)})
        wanted = max(CHANGED * len(lines), 1.0)
        return min(n_lines, key=lambda token: (abs(n_lines[token] - wanted), token))

    def _scaled(self, n_tokens: int) -> int:
        return max(round(n_tokens * self._scale), _LINE)


def _texts(folder: str, pattern: str) -> list[list[str]]:
    paths: list[Path] = sorted((ROOT / folder).rglob(pattern))
    return [path.read_text().splitlines() for path in paths]


def _joined(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
