"""llama-server's own form of a finished completion: the reply of `/completion`, and `__verbose` elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from llamaslot.api.generation.reply_stats import stats_of
from llamaslot.api.json_bodies import LATER
from llamaslot.base.commands import GenerateParams
from llamaslot.base.generation.request_context import ReplyOptions
from llamaslot.base.generation.sampling import Sampling
from llamaslot.service.live_request import Completion

_NEUTRAL: dict[str, Any] = {
    "n_keep": 0,
    "n_discard": 0,
    "lora": [],
}
"""llama-server's settings for features that this server does not have: all are off."""


class NativeBodies:
    """Makes the bodies of completions; they show the prompts as the model saw them."""

    def __init__(self, eog: Sequence[int], model: str, options: ReplyOptions) -> None:
        self._eog = eog
        self._model = model
        self._options = options

    def whole(self, completion: Completion) -> dict[str, Any]:
        """Return the body of a completion with all of its text; its probabilities, if it has any, are `LATER`."""
        tokens = completion.tokens.tolist() if self._options.return_tokens else []
        body = self.final(completion, content=completion.text, tokens=tokens)
        if completion.has_probs:
            body["completion_probabilities"] = LATER
        return body

    def final(self, completion: Completion, *, content: str = "", tokens: Sequence[int] = ()) -> dict[str, Any]:
        """Return the body of a completion with this text and these tokens."""
        end, params = completion.end, completion.params
        return {
            "index": completion.index,
            "content": content,
            "tokens": tokens,
            "id_slot": end.progress.slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": end.progress.n_generated,
            "tokens_evaluated": end.progress.n_prompt,
            "generation_settings": {
                **generation_settings(params.sampling, params.max_tokens),
                **self._texts(params),
                "stream": self._options.stream,
                "timings_per_token": self._options.timings_per_token,
            },
            "prompt": completion.prompt.text,
            "has_new_line": "\n" in completion.text,
            "truncated": end.truncated,
            "stop_type": end.reason,
            "stopping_word": end.stopping_word,
            "tokens_cached": end.progress.n_held,
            **stats_of([end.progress]),
        }

    def _texts(self, params: GenerateParams) -> dict[str, Any]:
        """Return the settings that only the request's own client sees; a bias of -inf is null.

        With `ignore_eos`, the tokens that end a text are shown with such a bias, as in llama-server.
        """
        ends = self._eog if params.sampling.ignore_eos else ()
        biases = {**params.sampling.logit_bias, **dict.fromkeys(ends, -math.inf)}
        return {
            "stop": params.stop,
            "logit_bias": [{"token": token, "bias": bias} for token, bias in biases.items()],
            "grammar": params.constraint.grammar if params.constraint is not None else "",
            "dry_sequence_breakers": params.sampling.dry_sequence_breakers,
        }


def generation_settings(sampling: Sampling, max_tokens: int) -> dict[str, Any]:
    """Return settings that reveal nothing of a request's text, under llama-server's names; seed -1 is 2**32 - 1."""
    settings = msgspec.structs.asdict(sampling)
    del settings["logit_bias"], settings["dry_sequence_breakers"]
    return {
        **_NEUTRAL,
        **settings,
        "n_probs": max(sampling.n_probs, 0),
        "seed": sampling.seed % 2**32,
        "max_tokens": max_tokens,
        "n_predict": max_tokens,
    }
