"""Outputs that end anywhere: a call is complete or known not to be, and nothing of it is in the text."""

from __future__ import annotations

import pytest

from tests.formats.cut_outputs import ALL, REASONS, Output


@pytest.mark.parametrize("output", ALL, ids=lambda output: f"{output.family}: {output.text[:12]!r}")
def test_an_output_can_end_anywhere(output: Output) -> None:
    """After each character, by the model itself and by the limit; now and then also read by the character."""
    for end in range(len(output.text) + 1):
        for reason in REASONS[: 2 + (end % 9 == 0)]:
            message = output.check(end, reason)
            if end % 9 == 0:
                assert output.parsed(end, reason, by_character=True)[0] == message
