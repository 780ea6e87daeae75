"""`POST /v1/completions`: text completions in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from aiohttp import web
from msgspec import UNSET

from llamaslot.api.completions.openai_writer import OpenAIReplyWriter
from llamaslot.api.completions.reply_bodies import REASONS, TextChoice
from llamaslot.api.generation.logprobs import ProbsWriter, TextLogprobs
from llamaslot.api.generation.reply_stats import PromptProgress, progress_of, stats_of, timings, usage
from llamaslot.api.generation.reply_writer import ReplyContext
from llamaslot.api.generation.request_handling import complete
from llamaslot.api.json_bodies import LATER, with_values
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.token_probs import TokenProb
from llamaslot.service.live_request import Completion


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    return await complete(request, "text", TextReplyWriter)


class TextReplyWriter(OpenAIReplyWriter):
    """Writes OpenAI's text completions.

    Clients of llama-server expect a choice in every chunk: the usage comes with the last choice's end.
    """

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"
    _n_ended = 0

    def __init__(self, reply: ReplyContext, completions: Sequence[Completion]) -> None:
        super().__init__(reply, completions)
        self._unsent = set(range(len(completions))) if reply.options.echo else set()
        """Choices whose prompt is still to be streamed."""

    def chunks(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Yield the prompt if it is wanted, then text, then the finish reason."""
        if self._unsent and (output.content or output.probs or isinstance(output, Finished)):
            yield from self._echo(completion)
        if progress := PromptProgress.of(output):
            yield self._chunk([TextChoice(completion.index, "")], prompt_progress=progress)
        if output.content or output.probs:
            shown = timings([progress_of(output)]) if self._options.timings_per_token else UNSET
            logprobs = self._logprobs(completion, list(output.probs or ()))
            yield self._chunk([TextChoice(completion.index, output.content, logprobs=logprobs)], timings=shown)
        if isinstance(output, Finished):
            self._n_ended += 1
            total = usage(self._completions) if self._n_ended == len(self._completions) else UNSET
            end = TextChoice(completion.index, "", REASONS[output.reason])
            yield from self._last_chunk(completion, end, usage=total, **stats_of([output.progress]))

    def whole(self) -> Iterator[bytes]:
        """Yield one body with all choices, or with the best ones."""
        return self._whole(self._choice(i, each) for i, each in enumerate(self._best()))

    def _choice(self, index: int, completion: Completion) -> Iterator[bytes]:
        prompt = completion.prompt.echo
        choice = TextChoice(index, prompt + completion.text, REASONS[completion.end.reason])
        if not self._shows_probs(completion):
            return with_values(choice)
        choice.logprobs = TextLogprobs(LATER, LATER, LATER, LATER, LATER)
        of_prompt = completion.prompt_probs if self._options.echo else None
        return with_values(choice, *ProbsWriter(completion.params).text_later(of_prompt, prompt, completion.probs))

    def _best(self) -> Iterator[Completion]:
        """Yield the completions of each prompt that are most likely per token; all of them if all are wanted."""
        for _, group in groupby(self._completions, lambda each: each.params.group or each.params.request_id):
            if self._options.n_best:
                yield from sorted(group, key=lambda each: -each.mean_logprob)[: self._options.n_best]
            else:
                yield from group

    def _echo(self, completion: Completion) -> Iterator[bytes]:
        """Yield the prompt of a choice, once."""
        index = completion.index
        if index not in self._unsent:
            return
        self._unsent.remove(index)
        text = completion.prompt.echo
        parts: Iterator[TextLogprobs] = iter(())
        if self._shows_probs(completion):
            parts = self.probs_writer(completion).prompt(completion.prompt_probs, text)
        yield self._chunk([TextChoice(index, text, logprobs=next(parts, None))])
        for part in parts:
            yield self._chunk([TextChoice(index, "", logprobs=part)])

    def _logprobs(self, completion: Completion, rows: Sequence[TokenProb]) -> TextLogprobs | None:
        return self.probs_writer(completion).text(rows) if self._shows_probs(completion) else None

    def _shows_probs(self, completion: Completion) -> bool:
        return completion.has_probs and not self._options.hides_logprobs
