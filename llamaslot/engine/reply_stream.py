"""Reply stream: turns the sampled tokens of a request into the text that its client gets."""

from __future__ import annotations

from llamaslot.base.backend import Vocab
from llamaslot.base.events import Finished, FinishReason, Output, Progress
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.scheduler import Sampled
from llamaslot.text.stream import TextStream


class ReplyStream:
    """A request between `Accepted` and its terminal event."""

    def __init__(self, request: Request, vocab: Vocab) -> None:
        self.request = request
        self.n_sent = 0
        """Characters that were sent."""
        self._vocab = vocab
        self._text = TextStream(request.submit.stop)
        self._unsent: list[int] = []
        """Tokens whose text is held back: it may be a part of a character or of a stop string."""

    def push(self, sampled: Sampled) -> tuple[str, FinishReason | None]:
        """Add a token; returns the text that can be sent, and why the reply ends here if it does."""
        text = ""
        if sampled.token is not None:
            self._unsent.append(sampled.token)
            if sampled.reason != "eos":
                text = self._text.push(self._vocab.piece(sampled.token))
        return text, "word" if self._text.stopped is not None else sampled.reason

    def output(self, text: str, progress: Progress) -> Output:
        """An event with new text and its tokens."""
        self.n_sent += len(text)
        tokens, self._unsent = tuple(self._unsent), []
        return Output(self.request.id, text, tokens, progress)

    def finished(self, text: str, reason: FinishReason, progress: Progress, *, truncated: bool) -> Finished:
        """The terminal event, with the text that was held back."""
        text += self._text.flush()
        self.n_sent += len(text)
        return Finished(
            request_id=self.request.id,
            reason=reason,
            progress=progress,
            content=text,
            tokens=tuple(self._unsent),
            stopping_word=self._text.stopped or "",
            truncated=truncated,
        )
