"""Tokenizing on a thread of its own, in the order of arrival, so that long prompts never hold up a step.

What `prompts/anchoring.py` and `prompts/continuing.py` remember of replies belongs to that thread alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from llamaslot.base.backend import Vocab
from llamaslot.base.commands import Detokenize, DropSession, PromptPart, Submit, TextPart, Tokenize, TokensPart
from llamaslot.base.errors import ContextSizeError, InvalidRequestError
from llamaslot.base.events import Detokenized, Tokenized
from llamaslot.base.namespaces import salted
from llamaslot.base.tokens import Tokens
from llamaslot.prompts.anchoring import Anchoring, Prompt, tokenized
from llamaslot.prompts.anchors import Anchor
from llamaslot.prompts.continuing import Continuing, n_characters, spelled
from llamaslot.prompts.sessions import Session, digest_of

T = TypeVar("T")


class Tokenizer:
    """Answers what needs the vocabulary only; `run` puts one of its methods on the thread."""

    def __init__(
        self, vocab: Vocab, n_ctx: int, *, anchors: bool = True, min_match: float = 0.8, template: str = ""
    ) -> None:
        self._vocab = vocab
        self._n_ctx = n_ctx
        self._anchoring = Anchoring(vocab, is_wanted=anchors, template=template)
        self._continuing = Continuing(vocab, self._anchoring, min_match=min_match)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llamaslot-tokenizer")

    def run(self, method: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """What `method` gives, worked out on the thread."""
        return asyncio.get_running_loop().run_in_executor(self._thread, method, *arguments)

    def close(self) -> None:
        """End the thread once it is done with what it is at: it must not outlive the vocabulary."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def submitted(self, command: Submit) -> Prompt:
        """A request's prompt; `ContextSizeError` without tokenizing if it cannot fit a slot."""
        n_bytes = sum(
            len(part.text.encode(errors="replace")) for part in command.prompt if isinstance(part, TextPart)
        )
        at_least = n_bytes // self._vocab.longest_piece if self._vocab.longest_piece else 0
        if at_least >= self._n_ctx:
            raise ContextSizeError.of(at_least, self._n_ctx, at_least=True)
        self._check_parts(command.prompt)
        prompt = self._continuing.submitted(command)
        if len(prompt.tokens) >= self._n_ctx and (prompt.n_anchored or prompt.session_match):
            # The text's own tokens may be fewer.
            own = tokenized(self._vocab, command.prompt, add_special=command.add_special)
            return Prompt(own, session_match="tokens" if prompt.session_match else "")
        return prompt

    def tokenized(self, command: Tokenize) -> Tokenized:
        """A prompt's token ids, each with its bytes if they are wanted."""
        self._check_parts(command.prompt)
        tokens = tuple(tokenized(self._vocab, command.prompt, add_special=command.add_special).tolist())
        pieces = tuple(self._vocab.detokenize([token]) for token in tokens) if command.with_pieces else ()
        return Tokenized(command.request_id, tokens, pieces)

    def replied(self, prompt: Prompt, generated: Tokens, n_sent: int) -> Anchor | None:
        """See `Anchoring.replied`."""
        return self._anchoring.replied(prompt, generated, n_sent)

    def remembered(self, command: Submit, prompt: Prompt, generated: Tokens, n_sent: int) -> tuple[bytes, Session]:
        """See `Continuing.replied`."""
        return self._continuing.replied(command, prompt, generated, n_sent)

    def drop_session(self, command: DropSession) -> tuple[str, bytes, Session | None]:
        """Forget a session: its namespace, its digest, and what it was."""
        space = salted(command.cache_salt)
        digest = digest_of(space, command.session_id)
        return space, digest, self._continuing.drop(digest)

    def n_characters(self, command: Submit, tokens: Tokens) -> int:
        """Characters that the first tokens of a prompt spell, control tokens written out, but for those that the
        model wants in front of it.
        """
        is_text = bool(command.prompt) and isinstance(command.prompt[0], TextPart)
        added = self._vocab.tokenize("", add_special=command.add_special and is_text, parse_special=True)
        return n_characters(spelled(self._vocab, tokens[len(added) :].tolist()).text)

    def prepare(self) -> bool:
        """Try out what else the first prompt would wait for; whether texts can be cut, if that is wanted at all."""
        return self._anchoring.prepare() or not self._anchoring.is_wanted

    @property
    def anchor_figures(self) -> tuple[int, int]:
        """How many replies are remembered, and about how many bytes that takes; from any thread."""
        anchors = self._anchoring.anchors
        return len(anchors), anchors.n_bytes

    @property
    def session_figures(self) -> tuple[int, int]:
        """How many sessions are remembered, and about how many bytes that takes; from any thread."""
        sessions = self._continuing.sessions
        return len(sessions), sessions.n_bytes

    def restore(self, anchors: Sequence[Anchor], sessions: Sequence[tuple[bytes, Session]]) -> None:
        """Remember what an earlier server did, the oldest first."""
        left = list(anchors) if self._anchoring.is_wanted else []
        # One that took the place of another may come behind what continues it.
        while left and len(rest := [each for each in left if not self._anchoring.anchors.put(each)]) < len(left):
            left = rest
        for digest, session in sessions:
            self._continuing.put(digest, session)

    def forget(self) -> None:
        """Forget all replies and sessions."""
        self._anchoring.anchors.clear()
        self._continuing.clear()

    def detokenized(self, command: Detokenize) -> Detokenized:
        """The text of token ids; `InvalidRequestError` for ids that do not exist."""
        self._check_ids(command.tokens, "tokens")
        return Detokenized(command.request_id, self._vocab.detokenize(command.tokens).decode(errors="replace"))

    def _check_parts(self, parts: Sequence[PromptPart]) -> None:
        """Raise `InvalidRequestError` for ids that do not exist."""
        for part in parts:
            if isinstance(part, TokensPart):
                self._check_ids(part.tokens, "prompt")

    def _check_ids(self, tokens: tuple[int, ...], param: str) -> None:
        for token in tokens:
            if not 0 <= token < self._vocab.n_tokens:
                raise InvalidRequestError(
                    f"{param} names token {token}; the vocabulary has {self._vocab.n_tokens}", param=param
                )
