"""Entry point: picks the command, and prints expected errors as one line with exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from llamaslot import __version__
from llamaslot.app.flags import Parser
from llamaslot.base.errors import ConfigError
from llamaslot.cli import cache, chat, pull, serve

_COMMANDS = {
    "serve": (serve, "Serve a model over HTTP."),
    "chat": (chat, "Talk to a running server."),
    "cache": (cache, "Show what a running server's prefix cache holds."),
    "pull": (pull, "Download a model."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    parser = Parser(prog="llamaslot", description="Serve GGUF models without computing the same prefix twice.")
    parser.add_argument("--version", action="version", version=f"llamaslot {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        module.configure(command)
        command.set_defaults(run=module.run, parser=command)
    try:
        args = parser.parse(sys.argv[1:] if argv is None else argv)
        status: int = args.run(args)
    except ConfigError as error:
        print(f"llamaslot: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
