"""The roles and the order of messages that a chat template accepts, and conversion of conversations to them.

Agents send instructions in the middle of a conversation, several user messages in a row, a question right after a
tool result, two calls in one message, ids in another server's form, or no question at all. Templates refuse these,
leave them out, or write instructions at the start, where they would change everything after them. Small
conversations, rendered once, show what a template accepts, with and without tools and a system message. Only what
it does not accept is rewritten; all other messages are rendered unchanged. A rewrite depends only on the messages
before it and on the results of its own calls, and changes at most the message right before it. So a growing
conversation keeps its prefix.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, takewhile
from typing import Any, TypeAlias

from llamaslot.text.conversation import SYSTEM_ROLES, Conversation, Message, joined

Render: TypeAlias = Callable[[Conversation], str | None]
"""Renders a conversation; returns None if the template refuses it."""

PREAMBLE = "preamble"
"""Field of a message: its text, if it must be written just before the markup of its calls (`Preambles`)."""
_ALPHABET = string.ascii_letters + string.digits
_QUESTION: Message = {"role": "user", "content": ""}
_ALL = frozenset({"assistant", "assistant+", "call", "tool", "system", ""})
"""Beginnings of a conversation other than a question."""
_LATER: Message = {"role": "system", "content": "another system text"}
_FILLERS = ("", " ", "...")
_SHORT_IDS = "call00001", "call00002"
"""Ids of nine letters and digits, which templates that check ids accept."""
_LONG_ID = "call_of_another_server_0001"
CALLED = "a_called_function"
"""The function of probed calls."""


def with_accepted_roles(conversation: Conversation, *, later_system: bool, user_twice: bool) -> Conversation:
    """Return the messages as a template accepts them.

    Without `later_system`, instructions at the start of the conversation become one message. Later ones become user
    texts in `<system-reminder>` tags, like those of Claude Code. After a tool result they are added to the result,
    because templates leave out the reasoning of a tool loop when a user message follows. Without `user_twice`,
    consecutive user messages become one.
    """
    found: list[tuple[Message, list[str]]] = []
    """Messages, and texts to add to them."""
    for message in conversation:
        role, last_role = message["role"], found[-1][0]["role"] if found else ""
        text = joined(message["content"], "\n")
        is_later = role in SYSTEM_ROLES and bool(found) and not later_system
        follows_system = is_later and last_role in SYSTEM_ROLES
        if is_later and not follows_system:
            text, role = f"<system-reminder>\n{text}\n</system-reminder>", "user"
        if follows_system or (is_later and last_role == "tool") or (role == last_role == "user" and not user_twice):
            found[-1][1].append(text)
        else:
            found.append(({"role": role, "content": text} if is_later else message, []))
    return [
        {**message, "content": "\n\n".join(filter(None, [joined(message["content"], "\n"), *texts]))}
        if texts
        else message
        for message, texts in found
    ]


def without_system(conversation: Conversation) -> Conversation:
    """Put the leading system message before the next message's text; if there is none, make it a user message."""
    system, *rest = conversation
    if not rest:
        return [{**system, "role": "user"}]
    content = joined(system["content"], "\n") + "\n" + joined(rest[0]["content"], "\n")
    return [{**rest[0], "content": content}, *rest[1:]]


def results_from_user(conversation: Conversation) -> Conversation:
    """Convert tool results to user messages, in the JSON form that llama.cpp once used for such templates.

    Results of one turn become one message, because roles often have to alternate in such templates.
    """
    adapted: Conversation = []
    for is_result, run in groupby(conversation, lambda message: bool(message["role"] == "tool")):
        if is_result:
            adapted.append({"role": "user", "content": "\n".join(map(_result_as_text, run))})
        else:
            adapted += run
    return adapted


def _result_as_text(message: Message) -> str:
    result = {"tool": message.get("name"), "content": joined(message["content"], "\n")}
    result = {key: value for key, value in result.items() if value is not None}
    return json.dumps({"tool_response": result}, ensure_ascii=False, indent=2)


@dataclass(frozen=True, slots=True)
class MessageOrder:
    """The order and form of messages that a template accepts. Most templates accept everything (True)."""

    repeats: bool = True
    """Two replies in a row, so that roles need not alternate."""
    counts_calls: bool = True
    """If roles must alternate: True if a message with calls counts as a turn."""
    first: frozenset[str] = _ALL
    """Messages that may begin a conversation: `assistant`, `call` (a message with calls) and `tool`."""
    without_question: frozenset[str] = _ALL
    """The same for conversations without a user message; also `assistant+` if calls or results follow, `system` for
    only a system message, and an empty text for no message at all.
    """
    system_last: bool = True
    """Instructions that neither a question nor a result follows."""
    system_before_results: bool = True
    """Instructions that a result follows, but no question."""
    keeps_system: bool = True
    """True if the system message is written whatever the last message is."""
    parallel: bool = True
    """Several calls in one message."""
    orphans_after: frozenset[str] = frozenset({"user", "assistant"})
    """Roles after which results without a call are accepted."""
    text_in_loop: bool = True
    """Text in a message with calls, before a reply without calls follows."""
    text_before_reply: bool = True
    """Text in a message with calls, once a reply without calls follows."""
    call_head: str | None = None
    """Start of a call's markup up to the function's name, if text may be put before it."""
    filler: str = ""
    """Text of a reply that is inserted only to keep roles alternating."""
    ids: str | None = None
    """Regular expression of the ids that the template accepts; None for any."""

    def fitted(self, conversation: Conversation) -> Conversation:
        """Return the messages as the template accepts them, except that roles may still have to alternate."""
        if self.filler:
            conversation = [self._filled(each) for each in conversation]
        if self.ids is not None:
            conversation = _with_ids(conversation, self.ids)
        if len(self.orphans_after) < 2:
            conversation = _without_orphans(conversation, self.orphans_after)
        if not self.parallel:
            conversation = list(_one_call_each(conversation))
        if not (self.text_in_loop and self.text_before_reply):
            conversation = list(self._with_texts(conversation))
        return conversation

    def _filled(self, message: Message) -> Message:
        is_empty = message["role"] == "assistant" and not (message["content"] or message.get("tool_calls"))
        return {**message, "content": self.filler} if is_empty and "reasoning_content" not in message else message

    def with_question(self, conversation: Conversation) -> Conversation:
        """Add an empty question if the template needs one, or put the system message into the last question."""
        start = sum(1 for _ in takewhile(lambda each: each["role"] in SYSTEM_ROLES, conversation))
        if not self._begins(conversation, start):
            conversation = [*conversation[:start], dict(_QUESTION), *conversation[start:]]
        later = max(
            (i for i, each in enumerate(conversation) if each["role"] in SYSTEM_ROLES and i > start), default=0
        )
        after = {each["role"] for each in conversation[later:]} if later else {"user"}
        is_kept = self.system_before_results if "tool" in after else self.system_last
        if "user" not in after and not is_kept:
            conversation = [*conversation[: later + 1], dict(_QUESTION), *conversation[later + 1 :]]
        if not self.keeps_system and conversation[0]["role"] == "system" and conversation[-1]["role"] != "user":
            conversation = _with_system_in_question(conversation)
        return conversation

    def alternated(self, conversation: Conversation) -> Conversation:
        """Return the messages with alternating roles, if these must alternate.

        Adjacent messages of the same role become one; if calls or results prevent that, a message of the other role
        is inserted.
        """
        if self.repeats:
            return conversation
        found: Conversation = []
        merged: dict[int, list[str]] = {}
        """Texts to be joined in a message, by its index in `found`."""
        last: Message | None = None
        for message in conversation:
            if not self._is_turn(message):
                found.append(message)
                continue
            if last is not None and last["role"] == message["role"]:
                if found[-1] is last and not last.get("tool_calls") and not message.get("tool_calls"):
                    texts = merged.setdefault(len(found) - 1, [joined(last["content"], "\n")])
                    texts.append(joined(message["content"], "\n"))
                    continue
                is_reply = message["role"] == "assistant"
                found.append(dict(_QUESTION) if is_reply else {"role": "assistant", "content": self.filler})
            found.append(message)
            last = message
        for place, texts in merged.items():
            found[place] = {**found[place], "content": "\n\n".join(filter(None, texts))}
        return found

    def _is_turn(self, message: Message) -> bool:
        is_call = bool(message.get("tool_calls"))
        return message["role"] == "user" or (message["role"] == "assistant" and (self.counts_calls or not is_call))

    def _begins(self, conversation: Conversation, start: int) -> bool:
        """Return True if the template accepts how the conversation begins after the system messages."""
        rest = conversation[start:]
        first = "call" if rest and rest[0].get("tool_calls") else rest[0]["role"] if rest else "user"
        if first != "user" and first not in self.first:
            return False
        if any(each["role"] == "user" for each in rest):
            return True
        if start and not self.keeps_system:
            return False
        if not rest:
            return ("system" if start else "") in self.without_question
        has_calls = any(each.get("tool_calls") or each["role"] == "tool" for each in rest)
        return (f"{first}+" if first == "assistant" and has_calls else first) in self.without_question

    def _with_texts(self, conversation: Conversation) -> Iterator[Message]:
        """Move texts that the template would lose beside calls before the markup, or to a separate message."""
        last_reply = max(
            (i for i, each in enumerate(conversation) if each["role"] == "assistant" and "tool_calls" not in each),
            default=-1,
        )
        for i, message in enumerate(conversation):
            is_lost = not (self.text_before_reply if i < last_reply else self.text_in_loop)
            text = joined(message["content"], "\n") if is_lost and message.get("tool_calls") else ""
            if not text.strip():
                yield message
            elif self.call_head is not None:
                yield {**message, "content": "", PREAMBLE: text}
            else:
                yield {"role": "assistant", "content": message["content"]}
                yield {**message, "content": ""}


class Preambles:
    """Marks in rendered calls, before which texts are inserted that the template leaves out."""

    def __init__(self, head: str | None, messages: Sequence[Message]) -> None:
        self._head = head or ""
        texts = [each[PREAMBLE] for each in messages if PREAMBLE in each]
        digest = hashlib.blake2b("\0".join(texts).encode(errors="surrogatepass"), digest_size=8).hexdigest()
        self._texts = {f"p{digest}x{i}e": text for i, text in enumerate(texts)}
        self._mark = re.compile(f"p{digest}x[0-9]+e")

    def marked(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages, with a mark before the name of the first call in those that have such a text."""
        if not self._texts:
            return messages
        marks = iter(self._texts)
        return [_marked(each, next(marks)) if PREAMBLE in each else each for each in messages]

    def written(self, prompt: str) -> str:
        """Replace the marks in a prompt by the texts."""
        left = dict(self._texts)
        written: list[str] = []
        at = 0
        for found in self._mark.finditer(prompt) if left else ():
            end = found.start()
            text = left.pop(found[0], None) if prompt.endswith(self._head, at, end) else None
            if text is not None:
                end -= len(self._head)
                written += [prompt[at:end], text, "\n", self._head]
            else:
                # Only the mark is removed: some templates write a function's name twice.
                written.append(prompt[at:end])
            at = found.end()
        return "".join([*written, prompt[at:]])


def _marked(message: Message, mark: str) -> Message:
    call, *others = message["tool_calls"]
    function = {**call["function"], "name": mark + call["function"]["name"]}
    kept = {key: value for key, value in message.items() if key != PREAMBLE}
    return {**kept, "tool_calls": [{**call, "function": function}, *others]}


def probed(
    render: Render,
    *,
    refusals: bool,
    has_system: bool,
    takes_calls: bool,
    written: Sequence[str],
    generation_prompt: Render,
) -> MessageOrder:
    """Render small conversations, and return what the template accepts.

    Without `refusals`, a conversation that it refuses counts as accepted, and only one of which it leaves out
    something does not. `generation_prompt` renders with a generation prompt. Without `takes_calls`, calls are text.
    `written` must be in each prompt.
    """
    start: Conversation = [{"role": "system", "content": "a system text"}] if has_system else []
    question, other_question = ({"role": "user", "content": f"a {nth} question"} for nth in ("first", "second"))
    reply, other_reply = ({"role": "assistant", "content": f"a {nth} reply"} for nth in ("first", "second"))
    call = _calling("", _SHORT_IDS[:1]) if takes_calls else {"role": "assistant", "content": "a call"}
    result, other_result = (
        {"role": "tool", "tool_call_id": call_id, "content": f"result {nth} of a call"}
        for nth, call_id in enumerate(_SHORT_IDS)
    )

    def takes(*messages: Message) -> bool:
        text = render([*start, *messages])
        if text is None:
            return not refusals
        return all(part in text for part in (*written, *chain(*map(_texts, (*start, *messages)))))

    if not takes(question, reply, question):
        return MessageOrder()
    has_loops = takes(question, call, result, reply, question)
    repeats = takes(question, reply, other_reply, other_question)
    if has_system and (not takes(question, reply) or (has_loops and not takes(question, call, result))):
        moved = {"role": "user", "content": f"{start[0]['content']}\n\n{question['content']}"}
        if render([*start, question]) == render([moved]):
            # The template moves the system message into the question, so probe without one.
            without = probed(
                render,
                refusals=refusals,
                has_system=False,
                takes_calls=takes_calls,
                written=written,
                generation_prompt=generation_prompt,
            )
            return replace(without, keeps_system=False)
    no_message = render([])
    alone = dict.fromkeys(_ALL, True) | {
        "": not refusals if no_message is None else all(each in no_message for each in written),
        "system": takes(),
        "assistant": takes(reply),
    }
    first = {"assistant": takes(reply, question), "call": True, "tool": True}
    form: dict[str, Any] = {
        "repeats": repeats,
        "counts_calls": not takes_calls or takes(question, call, other_question),
        "system_last": takes(question, reply, _LATER),
    }
    if has_loops:
        alone |= {"assistant+": takes(reply, call, result), "call": takes(call, result), "tool": takes(result)}
        form["system_before_results"] = takes(question, _LATER, call, result)
        first |= {"call": takes(call, result, reply, question), "tool": takes(result, reply, question)}
    loop = (call, result) if has_loops else ()
    bridged = ((question, *loop, {**reply, "content": text}, other_question) for text in _FILLERS)
    form["filler"] = next((text for text, turns in zip(_FILLERS, bridged, strict=True) if takes(*turns)), "")
    form["without_question"] = frozenset(kind for kind, is_taken in alone.items() if is_taken)
    form["first"] = frozenset(kind for kind, is_taken in first.items() if is_taken)
    if not has_loops:
        return MessageOrder(**form)
    orphans = {"user": (question, result, reply, question), "assistant": (question, reply, result, other_reply)}
    form["orphans_after"] = frozenset(role for role, loop in orphans.items() if takes(*loop) or not repeats)
    if not takes_calls:
        return MessageOrder(**form)
    both = _calling("", _SHORT_IDS)
    form["parallel"] = takes(question, both, result, other_result)
    beside = _calling("a text beside it", _SHORT_IDS[:1])
    form["text_in_loop"] = takes(question, beside, result)
    form["text_before_reply"] = takes(question, beside, result, reply, question)
    return MessageOrder(
        **form,
        call_head=_head([*start, question], call, reply, render, generation_prompt),
        ids=_taken_ids([*start, question], render),
    )


def _texts(message: Message) -> Iterator[str]:
    yield message["content"]
    for call in message.get("tool_calls", ()):
        yield call["function"]["arguments"].split('"')[3]


def _calling(text: str, ids: Sequence[str]) -> Message:
    calls = [
        {
            "type": "function",
            "id": call_id,
            "function": {"name": CALLED, "arguments": f'{{"argument": "argument_of_{nth}"}}'},
        }
        for nth, call_id in enumerate(ids)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _head(
    before: Conversation, call: Message, reply: Message, render: Render, generation_prompt: Render
) -> str | None:
    """Return the text that the template writes between the generation prompt and a called function's name.

    None if it is unknown, or if the text of replies does not follow the generation prompt: no text may be put
    there.
    """
    prompt, called, replied = (
        generation_prompt(before),
        render([*before, call]),
        render([*before, reply]),
    )
    if prompt is None or called is None or replied is None or not called.startswith(prompt):
        return None
    if not replied.startswith(prompt + reply["content"]):
        return None
    head, name, _ = called[len(prompt) :].partition(CALLED)
    return head if name else None


def _taken_ids(before: Conversation, render: Render) -> str | None:
    def takes(call_id: str, **of_result: str) -> bool:
        result = {"role": "tool", "content": "!", **of_result}
        return render([*before, _calling("", [call_id]), result]) is not None

    if not takes(_SHORT_IDS[0], tool_call_id=_SHORT_IDS[0]):
        return None
    if takes(_LONG_ID, tool_call_id=_LONG_ID):
        return None if takes(_LONG_ID) else ".+"
    return ".{9}" if takes("call-000_", tool_call_id="call-000_") else "[A-Za-z0-9]{9}"


_Unanswered: TypeAlias = Counter[str | None]
"""Ids of the preceding message's calls that have no result yet, in order."""


def _take(unanswered: _Unanswered, call_id: str | None) -> bool:
    """Record a result of a call; returns False if none is expected."""
    if call_id not in unanswered:
        return False
    unanswered[call_id] -= 1
    if not unanswered[call_id]:
        del unanswered[call_id]
    return True


def _with_ids(conversation: Conversation, taken: str) -> Conversation:
    """Replace ids that the template does not accept; equal ids stay equal, and others different.

    Results without an id get those of the preceding calls, in order.
    """
    pattern = re.compile(taken, re.DOTALL)
    new: dict[str, str] = {}
    used = set[str]()

    def fitting(call_id: str) -> str:
        if call_id not in new:
            found, n = call_id, 0
            while not pattern.fullmatch(found) or found in used:
                found, n = _short_id(f"{n} {call_id}"), n + 1
            new[call_id] = found
            used.add(found)
        return new[call_id]

    changed: Conversation = []
    waiting: _Unanswered = Counter()
    for i, message in enumerate(conversation):
        if calls := message.get("tool_calls"):
            ids = [fitting(call.get("id") or f"call {n} of message {i}") for n, call in enumerate(calls)]
            waiting = Counter(ids)
            named = [{**call, "id": call_id} for call, call_id in zip(calls, ids, strict=True)]
            changed.append({**message, "tool_calls": named})
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            call_id = fitting(given) if given else (next(iter(waiting), None) or fitting(f"result {i}"))
            _take(waiting, call_id)
            changed.append({**message, "tool_call_id": call_id})
        else:
            changed.append(message)
    return changed


def _short_id(text: str) -> str:
    number = int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())
    return "".join(_ALPHABET[number // len(_ALPHABET) ** i % len(_ALPHABET)] for i in range(9))


def _without_orphans(conversation: Conversation, taken_after: frozenset[str]) -> Conversation:
    """Convert results without a preceding call to user messages, unless they follow a role in `taken_after`.

    They are moved after the results of the preceding calls, which must directly follow their calls.
    """
    changed: Conversation = []
    waiting: _Unanswered = Counter()
    orphans: Conversation = []
    before = "user"
    for message in conversation:
        if message["role"] != "tool":
            changed += results_from_user(orphans)
            orphans = []
            waiting = Counter(call.get("id") for call in message.get("tool_calls", ()))
            before = "assistant" if message["role"] == "assistant" else "user"
            changed.append(message)
            continue
        call_id = message.get("tool_call_id")
        if call_id is None and None not in waiting:
            call_id = next(iter(waiting), None)
        if _take(waiting, call_id) or before in taken_after:
            changed.append(message)
        else:
            orphans.append(message)
    return changed + results_from_user(orphans)


def _one_call_each(conversation: Conversation) -> Iterator[Message]:
    """Divide messages with several calls into messages with one call, each followed by its result."""
    i = 0
    while i < len(conversation):
        message = conversation[i]
        i += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results: Conversation = []
        while i < len(conversation) and conversation[i]["role"] == "tool":
            results.append(conversation[i])
            i += 1
        # Ollama's calls have no ids.
        of_id: dict[str | None, list[int]] = {call["id"]: [] for call in calls if call.get("id") is not None}
        others: deque[int] = deque()
        """Results that belong to none of the calls. Each is used for the first call without a result."""
        for n, result in enumerate(results):
            of_id.get(result.get("tool_call_id"), others).append(n)
        used = set[int]()
        at = 0
        for n, call in enumerate(calls):
            first = message if n == 0 else {"role": "assistant", "content": ""}
            yield {**first, "tool_calls": [call]}
            while at in used:
                at += 1
            of_call = of_id.pop(call.get("id"), [])
            if not of_call and others and others[0] == at:
                of_call = [others.popleft()]
            yield from (results[each] for each in of_call)
            used.update(of_call)
        yield from (result for n, result in enumerate(results) if n not in used)


def _with_system_in_question(conversation: Conversation) -> Conversation:
    """Put the system message before the last question, as the template does if the question is the last message."""
    system, *rest = conversation
    last = max((i for i, each in enumerate(rest) if each["role"] == "user"), default=None)
    if last is None:
        return conversation
    text = "\n\n".join(joined(each["content"], "\n") for each in (system, rest[last]))
    return [*rest[:last], {**rest[last], "content": text}, *rest[last + 1 :]]
