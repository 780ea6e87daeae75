"""`POST /v1/completions`: text completions in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aiohttp import web
from msgspec import UNSET

from llamaslot.api.completions.logprobs import TextLogprobs
from llamaslot.api.completions.reply_bodies import (
    REASONS,
    Envelope,
    PromptProgress,
    TextChoice,
    stats_of,
    timings,
    usage,
)
from llamaslot.api.completions.response_format import OpenAIFormat, complete
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.token_probs import TokenProb
from llamaslot.service.generations import Generation


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    return await complete(request, "prompts", TextFormat)


class TextFormat(OpenAIFormat):
    """OpenAI's text completions.

    Clients of llama-server expect a choice in every chunk: the usage comes with the last choice's end.
    """

    id_prefix = "cmpl"
    object = chunk_object = "text_completion"
    _n_ended = 0

    def chunks(self, generation: Generation, output: Output | Finished) -> Iterator[bytes]:
        """Yield text, then the finish reason."""
        if progress := PromptProgress.of(output):
            yield self._chunk([TextChoice(generation.index, "")], prompt_progress=progress)
        if output.content or output.probs:
            shown = timings([output.progress]) if self._options.timings_per_token else UNSET
            logprobs = self._logprobs(generation, list(output.probs or ()))
            yield self._chunk([TextChoice(generation.index, output.content, logprobs=logprobs)], timings=shown)
        if isinstance(output, Finished):
            self._n_ended += 1
            total = usage(self._generations) if self._n_ended == len(self._generations) else UNSET
            end = TextChoice(generation.index, "", REASONS[output.reason])
            yield self._chunk([end], usage=total, **stats_of([output.progress]))

    def whole(self) -> Envelope:
        """Return one body with all choices."""
        return self._whole(
            [
                TextChoice(each.index, each.text, REASONS[each.end.reason], self._logprobs(each, each.probs))
                for each in self._generations
            ]
        )

    def _logprobs(self, generation: Generation, rows: Sequence[TokenProb]) -> TextLogprobs | None:
        return self.writer(generation).text(rows) if generation.has_probs else None
