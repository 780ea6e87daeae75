"""Chat templates by name, for models that ship none or a broken one.

The names are llama.cpp's, and tests compare each template with llama.cpp's own implementation. No template writes
BOS at the start, since the tokenizer adds it, and none describes tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from types import MappingProxyType

from llamaslot.base.errors import ConfigError

_ROLE = "{{ message.role }}"
_TEXT = "{{ message.content }}"
_TRIMMED = "{{ message.content | trim }}"


def resolve(name_or_source: str) -> str:
    """Return the Jinja source of a name (ChatML for an empty one), or a Jinja source as it is.

    Raises `ConfigError` that lists the known names, the most similar first.
    """
    if "{%" in name_or_source or "{{" in name_or_source:
        return name_or_source
    name = name_or_source.strip() or "chatml"
    if name not in BUILTIN_TEMPLATES:
        known = sorted(BUILTIN_TEMPLATES, key=lambda known: -SequenceMatcher(None, known, name.lower()).ratio())
        raise ConfigError(
            f"no chat template is called '{name}'; known are {', '.join(known)}; or give a Jinja template",
            param="--chat-template",
        )
    return BUILTIN_TEMPLATES[name]


def _chat(turn: str, reply: str = "", *, head: str = "") -> str:
    """Write `turn` for each message, then the beginning of the reply."""
    source = head + "{% for message in messages %}" + turn + "{% endfor %}"
    return source + "{% if add_generation_prompt %}" + reply + "{% endif %}" if reply else source


def _roles(*, other: str = "", **turns: str) -> str:
    """Write a turn that depends on the message's role."""
    cases = ("{% elif message.role == '" + role + "' %}" + turn for role, turn in turns.items())
    return "".join(cases).replace("elif", "if", 1) + "{% else %}" + other + "{% endif %}"


def _instruct(opening: str, turn: str) -> str:
    """Write `turn`, after `opening` at the start of each exchange (a system message and the next user message)."""
    return "{% if loop.first or loop.previtem.role == 'assistant' %}" + opening + "{% endif %}" + turn


def _llama2(text: str = _TEXT, *, system: str = "<<SYS>>\n{}\n<</SYS>>\n\n", bos: str = "") -> str:
    turn = _roles(system=system.format(text), user=text + " [/INST]", other=text + "</s>")
    return _chat(_instruct(bos + "[INST] ", turn))


def _mistral(before: str, after: str, reply: str = _TEXT) -> str:
    turn = _roles(system=_TEXT + "\n\n", user=f"{_TEXT}{before}[/INST]", other=f"{after}{reply}</s>")
    return _chat(_instruct(f"{before}[INST]{after}", turn))


def _mistral_v7(gap: str) -> str:
    system = f"[SYSTEM_PROMPT]{gap}{_TEXT}[/SYSTEM_PROMPT]"
    return _chat(_roles(system=system, user=f"[INST]{gap}{_TEXT}[/INST]", other=f"{gap}{_TEXT}</s>"))


def _tagged(user: str, assistant: str, end: str, *, system: str, tool: str = "") -> str:
    """Write each role with its own tag and the same end."""
    tags = {"system": system, "user": user, "assistant": assistant} | ({"tool": tool} if tool else {})
    return _chat(_roles(**{role: f"{tag}{_TRIMMED}{end}" for role, tag in tags.items()}), assistant)


_GEMMA = "{% set held = namespace(system='') %}" + _chat(
    _roles(
        system="{% set held.system = held.system + message.content | trim %}",
        assistant=f"<start_of_turn>model\n{_TRIMMED}<end_of_turn>\n",
        other=f"<start_of_turn>{_ROLE}\n"
        "{% if held.system %}{{ held.system }}\n\n{% set held.system = '' %}{% endif %}"
        f"{_TRIMMED}<end_of_turn>\n",
    ),
    "<start_of_turn>model\n",
)

_ORION = "{% set held = namespace(system='') %}" + _chat(
    _roles(
        system="{% set held.system = held.system + message.content %}",
        user="Human: {% if held.system %}{{ held.system }}\n\n{% set held.system = '' %}{% endif %}"
        f"{_TEXT}\n\nAssistant: </s>",
        other=f"{_TEXT}</s>",
    )
)

_EXAONE_TURNS = {
    "system": f"[|system|]{_TRIMMED}[|endofturn|]\n",
    "user": f"[|user|]{_TRIMMED}\n",
    "assistant": f"[|assistant|]{_TRIMMED}[|endofturn|]\n",
}

_GRANITE_REPLY = "<|start_of_role|>assistant<|end_of_role|>"
_GRANITE = _chat(f"<|start_of_role|>{_ROLE}<|end_of_role|>{_TEXT}<|end_of_text|>\n", _GRANITE_REPLY)

BUILTIN_TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "chatml": _chat(f"<|im_start|>{_ROLE}\n{_TEXT}<|im_end|>\n", "<|im_start|>assistant\n"),
        "llama2": _llama2(system="{}\n"),
        "llama2-sys": _llama2(),
        "llama2-sys-bos": _llama2(bos="{% if not loop.first %}<s>{% endif %}"),
        "llama2-sys-strip": _llama2(_TRIMMED),
        "llama3": _chat(
            f"<|start_header_id|>{_ROLE}<|end_header_id|>\n\n{_TRIMMED}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        "llama4": _chat(
            f"<|header_start|>{_ROLE}<|header_end|>\n\n{_TRIMMED}<|eot|>",
            "<|header_start|>assistant<|header_end|>\n\n",
        ),
        "mistral-v1": _mistral(" ", " "),
        "mistral-v3": _mistral("", " ", _TRIMMED),
        "mistral-v3-tekken": _mistral("", ""),
        "mistral-v7": _mistral_v7(" "),
        "mistral-v7-tekken": _mistral_v7(""),
        "phi3": _chat(f"<|{_ROLE}|>\n{_TEXT}<|end|>\n", "<|assistant|>\n"),
        "phi4": _chat(
            f"<|im_start|>{_ROLE}<|im_sep|>{_TEXT}<|im_end|>",
            "<|im_start|>assistant<|im_sep|>",
        ),
        "falcon3": _chat(f"<|{_ROLE}|>\n{_TEXT}\n", "<|assistant|>\n"),
        "zephyr": _chat(f"<|{_ROLE}|>\n{_TEXT}<|endoftext|>\n", "<|assistant|>\n"),
        "monarch": _chat(
            f"{{% if not loop.first %}}<s>{{% endif %}}{_ROLE}\n{_TEXT}</s>\n",
            "<s>assistant\n",
        ),
        "gemma": _GEMMA,
        "orion": _ORION,
        "openchat": _chat(
            _roles(
                system=f"{_TEXT}<|end_of_turn|>",
                other=f"GPT4 Correct {{{{ message.role | capitalize }}}}: {_TEXT}<|end_of_turn|>",
            ),
            "GPT4 Correct Assistant:",
        ),
        "vicuna": _chat(
            _roles(system=f"{_TEXT}\n\n", user=f"USER: {_TEXT}\n", assistant=f"ASSISTANT: {_TEXT}</s>\n"),
            "ASSISTANT:",
        ),
        "vicuna-orca": _chat(
            _roles(system=f"SYSTEM: {_TEXT}\n", user=f"USER: {_TEXT}\n", assistant=f"ASSISTANT: {_TEXT}</s>\n"),
            "ASSISTANT:",
        ),
        "deepseek": _chat(
            _roles(
                system=_TEXT,
                user=f"### Instruction:\n{_TEXT}\n",
                assistant=f"### Response:\n{_TEXT}\n<|EOT|>\n",
            ),
            "### Response:\n",
        ),
        "deepseek2": _chat(
            _roles(
                system=f"{_TEXT}\n\n",
                user=f"User: {_TEXT}\n\n",
                assistant=f"Assistant: {_TEXT}<｜end▁of▁sentence｜>",
            ),
            "Assistant:",
        ),
        "deepseek3": _chat(
            _roles(
                system=f"{_TEXT}\n\n",
                user=f"<｜User｜>{_TEXT}",
                assistant=f"<｜Assistant｜>{_TEXT}<｜end▁of▁sentence｜>",
            ),
            "<｜Assistant｜>",
        ),
        "command-r": _tagged(
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>",
        ),
        "chatglm3": _chat(f"<|{_ROLE}|>\n {_TEXT}", "<|assistant|>", head="[gMASK]sop"),
        "chatglm4": _chat(f"<|{_ROLE}|>\n{_TEXT}", "<|assistant|>\n", head="[gMASK]<sop>"),
        "glmedge": _chat(f"<|{_ROLE}|>\n{_TEXT}", "<|assistant|>"),
        "minicpm": _chat(_roles(user=f"<用户>{_TRIMMED}<AI>", other=_TRIMMED)),
        "exaone3": _chat(_roles(**_EXAONE_TURNS), "[|assistant|]"),
        "exaone4": _chat(
            _roles(**_EXAONE_TURNS, tool=f"[|tool|]{_TRIMMED}[|endofturn|]\n"),
            "[|assistant|]",
        ),
        "exaone-moe": _tagged(
            "<|user|>\n", "<|assistant|>\n", "<|endofturn|>\n", system="<|system|>\n", tool="<|tool|>\n"
        ),
        "granite": _GRANITE,
        "granite-4.0": _GRANITE,
        "granite-4.1": _GRANITE,
        "megrez": _chat(
            f"<|role_start|>{_ROLE}<|role_end|>{_TEXT}<|turn_end|>",
            "<|role_start|>assistant<|role_end|>",
        ),
        "smolvlm": _chat(
            _roles(
                system=f"{_TEXT}\n\n",
                user=f"User: {_TEXT}<end_of_utterance>\n",
                other=f"Assistant: {_TEXT}<end_of_utterance>\n",
            ),
            "Assistant:",
            head="<|im_start|>",
        ),
        "gpt-oss": _chat(
            f"<|start|>{_ROLE}<|message|>{_TEXT}" + _roles(assistant="<|return|>", other="<|end|>"),
            "<|start|>assistant",
        ),
        "seed_oss": _chat(
            f"<seed:bos>{_ROLE}\n" + _roles(assistant=_TRIMMED, other=_TEXT) + "<seed:eos>",
            "<seed:bos>assistant\n",
        ),
        "grok-2": _chat(
            _roles(
                system=f"System: {_TRIMMED}<|separator|>\n\n",
                user=f"Human: {_TRIMMED}<|separator|>\n\n",
                assistant=f"Assistant: {_TEXT}<|separator|>\n\n",
            ),
            "Assistant:",
        ),
        "solar-open": _chat(f"<|begin|>{_ROLE}<|content|>{_TEXT}<|end|>", "<|begin|>assistant"),
    }
)
