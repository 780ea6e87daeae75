"""Log-probabilities of the embedded model by llama.cpp alone: lists of token ids in, lists of scores out, as JSON.

Runs in the project's environment, which has llama-cpp-python. The first token has no score.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama

import llamaslot.demo


def main() -> None:
    """Score the texts."""
    path = Path(llamaslot.demo.__file__).parent / "demo.gguf"
    model = Llama(str(path), n_ctx=2048, n_threads=1, logits_all=True, verbose=False)
    results = []
    for tokens in json.load(sys.stdin):
        model.reset()
        model.eval(tokens)
        logits = np.asarray(model.scores[: len(tokens) - 1], dtype=np.float64)
        best = logits.max(axis=1, keepdims=True)
        norms = best[:, 0] + np.log(np.exp(logits - best).sum(axis=1))
        results.append([logits[i, token] - norms[i] for i, token in enumerate(tokens[1:])])
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
