"""Fill-in-the-middle prompts: the text between a prefix and a suffix is wanted.

    [REP]myproject  [SEP]name  text  ...  [SEP]filename  [BOS] [PRE]prefix  prompt [SUF]suffix [MID]
    |-- other files, with the tokens that the model has --|

This is llama-server's layout. But what fits is not cut here, so that after each keystroke the cache has all before
it; llama-server keeps to one batch, and drops a little more of a long prefix's beginning each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

from llamaslot.base.commands import TokensPart
from llamaslot.base.errors import InvalidRequestError, NotSupportedError
from llamaslot.base.generation.request_context import RequestContext
from llamaslot.base.model import FimTokens, ModelInfo
from llamaslot.protocol.bodies import CompletionBody, FileExtract, InfillBody, Parts
from llamaslot.protocol.submission import Prompt, max_tokens_of, parse_prompt

CUT_TOKENS = 256
"""Multiple of tokens by which a text that is too long is cut at its beginning: later prompts then begin alike."""
_CHARACTERS_PER_TOKEN = 32
"""Characters of a text that are looked at for each token of the context."""
_MAX_NAME = 4096
"""Characters of a file's name, which no system exceeds."""
_SNIPPET = "\n\n--- snippet ---\n\n"
"""Stands before each file where the model has no token for that."""


class Tokenize(Protocol):
    """Tokenizes a prompt."""

    def __call__(self, prompt: Prompt) -> list[int]:
        """Return its token ids, without BOS."""


class InfillPrompts:
    """Makes prompts for a model, on any thread."""

    def __init__(self, info: ModelInfo, tokenize: Tokenize, check_size: Callable[[Prompt], None]) -> None:
        self._info = info
        self._tokenize = tokenize
        self._check_size = check_size
        """Refuses what is far too long for the context, before it is tokenized."""
        self._max_characters = info.n_ctx_slot * _CHARACTERS_PER_TOKEN

    def of_parts(self, body: InfillBody, context: RequestContext) -> Prompt:
        """Return the prompt of `/infill`."""
        fim = self._fim("input_prefix")
        start = parse_prompt(body.prompt or "", self._info.n_vocab, "prompt")
        self._check_size(start)
        return self._prompt(
            fim,
            prefix=self._plain(_near(body.input_prefix, -self._max_characters), "input_prefix"),
            suffix=self._plain(_near(body.input_suffix, self._max_characters), "input_suffix"),
            start=self._tokenize(start),
            files=self._files(fim, body.input_extra or ()),
            n_max=self._n_max(max_tokens_of(body, context)),
        )

    def of_suffix(self, prompt: Prompt, body: CompletionBody, context: RequestContext) -> Prompt:
        """Return the prompt between which and OpenAI's `suffix` a text is wanted."""
        fim = self._fim("suffix")
        if body.echo:
            raise InvalidRequestError("'suffix' cannot be combined with 'echo'", param="suffix")
        return self._prompt(
            fim,
            prefix=self._tokenize(prompt),
            suffix=self._plain(_near(body.suffix or "", self._max_characters), "suffix"),
            n_max=self._n_max(max_tokens_of(body, context)),
        )

    def _fim(self, param: str) -> FimTokens:
        if self._info.fim is None:
            message = f"'{param}' needs a model whose vocabulary has fill-in-the-middle tokens"
            raise NotSupportedError(message, param=param)
        return self._info.fim

    def _n_max(self, max_tokens: int) -> int:
        """Return the tokens of the longest prompt that leaves space for the middle, at most half of the context."""
        n_ctx = self._info.n_ctx_slot
        return n_ctx - max(1, min(max_tokens, n_ctx // 2) if max_tokens >= 0 else n_ctx // 4)

    def _plain(self, text: str | Parts, param: str) -> list[int]:
        """Tokenize a text in which control tokens are plain text."""
        if not text:
            return []
        prompt = parse_prompt(text, self._info.n_vocab, param, special=False)
        if not isinstance(text, str):
            self._check_size(prompt)
        return self._tokenize(prompt)

    def _files(self, fim: FimTokens, extracts: Sequence[FileExtract]) -> list[int]:
        """Return the tokens of other files, and of the line before the file itself."""
        files: list[list[int]] = []
        n_left = self._max_characters
        for extract in reversed(extracts):
            if n_left <= 0:
                break
            name = (extract.filename or "tmp")[:_MAX_NAME]
            text = _near(extract.text, -n_left)
            files.append([*self._heading(fim, name), *self._plain(text, "input_extra")])
            n_left -= len(text) + len(name) + len(_SNIPPET)
        repository = [fim.repository, *self._plain("myproject\n", "")] if fim.repository >= 0 else []
        own = self._heading(fim, "filename") if fim.file_separator >= 0 else []
        return [*repository, *chain.from_iterable(reversed(files)), *own]

    def _heading(self, fim: FimTokens, filename: str) -> list[int]:
        if fim.file_separator < 0:
            return self._plain(_SNIPPET, "")
        return [fim.file_separator, *self._plain(f"{filename}\n", "input_extra")]

    @staticmethod
    def _prompt(
        fim: FimTokens,
        *,
        prefix: Sequence[int],
        suffix: Sequence[int],
        n_max: int,
        start: Sequence[int] = (),
        files: Sequence[int] = (),
    ) -> Prompt:
        """Return the prompt in at most `n_max` tokens.

        Other files are cut first, then the prefix and the suffix at their far ends, down to 3/4 and 1/4.
        """
        bos = [fim.bos] if fim.bos >= 0 else []
        n_free = n_max - len(bos) - 3 - len(start)
        if n_free < 0:
            raise InvalidRequestError(f"'prompt' has more than the {n_max} tokens that fit", param="prompt")
        prefix = _end(prefix, n_free - min(len(suffix), n_free // 4))
        suffix = suffix[: n_free - len(prefix)]
        files = _end(files, n_free - len(prefix) - len(suffix))
        tokens = (*files, *bos, fim.prefix, *prefix, *start, fim.suffix, *suffix, fim.middle)
        return (TokensPart(tokens),)


def _near(text: str | Parts, n_characters: int) -> str | Parts:
    """Return a text's first characters or, if their number is negative, its last ones."""
    if not isinstance(text, str):
        return text
    return text[_n_cut(len(text) + n_characters) :] if n_characters < 0 else text[:n_characters]


def _end(tokens: Sequence[int], n_max: int) -> Sequence[int]:
    """Return the end of tokens that are more than `n_max`."""
    return tokens[_n_cut(len(tokens) - n_max) :]


def _n_cut(n_over: int) -> int:
    """Return how many to cut where so many are over."""
    return -(-max(n_over, 0) // CUT_TOKENS) * CUT_TOKENS
