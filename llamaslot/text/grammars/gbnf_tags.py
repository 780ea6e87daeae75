"""Decides whether the tokens of tags can replace their text in a grammar.

Tokens split terminals. `[a-z]* "<tag>"? "a"` is a single terminal only if the tag is text; with a token, the
letters would match the last `a` too. That cannot happen if a part begins and ends with a tag. A part may also end
with text if no longer text can follow its last tag. In `("<tag>x" | "<tag>xy") "yz"` it can: of `xyz`, the first
part would match `xy`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llamaslot.text.grammars.gbnf_nodes import Choice, Concatenation, Leaf, Node, Reference, Repeat, leaves

_MAX_DEPTH = 100
"""Most levels of nested parts and references. A part with more levels counts as not bounded."""


def keeps_terminals(rules: Mapping[str, Node], regular: Mapping[str, bool]) -> bool:
    """Return True if the rules match the same texts with tags as tokens as with tags as text.

    `regular` is True for rules that are single terminals if tags are text.
    """
    check = _TagCheck(rules, regular)
    return all(
        check.is_bounded(item)
        for name, node in rules.items()
        if name == "root" or not regular[name]
        for option in (node.options if isinstance(node, Choice) else (node,))
        for item in (option.items if isinstance(option, Concatenation) else (option,))
        if check.has_tags(item)
    )


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


class _TagCheck:
    """Finds tags in rules that are single terminals if tags are text. These rules have no recursion."""

    def __init__(self, rules: Mapping[str, Node], regular: Mapping[str, bool]) -> None:
        self._rules = rules
        self._bounded: dict[str, bool] = {}
        users: defaultdict[str, list[str]] = defaultdict(list)
        todo = []
        self._following = [each for node in rules.values() for each in _all_following(node)]
        for name, node in rules.items():
            if not regular[name]:
                continue
            found = leaves(node)
            for each in found:
                if isinstance(each, Reference):
                    users[each.name].append(name)
            if any(isinstance(each, Leaf) and each.is_tag for each in found):
                todo.append(name)
        self._tagged: set[str] = set()
        """Names of the rules that have tags, directly or through a rule to which they refer."""
        while todo:
            name = todo.pop()
            if name not in self._tagged:
                self._tagged.add(name)
                todo += users[name]

    def has_tags(self, node: Node) -> bool:
        """Return True if a part has tags."""
        return any(
            each.name in self._tagged if isinstance(each, Reference) else each.is_tag for each in leaves(node)
        )

    def is_bounded(self, node: Node, depth: int = 0) -> bool:
        """Return True if a part begins with a tag, and ends with a tag or with text that cannot be longer."""
        if depth > _MAX_DEPTH:
            return False
        match node:
            case Leaf():
                return node.is_tag
            case Reference(name):
                if name not in self._bounded:
                    is_tagged = name in self._tagged
                    self._bounded[name] = is_tagged and self.is_bounded(self._rules[name], depth + 1)
                return self._bounded[name]
            case Choice(options):
                return all(self.is_bounded(each, depth + 1) for each in options)
            case Repeat(item, least):
                return least > 0 and self.is_bounded(item, depth + 1)
            case Concatenation(items):
                tagged = [i for i, each in enumerate(items) if self.has_tags(each)]
                return (
                    tagged[:1] == [0]
                    and all(self.is_bounded(items[i], depth + 1) for i in tagged)
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


def _all_following(start: Node) -> list[_Following]:
    """Return the text that follows each token of a rule."""
    found: list[_Following] = []
    todo: list[Node] = [start]
    while todo:
        match todo.pop():
            case Concatenation(items):
                for i, each in enumerate(items):
                    if isinstance(each, Leaf) and each.is_token:
                        found.append(_following(each, items[i + 1 :]))
                    elif not isinstance(each, Leaf):
                        todo.append(each)
            case Choice(options):
                todo += options
            case Repeat(item):
                todo.append(item)
            case Leaf() as leaf if leaf.is_token:
                found.append(_following(leaf, ()))
            case _:
                pass
    return found


def _following(token: Leaf, rest: Sequence[Node]) -> _Following:
    """Return the text that follows a token, given the rest of its sequence."""
    text = ""
    for each in rest:
        if not isinstance(each, Leaf) or not each.lark.startswith('"'):
            return _Following(token, text, isinstance(each, Leaf) and each.is_token)
        text += json.loads(each.lark)
    return _Following(token, text, bool(text))
