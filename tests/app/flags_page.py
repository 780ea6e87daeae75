"""docs/flags.md, and the list of llama-server's flags that it is compared with; `make flags` writes both.

The list comes from the source of llama.cpp (`common/arg.cpp`), which need not be there: the file beside this one
has the names, the number of values and the variable of each flag.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from llamaslot.app.config import Option, options
from llamaslot.app.config_reader import shown
from llamaslot.app.foreign_flags import FOREIGN_FLAGS

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "flags.md"
LIST = Path(__file__).with_name("llama_server_flags.txt")
_WIDTH = 116
_LIST_HEAD = """\
# Flags of llama-server (llama.cpp of llama-cpp-python 0.3.36): names | names of the opposite | values | variable.
# Written by `make flags`.
"""
_HEAD = """\
# Flags

Each flag of llama-server, by each of its names, is one of these: an [option](#options-of-llama-server), with the
same environment variable; [without effect](#flags-without-effect), since what it asks for is done anyway or has no
counterpart; or [refused](#refused-flags), with what to do instead. The log names flags without effect once at the
start (`flag.without_effect`), and a refused flag or variable ends it. Options are also keys of a TOML file
(`--config`), without the leading dashes.

A switch has an opposite, such as `--no-jinja` of `--jinja`, and a variable with `NO_` in its name
(`LLAMA_ARG_NO_JINJA`).

`make flags` writes this page from the tables that read the command line (`llamaslot/app/config.py`,
`llamaslot/app/foreign_flags.py`); a test compares both with llama.cpp's source.
"""
_OWN = "\n## Options of llamaslot alone\n\n"
_OPTIONS = "\n## Options of llama-server\n\n"
_WITHOUT_EFFECT = "\n## Flags without effect\n\nBy the reason.\n\n"
_REFUSED = "\n## Refused flags\n\nBy what the error says.\n\n"


@dataclass(frozen=True)
class LlamaFlag:
    """A flag of llama-server."""

    flags: tuple[str, ...]
    negatives: tuple[str, ...]
    n_values: int
    env: str

    def __str__(self) -> str:
        """Return the line of the list."""
        return f"{' '.join(self.flags)} | {' '.join(self.negatives)} | {self.n_values} | {self.env}"

    @classmethod
    def read(cls, line: str) -> LlamaFlag:
        """Read what `str` gives."""
        flags, negatives, n_values, env = (part.strip() for part in line.split("|"))
        return cls(tuple(flags.split()), tuple(negatives.split()), int(n_values), env)


def listed_flags() -> list[LlamaFlag]:
    """The flags in the list."""
    return [LlamaFlag.read(line) for line in LIST.read_text().splitlines() if not line.startswith("#")]


def flags_of(source: str) -> list[LlamaFlag]:
    """Return the flags of the server in the source of llama.cpp's `common/arg.cpp`."""
    names = r'\{((?:\s*"-[^"]*",?)+)\s*\},'
    form = re.compile(rf"\s*(?://[^\n]*\s*)?{names}\s*(?:{names})?")
    source = source[source.index("auto add_opt = ") : source.index("\nvoid common_params_add_preset_options")]
    found = []
    for block in source.split("add_opt(common_arg(")[1:]:
        examples = re.search(r"set_examples\(\{?([^)]*)\)", block)
        excluded = re.search(r"set_excludes\(([^)]*)\)", block)
        if examples and not re.search(r"LLAMA_EXAMPLE_(SERVER|COMMON)\b|mmproj_examples", examples[1]):
            continue
        if excluded and "LLAMA_EXAMPLE_SERVER" in excluded[1]:
            continue
        head = form.match(block)
        assert head is not None, block[:200]
        handler = re.search(r"\[\]\(common_params &([^)]*)\)", block)
        assert handler is not None, block[:200]
        n_values = 0 if "bool" in handler[1] else handler[1].count(",")
        env = re.search(r'set_env\("([^"]+)"\)', block)
        flags, negatives = (tuple(re.findall(r'"([^"]+)"', text or "")) for text in head.groups())
        found.append(LlamaFlag(flags, negatives, n_values, env[1] if env else ""))
    return sorted(set(found), key=str)


def page(llama: Iterable[LlamaFlag]) -> str:
    """Return docs/flags.md for llama-server's flags."""
    theirs = {flag for row in llama for flag in row.flags}
    shared, own = [], []
    for option in options():
        (own if theirs.isdisjoint(option.flags) else shared).append(_option(option))
    parts = [_HEAD, _OPTIONS, *shared, _OWN, *own, _WITHOUT_EFFECT, *_groups(is_refused=False)]
    return "".join([*parts, _REFUSED, *_groups(is_refused=True)])


def _option(option: Option) -> str:
    value = " X" if not option.is_bool else ""
    flags = ", ".join(f"`{flag}{value}`" for flag in option.flags)
    extra = [flag for flag in option.negatives if not flag.startswith(("--no-", "-no-"))]
    off = f", off: `{'`, `'.join(extra)}`" if extra else ""
    return _item(f"{flags}{off} (`{option.env}`): {option.text} (default: {shown(option.default)})")


def _groups(*, is_refused: bool) -> Iterator[str]:
    rows = (row for row in FOREIGN_FLAGS if row.is_refused == is_refused)
    for reason, group in groupby(rows, key=lambda row: row.reason):
        each = (
            ", ".join(f"`{flag}`" for flag in row.flags) + (f" (`{row.env}`)" if row.env else "") for row in group
        )
        yield _item(f"{reason}: {'; '.join(each)}")


def _item(text: str) -> str:
    """Return an item of a list, with flags as code; no code is broken at a space."""
    pieces = re.split("(`[^`]*`)", text)
    pieces[::2] = [re.sub(r"(?<![\w-])--[a-z][a-z-]*", r"`\g<0>`", piece) for piece in pieces[::2]]
    text = "".join(pieces)
    kept = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text.replace("<", "\\<").replace("*", "\\*"))
    lines = textwrap.wrap(kept, _WIDTH, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")
    return "- " + "\n".join(lines).replace("\0", " ") + "\n"


def main() -> None:
    """Write the page; and the list, if the source is there."""
    from bench.peers.build import llama_cpp_source  # noqa: PLC0415 - tests only read the list

    found = flags_of((llama_cpp_source() / "common" / "arg.cpp").read_text())
    LIST.write_text(_LIST_HEAD + "".join(f"{flag}\n" for flag in found))
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
