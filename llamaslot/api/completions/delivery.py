"""From running choices to an HTTP reply, whole or streamed; how it is worded is the dialect's part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from aiohttp import web

from llamaslot.api.bodies import Options, json_response
from llamaslot.api.context import SETTINGS
from llamaslot.api.sse import EventStream
from llamaslot.base.events import Finished, Output
from llamaslot.service.generations import Generation, Generations


class Dialect(Protocol):
    """How one endpoint words the choices that it was made for."""

    def chunks(self, choice: Generation, output: Output | Finished) -> Iterable[bytes]:
        """The server-sent events for an event of a choice."""

    def closing(self) -> Iterable[bytes]:
        """The server-sent events after all choices are finished."""

    def whole(self) -> Any:
        """The body of a reply that is not streamed."""


async def deliver(
    request: web.Request, options: Options, choices: Generations, dialect: Dialect
) -> web.StreamResponse:
    """Answer the request with what the choices produce."""
    if options.stream:
        return await _stream(request, options, choices, dialect)
    while await choices.next_batch():
        pass
    return json_response(dialect.whole())


async def _stream(
    request: web.Request, options: Options, choices: Generations, dialect: Dialect
) -> web.StreamResponse:
    interval = options.sse_ping_interval
    stream = EventStream(request, request.app[SETTINGS].sse_ping_interval if interval is None else interval)
    await stream.open()
    choices.listen(lambda choice, output: stream.write_now(dialect.chunks(choice, output)), lambda: stream.is_ready)
    try:
        while batch := await stream.wait(choices.next_batch):
            events = [data for choice, output in batch for data in dialect.chunks(choice, output)]
            if choices.done:
                await stream.close([*events, *dialect.closing()])
            else:
                await stream.send(events)
    except ConnectionError:
        pass  # the client is gone; leaving the choices cancels them
    except Exception as error:
        await stream.fail(error)
    return stream.response
