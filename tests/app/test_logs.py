"""Log lines of several processes in one stream."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

LOG = """
import logging
from llamaslot.app.logs import configure_logging, get_logger
configure_logging("json", "info")
get_logger("a").info("short")
get_logger("a").info("long", **{name: "x" * 4_000 for name in "abcde"})
logging.getLogger("aiohttp").warning("of a library")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_each_line_is_one_write_so_that_lines_of_other_processes_do_not_get_into_it(unbuffered: str) -> None:
    # A datagram for each write.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        # macOS allows 2 KiB a datagram otherwise.
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        process = subprocess.Popen([sys.executable, "-c", LOG], stderr=theirs, env=environ)
        ours.settimeout(30)
        written = [ours.recv(2**16) for _ in range(3)]
        assert process.wait(30) == 0
    assert all(line.endswith(b"\n") for line in written)
    assert [json.loads(line)["event"] for line in written] == ["short", "long", "of a library"]
    # Readers see when and what first, however many fields follow.
    assert {tuple(json.loads(line))[:3] for line in written} == {("timestamp", "level", "event")}


BOUNDED = """
import logging
from llamaslot.app.logs import configure_logging, get_logger
configure_logging("{form}", "info")
log = get_logger("a")
log.info("text", key="x" * 300_000)
log.info("list", ids=["x" * 30_000] * 1_000)
log.info("map", fields={{"x" * 300_000: "y" * 300_000}})
log.info("object", value=ValueError("x" * 300_000).args)
log.info("bytes", value=b"x" * 300_000)
logging.getLogger("aiohttp").warning("x" * 300_000)
try:
    raise ValueError("x" * 300_000)
except ValueError as error:
    log.error("crash", exc_info=error)
"""


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_line_is_short_whatever_a_client_or_a_file_has_put_into_it(form: str) -> None:
    program = BOUNDED.format(form=form)
    process = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=60, check=True)
    lines = process.stderr.splitlines()
    assert len(lines) >= 7
    assert max(map(len, lines)) < 30_000


CONTROLS = """
import logging
from llamaslot.app.logs import configure_logging, get_logger
configure_logging("{form}", "info")
bad = "\\x1b]0;title\\x07\\x9b31m\\u202e"
get_logger("a").info("text", key=bad, items=[bad], fields={{bad: bad}}, lines="a\\nforged")
logging.getLogger("aiohttp").warning(bad + "\\nforged")
try:
    raise ValueError(bad)
except ValueError as error:
    get_logger("a").error("crash", exc_info=error)
"""


@pytest.mark.parametrize("form", ["json", "console"])
def test_control_characters_do_not_reach_a_terminal(form: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", CONTROLS.format(form=form)], stderr=subprocess.PIPE, check=True, timeout=30
    )
    text = result.stderr.decode()
    assert "title" in text
    assert not [char for char in text if char != "\n" and not char.isprintable()]
    assert not [line for line in text.split("\n") if line.startswith("forged")]
