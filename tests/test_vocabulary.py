"""Words of the project's former private vocabulary stay out of names, log events, messages and documents.

A word is looked for in the names that Python sources define (split at underscores and capitals, so that `ReadWatch`
and `read_watch` are "read watch"), and in prose: docstrings, comments, the strings of the package, and documents.
Words that are also ordinary English are looked for in names alone, or only where they were terms.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("llamaslot", "tests", "bench", "examples")
PACKAGE = ("llamaslot",)
CACHE = ("llamaslot/kvcache", "llamaslot/scheduler", "llamaslot/engine", "tests/kvcache", "tests/scheduler")
EXCLUDED = ("bench/demo", "tests/test_vocabulary.py")
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "bench/README.md", "examples/**/*.md")
_COMMENT = re.compile(r"(?:^ *|  )#.*")
"""Comments, as the formatter sets them, and a few strings: Python's own tokenizer takes 20 times as long."""
_PARTS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


@dataclass(frozen=True)
class Word:
    """A word of the old vocabulary; both patterns match whole words."""

    old: str
    new: str
    names: str = ""
    """Pattern for names, written as words in lower case."""
    prose: str = ""
    """Pattern for prose; empty for words that are ordinary English there."""
    within: tuple[str, ...] = SOURCES
    """Folders in which the word is no ordinary name."""


def both(old: str, new: str, pattern: str) -> Word:
    return Word(old, new, names=pattern, prose=pattern)


WORDS = (
    Word("room", "package, module, layer", "rooms?", "rooms|(?:the|this|which|only) room"),
    both("ledger", "KV cache", "ledgers?"),
    Word("space (of a namespace)", "namespace", "spaces?", within=PACKAGE),
    Word("figures", "stats", "figures?", within=PACKAGE),
    both("spelled", "decoded text", "spell(?:s|ed|ing)?"),
    Word("known (tokens)", "tokens, cached", "known|n known", within=CACHE),
    Word("front, behind", "parent, children", "front|behind", within=PACKAGE),
    both("at hand", "in RAM", "at hand"),
    both("guarded", "load-pinned", "guard(?:s|ed|ing)?"),
    both("park", "move to a spare sequence", "park(?:s|ed|ing)?"),
    both("lost paths", "prefixes dropped for lack of sequence ids", "lost paths?"),
    Word("double", "duplicate cells", "doubles?", "doubles|(?:a|the|its|as) double", within=CACHE),
    both("settle", "deduplicate", "settle[sd]?|settling"),
    both("store ahead", "offload ahead", "stor(?:e|es|ed|ing) ahead"),
    both("make way", "offload idle", "ma(?:ke|kes|de|king) way"),
    Word("tend", "tick", "tend(?:s|ed|ing)?", within=PACKAGE),
    both("rent", "prefill slowdown per idle cell", "rents?"),
    Word("life", "offload after", "(?:idle )?li(?:fe|ves)", within=PACKAGE),
    Word("claim", "acquire", "claim(?:s|ed)?", within=PACKAGE),
    both("spoil", "invalidate", "spoil(?:s|ed|t|ing)?"),
    both("give up", "evict, drop", "g(?:ive|ives|iven|ave|iving) up"),
    Word("forget", "evict, drop", "forg(?:et|ets|ot|otten|etting)", within=PACKAGE),
    Word("leave", "evict, offload", "leave", within=CACHE),
    Word("discard", "drop", "discard(?:s|ed)?", within=CACHE),
    Word("was_bad", "on_corrupt", "was (?:bad|read|written|not read|not saved)", within=PACKAGE),
    both("bad file", "corrupt file", "bad files?"),
    Word("silent", "unresponsive", "silent", "silent disks?", within=PACKAGE),
    both("read watch", "read watchdog", "read watch(?:es)?"),
    Word("lag", "write backlog", "lags?", within=PACKAGE),
    Word("fading", "decay", "fad(?:e|es|ed|ing)", within=PACKAGE),
    both("weigh", "fingerprint", "weigh(?:s|ed|ing)?"),
    Word("seen", "ghost list", "seen", within=("llamaslot/kvcache",)),
    Word("record", "segment metadata", "records?", within=("llamaslot/kvcache",)),
    Word("piece", "cell range", "pieces?", within=CACHE),
    both("seam", "approximate cut", "seams?"),
    both("marked text", "text with control-token markers", "marked text"),
    both("tile", "query block", "tiles?"),
    Word("following", "next decode step", "following", within=CACHE),
    both("steps ahead", "multi-step decode", "n ahead|steps ahead"),
    Word("awaits, promised", "follower, leader", "awaits|awaited|promis(?:e|es|ed)", within=CACHE),
    both("wind up", "flush on shutdown", "w(?:ind|inds|ound|inding) up"),
    Word("by hand", "(an ordinary sentence)", "by hand", "by hand"),
    both("mood", "(an ordinary sentence)", "moods?"),
    both("somebody", "(an ordinary sentence)", "somebody"),
    both("nobody", "(an ordinary sentence)", "nobody"),
    both("dialect", "response format", "dialects?"),
    both("contender", "server", "contenders?"),
    Word("play", "run", "play(?:s|ed|ers?)?", "plays?|played|players?", within=("bench", "tests/bench")),
    Word("tip", "end node", "tips?", within=PACKAGE),
)


@dataclass(frozen=True)
class Found:
    """A name or a piece of prose, in lower case, with the file and line of it."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        """Return `path:line: text`, as compilers write it."""
        return f"{self.path}:{self.line}: {self.text.strip()[:100]}"


@cache
def names() -> list[Found]:
    """Every name that a Python source defines, but for the names of tests, which are sentences."""
    return [found for path in _python_files() for found in _found(path)[0] if not found.text.startswith("test ")]


@cache
def prose() -> list[Found]:
    """Docstrings, comments, names of tests, the package's strings, and documents, line by line."""
    found = [each for path in _python_files() for each in _found(path)[1]]
    found += [each for path in _python_files() for each in _found(path)[0] if each.text.startswith("test ")]
    for pattern in DOCUMENTS:
        for path in sorted(ROOT.glob(pattern)):
            lines = path.read_text(encoding="utf-8").lower().splitlines()
            if path.name == "CHANGELOG.md":
                # It says which names have changed, so it quotes the old ones.
                lines = [re.sub(r"`[^`]*`", "", line) for line in lines]
            found += [Found(_relative(path), i, line) for i, line in enumerate(lines, 1)]
    return found


@cache
def _joined(texts: Callable[[], list[Found]]) -> str:
    """All texts, line by line."""
    return "\n".join(each.text for each in texts())


def occurrences(word: Word) -> list[Found]:
    """Return the places where a word is used as a name or term."""
    found = []
    if word.names:
        pattern = re.compile(rf"(?<![a-z])(?:{word.names})(?![a-z])")
        # Most words are nowhere, which one search tells.
        if pattern.search(_joined(names)):
            found += [each for each in names() if each.path.startswith(word.within) and pattern.search(each.text)]
    if word.prose:
        pattern = re.compile(rf"(?<![a-z])(?:{word.prose})(?![a-z])")
        documents = tuple(folder for folder in word.within) if word.within not in (SOURCES, PACKAGE) else ("",)
        if pattern.search(_joined(prose)):
            found += [each for each in prose() if each.path.startswith(documents) and pattern.search(each.text)]
    return found


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.old)
def test_a_word_of_the_old_vocabulary_is_not_used(word: Word) -> None:
    found = occurrences(word)
    assert not found, f"write {word.new} instead of {word.old}:\n" + "\n".join(map(str, found))


def test_names_are_split_into_words() -> None:
    assert words("ReadWatch") == words("read_watch") == words("_READ_WATCH") == "read watch"
    assert words("KVCache.n_ahead2") == "kv cache n ahead"


def test_the_list_has_each_word_once() -> None:
    assert len({word.old for word in WORDS}) == len(WORDS) >= 30


def words(name: str) -> str:
    """A name as words in lower case."""
    return " ".join(_PARTS.findall(name)).lower()


def _python_files() -> list[Path]:
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if not _relative(path).startswith(EXCLUDED)]


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _found(path: Path) -> tuple[list[Found], list[Found]]:
    """The names that a file defines, and its prose."""
    where, source = _relative(path), path.read_text(encoding="utf-8")
    in_package = where.startswith(PACKAGE)
    names, prose = [Found(where, 1, words(path.stem))], []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(Found(where, node.lineno, words(name)))
            case ast.arg(arg=name):
                names.append(Found(where, node.lineno, words(name)))
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.append(Found(where, node.lineno, words(name)))
        text = node if in_package else node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            lines = text.value.lower().splitlines()
            prose += [Found(where, text.lineno + i, line) for i, line in enumerate(lines)]
    for i, line in enumerate(source.splitlines(), 1):
        if "#" in line and (comment := _COMMENT.search(line)):
            prose.append(Found(where, i, comment[0].lower()))
    return names, prose
