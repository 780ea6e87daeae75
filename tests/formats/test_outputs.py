"""Each family's outputs, and what a client gets of them."""

from __future__ import annotations

import pytest

from tests.formats import json_cases, other_cases
from tests.formats.messages import EXCERPTS, Case, parsed

CASES = [*json_cases.CASES, *other_cases.CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.id}")
def test_content_reasoning_and_calls_are_told_apart(case: Case) -> None:
    case.check(parsed(case.family, case.text, **case.options))


def test_every_family_has_cases() -> None:
    assert {case.family for case in CASES} == set(EXCERPTS)
    assert len({(case.family, case.id) for case in CASES}) == len(CASES)
