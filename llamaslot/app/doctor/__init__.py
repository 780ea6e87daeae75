"""Checks of `llamaslot doctor`: each examines one thing that a server needs and advises what to change.

The checks change nothing, except that they write temporary files to measure a folder's speed, and temporary objects
to measure the remote store. `cli/doctor_command.py` runs them in order.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """Result of a check; a server starts unless one has failed."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(msgspec.Struct, frozen=True):
    """One row of the doctor's table."""

    name: str
    outcome: Outcome
    found: str
    advice: str = ""
    """Advice for the user; empty if nothing is wrong."""


def ok(name: str, found: str) -> Check:
    """Return a check that found nothing wrong."""
    return Check(name, Outcome.OK, found)


def warn(name: str, found: str, advice: str) -> Check:
    """Return a check with a finding that makes a server slower, less capable or less secure."""
    return Check(name, Outcome.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Check:
    """Return a check with a finding that prevents a server from starting or working."""
    return Check(name, Outcome.FAIL, found, advice)


def shown_size(n_bytes: float) -> str:
    """Return a size in human-readable form."""
    return f"{n_bytes / 2**30:,.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:,.0f} MiB"
