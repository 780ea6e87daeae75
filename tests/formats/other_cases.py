"""Outputs of models that write arguments between tags, as in Python, in Gemma's notation, or in channels."""

from __future__ import annotations

from tests.formats.messages import CODE, PARIS, Case


def qwen(name: str, *arguments: str) -> str:
    parameters = "".join(
        f"<parameter={each.partition('=')[0]}>\n{each.partition('=')[2]}\n</parameter>\n" for each in arguments
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


HTML = "<html>\n <head>\n  <parameter=x>1</parameter> </function>\n</html>"
QWEN = [
    Case("qwen3-coder", "text", "Hello <function> #include <functional>", "Hello <function> #include <functional>"),
    Case("qwen3-coder", "call", qwen("get_weather", "city=Paris"), calls=(("get_weather", PARIS),)),
    Case(
        "qwen3-coder",
        "number",
        qwen("get_weather", "city=5123", "days=3"),
        calls=(("get_weather", {"city": "5123", "days": 3}),),
    ),
    Case("qwen3-coder", "code", qwen("python", f"code={CODE}"), calls=(("python", {"code": CODE}),)),
    Case(
        "qwen3-coder", "indented", qwen("python", "code=    x = 1\n"), calls=(("python", {"code": "    x = 1\n"}),)
    ),
    Case("qwen3-coder", "empty", qwen("python", "code="), calls=(("python", {"code": ""}),)),
    Case("qwen3-coder", "tags in a value", qwen("python", f"code={HTML}"), calls=(("python", {"code": HTML}),)),
    Case("qwen3-coder", "quoted", qwen("python", 'code="a"'), calls=(("python", {"code": '"a"'}),)),
    Case("qwen3-coder", "no arguments", qwen("no_arguments"), calls=(("no_arguments", {}),)),
    Case(
        "qwen3-coder",
        "objects",
        qwen("todo", 'items=[{"a": "</parameter>"}, {"b": false}]', "options={'x': None}"),
        calls=(("todo", {"items": [{"a": "</parameter>"}, {"b": False}], "options": {"x": None}}),),
    ),
    Case(
        "qwen3-coder",
        "wrong type",
        qwen("get_weather", "days=two", "city=x"),
        calls=(("get_weather", {"days": "two", "city": "x"}),),
    ),
    Case("qwen3-coder", "Python's literal", qwen("edit", "all=True"), calls=(("edit", {"all": True}),)),
    Case("qwen3-coder", "null or string", qwen("set", "value=null"), calls=(("set", {"value": None}),)),
    Case("qwen3-coder", "string or null", qwen("set", "value=5"), calls=(("set", {"value": "5"}),)),
    Case("qwen3-coder", "union", qwen("set", "either=5", "any=[1]"), calls=(("set", {"either": 5, "any": [1]}),)),
    Case(
        "qwen3-coder",
        "union with text",
        qwen("set", "either=5 eur", "any={x"),
        calls=(("set", {"either": "5 eur", "any": "{x"}),),
    ),
    Case("qwen3-coder", "unknown function", qwen("f", "a=1", "b=x"), calls=(("f", {"a": 1, "b": "x"}),)),
    Case(
        "qwen3-coder",
        "parallel, text before",
        f"I'll look.\n{qwen('get_weather', 'city=Paris')}\n{qwen('no_arguments')}",
        content="I'll look.",
        calls=(("get_weather", PARIS), ("no_arguments", {})),
    ),
    Case(
        "qwen3-coder",
        "first tag missing",
        f"Let me see.\n{qwen('get_weather', 'city=Paris')[12:]}\n{qwen('no_arguments')}",
        content="Let me see.",
        calls=(("get_weather", PARIS), ("no_arguments", {})),
    ),
    Case(
        "qwen3-coder", "last tags missing", qwen("get_weather", "city=Paris")[:-24], calls=(("get_weather", PARIS),)
    ),
    Case(
        "qwen3-coder",
        "cut in a value",
        qwen("python", "code=print(")[:-38],
        calls=(("python", '{"code": "print('),),
    ),
    Case(
        "qwen3-coder",
        "cut in a number",
        qwen("get_weather", "days=12")[:-37],
        calls=(("get_weather", '{"days": '),),
    ),
    Case(
        "qwen3-coder",
        "on one line",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
        calls=(("get_weather", PARIS),),
    ),
    Case(
        "qwen3-coder",
        "JSON",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        calls=(("get_weather", PARIS),),
    ),
    Case("qwen3-coder", "no call", "<tool_call>\n<function=\n>", content="<tool_call>\n<function=\n>"),
    Case(
        "qwen3.5",
        "reasoning, text, call",
        f"I should look.\n</think>\n\nNow:\n{qwen('get_weather', 'city=Paris')}",
        content="Now:",
        reasoning="I should look.",
        calls=(("get_weather", PARIS),),
        options={"reasoning_open": "<think>\n"},
    ),
    Case(
        "qwen3.5",
        "call ends the reasoning",
        f"Need to look.\n{qwen('get_weather', 'city=Paris')}",
        reasoning="Need to look.",
        calls=(("get_weather", PARIS),),
        options={"reasoning_open": "<think>\n"},
    ),
    Case(
        "qwen3.5",
        "empty reasoning again",
        f"<think>\n\n</think>\n\n{qwen('get_weather', 'city=Paris')}",
        calls=(("get_weather", PARIS),),
        options={"reasoning_open": "<think>\n"},
    ),
]
GLM = [
    Case("glm-4.6", "text", "Hello <arg_key>", content="Hello <arg_key>"),
    Case(
        "glm-4.6",
        "call",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        calls=(("get_weather", {"city": "Paris", "days": 3}),),
    ),
    Case(
        "glm-4.7",
        "parallel behind reasoning",
        "I'm\nthinking</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
        "<tool_call>no_arguments</tool_call>\n",
        reasoning="I'm\nthinking",
        calls=(("get_weather", PARIS), ("no_arguments", {})),
        options={"reasoning_open": "<think>"},
    ),
    Case(
        "glm-4.6",
        "code",
        f"<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>{CODE}</arg_value>\n</tool_call>",
        calls=(("python", {"code": CODE}),),
    ),
    Case(
        "glm-4.6",
        "no end",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>",
        calls=(("get_weather", PARIS),),
    ),
    Case("glm-4.6", "no call", "<tool_call>see above</tool_call>", content="<tool_call>see above</tool_call>"),
]
INVOKE = '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>'
MINIMAX = [
    Case("minimax-m2", "text", "Hello <invoke>", content="Hello <invoke>"),
    Case(
        "minimax-m2",
        "parallel",
        f"Hm.\n</think>\n\n<minimax:tool_call>\n{INVOKE}\n{INVOKE}\n</minimax:tool_call>",
        reasoning="Hm.",
        calls=(("get_weather", PARIS),) * 2,
        options={"reasoning_open": "<think>\n"},
    ),
    Case(
        "minimax-m2",
        "no arguments",
        '<minimax:tool_call>\n<invoke name="no_arguments">\n</invoke>\n</minimax:tool_call>',
        calls=(("no_arguments", {}),),
    ),
    Case("minimax-m2", "no call", "<minimax:tool_call>x", content="<minimax:tool_call>x"),
]
LFM2_CALL = "<|tool_call_start|>[f(a=1)]<|tool_call_end|>"
LFM2 = [
    Case(
        "lfm2",
        "text",
        "Use [link text](url). [get_weather(city='x')]",
        "Use [link text](url). [get_weather(city='x')]",
    ),
    Case(
        "lfm2",
        "call",
        '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>',
        calls=(("get_weather", PARIS),),
    ),
    Case(
        "lfm2",
        "parallel, text before and behind",
        "I look.<|tool_call_start|>[get_weather(city='Paris', days=2), no_arguments()]<|tool_call_end|>So.",
        content="I look.So.",
        calls=(("get_weather", {"city": "Paris", "days": 2}), ("no_arguments", {})),
    ),
    Case(
        "lfm2",
        "literals",
        "<|tool_call_start|>[edit(all=True, old=None, new=false)]<|tool_call_end|>",
        calls=(("edit", {"all": True, "old": None, "new": False}),),
    ),
    Case(
        "lfm2",
        "nested",
        '<|tool_call_start|>[todo(items=[{"a": "x)]", \'b\': (1, 2)}], options={"d": true})]<|tool_call_end|>',
        calls=(("todo", {"items": [{"a": "x)]", "b": [1, 2]}], "options": {"d": True}}),),
    ),
    Case(
        "lfm2",
        "escapes",
        '<|tool_call_start|>[python(code="a\\n\\tb \\"c\\" \'d\'")]<|tool_call_end|>',
        calls=(("python", {"code": "a\n\tb \"c\" 'd'"}),),
    ),
    Case(
        "lfm2",
        "three quotes",
        '<|tool_call_start|>[python(code="""a "b"\nc""")]<|tool_call_end|>',
        calls=(("python", {"code": 'a "b"\nc'}),),
    ),
    Case(
        "lfm2",
        "by position",
        '<|tool_call_start|>[get_weather("Paris")]<|tool_call_end|>',
        calls=(("get_weather", PARIS),),
    ),
    Case(
        "lfm2",
        "dotted name",
        "<|tool_call_start|>[Calendar.create(a=1)]<|tool_call_end|>",
        calls=(("Calendar.create", {"a": 1}),),
    ),
    Case(
        "lfm2",
        "JSON",
        '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|tool_call_end|>',
        calls=(("get_weather", PARIS),),
    ),
    Case("lfm2", "no end", '<|tool_call_start|>[get_weather(city="Paris")', calls=(("get_weather", PARIS),)),
    Case(
        "lfm2",
        "no name",
        "<|tool_call_start|>[get_weather(Paris, 3)]",
        calls=(("get_weather", {"city": "Paris", "days": 3}),),
    ),
    Case("lfm2", "cut name", "<|tool_call_start|>[get_weather(ci", calls=(("get_weather", "{"),)),
    Case("lfm2", "no argument", "<|tool_call_start|>[get_weather(=, 3)]", calls=(("get_weather", "{"),)),
    Case("lfm2", "cut", "<|tool_call_start|>[get_weather(city=", calls=(("get_weather", "{"),)),
    Case(
        "lfm2",
        "no call",
        "<|tool_call_start|>(hello)<|tool_call_end|>",
        content="<|tool_call_start|>(hello)<|tool_call_end|>",
    ),
    Case(
        "lfm2.5",
        "call in the reasoning",
        f"<think>Use {LFM2_CALL}?</think>{LFM2_CALL}",
        reasoning=f"Use {LFM2_CALL}?",
        calls=(("f", {"a": 1}),),
    ),
]
PYTHONIC = [
    Case(
        "llama-pythonic",
        "parallel",
        '[get_weather(city="Paris"), no_arguments()]',
        calls=(("get_weather", PARIS), ("no_arguments", {})),
    ),
    Case(
        "llama-pythonic",
        "marked",
        "<|python_start|>[get_weather(city='Paris')]<|python_end|>",
        calls=(("get_weather", PARIS),),
    ),
    Case("llama-pythonic", "unknown", "[f(x=1)]", content="[f(x=1)]"),
    Case("llama-pythonic", "text", "[1, 2]\nget_weather(city)", content="[1, 2]\nget_weather(city)"),
]
GEMMA = [
    Case("gemma4", "text", "Hello, world!", content="Hello, world!"),
    Case(
        "gemma4",
        "reasoning",
        "<|channel>thought\nI'm\nthinking<channel|>Hello",
        content="Hello",
        reasoning="I'm\nthinking",
    ),
    Case("gemma4", "empty reasoning", "<|channel>thought<channel|>Hello", content="Hello"),
    Case(
        "gemma4",
        "superfluous channels",
        "<|channel><|channel>thought\n<channel|>Hello<|channel>thought\n<channel|><channel|>",
        content="Hello",
    ),
    Case(
        "gemma4",
        "reasoning, text, parallel calls",
        '<|channel>thought\nHm.<channel|>I look.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
        "<|tool_call>call:no_arguments{}<tool_call|>",
        content="I look.",
        reasoning="Hm.",
        calls=(("get_weather", PARIS), ("no_arguments", {})),
    ),
    Case(
        "gemma4",
        "values",
        '<|tool_call>call:todo{items:[{a:<|"|>x "y" \\n {z}<|"|>},{}],'
        "options:{n:-1.5e3,b:true,e:null,l:[]}}<tool_call|>",
        calls=(
            (
                "todo",
                {"items": [{"a": 'x "y" \\n {z}'}, {}], "options": {"n": -1500.0, "b": True, "e": None, "l": []}},
            ),
        ),
    ),
    Case("gemma4", "cut", '<|tool_call>call:get_weather{city:<|"|>Pa', calls=(("get_weather", '{"city":"Pa'),)),
    Case("gemma4", "no call", "<|tool_call>hello<tool_call|>", content="<|tool_call>hello<tool_call|>"),
    Case(
        "function-gemma",
        "call",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
        calls=(("get_weather", PARIS),),
    ),
]
THOUGHT = "<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant"
TO_ASSISTANT = "<|channel|>commentary to=assistant"
HARMONY = [
    Case("gpt-oss", "final", "<|channel|>final<|message|>Hello", content="Hello"),
    Case("gpt-oss", "commentary", "<|channel|>commentary<|message|>Hello", content="Hello"),
    Case(
        "gpt-oss",
        "reasoning",
        f"{THOUGHT}<|channel|>final<|message|>Hello<|return|>",
        content="Hello",
        reasoning="I'm\nthinking",
    ),
    Case(
        "gpt-oss",
        "recipient in the role",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        calls=(("get_weather", PARIS),),
    ),
    Case(
        "gpt-oss",
        "recipient in the channel",
        '<|channel|>analysis to=functions.get_weather<|message|>{"city": "Paris"}',
        calls=(("get_weather", PARIS),),
    ),
    Case(
        "gpt-oss",
        "reasoning, preamble, call",
        f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        content="I look.",
        reasoning="I'm\nthinking",
        calls=(("get_weather", PARIS),),
    ),
    Case(
        "gpt-oss",
        "no arguments",
        " to=functions.no_arguments<|channel|>commentary json<|message|><|call|>",
        calls=(("no_arguments", {}),),
    ),
    Case(
        "gpt-oss",
        "built-in tool",
        f"{THOUGHT}<|channel|>commentary to=browser.search <|constrain|>code<|message|>print(1)",
        reasoning="I'm\nthinking",
    ),
    Case(
        "gpt-oss",
        "constrained answer",
        f'{THOUGHT}<|channel|>final <|constrain|>json<|message|>{{"a": 1}}',
        content='{"a": 1}',
        reasoning="I'm\nthinking",
    ),
    Case(
        "gpt-oss",
        "stray commentary",
        f"{TO_ASSISTANT}{THOUGHT}{TO_ASSISTANT}<|channel|>final<|message|>Hello",
        content="Hello",
        reasoning="I'm\nthinking",
    ),
    Case(
        "gpt-oss",
        "open reasoning",
        "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        content="Yes",
        reasoning="Hm.",
        options={"reasoning_open": "<|channel|>analysis<|message|>"},
    ),
    Case("gpt-oss", "no channels", "Hello <|end|>", content="Hello "),
    Case(
        "gpt-oss",
        "no JSON",
        " to=functions.python<|channel|>commentary<|message|>print(1)<|call|>",
        content="print(1)",
    ),
    Case("gpt-oss", "cut in the header", "<|channel|>fin"),
    Case(
        "gpt-oss",
        "calls are not parsed",
        " to=functions.python<|channel|>commentary<|message|>{}<|call|>",
        options={"parse_tools": False},
    ),
]
CASES = [*QWEN, *GLM, *MINIMAX, *LFM2, *PYTHONIC, *GEMMA, *HARMONY]
