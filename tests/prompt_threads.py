"""Prompt workers of tests, and jobs for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from llamaslot.api.context import ApiSettings
from llamaslot.base.commands import (
    AnswerBody,
    BodyKind,
    ParseBody,
    Submit,
    TextPart,
)
from llamaslot.base.generation.request_context import RequestContext
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.model import ModelInfo
from llamaslot.prompts.prompt_jobs import TokenizePrompt
from llamaslot.prompts.prompt_worker import PromptThreads
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol.replies.restoring import ReplyRestorer
from llamaslot.protocol.request_reader import RequestReader
from llamaslot.text.template import ChatTemplate
from tests.fake_backend import FakeBackend, FakeVocab

PLAIN_TEMPLATE = "{{ messages }}"
CONTEXT = RequestContext("r", ApiSettings().request_limits(10), Sampling())


def tokenize(request_id: str, text: str = "hello", **fields: str) -> TokenizePrompt:
    """Tokenize the prompt of a request."""
    return TokenizePrompt(Submit(request_id, (TextPart(text),), **fields))  # type: ignore[arg-type]


def parse(kind: BodyKind, body: dict[str, Any]) -> ParseBody:
    """Parse the body of a request for completions."""
    return ParseBody(kind, msgspec.json.encode(body), CONTEXT)


def long_query(text: str = "") -> AnswerBody:
    """Tokenize a text that is so long that prompts must not wait for it."""
    return AnswerBody("tokenize", msgspec.json.encode({"content": text + " word" * 10_000}))


def prompt_thread(
    tokenizer: Tokenizer,
    info: ModelInfo | None = None,
    template: str = PLAIN_TEMPLATE,
    grammars: Sequence[str] = (),
    *,
    restoring: FakeVocab | None = None,
) -> PromptThreads:
    """A prompt worker in this process, by default for the fake model; `grammars` as of `--grammar-file`.

    Messages of chats are restored for the vocabulary `restoring`.
    """
    info = info or FakeBackend().info
    parsed = ChatTemplate(template, bos_token=info.bos_token, eos_token=info.eos_token, adds_bos=info.adds_bos)
    named = [(f"grammar {i}", grammar) for i, grammar in enumerate(grammars)]
    restorer = ReplyRestorer(tokenizer.replies, restoring) if restoring is not None else None
    vocab = restoring or FakeVocab()
    reader = RequestReader(
        info, parsed, tokenizer, vocab.named_tokens, named, tags=vocab.added_tags, restorer=restorer
    )
    return PromptThreads(tokenizer, reader)
