"""Finding the format of a chat template."""

from __future__ import annotations

from collections.abc import Mapping

from llamaslot.formats.families.deepseek import DeepSeek
from llamaslot.formats.families.gemma import FunctionGemma, Gemma
from llamaslot.formats.families.generic import Generic
from llamaslot.formats.families.glm import Glm
from llamaslot.formats.families.granite import Granite
from llamaslot.formats.families.harmony import Harmony
from llamaslot.formats.families.hermes import Hermes
from llamaslot.formats.families.kimi import Kimi
from llamaslot.formats.families.lfm2 import Lfm2
from llamaslot.formats.families.llama import Llama3, LlamaPython
from llamaslot.formats.families.minimax import MiniMax
from llamaslot.formats.families.mistral import Mistral
from llamaslot.formats.families.qwen_coder import QwenCoder
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
