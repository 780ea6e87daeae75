"""Main program of the process that loads llama.cpp for the doctor: prints `LlamaFacts` as JSON.

Its optional argument is a model file; the weights are not read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from llamaslot.app.doctor.llama_facts import DeviceFacts, LlamaFacts, ModelFacts
from llamaslot.app.logs import configure_logging


def main() -> None:
    """Print the facts."""
    configure_logging("json", "error")
    # Imported after logging is configured, because the import fails if the library cannot be loaded.
    from llamaslot.backend.llama import library, loading  # noqa: PLC0415
    from llamaslot.backend.llama.state import capabilities  # noqa: PLC0415
    from llamaslot.base.errors import ConfigError  # noqa: PLC0415

    library.initialise()
    build = library.build()
    gpus = (library.GPU, library.INTEGRATED_GPU)
    devices = tuple(
        DeviceFacts(each.name, each.description, each.kind in gpus, each.free, each.total)
        for each in library.devices()
    )
    model = None
    if len(sys.argv) > 1:
        try:
            handle = loading.load_structure(Path(sys.argv[1]))
        except ConfigError as error:
            model = ModelFacts(error=error.message)
        else:
            reason = capabilities.why_not_reusable(handle)
            reuse = "by checkpoints" if capabilities.has_partial_state(handle) else reason or "to the token"
            model = ModelFacts(library.metadata(handle, "general.architecture"), reuse)
    facts = LlamaFacts(build.version, build.flags, build.backends, devices, model)
    sys.stdout.buffer.write(msgspec.json.encode(facts))


if __name__ == "__main__":
    main()
