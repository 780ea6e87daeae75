"""Main program of the server that the benchmark measures: `serve` with the configuration from standard input.

It exits when its standard input closes, that is, when the process that started it ends.
"""

from __future__ import annotations

import os
import sys
import threading

import msgspec
import uvloop

from llamaslot.app.config import Config
from llamaslot.app.logs import configure_logging


def main() -> int:
    """Serve until stopped; return the exit status."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=Config)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logging("json", "warning")
    from llamaslot.app.composition import serve  # noqa: PLC0415
    from llamaslot.base.errors import ConfigError  # noqa: PLC0415

    try:
        return uvloop.run(serve(config))
    except ConfigError as error:
        print(f"llamaslot: {error.message}", file=sys.stderr)
        return 2


def _end_with_parent() -> None:
    # Not through `sys.stdin`: this thread would hold its lock, which Python needs at shutdown.
    while os.read(0, 1024):
        pass
    # The child processes end with this one.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
