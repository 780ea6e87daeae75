"""The size report counts code lines, and names every limit that is exceeded."""

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
    assert size.code_lines(source) == n


def test_long_functions_and_classes_with_many_methods_are_named() -> None:
    body = "\n".join(f"    x = {i}" for i in range(size.MAX_FUNCTION_LINES))
    methods = "\n".join(f"    def m{i}(self): ..." for i in range(size.MAX_CLASS_METHODS + 1))
    assert size.long_definitions(f"async def f():\n{body}\n") == ["1: function f has 71 lines (at most 70)"]
    assert size.long_definitions(f"\nclass A:\n{methods}\n") == ["2: class A has 26 methods (at most 25)"]
    assert size.long_definitions(f"class A:\n{methods}\n".replace("m25", "m24")) == []


def test_a_report_has_folders_and_violations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "package"
    for folder in ("app", "many"):
        (package / folder).mkdir(parents=True)
    for i in range(size.MAX_FOLDER_MODULES + 1):
        (package / "many" / f"m{i}.py").write_text("x = 1\n")
    (package / "many" / "__init__.py").write_text('"""A folder."""\n')
    for name in ("app/short.py", "long.py"):
        (package / name).write_text("x = 1\n" * (size.MAX_FILE_LINES + (name == "long.py")))
    report = size.measure(package)
    assert report.code_lines == 15 + 400 + 401
    assert {name: each.modules for name, each in report.folders.items()} == {
        "package": 1,
        "package/app": 1,
        "package/many": 15,
    }
    assert report.violations == ["long.py: 401 lines (at most 400)", "package/many: 15 modules (at most 14)"]
    assert main(["size", str(package)]) == 1
    assert "816       17  in all" in capsys.readouterr().out
    (package / "long.py").unlink()
    (package / "many" / "m0.py").unlink()
    assert main(["size", str(package)]) == 0
