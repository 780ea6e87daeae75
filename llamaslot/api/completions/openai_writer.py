"""The part that OpenAI's chat and text completions have in common: the envelope of their replies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from llamaslot.api.completions.native_body import NativeBodies
from llamaslot.api.completions.reply_bodies import Choice, Envelope, ObjectName
from llamaslot.api.generation.reply_stats import stats_of, usage
from llamaslot.api.generation.reply_writer import ReplyWriter
from llamaslot.api.sse import DONE, event
from llamaslot.service.generations import Generation
from llamaslot.service.service import Service


class OpenAIReplyWriter(ReplyWriter):
    """Writes replies in OpenAI's envelope, with `timings` (llama-server's) and `cache` (ours) beside the usage."""

    object: ClassVar[ObjectName]
    chunk_object: ClassVar[ObjectName]
    _bodies: NativeBodies | None = None

    async def prepare(self, service: Service) -> None:
        """Decode the prompts for a verbose reply."""
        if self._options.verbose:
            self._bodies = await NativeBodies.ask(service, self._generations, self._reply.model, self._options)

    def closing(self) -> Iterable[bytes]:
        """Yield the end mark."""
        yield DONE

    def _whole(self, choices: Sequence[Choice]) -> Envelope:
        reply = self._reply
        shown = self._verbose(self._generations[0])
        return Envelope(reply.id, self.object, reply.created, reply.model, choices, verbose=shown, **self._totals())

    def _chunk(self, choices: Sequence[Choice], **stats: Any) -> bytes:
        reply = self._reply
        return event(Envelope(reply.id, self.chunk_object, reply.created, reply.model, choices, **stats))

    def _verbose(self, generation: Generation) -> dict[str, Any] | UnsetType:
        """Return llama-server's own reply for a finished completion, if it is asked for."""
        return UNSET if self._bodies is None else self._bodies.whole(generation, self.probs_writer(generation))

    def _totals(self) -> dict[str, Any]:
        """Return the usage of all finished completions, and their stats."""
        return {"usage": usage(self._generations), **stats_of([each.end.progress for each in self._generations])}
