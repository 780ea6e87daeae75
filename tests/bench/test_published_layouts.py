"""The published costs of layouts are those of the raw data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import published_layouts

FACTS = {"date": "2026-01-02T03:04:05", "processor": "a CPU", "threads": 2, "memory_gib": 8, "load_before": 0.0}


def result(step: str, layout: str, computed: int, seconds: list[float]) -> dict[str, object]:
    case = {"conversations": 8, "tokens": 3000, "shared": 0.5}
    return case | {"layout": layout, "step": step, "computed": computed, "seconds": seconds}


def test_the_tables_are_those_of_the_raw_data() -> None:
    assert published_layouts.PAGE.read_text() == published_layouts.rendered()


def test_a_run_is_kept_and_its_medians_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{published_layouts.BEGIN}\nold\n{published_layouts.END}\nafter\n")
    monkeypatch.setattr(published_layouts, "PAGE", page)
    monkeypatch.setattr(published_layouts, "FOLDER", tmp_path)
    results = [
        result("512 of one", "apart", 512, [0.1, 0.25, 9.0]),
        result("512 of one", "tidy", 512, [0.5]),
        result("decode", "apart", 8, [0.02]),
        result("whole", "apart", 100, [0.5]),
        result("whole", "served", 100, [0.4]),
    ]
    content = {"model": "a shape", "threads": 2, "commit": "0123456789abcdef", "machine": FACTS, "results": results}
    (tmp_path / "layouts.json").write_text(json.dumps(content))
    published_layouts.publish(tmp_path / "layouts.json", "shape")
    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| 8 x 3,000, 50% | 2048/1024 | 400 |  |  |  |  | 200/250 |" in text
    assert "`0123456789`" in text
