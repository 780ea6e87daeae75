"""Dialogues in which tools are offered: a call, its result, and an answer that uses the result.

Messages are texts here, in the form in which the model's chat template renders tools, calls and results (Hermes, as
in Qwen 2.5); `openai_form` turns them back into what a client sends. Arguments are drawn as values are, so they
have to be copied from the conversation; one in eight is for the evaluation.
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.demo import grammar as g
from bench.demo import tool_grammar as t
from bench.demo.corpus import Dialogue
from bench.demo.tool_grammar import Tool
from bench.demo.values import is_held_out
from bench.demo.writer import Message, TalkWriter, fill, mark, plain

TOOLS_OPEN, TOOLS_CLOSE = "<tools>", "</tools>"
CALL_OPEN, CALL_CLOSE = "<tool_call>\n", "\n</tool_call>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>\n", "\n</tool_response>"
Arguments = Mapping[str, str | int | list[int]]


@dataclass(frozen=True)
class Request:
    """A user's request, the tool calls that it takes, their results and the answer; learned texts are marked."""

    said: str
    call: str
    result: str
    answer: str


@dataclass(frozen=True)
class ToolDialogue:
    """A conversation that ends in a request for a tool, the exact call, its result and the answer to that."""

    messages: list[Message]
    call: str
    result: str
    answer: str
    tool_name: str

    def asking(self) -> Dialogue:
        """The conversation up to the request; the call is the reply to it."""
        return Dialogue(self.messages, self.call, "", self.tool_name)

    def answering(self) -> Dialogue:
        """The conversation up to the result; the answer is the reply to it."""
        called: list[Message] = [
            {"role": "assistant", "content": self.call},
            {"role": "user", "content": f"{RESULT_OPEN}{self.result}{RESULT_CLOSE}"},
        ]
        return Dialogue([*self.messages, *called], self.answer, self.result, self.tool_name)


def call_text(name: str, arguments: Arguments) -> str:
    """A call as the assistant writes it, with marks around all that it copies.

    Marks lie where the pre-tokenizer cuts: behind a quote, or before the space in front of a number.
    """

    def value(given: str | int | list[int]) -> str:
        if isinstance(given, str):
            return f' "{mark(given)}"'
        if isinstance(given, int):
            return mark(f" {given}")
        first, *others = (str(number) for number in given)
        return f" [{','.join([mark(first), *(mark(f' {other}') for other in others)])}]"

    fields = ", ".join(f'"{mark(key)}":{value(given)}' for key, given in arguments.items())
    return f'{CALL_OPEN}{{"name": "{mark(name)}", "arguments": {{{fields}}}}}{CALL_CLOSE}'


class ToolWriter:
    """Adds tools to a conversation, and turns in which they are called."""

    def __init__(self, writer: TalkWriter, count: int) -> None:
        self.writer, self.rng = writer, writer.rng
        self.tools = self.rng.sample(t.TOOLS, count)
        self.notes: dict[str, str] = {}
        block = "\n".join((TOOLS_OPEN, *(tool.line() for tool in self.tools), TOOLS_CLOSE))
        messages = writer.messages
        if messages and messages[0]["role"] == "system":
            messages[0]["content"] += f"\n{block}"
        else:
            messages.insert(0, {"role": "system", "content": block})

    def call(self, tool: Tool) -> None:
        """The user asks for something, the assistant calls the tool and answers with the result."""
        request: Request = getattr(self, f"_{tool.name}")(tool)
        self.writer.say(self.writer.rough(request.said), request.call)
        self.writer.say(f"{RESULT_OPEN}{request.result}{RESULT_CLOSE}", request.answer)

    def need_none(self) -> None:
        """A turn that has nothing to do with tools."""
        writer, roll, known = self.writer, self.rng.random(), list(self.writer.ledger)
        if roll < 0.35:
            writer.small_talk()
        elif roll < 0.45:
            writer.echo()
        elif roll < 0.75 or not known:
            writer.tell(1)
        else:
            writer.ask(self.rng.choice(known))

    def _unseen(self, tool_name: str, *values: str) -> bool:
        """True if these values of an argument belong to this conversation's part of the corpus."""
        return is_held_out(f"tool {tool_name}", "|".join(values)) == self.writer.held_out

    def _failure(self, tool_name: str, value: str) -> str:
        return self.rng.choice(t.ERRORS[tool_name]).format(v=value)

    def _get_weather(self, tool: Tool) -> Request:
        while not self._unseen(tool.name, city := self.writer.values.draw("city")):
            pass
        said = self.rng.choice(tool.requests).format(v=city)
        call = call_text(tool.name, {"city": city})
        if self.rng.random() < 0.06:
            failure = self._failure(tool.name, city)
            return Request(said, call, f"{t.ERROR}{failure}", fill(t.FAILED, r=mark(failure)))
        sky, also = self.rng.sample(t.CONDITIONS, 2)
        result = self.rng.choice(t.WEATHER_RESULTS).format(c=sky, d=also, n=self.rng.randint(0, 39))
        return Request(said, call, result, fill(tool.answer, v=mark(city), r=mark(result)))

    def _add(self, tool: Tool) -> Request:
        count = 3 if self.rng.random() < 0.3 else 2
        while True:
            numbers = [self.rng.randint(0, self.rng.choice((9, 99, 999, 9999))) for _ in range(count)]
            digits = [str(number) for number in numbers]
            if self._unseen(tool.name, *digits):
                break
        listed = f"{', '.join(digits[:-1])} and {digits[-1]}"
        said = self.rng.choice(tool.requests).format(plus=" plus ".join(digits), list=listed)
        result = str(sum(numbers))
        call = call_text(tool.name, {"numbers": numbers})
        return Request(said, call, result, fill(tool.answer, r=mark(result)))

    def _title(self) -> str:
        if self.rng.random() < 0.4:
            return self.rng.choice(t.NOTE_TITLES)
        # Cities too: a weather call needs to know which tokens a word has behind a quote instead of a space.
        return self.writer.values.draw(
            self.rng.choice(("city", "city", "city", "fruit", "animal", "flower", "name"))
        )

    def _note(self) -> str:
        kinds = (*g.VALUE_WORDS, "spot", "age", "number", "time", "title")
        slots = {kind: self.writer.values.draw(kind) for kind in kinds}
        slots |= {"object": self.rng.choice(g.OBJECTS), "counted": self.rng.choice(g.COUNTED)}
        return self.rng.choice(t.NOTE_TEXTS).format(noun=self.rng.choice(g.NOUNS), **slots)

    def _save_note(self, tool: Tool) -> Request:
        while True:
            title, text = self._title(), self._note()
            if self._unseen(tool.name, title, text):
                break
        self.notes[title] = text
        said = self.rng.choice(tool.requests).format(t=title, x=text)
        result = self.rng.choice(t.SAVE_RESULTS).format(t=title, n=self.rng.randint(1, 99))
        call = call_text(tool.name, {"title": title, "text": text})
        return Request(said, call, result, fill(tool.answer, r=mark(result)))

    def _read_note(self, tool: Tool) -> Request:
        title = self.rng.choice(list(self.notes)) if self.notes and self.rng.random() < 0.6 else self._title()
        while not self._unseen(tool.name, title):
            title = self._title()
        said = self.rng.choice(tool.requests).format(t=title)
        call = call_text(tool.name, {"title": title})
        if title not in self.notes and self.rng.random() < 0.12:
            failure = self._failure(tool.name, title)
            return Request(said, call, f"{t.ERROR}{failure}", fill(t.FAILED, r=mark(failure)))
        result = self.notes.get(title) or self._note()
        return Request(said, call, result, fill(tool.answer, r=mark(result)))


def _opened(rng: random.Random, *, held_out: bool) -> ToolWriter:
    """A conversation with two to four tools, and with a system prompt at times."""
    writer = TalkWriter(rng, held_out=held_out)
    if rng.random() < 0.25:
        writer.system_prompt(facts=rng.choice((0, 0, 1, 2)), rules=rng.choice((0, 0, 1, 2)))
    return ToolWriter(writer, rng.choice((2, 2, 3, 3, 4)))


def tool_talk(rng: random.Random, characters: int) -> list[Message]:
    """A conversation of at least that many characters with tools, for training: nothing in it is held out."""
    tools = _opened(rng, held_out=False)
    while sum(len(message["content"]) for message in tools.writer.messages) < characters:
        if rng.random() < 0.8:
            tools.call(rng.choice(tools.tools))
        else:
            tools.need_none()
    return tools.writer.messages


def _begun(rng: random.Random) -> ToolWriter:
    """A held-out conversation after no, one or two turns."""
    tools = _opened(rng, held_out=True)
    for _ in range(rng.randint(0, 2)):
        if rng.random() < 0.6:
            tools.call(rng.choice(tools.tools))
        else:
            tools.need_none()
    return tools


def _plain(messages: list[Message]) -> list[Message]:
    return [{"role": message["role"], "content": plain(message["content"])} for message in messages]


def held_out_calls(n: int, seed: int) -> Iterator[ToolDialogue]:
    """`n` conversations that end in a request for a tool, with arguments that training never draws."""
    for index in range(n):
        rng = random.Random(f"held out call {seed} {index}")
        tools = _begun(rng)
        tool = rng.choice(tools.tools)
        tools.call(tool)
        *before, asked, call, result, answer = _plain(tools.writer.messages)
        returned = result["content"].removeprefix(RESULT_OPEN).removesuffix(RESULT_CLOSE)
        yield ToolDialogue([*before, asked], call["content"], returned, answer["content"], tool.name)


def held_out_without_call(n: int, seed: int) -> Iterator[Dialogue]:
    """`n` conversations with tools that end in something for which none is needed."""
    for index in range(n):
        tools = _begun(random.Random(f"held out without call {seed} {index}"))
        tools.need_none()
        *messages, answer = _plain(tools.writer.messages)
        yield Dialogue(messages, answer["content"], "", "no tool needed")


def openai_form(messages: list[Message]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools as a client sends them; rendered by the chat template, they are these texts again."""
    tools: list[dict[str, Any]] = []
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        content, call_id = message["content"], f"call{index:05}"
        if message["role"] == "system" and content.endswith(TOOLS_CLOSE):
            content, _, lines = content.removesuffix(f"\n{TOOLS_CLOSE}").rpartition(f"{TOOLS_OPEN}\n")
            tools = [_definition(**json.loads(line)) for line in lines.split("\n")]
            if content:
                result.append({"role": "system", "content": content.removesuffix("\n")})
        elif content.startswith(CALL_OPEN):
            call = json.loads(content.removeprefix(CALL_OPEN).removesuffix(CALL_CLOSE))
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            calls = [{"id": call_id, "type": "function", "function": function}]
            result.append({"role": "assistant", "content": None, "tool_calls": calls})
        elif content.startswith(RESULT_OPEN):
            content = content.removeprefix(RESULT_OPEN).removesuffix(RESULT_CLOSE)
            result.append({"role": "tool", "tool_call_id": f"call{index - 1:05}", "content": content})
        else:
            result.append({"role": message["role"], "content": content})
    return result, tools


def _definition(name: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    """A tool as clients send it."""
    schemas: dict[str, Any] = {
        key: {"type": kind, "items": {"type": "number"}} if kind == "array" else {"type": kind}
        for key, kind in arguments.items()
    }
    schema = {"type": "object", "properties": schemas, "required": list(schemas)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}
