"""Conversion of GBNF, llama.cpp's grammar format, to Lark for llguidance.

llguidance's own converter is not used: it fails on escapes such as `\\u00e9` and on token rules such as `<[12]>`,
takes `.` to exclude newlines, and treats `&&`, `--` and `~~` in character classes as operators.

llguidance splits text into lexemes, each as long as possible, so that the letter in `name: /[a-z]*/ "a"` could
never match. GBNF has no lexemes. Therefore every part without recursion becomes a single terminal, within which
such a sequence matches exactly. One difference remains: a part without recursion takes all text that it can before
a recursive part begins.

llguidance excludes the tokens of added tags such as `<tool_call>` from text. Models are trained on these tokens, so
a tag in a literal matches its token; if the token would split a terminal, it matches the tag's characters as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from llamaslot.base.errors import InvalidRequestError
from llamaslot.text.grammars.gbnf_nodes import Choice, Concatenation, Leaf, Node, Reference, Repeat, leaves
from llamaslot.text.grammars.gbnf_tags import keeps_terminals

TokenOf: TypeAlias = Callable[[str], int | None]
"""Returns the id of the token for a text; None if the text is not exactly one token."""

_NO_TAGS: Mapping[str, int] = MappingProxyType({})
_MAX_REPEAT = 2000
"""Most required repetitions, as in llama.cpp. A higher upper limit counts as no limit."""
_MAX_DEPTH = 100
"""Most levels of nested parentheses."""
_LARK = re.compile(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANKS_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NEWLINE = re.compile(r"\r\n|\r|\n")
_COUNT = re.compile(r"\{\s*(\d{1,9})\s*(,\s*(\d{1,9})?\s*)?\}")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_TOKEN_ID = re.compile(r"(!?)<\[(\d{1,9})\]>")
_TOKEN_TEXT = re.compile(r"(!?)(<[^>\s]+>)")


def is_lark(text: str) -> bool:
    """Return True for Lark: a line begins with `%llguidance`, as in llama.cpp, or with the rule `start:`."""
    return _LARK.search(text) is not None


def gbnf_to_lark(text: str, param: str, token_of: TokenOf, tags: Mapping[str, int] = _NO_TAGS) -> str:
    """Convert a GBNF grammar to Lark; raises `InvalidRequestError` with the line of an error.

    `tags` has the token ids of added tags by their text. A grammar with tags in its literals is parsed twice, with
    tags as tokens and as text. The first form suffices unless a token would split a terminal; then both are
    alternatives.
    """
    rules = _Parser(text, param, token_of).rules()
    if "root" not in rules:
        raise InvalidRequestError(f"'{param}': there is no rule 'root'", param=param)
    tagged = _Parser(text, param, token_of, tags).rules() if any(tag in text for tag in tags) else rules
    if tagged == rules:
        return _lark(_Writer(rules))
    writer, texts = _Writer(tagged, prefix="t"), _Writer(rules)
    return _lark(writer) if keeps_terminals(tagged, texts.regular) else _lark(writer, texts)


def _lark(*writers: _Writer) -> str:
    """Return a Lark grammar that matches the rule `root` of any of the writers."""
    written = [line for writer in writers for line in writer.lines()]
    start = " | ".join(writer.names["root"] for writer in writers)
    return "\n".join(["%llguidance {}", f"start: {start}", *written]) + "\n"


class _Parser:
    """Recursive descent parser. `_at` is the position of the next character."""

    def __init__(self, text: str, param: str, token_of: TokenOf, tags: Mapping[str, int] = _NO_TAGS) -> None:
        self._text = text
        self._param = param
        self._token_of = token_of
        self._tags = tags
        ordered = sorted(tags, key=len, reverse=True)
        self._tag = re.compile("(" + ("|".join(map(re.escape, ordered)) or "(?!)") + ")")
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        """Parse the whole text."""
        rules: dict[str, Node] = {}
        references: list[Reference] = []
        self._skip(_BLANKS_AND_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME, "the name of a rule")[0]
            self._skip(_BLANKS)
            self._expect("::=")
            self._skip(_BLANKS_AND_LINES)
            if name in rules:
                raise self._error(f"the rule '{name}' is defined twice")
            rules[name] = self._choice(references, is_nested=False)
            if self._at < len(self._text):
                self._match(_NEWLINE, "the end of the line")
            self._skip(_BLANKS_AND_LINES)
        for each in references:
            if each.name not in rules:
                raise self._error(f"there is no rule '{each.name}'", each.at)
        return rules

    def _choice(self, references: list[Reference], *, is_nested: bool) -> Node:
        options = [self._sequence(references, is_nested=is_nested)]
        while self._next() == "|":
            self._at += 1
            self._skip(_BLANKS_AND_LINES)
            options.append(self._sequence(references, is_nested=is_nested))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, references: list[Reference], *, is_nested: bool) -> Node:
        items: list[Node] = []
        blanks = _BLANKS_AND_LINES if is_nested else _BLANKS
        while (item := self._item(references)) is not None:
            self._skip(blanks)
            while (counts := self._counts()) is not None:
                self._skip(blanks)
                item = Repeat(item, *counts)
            # Flattened, so that neighbours can become one terminal: a literal with tags consists of several items.
            items += item.items if isinstance(item, Concatenation) else [item]
        return items[0] if len(items) == 1 else Concatenation(tuple(items))

    def _item(self, references: list[Reference]) -> Node | None:
        char = self._next()
        readers = {'"': self._literal, "[": self._class, "<": self._token, "!": self._token, ".": self._any}
        if char in readers:
            return readers[char]()
        if char == "(":
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise self._error("too many nested parentheses")
            self._at += 1
            self._skip(_BLANKS_AND_LINES)
            found = self._choice(references, is_nested=True)
            self._expect(")")
            self._depth -= 1
            return found
        if name := _NAME.match(self._text, self._at):
            reference = Reference(name[0], self._at)
            references.append(reference)
            self._at = name.end()
            return reference
        return None

    def _any(self) -> Leaf:
        self._at += 1
        return Leaf(r"/(?s:.)/")

    def _literal(self) -> Node:
        self._at += 1
        text = ""
        while self._next() != '"':
            text += self._char()
        self._at += 1
        parts = [part for part in self._tag.split(text) if part] or [""]
        items = tuple(
            Leaf(f"<[{self._tags[part]}]>", is_token=True, is_tag=True)
            if part in self._tags
            else Leaf(_quoted(part))
            for part in parts
        )
        return items[0] if len(items) == 1 else Concatenation(items)

    def _class(self) -> Leaf:
        self._at += 1
        is_negated = self._next() == "^"
        self._at += is_negated
        ranges = ""
        while self._next() != "]":
            ranges += _hex(first := self._char())
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._char()
                if last < first:
                    raise self._error("a range of characters ends before it begins")
                ranges += f"-{_hex(last)}"
        self._at += 1
        if not ranges:
            raise self._error("an empty class of characters")
        return Leaf(f"/[{'^' * is_negated}{ranges}]/")

    def _char(self) -> str:
        """Return the next character of a literal or class, with its escape resolved."""
        char = self._next()
        if not char:
            raise self._error("the grammar ends within a text or a class of characters")
        self._at += 1
        if char != "\\":
            return char
        kind = self._next()
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        digits = self._text[self._at : self._at + _HEX_DIGITS.get(kind, 0)]
        self._at += len(digits)
        code = int(digits, 16) if re.fullmatch(r"[0-9A-Fa-f]+", digits) else -1
        is_character = 0 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF
        if not is_character or len(digits) != _HEX_DIGITS[kind]:
            raise self._error(f"'\\{kind}{digits}' is not a valid escape")
        return chr(code)

    def _token(self) -> Leaf:
        if found := _TOKEN_ID.match(self._text, self._at):
            token: int | None = int(found[2])
        elif found := _TOKEN_TEXT.match(self._text, self._at):
            token = self._token_of(found[2])
        else:
            raise self._error("a token is written <[id]> or <text>")
        if token is None:
            raise self._error(f"'{found[2]}' is not one token of this model's vocabulary")
        self._at = found.end()
        return Leaf(f"<[{'^' * bool(found[1])}{token}]>", is_token=True)

    def _counts(self) -> tuple[int, int | None] | None:
        char = self._next()
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if char in simple:
            self._at += 1
            return simple[char]
        if char != "{":
            return None
        found = self._match(_COUNT, "a number of repetitions such as {2,5}")
        least = int(found[1])
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if least > _MAX_REPEAT:
            raise self._error(f"more than {_MAX_REPEAT} repetitions")
        if most is not None and most < least:
            raise self._error("fewer repetitions are allowed than required")
        return least, None if most is not None and most > _MAX_REPEAT else most

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, blanks: re.Pattern[str]) -> None:
        found = blanks.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(f"expected {what}")
        self._at = found.end()
        return found

    def _expect(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            raise self._error(f"expected {text}")
        self._at += len(text)

    def _error(self, message: str, at: int | None = None) -> InvalidRequestError:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        near = self._text[max(0, at - 20) : at + 20]
        return InvalidRequestError(
            f"'{self._param}': {message} (line {line}, near {json.dumps(near)})", param=self._param
        )


@dataclass(slots=True)
class _Writer:
    """Writes rules as Lark. Parts with neither recursion nor tokens become terminals, with names in capitals."""

    rules: dict[str, Node]
    prefix: str = ""
    """Prefix of the names it writes, so that several writers can contribute to one grammar."""
    regular: dict[str, bool] = field(default_factory=dict)
    """For each rule, True if it has neither recursion nor tokens."""
    names: dict[str, str] = field(default_factory=dict)
    terminals: dict[str, str] = field(default_factory=dict)
    """Names of terminals by their Lark text, so that equal parts share a terminal."""

    def __post_init__(self) -> None:
        """Find the rules that have neither recursion nor tokens."""
        for name in self.rules:
            self._find_regular(name)

    def lines(self) -> list[str]:
        """Return the rules and terminals."""
        for i, name in enumerate(self.rules):
            self.names[name] = f"{self.prefix.upper()}T{i}" if self.regular[name] else f"{self.prefix}r{i}"
        # Rules are written first, because that adds terminals.
        written = {name: self._write(node, is_terminal=self.regular[name]) for name, node in self.rules.items()}
        lines = [f"{self.names[name]}: {lark}" for name, lark in written.items()]
        return [*lines, *(f"{name}: {lark}" for lark, name in self.terminals.items())]

    def _find_regular(self, start: str) -> None:
        """Find out whether rules have recursion or tokens, by an iterative depth-first search."""
        stack = [start]
        active: set[str] = set()
        while stack:
            name = stack[-1]
            if name in self.regular and name not in active:
                stack.pop()
                continue
            if name not in active:
                active.add(name)
                self.regular[name] = True
                stack += [each for each in self._references(name) if each not in self.regular]
                # A rule on the current path refers to itself through this one.
                if any(each in active for each in self._references(name)):
                    self.regular[name] = False
                continue
            stack.pop()
            active.remove(name)
            is_regular = self.regular[name] and not self._has_tokens(self.rules[name])
            self.regular[name] = is_regular and all(self.regular[each] for each in self._references(name))

    def _references(self, name: str) -> list[str]:
        return [each.name for each in leaves(self.rules[name]) if isinstance(each, Reference)]

    def _has_tokens(self, node: Node) -> bool:
        return any(isinstance(each, Leaf) and each.is_token for each in leaves(node))

    def _is_terminal(self, node: Node) -> bool:
        return all(
            self.regular[each.name] if isinstance(each, Reference) else not each.is_token for each in leaves(node)
        )

    def _write(self, node: Node, *, is_terminal: bool) -> str:
        """Return the Lark text of a node. Within a rule, parts without recursion become terminals."""
        if not is_terminal and not isinstance(node, Reference) and self._is_terminal(node):
            return self._terminal(node)
        match node:
            case Leaf(lark):
                return lark
            case Reference(name):
                return self.names[name]
            case Concatenation(items):
                parts = [*items] if is_terminal else _joined(items, self._is_terminal)
                return " ".join(self._group(each, is_terminal=is_terminal) for each in parts) or '""'
            case Choice(options):
                return " | ".join(self._write(each, is_terminal=is_terminal) for each in options)
            case Repeat(item, least, most):
                return self._group(item, is_terminal=is_terminal) + _suffix(least, most)

    def _group(self, node: Node, *, is_terminal: bool) -> str:
        lark = self._write(node, is_terminal=is_terminal)
        is_one = isinstance(node, Leaf | Reference) or (not is_terminal and self._is_terminal(node))
        return lark if is_one else f"({lark})"

    def _terminal(self, node: Node) -> str:
        lark = self._write(node, is_terminal=True)
        return self.terminals.setdefault(lark, f"{self.prefix.upper()}P{len(self.terminals)}")


def _joined(items: Sequence[Node], is_terminal: Callable[[Node], bool]) -> list[Node]:
    """Return the items of a sequence, with adjacent terminals joined."""
    result: list[Node] = []
    run: list[Node] = []
    for item in [*items, None]:
        if item is not None and is_terminal(item):
            run.append(item)
            continue
        if run:
            result.append(run[0] if len(run) == 1 else Concatenation(tuple(run)))
            run = []
        if item is not None:
            result.append(item)
    return result


def _suffix(least: int, most: int | None) -> str:
    if (least, most) == (0, None):
        return "*"
    return f"{{{least},{'' if most is None else most}}}"


def _quoted(text: str) -> str:
    """Return a text as a Lark string, which uses JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)


def _hex(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"
