"""Tool loops over the chat templates of many models: each step computes the tool's result and little else.

The prompts have the markup of the template as often as a rendering without remembered replies.

Grammars lead the fake model to write calls as its family does, with spacing and key order of its own. The templates
are ours and those of LLAMASLOT_FIXTURES/templates and, of LLAMASLOT_TEMPLATES, those of Kimi K2, DeepSeek V3.1 and
Ministral 3.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llamaslot.base.commands import Generate
from llamaslot.base.tokens import ids_of
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter
from llamaslot.formats.recognition import format_of
from llamaslot.protocol.chat_prompt import with_text_of_tools
from llamaslot.text.template import ChatTemplate
from tests.conftest import LONG
from tests.fake_backend import FakeBackend, FakeVocab

CHAT = "/v1/chat/completions"
N_CONVERSATIONS = 20 if LONG else 4
N_STEPS = 8 if LONG else 4
SLACK = 64
"""Tokens that a step may compute in addition to what follows the call."""
FURTHER = ("moonshotai-Kimi-K2", "deepseek-ai-DeepSeek-V3.1", "mistralai-Ministral-3-14B-Reasoning-2512")
FILES = sorted((Path(__file__).parents[1] / "text" / "templates").glob("*.jinja"))
if "LLAMASLOT_FIXTURES" in os.environ:
    FILES += sorted(Path(os.environ["LLAMASLOT_FIXTURES"], "templates").glob("*.jinja"))
if "LLAMASLOT_TEMPLATES" in os.environ:
    FILES += [Path(os.environ["LLAMASLOT_TEMPLATES"], f"{name}.jinja") for name in FURTHER]

ENDS = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "</s>",
        "<｜end▁of▁sentence｜>",
        "<|observation|>",
        "<|user|>",
        "<|end_of_text|>",
    ),
    *("<|call|>", "<|return|>", "<turn|>", "<|tool_response>"),
)
"""Tokens that end the generations of some model."""
CONTROL = re.compile(r"<\|[\w-]+\|?>|<\w+\|>|<｜[^｜]+｜>|\[/?[A-Z_]{3,}\]|</?tool_call>|</?think>|<eos>|<bos>")
PROPERTIES = {
    "path": {"type": "string"},
    "lines": {"type": "integer"},
    "all": {"type": "boolean"},
    "names": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object"},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "?", "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("edit", "search_files")
]
TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]{3,}\]|\b(?:edit|search_files)\b")
"""Markup of templates, and the names of called tools: some families write calls as JSON without tags."""
UNLIKE = {
    # It writes the begin of a turn with calls once for all turns, and the end of results only before replies
    # without calls. The prompt of each call ended with that, and each reply began with its calls' begin.
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": {
        *("<｜tool▁calls▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜Assistant｜>"),
    },
    # It writes the content of a message with calls as a turn of its own behind the results.
    "google-gemma-4-31B-it": {"<turn|>"},
    # Its family is unknown: calls are written as JSON, in another markup than the template's.
    "queued_call_ids": {"<|call|>", "<|arguments|>", "<|end|>"},
}
"""Markup that these templates write another number of times than models of the family generate it."""
WORDS = ("radix", "tree", "prefix", "that", "was", "computed", "once", "step", "costs", "little")


def vocabulary(source: str) -> FakeVocab:
    """The control tokens of a template, which for most of its texts are guessed by their form."""
    ends = [text for text in ENDS if text in source] or ["</s>"]
    if "<|end|>" in source and "<|channel|>" not in source:
        ends = ["<|end|>"]
    others = set(CONTROL.findall(source)) - {"<s>", ends[0]}
    return FakeVocab(sorted(others | set(ends[1:])), end=ends[0], ends=ends[1:])


def words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(n))


def arguments(rng: random.Random) -> dict[str, Any]:
    """Arguments in an order of their own."""
    values = {
        "path": f"src/{words(rng, 1)}.py",
        "lines": rng.randrange(1000),
        "all": rng.random() < 0.5,
        "names": [words(rng, 2) for _ in range(rng.randrange(3))],
        "options": {"depth": rng.randrange(9), "mode": "ünï"},
    }
    names = rng.sample(sorted(values), rng.randint(2, len(values)))
    return {name: values[name] for name in names}


def spaced(value: Any, rng: random.Random) -> str:
    """JSON with spaces where no one else would put them."""
    gap = lambda: rng.choice(("", " ", "  ", "\n", "\n  "))  # noqa: E731
    if isinstance(value, dict):
        fields = (
            f"{gap()}{json.dumps(key)}{gap()}:{gap()}{spaced(each, rng)}{gap()}" for key, each in value.items()
        )
        return "{" + ",".join(fields) + "}"
    if isinstance(value, list):
        return "[" + ",".join(f"{gap()}{spaced(each, rng)}{gap()}" for each in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def written(format_: Format, name: str, values: dict[str, Any], call_id: str, rng: random.Random) -> str:
    """A call as a model of the family writes it."""
    text = format_.render([ToolCall(name, json.dumps(values, ensure_ascii=False), call_id)])
    laid_out = json.dumps(values, ensure_ascii=False)
    text = text.replace(laid_out, spaced(values, rng))
    return re.sub(
        r"(</parameter>|</arg_value>|<tool_call>)\n", lambda found: found[1] + rng.choice(("\n", "\n\n")), text
    )


@dataclass
class Step:
    """A step's output as text, and the reasoning, content and calls in it."""

    text: str
    calls: list[tuple[str, Any]] = field(default_factory=list)


class Family:
    """A template with its format and vocabulary."""

    def __init__(self, file: Path) -> None:
        self.source = file.read_text()
        self.vocab = vocabulary(self.source)
        self.format = format_of(self.source, self.vocab.named_tokens)
        self.template = ChatTemplate(
            self.source, bos_token="<s>", eos_token=self.vocab.names[257], control_tokens=self.vocab.special_tokens
        )
        marks = ("single tool-calls", "Only one call", "<|channel|>")
        self.makes_one_call = any(mark in self.source for mark in marks)
        self._writer = GrammarWriter(self.vocab.named_tokens)

    def opened(self, *, after_tool: bool) -> str:
        """The tag of reasoning that prompts end with."""
        call = {"type": "function", "id": "abcdefghi", "function": {"name": "edit", "arguments": "{}"}}
        turn = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "!", "tool_call_id": "abcdefghi"},
        ]
        messages = [{"role": "user", "content": "?"}, *(turn if after_tool else [])]
        messages = with_text_of_tools(self.template, self.format, messages, TOOLS)
        prompt = "".join(part.text for part in self.template.render(messages, tools=TOOLS))
        return self.format.reasoning_open_at(prompt)

    def step(self, rng: random.Random, *, reasons: bool, opened: str, n: int) -> Step:
        """A step with a call, or with two of them."""
        name = self.format.name
        n_calls = 1 if self.makes_one_call else rng.choice((1, 1, 2))
        calls = [(rng.choice(("edit", "search_files")), arguments(rng)) for _ in range(n_calls)]
        texts = [written(self.format, *call, f"c{n:04}{i:04}", rng) for i, call in enumerate(calls)]
        reasoning = words(rng, rng.randint(5, 40))
        if name == "gpt-oss":
            thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasons else ""
            return Step(thought + texts[0].removesuffix("<|call|>"), calls)
        if name == "mistral" and len(texts) == 2 and texts[0].startswith("[TOOL_CALLS]["):
            texts = [texts[0][:-1] + ", " + texts[1].removeprefix("[TOOL_CALLS][")]
        if name == "kimi-k2" and len(texts) == 2:
            texts = [
                texts[0].replace("<|tool_calls_section_end|>", ""),
                texts[1].replace("<|tool_calls_section_begin|>", ""),
            ]
        if name == "deepseek" and len(texts) == 2:
            texts = [texts[0].replace("<｜tool▁calls▁end｜>", ""), texts[1].replace("<｜tool▁calls▁begin｜>", "")]
        if name == "lfm2" and len(texts) == 2:
            texts = [texts[0].replace("]<|tool_call_end|>", ", "), texts[1].replace("<|tool_call_start|>[", "")]
        content = "I look." if rng.random() < 0.2 and name not in {"mistral", "generic"} else ""
        joint = "\n" if name in {"hermes", "qwen3-coder", "glm", "granite"} else ""
        text = (content + "\n" if content else "") + joint.join(texts)
        tags = self.format.reasoning
        if tags is not None and (reasons or opened):
            thought = f"\n{reasoning}\n" if reasons else "\n\n"
            text = f"{'' if opened else tags.start}{thought}{tags.end}\n\n{text}"
        return Step(text, calls)

    def conversation(self, rng: random.Random, *, reasons: bool, n: int) -> list[Step]:
        """A tool loop, an answer, and another tool loop."""
        first, later = self.opened(after_tool=False), self.opened(after_tool=True)
        steps = [
            self.step(rng, reasons=reasons, opened=first if k in (0, N_STEPS + 1) else later, n=100 * n + k)
            for k in range(N_STEPS + 3)
        ]
        steps[N_STEPS] = self.answer(rng, opened=later)
        return steps

    def answer(self, rng: random.Random, *, opened: str) -> Step:
        """A step without calls."""
        channel = "<|channel|>final<|message|>" if self.format.name == "gpt-oss" else ""
        thought = f"\n{words(rng, 5)}\n{self.format.reasoning.end}\n\n" if opened and self.format.reasoning else ""
        return Step(f"{thought}{channel}It is  done.")

    async def check_prompt(self, server: Served, messages: list[dict[str, Any]]) -> None:
        """The prompt of a conversation has all of its messages, and gives the text of a cold run on its tokens."""
        body = {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 8}
        warm = await server.ok(CHAT, body)
        prompt = server.prompts[-1]
        cold = {"prompt": prompt, "cache_prompt": False, "temperature": 0, "max_tokens": 8}
        message = warm["choices"][0]["message"]
        warm_text = message.get("reasoning_content", "") + (message["content"] or "").strip()
        assert (await server.ok("/completion", cold))["content"].strip() == warm_text
        text = self.vocab.detokenize(prompt).decode()
        told = [m["content"] for m in messages if m["role"] in {"user", "tool"}]
        at = 0
        for content in told:
            at = text.index(content, at) + len(content)
        assert not re.search("[0-9a-f]{16}[rb][0-9]+e", text), "a placeholder is left"

    def markup(self, text: str) -> Counter[str]:
        """The tags of a text, without those of empty reasoning, which not all templates write."""
        if self.format.reasoning is not None:
            start, end = map(re.escape, (self.format.reasoning.start, self.format.reasoning.end))
            text = re.sub(rf"{start}\s*{end}", "", text)
        return Counter(TAG.findall(text))

    def markup_put_back(self, messages: Sequence[dict[str, Any]], plain: str) -> Counter[str]:
        """The tags of reasoning in the current tool loop that the template does not write, or writes elsewhere."""
        last_question = max(i for i, message in enumerate(messages) if message["role"] == "user")
        put_back = [m for m in messages[last_question:] if m.get("reasoning_content", plain) not in plain]
        tags = self.format.reasoning
        around = f"{tags.start}{tags.end}{self.format.text_after_reasoning}" if tags is not None else ""
        return Counter(TAG.findall(around) * len(put_back))

    def grammar(self, text: str) -> str:
        """A grammar of one text. The choice of its end has all before it computed; else nothing of it would be."""
        return f'start: {self._writer.text(text)} " "?'


def sent_back(message: dict[str, Any], rng: random.Random, *, keeps: bool) -> dict[str, Any]:
    """A message as a client sends it back: unchanged in meaning."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), sort_keys=rng.random() < 0.5),
            },
        }
        for call in message.get("tool_calls", ())
    ]
    content = message["content"] or rng.choice((None, ""))
    back = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    if keeps and message.get("reasoning_content"):
        back["reasoning_content"] = message["reasoning_content"]
    return back


class Served:
    """A server that replies with the steps of conversations, and the prompts that its engine got."""

    def __init__(self, server: Any) -> None:
        self.prompts: list[Sequence[int]] = []
        self.ok = server.ok
        service = server.service
        send = service._send

        def sent(command: Any) -> None:
            if isinstance(command, Generate):
                self.prompts.append(ids_of(command.prompt.packed_tokens))
            send(command)

        service.connect(sent)


async def served(start: Any, family: Family, conversations: Sequence[Sequence[Step]]) -> Served:
    grammars = [family.grammar(step.text) for steps in conversations for step in steps]
    backend = FakeBackend(vocab=family.vocab, n_ctx=2**15, n_slots=1, n_reserved=2, n_ubatch=512)
    return Served(await start(backend=backend, template=family.source, engine={"grammars": grammars}))


def next_messages(message: dict[str, Any], rng: random.Random) -> Iterator[dict[str, Any]]:
    """The results of a message's calls; the next question if it has none."""
    for call in message.get("tool_calls", ()):
        yield {"role": "tool", "tool_call_id": call["id"], "content": words(rng, rng.randint(1, 60))}
    if not message.get("tool_calls"):
        yield {"role": "user", "content": words(rng, 20)}


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
async def test_a_step_computes_what_follows_the_call(start: Any, file: Path) -> None:
    family = Family(file)
    rng = random.Random(file.stem)
    conversations = [family.conversation(rng, reasons=bool(i & 1), n=i) for i in range(N_CONVERSATIONS)]
    server = await served(start, family, conversations)
    late: list[Any] = []
    ended: list[list[dict[str, Any]]] = []
    n_turns = 0
    for i, steps in enumerate(conversations):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Conversation {i}: {words(rng, 30)}"}]
        n_before = 0
        for k, step in enumerate(steps):
            reply = await server.ok(CHAT, {"messages": messages, "tools": TOOLS, "temperature": 0})
            message = reply["choices"][0]["message"]
            calls = [
                (call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message.get("tool_calls", ())
            ]
            assert calls == step.calls, step.text
            if messages[-1]["role"] == "tool":
                n_behind = reply["usage"]["prompt_tokens"] - n_before
                n_turns += 1
                if reply["cache"]["computed"] > n_behind + SLACK:
                    late.append((i, k, reply["cache"], n_behind))
            n_before = reply["usage"]["total_tokens"]
            messages.append(sent_back(message, rng, keeps=bool(i & 2)))
            messages += next_messages(message, rng)
        ended.append(messages)
    for messages in ended:
        await family.check_prompt(server, messages)
    print(f"{n_turns} results of tools, {len(late)} of them with more than {SLACK} further tokens computed")
    assert len(late) <= n_turns / 100, late


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
async def test_a_prompt_has_the_markup_of_the_plain_rendering_as_often(start: Any, file: Path) -> None:
    family = Family(file)
    rng = random.Random(file.stem)
    conversations = [family.conversation(rng, reasons=bool(i & 1), n=i) for i in range(N_CONVERSATIONS)]
    if not LONG:
        # Two steps, an answer, and two steps.
        conversations = [[*steps[:2], *steps[N_STEPS : N_STEPS + 3]] for steps in conversations]
    server = await served(start, family, conversations)
    n_restored = 0
    for i, steps in enumerate(conversations):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Conversation {i}: {words(rng, 30)}"}]
        whole = [*messages]
        for k, _ in enumerate(steps):
            reply = await server.ok(CHAT, {"messages": messages, "tools": TOOLS, "temperature": 0})
            plain = (await server.ok("/apply-template", {"messages": whole, "tools": TOOLS}))["prompt"]
            text = family.vocab.detokenize(server.prompts[-1]).decode().removeprefix("<s>")
            found, expected = family.markup(text), family.markup(plain) + family.markup_put_back(whole, plain)
            differences = {
                tag: (found[tag], expected[tag])
                for tag in (found | expected).keys() - UNLIKE.get(file.stem, set())
                if found[tag] != expected[tag]
            }
            assert not differences, (i, k, text)
            n_restored += reply["cache"]["restored_tokens"] > 0
            message = reply["choices"][0]["message"]
            more = [*next_messages(message, rng)]
            messages += [sent_back(message, rng, keeps=bool(i & 2)), *more]
            whole += [message, *more]
    # At least the second and the last step of each.
    assert n_restored >= 2 * len(conversations)
