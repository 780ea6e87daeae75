"""The server of the API's tests, for bodies that are sent to it."""

from __future__ import annotations

from tests.api.conftest import start

__all__ = ["start"]
