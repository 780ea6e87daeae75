"""The models of a server that has several: from `--models-dir`, several `-m`, presets (`model_presets.py`), and
tables of the configuration file.

    [models.coder]
    model = "/models/qwen3-coder.gguf"
    alias = "qwen"
    ctx-size = 32768
    pin = true

A table may set any option that is a model's own, and names one that another flag has given already, or a new one.
As in llama-server, flags and environment variables come before tables, and tables before the rest of the file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamaslot.app.config import Config
from llamaslot.app.model_files import is_projector, nearest_projector
from llamaslot.base.errors import ConfigError

SERVER_OPTIONS = frozenset(
    [
        "hf_token",
        "offline",
        "host",
        "port",
        "owned_by",
        "models_dir",
        "models_preset",
        "models_max",
        "models_autoload",
        "models_memory",
        "load_timeout",
        "cache_ram",
        "cache_disk",
        "cache_disk_size",
        "cache_disk_write_per_day",
        "cache_salt_from_api_key",
        "cache_debug_text",
        "api_key",
        "api_key_file",
        "ssl_key_file",
        "ssl_cert_file",
        "metrics",
        "slots",
        "webui",
        "cors_origins",
        "allowed_hosts",
        "insecure",
        "sse_ping_interval",
        "max_choices",
        "max_reply_probs",
        "max_body_mb",
        "max_total_body_mb",
        "body_timeout",
        "max_logit_bias_entries",
        "max_stop_strings",
        "max_stop_chars",
        "max_stored_responses",
        "max_stored_responses_mb",
        "max_connections",
        "keep_alive_timeout",
        "write_timeout",
        "max_stream_buffer_kb",
        "drain_delay",
        "shutdown_timeout",
        "log_format",
        "log_level",
    ]
)
"""Options that all models of a server share."""
MODEL_OPTIONS = ("hf_repo", "hf_file", "alias", "tags", "mmproj")
"""Options that name one model, or belong to it, and so are for a server of one, or for a table or section."""
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
_FIRST_PART = re.compile(r"-00001-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One of several models."""

    names: tuple[str, ...]
    """Its names; the first one is its id."""
    config: Config
    is_pinned: bool = False
    """True if it is loaded at the start, and makes no room for others."""
    loads_at_start: bool = False
    """True if it is loaded at the start, and makes room later as others do."""
    is_default: bool = False
    """True for the model of requests that name none: the first one of `-m`."""


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Name one of several models in the errors of its configuration."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"model {name}: {error.message}", param=error.param) from None


def files_in(folder: str) -> dict[str, tuple[str, str]]:
    """Return the models in a folder by their names: GGUF files, and folders with one. Raises `ConfigError`.

    As in llama-server, one in a folder of its own comes with the projector there; the second path is empty without.
    """
    try:
        paths = sorted(Path(folder).expanduser().iterdir())
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--models-dir: {folder} cannot be read: {reason}", param="--models-dir") from None
    named = []
    for path in paths:
        if not path.is_dir():
            named += [(model_id(str(path)), path, "")] if _is_model(path) else []
            continue
        # Some that come with a file system can be read by nobody.
        with contextlib.suppress(OSError):
            files = sorted(path.iterdir())
            models = [each for each in files if _is_model(each)]
            named += [(path.name, each, nearest_projector(map(str, files), str(each))) for each in models[:1]]
    found: dict[str, tuple[str, str]] = {}
    for name, path, projector in named:
        if name in found:
            message = f"--models-dir: {path} and {found[name][0]} have the same name: rename one of them"
            raise ConfigError(message, param="--models-dir")
        found[name] = str(path), projector
    return found


def model_id(model: str) -> str:
    """Return the name of a model by its `--model`: that of its file, without ending and number of the part."""
    return _FIRST_PART.sub("", Path(model.rpartition(":")[2]).name.removesuffix(".gguf"))


def _is_model(path: Path) -> bool:
    is_part = _LATER_PART.search(path.stem) is not None
    return path.suffix == ".gguf" and path.is_file() and not is_part and not is_projector(path.name)


def check_table(name: str, table: Any) -> Mapping[str, Any]:
    """Return a table of the configuration file with names of options. Raises `ConfigError`."""
    if not name.strip() or "," in name:
        raise ConfigError(f"[models.{name}]: a name is not empty, and has no comma", param="--config")
    if not isinstance(table, dict):
        raise ConfigError(f"[models.{name}] is not a table", param="--config")
    values = {key.replace("-", "_"): value for key, value in table.items()}
    if shared := sorted(values.keys() & SERVER_OPTIONS):
        key = shared[0].replace("_", "-")
        raise ConfigError(
            f"[models.{name}]: {key} is for all models: set it outside of the table", param="--config"
        )
    if not isinstance(values.get("pin", False), bool):
        raise ConfigError(f"[models.{name}]: pin is true or false", param="--config")
    return values
