"""Setup that all child processes share."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from llamaslot.app.config import Config
from llamaslot.app.logs import configure_logging
from llamaslot.processes.channel import Channel

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


def channel_to_parent(message_type: Any, on_message: Callable[[T], None]) -> Channel[T]:
    """Return a channel to the parent, at whose end this process ends at once.

    Signals that a service manager or a terminal sends to all processes are left to the parent.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        # Also where a thread keeps the event loop from noticing the parent's end.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The stack of a crash in llama.cpp goes to standard error.
    faulthandler.enable()
    return Channel(message_type, on_message, lambda _: os._exit(1))


def socket_of(fd: int) -> socket.socket:
    """Return the socket to the parent; programs that are started here, such as a debugger, do not get it."""
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


def configured(config: Any) -> Config:
    """Return the parent's configuration, and set up logging by it."""
    own = msgspec.convert(config, Config)
    configure_logging(own.log_format, "debug" if own.verbose else own.log_level)
    return own
