"""Earlier prompts of each client, and where and why a new prompt diverges from them.

The engine says how many tokens of a prompt are cached. If one of its owner's earlier prompts diverges there too,
both have the same text after that, what differs between is the reason why that text is computed again:

    earlier   |------- same -------| 27 Nov |------- same -------|--- reply ---|
    prompt    |------- same -------| 28 Nov |------- same -------|- question -|
                         cached until here ^  computed again

A prompt that only continues another one, or diverges from it for good, has no such text. Only prompts of the same
owner are compared. Nothing is done for prompts that hit; text leaves this module only if the server shows it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamaslot.base.advice import Divergence
from llamaslot.base.generation.tools import ParserOptions
from llamaslot.base.tokens import WIDTH, Tokens, n_common, unpacked
from llamaslot.formats.message import ReasoningTags
from llamaslot.prompts.cut_points import MARKER, MarkedText, Pieces, n_characters
from llamaslot.prompts.remembering import PromptContext
from llamaslot.text.culprits import MARK, Change, culprit_of

MIN_TOKENS = 64
"""Tokens that have to be computed again for a place to count, and by which both prompts may diverge elsewhere."""
MIN_REPLY = 8
"""Tokens of a reply by which its conversation is recognized under another salt."""
MAX_BYTES = 16 * 2**20
MAX_PROMPT_BYTES = 2**20
MAX_OWNERS = 64
MAX_OF_OWNER = 16
"""Limits of what is kept: bytes of tokens and tools of all prompts and of one, owners, and prompts of an owner."""
_OVERHEAD = 600
"""Bytes that a prompt takes besides, about."""
_RUN = 16
"""Tokens of the runs by which common text is found."""
_MIN_RUN = 48
"""Tokens with which common text must begin: fewer may be markup."""
_MAX_TRIES = 64
"""Runs with which common text may begin."""
_MAX_DIFFERING = 2**14
"""Tokens of differing text that are compared."""
_MAX_AFTER = 2**13
"""Tokens looked at where both prompts agree again, and again as many at the end of the prompt."""
_FACTOR, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
"""Of a hash that wraps around."""
_SHOWN = 200
"""Characters of each text that is shown."""


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A prompt that was replied to."""

    namespace: str
    session: bytes
    prompt: bytes
    """Packed tokens."""
    reply: bytes
    tools: bytes

    @property
    def n_bytes(self) -> int:
        return len(self.prompt) + len(self.reply) + len(self.tools) + _OVERHEAD


class EarlierPrompts:
    """The latest prompts of the owners that sent one most recently. Used by one thread at a time."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._owners: OrderedDict[str, deque[_Earlier]] = OrderedDict()

    def add(self, context: PromptContext, generated: bytes) -> None:
        """Remember a prompt with its reply, in place of those that it continues."""
        request, prompt = context.request, context.prompt.packed_tokens
        new = _Earlier(request.namespace, request.session, prompt, generated, request.tools)
        if new.n_bytes > MAX_PROMPT_BYTES or not request.params.cache_prompt:
            return
        kept = self._owners.setdefault(request.owner, deque())
        self._owners.move_to_end(request.owner)
        for each in [each for each in kept if each.namespace == new.namespace and prompt.startswith(each.prompt)]:
            kept.remove(each)
            self.n_bytes -= each.n_bytes
        kept.append(new)
        self.n_bytes += new.n_bytes
        while len(kept) > MAX_OF_OWNER:
            self.n_bytes -= kept.popleft().n_bytes
        while self.n_bytes > MAX_BYTES or len(self._owners) > MAX_OWNERS:
            # An owner with few prompts loses none to one with many.
            owner = next(iter(self._owners))
            if len(self._owners) <= MAX_OWNERS:
                owner = max(self._owners, key=lambda each: sum(prompt.n_bytes for prompt in self._owners[each]))
            self.n_bytes -= self._owners[owner].popleft().n_bytes
            if not self._owners[owner]:
                del self._owners[owner]

    def of(self, owner: str) -> Sequence[_Earlier]:
        """Return the prompts of an owner, the latest first."""
        return tuple(reversed(self._owners.get(owner, ())))

    def find_divergence(
        self,
        context: PromptContext,
        n_cached: int,
        pieces: Pieces,
        *,
        n_added: int,
        reasoning: ReasoningTags | None = None,
        shows_text: bool = False,
    ) -> Divergence | None:
        """Return where and why a prompt diverges from an earlier one after `n_cached` tokens; None if it does not.

        The first `n_added` tokens are those that the model wants before a prompt; they have no text.
        """
        tokens = context.prompt.tokens
        namespace = context.request.namespace
        best: _Overlap | None = None
        known: _Runs | None = None
        for each in self.of(context.request.owner):
            old = _tokens_of(each)
            n = n_common(tokens, old)
            if each.namespace != namespace:
                # Of another salt only this is said, and only if the reply comes back: users may ask the same.
                if n * WIDTH >= len(each.prompt) + MIN_REPLY * WIDTH and n - n_cached >= MIN_TOKENS:
                    return Divergence("salted", n - n_cached)
                continue
            if abs(n - n_cached) > MIN_TOKENS or len(old) - n < MIN_TOKENS or len(tokens) - n < MIN_TOKENS:
                continue
            if known is None or known.start != n:
                known = _Runs(tokens, n)
            found = known.overlap(each, old)
            if found is not None and (best is None or found.n_tokens > best.n_tokens):
                best = found
        if best is None or best.n_tokens < MIN_TOKENS or max(best.n_old, best.n_new) > _MAX_DIFFERING:
            return None
        return _divergence(context, best, pieces, n_added, reasoning, shows_text=shows_text)

    def drop_session(self, digest: bytes) -> None:
        """Forget the prompts of a session."""
        for owner, prompts in [*self._owners.items()]:
            kept = deque(each for each in prompts if each.session != digest)
            self.n_bytes -= sum(each.n_bytes for each in prompts) - sum(each.n_bytes for each in kept)
            self._owners[owner] = kept
            if not kept:
                del self._owners[owner]

    def clear(self) -> None:
        """Forget all prompts."""
        self._owners.clear()
        self.n_bytes = 0


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Text that a prompt and an earlier one have in common after they have diverged."""

    earlier: _Earlier
    start: int
    """Tokens that both begin with."""
    n_old: int
    """Tokens of the earlier prompt from there until both agree again."""
    n_new: int
    n_tokens: int
    """Tokens of the prompt that the earlier one has as well."""


class _Runs:
    """The hashes of all runs of `_RUN` tokens of a prompt after its first `start` tokens."""

    def __init__(self, tokens: Tokens, start: int) -> None:
        self.start = start
        self._tokens = tokens[start:]
        hashes = _hashes(self._tokens)
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]

    def overlap(self, earlier: _Earlier, old: Tokens) -> _Overlap | None:
        """Return what an earlier prompt has in common, None for nothing. Every `_RUN`-th run of it is looked up."""
        rest = old[self.start :]
        runs = _hashes(rest)[::_RUN]
        if not len(runs) or not len(self._sorted):
            return None
        places = np.searchsorted(self._sorted, runs).clip(max=len(self._sorted) - 1)
        found = np.flatnonzero(self._sorted[places] == runs)
        starts = self._order[places[found]]
        n_tokens = len(found) * _RUN
        # The nearest one first.
        for k in np.argsort(found * _RUN + starts, kind="stable")[:_MAX_TRIES]:
            i, j = int(found[k]) * _RUN, int(starts[k])
            n_before = n_common(rest[:i][::-1], self._tokens[:j][::-1])
            if n_before + n_common(rest[i:], self._tokens[j:]) >= _MIN_RUN:
                i, j = i - n_before, j - n_before
                return _Overlap(earlier, self.start, i, j, min(n_tokens, len(self._tokens) - j))
        return None


def _hashes(tokens: Tokens) -> npt.NDArray[np.uint64]:
    """Return a hash of each run of `_RUN` tokens."""
    hashes = tokens.astype(np.uint64) * _FACTOR
    n = 1
    while n < _RUN:
        # Two runs of n tokens make one of 2 n.
        left, right = hashes[:-n], hashes[n:]
        hashes = (left ^ (left >> _SHIFT)) * _FACTOR + right
        n *= 2
    return hashes


def _tokens_of(earlier: _Earlier) -> Tokens:
    return unpacked(earlier.prompt + earlier.reply)


def _divergence(
    context: PromptContext,
    overlap: _Overlap,
    pieces: Pieces,
    n_added: int,
    reasoning: ReasoningTags | None,
    *,
    shows_text: bool,
) -> Divergence | None:
    tokens, old = context.prompt.tokens, _tokens_of(overlap.earlier)
    start = overlap.start
    agree = start + overlap.n_new
    if min(old[start : start + overlap.n_old].min(initial=0), tokens[start:agree].min(initial=0)) < 0:
        # Images differ, and all that could be said of them is in their messages.
        return None
    rest = tokens[agree:]
    after = rest if len(rest) <= 2 * _MAX_AFTER else np.concatenate([rest[:_MAX_AFTER], rest[-_MAX_AFTER:]])
    head, old_text, new_text, after_text = (
        MarkedText.of(each.tolist(), pieces).data
        for each in (tokens[n_added:start], old[start : start + overlap.n_old], tokens[start:agree], after)
    )
    before, old_differing, new_differing, tail = _split(head, old_text, new_text, after_text)
    change = Change(
        before,
        old_differing,
        new_differing,
        tail,
        _names(overlap.earlier.tools),
        _names(context.request.tools),
        (reasoning.start, reasoning.end) if reasoning is not None else None,
    )
    found = culprit_of(change)
    if found is None:
        return None
    culprit, role = found
    shown = [text.replace(MARK, "") if shows_text else "" for text in (before, old_differing, new_differing)]
    return Divergence(
        culprit,
        overlap.n_tokens,
        role,
        n_characters(head),
        shown[0][-_SHOWN:],
        shown[1][:_SHOWN],
        shown[2][:_SHOWN],
    )


def _split(head: bytes, old: bytes, new: bytes, after: bytes) -> tuple[str, str, str, str]:
    """Return the texts, cut where characters rather than tokens differ."""
    n = _n_incomplete(head)
    head, begun = head[: len(head) - n], head[len(head) - n :]
    before, a, b, tail = (
        text.replace(MARKER, MARK.encode()).decode(errors="replace")
        for text in (head, begun + old, begun + new, after)
    )
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    before, a, b = before + a[:n], a[n:], b[n:]
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return before, a[: len(a) - n], b[: len(b) - n], a[len(a) - n :] + tail


def _n_incomplete(data: bytes) -> int:
    """Return how many bytes at the end are the beginning of a character."""
    for n in range(1, min(len(data), 3) + 1):
        byte = data[-n]
        if 0xC0 <= byte < 0xF8:
            return n if n < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0


def _names(packed_tools: bytes) -> tuple[str, ...]:
    return tuple(ParserOptions(packed_tools=packed_tools).tools_by_name)
