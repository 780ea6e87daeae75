"""Entry point: runs a command and prints expected errors as one line, with exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from importlib import import_module

from llamaslot import __version__
from llamaslot.app.config_reader import Parser
from llamaslot.base.errors import ConfigError, printable

_COMMANDS = {
    "serve": "Serve a model over HTTP.",
    "chat": "Talk to a running server.",
    "cache": "Show the prefix cache of a running server.",
    "top": "Show slots, cache and requests of a running server, as they change.",
    "advise": "Say why prompts are computed again, and what helps.",
    "warm": "Compute prompts before anybody asks, such as an agent's tools and system prompt.",
    "pull": "Download a model.",
    "doctor": "Check this machine and a configuration, and run a ten-second benchmark.",
    "completion": "Print a script that completes commands and flags in a shell.",
}
"""Help texts by command; each command is the module NAME_command of this package."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    # Import only the command that runs: the others would slow down its start.
    parser = command_line(args[:1])
    try:
        parsed = parser.parse(args)
        status: int = parsed.run(parsed)
    except ConfigError as error:
        print(f"llamaslot: {printable(error.message)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def command_line(configured: Collection[str] = tuple(_COMMANDS)) -> Parser:
    """Return the parser of all commands; only those in `configured` get their arguments (and are imported)."""
    parser = Parser(prog="llamaslot", description="Serve GGUF models without computing the same prefix twice.")
    parser.add_argument("--version", action="version", version=f"llamaslot {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name in configured:
            module = import_module(f"llamaslot.cli.{name}_command")
            module.configure(command)
            command.set_defaults(run=module.run, parser=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
