"""The chat template given by flags, read before other processes are started."""

from __future__ import annotations

from pathlib import Path

from llamaslot.app.config import Config
from llamaslot.base.named_files import read_named_text
from llamaslot.text.builtin_templates import resolve
from llamaslot.text.volatile import pattern


def read_template(config: Config) -> tuple[str, str]:
    """Return the Jinja source given by a flag, and that flag; both are empty if there is none.

    Raises `ConfigError`, also for an invalid `--drop-volatile`.
    """
    pattern(config.drop_volatile)
    if config.chat_template_file:
        return read_text(config.chat_template_file, "--chat-template-file"), "--chat-template-file"
    return (resolve(config.chat_template), "--chat-template") if config.chat_template else ("", "")


def read_text(path: str, flag: str) -> str:
    """Return the text of a file that a flag names; raises `ConfigError`."""
    return read_named_text(Path(path), flag)
