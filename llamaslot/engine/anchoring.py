"""Prompts as token ids, with what an earlier reply was made of where its text comes back.

    submitted    text -> the longest known name in front of a cut -> its tokens, and the rest tokenized
    replied      a reply whose text would give other tokens gets a name, together with its prompt

A prompt's tokens are so always tokens of its text, and those that were generated wherever this server generated
them. What is tokenized canonically needs no anchor: the token match finds it.

Only text that this server tokenized may stand for tokens: never prompts of token ids, nor a reply in which control
tokens are spelled or hidden. Everything here runs on the tokenizer's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llamaslot.base.messages import PromptPart, Submit, TextPart
from llamaslot.core.anchors import Anchor, Anchors
from llamaslot.core.backend import Tokens, Vocab
from llamaslot.core.spaces import salted
from llamaslot.text.cuts import Cutter, TextName, parts_between, parts_from

_MOST_BOUNDARIES = 128
"""Control tokens that are looked at; some vocabularies have thousands that nobody uses."""
_FRONTS = ("x", "x ", "x\n", "x\n\n", "\n", "é", " ", "   ", ".", "0", "\t")
_BEHIND = ("", "x", " x", "\nx", "  x")
"""What texts end and begin with around a cut that is tried out."""


@dataclass(frozen=True, slots=True)
class Behind:
    """What it takes to name a reply behind a prompt."""

    name: TextName
    front: bytes
    """The anchor that the prompt continues, empty for none."""
    tail: tuple[TextPart, ...]
    """The prompt's text from its last cut on."""
    n_head: int
    """Tokens in front of that."""
    add_special: bool
    """Whether that is the whole prompt, with the special tokens that the model wants in front."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt."""

    tokens: Tokens
    n_anchored: int = 0
    """Of its tokens, those that an anchor gave."""
    behind: Behind | None = field(default=None, compare=False)
    """None where replies to it get no name."""


class Anchoring:
    """Tokenizes for a vocabulary; with `is_on` false as if every text were new."""

    def __init__(self, vocab: Vocab, *, is_on: bool) -> None:
        self._vocab = vocab
        self.anchors = Anchors()
        boundaries = exact_boundaries(vocab) if is_on else ()
        self._cutter = Cutter(boundaries) if boundaries else None

    @property
    def is_on(self) -> bool:
        """Whether there is any control token before which texts of this vocabulary can be cut."""
        return self._cutter is not None

    def tokens(self, parts: Sequence[PromptPart], *, add_special: bool) -> Tokens:
        """The token ids of a prompt whose parts are checked."""
        runs = [
            self._vocab.tokenize(part.text, add_special=add_special and i == 0, parse_special=part.special)
            if isinstance(part, TextPart)
            else np.array(part.tokens, dtype=np.int32)
            for i, part in enumerate(parts)
        ]
        return np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)

    def submitted(self, submit: Submit) -> Prompt:
        """A request's prompt, whose parts are checked."""
        texts = [part for part in submit.prompt if isinstance(part, TextPart)]
        if self._cutter is None or not submit.cache_prompt or len(texts) < len(submit.prompt):
            return Prompt(self.tokens(submit.prompt, add_special=submit.add_special))
        cuts, name = self._cutter.cuts(texts, f"{salted(submit.cache_salt)} {submit.add_special}")
        known = next((cut for cut in reversed(cuts) if cut.name in self.anchors), None)
        last = cuts[-1] if cuts else None
        anchored = self.anchors.find(known.name) if known is not None else None
        runs = [anchored] if anchored is not None else []
        if last is not None:
            is_first = submit.add_special and known is None
            runs.append(self.tokens(parts_between(texts, known, last), add_special=is_first))
        n_head = sum(map(len, runs))
        tail = parts_from(texts, last)
        is_whole = submit.add_special and last is None
        runs.append(self.tokens(tail, add_special=is_whole))
        behind = Behind(name, known.name if known is not None else b"", tuple(tail), n_head, is_whole)
        return Prompt(np.concatenate(runs), len(anchored) if anchored is not None else 0, behind)

    def replied(self, prompt: Prompt, generated: Tokens, n_sent: int) -> Anchor | None:
        """Name a reply of which `n_sent` characters were sent, if its text would give other tokens."""
        behind = prompt.behind
        if behind is None or self._cutter is None:
            return None
        reply = self._as_sent(generated.tolist(), n_sent)
        if reply is None:
            return None
        text, tokens = reply
        *front, last = behind.tail or (TextPart(""),)
        end = [TextPart(last.text + text)] if last.special else [last, TextPart(text)]
        if self._cutter.spells_control(end[-1].text, len(end[-1].text) - len(text)):
            return None
        own = np.concatenate([prompt.tokens[behind.n_head :], np.array(tokens, dtype=np.int32)])
        if np.array_equal(self.tokens([*front, *end], add_special=behind.add_special), own):
            return None
        known = np.concatenate([prompt.tokens[: behind.n_head], own])
        return self.anchors.add(behind.name.extended(text), known, behind.front)

    def _as_sent(self, generated: list[int], n_sent: int) -> tuple[str, list[int]] | None:
        """The text that was sent of a reply, and its tokens; None where no tokens are exactly that text."""
        if generated and generated[-1] in self._vocab.eog:
            generated.pop()
        if not self._vocab.controls.isdisjoint(generated):
            return None
        pieces = [self._vocab.piece(token) for token in generated]
        while True:
            text = b"".join(pieces).decode(errors="replace")
            if len(text) <= n_sent:
                break
            pieces.pop()
        # An incomplete character at the end is sent only once the reply ends.
        return (text, generated[: len(pieces)]) if pieces and len(text) == n_sent else None


def exact_boundaries(vocab: Vocab) -> tuple[str, ...]:
    """The control tokens before which a text can be cut without changing its tokens, as far as trying shows."""

    def ids(text: str) -> list[int]:
        return list(map(int, vocab.tokenize(text, add_special=False, parse_special=True)))

    fronts = {front: ids(front) for front in _FRONTS}

    def is_exact(control: str) -> bool:
        rests = {rest: ids(control + rest) for rest in _BEHIND}
        return len(rests[""]) == 1 and all(
            ids(front + control + rest) == fronts[front] + rests[rest] for front in fronts for rest in rests
        )

    return tuple(filter(is_exact, vocab.boundaries[:_MOST_BOUNDARIES]))
