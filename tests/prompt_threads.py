"""Prompt workers of tests, and jobs for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from llamaslot.api.context import ApiSettings
from llamaslot.base.callers import Caller
from llamaslot.base.commands import (
    AnswerBody,
    BodyKind,
    GenerateParams,
    Needs,
    Prepare,
    PromptPart,
    TextPart,
)
from llamaslot.base.generation.request_context import ReplyOptions, RequestContext
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.model import ModelInfo
from llamaslot.prompts.prompt_worker import LocalPrompts, PromptThreads
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol.replies.restoring import ReplyRestorer
from llamaslot.protocol.request_reader import ReadBody, RequestReader
from llamaslot.protocol.text_requests import TextRequest
from llamaslot.text.template import ChatTemplate
from tests.fake_backend import FakeBackend, FakeVocab

PLAIN_TEMPLATE = "{{ messages }}"
CONTEXT = RequestContext("r", ApiSettings().request_limits(10), Sampling())


class PrepareText(Prepare, frozen=True, tag="prepare_text"):
    """A job whose body was read already, for tests that choose what only a body's reader sets otherwise."""

    requests: tuple[TextRequest, ...] = ()


class TextReader(RequestReader):
    """A reader that also takes `PrepareText`."""

    def read(self, job: Prepare) -> ReadBody | Needs:
        if isinstance(job, PrepareText):
            return ReadBody(job.requests, ReplyOptions())
        return super().read(job)


def text_request(
    name: str, parts: Sequence[PromptPart] | str, *, add_special: bool = True, **fields: Any
) -> TextRequest:
    """A request for a prompt; `fields` are those of `GenerateParams`."""
    prompt = (TextPart(parts),) if isinstance(parts, str) else tuple(parts)
    return TextRequest(GenerateParams(name, **fields), prompt, add_special)


def prepare_text(*requests: TextRequest) -> PrepareText:
    """Tokenize the prompts of a body, when it is the turn of its client."""
    params = requests[0].params
    context = msgspec.structs.replace(CONTEXT, request_id=params.request_id, caller=Caller(params.client, "here"))
    return PrepareText("native", b"{}", context, requests=requests)


def tokenize(request_id: str, text: str = "hello", **fields: Any) -> PrepareText:
    """Tokenize the prompt of a request."""
    return prepare_text(text_request(request_id, text, **fields))


def parse(kind: BodyKind, body: dict[str, Any], request_id: str = "r", client: str = "") -> Prepare:
    """Prepare the body of a request for completions."""
    context = msgspec.structs.replace(CONTEXT, request_id=request_id, caller=Caller(client))
    return Prepare(kind, msgspec.json.encode(body), context)


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
) -> LocalPrompts:
    """A prompt worker in this process, by default for the fake model; `grammars` as of `--grammar-file`.

    Messages of chats are restored for the vocabulary `restoring`.
    """
    info = info or FakeBackend().info
    parsed = ChatTemplate(template, bos_token=info.bos_token, eos_token=info.eos_token, adds_bos=info.adds_bos)
    named = [(f"grammar {i}", grammar) for i, grammar in enumerate(grammars)]
    restorer = ReplyRestorer(tokenizer.memory, restoring) if restoring is not None else None
    vocab = restoring or FakeVocab()
    reader = TextReader(
        info, parsed, tokenizer, vocab.named_tokens, named, tags=vocab.added_tags, restorer=restorer
    )
    return LocalPrompts(PromptThreads(tokenizer, reader))
