"""Each template by name writes, character for character, what llama.cpp's own implementation of it writes."""

from __future__ import annotations

import ctypes
from functools import cache

import llama_cpp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamaslot.base.errors import ConfigError
from llamaslot.text.builtin_templates import builtin_names, resolve
from llamaslot.text.template import ChatTemplate
from tests.text.rendering import rendered

CONTENT = st.text("ab é<\n {%}", max_size=12)


def llama_cpp_prompt(name: str, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    chat = (llama_cpp.llama_chat_message * len(messages))()
    for entry, message in zip(chat, messages, strict=True):
        entry.role, entry.content = message["role"].encode(), message["content"].encode()
    buffer = ctypes.create_string_buffer(16_384)
    length = llama_cpp.llama_chat_apply_template(
        name.encode(), chat, len(messages), add_generation_prompt, buffer, len(buffer)
    )
    assert 0 <= length <= len(buffer)
    return buffer.raw[:length].decode()


@cache
def compiled(name: str) -> ChatTemplate:
    """The template, compiled once for all examples."""
    return ChatTemplate(resolve(name), bos_token="<s>", eos_token="</s>")


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, str]]:
    """With or without a system message, ending with the user or the assistant."""
    first = [{"role": "system", "content": draw(CONTENT)}] if draw(st.booleans()) else []
    texts = draw(st.lists(CONTENT, min_size=1, max_size=5))
    return [*first, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))]


@pytest.mark.slow
@pytest.mark.parametrize("name", builtin_names())
@settings(max_examples=25)
@given(messages=conversations())
@example(messages=[{"role": "user", "content": " <b>{{ bos_token }}\n"}])
@example(messages=[{"role": "system", "content": " be\nkind "}, {"role": "user", "content": "\nhi "}])
def test_the_prompt_is_llama_cpps(name: str, messages: list[dict[str, str]]) -> None:
    template = compiled(name)
    for add_generation_prompt in {False, messages[-1]["role"] == "user"}:
        prompt = rendered(template, messages, add_generation_prompt=add_generation_prompt)

        assert prompt == llama_cpp_prompt(name, messages, add_generation_prompt=add_generation_prompt)


def test_nothing_means_chatml() -> None:
    assert resolve("") == resolve("chatml") != ""


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "{%- for m in messages %}x{% endfor %}", "plain text"]
)
def test_a_jinja_source_stays_as_it_is(source: str) -> None:
    assert resolve(source) is source


def test_a_wrong_name_lists_the_known_ones_nearest_first() -> None:
    with pytest.raises(ConfigError, match="there is no chat template 'lama3'; use one of llama3, ") as caught:
        resolve("lama3")

    assert caught.value.param == "--chat-template"
    assert all(name in caught.value.message for name in builtin_names())
