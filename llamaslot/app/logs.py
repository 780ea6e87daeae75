"""structlog set up once: JSON lines for machines, console lines for a terminal, both on standard error."""

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
"""Items of a list or a map that a line names."""


@contextlib.contextmanager
def _not_installed(name: str) -> Iterator[None]:
    """Make imports of a package fail as if it were not installed."""
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]
    kept = {each: modules.pop(each) for each in list(modules) if each == name or each.startswith(f"{name}.")}
    modules[name] = None
    yield
    del modules[name]
    modules.update(kept)


# structlog imports rich, for tracebacks that we do not print; that takes longer than structlog itself.
with _not_installed("rich"):
    import structlog


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger.

    For main programs: their other imports may import structlog, and this module has to be the first that does.
    """
    return cast(structlog.typing.FilteringBoundLogger, structlog.get_logger(name))


class _Lenient(io.TextIOBase):
    """A text stream whose failures (a reader that left, a full disk) lose lines and nothing else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def _bounded(_logger: object, _method: str, values: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Bound each value: some come from a client or from a file, such as the keys of a GGUF file."""
    for name, value in values.items():
        # The others are structlog's own.
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
    """Escape the control characters of texts, which a terminal would obey. JSON has escapes of its own."""
    for name, value in values.items():
        if isinstance(value, str) and name != "exception":
            # Values with newlines are quoted by structlog, but events are not.
            values[name] = printable(value.replace("\n", "\\n") if name == "event" else value)
    return values


def _ordered(_logger: object, _method: str, values: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Put time, level and event first."""
    return {name: values[name] for name in ("timestamp", "level", "event") if name in values} | dict(values)


def configure_logging(form: Literal["auto", "console", "json"], level: str) -> None:
    """Send every log line of this process to standard error in the given form."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if console:
        # Not the default formatter: it prints local variables, and with them what users wrote.
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
        # One write for each line: the server's processes share the stream, and with PYTHONUNBUFFERED, as containers
        # often have it, `print` would write the end of the line on its own.
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Lenient(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    # Libraries that use the standard library's logging (aiohttp, asyncio) come out in the same form.
    handler = logging.StreamHandler(_Lenient(sys.stderr))
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    # It reports clients that do not speak HTTP with a traceback each; errors of ours are logged where they arise.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
