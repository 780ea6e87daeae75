"""Restoring: finds the remembered replies of a conversation, and makes its prompt with their tokens.

1. Walk over the messages and look up each reply by its meaning and the state after the replies before it.
2. Render the conversation with placeholders for the replies that were found. The text before each must be that of
   the prompt that the reply answered, and the template must keep all of the reply: if it strips the reasoning of
   earlier turns, the reply is not restored.
3. If a reply fails, start again without it, because later replies followed other tokens.
4. The prompt consists of the tokens of all replies and the texts between them, then the text after the last
   placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamaslot.base.backend import Vocab
from llamaslot.base.commands import TextPart
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.generation.tools import ParserOptions
from llamaslot.base.text_records import ChatTurn, RememberedReply, ReplyStore, RestoredReplies
from llamaslot.base.tokens import ids_of
from llamaslot.protocol.replies.meaning import (
    START,
    Meanings,
    content_of,
    digest_of,
    merged_replies,
    reasoning_meaning,
    with_merged_replies,
)
from llamaslot.protocol.replies.rendering import (
    CALL,
    MAX_PROBES,
    Findings,
    Placeholders,
    ProbedTemplate,
    Render,
    Rendering,
    n_common_characters,
)
from llamaslot.text.conversation import Conversation, Message

_MAX_TRIES = 8
"""Most renderings of a conversation, after which nothing is restored."""
_N_HEAD = 64
"""Number of leading tokens of a reply whose text is read to see how it begins."""
_N_COMPARED = 8
"""Number of characters that are compared to tell the text of a message from markup."""
_MAX_EARLIER = 8
"""Most states, latest first, after which a reply is looked up: those after earlier replies of the conversation."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A remembered reply in a conversation."""

    reply: RememberedReply
    content: str
    calls: Sequence[Message]
    is_in_loop: bool
    """True if no user message follows."""


@dataclass(slots=True)
class _Plan:
    """A conversation with placeholders for the replies that may be restored."""

    start: bytes
    meanings: Meanings
    template: ProbedTemplate
    messages: Conversation = field(default_factory=list)
    found: list[_Found] = field(default_factory=list)
    conversation: bytes = START
    """Digest of all messages."""
    placeholders: Placeholders = field(default_factory=Placeholders)
    superseded: set[bytes] = field(default_factory=set)
    """Keys of replies that were rendered and not restored in the prompt that a later reply answered."""
    returns: bool = False
    """True if the last reply is a remembered one, even if it cannot be restored."""

    @property
    def state(self) -> bytes:
        """State after the last restored reply."""
        return self.found[-1].reply.state if self.found else self.start

    @property
    def parent(self) -> bytes:
        """Key of the last restored reply; empty if there is none."""
        return self.found[-1].reply.key if self.found else b""

    def add(self, message: Message) -> None:
        """Add a message that is rendered as it is."""
        self.messages.append(message)
        self.conversation = self.meanings.with_message(self.conversation, message)


class ReplyRestorer:
    """Restores replies from a store, for one vocabulary and chat template. Usable on any thread."""

    def __init__(self, store: ReplyStore, vocab: Vocab) -> None:
        self._store = store
        self._vocab = vocab
        self._end_tokens = [text for token in vocab.eog if (text := self._text_of([token]))]
        self._findings: dict[bytes, Findings] = {}
        """Results of probing the template, by a digest of the variables on which they depend."""

    def prompt(
        self,
        conversation: Conversation,
        parts: Sequence[TextPart],
        render: Render,
        start: bytes,
        parser_of: Callable[[str], ParserOptions],
        *,
        variables: bytes,
    ) -> tuple[ChatTurn, tuple[TextPart, ...], str] | None:
        """Return a chat's turn, and the texts of its prompt after the restored tokens and of the whole prompt.

        None if the reply cannot be remembered. The conversation is rendered as `parts`, `start` is the state before
        any reply, `parser_of` returns the parser options for a message after a prompt, and `variables` is a digest
        of everything except the messages on which `render` depends. A prompt includes the beginning of the reply
        that it contains.
        """
        if variables not in self._findings and len(self._findings) >= MAX_PROBES:
            # Clients choose variables, so their number is limited. Most clients never send any.
            self._findings.clear()
        template = ProbedTemplate(render, self._findings.setdefault(variables, Findings()))
        history, begun = conversation, conversation[-1] if conversation[-1]["role"] == "assistant" else None
        if begun is not None:
            history = conversation[:-1]
        plan, rendering, ends = self._restorable(history, Rendering(parts), begun, template, start)
        at = ends[-1] if ends else 0
        try:
            bare = Rendering(render(plan.messages, True)) if begun is not None else rendering
        except InvalidRequestError:
            # Templates may refuse the conversation without the continued message, for example if it is empty then.
            return None
        continued = self._continued(plan, begun, bare, at)
        shown = n_common_characters(bare.text, self._with_reply(plan, render))
        if shown < at or not rendering.text.startswith(bare.text):
            return None
        tokens = b"".join(each.reply.tokens for each in plan.found)
        n_reply = sum(each.reply.n_reply for each in plan.found)
        text_begun, rest = rendering.text[len(bare.text) :], rendering.cut(at)
        if continued is not None:
            tokens, n_reply, rest = tokens + continued.tokens, n_reply + continued.n_reply, ()
            text_begun = continued.begun + self._text_of(ids_of(continued.tokens)[-continued.n_reply :])
        for each in plan.found[-1:]:
            self._store.use(each.reply.key)
        turn = ChatTurn(
            parser=parser_of(bare.text),
            begun=text_begun,
            opening=bare.text[shown:],
            conversation=plan.conversation,
            parent=plan.parent,
            state=plan.state,
            start=start,
            restored=RestoredReplies(tokens, n_reply, continued) if tokens else None,
            returns=plan.returns,
        )
        return turn, rest, bare.text + text_begun

    def _text_of(self, tokens: Sequence[int]) -> str:
        return self._vocab.detokenize(tokens).decode(errors="replace")

    def _restorable(
        self, history: Conversation, plain: Rendering, begun: Message | None, template: ProbedTemplate, start: bytes
    ) -> tuple[_Plan, Rendering, list[int]]:
        """Return the conversation with placeholders for restored replies, its text, and where each reply ends."""
        excluded: set[bytes] = set()
        superseded: set[bytes] = set()
        meanings = Meanings()
        for n_left in reversed(range(_MAX_TRIES)):
            plan = _Plan(start, meanings, template)
            self._fill(plan, history, excluded | superseded if n_left else None)
            if plan.superseded:
                superseded |= plan.superseded
                continue
            if not plan.found:
                return plan, plain, []
            try:
                messages = [*plan.messages, *([begun] if begun is not None else [])]
                rendering = Rendering(template.render(messages, True))
            except InvalidRequestError:
                excluded.add(plan.found[0].reply.key)
                superseded.clear()
                continue
            ends = self._ends(plan, rendering)
            if len(ends) == len(plan.found):
                return plan, rendering, ends
            excluded.add(plan.found[len(ends)].reply.key)
            # They may have been superseded by this one, which is excluded now.
            superseded.clear()
        raise AssertionError("the last try finds nothing")

    def _fill(self, plan: _Plan, history: Conversation, excluded: set[bytes] | None) -> None:
        """Look up the replies of a conversation, except those in `excluded` (None excludes all)."""
        runs = with_merged_replies(history)
        last_question = max((i for i, run in enumerate(runs) if run[0]["role"] == "user"), default=-1)
        at = 0
        while at < len(runs):
            is_reply = runs[at][0]["role"] == "assistant" and excluded is not None
            if is_reply:
                plan.returns = False
            found = None
            for merged in merged_replies(runs, at) if is_reply else ():
                is_in_loop = at + merged.n_runs > last_question
                reply = self._find(plan, merged.message, excluded or set(), is_in_loop=is_in_loop)
                if reply is not None:
                    found = merged, reply
                    break
            if found is None:
                self._add_run(plan, runs[at])
                at += 1
                continue
            merged, reply = found
            calls = plan.template.own_calls(merged.message.get("tool_calls", ()))
            plan.messages.append(plan.placeholders.message(len(plan.found), calls))
            meaning = plan.meanings.of(merged.message)
            assert meaning is not None
            plan.conversation = digest_of(plan.conversation, meaning)
            plan.found.append(_Found(reply, content_of(merged.message), calls, at + merged.n_runs > last_question))
            for result in merged.results:
                plan.add(result)
            at += merged.n_runs

    def _add_run(self, plan: _Plan, run: Sequence[Message]) -> None:
        """Add messages unchanged. Several by the assistant count as the one reply that was divided into them."""
        before = plan.conversation
        for message in run:
            plan.add(message)
        merged = next(merged_replies([list(run)], 0), None) if len(run) > 1 else None
        meaning = plan.meanings.of(merged.message) if merged is not None else None
        if meaning is not None:
            plan.conversation = digest_of(before, meaning)

    def _find(
        self, plan: _Plan, message: Message, excluded: set[bytes], *, is_in_loop: bool
    ) -> RememberedReply | None:
        """Return the remembered reply for a message. Only the text before it is still to be compared."""
        meaning = plan.meanings.of(message)
        if meaning is None:
            return None
        states = [plan.start, *(each.reply.state for each in plan.found)]
        for i, state in reversed([*enumerate(states)][-_MAX_EARLIER:]):
            key = digest_of(state, plan.conversation, meaning)
            reply = self._store.find(key) if key not in excluded else None
            if reply is None or not _has_same_reasoning(message, reply):
                continue
            plan.returns = True
            # The last condition only saves a rendering: `_ends` would detect it as well.
            calls = message.get("tool_calls", ())
            if is_in_loop or not reply.has_reasoning or not plan.template.strips_reasoning(calls):
                plan.superseded |= {each.reply.key for each in plan.found[i:]}
                return reply
        return None

    def _continued(self, plan: _Plan, begun: Message | None, bare: Rendering, at: int) -> RememberedReply | None:
        """Return the remembered reply that the prompt's last message continues."""
        meaning = plan.meanings.of(begun) if begun is not None else None
        if begun is None or meaning is None:
            return None
        reply = self._store.find(digest_of(plan.state, plan.conversation, meaning))
        if reply is None or not _has_same_reasoning(begun, reply):
            return None
        is_same = (
            bare.digest(at, at + reply.n_text) == reply.text and bare.text[at + reply.n_text :] == reply.opening
        )
        return reply if is_same else None

    def _ends(self, plan: _Plan, rendering: Rendering) -> list[int]:
        """Return the offsets at which the prompt continues after each reply, up to the first that fails."""
        ends: list[int] = []
        template = plan.template
        text, at = rendering.text, 0
        spans = plan.placeholders.spans(text)
        for number, each in enumerate(plan.found):
            reply, span = each.reply, spans.get(number)
            before = at + reply.n_text
            if span is None or span.start < before or rendering.digest(at, before) != reply.text:
                break
            if not each.calls and not self._has_outer_whitespace_of(each, template):
                break
            keeps = span.has_reasoning or (each.is_in_loop and bool(each.calls))
            if not keeps and reply.has_reasoning:
                break
            # Some templates write a question differently if a reply follows.
            if not text.startswith(reply.opening, before) and not (keeps and template.opens_replies(reply.opening)):
                break
            own = template.own_end(each.calls)
            end = span.end(own, reply.closing, self._end_tokens, has_calls=bool(each.calls))
            # Some templates write a part of a message in another place.
            if span.until > end:
                break
            ends.append(end)
            at = end
        return ends

    def _has_outer_whitespace_of(self, found: _Found, template: ProbedTemplate) -> bool:
        """Return True if the template keeps the whitespace around a reply's text.

        Some templates trim it, so that the restored prompt would differ from the rendered one.
        """
        reply, core = found.reply, found.content.strip()
        outer = template.outer_of(found.content)
        head = reply.begun + self._text_of(ids_of(reply.tokens)[-reply.n_reply :][:_N_HEAD])
        text = reply.closing.rstrip()
        if not text or not text.endswith(core[-len(text) :]):
            # The format has markup after the text.
            return True
        if outer is None or outer[1] != reply.closing[len(text) :]:
            return False
        # Whitespace between markup or reasoning and the text belongs to the format.
        has_markup = not core.startswith(head.strip()[:_N_COMPARED])
        return has_markup or outer[0] == head[: len(head) - len(head.lstrip())]

    def _with_reply(self, plan: _Plan, render: Render) -> str:
        """Return the text of the conversation with one more reply."""
        for calls in ([CALL], []):
            reply = plan.placeholders.message(len(plan.found), calls)
            try:
                return Rendering(render([*plan.messages, reply], False)).text
            except InvalidRequestError:
                continue
        return ""


def _has_same_reasoning(message: Message, reply: RememberedReply) -> bool:
    """Return True if a message has the reasoning of a reply, or none, because clients may leave it out."""
    return reasoning_meaning(message.get("reasoning_content", "")) in (b"", reply.reasoning)
