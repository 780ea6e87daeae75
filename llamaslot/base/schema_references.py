"""References within a JSON schema, such as `#/$defs/item`: one rule for grammars, templates and output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_is_index = re.compile(r"[0-9]{1,9}").fullmatch


def referenced(reference: object, root: Mapping[str, Any]) -> Any:
    """Return what a reference points to within the schema `root`; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    found: Any = root
    for name in names_in(reference):
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and _is_index(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def names_in(reference: str) -> list[str]:
    """Return the names and indices of which a reference within a schema consists."""
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in reference[1:].split("/")[1:]]
