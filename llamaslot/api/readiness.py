"""Whether there is a model to talk to: the server listens before it is loaded and after it has failed."""

from __future__ import annotations

from aiohttp import web

from llamaslot.base.errors import ServerError, UnavailableError
from llamaslot.service.service import Service


class Readiness:
    """Holds the service once it is there, or the reason why there is none."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._reason: ServerError | UnavailableError = UnavailableError("Loading model")

    def set(self, service: Service) -> None:
        """The model is loaded: requests are let in from now on."""
        self._service = service

    def fail(self, reason: ServerError | UnavailableError) -> None:
        """There is no model any more: every endpoint answers with this error from now on."""
        self._service = None
        self._reason = reason

    def check(self) -> Service:
        """The service; raises the reason if there is none."""
        if self._service is None:
            raise type(self._reason)(self._reason.message)
        return self._service


READINESS = web.AppKey("READINESS", Readiness)
