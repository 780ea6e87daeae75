"""Outputs of models that write arguments as JSON."""

from __future__ import annotations

import json

from tests.formats.messages import CODE, PARIS, Case

CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
PYTHON = '{"name": "python", "arguments": ' + json.dumps({"code": CODE}, ensure_ascii=False) + "}"
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'

HERMES = [
    Case("hermes", "text", "Hello, world!\nWhat's up? ", content="Hello, world!\nWhat's up? "),
    Case("hermes", "call", f"<tool_call>\n{CALL}\n</tool_call>", calls=(("get_weather", PARIS),)),
    Case("hermes", "no lines", f"<tool_call>{CALL}</tool_call>", calls=(("get_weather", PARIS),)),
    Case(
        "hermes",
        "text before",
        f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n",
        content="Let me see.",
        calls=(("get_weather", PARIS),),
    ),
    Case(
        "hermes",
        "parallel",
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{PYTHON}\n</tool_call>",
        calls=(("get_weather", PARIS), ("python", {"code": CODE})),
    ),
    Case(
        "hermes",
        "not parallel",
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{PYTHON}\n</tool_call>",
        calls=(("get_weather", PARIS),),
        options={"parallel": False},
    ),
    Case(
        "hermes",
        "two in one tag",
        f"<tool_call>\n{CALL}\n{PYTHON}\n</tool_call>",
        calls=(("get_weather", PARIS), ("python", {"code": CODE})),
    ),
    Case(
        "hermes", "text behind", f"<tool_call>{CALL}</tool_call>\n\nDone.", "Done.", "", (("get_weather", PARIS),)
    ),
    Case("hermes", "no end tag", f"<tool_call>\n{CALL}", calls=(("get_weather", PARIS),)),
    Case("hermes", "too many brackets", f"<tool_call>{CALL}}}}}</tool_call>", calls=(("get_weather", PARIS),)),
    Case("hermes", "too few brackets", f"<tool_call>{CALL[:-1]}\n</tool_call>", calls=(("get_weather", PARIS),)),
    Case(
        "hermes",
        "brackets missing inside",
        f"<tool_call>{CALL[:-2]}\n</tool_call>",
        calls=(("get_weather", PARIS),),
    ),
    Case(
        "hermes",
        "cut in a string",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        calls=(("get_weather", '{"city": "Par'),),
    ),
    Case("hermes", "cut before the name", '<tool_call>{"name": "get_w'),
    Case("hermes", "no JSON", "<tool_call>\nhello</tool_call>!", "<tool_call>\nhello</tool_call>!"),
    Case("hermes", "another tag", "a <tool_cal> b <tool_call", content="a <tool_cal> b <tool_call"),
    Case(
        "hermes",
        "arguments first",
        '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
        calls=(("get_weather", PARIS),),
    ),
    Case(
        "hermes",
        "arguments as text",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        calls=(("get_weather", PARIS),),
    ),
    Case(
        "hermes",
        "arguments as a string that is JSON for Python only",
        '<tool_call>{"name": "set", "arguments": "{\\"any\\": [NaN, 1]}"}</tool_call>',
        calls=(("set", {"any": ["NaN", 1]}),),
    ),
    Case(
        "hermes", "no arguments", '<tool_call>{"name": "no_arguments"}</tool_call>', calls=(("no_arguments", {}),)
    ),
    Case(
        "hermes",
        "null arguments",
        '<tool_call>{"name": "no_arguments", "arguments": null}</tool_call>',
        calls=(("no_arguments", {}),),
    ),
    Case(
        "hermes",
        "unknown function",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        calls=(("f", {"a": 1}),),
    ),
    Case(
        "hermes",
        "wrapped",
        f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call>',
        calls=(("get_weather", PARIS),),
    ),
    Case("hermes", "list", f"<tool_call>[{CALL}, {CALL}]</tool_call>", calls=(("get_weather", PARIS),) * 2),
    Case(
        "hermes",
        "careless JSON",
        "<tool_call>{'name': 'python', 'arguments': {'code': 'a\nb', all: True, 'x': [1, 2,], }}</tool_call>",
        calls=(("python", {"code": "a\nb", "all": True, "x": [1, 2]}),),
    ),
    Case(
        "hermes",
        "calls are not parsed",
        f"<tool_call>\n{CALL}\n</tool_call>",
        content=f"<tool_call>\n{CALL}\n</tool_call>",
        options={"parse_tools": False},
    ),
    Case("hermes", "no tools", f"<tool_call>{CALL}", content=f"<tool_call>{CALL}", options={"tools": []}),
    Case(
        "hermes-thinking",
        "call in the reasoning",
        f"<think>I could <tool_call>{CALL}</tool_call></think>No.",
        content="No.",
        reasoning=f"I could <tool_call>{CALL}</tool_call>",
    ),
    Case(
        "hermes-thinking",
        "reasoning and call",
        f"<think>\nHm.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>",
        reasoning="Hm.",
        calls=(("get_weather", PARIS),),
    ),
]
GRANITE = [
    Case("granite-4", "call", f"<tool_call>\n{CALL}\n</tool_call>", calls=(("get_weather", PARIS),)),
    Case("granite-3", "list", f"<|tool_call|>[{CALL}, {CALL}]", calls=(("get_weather", PARIS),) * 2),
    Case("granite-3", "tag", f"<|tool_call|>{CALL}", calls=(("get_weather", PARIS),)),
    Case("granite-3", "answer between tags", "<think>a</think><response>b</response>", content="b", reasoning="a"),
    Case("granite-3", "later item is no call", f"<|tool_call|>[{CALL}, 5]", "5]", "", (("get_weather", PARIS),)),
]
LLAMA3 = [
    Case("llama3", "text", "Hello {name}!\n{x}", content="Hello {name}!\n{x}"),
    Case("llama3", "call", LLAMA, calls=(("get_weather", PARIS),)),
    Case("llama3", "typed", '{"type": "function", ' + LLAMA[1:], calls=(("get_weather", PARIS),)),
    Case("llama3", "text before", f"Sure:\n\n{LLAMA}", content="Sure:", calls=(("get_weather", PARIS),)),
    Case("llama3", "several", f"{LLAMA}; {LLAMA}\n{LLAMA}", calls=(("get_weather", PARIS),) * 3),
    Case("llama3", "python tag", f"<|python_tag|>{LLAMA}", calls=(("get_weather", PARIS),)),
    Case("llama3", "built in", '<|python_tag|>get_weather.call(city="Paris")', calls=(("get_weather", PARIS),)),
    Case("llama3", "pythonic", '[get_weather(city="Paris")]', calls=(("get_weather", PARIS),)),
    Case(
        "llama3",
        "function tag",
        '<function=get_weather>{"city": "Paris"}</function>',
        calls=(("get_weather", PARIS),),
    ),
    Case("llama3", "unknown function", LLAMA.replace("get_", "f_"), content=LLAMA.replace("get_", "f_")),
    Case("llama3", "an answer in JSON", '{"name": "Bob", "age": 5}', content='{"name": "Bob", "age": 5}'),
    Case("llama3", "an answer with more fields", '{"id": 1, "x": {}}\n{"y": 2}', '{"id": 1, "x": {}}\n{"y": 2}'),
    Case("llama3", "a list", "[1, 2]\n[link](url)", content="[1, 2]\n[link](url)"),
    Case("llama3", "code behind the tag", "<|python_tag|>print(1)", content="<|python_tag|>print(1)"),
    Case("llama3", "text behind", f"{LLAMA}\n\nDone; {{a}}", "Done; {a}", "", (("get_weather", PARIS),)),
]
MISTRAL = [
    Case("mistral-nemo", "text", "Hello [TOOL_CALL] x", content="Hello [TOOL_CALL] x"),
    Case(
        "mistral-nemo",
        "call",
        f'[TOOL_CALLS][{CALL[:-1]}, "id": "123456789"}}]',
        calls=(("get_weather", PARIS, "123456789"),),
    ),
    Case("mistral-nemo", "wrong id", f'[TOOL_CALLS][{CALL[:-1]}, "id": "12"}}]', calls=(("get_weather", PARIS),)),
    Case("mistral-nemo", "no id", f"[TOOL_CALLS] [{CALL}, {CALL}]", calls=(("get_weather", PARIS),) * 2),
    Case("mistral-nemo", "cut before the id", f"[TOOL_CALLS][{CALL[:-1]}", calls=(("get_weather", PARIS),)),
    Case(
        "mistral-nemo",
        "new form",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
        calls=(("get_weather", PARIS),),
    ),
    Case(
        "mistral-small",
        "call",
        '[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Paris"}',
        calls=(("get_weather", PARIS, "123456789"),),
    ),
    Case(
        "mistral-small",
        "parallel",
        'Hm.[TOOL_CALLS]get_weather[CALL_ID]000000001[ARGS]{"city": "Paris"}'
        "[TOOL_CALLS]no_arguments[CALL_ID]000000002[ARGS]{}",
        content="Hm.",
        calls=(("get_weather", PARIS, "000000001"), ("no_arguments", {}, "000000002")),
    ),
    Case("mistral-small", "no arguments", "[TOOL_CALLS]f[ARGS] or", content="[TOOL_CALLS]f[ARGS] or"),
    Case(
        "ministral",
        "call in the reasoning",
        '[THINK]Use [TOOL_CALLS]f[ARGS]{"a":1}?[/THINK]\n[TOOL_CALLS]get_weather[ARGS]{"city":"Paris"}',
        reasoning='Use [TOOL_CALLS]f[ARGS]{"a":1}?',
        calls=(("get_weather", PARIS),),
    ),
    Case("ministral", "reasoning", "[THINK]I'm\nthinking[/THINK]Hello", content="Hello", reasoning="I'm\nthinking"),
]
R1_CALL = (
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>'
)
V3_CALL = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK = [
    Case("deepseek-r1", "call", f"{BEGIN}{R1_CALL}{END}", calls=(("get_weather", PARIS),)),
    Case(
        "deepseek-r1",
        "parallel behind open reasoning",
        f"Hm.\n</think>\n\n{BEGIN}{R1_CALL}\n{R1_CALL}{END}",
        reasoning="Hm.",
        calls=(("get_weather", PARIS),) * 2,
        options={"reasoning_open": "<think>\n"},
    ),
    Case("deepseek-r1", "call mark missing", f"{BEGIN}{R1_CALL[19:]}{END}", calls=(("get_weather", PARIS),)),
    Case(
        "deepseek-v3.1",
        "reasoning, text, calls",
        f"REASONING</think>CONTENT{BEGIN}{V3_CALL}{V3_CALL}{END}",
        content="CONTENT",
        reasoning="REASONING",
        calls=(("get_weather", PARIS),) * 2,
        options={"reasoning_open": "<think>"},
    ),
    Case("deepseek-v3.1", "text", "CONTENT", content="CONTENT"),
    Case("deepseek-v3.1", "no end", f"{BEGIN}{V3_CALL[:-17]}", calls=(("get_weather", PARIS),)),
    Case("deepseek-v3.1", "no name", f"{BEGIN} {END}x", content=f"{BEGIN} {END}x"),
]
KIMI_CALL = (
    '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
)
KIMI_NONE = "<|tool_call_begin|>functions.no_arguments:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_IDS = (("get_weather", PARIS, "functions.get_weather:0"), ("no_arguments", {}, "functions.no_arguments:1"))
KIMI = [
    Case("kimi-k2", "text", "Hello!", content="Hello!"),
    Case(
        "kimi-k2",
        "parallel",
        f"Hm.<|tool_calls_section_begin|>{KIMI_CALL}{KIMI_NONE}<|tool_calls_section_end|>",
        content="Hm.",
        calls=KIMI_IDS,
    ),
    Case(
        "kimi-k2",
        "in the reasoning, no marks of the section or of ends",
        f"<think>Two calls{KIMI_CALL[:-17]}{KIMI_NONE[:-17]}",
        reasoning="Two calls",
        calls=KIMI_IDS,
    ),
    Case(
        "kimi-k2",
        "no call in the reasoning",
        "<think>I write <|tool_call_begin|>what?</think>Yes",
        content="Yes",
        reasoning="I write <|tool_call_begin|>what?",
    ),
    Case(
        "kimi-k2",
        "cut",
        '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": ',
        calls=(("get_weather", '{"city":', "functions.get_weather:0"),),
    ),
]
GENERIC = [
    Case("generic", "text", "Hello, {world}!", content="Hello, {world}!"),
    Case("generic", "call", CALL, calls=(("get_weather", PARIS),)),
    Case("generic", "list", f" [{CALL}, {CALL}]", calls=(("get_weather", PARIS),) * 2),
    Case("generic", "field", f'{{"tool_call": {CALL}}}', calls=(("get_weather", PARIS),)),
    Case("generic", "field of several", f'{{"tool_calls": [{CALL}, {CALL}]}}', calls=(("get_weather", PARIS),) * 2),
    Case("generic", "tag", f"I see.\n<tool_call>{CALL}</tool_call>", "I see.", "", (("get_weather", PARIS),)),
    Case("generic", "an answer in JSON", '{"response": "Hi"}', content='{"response": "Hi"}'),
    Case(
        "generic-thinking", "reasoning", f"<think>a</think>\n{CALL}", reasoning="a", calls=(("get_weather", PARIS),)
    ),
]
CASES = [*HERMES, *GRANITE, *LLAMA3, *MISTRAL, *DEEPSEEK, *KIMI, *GENERIC]
