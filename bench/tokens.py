"""Text to tokens without a server, by a model's vocabulary and template: the same for every server."""

from __future__ import annotations

import os
import random
import string
from collections.abc import Sequence
from pathlib import Path

import llama_cpp

from bench.client import BenchmarkError, Message
from llamaslot.backend.llama import library
from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.text.template import ChatTemplate


class Tokens:
    """The vocabulary and chat template of a GGUF file; its weights are not read."""

    def __init__(self, model: Path) -> None:
        library.initialise()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(model), params)
        if not self._model:
            raise BenchmarkError(f"{model}: llama.cpp cannot read its vocabulary")
        template = llama_cpp.llama_model_chat_template(self._model, None)
        if not template:
            raise BenchmarkError(f"{model} has no chat template")
        self._vocab = vocab = LlamaVocab(self._model)
        self._template = ChatTemplate(
            template.decode(errors="replace"),
            bos_token=vocab.text(vocab.bos),
            eos_token=vocab.text(vocab.eos),
            adds_bos=vocab.adds_bos,
            adds_eos=vocab.adds_eos,
            control_tokens=vocab.control_tokens,
        )

    @property
    def n_vocab(self) -> int:
        """The number of token ids."""
        return int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, as a server renders and tokenizes it."""
        text = "".join(part.text for part in self._template.render(messages))
        ids: list[int] = self._vocab.tokenize(text, add_special=True, parse_special=True).tolist()
        return ids

    def of(self, text: str) -> list[int]:
        """The token ids of a text in the middle of a prompt."""
        ids: list[int] = self._vocab.tokenize(text, add_special=False, parse_special=False).tolist()
        return ids

    def draw(self, words: random.Random, n_tokens: int) -> str:
        """Random words that make `n_tokens` tokens, the last ones " a" where the words do not come out even."""
        drawn = ["".join(words.choices(string.ascii_lowercase, k=3)) for _ in range(n_tokens)]
        while (n := len(self.of(text := "".join(f" {word}" for word in drawn)))) > n_tokens:
            if len(drawn) == 1:
                raise BenchmarkError(f"the model needs {n} tokens for one word, {n_tokens} were asked for")
            drawn = drawn[: max(1, min(len(drawn) - 1, len(drawn) * n_tokens // n))]
        return text + " a" * (n_tokens - n)


def fewest(requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int:
    """The fewest prompt tokens that a server could compute for these prompts and their replies, in this order.

    Whatever stood in an earlier prompt or reply need not be computed again, but for a prompt's last token, whose
    logits are needed. A reply's last token is sampled and never computed.
    """
    cached: dict[int, dict] = {}  # type: ignore[type-arg]
    n_computed = 0
    for prompt, reply in requests:
        at = cached
        n_cached = 0
        for token in prompt:
            if token not in at:
                break
            at = at[token]
            n_cached += 1
        n_computed += max(len(prompt) - n_cached, 1)
        at = cached
        for token in (*prompt, *reply[:-1]):
            at = at.setdefault(token, {})
    return n_computed
