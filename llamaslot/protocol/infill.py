"""Fill-in-the-middle prompts, for the text between a prefix and a suffix.

    [REP]myproject  [SEP]name  text  ...  [SEP]filename  [BOS] [PRE]prefix  prompt [SUF]suffix [MID]
    |-- other files, with the tokens that the model has --|

This is llama-server's layout. But a prompt that fits into the context is not cut, so that after each keystroke the
cache has everything before it. llama-server cuts prompts to one batch, and with each keystroke drops a little more
from the start of a long prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from llamaslot.base.commands import TokensPart
from llamaslot.base.errors import InvalidRequestError, NotSupportedError
from llamaslot.base.generation.request_context import RequestSettings
from llamaslot.base.model import FimTokens, ModelInfo
from llamaslot.protocol.bodies import CompletionBody, FileExtract, InfillBody, Parts
from llamaslot.protocol.text_requests import Prompt, max_tokens_of, parse_prompt

CUT_TOKENS = 256
"""Granularity in tokens at which a too long text is cut, so that later prompts keep the same start."""
_CHARACTERS_PER_TOKEN = 32
"""Most characters of a text that are read per token of the context."""
_MAX_NAME = 4096
"""Most characters of a file name that are used."""
_SNIPPET = "\n\n--- snippet ---\n\n"
"""Precedes each file if the model has no token for that."""


class InfillPrompts:
    """Makes fill-in-the-middle prompts for a model. Usable on any thread."""

    def __init__(
        self, info: ModelInfo, tokenize: Callable[[Prompt], list[int]], check_size: Callable[[Prompt], None]
    ) -> None:
        self._info = info
        self._tokenize = tokenize
        self._check_size = check_size
        """Raises an error for a prompt that is far too long for the context, before it is tokenized."""
        self._max_characters = info.n_ctx_slot * _CHARACTERS_PER_TOKEN

    def of_parts(self, body: InfillBody, settings: RequestSettings) -> Prompt:
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
            n_max=self._n_max(max_tokens_of(body, settings)),
        )

    def of_suffix(self, prompt: Prompt, body: CompletionBody, settings: RequestSettings) -> Prompt:
        """Return the prompt for a text between `prompt` and OpenAI's `suffix`."""
        fim = self._fim("suffix")
        if body.echo:
            raise InvalidRequestError("'suffix' cannot be combined with 'echo'", param="suffix")
        return self._prompt(
            fim,
            prefix=self._tokenize(prompt),
            suffix=self._plain(_near(body.suffix or "", self._max_characters), "suffix"),
            n_max=self._n_max(max_tokens_of(body, settings)),
        )

    def _fim(self, param: str) -> FimTokens:
        if self._info.fim is None:
            message = f"'{param}' needs a model whose vocabulary has fill-in-the-middle tokens"
            raise NotSupportedError(message, param=param)
        return self._info.fim

    def _n_max(self, max_tokens: int) -> int:
        """Return the most tokens of a prompt, after reserving at most half of the context for the reply."""
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
        """Return the tokens of the other files, and of the heading of the file itself."""
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
        """Return a prompt of at most `n_max` tokens.

        Other files are cut first. Then prefix and suffix are cut at their far ends, to 3/4 and 1/4 of the space.
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
    """Return the first `n_characters` of a text, or the last ones if the number is negative."""
    if not isinstance(text, str):
        return text
    return text[_n_cut(len(text) + n_characters) :] if n_characters < 0 else text[:n_characters]


def _end(tokens: Sequence[int], n_max: int) -> Sequence[int]:
    """Cut tokens at their start to at most `n_max`."""
    return tokens[_n_cut(len(tokens) - n_max) :]


def _n_cut(n_over: int) -> int:
    """Return how many tokens to cut if there are `n_over` too many."""
    return -(-max(n_over, 0) // CUT_TOKENS) * CUT_TOKENS
