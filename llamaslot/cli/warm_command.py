"""`llamaslot warm FILE`: have a running server compute prompts for later requests that begin with them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from llamaslot.base.errors import ConfigError
from llamaslot.base.files import read_named_text
from llamaslot.base.stats import Warmed
from llamaslot.cli.client import Client, RefusedError, add_access


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llamaslot warm`."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="JSON: the body of a request of any API, such as messages and tools, or a list of bodies",
    )
    add_access(parser)
    pins = parser.add_mutually_exclusive_group()
    pins.add_argument(
        "--pin", dest="pin", action="store_const", const=True, help="keep the prompts cached: they are evicted last"
    )
    pins.add_argument("--unpin", dest="pin", action="store_const", const=False, help="undo --pin")


def run(args: argparse.Namespace) -> int:
    """Warm the prompts one after the other. Raises ConfigError for a wrong file, and if the server refuses one."""
    bodies = _bodies(args.file)
    pin = {} if args.pin is None else {"pin": args.pin}
    client = Client(args.url, args.api_key, args.cacert)
    for number, body in enumerate(bodies, start=1):
        try:
            warmed = client.fetch("POST", "/cache/warm", Warmed, body | pin)
        except RefusedError as error:
            raise ConfigError(f"prompt {number}: {error.message}", param=error.param) from None
        done = f"{warmed.tokens:,} tokens, {warmed.cached:,} cached, {warmed.computed:,} computed"
        print(f"prompt {number}: {done}{', pinned' if warmed.pinned else ''}", flush=True)
    return 0


def _bodies(file: str) -> list[dict[str, Any]]:
    try:
        read = json.loads(read_named_text(Path(file), "FILE"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}", param="FILE") from None
    bodies = read if isinstance(read, list) else [read]
    if not bodies or not all(isinstance(body, dict) for body in bodies):
        raise ConfigError(f"{file} must have the body of a request, an object, or a list of them", param="FILE")
    return bodies
