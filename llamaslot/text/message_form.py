"""The form in which a chat template reads contents, reasoning and the schemas of tools.

For messages it is found by rendering small conversations. Some templates write a schema as TypeScript or Python,
and fail on constructs that they do not know: a list of types, `anyOf`, a missing type. They get tools with simpler
schemas; the arguments of calls must still match the original schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from llamaslot.base.json_schemas import list_of, referenced
from llamaslot.text.conversation import Conversation, Message, joined

Attempt: TypeAlias = Callable[[Conversation, Sequence[Message]], str]
"""Renders a conversation with tools; returns an empty text if the template refuses them."""
_MAX_DEPTH = 12
_MAX_SCHEMAS = 4096
"""Most schemas that one tool may become, because references can multiply them."""
_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": float, "boolean": bool}
_CHOICES = ("anyOf", "oneOf")


class MessageForm:
    """The form that a template reads: content as text or parts, and reasoning in a field or a part."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._reads_thinking = self._takes_either = self._thinks_in_parts = False
        text = "a text to be found again"
        as_text = attempt([{"role": "user", "content": text}], ())
        as_parts = attempt([{"role": "user", "content": [{"type": "text", "text": text}]}], ())
        self._wants_parts = text not in as_text and text in as_parts
        self._takes_parts = self._wants_parts or (text in as_text and as_text == as_parts)
        self._text_roles: set[str] = set()

    def shaped(self, message: Message) -> Message:
        """Return the message in the form that the template reads."""
        content, reads_text = message["content"], message["role"] in self._text_roles
        if isinstance(content, str) and self._wants_parts and not reads_text:
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, str) and (reads_text or not self._takes_parts):
            content = joined(content, "\n")
        shaped = {**message, "content": content}
        if "reasoning_content" not in message:
            return shaped
        if self._reads_thinking:
            shaped["thinking"] = message["reasoning_content"]
            if "tool_calls" in message and self._takes_either:
                # The template accepts only one of them with a call, so both become the reasoning.
                both = message["reasoning_content"], joined(message["content"], "\n")
                shaped |= {"thinking": "\n\n".join(filter(None, both)), "content": ""}
        # Ministral 3 refuses such a part in a question, and prints the list in a result.
        elif self._thinks_in_parts and message["role"] in ("system", "assistant"):
            texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            shaped["content"] = [{"type": "thinking", "thinking": message["reasoning_content"]}, *texts]
        return shaped

    def probe_parts(self, conversation: Conversation, tool: Message) -> None:
        """Find out for which roles the template reads only text.

        GLM 4.6's and Mistral's templates print the parts of results as Python objects, and some templates leave out
        all parts but the first in other roles. Between texts of parts a template may write a space or newline, but
        nothing else.
        """
        texts = ["a part to be found", "and another one"]
        shaped = [self.shaped(message) for message in conversation]

        def attempt(index: int, content: str | list[Message]) -> str:
            changed = {**shaped[index], "content": content}
            return self._attempt([*shaped[:index], changed, *shaped[index + 1 :]], [tool])

        for index, message in enumerate(conversation if self._takes_parts else ()):
            as_parts = attempt(index, [{"type": "text", "text": text} for text in texts])
            as_texts = [attempt(index, separator.join(texts)) for separator in ("", " ", "\n")]
            if as_parts not in as_texts and all(text in as_texts[0] for text in texts):
                self._text_roles.add(message["role"])

    def probe_reasoning(self, calling: Conversation, tool: Message) -> None:
        """Find out where the template reads the reasoning before a call, or before a reply without calls.

        gpt-oss and LFM 2.5 read the field `thinking`, and gpt-oss refuses a call that also has text. Ministral 3
        reads a part of the content; a template that prints any kind of part does not count.
        """
        thought = "a thought to be found"
        question, call, result = map(self.shaped, calling)
        reply = self.shaped({"role": "assistant", "content": "!"})

        def is_read(**changes: Any) -> bool:
            """Return True if the thought is in the prompt of a call, or of a last reply, that has it."""
            called = self._attempt([question, call | changes, result], [tool])
            return thought in called or thought in self._attempt([question, reply | changes], ())

        is_thinking, is_reasoning = is_read(thinking=thought), is_read(reasoning_content=thought)
        self._reads_thinking = is_thinking and not is_reasoning
        beside = self.shaped({**calling[1], "content": "?"}) | {"thinking": thought}
        self._takes_either = self._reads_thinking and not self._attempt([question, beside, result], [tool])
        if not is_thinking and not is_reasoning:
            as_part, as_other = (
                is_read(content=[{"type": kind, "thinking": thought}]) for kind in ("thinking", "a_type_of_no_part")
            )
            self._thinks_in_parts = as_part and not as_other


def simpler_tools(tools: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the tools with simplified schemas, then without schemas."""
    functions = [tool["function"] for tool in tools]
    simplified = [{**each, "parameters": _Simplifier(each["parameters"]).parameters()} for each in functions]
    for changed in (simplified, map(_described, functions)):
        yield [{**tool, "function": function} for tool, function in zip(tools, changed, strict=True)]


def _described(function: Message) -> Message:
    """Return a function without parameters whose description includes their schema as JSON."""
    try:
        schema = json.dumps(function["parameters"], ensure_ascii=False)
    except RecursionError:
        schema = ""
    description = "\n".join(filter(None, [str(function["description"]), schema]))
    return {**function, "description": description, "parameters": {"type": "object", "properties": {}}}


class _Simplifier:
    """Reduces the schemas of one tool to a type, a description and the keywords of the type."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._n_left = _MAX_SCHEMAS

    def parameters(self) -> Message:
        """Return the simplified schema of the parameters, which are an object."""
        return {"properties": {}, **self._schema(self._root, 0), "type": "object"}

    def _schema(self, schema: Any, depth: int) -> Message:
        self._n_left -= 1
        found = self._merged(schema, depth)
        kind = _type_of(found)
        description = found.get("description") or found.get("title") or ""
        simple: Message = {"type": kind, "description": description if isinstance(description, str) else ""}
        values = [each for each in list_of(found.get("enum")) if each is not None]
        if values and kind not in ("object", "array"):
            simple["enum"] = values
        is_cut = depth >= _MAX_DEPTH or self._n_left <= 0
        if kind == "array":
            items = found.get("items", found.get("prefixItems"))
            items = items[0] if isinstance(items, list) and items else items
            simple["items"] = {"type": "string"} if is_cut or items is None else self._schema(items, depth + 1)
        if kind == "object":
            properties = found.get("properties")
            known = properties if isinstance(properties, Mapping) and not is_cut else {}
            simple["properties"] = {name: self._schema(each, depth + 1) for name, each in known.items()}
            simple["required"] = [each for each in list_of(found.get("required")) if each in known]
        return simple

    def _merged(self, schema: Any, depth: int) -> Mapping[str, Any]:
        """Merge a schema with its reference, its first alternative and its `allOf`."""
        found = schema if isinstance(schema, Mapping) else {}
        for _ in range(_MAX_DEPTH):
            parts = [referenced(found["$ref"], self._root)] if "$ref" in found else []
            parts += [_first_choice(found[key]) for key in _CHOICES if key in found]
            parts += list_of(found.get("allOf"))
            if not parts:
                break
            rest: dict[str, Any] = {
                key: value for key, value in found.items() if key not in ("$ref", "allOf", *_CHOICES)
            }
            for part in parts:
                for key, value in part.items() if isinstance(part, Mapping) else ():
                    if key == "properties" and isinstance(value, Mapping) and isinstance(rest.get(key), Mapping):
                        rest[key] = {**value, **rest[key]}
                    elif key not in rest:
                        rest[key] = value
            found = rest
        return found


def _first_choice(choices: Any) -> Any:
    """Return the first alternative that is not null."""
    for each in list_of(choices):
        if isinstance(each, Mapping) and each.get("type") != "null" and each.get("const", "") is not None:
            return each
    return {}


def _type_of(schema: Mapping[str, Any]) -> str:
    given = schema.get("type")
    for kind in given if isinstance(given, list) else [given]:
        if isinstance(kind, str) and kind in _TYPES:
            return kind
    if "properties" in schema or "additionalProperties" in schema:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    value, *_ = list_of(schema.get("enum")) or [schema.get("const")]
    return next((kind for kind, of_python in _TYPES.items() if type(value) is of_python), "string")
