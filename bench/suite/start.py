"""Start llamaslot or llama-server with the flags of llama-server's test suite, but with a local model.

`python -m bench.suite.start FLAG...` becomes the server. The environment says which (`SERVER`) and the model file.
Only what chooses the model is replaced; any other flag reaches the server, which refuses what it does not have.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

SERVER = "LLAMASLOT_SUITE_SERVER"
"""Environment variable with the command that starts the server, as a JSON list."""
MODEL = "LLAMASLOT_SUITE_MODEL"
"""Environment variable with the GGUF file."""
DEFAULT = "LLAMASLOT_SUITE_DEFAULT"
"""Environment variable with the flags that name a model where the suite names none."""
FLAGS = "LLAMASLOT_SUITE_FLAGS"
"""Environment variable with further flags, separated by spaces."""
STARTS = "LLAMASLOT_SUITE_STARTS"
"""Environment variable with the file that gets the suite's flags of each start, as a JSON line."""
MODEL_FLAGS = ("--model", "--model-url", "--hf-repo", "--hf-file", "--mmproj-url", "--model-draft")
"""Flags that choose a model; each has a value."""


def command(flags: Sequence[str]) -> list[str]:
    """Return the server's command for the suite's flags, with the local model in place of the one they choose."""
    kept, is_value, has_model = [], False, False
    for flag in flags:
        if is_value:
            is_value = False
        elif flag in MODEL_FLAGS:
            is_value = has_model = True
        else:
            kept.append(flag)
    model = ["--model", os.environ[MODEL]] if has_model else os.environ.get(DEFAULT, "").split()
    return [*json.loads(os.environ[SERVER]), *model, *kept, *os.environ.get(FLAGS, "").split()]


if __name__ == "__main__":
    with open(os.environ[STARTS], "a", encoding="utf-8") as file:
        file.write(json.dumps(sys.argv[1:]) + "\n")
    server = command(sys.argv[1:])
    os.execvp(server[0], server)
