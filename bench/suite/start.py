"""Start llamaslot or llama-server with the flags of llama-server's test suite, but with local models.

`python -m bench.suite.start FLAG...` becomes the server. The environment says which (`SERVER`) and the model files.
Only what chooses a model is replaced; any other flag reaches the server, which refuses what it does not have.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

SERVER = "LLAMASLOT_SUITE_SERVER"
"""Environment variable with the command that starts the server, as a JSON list."""
MODELS = "LLAMASLOT_SUITE_MODELS"
"""Environment variable with the flags that stand for a model by a part of its name, as JSON (`Models.flags`)."""
DEFAULT = "LLAMASLOT_SUITE_DEFAULT"
"""Environment variable with the flags in place of a model where the suite names none, as a JSON list."""
FLAGS = "LLAMASLOT_SUITE_FLAGS"
"""Environment variable with further flags, separated by spaces."""
STARTS = "LLAMASLOT_SUITE_STARTS"
"""Environment variable with the file that gets the suite's flags of each start, as a JSON line."""
MODEL_FLAGS = ("--model", "--model-url", "--hf-repo", "--hf-file", "--mmproj-url")
"""Flags that choose a model; each has a value."""
NO_PROJECTOR = "--no-mmproj"
"""Flag for a model without the projector in its repository; it would not turn one off that is given as a file."""


def command(flags: Sequence[str]) -> list[str]:
    """Return the server's command for the suite's flags, with local models in place of those that they choose."""
    kept, chosen, has_projector = [], {}, True
    rest = iter(flags)
    for flag in rest:
        if flag in MODEL_FLAGS:
            chosen[flag] = next(rest)
        elif flag == NO_PROJECTOR:
            has_projector = False
        else:
            kept.append(flag)
    models: dict[str, list[str]] = json.loads(os.environ[MODELS])
    if chosen:
        names = " ".join(chosen.values())
        model = next(found for part, found in models.items() if part in names)
        if not has_projector:
            model = model[: model.index("--mmproj")]
    else:
        model = json.loads(os.environ[DEFAULT])
    return [*json.loads(os.environ[SERVER]), *model, *kept, *os.environ.get(FLAGS, "").split()]


if __name__ == "__main__":
    with open(os.environ[STARTS], "a", encoding="utf-8") as file:
        file.write(json.dumps(sys.argv[1:]) + "\n")
    server = command(sys.argv[1:])
    os.execvp(server[0], server)
