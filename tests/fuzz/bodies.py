"""Mutated requests: valid bodies of every endpoint, with fields replaced, added, removed, nested or repeated.

Half of the new values fit the schema of their field in `/openapi.json`, so that they get past the first checks.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from llamaslot.api.routes import ROUTES, document
from tests.fuzz.images import WITH_IMAGES, is_image, other_image

MAX_TOKENS = 16
STORY = "Once upon a time there was a cat"
_SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3, "stop": ["zz"], "n_predict": 4}
_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are a cat."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "user", "content": "Go on"},
    ],
    "chat_template_kwargs": {"enable_thinking": False},
    "max_tokens": 4,
    "stream_options": {"include_usage": True},
}  # fmt: skip
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "?", "parameters": {"type": "object", "properties": {"a": {}}}},
}
_SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["a"], "$defs": {"x": {"enum": [1, "b", None]}},
    "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                   "c": {"type": "string", "pattern": "^[a-c]+$"}, "d": {"anyOf": [{"type": "null"}, {}]}},
}  # fmt: skip
_MESSAGES: dict[str, Any] = {
    "system": [{"type": "text", "text": "You are a cat.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}], "is_error": 1},
            {"type": "text", "text": "Go on"}]},
    ],
    "tools": [{"name": "f", "description": "?", "input_schema": {"type": "object", "properties": {"a": {}}}}],
}  # fmt: skip
_RESPONSES: dict[str, Any] = {
    "instructions": "You are a cat.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "done"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
              {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "start: /x/"}},
              {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
              {"type": "web_search"}],
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": [1]}}, "verbosity": "low"},
    "max_output_tokens": 4, "metadata": {"a": "b"}, "truncation": "disabled",
}  # fmt: skip
_OLLAMA: dict[str, Any] = {
    "model": "any:latest",
    "messages": [
        {"role": "system", "content": "You are a cat."},
        {"role": "user", "content": "Hi", "images": []},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [
            {"function": {"index": 0, "name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "1", "tool_name": "f"},
    ],
    "tools": [_TOOL],
    "options": {"num_predict": 4, "temperature": 0.7, "top_k": 5, "stop": ["zz"], "num_ctx": 4096},
    "keep_alive": "5m", "think": False,
}  # fmt: skip
VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        _CHAT,
        {"messages": [{"role": "user", "content": STORY}], **_SAMPLED},
        {"messages": _CHAT["messages"][:2], "tools": [_TOOL], "tool_choice": "required", "max_tokens": 8,
         "parallel_tool_calls": False, "verbose": True, "reasoning_format": "none", "reasoning_effort": "low"},
        {"messages": _CHAT["messages"][:2], "tools": [{**_TOOL, "function": {**_TOOL["function"], "strict": True}}],
         "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}, "max_tokens": 8},
    ],
    "/v1/messages": [
        {**_MESSAGES, "max_tokens": 4, "stop_sequences": ["zz"], "thinking": {"type": "disabled"}, "top_k": 5},
        {**_MESSAGES, "max_tokens": 8, "tool_choice": {"type": "tool", "name": "f"}, "metadata": {"user_id": "me"},
         "output_config": {"effort": "low"}, "context_management": {"edits": [
             {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]}},
        {"messages": _MESSAGES["messages"][:1], "max_tokens": 8, "output_config": {
            "format": {"type": "json_schema", "schema": {"type": "object"}}}},
    ],
    "/v1/messages/count_tokens": [_MESSAGES],
    "/api/chat": [
        _OLLAMA,
        {"messages": _OLLAMA["messages"][:2], "format": _SCHEMA, "stream": False, "options": {"num_predict": 8}},
        {"messages": [], "keep_alive": 0},
    ],
    "/api/generate": [
        {"model": "any", "prompt": STORY, "system": "Be brief.", "options": {"num_predict": 2}, "context": [1, 2]},
        {"prompt": STORY, "raw": True, "format": "json", "logprobs": True, "top_logprobs": 2, "stream": False},
        {"prompt": STORY, "suffix": "The end.", "think": "low", "options": {"seed": 1, "num_predict": 2}},
        {"model": "any", "prompt": "", "template": ""},
    ],
    "/api/show": [{"model": "any", "verbose": True}],
    "/models/load": [{"model": "any"}],
    "/models/unload": [{"model": "any"}],
    "/v1/chat/completions/input_tokens": [_CHAT],
    "/v1/responses": [
        _RESPONSES,
        {"input": STORY, "max_output_tokens": 2, "stream": True, "store": False},
        {"input": [{"type": "item_reference", "id": "msg_1"}], "previous_response_id": "resp_1"},
    ],
    "/v1/responses/input_tokens": [_RESPONSES],
    "/apply-template": [_CHAT, {"messages": _CHAT["messages"][:2], "tools": [_TOOL]}],
    "/v1/completions": [
        {"prompt": STORY, **_SAMPLED, "logit_bias": {"5": -3, "cat": False}},
        {"prompt": ["a", "b"], "max_tokens": 2, "n": 2},
        {"prompt": [1, 2, "three"], "max_tokens": 2, "echo": False, "logprobs": None},
        {"prompt": ["ab", [1, 2]], "max_tokens": 1, "echo": True, "logprobs": 2, "stream": True},
    ],
    "/completion": [
        {"prompt": STORY, **_SAMPLED, "repeat_penalty": 1.1, "repeat_last_n": -1, "presence_penalty": 0.1},
        {"prompt": {"prompt_string": "a"}, "n_predict": 2, "session_id": "s", "cache_salt": "x", "id_slot": 0},
        {"prompt": ["a", [1, 2]], "n_predict": 2, "response_fields": ["content", "generation_settings/seed"],
         "return_tokens": True, "timings_per_token": True, "samplers": "edkypmxt", "n_probs": 3,
         "dry_multiplier": 1, "dry_sequence_breakers": ["a", "cat"], "mirostat": 2, "return_progress": True,
         "logit_bias": [["a", 1], [5, False]]},
        {"prompt": STORY, "n_predict": 8, "json_schema": _SCHEMA},
        {"prompt": STORY, "n_predict": 8, "grammar": 'root ::= "a" [b-d]{1,3} | <[5]> root'},
        {"prompt": STORY, "n_predict": 8, "structured_outputs": {"regex": "a(b|c)*"}},
        {"prompt": STORY, "n_predict": 8, "guided_choice": ["one", "two"]},
        {"prompt": STORY, "n_predict": 2, "lora": [{"id": 0, "scale": 0.5}], "n_keep": -1, "n_discard": 2},
    ],
    "/infill": [
        {"input_prefix": "def f(", "input_suffix": ["):", 5], "prompt": "a", **_SAMPLED,
         "input_extra": [{"text": "x = 1", "filename": "a.py"}]},
        {"input_prefix": "", "input_suffix": STORY, "n_predict": 2, "n": 2, "stream": True, "n_probs": 2},
    ],
    "/v1/embeddings": [
        {"input": STORY, "encoding_format": "base64", "dimensions": 3, "embd_normalize": 1, "cache_salt": "x"},
        {"input": ["a", [1, 2], [3, "b"], {"prompt_string": "c"}, {"content": [{"type": "text", "text": "d"}]}]},
    ],
    "/embedding": [{"content": ["a", "b"], "cache_prompt": False}, {"input": [1, 2, "c"]}],
    "/api/embed": [
        {"model": "x", "input": ["a", STORY], "truncate": False, "dimensions": 3, "options": {"num_ctx": 9}},
        {"input": STORY, "keep_alive": "5m", "options": {"cache_prompt": False, "cache_salt": "x"}},
    ],
    "/api/embeddings": [{"model": "x", "prompt": STORY, "keep_alive": 5}],
    "/rerank": [
        {"query": STORY, "documents": ["a", "b"], "top_n": 1, "model": "x"},
        {"query": STORY, "texts": ["a", "b"], "return_text": True},
    ],
    "/tokenize": [{"content": STORY, "add_special": True, "with_pieces": True}, {"content": ["a", 5, "b"]}],
    "/detokenize": [{"tokens": [1, 2, 3, 4]}],
    "/lora-adapters": [[{"id": 0, "scale": 0.5}], []],
    "/slots/{id_slot}": [{"filename": "a.bin"}],
    "/sessions/{session_id:.+}": [{"cache_salt": "x"}],
    "/cache/clear": [{}],
    "/cache/probe": [{"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hello"}]}, _CHAT],
    "/cache/warm": [{"prompt": "Hello", "pin": True}, {"messages": [], "system": "Hi"}, {"input": "Hi"}, _CHAT],
    "/v1/responses/{response_id}": [{}],
    "/v1/responses/{response_id}/cancel": [{}],
    "/v1/responses/compact": [_RESPONSES],
    "/v1/chat/completions/{completion_id}": [{"metadata": {"a": "b"}}],
    "/v1/responses/{response_id}/input_items": [{}],
}  # fmt: skip
"""Valid bodies by the path in the route table, one path for each handler."""
_ALL = {pattern: [*bodies, *WITH_IMAGES.get(pattern, ())] for pattern, bodies in VALID.items()}
_EDGES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 127, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**400, 0.5, 2.0, -0.0,
    1e-300, 1e308, float("nan"), float("inf"), "", " ", "a", "0", "-1", "true", "\0", "\ud800", "é€😀",
    "<|im_end|>", "<|endoftext|>", "{{ messages }}", "../../etc/passwd", "a" * 5000, "\n" * 300, "stop", [], [[]],
    [None], [0], ["a"], {}, {"": ""}, {"type": "text"}, {"role": "user"}, [1.5], [2**31], [[1, 2], "a"],
]  # fmt: skip


class Request(NamedTuple):
    """A request with any bytes as its body."""

    method: str
    pattern: str
    """Its path in the route table."""
    path: str
    body: bytes

    @property
    def picks_fields(self) -> bool:
        """True if the reply may have chosen fields only."""
        return b"response_fields" in self.body or b"\\u" in self.body


class BodyFuzzer:
    """An endless source of requests, the same for the same seed.

    It mutates `bodies`, which are valid ones by the path in the route table.
    """

    def __init__(self, seed: int, bodies: Mapping[str, Sequence[dict[str, Any]]] = _ALL) -> None:
        self._random = random.Random(seed)
        self._bodies = bodies
        described = document(ROUTES)
        self._schemas = described["components"]["schemas"]
        self._methods: dict[str, list[str]] = {pattern: [] for pattern in VALID}
        self._body_schemas: dict[str, Any] = {}
        for method, pattern in ((route.method, route.path) for route in ROUTES):
            if pattern in VALID:
                self._methods[pattern].append(method)
                operation = described["paths"][pattern.replace(":.+", "")][method.lower()]
                if "requestBody" in operation:
                    content = operation["requestBody"]["content"]["application/json"]
                    self._body_schemas[pattern] = content["schema"]

    def requests(self, n: int) -> Iterator[Request]:
        """Yield so many requests."""
        patterns = list(self._bodies)
        for _ in range(n):
            pattern = self._random.choice(patterns)
            body = copy.deepcopy(self._random.choice(self._bodies[pattern]))
            for _ in range(self._random.choice((0, 1, 1, 1, 2, 4))):
                body = self._mutated(body, self._body_schemas.get(pattern, {}))
            _bound(body)
            method = self._random.choice(self._methods[pattern])
            yield Request(method, pattern, self._path(pattern), self._encoded(body))

    def _path(self, pattern: str) -> str:
        chance = self._random
        slot = chance.choice(("0", "0", "1", "3", "4", "99999999999999", "-1", "a", "0x1", "%00"))
        action = chance.choice(("save", "restore", "erase", "", "Save", "save&action=erase"))
        session = chance.choice(("s", "none", "%ff", "a/b", "..", quote("é" * 300)))
        path = pattern.replace("{id_slot}", f"{slot}?action={action}").replace("{session_id:.+}", session)
        path = path.replace("{response_id}", chance.choice(("resp_1", "%00", "..", "%ff", quote("é" * 300))))
        if path.endswith("/input_items"):
            path += chance.choice(("", "?limit=0", "?limit=5&order=asc", "?order=up", "?after=%ff&limit=1e3"))
        return path

    def _mutated(self, body: Any, schema: Any) -> Any:
        chance = self._random
        if not isinstance(body, dict) or chance.random() < 0.03:
            return self._value({})
        if (images := [each for each in _places(body) if is_image(each[0][each[1]])]) and chance.random() < 0.6:
            parent, key = chance.choice(images)
            parent[key] = other_image(chance)
            return body
        properties = self._resolved(schema).get("properties", {})
        kind = chance.randrange(6)
        if kind <= 1 and properties:
            name = chance.choice(list(properties))
            body[name] = self._value(properties[name])
        elif kind == 2 and body:
            del body[chance.choice(list(body))]
        elif kind == 3:
            body[chance.choice(("", "model", "unknown", "stream", "\ud800"))] = self._value({})
        else:
            self._change_within(body)
        return body

    def _change_within(self, value: Any) -> None:
        """Replace, repeat, remove or wrap something at any depth."""
        chance = self._random
        places = [place for place in _places(value) if isinstance(place[0], list | dict)]
        if not places:
            return
        parent, key = chance.choice(places)
        kind = chance.randrange(5)
        if kind == 0:
            parent[key] = [parent[key]]
        elif kind == 1 and isinstance(parent, list):
            parent[key:key] = [copy.deepcopy(parent[key])] * chance.choice((1, 3, 40))
        elif kind == 2:
            del parent[key]
        elif kind == 3 and isinstance(parent[key], str):
            parent[key] = self._text(parent[key])
        else:
            parent[key] = self._value({})

    def _value(self, schema: Any) -> Any:
        """A value that fits the schema, or one that fits few."""
        if self._random.random() < 0.5 or not schema:
            return copy.deepcopy(self._random.choice(_EDGES))
        return self._fitting(schema, depth=0)

    def _fitting(self, schema: Any, depth: int) -> Any:
        chance, schema = self._random, self._resolved(schema)
        if "anyOf" in schema:
            return self._fitting(chance.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return chance.choice(schema["enum"])
        kind = schema.get("type")
        if kind in ("array", "object") and depth < 4:
            return self._fitting_container(schema, depth)
        if kind in ("integer", "number"):
            low, high = schema.get("minimum", -(10**9)), schema.get("maximum", 10**9)
            usual = max(low, min(high, chance.randint(-2, 9) if kind == "integer" else chance.uniform(0, 2)))
            return chance.choice((low, high, usual, usual))
        simple = {"null": None, "boolean": chance.random() < 0.5, "string": self._fitting_text(schema)}
        return simple[kind] if kind in simple else copy.deepcopy(chance.choice(_EDGES))

    def _fitting_text(self, schema: Any) -> str:
        text = self._text(STORY[: self._random.randrange(20)])
        return text[: schema.get("maxLength", len(text))].ljust(schema.get("minLength", 0), "x")

    def _fitting_container(self, schema: Any, depth: int) -> Any:
        chance = self._random
        if schema["type"] == "array":
            items = schema.get("prefixItems") or [schema.get("items", {})] * chance.choice((0, 1, 2, 7))
            return [self._fitting(item, depth + 1) for item in items]
        properties, required = schema.get("properties", {}), schema.get("required", ())
        names = [name for name in properties if name in required or chance.random() < 0.3]
        return {name: self._fitting(properties[name], depth + 1) for name in names}

    def _resolved(self, schema: Any) -> Any:
        return self._schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    def _text(self, text: str) -> str:
        chance = self._random
        at = chance.randint(0, len(text))
        return (
            text[:at] + chance.choice(("", "<|im_end|>", "\0", "😀", "\u0300" * 50, "{%", "a" * 3000)) + text[at:]
        )

    def _encoded(self, body: Any) -> bytes:
        chance = self._random
        data = bytearray(json.dumps(body, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass"))
        if chance.random() < 0.85:
            return bytes(data)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data)) if data else 0
            match chance.randrange(5):
                case 0:
                    del data[at:]
                case 1:
                    data[at : at + 1] = bytes([chance.randrange(256)])
                case 2:
                    data[at:at] = data[: chance.randrange(1 + len(data))]
                case 3:
                    data[at:at] = chance.choice((b"[" * 2000, b"{}", b"\xff", b",", b'"', b"\\ud800"))
                case _:
                    del data[at : at + chance.randint(1, 9)]
        return bytes(data)


def _bound(body: Any) -> None:
    """Ask for few tokens where the body asks for as many as fit, so that a long reply is not taken for a hang."""
    for name in ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict"):
        if isinstance(body, dict) and isinstance(limit := body.get(name), int) and not 0 <= limit <= MAX_TOKENS:
            body[name] = MAX_TOKENS if -1 - (name == "num_predict") <= limit < 2**31 else limit
    if isinstance(body, dict):
        _bound(body.get("options"))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys or indices, at any depth."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _places(item)
