"""The part that OpenAI's chat and text completions have in common: the envelope of their replies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from llamaslot.api.completions.native_body import NativeBodies
from llamaslot.api.completions.reply_bodies import Choice, Envelope, ObjectName
from llamaslot.api.generation.logprobs import ProbsWriter
from llamaslot.api.generation.reply_stats import stats_of, usage
from llamaslot.api.generation.reply_writer import ReplyContext, ReplyWriter
from llamaslot.api.json_bodies import LATER, list_of, with_values
from llamaslot.api.sse import DONE, event, long_event
from llamaslot.base.generation.request_context import ReplyOptions
from llamaslot.service.live_request import Completion
from llamaslot.service.reply_budget import ProbsLimit


class OpenAIReplyWriter(ReplyWriter):
    """Writes replies in OpenAI's envelope, with `timings` (llama-server's) and `cache` (ours) beside the usage."""

    object: ClassVar[ObjectName]
    chunk_object: ClassVar[ObjectName]
    probs_fields = ("n", "max_tokens", "logprobs")

    def __init__(self, reply: ReplyContext, completions: Sequence[Completion]) -> None:
        super().__init__(reply, completions)
        self._bodies = NativeBodies(reply.eog, reply.model, reply.options) if reply.options.verbose else None

    @classmethod
    def probs_limit(cls, options: ReplyOptions, most: int) -> ProbsLimit | None:
        """Return the limit of the reply's probabilities; some streams repeat all at their end, or store them."""
        keeps = options.verbose or options.chat is not None or not options.stream
        return ProbsLimit(most, cls.probs_fields) if keeps else None

    def closing(self) -> Iterable[bytes]:
        """Yield the end mark."""
        yield DONE

    def _whole(self, choices: Iterable[Iterable[bytes]], *, is_verbose: bool = True) -> Iterator[bytes]:
        reply, first = self._reply, self._completions[0]
        shown = self._verbose(first) if is_verbose else UNSET
        body = Envelope(reply.id, self.object, reply.created, reply.model, LATER, verbose=shown, **self._totals())
        return with_values(body, list_of(choices), *self._verbose_values(first, shown))

    def _chunk(self, choices: Sequence[Choice], **stats: Any) -> bytes:
        reply = self._reply
        return event(Envelope(reply.id, self.chunk_object, reply.created, reply.model, choices, **stats))

    def _last_chunk(self, completion: Completion, end: Choice, **stats: Any) -> Iterator[bytes]:
        """Yield the last chunk of a choice, with llama-server's own reply if it is asked for."""
        reply, shown = self._reply, self._verbose(completion)
        body = Envelope(reply.id, self.chunk_object, reply.created, reply.model, [end], verbose=shown, **stats)
        return long_event(body, *self._verbose_values(completion, shown))

    def _verbose(self, completion: Completion) -> dict[str, Any] | UnsetType:
        return UNSET if self._bodies is None else self._bodies.whole(completion)

    def _verbose_values(
        self, completion: Completion, shown: dict[str, Any] | UnsetType
    ) -> Iterator[Iterator[bytes]]:
        """Yield the values that are `LATER` in llama-server's own reply."""
        if shown is not UNSET and completion.has_probs:
            yield ProbsWriter(completion.params).native_later(completion.probs)

    def _totals(self) -> dict[str, Any]:
        """Return the usage of all finished completions, and their stats."""
        return {"usage": usage(self._completions), **stats_of([each.end.progress for each in self._completions])}
