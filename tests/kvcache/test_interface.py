"""Structure of the cache: what scheduler and engine may reach, and the direction of its imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import llamaslot

PACKAGE = Path(llamaslot.__file__).parent
VALUES = {"settings", "cells"}
"""Attributes of `KVCache` that are plain values, so that reading their fields reaches nothing inside the cache."""


def reads(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield `x` and `y` of what reads `cache.x.y`, and `x` alone of every `cache.x`, whoever has the cache."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Attribute(owner, x), y) if name_of(owner) in ("cache", "_cache"):
                yield x, y
            case ast.Attribute(owner, x) if name_of(owner) in ("cache", "_cache"):
                yield x, ""


def name_of(node: ast.AST) -> str:
    """Return the last name of an expression such as `self.scheduler.cache`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def test_scheduler_and_engine_do_not_reach_through_the_cache() -> None:
    """They call its methods; collaborators of it are handed over whole."""
    paths = [path for folder in ("scheduler", "engine") for path in (PACKAGE / folder).rglob("*.py")]
    assert paths
    found = [(path.name, *each) for path in paths for each in reads(ast.parse(path.read_text()))]
    assert any((x, y) == ("settings", "unified") for _, x, y in found), "the test finds nothing at all"
    assert not [each for each in found if each[2] and each[1] not in VALUES]
    assert not [each for each in found if each[1].startswith("_")]


def test_modules_of_the_cache_import_each_other_in_one_direction() -> None:
    """Also where only types are imported: two modules that know each other are one."""
    imports: dict[str, set[str]] = {}
    for path in (PACKAGE / "kvcache").rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
        imports[module] = names | {str(node.module) for node in froms}
    for module, names in imports.items():
        imports[module] = names & imports.keys()
    assert imports["llamaslot.kvcache.cache"]
    while free := [module for module, names in imports.items() if not names]:
        for module in free:
            del imports[module]
        for names in imports.values():
            names.difference_update(free)
    assert not imports, "modules in circles, and those that import them"
