"""Count the package's code lines and modules by folder, and list what exceeds a size limit: `python -m bench size`.

Code lines are lines that hold at least one token of code. Docstrings, comments and blank lines are not counted, so
that explaining the code never makes it larger. Limits on files and functions count all lines, since they are about
what a reader has to scroll through.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "llamaslot"
MAX_FOLDER_MODULES = 14
"""`__init__.py` is not counted."""
MAX_FILE_LINES = 400
MAX_CLASS_METHODS = 25
MAX_FUNCTION_LINES = 70

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass
class Folder:
    """Totals of one folder, without its subfolders."""

    modules: int = 0
    code_lines: int = 0


@dataclass
class Report:
    """Sizes of a package, and a sentence for each limit that is exceeded."""

    folders: dict[str, Folder] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    @property
    def code_lines(self) -> int:
        """Code lines of the whole package."""
        return sum(folder.code_lines for folder in self.folders.values())

    def lines(self) -> list[str]:
        """The report as text."""
        rows = [("code lines", "modules", "folder")]
        rows += [(f"{each.code_lines:,}", str(each.modules), name) for name, each in self.folders.items()]
        rows.append((f"{self.code_lines:,}", str(sum(each.modules for each in self.folders.values())), "in all"))
        text = [f"{code:>10}  {modules:>7}  {name}" for code, modules, name in rows]
        return [*text, "", *(self.violations or ["no limit is exceeded"])]


def run(packages: Sequence[Path]) -> int:
    """Print the report of each package; 1 if a limit is exceeded, else 0."""
    reports = [measure(package) for package in packages]
    for report in reports:
        print("\n".join(report.lines()))
    return int(any(report.violations for report in reports))


def measure(package: Path) -> Report:
    """Measure all Python files below the folder `package`."""
    report = Report()
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        folder = report.folders.setdefault(_name(path.parent, package), Folder())
        folder.modules += path.name != "__init__.py"
        folder.code_lines += code_lines(source)
        relative = path.relative_to(package).as_posix()
        n_lines = len(source.splitlines())
        if n_lines > MAX_FILE_LINES:
            report.violations.append(f"{relative}: {n_lines} lines (at most {MAX_FILE_LINES})")
        report.violations += [f"{relative}:{violation}" for violation in long_definitions(source)]
    report.violations += [
        f"{name}: {folder.modules} modules (at most {MAX_FOLDER_MODULES})"
        for name, folder in report.folders.items()
        if folder.modules > MAX_FOLDER_MODULES
    ]
    return report


def code_lines(source: str) -> int:
    """Lines of Python source that hold code: no docstring, no other bare string, no comment, not blank."""
    strings: set[int] = set()
    for node in _statements(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def long_definitions(source: str) -> list[str]:
    """A sentence for each class with too many methods and each function with too many lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
            if len(methods) > MAX_CLASS_METHODS:
                text = f"class {node.name} has {len(methods)} methods (at most {MAX_CLASS_METHODS})"
                found.append(f"{node.lineno}: {text}")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if n_lines > MAX_FUNCTION_LINES:
                text = f"function {node.name} has {n_lines} lines (at most {MAX_FUNCTION_LINES})"
                found.append(f"{node.lineno}: {text}")
    return found


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield from body


def _name(folder: Path, package: Path) -> str:
    inside = folder.relative_to(package).as_posix()
    return package.name if inside == "." else f"{package.name}/{inside}"
