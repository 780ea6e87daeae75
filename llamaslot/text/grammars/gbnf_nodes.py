"""Parts of a parsed GBNF grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


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


def leaves(node: Node) -> list[Leaf | Reference]:
    """Return all texts, characters, tokens and references in a node."""
    found: list[Leaf | Reference] = []
    todo = [node]
    while todo:
        match todo.pop():
            case Concatenation(children) | Choice(children):
                todo += children
            case Repeat(item):
                todo.append(item)
            case leaf:
                found.append(leaf)
    return found
