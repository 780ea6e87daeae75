"""`llamaslot serve`: read the configuration and run the server."""

from __future__ import annotations

import argparse
import os

import uvloop

from llamaslot.app.config_reader import add_flags, read_config
from llamaslot.app.logs import configure_logging


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; return the exit status."""
    config = read_config(args, os.environ)
    configure_logging(config.log_format, config.lowest_log_level)
    # Load llama.cpp only now, so that wrong flags are reported at once.
    from llamaslot.app.composition import serve  # noqa: PLC0415

    ended: list[int] = []

    async def main() -> None:
        ended.append(await serve(config))

    try:
        uvloop.run(main())
    except RuntimeError:
        # Closing the event loop starts a thread, which fails if there are too many; the server has ended by then.
        if not ended:
            raise
    return ended[0]
