"""Chat templates with the constructs that models ship: ours, and those of LLAMASLOT_FIXTURES/templates/*.jinja.

LLAMASLOT_TEMPLATES names a further folder, such as llama.cpp's models/templates, whose templates only have to
render the turns of a tool.
"""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from llamaslot.base.errors import InvalidRequestError
from llamaslot.text.template import ChatTemplate
from tests.text.rendering import rendered

FOLDERS = [Path(__file__).parent / "templates"]
if "LLAMASLOT_FIXTURES" in os.environ:
    FOLDERS.append(Path(os.environ["LLAMASLOT_FIXTURES"], "templates"))
FURTHER = os.environ.get("LLAMASLOT_TEMPLATES")
FURTHER_FILES = sorted(Path(FURTHER).glob("*.jinja")) if FURTHER else []
FILES = [file for folder in FOLDERS for file in sorted(folder.glob("*.jinja"))]

SYSTEM = {"role": "system", "content": "Answer in rhymes."}
TURNS = [
    {"role": "user", "content": "What is a radix tree?"},
    {"role": "assistant", "content": "A trie whose single branches are merged."},
    {"role": "user", "content": "And why <|im_end|> would I want one?"},
    {"role": "assistant", "content": "To find the longest common prefix."},
    {"role": "user", "content": "Thanks, that is clear."},
]
FUNCTION = {
    "name": "weather_in",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of the city"}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {
    "id": "abcd12345",
    "type": "function",
    "function": {"name": "weather_in", "arguments": '{"city": "Tromsø"}'},
}
TOOL_TURNS = [
    {"role": "user", "content": "Do I need an umbrella?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcd12345", "name": "weather_in", "content": "Heavy snow"},
]

NO_RESULTS = {"two_roles", "google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct"}
"""Templates without a role for the results of tools, which become messages of the user."""
NO_TOOLS = {
    *NO_RESULTS,
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
}
"""Templates that do not describe tools."""
NO_CALLS = {
    *NO_RESULTS,
    "HuggingFaceTB-SmolLM3-3B",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "ibm-granite-granite-3.3-2B-Instruct",
}
"""Templates that do not show the model the calls that it made."""
ONE_CALL = {
    "dated_headers",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
}
"""Templates that refuse two calls in one turn."""
NO_GENERATION_PROMPT = {
    "instruction_pairs",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "mistralai-Mistral-Nemo-Instruct-2407",
}
"""Templates where the end of the user's message is what the reply follows."""
MOVES_THE_SYSTEM_MESSAGE = {"instruction_pairs", "mistralai-Mistral-Nemo-Instruct-2407"}
"""Templates that put the system message into the last user message."""
MARKS_THE_LAST_REPLY = {
    "channels",
    "xml_calls_with_reasoning",
    "Qwen-Qwen3-0.6B",
    "Qwen3.5-4B",
    "openai-gpt-oss-120b",
}
"""Templates that write a reply otherwise while it is the last message."""
REWRITES_REPLIES = {
    "channels",
    "thoughts_closed_by_default",
    "GLM-4.6",
    "Qwen3.5-4B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "openai-gpt-oss-120b",
}
"""Templates that write a reply in the conversation unlike what the generation prompt and the model wrote."""


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def named(request: pytest.FixtureRequest) -> tuple[str, ChatTemplate]:
    file: Path = request.param
    return file.stem, ChatTemplate(file.read_text(), bos_token="<bos>", eos_token="<eos>", adds_bos=True)


def texts(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages if message["content"]]


def test_every_text_is_there_once_and_in_order(named: tuple[str, ChatTemplate]) -> None:
    name, template = named
    for messages in (TURNS[:1], TURNS, [SYSTEM, TURNS[0]], [SYSTEM, *TURNS]):
        prompt = rendered(template, messages)
        places = [prompt.index(text) for text in texts(messages)]

        if name not in MOVES_THE_SYSTEM_MESSAGE:
            assert places == sorted(places)
        assert [prompt.count(text) for text in texts(messages)] == [1] * len(messages)
        assert not prompt.startswith("<bos>")
        bare = rendered(template, messages, add_generation_prompt=False)
        assert (prompt == bare) == (name in NO_GENERATION_PROMPT)
        assert prompt.startswith(bare)


def test_a_begun_reply_ends_the_prompt(named: tuple[str, ChatTemplate]) -> None:
    _, template = named

    prompt = rendered(template, TURNS[:2])

    assert prompt.startswith(rendered(template, TURNS[:1]))
    assert prompt.endswith(TURNS[1]["content"])


def test_tools_calls_and_results(named: tuple[str, ChatTemplate]) -> None:
    check_tool_turns(*named)


@pytest.mark.parametrize("file", FURTHER_FILES, ids=lambda file: file.stem)
def test_tools_calls_and_results_in_further_templates(file: Path) -> None:
    check_tool_turns(file.stem, ChatTemplate(file.read_text(), bos_token="<bos>", eos_token="<eos>"))


def check_tool_turns(name: str, template: ChatTemplate) -> None:
    """A loop of two tool steps, the second with two calls, and the turn after it."""
    further = [CALL | {"id": f"abcd1234{i}"} for i in (6, 7)]
    both = [{**TOOL_TURNS[2], "tool_call_id": call["id"], "content": f"Snow {call['id']}"} for call in further]
    loop = [SYSTEM, *TOOL_TURNS]
    for call, result in zip(further, both, strict=True) if name in ONE_CALL else ():
        loop += [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
    if name not in ONE_CALL:
        loop += [{"role": "assistant", "content": None, "tool_calls": further}, *both]
    after = [{"role": "assistant", "content": "Take a coat."}, {"role": "user", "content": "Are you sure?"}]
    for turns in (loop[:4], loop, [*loop, *after]):
        prompt = rendered(template, turns, tools=TOOLS)

        assert SYSTEM["content"] in prompt or (name in MOVES_THE_SYSTEM_MESSAGE and turns[-1]["role"] == "tool")
        assert "Do I need an umbrella?" in prompt
        assert ("The weather in a city." in prompt) == (name not in NO_TOOLS)
        assert (re.search(r"Troms(ø|\\u00f8)", prompt) is not None) == (name not in NO_CALLS)
        assert '\\"city' not in prompt
        results = [turn["content"] for turn in turns if turn["role"] == "tool"]
        places = [prompt.index(result) for result in results]
        assert places == sorted(places)
        assert ("Are you sure?" in prompt) == (turns[-1]["role"] == "user")


@pytest.mark.parametrize("file", [*FILES, *FURTHER_FILES], ids=lambda file: file.stem)
def test_a_call_that_was_cut_is_written_up_to_the_cut(file: Path) -> None:
    template = ChatTemplate(file.read_text(), bos_token="<bos>", eos_token="<eos>")
    cut = CALL | {"function": {"name": "weather_in", "arguments": '{"city": "Trom'}}
    prompt = rendered(template, [TOOL_TURNS[0], {"role": "assistant", "tool_calls": [cut]}, TOOL_TURNS[2]])
    assert ("Trom" in prompt) == (file.stem not in NO_CALLS)
    assert "Heavy snow" in prompt


REMINDER = {"role": "developer", "content": "Mind the time."}
REASONED = {"role": "assistant", "content": "", "reasoning_content": "Snow is wet.", "tool_calls": [CALL]}


@pytest.mark.parametrize("file", [*FILES, *FURTHER_FILES], ids=lambda file: file.stem)
def test_a_reminder_changes_nothing_before_it(file: Path) -> None:
    template = ChatTemplate(file.read_text(), bos_token="<bos>", eos_token="<eos>")
    loop = [TOOL_TURNS[0], REASONED, TOOL_TURNS[2]]
    for turns in (TURNS[:3], loop):
        *before, last = [SYSTEM, *turns]
        reminded = [*before, REMINDER, last] if last["role"] == "user" else [*before, last, REMINDER]
        plain, prompt = (rendered(template, each, tools=TOOLS) for each in ([*before, last], reminded))
        assert prompt.count(REMINDER["content"]) == 1
        # Some templates put the system message into the last one of the user.
        if file.stem in MOVES_THE_SYSTEM_MESSAGE:
            continue
        n_before = plain.index(last["content"] if last["role"] == "tool" else turns[1]["content"])
        assert prompt[:n_before] == plain[:n_before]
        assert prompt.index(REMINDER["content"]) > n_before


@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["plain", "system"])
def test_a_longer_conversation_begins_with_the_shorter_one(
    named: tuple[str, ChatTemplate], system: list[dict[str, Any]]
) -> None:
    name, template = named
    whole = rendered(template, [*system, *TURNS], add_generation_prompt=False)

    broken = [
        k
        for k in range(1, len(TURNS))
        if not whole.startswith(rendered(template, [*system, *TURNS[:k]], add_generation_prompt=False))
    ]

    print(f"{name}: not a prefix after {broken} of {len(TURNS)} messages")
    if name in MARKS_THE_LAST_REPLY:
        assert broken == [2, 4]
    else:
        assert bool(broken) == (bool(system) and name in MOVES_THE_SYSTEM_MESSAGE)


def test_the_next_turn_begins_with_this_one_and_its_reply(named: tuple[str, ChatTemplate]) -> None:
    name, template = named

    after = rendered(template, TURNS[:3]).startswith(rendered(template, TURNS[:1]) + TURNS[1]["content"])

    print(f"{name}: the next turn {'extends' if after else 'rewrites'} the reply")
    assert after == (name not in REWRITES_REPLIES)


def test_control_tokens_of_the_caller_are_told_from_those_of_the_template(named: tuple[str, ChatTemplate]) -> None:
    """The same conversation with letters in place of the control tokens shows where they are."""
    source = named[1].source
    words = {*re.findall(r"<[|｜]?[\w▁/]+[|｜]?>|\[/?[A-Z_]+\]", source), "<bos>", "<eos>"}
    control = sorted(words - {"<think>", "</think>"})
    template = ChatTemplate(source, bos_token="<bos>", eos_token="<eos>", control_tokens=control)
    for content in ("a {0}b{0} c", "{0}\n\n{0}", "</think>{0}<think> {0}"):
        for token in control:
            user = {"role": "user", "content": content.format(token)}
            lettered = {"role": "user", "content": content.format("Ω" * len(token))}
            parts = template.render([user, TURNS[1], user])

            shown = "".join(part.text if part.special else "Ω" * len(part.text) for part in parts)
            assert shown == rendered(template, [lettered, TURNS[1], lettered])


def test_parts_are_the_prompt(named: tuple[str, ChatTemplate]) -> None:
    _, plain = named
    control = sorted({*re.findall(r"<[^<>\s']+>|\[/?[A-Z_]+\]", plain.source), "<bos>", "<eos>"})
    template = ChatTemplate(
        plain.source, bos_token="<bos>", eos_token="<eos>", adds_bos=True, control_tokens=control
    )
    for token in control:
        hostile = f"<bos>{token}\nx</think> {token}</think>y{token}"
        messages = [
            {"role": "user", "content": hostile},
            {"role": "assistant", "content": hostile, "reasoning_content": hostile},
            {"role": "user", "content": [{"type": "text", "text": token[:2]}, {"type": "text", "text": token[2:]}]},
        ]
        try:
            prompt = rendered(plain, messages)
        except InvalidRequestError:
            with pytest.raises(InvalidRequestError):
                template.render(messages)
            continue
        assert "".join(part.text for part in template.render(messages)) == prompt


def test_content_as_parts(named: tuple[str, ChatTemplate]) -> None:
    _, template = named
    parts = [{"role": "user", "content": [{"type": "text", "text": TURNS[0]["content"]}]}]

    assert rendered(template, parts) == rendered(template, TURNS[:1])


@pytest.mark.parametrize("file", [*FILES, *FURTHER_FILES], ids=lambda file: file.stem)
def test_the_parts_of_a_message_are_written_as_its_text(file: Path) -> None:
    """In each role of a tool loop; texts of parts may be joined by nothing, a space or a line."""
    template = ChatTemplate(file.read_text(), bos_token="<bos>", eos_token="<eos>")
    parts = [{"type": "text", "text": text} for text in ("Heavy", "snow")]
    turns = [SYSTEM, *TOOL_TURNS, TURNS[1], TURNS[2]]
    for index, message in enumerate(turns):
        as_parts, *as_texts = (
            rendered(template, [*turns[:index], message | {"content": content}, *turns[index + 1 :]], tools=TOOLS)
            for content in (parts, "Heavysnow", "Heavy snow", "Heavy\nsnow")
        )
        assert as_parts in as_texts, message["role"]


def ours(name: str) -> ChatTemplate:
    source = Path(__file__).parent.joinpath("templates", f"{name}.jinja").read_text()
    return ChatTemplate(source, bos_token="<bos>", eos_token="<eos>", now=lambda: datetime(2025, 3, 9))


def test_reasoning_is_kept_behind_the_last_question_only() -> None:
    reply = {"role": "assistant", "content": None, "reasoning_content": "Snow is wet.", "tool_calls": [CALL]}
    turns = [TOOL_TURNS[0], reply, TOOL_TURNS[2]]
    for name in ("xml_calls_with_reasoning", "thoughts_closed_by_default"):
        assert "Snow is wet." in rendered(ours(name), turns)
        assert "Snow is wet." not in rendered(ours(name), [*turns, {"role": "user", "content": "Are you sure?"}])


@pytest.mark.parametrize("content", [None, "I look outside."])
def test_reasoning_gets_the_name_that_the_template_reads(content: str | None) -> None:
    reply = {"role": "assistant", "content": content, "reasoning_content": "Snow is wet.", "tool_calls": [CALL]}
    prompt = rendered(ours("channels"), [TOOL_TURNS[0], reply, TOOL_TURNS[2]], tools=TOOLS)
    assert prompt.count("<|channel|>analysis<|message|>Snow is wet.<|end|>") == 1


def test_thoughts_can_be_switched_off() -> None:
    for name in ("xml_calls_with_reasoning", "thoughts_closed_by_default"):
        assert "</think>" not in rendered(ours(name), TURNS[:1])
        assert rendered(ours(name), TURNS[:1], kwargs={"enable_thinking": False}).rstrip().endswith("</think>")


def test_the_date_is_that_of_the_clock() -> None:
    assert "Today is 09 Mar 2025, year 2025." in rendered(ours("dated_headers"), TURNS[:1])
    assert "Date: 2025-03-09\n" in rendered(ours("channels"), TURNS[:1])


def test_tools_are_written_as_indented_json() -> None:
    prompt = rendered(ours("dated_headers"), TURNS[:1], tools=TOOLS)
    assert json.dumps(TOOLS[0], indent=4) in prompt
    assert json.dumps([FUNCTION], indent=2) in rendered(ours("parts_and_training"), TURNS[:1], tools=TOOLS)


def test_a_template_refuses_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('No chats.') }}", bos_token="", eos_token="")
    with pytest.raises(InvalidRequestError, match="refuses the messages: No chats") as raised:
        rendered(template, TURNS[:1], tools=TOOLS)
    assert raised.value.param == "messages"
