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
from functools import cache
from pathlib import Path
from typing import NoReturn

from llamaslot.app.config import SWITCH, Option, Values, hint, options
from llamaslot.app.foreign_flags import FOREIGN_FLAGS, ForeignFlag
from llamaslot.app.model_table import MODEL_OPTIONS, SERVER_OPTIONS
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import read_named_text

PRESETS = "--models-preset"
SHARED = "*"
"""Section with values for all models."""
AT_START = "loads_at_start"
"""Value of a model that is loaded at the start, which unlike a pinned one makes room later."""
_WITHOUT_EFFECT = ("version", "stop-timeout", "dedup-cache-models")
"""Keys that are no flags: a model is unloaded once its requests have ended, and those in the hub's cache are not
listed.
"""
_LINE = re.compile(r"(?:\[([^\]]+)\]|([A-Za-z_][\w.-]*)\s*=([^;#]*))?\s*(?:[;#].*)?")
"""As in llama-server, `;` and `#` begin a comment anywhere."""
_END_OF_LINE = re.compile(r"\r\n|\n|\r")
_REPO = re.compile(r"[^/]+/[^/]+")
_QUANT = re.compile(r"[-.](\w+)$", re.ASCII)


def read_presets(file: str) -> dict[str, Values]:
    """Return the values of each section of a file. Raises `ConfigError`."""
    found: dict[str, Values] = {}
    section = ""
    lines = _END_OF_LINE.split(read_named_text(Path(file).expanduser(), PRESETS))
    for i, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line.strip())
        if match is None:
            _refuse(f"line {i} of {file} is neither [SECTION] nor KEY = VALUE")
        name, key, value = (each and each.strip() for each in match.groups())
        if name is not None:
            if not name or "," in name:
                _refuse(f"[{name}] in {file}: a name is not empty, and has no comma")
            section = name
            # As in llama-server, a later section replaces an earlier one.
            found[section] = {}
        elif key and section:
            found[section] |= _read(section, key, value, f"{key} of [{section}] in {file}")
        elif key and key not in _WITHOUT_EFFECT:
            _refuse(f"{key} in {file} is before the first section: write [*] above it, for all models")
    return found


def is_repository(name: str) -> bool:
    """True if a section's name may be that of a repository of Hugging Face's hub."""
    return _REPO.fullmatch(name) is not None


def listed_name(section: str) -> str:
    """Return the name under which llama-server lists a section's model: with the quantization alone as its tag."""
    name, colon, tag = section.rpartition(":")
    if not colon:
        return section
    found = _QUANT.search(tag)
    return name + colon + (found[1] if found else tag).upper()


def _read(section: str, key: str, value: str, source: str) -> Values:
    """Return the value of a key by the name of its option; nothing for a key without effect."""
    switch = SWITCH.get(value.lower())
    if key == "load-on-startup":
        if switch is None:
            _refuse(f"{source}: {value!r} is invalid: expected true or false")
        return {AT_START: (source, switch)}
    if key in _WITHOUT_EFFECT:
        return {}
    option, negated, foreign = _known().get(key, (None, False, None))
    if foreign is not None:
        if foreign.is_refused and (foreign.values or switch is not False):
            _refuse(f"{source}: {foreign.reason}")
        return {}
    if option is None:
        _refuse(f"{source} is no flag{hint(key, _known())}")
    if option.name in SERVER_OPTIONS:
        _refuse(f"{source} is for the whole server: remove it, and give {option.flag} on the command line")
    if section == SHARED and option.name in ("model", *MODEL_OPTIONS):
        _refuse(f"{source} is for one model: write it into the section of that model")
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
    raise ConfigError(f"{PRESETS}: {message}", param=PRESETS)
