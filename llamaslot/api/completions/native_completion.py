"""`POST /completion`: text completions in llama-server's own format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from aiohttp import web

from llamaslot.api.completions.reply_bodies import PromptProgress, pick, stats_of, timings
from llamaslot.api.completions.response_format import ResponseFormat, complete
from llamaslot.api.context import READINESS
from llamaslot.api.sse import event
from llamaslot.base.commands import Detokenize, Detokenized, Submit
from llamaslot.base.errors import NotSupportedError
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.service.generations import Generation
from llamaslot.service.service import Service

_NEUTRAL: dict[str, Any] = {
    "n_keep": 0,
    "n_discard": 0,
    "lora": [],
}
"""llama-server's settings for features that this server does not have: all are off."""


async def completion(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    return await complete(request, "native", NativeFormat)


async def infill(request: web.Request) -> web.StreamResponse:
    """Complete the middle between a prefix and a suffix."""
    if request.app[READINESS].check().info.fim is None:
        raise NotSupportedError("this model cannot infill: its vocabulary has no fill-in-the-middle tokens")
    return await complete(request, "infill", NativeFormat)


class NativeFormat(ResponseFormat):
    """llama-server's replies."""

    id_prefix = "cmpl-"
    returns_prompt = True
    _prompts: Sequence[str] = ()
    _eog: Sequence[int] = ()

    async def prepare(self, service: Service) -> None:
        """Decode the prompts, so that the reply shows them as the model saw them."""
        self._eog = service.info.eog
        texts: dict[tuple[int, ...], str] = {}
        for each in self._generations:
            if each.prompt_tokens not in texts:
                query = Detokenize(each.prompt_tokens, each.submit.client)
                texts[each.prompt_tokens] = (await service.ask(query, Detokenized)).content
        self._prompts = [texts[each.prompt_tokens] for each in self._generations]

    def chunks(self, generation: Generation, output: Output | Finished) -> Iterator[bytes]:
        """Yield new text and tokens, and everything else at the end."""
        if progress := PromptProgress.of(output):
            yield event({**self._part(generation, output, "", ()), "prompt_progress": progress})
        elif generation.has_probs and output.probs is not None:
            # As with llama-server, each event has one token: the last one has the text.
            rows = list(output.probs)
            for i, row in enumerate(rows, start=1):
                part = self._part(generation, output, output.content if i == len(rows) else "", [row.token])
                yield event({**part, "completion_probabilities": self.writer(generation).native([row])})
        elif output.content or output.tokens:
            yield event(self._part(generation, output, output.content, output.tokens))
        if isinstance(output, Finished):
            yield event(self._final(generation, content="", tokens=[]))

    def _part(
        self, generation: Generation, output: Output | Finished, content: str, tokens: Sequence[int]
    ) -> dict[str, Any]:
        """Return an event with new text and tokens."""
        part: dict[str, Any] = {
            "index": generation.index,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "id_slot": output.progress.slot,
            "tokens_predicted": output.progress.n_generated,
            "tokens_evaluated": output.progress.n_prompt,
        }
        if self._options.timings_per_token:
            part["timings"] = timings([output.progress])
        return part

    def closing(self) -> Iterator[bytes]:
        """Yield nothing: the last event says `stop`."""
        return iter(())

    def whole(self) -> Any:
        """Return the final event of the completion with all of its text; a list if there are several."""
        bodies = [
            self._final(each, content=each.text, tokens=each.tokens if self._options.return_tokens else [])
            for each in self._generations
        ]
        return bodies[0] if len(bodies) == 1 else bodies

    def _final(self, generation: Generation, *, content: str, tokens: Sequence[int]) -> dict[str, Any]:
        end, submit, stats = generation.end, generation.submit, stats_of([generation.end.progress])
        body = {
            "index": generation.index,
            "content": content,
            "tokens": tokens,
            "id_slot": end.progress.slot,
            "stop": True,
            "model": self._reply.model,
            "tokens_predicted": end.progress.n_generated,
            "tokens_evaluated": end.progress.n_prompt,
            "generation_settings": {
                **generation_settings(submit.sampling, submit.max_tokens),
                **self._texts(submit),
                "stream": self._options.stream,
                "timings_per_token": self._options.timings_per_token,
            },
            "prompt": self._prompts[generation.index],
            "has_new_line": "\n" in generation.text,
            "truncated": end.truncated,
            "stop_type": end.reason,
            "stopping_word": end.stopping_word,
            "tokens_cached": end.progress.n_held,
            **stats,
        }
        if generation.has_probs and not self._options.stream:
            body["completion_probabilities"] = self.writer(generation).native(generation.probs)
        return pick(body, self._options.response_fields) if self._options.response_fields else body

    def _texts(self, submit: Submit) -> dict[str, Any]:
        """Return the settings that only the request's own client sees; a bias of -inf is null.

        With `ignore_eos`, the tokens that end a text are shown with such a bias, as in llama-server.
        """
        ends = self._eog if submit.sampling.ignore_eos else ()
        biases = {**submit.sampling.logit_bias, **dict.fromkeys(ends, -math.inf)}
        return {
            "stop": submit.stop,
            "logit_bias": [{"token": token, "bias": bias} for token, bias in biases.items()],
            "grammar": submit.constraint.grammar if submit.constraint is not None else "",
            "dry_sequence_breakers": submit.sampling.dry_sequence_breakers,
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
