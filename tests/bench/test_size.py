"""The size report counts code lines, comment lines and functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import size
from bench.__main__ import main


@pytest.mark.parametrize(
    ("source", "n"),
    [
        ("", 0),
        ("# a comment\n\n", 0),
        ('"""A docstring\nof two lines."""\n', 0),
        ("x = 1  # a comment\n", 1),
        ("x = [\n    1,\n    # a comment\n\n    2,\n]\n", 4),
        ('TEXT = """one\n\ntwo"""\n', 3),
        ('LIMIT = 1\n"""A documented constant."""\n', 1),
        ('def f():\n    """Return one."""\n    return 1\n', 2),
        ('class A:\n    """A class."""\n\n    x: int\n    """A field."""\n', 2),
        ("if x:\n    pass\nelse:\n    pass\n", 4),
    ],
)
def test_docstrings_comments_and_blank_lines_are_not_code(source: str, n: int) -> None:
    assert size.sizes_of(source).code_lines == n


def test_docstrings_and_lines_with_only_a_comment_are_comment_lines() -> None:
    source = '"""A module\nof two lines."""\n\n# a comment\nx = 1  # beside code\n'
    assert size.sizes_of(source) == size.Sizes(code_lines=1, comment_lines=3)
    assert size.sizes_of(source).comment_percentage == 75


def test_functions_of_one_simple_statement_are_counted() -> None:
    source = 'def f():\n    """Return one."""\n    return 1\n'
    source += "class A:\n    async def g(self): ...\n    def h(self):\n        if self.x:\n            return 1\n"
    sizes = size.sizes_of(source + "def two():\n    x = 1\n    return x\n")
    assert (sizes.functions, sizes.one_statement) == (4, 2)


def test_a_report_has_each_folder_and_limits_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "package"
    (package / "app").mkdir(parents=True)
    (package / "app" / "__init__.py").write_text('"""A folder."""\n')
    (package / "app" / "short.py").write_text("x = 1\n" * 400)
    (package / "long.py").write_text("x = 1\n" * 1401)
    folders = size.measure(package)
    assert {name: (each.modules, each.code_lines) for name, each in folders.items()} == {
        "package": (1, 1401),
        "package/app": (1, 400),
    }
    assert main(["size", str(package)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["1,801", "2", "0", "0", "0", "total"]
