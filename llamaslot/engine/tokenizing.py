"""Tokenizing on a thread of its own, in the order of arrival, so that long prompts never hold up a step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from llamaslot.base.errors import ContextSizeError, InvalidRequestError
from llamaslot.base.messages import Detokenize, Detokenized, Submit, TextPart, Tokenize, Tokenized
from llamaslot.core.backend import Tokens, Vocab

T = TypeVar("T")


class Tokenizer:
    """Answers what needs the vocabulary only; `run` puts one of its methods on the thread."""

    def __init__(self, vocab: Vocab, n_ctx: int) -> None:
        self._vocab = vocab
        self._n_ctx = n_ctx
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llamaslot-tokenizer")

    def run(self, method: Callable[..., T], command: Submit | Tokenize | Detokenize) -> asyncio.Future[T]:
        """The answer of `method` to `command`, worked out on the thread."""
        return asyncio.get_running_loop().run_in_executor(self._thread, method, command)

    def close(self) -> None:
        """End the thread once it is done with what it is at; nothing waits for that."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def submitted(self, command: Submit) -> Tokens:
        """The token ids of a request's prompt; `ContextSizeError` without tokenizing if it cannot fit a slot."""
        n_bytes = sum(
            len(part.text.encode(errors="replace")) for part in command.prompt if isinstance(part, TextPart)
        )
        at_least = n_bytes // self._vocab.longest_piece if self._vocab.longest_piece else 0
        if at_least >= self._n_ctx:
            raise ContextSizeError.of(at_least, self._n_ctx, at_least=True)
        return self.prompt(command)

    def prompt(self, command: Submit | Tokenize) -> Tokens:
        """The token ids of a prompt; `InvalidRequestError` for ids that do not exist."""
        runs: list[Tokens] = []
        for i, part in enumerate(command.prompt):
            if isinstance(part, TextPart):
                add_special = command.add_special and i == 0
                runs.append(self._vocab.tokenize(part.text, add_special=add_special, parse_special=part.special))
            else:
                self._check_ids(part.tokens, "prompt")
                runs.append(np.array(part.tokens, dtype=np.int32))
        return np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)

    def tokenized(self, command: Tokenize) -> Tokenized:
        """A prompt's token ids, each with its bytes if they are wanted."""
        tokens = tuple(self.prompt(command).tolist())
        pieces = tuple(self._vocab.detokenize([token]) for token in tokens) if command.with_pieces else ()
        return Tokenized(command.request_id, tokens, pieces)

    def detokenized(self, command: Detokenize) -> Detokenized:
        """The text of token ids; `InvalidRequestError` for ids that do not exist."""
        self._check_ids(command.tokens, "tokens")
        return Detokenized(command.request_id, self._vocab.detokenize(command.tokens).decode(errors="replace"))

    def _check_ids(self, tokens: tuple[int, ...], param: str) -> None:
        for token in tokens:
            if not 0 <= token < self._vocab.n_tokens:
                raise InvalidRequestError(
                    f"{param} names token {token}; the vocabulary has {self._vocab.n_tokens}", param=param
                )
