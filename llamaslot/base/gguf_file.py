"""A check of model files that needs no llama.cpp."""

from __future__ import annotations

from pathlib import Path

from llamaslot.base.errors import ConfigError


def check_file(path: Path) -> None:
    """Raise `ConfigError` for what is not a readable GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise ConfigError(f"there is no model file {path}", param="--model") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="--model") from None
    if magic != b"GGUF":
        raise ConfigError(f"{path} is not a GGUF file", param="--model")
