"""`llamaslot completion SHELL`: print a script that completes commands, flags, their values, files and folders."""

from __future__ import annotations

import argparse
import re

import shtab

from llamaslot.app.config import options
from llamaslot.app.model_files import known_models
from llamaslot.cli.main import command_line

_SHELLS = ("bash", "zsh", "fish")
_FOLDERS = ("cache_disk", "slot_save_path")
_GGUF = {**shtab.glob("*.gguf"), "zsh": "_files -g '*.gguf'"}
"""Completion of model files. zsh gets its own pattern: the parentheses in shtab's break completion of flags."""
_FILES = ("config", "cacert", "cache_remote_ca", "file")
"""Arguments that name files, in addition to all options whose names end in `_file`."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llamaslot completion`."""
    parser.add_argument("shell", choices=_SHELLS, metavar="{bash,zsh,fish}")
    # Keep each command on one line, so that it can be copied.
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "bash, in ~/.bashrc:\n  source <(llamaslot completion bash)\n"
        'zsh:\n  llamaslot completion zsh > "${fpath[1]}/_llamaslot"\n'
        "fish:\n  llamaslot completion fish > ~/.config/fish/completions/llamaslot.fish"
    )


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(_with_whole_flags(shtab.complete(_described(), args.shell), args.shell))
    return 0


def _with_whole_flags(script: str, shell: str) -> str:
    """Make flags with several letters after one dash (`-ngl`) single flags.

    For zsh and fish, shtab declares them as short flags, which the shell would read as several one-letter flags.
    """
    if shell == "zsh":
        return script.replace("_arguments -C -s ", "_arguments -C ")
    if shell == "fish":
        # `-o` (old style) instead of `-s` (short), only in the part before the description.
        options = re.compile(r"^complete .*?(?= -d '|$)", re.MULTILINE)
        return options.sub(lambda found: re.sub(r" -s (?=[\w-]{2})", " -o ", found[0]), script)
    return script


def _described() -> argparse.ArgumentParser:
    """Return the parser of all commands, with completions for the values of their arguments.

    Use it only to describe commands, not to parse: suggested words become choices, which exclude other values.
    """
    parser = command_line()
    for subparsers in parser._get_positional_actions():
        assert isinstance(subparsers.choices, dict)
        for name, command in subparsers.choices.items():
            for action in command._actions:
                _describe(action, name)
    return parser


def _describe(action: argparse.Action, command: str) -> None:
    words = {option.name: [word for word in option.choices if word != "N"] for option in options()}
    if action.dest == "model" or (action.dest == "name" and command != "pull"):
        action.complete = _GGUF  # type: ignore[attr-defined]
    elif action.dest == "name":
        action.choices = list(known_models())
    elif action.dest in _FILES or action.dest.endswith("_file"):
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    elif action.dest in _FOLDERS:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif words.get(action.dest):
        action.choices = words[action.dest]
