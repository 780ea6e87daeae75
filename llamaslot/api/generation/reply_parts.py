"""Parts that replies of all APIs have in common.

Statistics: `timings`, `cache`, `usage` and the progress of a prompt. Log-probabilities: OpenAI's formats for chat
and for text, and llama-server's.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from llamaslot.api.bodies import encode, joined_lists
from llamaslot.base.commands import GenerateParams
from llamaslot.base.events import Finished, Output, Progress
from llamaslot.base.generation.token_probs import ProbRows, TokenProb
from llamaslot.base.stats import MISS_FLAGS, Miss
from llamaslot.base.tokens import SessionMatch
from llamaslot.service.live_request import Completion

_MAX_TOPS = 4096
"""Most tokens whose JSON is cached."""


class Timings(msgspec.Struct):
    """llama-server's counts and times of one completion, or sums over several; rates without a duration are 0."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    """Tokens drafted; only if any were, as in llama-server."""
    draft_n_accepted: int | UnsetType = UNSET


class CacheUse(msgspec.Struct):
    """Origin of the prompt tokens, and the reason why no more of them were reused."""

    cells: int
    """Prompt tokens whose KV was in the pool."""
    ram: int
    disk: int
    remote: int
    computed: int
    miss: Miss | None
    """A value of `Miss`; null if all cached tokens of the prompt were reused."""
    miss_flag: str | UnsetType = UNSET
    """The server's flag that overrides this; only where there is one."""
    diverged_at: int | None = None
    """Character at which the prompt diverges from the cached tokens.

    The prompt is that of `/apply-template`, except for restored messages.
    """
    session_match: SessionMatch | None = None
    """A value of `SessionMatch`; null without a session."""
    approximate_tokens: int = 0
    """Tokens taken from the session although tokenizing the text alone gives others."""
    restored_tokens: int = 0
    """Tokens of messages that the server sent before, as it generated them."""


class PromptDetails(msgspec.Struct):
    """Reused prompt tokens."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's token counts; a prompt of several choices counts once."""

    completion_tokens: int
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TokenCount(msgspec.Struct):
    """Tokens of a prompt."""

    input_tokens: int


class PromptProgress(msgspec.Struct):
    """llama-server's progress of computing a prompt."""

    total: int
    cache: int
    processed: int
    time_ms: int

    @classmethod
    def of(cls, event: Output | Finished) -> PromptProgress | None:
        """Return the progress that an event carries; None for all others."""
        prefill = event.prefill if isinstance(event, Output) else None
        if prefill is None:
            return None
        return cls(progress_of(event).n_prompt, prefill.n_cached, prefill.n_processed, int(prefill.ms))


def progress_of(event: Output | Finished) -> Progress:
    """Return the progress of an event that has it: the first, the last, or any where the client asked for it."""
    assert event.progress is not None
    return event.progress


def cache_use(progress: Progress) -> CacheUse:
    """Return what a request found in the cache."""
    return CacheUse(
        cells=progress.n_cached - progress.n_loaded,
        ram=progress.n_loaded - progress.n_read - progress.n_fetched,
        disk=progress.n_read,
        remote=progress.n_fetched,
        computed=progress.n_prompt_computed,
        miss=progress.miss or None,
        miss_flag=MISS_FLAGS.get(progress.miss, UNSET),
        diverged_at=progress.diverged_at if progress.diverged_at >= 0 else None,
        session_match=progress.session_match or None,
        approximate_tokens=progress.n_approximate,
        restored_tokens=progress.n_restored,
    )


def timings(progress: Iterable[Progress]) -> Timings:
    """Return sums over completions. The first token comes from the prompt, so rates count the tokens after it."""
    several = list(progress)
    prompt_n = sum(p.n_prompt_computed for p in several)
    prompt_ms = sum(p.prompt_ms for p in several)
    predicted_ms = sum(p.predicted_ms for p in several)
    steps = sum(max(p.n_generated - 1, 0) for p in several)
    n_drafted = sum(p.n_drafted for p in several)
    return Timings(
        cache_n=sum(p.n_cached for p in several),
        prompt_n=prompt_n,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, prompt_n),
        prompt_per_second=_ratio(1e3 * prompt_n, prompt_ms),
        predicted_n=sum(p.n_generated for p in several),
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, steps),
        predicted_per_second=_ratio(1e3 * steps, predicted_ms),
        draft_n=n_drafted or UNSET,
        draft_n_accepted=sum(p.n_accepted for p in several) if n_drafted else UNSET,
    )


def stats_of(progress: Sequence[Progress]) -> dict[str, Any]:
    """Return the `timings` of completions, which are sums, and the `cache` of the first one."""
    return {"timings": timings(progress), "cache": cache_use(progress[0])}


def usage(completions: Sequence[Completion]) -> Usage:
    """Return the usage of finished completions. A prompt counts once, with the reused tokens of its first one."""
    prompts: dict[str, Progress] = {}
    for each in completions:
        prompts.setdefault(each.params.group or each.params.completion_id, each.end.progress)
    n_prompt = sum(progress.n_prompt for progress in prompts.values())
    n_generated = sum(each.end.progress.n_generated for each in completions)
    n_cached = sum(progress.n_cached for progress in prompts.values())
    return Usage(n_generated, n_prompt, n_prompt + n_generated, PromptDetails(n_cached))


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else 0.0


class TopProb(msgspec.Struct):
    """One of the most likely tokens."""

    id: int
    token: str
    """Its text."""
    bytes: list[int]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET
    """Its probability after sampling, in place of the logarithm (`post_sampling_probs`)."""


class Prob(TopProb, kw_only=True):
    """A token of the reply."""

    top_logprobs: list[TopProb] | UnsetType = UNSET
    top_probs: list[TopProb] | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct):
    """Probabilities of a chat reply's tokens."""

    content: list[Prob]


class TextLogprobs(msgspec.Struct):
    """Probabilities of a text's tokens in OpenAI's format, and in llama-server's as `content`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """Log-probability by text; bytes that are not valid UTF-8 are written as in OpenAI's API."""
    text_offset: list[int]
    content: list[Prob]
    """Generated tokens only."""


class ProbsWriter:
    """Writes the probabilities of one choice's tokens, in order; those of its prompt, if any, come first.

    The texts of all tokens join to the choice's text: a character of several tokens belongs to the last of them.
    """

    def __init__(self, params: GenerateParams) -> None:
        self._texts = _Texts()
        self._are_sampled = params.sampling.post_sampling_probs
        self._tops: dict[int, bytes] = {}
        """JSON of a `TopProb` up to its probability, by token: the same tokens are likely in many places."""

    def native(self, rows: Iterable[TokenProb]) -> list[Prob]:
        """Return the next tokens in llama-server's format, which has all fields of OpenAI's for chat."""
        return [self._prob(row, self._texts.next(row)[1]) for row in rows]

    def native_later(self, rows: ProbRows) -> Iterator[bytes]:
        """Yield the JSON of `native`."""
        return joined_lists(self.native(part) for part in rows.parts())

    def text(self, rows: Sequence[TokenProb]) -> TextLogprobs:
        """Return the next tokens in OpenAI's format for text completions."""
        places = [self._texts.next(row) for row in rows]
        content = [self._prob(row, text) for row, (_, text) in zip(rows, places, strict=True)]
        return _text_logprobs(rows, [offset for offset, _ in places], content)

    def text_later(self, prompt: ProbRows | None, text: str, rows: ProbRows) -> tuple[Iterator[bytes], ...]:
        """Return the JSON of each list of a `TextLogprobs`: a prompt's tokens, if wanted, then the reply's."""
        both = (rows,) if prompt is None else (prompt, rows)

        def each(value: Callable[[TokenProb], Any], *, with_top: bool = False) -> Iterator[bytes]:
            parts = (part for each in both for part in each.parts(with_top=with_top))
            return joined_lists([value(row) for row in part] for part in parts)

        def offsets() -> Iterator[bytes]:
            places = _Texts(len(text))
            of_prompt = self._prompt_offsets(prompt, text) if prompt is not None else iter(())
            of_reply = ([places.next(row)[0] for row in part] for part in rows.parts(with_top=False))
            return joined_lists(chain(of_prompt, of_reply))

        return (
            each(_name),
            each(lambda row: row.value),
            each(_top_of, with_top=True),
            offsets(),
            self.native_later(rows),
        )

    def prompt(self, rows: ProbRows, text: str) -> Iterator[TextLogprobs]:
        """Yield the tokens of a prompt in parts, and count its text, which all that follows comes after.

        A tokenizer may have put BOS and a space before it, which the text does not have.
        """
        self._texts = _Texts(len(text))
        places = filter(None, self._prompt_offsets(rows, text))
        for part, offsets in zip(rows.parts(), places, strict=True):
            yield _text_logprobs(part, offsets, [])

    def _prompt_offsets(self, rows: ProbRows, text: str) -> Iterator[list[int]]:
        """Yield the offsets of each part of a prompt's tokens, after an empty list for each part."""
        counted = _Texts()
        for part in rows.parts(with_top=False):
            for row in part:
                counted.next(row)
            yield []
        n_added, places = max(counted.n - len(text), 0), _Texts()
        for part in rows.parts():
            yield [max(places.next(row)[0] - n_added, 0) for row in part]

    def _prob(self, row: TokenProb, text: str) -> Prob:
        assert row.value is not None
        found = Prob(row.token, text, list(row.piece))
        top: Any = msgspec.Raw(b"[%b]" % b",".join(map(self._top, row.top)))
        if self._are_sampled:
            found.prob, found.top_probs = row.value, top
        else:
            found.logprob, found.top_logprobs = row.value, top
        return found

    def _top(self, row: TokenProb) -> bytes:
        """Return the JSON of a `TopProb`."""
        begin = self._tops.get(row.token)
        if begin is None:
            if len(self._tops) >= _MAX_TOPS:
                self._tops.clear()
            begin = encode(TopProb(row.token, _text(row.piece), list(row.piece)))[:-1]
            begin += b',"prob":' if self._are_sampled else b',"logprob":'
            self._tops[row.token] = begin
        return b"%b%b}" % (begin, encode(row.value))


class _Texts:
    """The texts of consecutive tokens, and `n` characters so far, those before the first one included."""

    def __init__(self, n: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.n = n

    def next(self, row: TokenProb) -> tuple[int, str]:
        """Count a token; return the characters before it, and its text."""
        before, text = self.n, self._decoder.decode(row.piece)
        self.n += len(text)
        return before, text


def _text_logprobs(rows: Sequence[TokenProb], offsets: list[int], content: list[Prob]) -> TextLogprobs:
    names, values = [_name(row) for row in rows], [row.value for row in rows]
    return TextLogprobs(names, values, [_top_of(row) for row in rows], offsets, content)


def _top_of(row: TokenProb) -> dict[str, float] | None:
    """Return a position's most likely tokens and its own, with probabilities, by text; None if it is not scored."""
    return _by_name([*row.top, row]) if row.value is not None else None


def _text(piece: bytes) -> str:
    """Return the text of a token alone, as llama-server does without an incomplete character at its end."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(piece)


def _name(row: TokenProb) -> str:
    """Return a token's text, or its bytes as OpenAI writes them."""
    try:
        return row.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in row.piece)


def _by_name(rows: Iterable[TokenProb]) -> dict[str, float]:
    """Return probabilities by text, in their order; the highest of several tokens with the same text counts."""
    found: dict[str, float] = {}
    for row in rows:
        if row.value is not None:
            name = _name(row)
            found[name] = max(row.value, found.get(name, row.value))
    return found
