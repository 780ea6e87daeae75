"""Model names: a path, a name in models.txt, or `OWNER/REPO:FILE.gguf`, resolved to a file.

Reads models.txt and looks at the disk. It never downloads (`llamaslot.app.hub` does) and never opens
a GGUF (the backend does).
"""

from __future__ import annotations

import difflib
import hashlib
import re
from importlib import resources
from pathlib import Path
from typing import Literal, TypeAlias, cast

import msgspec

from llamaslot.base.errors import ConfigError

Checked: TypeAlias = Literal["shape", "weights", "nothing"]
_CHECKED = ("shape", "weights")
_IN_PACKAGE = "-"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})")
_REFERENCE = re.compile(rf"({_REPO.pattern}):(\S+\.gguf)")


class Model(msgspec.Struct, frozen=True):
    """A GGUF that is named rather than given as a path."""

    name: str
    """The name that the user types."""
    repo: str
    """The Hugging Face repository, or empty for a file inside the package."""
    file: str
    checked: Checked
    """Extent to which this project has tried it, as models.txt defines; `nothing` if it is not listed."""
    note: str = ""
    sha256: str = ""
    """The digest that its file must have; empty for any."""


def parse_models(text: str, source: str = "models.txt") -> dict[str, Model]:
    """The models that `text` lists, by name and in its order.

    Raises ConfigError that names `source` and the line.
    """
    models: dict[str, Model] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            model = _parse_line(line)
            if model.name in models:
                raise ValueError(f"the name {model.name!r} is taken by an earlier line")
        except ValueError as error:
            raise ConfigError(f"{source}, line {number}: {error}") from None
        models[model.name] = model
    return models


def _parse_line(line: str) -> Model:
    columns = line.split(maxsplit=4)
    if len(columns) < 4:
        raise ValueError(f"expected NAME REPO FILE CHECKED [sha256:DIGEST] [NOTE], found {len(columns)} columns")
    name, repo, file, checked = columns[:4]
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name (small letters, digits, '.', '_' and '-')")
    if repo != _IN_PACKAGE and not _REPO.fullmatch(repo):
        raise ValueError(f"{repo!r} is neither OWNER/REPO nor {_IN_PACKAGE!r}")
    if not file.endswith(".gguf"):
        raise ValueError(f"{file!r} is not a .gguf file")
    if checked not in _CHECKED:
        raise ValueError(f"{checked!r} is none of: {', '.join(_CHECKED)}")
    rest = columns[4].strip() if len(columns) == 5 else ""
    digest, _, note = rest.partition(" ") if rest.startswith("sha256:") else ("", "", rest)
    if digest and not _SHA256.fullmatch(digest):
        raise ValueError(f"{digest!r} is not sha256: and 64 small hexadecimal digits")
    sha256 = digest.removeprefix("sha256:")
    return Model(name, "" if repo == _IN_PACKAGE else repo, file, cast(Checked, checked), note.strip(), sha256)


def known_models() -> dict[str, Model]:
    """The models of the models.txt that came with this package."""
    return parse_models(resources.files("llamaslot").joinpath("models.txt").read_text("utf-8"))


def find_model(name: str) -> Model:
    """The model that `name` or `OWNER/REPO:FILE.gguf` stands for.

    Raises ConfigError, with the nearest name if one is near.
    """
    models = known_models()
    if name in models:
        return models[name]
    if reference := _REFERENCE.fullmatch(name):
        return Model(name, reference[1], reference[2], "nothing")
    if nearest := difflib.get_close_matches(name, models, n=1):
        raise ConfigError(f"no model is called {name!r}; did you mean {nearest[0]!r}?")
    raise ConfigError(f"no model is called {name!r}; there are: {', '.join(models)}, or OWNER/REPO:FILE.gguf")


def check_digest(model: Model, path: Path) -> None:
    """Raise `ConfigError` if models.txt names a digest for a model and its file has another one."""
    if not model.sha256:
        return
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if digest != model.sha256:
        advice = f"delete {path.resolve()} and pull it again" if model.repo else "install llamaslot again"
        raise ConfigError(
            f"{model.name} is not the file that models.txt names: its SHA-256 is {digest}, it should be "
            f"{model.sha256}; {advice}"
        )


def local_file(model: Model) -> Path | None:
    """Return the path of `model` on this machine, or None."""
    if model.repo:
        # Imported only here: a server that is given a path should not hold the hub's library in memory.
        from llamaslot.app import hub  # noqa: PLC0415

        return hub.cached(model.repo, model.file)
    path = Path(str(resources.files("llamaslot").joinpath("demo", model.file)))
    return path if path.is_file() else None


def resolve_model(name_or_path: str) -> Path:
    """The file to load: an existing file first, then a name whose file is on this machine.

    Raises ConfigError that says how to get the file, or that there is no such path or name.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    looks_like_path = path.is_absolute() or path.suffix == ".gguf" or name_or_path.startswith(".")
    if looks_like_path and not _REFERENCE.fullmatch(name_or_path):
        raise ConfigError(f"there is no file {name_or_path}")
    model = find_model(name_or_path)
    if file := local_file(model):
        return file
    if model.repo:
        raise ConfigError(f"{model.name} is not on this machine; get it with `llamaslot pull {model.name}`")
    raise ConfigError(f"{model.file} is missing from the package; install llamaslot again")
