"""Finding the format of a chat template."""

from __future__ import annotations

from collections.abc import Mapping

from llamaslot.formats.families.gemma import FunctionGemma, Gemma
from llamaslot.formats.families.harmony import Harmony
from llamaslot.formats.families.json_arguments import DeepSeek, Kimi, Mistral
from llamaslot.formats.families.json_or_python import Generic, Granite, Hermes, Lfm2, Llama3, LlamaPython
from llamaslot.formats.families.tagged_arguments import Glm, MiniMax, QwenCoder
from llamaslot.formats.format import Format
from llamaslot.formats.message import ReasoningTags

FORMATS: tuple[type[Format], ...] = (
    Mistral,
    Harmony,
    Kimi,
    MiniMax,
    Gemma,
    FunctionGemma,
    QwenCoder,
    Glm,
    DeepSeek,
    Lfm2,
    LlamaPython,
    Llama3,
    Granite,
    Hermes,
    Generic,
)
"""In order of trial: a format comes before any other whose markers its templates also contain."""

_REASONING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


def format_of(source: str, special: Mapping[str, int]) -> Format:
    """Return the format of a template; `special` maps control tokens to their ids (see `Format`)."""
    tags = next((ReasoningTags(*pair) for pair in _REASONING_TAGS if pair[0] in source or pair[1] in source), None)
    recognised = next(each for each in FORMATS if each.recognises(source))
    return recognised(source, special, tags)
