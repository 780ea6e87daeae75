"""`POST /v1/completions`: text completions, in OpenAI's words."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
from aiohttp import web
from msgspec import UNSET

from llamaslot.api.bodies import CompletionBody, read
from llamaslot.api.completions import submission, unsupported
from llamaslot.api.completions.delivery import deliver
from llamaslot.api.completions.reply_bodies import REASONS, Envelope, TextChoice, cache_use, timings, usage
from llamaslot.api.context import READINESS, SETTINGS
from llamaslot.api.middleware import UNIQUE_ID, caller_of
from llamaslot.api.sse import DONE, event
from llamaslot.base.events import Finished, Output
from llamaslot.service.generations import Generation

_decoder = msgspec.json.Decoder(CompletionBody)


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    service, settings = request.app[READINESS].check(), request.app[SETTINGS]
    body = await read(request, _decoder)
    unsupported.refuse(body)
    prompts = submission.parse_prompts(body.prompt, service.info.n_vocab)
    reply_id = f"cmpl-{request[UNIQUE_ID]}"
    asked = await submission.make(
        service,
        settings,
        body,
        prompts,
        reply_id,
        caller=caller_of(request),
    )
    async with service.generate(asked) as choices:
        model = settings.model_names(service.info)[0]
        dialect = TextDialect(reply_id, model, body, choices.all, n=asked[0].n)
        return await deliver(request, body, choices, dialect)


class TextDialect:
    """OpenAI's replies to text completions, `n` choices for each prompt.

    Clients of llama-server expect a choice in every chunk: the usage comes with the last choice's end.
    """

    def __init__(
        self, reply_id: str, model: str, body: CompletionBody, choices: Sequence[Generation], *, n: int
    ) -> None:
        self._envelope = partial(
            Envelope, id=reply_id, object="text_completion", created=int(time.time()), model=model
        )
        self._with_timings = bool(body.timings_per_token)
        self._choices = choices
        self._n = n
        self._n_ended = 0

    def chunks(self, choice: Generation, output: Output | Finished) -> Iterator[bytes]:
        """Text, then the reason for the end."""
        if output.content:
            shown = timings([output.progress]) if self._with_timings else UNSET
            yield event(self._envelope(choices=[TextChoice(choice.index, output.content)], timings=shown))
        if isinstance(output, Finished):
            self._n_ended += 1
            total = usage(self._choices, self._n) if self._n_ended == len(self._choices) else UNSET
            end = TextChoice(choice.index, "", REASONS[output.reason])
            figures = timings([output.progress]), cache_use(output.progress)
            yield event(self._envelope(choices=[end], usage=total, timings=figures[0], cache=figures[1]))

    def closing(self) -> Iterator[bytes]:
        """The mark of the end."""
        yield DONE

    def whole(self) -> Envelope:
        """One body with all choices."""
        answers = [TextChoice(choice.index, choice.text, REASONS[choice.end.reason]) for choice in self._choices]
        return self._envelope(
            choices=answers,
            usage=usage(self._choices, self._n),
            timings=timings(choice.end.progress for choice in self._choices),
            cache=cache_use(self._choices[0].end.progress),
        )
