"""Prompt workers of tests."""

from __future__ import annotations

from llamaslot.base.model import ModelInfo
from llamaslot.prompts.prompt_worker import PromptThread
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol.request_reader import RequestReader
from llamaslot.text.template import ChatTemplate
from tests.fake_backend import FakeBackend

PLAIN_TEMPLATE = "{{ messages }}"


def prompt_thread(
    tokenizer: Tokenizer, info: ModelInfo | None = None, template: str = PLAIN_TEMPLATE
) -> PromptThread:
    """A prompt worker in this process, by default for the fake model."""
    info = info or FakeBackend().info
    parsed = ChatTemplate(template, bos_token=info.bos_token, eos_token=info.eos_token)
    return PromptThread(tokenizer, RequestReader(info, parsed, tokenizer))
