"""All checks of the doctor, in order."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import platformdirs
import psutil

from llamaslot.app.cache.cache_remote import remote_settings
from llamaslot.app.doctor import folder_checks, host_checks, server_checks
from llamaslot.app.doctor.check import Check
from llamaslot.app.doctor.llama_checks import llama_checks, model_file
from llamaslot.backend.host_cpus import host_cpus
from llamaslot.backend.host_gpus import host_gpus
from llamaslot.backend.host_memory import host_memory
from llamaslot.base.errors import ConfigError
from llamaslot.base.gguf_file import parts

_BUSY_S = 0.3
"""Time over which CPU usage is measured."""
OnProgress = Callable[[str], None]
"""Called with the name of the step that begins, for the terminal."""


class Examination:
    """Runs the checks and holds the configuration they read; calls `on_progress` before each slow check."""

    def __init__(self, flags: argparse.Namespace, environ: Mapping[str, str], on_progress: OnProgress) -> None:
        self._environ = environ
        self._on_progress = on_progress
        self.config, self._configuration = server_checks.configuration(flags, environ)

    def checks(self) -> Iterator[Check]:
        """Yield the results, one by one."""
        config = self.config
        yield host_checks.software()
        model, problem = model_file(config.model)
        if problem is not None:
            yield problem
        self._on_progress("loading llama.cpp")
        yield from llama_checks(model, config.gpu_layers, host_gpus())
        yield from self._host(sum(part.stat().st_size for part in parts(model)) if model is not None else 0)
        yield from self._folders()
        yield self._configuration
        yield from self._remote()
        yield server_checks.access(config)
        yield server_checks.port(config)

    def _host(self, model_bytes: int) -> Iterator[Check]:
        swap = psutil.swap_memory()
        yield host_checks.cpus(host_cpus(), self.config.threads, psutil.cpu_percent(_BUSY_S) / 100)
        free, total = host_memory()
        yield host_checks.memory(free, total, model_bytes)
        yield host_checks.swap(int(swap.total), int(swap.used), total)
        yield host_checks.descriptors(self.config.max_connections)

    def _remote(self) -> Iterator[Check]:
        try:
            settings = remote_settings(self.config)
        except ConfigError:
            # The configuration check has reported this.
            return
        if settings is not None:
            # Imported only if needed, because nothing else uses the redis package.
            from llamaslot.app.doctor.remote_checks import remote_checks  # noqa: PLC0415

            self._on_progress(f"asking {settings.shown}")
            yield from remote_checks(settings, self.config)

    def _folders(self) -> Iterator[Check]:
        cache = platformdirs.user_cache_path("llamaslot")
        self._on_progress(f"measuring {cache}")
        yield folder_checks.cache_folder(cache)
        if self.config.cache_disk:
            disk = Path(self.config.cache_disk).expanduser()
            self._on_progress(f"measuring {disk}")
            yield folder_checks.disk_tier(disk)
        wheels = self._environ.get("LLAMASLOT_WHEEL_CACHE")
        yield folder_checks.wheel_cache(Path(wheels).expanduser() if wheels else cache / "wheels")
