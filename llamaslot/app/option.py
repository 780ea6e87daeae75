"""Rows of the configuration table: how an option is described, and the flags and variables derived from that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

SWITCH = dict.fromkeys(("on", "enabled", "true", "1"), True) | dict.fromkeys(
    ("off", "disabled", "false", "0"), False
)
"""Words for on and off in variables and files, as in llama-server."""
_T = TypeVar("_T")


def llama(
    default: _T,
    text: str,
    flags: str = "",
    *,
    env: str = "LLAMA_ARG_{}",
    words: Mapping[str, Any] = MappingProxyType({}),
) -> _T:
    """Describe an option that llama-server also has, by its default and help text.

    An option `ctx_size` has the flag `--ctx-size` and the environment variable `LLAMA_ARG_CTX_SIZE` by default.
    `flags` lists other flags, separated by spaces, and `env` is another variable. `words` maps words to the values
    that they stand for.
    """
    return field(default=default, metadata={"text": text, "flags": flags, "env": env, "words": words})


own = partial(llama, env="LLAMASLOT_{}")
"""An option that llama-server does not have."""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table."""

    name: str
    kind: Any
    flags: list[str]
    env: str
    default: Any
    text: str
    words: Mapping[str, Any]
    """Words that stand for values."""

    @property
    def flag(self) -> str:
        """The long flag, which messages use to name the option."""
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def is_bool(self) -> bool:
        """True for a switch without a value."""
        return self.types[0] is bool

    @property
    def is_list(self) -> bool:
        """True for an option that may be given several times."""
        return get_origin(self.kind) is tuple

    @property
    def types(self) -> tuple[Any, ...]:
        """The types of the option's values; several if both words and numbers are allowed."""
        is_one = get_origin(self.kind) in (None, Literal, Annotated, tuple)
        kinds = (self.kind,) if is_one else get_args(self.kind)
        return tuple(get_args(each)[0] if get_origin(each) is Annotated else each for each in kinds)

    @property
    def choices(self) -> list[str]:
        """The words that the option accepts, and N if it also accepts a number; empty if it accepts no words."""
        words = [word for kind in self.types if get_origin(kind) is Literal for word in get_args(kind)]
        return [*words, "N"] if words and len(self.types) > 1 else words


def options_of(table: type[Any]) -> Iterator[Option]:
    """Yield the rows of a table, a dataclass whose fields are described by `llama` and `own`, in order."""
    kinds = get_type_hints(table, include_extras=True)
    for row in fields(table):
        name, kind, meta = row.name, kinds[row.name], row.metadata
        flags = meta["flags"].split() or [f"--{name.replace('_', '-')}"]
        words = SWITCH if kind in (bool, bool | None) else meta["words"]
        yield Option(name, kind, flags, meta["env"].format(name.upper()), row.default, meta["text"], words)
