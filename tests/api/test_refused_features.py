"""Features of the APIs that this server does not have: each is refused by its field's name, in the API's form."""

from __future__ import annotations

from typing import Any

import pytest

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = {"role": "user", "content": "Hello"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKED = {"role": "assistant", "tool_calls": [CALL]}
ITEM = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "f", "input": {}}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": ""}
TOOL = {"name": "a", "input_schema": {"type": "object"}}


def of_chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [HELLO, ASKED, {"role": "tool", "tool_call_id": "call_1", "content": list(parts)}]}


def of_items(*items: dict[str, Any]) -> dict[str, Any]:
    return {"input": [HELLO, *items]}


def of_blocks(*blocks: dict[str, Any]) -> dict[str, Any]:
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": list(blocks)}
    return {"messages": [HELLO, USE, {"role": "user", "content": [result]}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].image_url.url"),
        (CHAT, of_chat({"type": "text", "text": "See:"}, IMAGE), "messages[2].content[1].image_url.url"),
        (CHAT, of_chat({"type": "input_audio", "input_audio": {}}), "messages[2].content[0]"),
        (CHAT, of_chat({"type": "file", "file": {"file_id": "a"}}), "messages[2].content[0]"),
        (CHAT, {"messages": [HELLO], "tools": [{"type": "tool_search"}]}, "tools[0]"),
        (CHAT, {"messages": [HELLO], "tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
        (CHAT, {"messages": [HELLO, {**ASKED, "tool_calls": [{"type": "custom"}]}]}, "messages[1].tool_calls[0]"),
        (CHAT, {"messages": [HELLO], "modalities": ["text", "audio"]}, "modalities"),
        (RESPONSES, of_items({"role": "user", "content": [{"type": "input_image", "file_id": "a"}]}),
         "input[1].content[0].file_id"),
        (RESPONSES, of_items({"role": "system", "content": [{"type": "input_image", "image_url": "data:,"}]}),
         "input[1].content[0]"),
        (RESPONSES, of_items({"role": "user", "content": [{"type": "input_file"}]}), "input[1].content[0]"),
        *[
            (RESPONSES, of_items(ITEM, {"type": kind, "call_id": "call_1", "output": output}), "input[2].output[1]")
            for kind in ("function_call_output", "custom_tool_call_output")
            for output in ([{"type": "input_text", "text": "See:"}, {"type": "input_file", "file_id": "a"}],)
        ],
        *[
            (RESPONSES, of_items({"type": kind, "id": "a"}), "input[1]")
            for kind in (
                *("tool_search_call", "tool_search_output", "web_search_call", "file_search_call", "computer_call"),
                *("computer_call_output", "code_interpreter_call", "image_generation_call", "mcp_list_tools"),
                *("mcp_call", "mcp_approval_request", "mcp_approval_response", "shell_call", "shell_call_output"),
                *("apply_patch_call", "apply_patch_call_output"),
            )
        ],
        *[
            (RESPONSES, {"input": "Hello", "tools": [{"type": "web_search"}, {"type": kind}]}, "tools[1]")
            for kind in (
                *("tool_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer", "shell"),
                *("apply_patch", "programmatic_tool_calling", "none_such"),
            )
        ],
        *[
            (RESPONSES, {"input": "Hello", "tool_choice": {"type": kind}}, "tool_choice")
            for kind in ("web_search", "file_search", "tool_search", "mcp", "image_generation")
        ],
        (MESSAGES, of_blocks({"type": "text", "text": "See:"}, {"type": "image", "source": SOURCE}),
         "messages[2].content[0].content[1].source.data"),
        *[
            (MESSAGES, of_blocks({"type": kind}), "messages[2].content[0].content[0].type")
            for kind in ("document", "search_result", "tool_search_result")
        ],
        *[
            (MESSAGES, {"messages": [{"role": "user", "content": [{"type": kind}]}]}, "messages[0].content[0].type")
            for kind in ("document", "search_result", "container_upload", "audio")
        ],
        *[
            (MESSAGES, {"messages": [HELLO, {"role": "assistant", "content": [{"type": kind}]}]},
             "messages[1].content[0].type")
            for kind in (
                *("image", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "mcp_tool_use"),
                *("code_execution_tool_result", "mcp_tool_result", "tool_search_tool_result", "compaction"),
            )
        ],
        *[
            (MESSAGES, {"messages": [HELLO], "tools": [TOOL, {"type": kind, "name": "b"}]}, "tools[1].type")
            for kind in (
                *("tool_search_tool_regex_20251119", "tool_search_tool_bm25_20251119", "web_search_20250305"),
                *("bash_20250124", "text_editor_20250728", "computer_20250124", "code_execution_20250825"),
                *("memory_20250818", "web_fetch_20250910", "mcp_toolset"),
            )
        ],
    ],
    ids=str,
)  # fmt: skip
async def test_what_the_server_does_not_have_is_named(
    server: Any, path: str, body: dict[str, Any], param: str
) -> None:
    paths = {MESSAGES: [MESSAGES, f"{MESSAGES}/count_tokens"], RESPONSES: [RESPONSES, f"{RESPONSES}/input_tokens"]}
    for each in paths.get(path, [path, f"{path}/input_tokens", "/apply-template"]):
        status, reply = await server.post(each, {**body, "max_tokens": 4, "stream": True})
        assert status == 400, reply
        error = reply["error"]
        assert f"'{param}'" in error["message"]
        if path == MESSAGES:
            assert reply["type"] == "error"
            assert reply["request_id"]
            assert (set(error), error["type"]) == ({"type", "message"}, "invalid_request_error")
        else:
            assert (error["code"], error["param"]) == (400, param)
            assert error["type"] in {"invalid_request_error", "not_supported_error"}
