"""Prompts that are computed for later ones: whatever these continue with, they begin with the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.prompt_jobs import Prepare
from llamaslot.base.tokens import n_common
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol.request_reader import RequestReader
from llamaslot.text.builtin_templates import builtin_names, resolve
from llamaslot.text.template import ChatTemplate
from tests.fake_backend import FakeBackend, byte_trial
from tests.prompt_threads import CONTEXT, SETTINGS

OTHERS = sorted((Path(__file__).parents[1] / "text/templates").glob("*.jinja"))
SOURCES = [pytest.param(resolve(name), id=name) for name in builtin_names()]
SOURCES += [pytest.param(path.read_text(), id=path.stem) for path in OTHERS]
SYSTEM = {"role": "system", "content": "Answer in one word."}
QUESTION = {"role": "user", "content": "What is there?"}
ANSWER = {"role": "assistant", "content": "A wall.", "reasoning_content": "They want one word."}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "id": "call00001", "function": {"name": "look", "arguments": '{"far": true}'}}
TEXTS = ("Hello", "hello", " 12", "3", "\n\nx", "\tx", "éa", "...", "日本", "assistant", "<b>")


class Prompts:
    """The tokens of chats with a template, on the embedded model's vocabulary."""

    def __init__(self, vocab: LlamaVocab, source: str) -> None:
        info = msgspec.structs.replace(FakeBackend(n_ctx=2**14).info, n_vocab=vocab.n_tokens)
        self.tokenizer = Tokenizer(vocab, info.n_ctx_slot, min_match=0.8)
        self.vocab = vocab
        template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", control_tokens=vocab.special_tokens)
        named = vocab.named_tokens
        trial = byte_trial(info.control_tokens, info.n_vocab)
        self.reader = RequestReader(info, template, self.tokenizer, SETTINGS, trial, named_tokens=named)

    def tokens(self, *messages: dict[str, Any], warms: bool = False, **fields: Any) -> Any:
        body = msgspec.json.encode({"messages": messages, **fields})
        read = self.reader.read(Prepare("any", body, CONTEXT, purpose="warm" if warms else "inspect"))
        assert isinstance(read, tuple)
        ((request,), _) = read
        return self.tokenizer.tokenize_prompt(request).prompt.tokens


def check(
    prompts: Prompts, start: list[dict[str, Any]], following: list[list[dict[str, Any]]], **fields: Any
) -> Any:
    """What is warmed is the beginning of all that may follow, and nearly all that they have in common."""
    warmed = prompts.tokens(*start, warms=True, **fields)
    found = [prompts.tokens(*start, *each, **fields) for each in following]
    for each in found:
        assert each[: len(warmed)].tolist() == warmed.tolist()
    assert min(n_common(found[0], each) for each in found[1:]) <= len(warmed) + 2
    return warmed


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_warmed_is_the_beginning_of_all_later_prompts(vocab: LlamaVocab, source: str) -> None:
    prompts = Prompts(vocab, source)
    questions = [[{"role": "user", "content": text}] for text in TEXTS]
    warmed = check(prompts, [SYSTEM], questions)
    assert SYSTEM["content"] in vocab.detokenize(warmed.tolist()).decode()
    assert check(prompts, [SYSTEM], questions, tools=[TOOL]).size >= warmed.size
    # A whole prompt is computed as the request with that body has it.
    asked = prompts.tokens(SYSTEM, QUESTION)
    assert prompts.tokens(SYSTEM, QUESTION, warms=True).tolist() == asked.tolist()
    # An empty question stands for none.
    empty = prompts.tokens(SYSTEM, {"role": "user", "content": ""}, warms=True)
    assert empty.tolist() == warmed.tolist()
    # After a reply.
    after = check(prompts, [SYSTEM, QUESTION, ANSWER], questions)
    assert ANSWER["content"] in vocab.detokenize(after.tolist()).decode()


@pytest.mark.parametrize("source", [each for each in SOURCES if "calls" in str(each.id)])
def test_after_a_call_comes_its_result(vocab: LlamaVocab, source: str) -> None:
    prompts = Prompts(vocab, source)
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    results = [[{"role": "tool", "tool_call_id": CALL["id"], "content": text}] for text in TEXTS]
    warmed = check(prompts, [QUESTION, called], results, tools=[TOOL])
    assert "far" in vocab.detokenize(warmed.tolist()).decode()


def test_a_text_is_cut_before_the_token_that_may_change(vocab: LlamaVocab) -> None:
    prompts = Prompts(vocab, "{{ messages }}")

    def tokens(prompt: Any, *, warms: bool = False) -> list[int]:
        body = msgspec.json.encode({"prompt": prompt})
        read = prompts.reader.read(Prepare("any", body, CONTEXT, purpose="warm" if warms else "inspect"))
        assert isinstance(read, tuple)
        ((request,), _) = read
        return prompts.tokenizer.tokenize_prompt(request).prompt.tokens.tolist()

    for text in ("You are a help", "One two ", "a\n", "Once upon a time"):
        warmed = tokens(text, warms=True)
        assert warmed
        for more in ("", *TEXTS):
            later = tokens(text + more)
            assert later[: len(warmed)] == warmed
    assert tokens([5, 6, 7], warms=True) == tokens([5, 6, 7])
