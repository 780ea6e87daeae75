"""Built-in chat templates (`templates/`), for models that have none or a broken one.

The names are llama.cpp's, and tests compare each template with llama.cpp's own implementation. No template writes
BOS, because the tokenizer adds it, and none describes tools.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from importlib import resources

from llamaslot.base.errors import ConfigError

_FOLDER = resources.files("llamaslot") / "text" / "templates"
_ALIASES = {"granite-4.0": "granite", "granite-4.1": "granite"}


def builtin_names() -> list[str]:
    """Return the names of all built-in templates in alphabetical order."""
    return sorted([*_ALIASES, *(file.name.removesuffix(".jinja") for file in _FOLDER.iterdir())])


def resolve(name_or_source: str) -> str:
    """Return the Jinja source of a built-in template (ChatML for an empty name); a Jinja source is returned
    unchanged.

    Raises `ConfigError`, which lists the known names, the most similar first.
    """
    name = name_or_source.strip() or "chatml"
    # Names have no spaces. A template may consist of plain text only.
    if "{%" in name or "{{" in name or len(name.split()) > 1:
        return name_or_source
    names = builtin_names()
    if name not in names:
        known = sorted(names, key=lambda known: -SequenceMatcher(None, known, name.lower()).ratio())
        raise ConfigError(
            f"there is no chat template '{name}'; use one of {', '.join(known)}, or a Jinja template",
            param="--chat-template",
        )
    return (_FOLDER / f"{_ALIASES.get(name, name)}.jinja").read_text("utf-8")
