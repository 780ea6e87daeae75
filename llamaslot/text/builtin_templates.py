"""Chat templates by name, for models that ship none or a broken one: the files in `templates/`.

The names are llama.cpp's, and tests compare each template with llama.cpp's own implementation. No template writes
BOS at the start, since the tokenizer adds it, and none describes tools.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from importlib import resources

from llamaslot.base.errors import ConfigError

_FOLDER = resources.files("llamaslot") / "text" / "templates"
_ALIASES = {"granite-4.0": "granite", "granite-4.1": "granite"}


def builtin_names() -> list[str]:
    """Return the names of all templates in alphabetical order."""
    return sorted([*_ALIASES, *(file.name.removesuffix(".jinja") for file in _FOLDER.iterdir())])


def resolve(name_or_source: str) -> str:
    """Return the Jinja source of a name (ChatML for an empty one), or a Jinja source as it is.

    Raises `ConfigError` that lists the known names, the most similar first.
    """
    name = name_or_source.strip() or "chatml"
    # No name has a space; a template may consist of plain text.
    if "{%" in name or "{{" in name or len(name.split()) > 1:
        return name_or_source
    names = builtin_names()
    if name not in names:
        known = sorted(names, key=lambda known: -SequenceMatcher(None, known, name.lower()).ratio())
        raise ConfigError(
            f"no chat template is called '{name}'; known are {', '.join(known)}; or give a Jinja template",
            param="--chat-template",
        )
    return (_FOLDER / f"{_ALIASES.get(name, name)}.jinja").read_text("utf-8")
