"""`POST /v1/completions`: text completions in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from aiohttp import web
from msgspec import UNSET

from llamaslot.api.completions.openai_writer import OpenAIReplyWriter
from llamaslot.api.completions.reply_bodies import REASONS, TextChoice
from llamaslot.api.generation.logprobs import ProbsWriter, TextLogprobs
from llamaslot.api.generation.reply_stats import PromptProgress, stats_of, timings, usage
from llamaslot.api.generation.reply_writer import ReplyContext
from llamaslot.api.generation.request_handling import complete
from llamaslot.api.json_bodies import LATER, with_values
from llamaslot.base.commands import Detokenize, Detokenized, TextPart
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.token_probs import TokenProb
from llamaslot.service.generations import Generation
from llamaslot.service.service import Service


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
    _prompts: Sequence[str] = ()
    """By index, if they are wanted."""

    def __init__(self, reply: ReplyContext, generations: Sequence[Generation]) -> None:
        super().__init__(reply, generations)
        self._unsent: set[int] = set()
        """Choices whose prompt is still to be streamed."""

    async def prepare(self, service: Service) -> None:
        """Decode the prompts that were given as tokens, if the reply repeats them."""
        await super().prepare(service)
        if self._options.echo:
            self._prompts = [await _prompt_text(each, service) for each in self._generations]
            self._unsent = set(range(len(self._prompts)))

    def chunks(self, generation: Generation, output: Output | Finished) -> Iterator[bytes]:
        """Yield the prompt if it is wanted, then text, then the finish reason."""
        if self._unsent and (output.content or output.probs or isinstance(output, Finished)):
            yield from self._echo(generation)
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
            yield from self._last_chunk(generation, end, usage=total, **stats_of([output.progress]))

    def whole(self) -> Iterator[bytes]:
        """Yield one body with all choices, or with the best ones."""
        return self._whole(self._choice(i, each) for i, each in enumerate(self._best()))

    def _choice(self, index: int, generation: Generation) -> Iterator[bytes]:
        prompt = self._prompt(generation.index)
        choice = TextChoice(index, prompt + generation.text, REASONS[generation.end.reason])
        if not self._shows_probs(generation):
            return with_values(choice)
        choice.logprobs = TextLogprobs(LATER, LATER, LATER, LATER, LATER)
        of_prompt = generation.prompt_probs if self._prompts else None
        return with_values(choice, *ProbsWriter(generation.submit).text_later(of_prompt, prompt, generation.probs))

    def _best(self) -> Iterator[Generation]:
        """Yield the completions of each prompt that are most likely per token; all of them if all are wanted."""
        for _, group in groupby(self._generations, lambda each: each.submit.group or each.submit.request_id):
            if self._options.n_best:
                yield from sorted(group, key=lambda each: -each.mean_logprob)[: self._options.n_best]
            else:
                yield from group

    def _prompt(self, index: int) -> str:
        return self._prompts[index] if self._prompts else ""

    def _echo(self, generation: Generation) -> Iterator[bytes]:
        """Yield the prompt of a choice, once."""
        index = generation.index
        if index not in self._unsent:
            return
        self._unsent.remove(index)
        text = self._prompts[index]
        parts: Iterator[TextLogprobs] = iter(())
        if self._shows_probs(generation):
            parts = self.probs_writer(generation).prompt(generation.prompt_probs, text)
        yield self._chunk([TextChoice(index, text, logprobs=next(parts, None))])
        for part in parts:
            yield self._chunk([TextChoice(index, "", logprobs=part)])

    def _logprobs(self, generation: Generation, rows: Sequence[TokenProb]) -> TextLogprobs | None:
        return self.probs_writer(generation).text(rows) if self._shows_probs(generation) else None

    def _shows_probs(self, generation: Generation) -> bool:
        return generation.has_probs and not self._options.hides_logprobs


async def _prompt_text(generation: Generation, service: Service) -> str:
    """Return a prompt as it was given; one with token ids as the model sees it."""
    parts = generation.submit.prompt
    if all(isinstance(part, TextPart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return (await service.ask(Detokenize(generation.prompt_tokens, generation.submit.client), Detokenized)).content
