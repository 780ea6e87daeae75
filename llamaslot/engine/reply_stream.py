"""Reply stream: converts the sampled tokens of a request to the text that its client gets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from llamaslot.base.backend import Vocab
from llamaslot.base.events import Finished, FinishReason, Generated, Output, Prefill, Progress
from llamaslot.base.generation.token_probs import TokenProbs, TokenScore
from llamaslot.base.tokens import packed
from llamaslot.engine.vectors import formed
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.scheduler import Sampled
from llamaslot.scheduler.step import StepPlan
from llamaslot.text.stream import TextStream


class ReplyStream:
    """The reply of a request from its submission to its terminal event."""

    def __init__(self, request: Request, vocab: Vocab) -> None:
        self.request = request
        self.n_sent = 0
        """Number of characters sent."""
        self._vocab = vocab
        self._text = TextStream(request.params.stop, request.params.n_indent)
        self._unsent: list[int] = []
        """Tokens whose text is held back, because it may be part of a character or of a stop string."""
        self._starts: list[int] = []
        """Number of characters before each unsent token."""
        self._scores: list[TokenScore] = []
        """Probabilities of the unsent tokens, if the request wants them."""
        self._prefill: Prefill | None = None
        self._has_reported = False
        """True if an event had the progress."""

    def push(self, sampled: Sampled) -> tuple[str, FinishReason | None, int]:
        """Add tokens one by one, up to a stop string.

        Returns the text that can be sent, the reason if the reply ends here, and the number of tokens that follow a
        stop string.
        """
        text = ""
        self._scores += sampled.scores
        for n_left, token in zip(reversed(range(len(sampled.tokens))), sampled.tokens, strict=True):
            self._unsent.append(token)
            self._starts.append(self._text.n_decoded)
            if n_left or sampled.reason != "eos":
                is_kept = token in self.request.params.preserved_tokens
                text += self._text.push(self._vocab.detokenize([token]) if is_kept else self._vocab.piece(token))
            if self._text.stopped is not None:
                return text, "word", n_left
            if self._text.is_cut:
                return text, "limit", n_left
        if sampled.reason is None and self._is_overdue(text):
            return text, "limit", 0
        return text, sampled.reason, 0

    def _is_overdue(self, text: str) -> bool:
        """Return True if new text ends a line after the time limit (`t_max_predict_ms`)."""
        limit = self.request.params.t_max_predict_ms
        return 0 < limit < self.request.predicted_ms and "\n" in text

    def scored(self, scores: Sequence[TokenScore], progress: Progress) -> Output:
        """Return an event with scores of the next prompt tokens; control tokens are shown as text."""
        self._has_reported = True
        probs = TokenProbs.of(scores, lambda token: self._vocab.detokenize([token]))
        return Output(self.request.id, "", (), progress, prompt_probs=probs)

    def prefill(self, n_processed: int, progress: Progress) -> Output | None:
        """Return an event for a prompt's progress; None if that many processed tokens were reported before."""
        last = self._prefill
        if last is not None and n_processed <= last.n_processed:
            return None
        n_cached = n_processed if last is None else last.n_cached
        if last is None:
            # Nothing is computed yet, so as in llama-server the first event has no times.
            progress = msgspec.structs.replace(progress, prompt_ms=0.0, load_ms=0.0)
        self._prefill = Prefill(n_cached, n_processed, progress.prompt_ms)
        return Output(self.request.id, "", (), progress, self._prefill)

    @property
    def wants_progress(self) -> bool:
        """True if the next event needs the progress: the first one, or any if the request asks for it."""
        return not self._has_reported or self.request.params.reports_progress

    def output(self, text: str, progress: Progress | None) -> Output:
        """Return an event with new text and its tokens."""
        self._has_reported = True
        self.n_sent += len(text)
        tokens, probs = self._take(self._n_within_text())
        return Output(self.request.id, text, tokens, progress, probs=probs)

    def finished(
        self, text: str, reason: FinishReason, progress: Progress, *, truncated: bool, vector: bytes = b""
    ) -> Finished:
        """Return the terminal event, with the text that was held back, or with the vector as it is wanted."""
        text += self._text.flush()
        self.n_sent += len(text)
        is_cut = self._text.stopped is not None or self._text.is_cut
        tokens, probs = self._take(self._n_within_text() if is_cut else len(self._unsent))
        return Finished(
            completion_id=self.request.id,
            reason=reason,
            progress=progress,
            content=text,
            tokens=tokens,
            stopping_word=self._text.stopped or "",
            truncated=truncated,
            generated=self.generated(),
            probs=probs,
            vector=formed(vector, self.request.params.vector) if self.request.params.vector is not None else b"",
        )

    def generated(self) -> Generated | None:
        """Return the reply's tokens to remember; None for a private request, for one that never ran, for one that
        has discarded a part of its context, and for one whose reply is a vector.
        """
        request = self.request
        if request.is_private or request.n_discarded:
            return None
        if not request.has_started or request.params.vector is not None:
            return None
        return Generated(packed(request.tokens.view(request.n_prompt)), self.n_sent)

    def _n_within_text(self) -> int:
        """Return the number of unsent tokens that begin within the text sent so far."""
        return bisect_left(self._starts, self.n_sent)

    def _take(self, n: int) -> tuple[tuple[int, ...], TokenProbs | None]:
        """Remove the first `n` unsent tokens, and return them with their probabilities."""
        tokens, scores = tuple(self._unsent[:n]), self._scores[:n]
        del self._unsent[:n], self._starts[:n], self._scores[:n]
        return tokens, TokenProbs.of(scores, self._vocab.piece) if scores else None


def prefill_events(
    plan: StepPlan, replies: Mapping[str, ReplyStream], now: float, *, is_computed: bool = False
) -> Iterator[Output]:
    """Yield the progress of a step's prompts for clients that want it; before the step unless `is_computed`."""
    for request, run in ((each.request, each.run) for each in plan.work):
        reply = replies.get(request.id) if request.params.return_progress else None
        # After a context shift, positions are not those of the prompt.
        if reply is not None and run.start < request.n_prompt and not request.n_discarded:
            n_processed = run.start + (len(run.tokens) - run.n_drafted) * is_computed
            if event := reply.prefill(n_processed, request.progress(now, n_processed)):
                yield event
