"""Conversion of Anthropic's system prompt and messages to a conversation in OpenAI's form.

Tool results become separate messages, in order with the texts of their message. Consecutive messages of the same
role become one turn, as Anthropic defines it; many chat templates refuse them otherwise. Text blocks stay parts of
a message, except in replies of the assistant: the server splits those around calls, so joining them restores what
was generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from llamaslot.protocol.anthropic.blocks import content_blocks, unsupported_block
from llamaslot.text.conversation import Message
from llamaslot.text.json_fields import object_of, refuse_field, text_of

Blocks: TypeAlias = list[tuple[str, Mapping[str, Any], str]]


def conversation_of(system: str | Sequence[Any] | None, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages of a conversation.

    Raises `InvalidRequestError` for malformed messages, and `NotSupportedError` for blocks that are neither text,
    tool use nor thinking.
    """
    conversation: list[Message] = []
    if system is not None:
        _add(conversation, "system", _texts(content_blocks(system, "system")))
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        blocks = content_blocks(message.get("content"), f"{where}.content")
        match role:
            case "user":
                _add_user(conversation, blocks)
            case "assistant":
                _add_assistant(conversation, blocks)
            case "system":
                _add(conversation, "system", _texts(blocks))
            case _:
                refuse_field(f"{where}.role", "must be one of user, assistant, system")
    for message in conversation:
        if message["role"] == "assistant":
            _join_texts(message)
    if all(message["role"] == "system" for message in conversation):
        # llama-server accepts such requests. Most chat templates need a user message.
        conversation.append({"role": "user", "content": ""})
    return conversation


def _add_user(conversation: list[Message], blocks: Blocks) -> None:
    texts: list[str] = []
    for kind, block, where in blocks:
        if kind != "tool_result":
            texts += _texts([(kind, block, where)])
            continue
        if texts:
            _add(conversation, "user", texts)
            texts = []
        call_id = text_of(block, "tool_use_id", where)
        conversation.append({"role": "tool", "tool_call_id": call_id, "content": _result(block, where)})
    if texts or not blocks:
        _add(conversation, "user", texts)


def _result(block: Mapping[str, Any], where: str) -> str | list[Message]:
    content = block.get("content")
    texts: list[str] = []
    for kind, part, place in [] if content is None else content_blocks(content, f"{where}.content"):
        if kind == "tool_reference":
            # Result of a search for tools. All tools are in the prompt already.
            texts.append(f"The tool {text_of(part, 'tool_name', place)} is available.")
        else:
            texts += _texts([(kind, part, place)])
    if not any(texts):
        return "The tool failed." if block.get("is_error") is True else ""
    return _content(texts)


def _add_assistant(conversation: list[Message], blocks: Blocks) -> None:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Message] = []
    for kind, block, where in blocks:
        match kind:
            case "text":
                texts.append(text_of(block, "text", where))
            case "thinking":
                reasoning.append(text_of(block, "thinking", where))
            case "redacted_thinking":
                pass  # Only Anthropic can read it.
            case "tool_use":
                calls.append(_call(block, where))
            case _:
                raise unsupported_block(kind, where)
    if not any((*texts, *reasoning, calls)):
        return
    if not conversation or conversation[-1]["role"] != "assistant":
        conversation.append({"role": "assistant", "content": [], "reasoning_content": [], "tool_calls": []})
    turn = conversation[-1]
    turn["content"].append("".join(texts))
    turn["reasoning_content"].append("".join(reasoning))
    turn["tool_calls"] += calls


def _join_texts(turn: Message) -> None:
    """Join the texts and the reasoning of a turn. Done once, because a turn may come in 100,000 messages."""
    for key in ("content", "reasoning_content"):
        turn[key] = "\n".join(filter(None, turn[key]))
    for key in ("reasoning_content", "tool_calls"):
        if not turn[key]:
            del turn[key]


def _call(block: Mapping[str, Any], where: str) -> Message:
    arguments = json.dumps(object_of(block, "input", where), ensure_ascii=False)
    return {
        "id": text_of(block, "id", where),
        "type": "function",
        "function": {"name": text_of(block, "name", where), "arguments": arguments},
    }


def _add(conversation: list[Message], role: str, texts: Sequence[str]) -> None:
    """Add texts to the last message if it has the same role, else as a new message."""
    if conversation and conversation[-1]["role"] == role:
        last = conversation[-1]
        if texts and isinstance(last["content"], str):
            last["content"] = _parts([last["content"]])
        if texts:
            last["content"] += _parts(texts)
    else:
        conversation.append({"role": role, "content": _content(texts)})


def _content(texts: Sequence[str]) -> str | list[Message]:
    return "".join(texts) if len(texts) < 2 else _parts(texts)


def _parts(texts: Sequence[str]) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def _texts(blocks: Blocks) -> list[str]:
    for kind, _, where in blocks:
        if kind != "text":
            raise unsupported_block(kind, where)
    return [text_of(block, "text", where) for _, block, where in blocks]
