"""llama-server's file of `--models-preset`: an INI file with a section for each model, and flags of it as keys.

    version = 1
    [*]
    c = 8192
    [coder]
    model = /models/qwen3-coder.gguf
    LLAMA_ARG_N_PARALLEL = 2
    no-mmap = true

Keys are flags without their dashes, or environment variables. As on the command line, those of flags that change
nothing here are ignored, and those of flags that are refused are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from llamaslot.app.config import SWITCH, Option, hint, options
from llamaslot.app.foreign_flags import FOREIGN_FLAGS, ForeignFlag
from llamaslot.app.model_table import MODEL_OPTIONS, SERVER_OPTIONS
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import read_named_text

Values: TypeAlias = dict[str, tuple[str, Any]]
"""Values of options by their names, each with its source."""

FLAG = "--models-preset"
SHARED = "*"
"""Section with values for all models."""
_WITHOUT_EFFECT = ("stop-timeout", "dedup-cache-models")
"""Keys that are no flags: a model is unloaded once its requests have ended, and those in the hub's cache are not
listed.
"""
_LINE = re.compile(r"(?:\[([^\]]+)\]|([A-Za-z_][\w.-]*)\s*=([^;#]*))?\s*(?:[;#].*)?")
"""As in llama-server, `;` and `#` begin a comment anywhere."""
_REPO = re.compile(r"[^/]+/[^/]+")


def read_presets(file: str) -> dict[str, Values]:
    """Return the values of each section of a file; `pin` is one of them. Raises `ConfigError`."""
    found: dict[str, Values] = {}
    for section, key, value, source in _entries(file):
        values = found.setdefault(section, {})
        if key:
            values |= _read(section, key, value, source)
    for section, values in found.items():
        # As for llama-server, one in the cache of Hugging Face's hub needs no other name.
        if _REPO.fullmatch(section) and not values.keys() & {"model", "hf_repo"}:
            values["hf_repo"] = f"[{section}] in {file}", section
    return found


def _entries(file: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield section, key, value and source of each line with a key; both are empty for the line of a section."""
    section = ""
    for i, line in enumerate(read_named_text(Path(file).expanduser(), FLAG).splitlines(), start=1):
        match = _LINE.fullmatch(line.strip())
        if match is None:
            _refuse(f"line {i} of {file} is neither [SECTION] nor KEY = VALUE")
        name, key, value = (each.strip() if each else "" for each in match.groups())
        if name:
            if "," in name:
                _refuse(f"[{name}] in {file}: a name has no comma")
            section = name
            yield section, "", "", ""
        elif key and section:
            yield section, key, value, f"{key} of [{section}] in {file}"
        elif key and key != "version":
            _refuse(f"{key} in {file} is before the first section: write [*] above it, for all models")


def _read(section: str, key: str, value: str, source: str) -> Values:
    """Return the value of a key by the name of its option; nothing for a key without effect."""
    switch = SWITCH.get(value.lower())
    if key == "load-on-startup":
        if switch is None:
            _refuse(f"{source}: {value!r} is invalid: expected true or false")
        return {"pin": (source, switch)}
    if key in _WITHOUT_EFFECT:
        return {}
    option, negated, foreign = _known().get(key, (None, False, None))
    if foreign is not None:
        is_off = not foreign.values and switch is False
        return {} if is_off or not foreign.is_refused else _refuse(f"{source}: {foreign.reason}")
    if option is None:
        _refuse(f"{source} is no flag{hint(key, _known())}")
    if option.name in SERVER_OPTIONS:
        _refuse(f"{source} is for the whole server: remove it, and give {option.flag} on the command line")
    if section == SHARED and option.name in ("model", *MODEL_OPTIONS):
        _refuse(f"{source} is for one model: write it into the section of that")
    if negated:
        if switch is None:
            _refuse(f"{source}: {value!r} is invalid: expected true or false")
        return {option.name: (source, not switch)}
    return {option.name: (source, value)}


@cache
def _known() -> dict[str, tuple[Option | None, bool, ForeignFlag | None]]:
    """Return what each key stands for: an option, which it may negate, or another flag of llama-server."""
    found: dict[str, tuple[Option | None, bool, ForeignFlag | None]] = {}
    for row in FOREIGN_FLAGS:
        found |= {name.lstrip("-"): (None, False, row) for name in (*row.flags, row.env) if name}
    for option in options():
        found |= {name.lstrip("-"): (option, False, None) for name in (*option.flags, option.env)}
        found |= {name.lstrip("-"): (option, True, None) for name in option.negatives}
    return found


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{FLAG}: {message}", param=FLAG)
