"""Logging set-up (structlog): JSON lines for machines, console lines for a terminal, both on standard error."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Literal, TextIO, cast

from llamaslot.base.errors import MAX_MESSAGE_CHARS, printable, shortened

_MAX_ITEM_CHARS = 200
_MAX_TRACE_CHARS = 20_000
_MAX_ITEMS = 100
"""Most items of a list or map that a log line shows."""


@contextlib.contextmanager
def _not_installed(name: str) -> Iterator[None]:
    """Make imports of a package fail as if it was not installed."""
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]
    kept = {each: modules.pop(each) for each in list(modules) if each == name or each.startswith(f"{name}.")}
    modules[name] = None
    yield
    del modules[name]
    modules.update(kept)


# structlog imports rich for tracebacks, which we do not use; importing rich takes longer than structlog itself.
with _not_installed("rich"):
    import structlog


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger, for main programs.

    They must not import structlog themselves, because this module has to be the first to import it.
    """
    return cast(structlog.typing.FilteringBoundLogger, structlog.get_logger(name))


def bind_fields(**fields: str) -> None:
    """Add fields to what this task, and those that it starts, log from now on."""
    structlog.contextvars.bind_contextvars(**fields)


class _Lenient(io.TextIOBase):
    """A text stream that ignores write errors (closed pipe, full disk): they only lose log lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text; ignore errors."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush; ignore errors."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def _bounded(_logger: object, _method: str, values: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Shorten long values: some come from a client or a file, such as the metadata keys of a GGUF file."""
    for name, value in values.items():
        # `exc_info` and names with an underscore belong to structlog.
        if name != "exc_info" and not name.startswith("_"):
            values[name] = _short(value, _MAX_TRACE_CHARS if name == "exception" else MAX_MESSAGE_CHARS)
    return values


def _short(value: Any, most: int) -> Any:
    match value:
        case str():
            return shortened(value, most)
        case list() | tuple():
            items = [_short(each, _MAX_ITEM_CHARS) for each in value[:_MAX_ITEMS]]
            return [*items, f"and {len(value) - _MAX_ITEMS} others"] if len(value) > _MAX_ITEMS else items
        case dict():
            names = list(value)[:_MAX_ITEMS]
            return {_short(name, _MAX_ITEM_CHARS): _short(value[name], _MAX_ITEM_CHARS) for name in names}
        case int() | float() | None | BaseException():
            return value
    # Other objects are written by their `repr`.
    return shortened(str(value) if isinstance(value, PurePath) else repr(value), most)


def _traceback(file: TextIO, info: Any) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, info)
    file.write(printable(shortened(text.getvalue(), _MAX_TRACE_CHARS)))


def _on_one_line(_logger: object, _method: str, values: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape control characters, which a terminal would interpret. (JSON escapes them itself.)"""
    for name, value in values.items():
        if isinstance(value, str) and name != "exception":
            # Values with newlines are quoted by structlog, but events are not.
            values[name] = printable(value.replace("\n", "\\n") if name == "event" else value)
    return values


def _ordered(_logger: object, _method: str, values: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Put time, level and event first."""
    return {name: values[name] for name in ("timestamp", "level", "event") if name in values} | dict(values)


def configure_logging(form: Literal["auto", "console", "json"], level: str) -> None:
    """Send all log lines of this process to standard error in the given format."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if console:
        # Not the default formatter: it prints local variables, which may contain text of users.
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_traceback)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=not console),
    ]
    if not console:
        shared += [structlog.processors.format_exc_info, _ordered]
    shared.append(_bounded)
    if console:
        shared.append(_on_one_line)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # Write each line at once, because the server's processes share the stream. With PYTHONUNBUFFERED, which is
        # common in containers, `print` would write the line end separately.
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Lenient(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    # Format the lines of libraries that use the standard library's logging (aiohttp, asyncio) in the same way.
    handler = logging.StreamHandler(_Lenient(sys.stderr))
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    # aiohttp.server logs a traceback for each client that does not speak HTTP; our own errors are logged elsewhere.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
