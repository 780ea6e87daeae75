"""`POST /completion`: text completions in llama-server's own format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from llamaslot.api.completions.native_body import NativeBodies
from llamaslot.api.context import READINESS
from llamaslot.api.generation.reply_stats import PromptProgress, progress_of, timings
from llamaslot.api.generation.reply_writer import ReplyContext, ReplyWriter
from llamaslot.api.generation.request_handling import complete
from llamaslot.api.json_bodies import LATER, list_of, with_values
from llamaslot.api.sse import event
from llamaslot.base.errors import NotSupportedError
from llamaslot.base.events import Finished, Output
from llamaslot.service.live_request import Completion


async def completion(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    return await complete(request, "native", NativeReplyWriter)


async def infill(request: web.Request) -> web.StreamResponse:
    """Complete the middle between a prefix and a suffix."""
    if request.app[READINESS].check().info.fim is None:
        raise NotSupportedError("this model cannot infill: its vocabulary has no fill-in-the-middle tokens")
    return await complete(request, "infill", NativeReplyWriter)


class NativeReplyWriter(ReplyWriter):
    """Writes llama-server's replies."""

    id_prefix = "cmpl-"
    shows_prompt = counts_tokens = True
    probs_fields = ("n", "n_predict", "n_probs")

    def __init__(self, reply: ReplyContext, completions: Sequence[Completion]) -> None:
        super().__init__(reply, completions)
        self._bodies = NativeBodies(reply.eog, reply.model, reply.options)

    def chunks(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Yield new text and tokens, and everything else at the end."""
        if progress := PromptProgress.of(output):
            yield event({**self._part(completion, output, "", ()), "prompt_progress": progress})
        elif completion.has_probs and output.probs is not None:
            # As with llama-server, each event has one token: the last one has the text.
            rows = list(output.probs)
            for i, row in enumerate(rows, start=1):
                part = self._part(completion, output, output.content if i == len(rows) else "", [row.token])
                yield event({**part, "completion_probabilities": self.probs_writer(completion).native([row])})
        elif output.content or output.tokens:
            yield event(self._part(completion, output, output.content, output.tokens))
        if isinstance(output, Finished):
            yield event(self._picked(self._bodies.final(completion)))

    def _part(
        self, completion: Completion, output: Output | Finished, content: str, tokens: Sequence[int]
    ) -> dict[str, Any]:
        """Return an event with new text and tokens."""
        progress = progress_of(output)
        part: dict[str, Any] = {
            "index": completion.index,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "id_slot": progress.slot,
            "tokens_predicted": progress.n_generated,
            "tokens_evaluated": progress.n_prompt,
        }
        if self._options.timings_per_token:
            part["timings"] = timings([progress])
        return part

    def closing(self) -> Iterator[bytes]:
        """Yield nothing: the last event says `stop`."""
        return iter(())

    def whole(self) -> Iterator[bytes]:
        """Yield the final event of the completion with all of its text; a list if there are several."""
        bodies = (self._whole(each) for each in self._completions)
        return list_of(bodies) if len(self._completions) > 1 else next(bodies)

    def _whole(self, completion: Completion) -> Iterator[bytes]:
        body = self._picked(self._bodies.whole(completion))
        shown = [self.probs_writer(completion).native_later(completion.probs)] * (LATER in body.values())
        return with_values(body, *shown)

    def _picked(self, body: dict[str, Any]) -> dict[str, Any]:
        return _picked_fields(body, self._options.response_fields) if self._options.response_fields else body


def _picked_fields(body: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields that `paths` (`a` or `a/b`) name, under those names; missing ones are left out."""
    picked = {}
    for path in paths:
        value: Any = body
        for key in path.split("/"):
            if not isinstance(value, dict) or key not in value:
                break
            value = value[key]
        else:
            picked[path] = value
    return picked
