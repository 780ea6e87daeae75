"""Conversion of GBNF, llama.cpp's grammar format, to Lark for llguidance.

llguidance's own converter (`llguidance.gbnf_to_lark`) is not used. It has no token rules such as `<[12]>`, fails on
`\\u00e9` and on repeated repetitions, takes `.` to exclude newlines and `&&`, `--` and `~~` in character classes as
operators, splits `name "a"` into lexemes, accepts rules that are defined twice, `[z-a]` and any number of
repetitions, and does not name the line where a rule is missing.

llguidance splits text into lexemes, each as long as possible, so that the letter in `name: /[a-z]*/ "a"` could
never match. GBNF has no lexemes. Therefore every part without recursion becomes a single terminal, within which
such a sequence matches exactly. One difference remains: a part without recursion takes all text that it can before
a recursive part begins.

llguidance excludes the tokens of added tags such as `<tool_call>` from text. Models are trained on these tokens, so
a tag in a literal matches its token; if the token would split a terminal (`_TagCheck`), it matches the tag's
characters as well.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from llamaslot.base.errors import InvalidRequestError

TokenOf: TypeAlias = Callable[[str], int | None]
"""Returns the id of the token for a text; None if the text is not exactly one token."""

_NO_TAGS: Mapping[str, int] = MappingProxyType({})
_MAX_REPEAT = 2000
"""Most required repetitions, as in llama.cpp. A higher upper limit counts as no limit."""
_MAX_DEPTH = 100
"""Most levels of nested parentheses, and of parts and references for which tags are checked."""
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
    return _lark(writer) if _TagCheck(tagged, texts.regular).keeps_terminals() else _lark(writer, texts)


def _lark(*writers: _Writer) -> str:
    """Return a Lark grammar that matches the rule `root` of any of the writers."""
    written = [line for writer in writers for line in writer.lines()]
    start = " | ".join(writer.names["root"] for writer in writers)
    return "\n".join(["%llguidance {}", f"start: {start}", *written]) + "\n"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A text, a character or a token, as Lark."""

    lark: str
    is_token: bool = False
    is_tag: bool = False
    """True for the token of a tag within a literal."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The name of a rule, and its position in the grammar."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Concatenation:
    """A sequence of parts."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Alternatives."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part repeated `least` to `most` times; None for no upper limit."""

    item: Node
    least: int
    most: int | None


Node: TypeAlias = Leaf | Reference | Concatenation | Choice | Repeat


def _sequences(node: Node) -> Iterator[Sequence[Node]]:
    """Yield the items of each sequence in a node, also of those with only one item."""
    todo = [node]
    while todo:
        each = todo.pop()
        items = each.items if isinstance(each, Concatenation) else (each,)
        yield items
        for item in items:
            if isinstance(item, Choice):
                todo += item.options
            elif isinstance(item, Repeat):
                todo.append(item.item)


def _leaves(node: Node) -> Iterator[Leaf | Reference]:
    """Yield all texts, characters, tokens and references in a node."""
    return (item for items in _sequences(node) for item in items if isinstance(item, Leaf | Reference))


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
        self._references: list[Reference] = []

    def rules(self) -> dict[str, Node]:
        """Parse the whole text."""
        rules: dict[str, Node] = {}
        self._skip(_BLANKS_AND_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME, "the name of a rule")[0]
            self._skip(_BLANKS)
            self._expect("::=")
            self._skip(_BLANKS_AND_LINES)
            if name in rules:
                raise self._error(f"the rule '{name}' is defined twice")
            rules[name] = self._choice(is_nested=False)
            if self._at < len(self._text):
                self._match(_NEWLINE, "the end of the line")
            self._skip(_BLANKS_AND_LINES)
        for each in self._references:
            if each.name not in rules:
                raise self._error(f"there is no rule '{each.name}'", each.at)
        return rules

    def _choice(self, *, is_nested: bool) -> Node:
        options = [self._sequence(is_nested=is_nested)]
        while self._next() == "|":
            self._at += 1
            self._skip(_BLANKS_AND_LINES)
            options.append(self._sequence(is_nested=is_nested))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, *, is_nested: bool) -> Node:
        items: list[Node] = []
        blanks = _BLANKS_AND_LINES if is_nested else _BLANKS
        while (item := self._item()) is not None:
            self._skip(blanks)
            while (counts := self._counts()) is not None:
                self._skip(blanks)
                item = Repeat(item, *counts)
            # Flattened, so that neighbours can become one terminal: a literal with tags consists of several items.
            items += item.items if isinstance(item, Concatenation) else [item]
        return items[0] if len(items) == 1 else Concatenation(tuple(items))

    def _item(self) -> Node | None:
        char = self._next()
        readers = {'"': self._literal, "[": self._class, "<": self._token, "!": self._token}
        if char in readers:
            return readers[char]()
        if char == ".":
            self._at += 1
            return Leaf(r"/(?s:.)/")
        if char == "(":
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise self._error("too many nested parentheses")
            self._at += 1
            self._skip(_BLANKS_AND_LINES)
            found = self._choice(is_nested=True)
            self._expect(")")
            self._depth -= 1
            return found
        if name := _NAME.match(self._text, self._at):
            reference = Reference(name[0], self._at)
            self._references.append(reference)
            self._at = name.end()
            return reference
        return None

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
            else Leaf(json.dumps(part, ensure_ascii=False))
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


def _users(rules: Mapping[str, Node]) -> defaultdict[str, set[str]]:
    """Return the names of the rules that refer to each rule."""
    users: defaultdict[str, set[str]] = defaultdict(set)
    for name, node in rules.items():
        for each in _leaves(node):
            if isinstance(each, Reference):
                users[each.name].add(name)
    return users


def _regular_rules(rules: Mapping[str, Node]) -> set[str]:
    """Return the rules with neither recursion nor tokens, which includes the rules to which they refer."""
    users = _users(rules)
    n_open = Counter(user for found in users.values() for user in found)
    """References of each rule that are not known to be regular."""
    with_tokens = {
        name
        for name, node in rules.items()
        if any(isinstance(each, Leaf) and each.is_token for each in _leaves(node))
    }
    regular: set[str] = set()
    todo = [name for name in rules if not n_open[name]]
    while todo:
        name = todo.pop()
        if name in with_tokens:
            continue
        regular.add(name)
        n_open.subtract(users[name])
        todo += [user for user in users[name] if not n_open[user]]
    return regular


class _Writer:
    """Writes rules as Lark. Parts with neither recursion nor tokens become terminals, with names in capitals.

    The names begin with `prefix`, so that several writers can contribute to one grammar.
    """

    def __init__(self, rules: Mapping[str, Node], prefix: str = "") -> None:
        self._rules = rules
        self._prefix = prefix
        self.regular = _regular_rules(rules)
        self.names = {
            name: f"{prefix.upper()}T{i}" if name in self.regular else f"{prefix}r{i}"
            for i, name in enumerate(rules)
        }
        self._terminals: dict[str, str] = {}
        """Names of terminals by their Lark text, so that equal parts share a terminal."""

    def lines(self) -> list[str]:
        """Return the rules and terminals."""
        # Rules are written first, because that adds terminals.
        lines = [
            f"{self.names[name]}: {self._write(node, is_terminal=name in self.regular)}"
            for name, node in self._rules.items()
        ]
        return [*lines, *(f"{name}: {lark}" for lark, name in self._terminals.items())]

    def _is_terminal(self, node: Node) -> bool:
        return all(
            each.name in self.regular if isinstance(each, Reference) else not each.is_token
            for each in _leaves(node)
        )

    def _write(self, node: Node, *, is_terminal: bool) -> str:
        """Return the Lark text of a node. Within a rule, parts without recursion become terminals."""
        if not is_terminal and not isinstance(node, Reference) and self._is_terminal(node):
            lark = self._write(node, is_terminal=True)
            return self._terminals.setdefault(lark, f"{self._prefix.upper()}P{len(self._terminals)}")
        match node:
            case Leaf(lark):
                return lark
            case Reference(name):
                return self.names[name]
            case Concatenation(items):
                parts = items if is_terminal else self._joined(items)
                return " ".join(self._group(each, is_terminal=is_terminal) for each in parts) or '""'
            case Choice(options):
                return " | ".join(self._write(each, is_terminal=is_terminal) for each in options)
            case Repeat(item, least, most):
                counts = f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"
                return self._group(item, is_terminal=is_terminal) + counts

    def _group(self, node: Node, *, is_terminal: bool) -> str:
        lark = self._write(node, is_terminal=is_terminal)
        is_one = isinstance(node, Leaf | Reference) or (not is_terminal and self._is_terminal(node))
        return lark if is_one else f"({lark})"

    def _joined(self, items: Sequence[Node]) -> Iterator[Node]:
        """Yield the items of a sequence, with adjacent terminals joined."""
        for joins, run in itertools.groupby(items, self._is_terminal):
            parts = tuple(run)
            yield from (Concatenation(parts),) if joins and len(parts) > 1 else parts


def _hex(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"


class _Following(NamedTuple):
    """The text that follows a token in its sequence."""

    token: Leaf
    text: str
    is_whole: bool
    """True if neither characters nor other rules continue it."""

    def may_exceed(self, other: _Following) -> bool:
        """Return True if a longer text than the other can follow the same token."""
        # A token given by its id may be that of a tag, and an excluded one allows any token.
        if self.token.is_tag and self.token != other.token:
            return False
        is_longer = self.text.startswith(other.text) and self.text != other.text
        return is_longer or (not self.is_whole and other.text.startswith(self.text))


def _following(token: Leaf, rest: Sequence[Node]) -> _Following:
    """Return the text that follows a token, given the rest of its sequence."""
    text = ""
    for each in rest:
        if not isinstance(each, Leaf) or not each.lark.startswith('"'):
            return _Following(token, text, isinstance(each, Leaf) and each.is_token)
        text += json.loads(each.lark)
    return _Following(token, text, bool(text))


class _TagCheck:
    """Decides whether the tokens of tags can replace their text in a grammar.

    Tokens split terminals. `[a-z]* "<tag>"? "a"` is a single terminal only if the tag is text; with a token, the
    letters would match the last `a` too. That cannot happen if a part begins and ends with a tag. A part may also
    end with text if no longer text can follow its last tag. In `("<tag>x" | "<tag>xy") "yz"` it can: of `xyz`, the
    first part would match `xy`.

    `regular` has the rules that are single terminals if tags are text.
    """

    def __init__(self, rules: Mapping[str, Node], regular: set[str]) -> None:
        self._rules = rules
        self._regular = regular
        self._bounded: dict[str, bool] = {}
        self._following = [
            _following(item, items[i + 1 :])
            for node in rules.values()
            for items in _sequences(node)
            for i, item in enumerate(items)
            if isinstance(item, Leaf) and item.is_token
        ]
        self._tagged: set[str] = set()
        """Names of regular rules that have tags, directly or through a rule to which they refer."""
        users = _users(rules)
        todo = [name for name in regular if self._has_tags(rules[name])]
        while todo:
            name = todo.pop()
            if name not in self._tagged:
                self._tagged.add(name)
                todo += users[name] & regular

    def keeps_terminals(self) -> bool:
        """Return True if the rules match the same texts with tags as tokens as with tags as text."""
        return all(
            self._is_bounded(item)
            for name, node in self._rules.items()
            if name == "root" or name not in self._regular
            for option in (node.options if isinstance(node, Choice) else (node,))
            for item in (option.items if isinstance(option, Concatenation) else (option,))
            if self._has_tags(item)
        )

    def _has_tags(self, node: Node) -> bool:
        return any(
            each.name in self._tagged if isinstance(each, Reference) else each.is_tag for each in _leaves(node)
        )

    def _is_bounded(self, node: Node, depth: int = 0) -> bool:
        """Return True if a part begins with a tag, and ends with a tag or with text that cannot be longer."""
        if depth > _MAX_DEPTH:
            return False
        match node:
            case Leaf():
                return node.is_tag
            case Reference(name):
                if name not in self._bounded:
                    is_tagged = name in self._tagged
                    self._bounded[name] = is_tagged and self._is_bounded(self._rules[name], depth + 1)
                return self._bounded[name]
            case Choice(options):
                return all(self._is_bounded(each, depth + 1) for each in options)
            case Repeat(item, least):
                return least > 0 and self._is_bounded(item, depth + 1)
            case Concatenation(items):
                tagged = [i for i, each in enumerate(items) if self._has_tags(each)]
                return (
                    tagged[:1] == [0]
                    and all(self._is_bounded(items[i], depth + 1) for i in tagged)
                    and self._ends(items, tagged[-1])
                )

    def _ends(self, items: Sequence[Node], last: int) -> bool:
        """Return True if a sequence ends with its last part that has tags, or with text that cannot be longer."""
        if last == len(items) - 1:
            return True
        tag = items[last]
        if not isinstance(tag, Leaf):
            return False
        end = _following(tag, items[last + 1 :])
        return end.is_whole and not any(each.may_exceed(end) for each in self._following)
