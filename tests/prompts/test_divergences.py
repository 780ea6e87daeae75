"""Planted culprits are named on replayed traces of agents, and clean traffic raises no alarm.

The traces are read, rendered and tokenized as the server does it, with the embedded model's vocabulary. What is
cached is what any earlier request has had.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.advice import Culprit, Divergence
from llamaslot.base.callers import Caller
from llamaslot.base.prompt_jobs import (
    BodyKind,
    ClearTexts,
    DropSession,
    Locate,
    Prepare,
    Prepared,
    Release,
    Remember,
)
from llamaslot.base.tokens import n_common, packed
from llamaslot.prompts import divergences
from llamaslot.prompts.prompt_worker import PromptWorker
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol.replies.restoring import ReplyRestorer
from llamaslot.protocol.request_reader import RequestReader
from llamaslot.text.builtin_templates import resolve
from llamaslot.text.conversation import volatile_pattern
from llamaslot.text.template import ChatTemplate
from tests.fake_backend import FakeBackend, byte_trial
from tests.prompt_threads import CONTEXT, SETTINGS
from tests.prompts.agent_traces import NAMES, RULES, TOOLS, Session, tool

FOLDER = Path(__file__).parents[1] / "text" / "templates"
TEMPLATES = {
    "chatml": resolve("chatml"),
    **{name: (FOLDER / f"{name}.jinja").read_text() for name in ("json_calls", "xml_calls_with_reasoning")},
}
KEY = Caller("key")
REPLY = (
    "The prices are read as text, and a price with three digits is cut to two before the sum is taken. Let me look "
    "at the function that reads them, and at the test for it, before I change anything; it is in src/cart.py."
)
NEXT = "Yes, please do, and tell me then what you have found, in two or three sentences."
ANSWER = "I have read both files: the function cuts the text at the second digit, and no test has a third one."
LAST = (
    "Here is the test that you asked for. It reads a file of three lines, of which the second has a price with "
    "three digits, and adds the prices up by hand; it fails on the branch main, and passes with my change."
)
FINAL = "Good. Commit the change, with a message that names the file and the number of digits."


class Replay:
    """A prompt worker, and what is cached of the prompts that it has prepared."""

    def __init__(
        self,
        vocab: LlamaVocab,
        template: str = "json_calls",
        *,
        drops: str = "claude-code",
        shows_text: bool = False,
    ) -> None:
        info = msgspec.structs.replace(FakeBackend().info, n_ctx_slot=2**16, n_ctx=2**16, n_vocab=vocab.n_tokens)
        parsed = ChatTemplate(
            TEMPLATES[template],
            bos_token="",
            eos_token="<|im_end|>",
            control_tokens=sorted(vocab.special_tokens),
            volatile=volatile_pattern(drops),
        )
        self.vocab = vocab
        self.tokenizer = Tokenizer(vocab, info.n_ctx_slot, min_match=0.8, template=TEMPLATES[template])
        reader = RequestReader(
            info,
            parsed,
            self.tokenizer,
            SETTINGS,
            byte_trial(info.control_tokens, info.n_vocab),
            named_tokens=vocab.named_tokens,
            restorer=ReplyRestorer(self.tokenizer.memory, vocab),
        )
        self.worker = PromptWorker(self.tokenizer, reader, shows_text=shows_text)
        self.cached: list[tuple[str, Any]] = []
        self._ids = itertools.count()

    def send(
        self, kind: BodyKind, body: dict[str, Any], reply: str = REPLY, *, caller: Caller = KEY
    ) -> Divergence | None:
        """Return the divergence that the server would find, and have it remember the reply."""
        name = f"r{next(self._ids)}"
        context = msgspec.structs.replace(CONTEXT, request_id=name, caller=caller)
        prepared = self.worker.carry_out(Prepare(kind, msgspec.json.encode(body), context)).result()
        assert isinstance(prepared, Prepared), prepared
        (generate,) = prepared.prompts
        tokens, salt = generate.prompt.tokens, generate.params.cache_salt
        n_cached = max((n_common(each, tokens[:-1]) for own, each in self.cached if own == salt), default=0)
        located: Any = self.worker.carry_out(Locate(name, n_cached, explains=True)).result()
        generated = np.array(self.vocab.tokenize(reply, add_special=False, parse_special=True), np.int32)
        ended = np.concatenate(
            [generated, np.array(self.vocab.tokenize("<|im_end|>", add_special=False, parse_special=True))]
        )
        self.worker.carry_out(Remember(name, packed(ended.astype(np.int32)), len(reply), name)).result()
        self.worker.carry_out(Release(name)).result()
        self.cached.append((salt, np.concatenate([tokens, generated[:-1]])))
        found: Divergence | None = located.divergence
        return found


KINDS: dict[str, BodyKind] = {"claude_code": "messages", "opencode": "chat", "codex": "responses"}
FIRST = Session()
HEADER = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli; cch={};\n"
TODO = (
    "<system-reminder>\nYour todo list is empty. Use the tool for it where that helps, and do not mention this.\n"
    "</system-reminder>"
)
PLAIN = "REMINDER: answer in the language of the question, and never show the whole file."
WITH_DATE = tuple(
    tool("WebSearch", "Searches the web. Today's date is {}; use it in queries.")
    if name == "WebSearch"
    else tool(name)
    for name in NAMES
)


def dated(day: str) -> Sequence[dict[str, Any]]:
    """The tools, of which one tells the date."""
    return [{**each, "description": each["description"].replace("{}", day)} for each in WITH_DATE]


AFTER: dict[str, tuple[Culprit, str, Session, Session]] = {
    "the day": ("date", "claude_code opencode codex", FIRST, replace(FIRST, date="2026-11-28")),
    "the day in words": (
        "date",
        "claude_code opencode codex",
        replace(FIRST, date="Friday, November 27, 2026"),
        replace(FIRST, date="Saturday, November 28, 2026"),
    ),
    "the day in Chinese": (
        "date",
        "claude_code opencode codex",
        replace(FIRST, date="2026年11月27日 星期五"),
        replace(FIRST, date="2026年11月28日 星期六"),
    ),
    "the time": (
        "date",
        "claude_code opencode codex",
        replace(FIRST, date="Fri Nov 27 2026 10:05:12 GMT+0100"),
        replace(FIRST, date="Fri Nov 27 2026 11:23:54 GMT+0100"),
    ),
    "the day in a tool": (
        "date",
        "claude_code opencode codex",
        replace(FIRST, tools=dated("2026-11-27")),
        replace(FIRST, tools=dated("2026-11-28")),
    ),
    "changed files": ("git_status", "claude_code", FIRST, replace(FIRST, status=" M src/cart.py\n M src/price.py")),
    "no changed files": ("git_status", "claude_code", FIRST, replace(FIRST, status="(clean)")),
    "a commit": (
        "git_status",
        "claude_code",
        FIRST,
        replace(FIRST, commits="77aa001 Fix the sum\n1a2b3c4 Add a cart"),
    ),
    "a branch": ("git_status", "claude_code", FIRST, replace(FIRST, branch="three-digits")),
    "a folder": ("directory", "claude_code opencode codex", FIRST, replace(FIRST, folder="/srv/work/bakery")),
    "a folder of Windows": (
        "directory",
        "claude_code opencode codex",
        replace(FIRST, folder=r"C:\Users\ada\shop"),
        replace(FIRST, folder=r"D:\bakery"),
    ),
    "a header": (
        "attribution",
        "claude_code opencode",
        replace(FIRST, header=HEADER.format("8a5", "fa690")),
        replace(FIRST, header=HEADER.format("0d9", "1a2b3")),
    ),
    "a model": (
        "model",
        "claude_code opencode",
        FIRST,
        replace(
            FIRST,
            model="You are powered by the model named Opus 4.1. The exact model ID is claude-opus-4-1-20250805.",
        ),
    ),
    "another order": (
        "tool_order",
        "claude_code opencode codex",
        FIRST,
        replace(FIRST, tools=[*TOOLS[1::-1], *TOOLS[2:]]),
    ),
    "a shuffled order": (
        "tool_order",
        "claude_code opencode codex",
        FIRST,
        replace(FIRST, tools=random.Random(1).sample(TOOLS, len(TOOLS))),
    ),
    "a later tool": (
        "tools",
        "claude_code opencode codex",
        FIRST,
        replace(FIRST, tools=[*TOOLS, tool("mcp__shop__orders")]),
    ),
    "an earlier tool": (
        "tools",
        "claude_code opencode codex",
        FIRST,
        replace(FIRST, tools=[tool("Agent"), *TOOLS]),
    ),
    "a tool less": ("tools", "claude_code opencode codex", FIRST, replace(FIRST, tools=[*TOOLS[:3], *TOOLS[4:]])),
    "a described tool": (
        "tools",
        "claude_code opencode codex",
        FIRST,
        replace(FIRST, tools=[TOOLS[0], tool("Edit", "Edits a file, of which it must know the text."), *TOOLS[2:]]),
    ),
    "an id": (
        "id",
        "claude_code",
        replace(FIRST, id="5f3a0c1e-88aa-4c1d-9f2e-0123456789ab"),
        replace(FIRST, id="77aa0c1e-1111-4c1d-8f2e-fedcba987654"),
    ),
}
"""For each change between two sessions: the culprit, the agents that have it, and both sessions."""


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("agent", KINDS)
@pytest.mark.parametrize("change", AFTER)
def test_what_differs_between_sessions_is_named(vocab: LlamaVocab, change: str, agent: str, template: str) -> None:
    culprit, agents, first, second = AFTER[change]
    if agent not in agents.split():
        pytest.skip("this agent does not send it")
    replay = Replay(vocab, template, drops="off")
    found = [
        replay.send(KINDS[agent], getattr(session, agent)(*turns))
        for session in (first, second)
        for turns in ((), (REPLY, NEXT), (REPLY, NEXT, REPLY, "And now?"))
    ]
    assert culprits(found) == [None, None, None, culprit, None, None]
    assert found[3] is not None
    assert found[3].tokens >= divergences.MIN_TOKENS
    assert found[3].offset > 0
    assert (found[3].before, found[3].old, found[3].new) == ("", "", "")
    if template == "json_calls":
        is_of_tools = culprit in ("tools", "tool_order") or change == "the day in a tool"
        assert found[3].role == ("tools" if is_of_tools else "user" if agent == "codex" else "system")


def culprits(found: Sequence[Divergence | None]) -> list[Culprit | None]:
    return [each.culprit if each is not None else None for each in found]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("agent", KINDS)
@pytest.mark.parametrize("reminder", [TODO, PLAIN], ids=["tag", "plain"])
def test_a_reminder_that_moves_is_named(vocab: LlamaVocab, reminder: str, agent: str, template: str) -> None:
    replay, session = Replay(vocab, template), replace(FIRST, reminder=reminder)
    turns = (), (REPLY, NEXT), (REPLY, NEXT, REPLY, NEXT)
    found = [replay.send(KINDS[agent], getattr(session, agent)(*each)) for each in turns]
    # Without a tag it is known by its place, which only control tokens tell.
    named = "reminder" if reminder is TODO or template != "xml_calls_with_reasoning" else "unknown"
    assert culprits(found) == [None, named, named]


THOUGHTS = "<think>\n" + " ".join(f"The price number {i} may be cut." for i in range(30)) + "\n</think>\n\n"


@pytest.mark.parametrize("agent", KINDS)
def test_reasoning_that_does_not_come_back_is_named(vocab: LlamaVocab, agent: str) -> None:
    """The token memory may not know the reply any more; else its tokens would be restored."""
    replay = Replay(vocab, "xml_calls_with_reasoning")
    body = getattr(FIRST, agent)
    found = [replay.send(KINDS[agent], body(), reply=THOUGHTS + REPLY * 2)]
    replay.tokenizer.memory.clear()
    found.append(replay.send(KINDS[agent], body(REPLY * 2, NEXT)))
    assert culprits(found) == [None, "reasoning"]


@pytest.mark.parametrize("agent", KINDS)
def test_messages_that_are_left_out_are_named(vocab: LlamaVocab, agent: str) -> None:
    replay, body = Replay(vocab), getattr(FIRST, agent)
    long = replace(FIRST, question=REPLY)
    found = [
        replay.send(KINDS[agent], body(REPLY, NEXT + ANSWER, ANSWER + REPLY, NEXT)),
        replay.send(KINDS[agent], getattr(long, agent)(NEXT, ANSWER)),
    ]
    replay.send(KINDS[agent], body(REPLY, NEXT, ANSWER + REPLY, RULES, ANSWER, NEXT))
    found.append(
        replay.send(KINDS[agent], getattr(replace(FIRST, question=RULES), agent)(ANSWER, NEXT, REPLY, NEXT))
    )
    assert culprits(found)[-1] == "trimmed"


@pytest.mark.parametrize("agent", KINDS)
def test_a_salt_that_changes_within_a_conversation_is_named(vocab: LlamaVocab, agent: str) -> None:
    replay = Replay(vocab)
    salts = "a", "a", "b"
    turns = (), (REPLY, NEXT), (REPLY, NEXT, REPLY, NEXT)
    sessions = [replace(FIRST, salt=salt) for salt in salts]
    found = [
        replay.send(KINDS[agent], getattr(session, agent)(*each))
        for session, each in zip(sessions, turns, strict=True)
    ]
    assert culprits(found) == [None, None, "salted"]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("agent", KINDS)
def test_clean_traffic_raises_no_alarm(vocab: LlamaVocab, agent: str, template: str) -> None:
    """Turns, forks, retries, sub-agents, titles, compaction, other users with salts, and tool loops."""
    replay, kind, body = Replay(vocab, template), KINDS[agent], getattr(FIRST, agent)
    other = replace(FIRST, question="Write a test for the function that formats an address, and run it.")
    helper = replace(FIRST, question="Find all files in which prices are read, and list them.", model=RULES[::-1])
    header = [replace(other, header=HEADER.format(n, n)) for n in ("8a5", "0d9")]
    bodies = [
        body(),
        body(),
        body(REPLY, NEXT),
        body(REPLY, "No, look at the test first: which of its prices has three digits?"),
        body(REPLY, NEXT, ANSWER, RULES),
        getattr(other, agent)(),
        getattr(helper, agent)(),
        getattr(other, agent)(REPLY, NEXT),
        body(REPLY, NEXT, ANSWER, RULES, LAST, FINAL),
        getattr(replace(FIRST, question="Summary: prices were cut, a test was written."), agent)(LAST, FINAL),
        *(getattr(replace(each, salt=salt), agent)() for salt in "ab" for each in (FIRST, other)),
        *(getattr(each, agent)() for each in header),
    ]
    assert culprits([replay.send(kind, each) for each in bodies]) == [None] * len(bodies)


def test_titles_and_tool_loops_raise_no_alarm(vocab: LlamaVocab) -> None:
    replay, chat = Replay(vocab, "json_calls"), FIRST.opencode()
    title = {
        "messages": [
            {"role": "system", "content": "Write a title of at most five words for this conversation."},
            chat["messages"][1],
        ]
    }
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "Read", "arguments": '{"path": "src/cart.py"}'},
    }
    steps = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": RULES},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": NEXT},
    ]
    bodies = [chat, title, *({**chat, "messages": [*chat["messages"], *steps[:n]]} for n in (2, 4))]
    assert culprits([replay.send("chat", each) for each in bodies]) == [None] * len(bodies)


def test_texts_are_there_only_if_the_server_shows_them(vocab: LlamaVocab) -> None:
    for shows_text in (False, True):
        replay = Replay(vocab, shows_text=shows_text)
        replay.send("chat", FIRST.opencode())
        found = replay.send("chat", replace(FIRST, folder="/srv/secret").opencode())
        assert found is not None
        texts = found.before, found.old, found.new
        assert all(map(bool, texts)) if shows_text else not any(texts)
        assert ("secret" in str(found)) == shows_text


def test_prompts_of_other_keys_are_not_compared(vocab: LlamaVocab) -> None:
    replay = Replay(vocab, shows_text=True)
    replay.send("chat", FIRST.opencode(), caller=Caller("other"))
    assert replay.send("chat", replace(FIRST, date="2026-11-28").opencode(), caller=Caller("key")) is None


def test_the_text_of_another_salt_is_not_shown(vocab: LlamaVocab) -> None:
    replay = Replay(vocab, shows_text=True)
    replay.send("chat", replace(FIRST, salt="a").opencode())
    assert replay.send("chat", replace(FIRST, salt="b", date="2026-11-28").opencode()) is None
    found = replay.send("chat", replace(FIRST, salt="c").opencode(REPLY, NEXT))
    assert found is not None
    assert (found.culprit, found.before, found.old, found.new) == ("salted", "", "", "")


@pytest.mark.parametrize("job", [ClearTexts(), DropSession("mine")])
def test_what_is_dropped_is_not_compared(vocab: LlamaVocab, job: Any) -> None:
    replay = Replay(vocab)
    replay.send("chat", {**FIRST.opencode(), "session_id": "mine"})
    replay.worker.carry_out(job).result()
    assert replay.worker.earlier.n_bytes == 0
    assert replay.send("chat", {**replace(FIRST, date="2026-11-28").opencode(), "session_id": "mine"}) is None


def test_prompts_without_cache_are_not_kept(vocab: LlamaVocab) -> None:
    replay = Replay(vocab)
    replay.send("chat", {**FIRST.opencode(), "cache_prompt": False})
    assert replay.worker.earlier.n_bytes == 0


def test_what_is_kept_is_bounded(vocab: LlamaVocab, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that sends many prompts takes nothing from one with few."""
    monkeypatch.setattr(divergences, "MAX_OWNERS", 3)
    replay, one = Replay(vocab, "chatml"), {"messages": [{"role": "user", "content": "hello"}]}
    replay.send("chat", one, caller=Caller("few"))
    kept = replay.worker.earlier
    monkeypatch.setattr(divergences, "MAX_BYTES", kept.n_bytes * 5)
    for i in range(20):
        replay.send("chat", {"messages": [{"role": "user", "content": f"{i} hello"}]}, caller=Caller("many"))
        assert kept.n_bytes <= divergences.MAX_BYTES
    assert len(kept.of("few")) == 1
    assert 1 < len(kept.of("many")) <= 4
    for i in range(5):
        replay.send("chat", one, caller=Caller(f"key {i}"))
    assert [len(kept.of(owner)) for owner in ("few", "key 1", "key 2", "key 3", "key 4")] == [0, 0, 1, 1, 1]
    assert kept.n_bytes == sum(each.n_bytes for i in range(5) for each in kept.of(f"key {i}"))
    monkeypatch.setattr(divergences, "MAX_PROMPT_BYTES", 100)
    replay.send("chat", one, caller=Caller("few"))
    assert not kept.of("few")
