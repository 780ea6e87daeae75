"""Report the size of the package by folder: `python -m bench size`.

Code lines hold at least one token of code; docstrings, comments and blank lines are not counted. Comment lines hold
docstrings or nothing but a comment. The numbers are for information: nothing limits them.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "llamaslot"

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass
class Sizes:
    """Totals of some source files."""

    modules: int = 0
    """Python files other than `__init__.py`."""
    code_lines: int = 0
    comment_lines: int = 0
    """Lines of docstrings, and lines with only a comment."""
    functions: int = 0
    """Functions and methods, nested ones too."""
    one_statement: int = 0
    """Functions whose body, without its docstring, is one simple statement, such as a `return`."""

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def comment_percentage(self) -> float:
        """Comment lines in % of comment and code lines."""
        return 100 * self.comment_lines / max(1, self.comment_lines + self.code_lines)


def run(packages: Sequence[Path]) -> int:
    """Print the sizes of each package; returns the exit status, which is always 0."""
    for package in packages:
        print("\n".join(report(measure(package))))
    return 0


def measure(package: Path) -> dict[str, Sizes]:
    """Sizes of each folder below `package` without its subfolders, by name."""
    folders: dict[str, Sizes] = {}
    for path in sorted(package.rglob("*.py")):
        name = path.parent.relative_to(package.parent).as_posix()
        sizes = sizes_of(path.read_text(encoding="utf-8"))
        sizes.modules = int(path.name != "__init__.py")
        folders[name] = folders.get(name, Sizes()) + sizes
    return folders


def report(folders: dict[str, Sizes]) -> list[str]:
    """The sizes as lines of a table, with a last line for all folders together."""
    rows = [("code lines", "modules", "functions", "of one statement", "comments in %", "folder")]
    for name, each in {**folders, "total": sum(folders.values(), Sizes())}.items():
        numbers = (each.code_lines, each.modules, each.functions, each.one_statement)
        rows.append((*(f"{n:,}" for n in numbers), f"{each.comment_percentage:.0f}", name))
    widths = [len(title) for title in rows[0]]
    return ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows]


def sizes_of(source: str) -> Sizes:
    """Sizes of one file's source, in which `modules` is 0."""
    tree = ast.parse(source)
    strings: set[int] = set()
    for node in _statements(tree):
        if _is_string(node):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        if token.type not in _NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= strings
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Sizes(
        code_lines=len(code),
        comment_lines=len((strings | comments) - code),
        functions=len(bodies),
        one_statement=sum(map(_is_one_statement, bodies)),
    )


def _is_one_statement(body: list[ast.stmt]) -> bool:
    statements = body[1:] if _is_string(body[0]) else body
    return len(statements) == 1 and not isinstance(statements[0], ast.Match) and not hasattr(statements[0], "body")


def _is_string(node: ast.stmt) -> bool:
    """True for docstrings and other strings that stand alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield from body
