"""langchain-openai and langchain-anthropic: the standard tests of langchain-tests.

Where a test needs words of a trained model, the server is led to them, or the end of strings is made likely. Tests
of images, documents, audio and recorded replies are skipped, and those of another model: the server has one.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.clients.conftest import Lead
from tests.clients.servers import Server, call

MAGIC = call("magic_function", input=3)
CUSTOMERS = ("你好啊集团", "こんにちは株式会社")
LED: dict[str, tuple[str, ...]] = {
    "test_tool_calling": (MAGIC, MAGIC),
    "test_tool_calling_async": (MAGIC, MAGIC),
    "test_tool_choice": (MAGIC, MAGIC),
    "test_bind_runnables_as_tools": (call("greeting_generator", answer_style="pirate"),),
    "test_tool_calling_with_no_arguments": (call("magic_function_no_args"),) * 2,
    "test_agent_loop": (call("get_weather", location="San Francisco, CA"), "It's sunny."),
    "test_unicode_tool_call_integration": tuple(
        call("unicode_customer", customer_name=name, description="技术") for name in CUSTOMERS
    ),
}
"""Replies to the requests of a test; other tests take any."""
QUOTES = {"logit_bias": [['"', 30]]}
"""Field that ends the strings of structured output soon."""
JOKE = {
    "type": "object",
    "properties": {"setup": {"type": "string"}, "punchline": {"type": "string"}},
    "required": ["setup", "punchline"],
}


class LlamaslotTests(ChatModelIntegrationTests):
    """The standard tests on a server."""

    url = ""
    extra: dict[str, Any]

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest, server: Server, lead: Lead) -> BaseChatModel:
        name = request.node.originalname
        self.url = (lead(*LED[name]) if name in LED else server).url
        self.extra = QUOTES if "structured" in name or "json" in name else {}
        if name == "test_json_mode":
            self.extra = {**QUOTES, "json_schema": JOKE}
        more = getattr(request, "param", None) or {}
        return self.chat_model_class(**{**self.standard_chat_model_params, **self.chat_model_params, **more})

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """Ask a question again."""
        model = self.chat_model_class(**{**self.standard_chat_model_params, **self.chat_model_params})
        model.invoke("Hello, who are you?")
        if not stream:
            return model.invoke("Hello, who are you?")
        chunks: list[AIMessageChunk] = list(model.stream("Hello, who are you?"))
        return sum(chunks[1:], chunks[0])


class TestChatCompletions(LlamaslotTests):
    """`/v1/chat/completions`."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        params = {"model": "demo", "base_url": f"{self.url}/v1", "api_key": "none", "max_tokens": 400}
        return {**params, "stream_usage": True, "extra_body": self.extra}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestResponses(TestChatCompletions):
    """`/v1/responses`."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestMessages(LlamaslotTests):
    """`/v1/messages`."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        params = {"model": "demo", "base_url": self.url, "api_key": "none", "max_tokens": 400}
        return {**params, "model_kwargs": {"extra_body": self.extra}}

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
