"""`make audit` tells apart: nothing known, a vulnerability, and not checked."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("audit", Path(__file__).resolve().parent.parent / ".ci" / "audit.py")
assert _spec is not None
assert _spec.loader is not None
audit = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(audit)

FINE = {"name": "fine", "version": "1.0", "vulns": []}
BAD = {"name": "bad", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
UNFIXED = {"name": "bad", "version": "2.0", "vulns": [{"id": "PYSEC-2", "fix_versions": []}]}
SKIPPED = {"name": "unknown", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("packages", "status", "words"),
    [
        ([FINE], 0, ["vulnerabilities: 0; packages checked: 1"]),
        ([FINE, BAD], 1, ["bad 2.0: PYSEC-1, fixed in 2.1", "vulnerabilities: 1; packages checked: 2"]),
        ([UNFIXED], 1, ["PYSEC-2, fixed in no version"]),
        ([FINE, SKIPPED], 2, ["checked: 1", "NOT CHECKED", "unknown"]),
        ([BAD, SKIPPED], 1, ["PYSEC-1", "NOT CHECKED"]),
        ([SKIPPED, SKIPPED], 2, ["NOT DONE"]),
        ([], 2, ["NOT DONE"]),
    ],
)
def test_a_report_is_summed_up(packages: list[dict[str, Any]], status: int, words: list[str]) -> None:
    lines, found = audit.summary(json.dumps({"dependencies": packages, "fixes": []}))
    assert found == status
    assert all(word in "\n".join(lines) for word in words)
    assert ("NOT" in "\n".join(lines)) is any(word.startswith("NOT") for word in words)


@pytest.mark.parametrize("report", ["", "Traceback", "[]", "{}"])
def test_a_failed_audit_is_not_taken_for_a_clean_one(report: str) -> None:
    lines, status = audit.summary(report)
    assert status == 2
    assert "NOT DONE" in lines[0]
