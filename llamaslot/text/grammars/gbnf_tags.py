"""Finds out if the tokens of tags can take the place of their text in a grammar.

Tokens split terminals. `[a-z]* "<tag>"? "a"` is a single terminal as long as the tag is text; otherwise the letters
take the last `a` too. That cannot happen where a part begins with a tag and ends with one or with fixed text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from llamaslot.text.grammars.gbnf_nodes import Choice, Concatenation, Leaf, Node, Reference, Repeat, leaves

_MAX_DEPTH = 100
"""Nested parts and references that are followed; a part that is nested deeper counts as not bounded."""


def keeps_terminals(rules: Mapping[str, Node], regular: Mapping[str, bool]) -> bool:
    """Return True if the rules, with tokens for tags, match all that they match with text for tags.

    `regular` says by their names which rules are single terminals as long as tags are text.
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


class _TagCheck:
    """Looks for tags in the rules that are single terminals as long as tags are text; they have no recursion."""

    def __init__(self, rules: Mapping[str, Node], regular: Mapping[str, bool]) -> None:
        self._rules = rules
        self._bounded: dict[str, bool] = {}
        users: defaultdict[str, list[str]] = defaultdict(list)
        todo = []
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
        """Names of the rules that have tags, in themselves or in a rule that they refer to."""
        while todo:
            name = todo.pop()
            if name not in self._tagged:
                self._tagged.add(name)
                todo += users[name]

    def has_tags(self, node: Node) -> bool:
        """Return True for a part with tags."""
        return any(
            each.name in self._tagged if isinstance(each, Reference) else each.is_tag for each in leaves(node)
        )

    def is_bounded(self, node: Node, depth: int = 0) -> bool:
        """Return True for a part that begins with a tag, and ends with one or with fixed text."""
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
                rest = items[tagged[-1] + 1 :] if tagged else ()
                return (
                    tagged[:1] == [0]
                    and all(self.is_bounded(items[i], depth + 1) for i in tagged)
                    and all(isinstance(each, Leaf) and each.lark.startswith('"') for each in rest)
                )
