"""Documents name files that exist, and keep to the width of a screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llamaslot"
SOURCES = [ROOT / name for name in ("llamaslot", "tests", "bench", "examples", ".ci")]
"""Not all folders: a test that builds a source distribution makes one beside them, and removes it."""
DOCUMENTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md")]
DOCUMENTS += [ROOT / "examples" / "fleet" / "README.md", ROOT / "tests" / "models" / "README.md"]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
MAX_WIDTH = 120

_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_MODULE = re.compile(r"`([\w/.-]+\.py)`")
_CODE = re.compile(r"`([^`]+)`")
_IS_SYMBOL = re.compile(r"[A-Za-z_][\w.]*").fullmatch


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_module_names_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    modules = ["/" + path.relative_to(ROOT).as_posix() for folder in SOURCES for path in folder.rglob("*.py")]
    wrong = [name for name in _MODULE.findall(text) if not any(each.endswith("/" + name) for each in modules)]
    for link, anchor in _LINK.findall(text):
        # The published benchmark is there once it has been run.
        if link.startswith(("http", "published/", "bench/published")):
            continue
        target = document.parent / link if link else document
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            wrong.append(f"{link}#{anchor}")
    assert not wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_fit_on_a_screen(document: Path) -> None:
    lines = document.read_text(encoding="utf-8").splitlines()
    assert [f"{i}: {line}" for i, line in enumerate(lines, 1) if len(line) > MAX_WIDTH] == []


def _recipes() -> list[str]:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    part = text.split("## Recipes\n")[1].split("\n## ")[0]
    return [each.replace("\n", " ") for each in re.split(r"^- ", part, flags=re.MULTILINE)[1:]]


@pytest.mark.parametrize("recipe", _recipes(), ids=lambda recipe: recipe.partition(":")[0].strip("* "))
def test_a_recipe_names_files_and_symbols_that_exist(recipe: str) -> None:
    names = _CODE.findall(recipe)
    files = [name for name in names if name.endswith((".py", "/"))]
    found = [path for name in files for path in (ROOT / "llamaslot").rglob("*.py") if _is_named(path, name)]
    found += [path for name in files if (path := ROOT / name).exists()]
    lost = [name for name in files if not any(_is_named(path, name) or path == ROOT / name for path in found)]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in found if path.is_file())
    symbols = [name for name in names if _IS_SYMBOL(name) and name not in files and not name.endswith(".md")]
    unknown = [name for name in symbols if not all(re.search(rf"\b{part}\b", sources) for part in name.split("."))]
    assert (lost, unknown) == ([], [])


def _is_named(path: Path, name: str) -> bool:
    """True if a module has this name, or is in a folder that has it; `*` stands for any text."""
    relative = f"/{path.relative_to(ROOT).as_posix()}"
    pattern = re.escape(name).replace(r"\*", "[^/]*")
    return re.search(rf"/{pattern}" + ("" if name.endswith("/") else "$"), relative) is not None


def test_every_fact_that_the_code_cites_is_in_the_list() -> None:
    listed = re.findall(
        r"^- \*\*(\d+)\. ", (ROOT / "docs" / "llama-cpp.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    cited = [n for numbers in re.findall(r"\bfacts? ([0-9, and]+)", source) for n in re.findall(r"\d+", numbers)]
    assert cited
    assert set(cited) <= set(listed)
    assert len(listed) == len(set(listed))


def _anchors(document: Path) -> list[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = _HEADING.findall(document.read_text(encoding="utf-8"))
    return [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]
