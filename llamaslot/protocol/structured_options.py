"""Fields of a request that constrain its reply.

These are OpenAI's `response_format`, llama-server's `json_schema` and `grammar`, vLLM's `structured_outputs`, and
vLLM's older `guided_...` fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from llamaslot.protocol.unsupported import UnsupportedOptions

Choices = Annotated[list[str], Meta(min_length=1)]


class JsonSchemaFormat(msgspec.Struct):
    """OpenAI's `response_format.json_schema`. Replies follow the schema whether or not it is `strict`."""

    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """OpenAI's `response_format`, and llama-server's `schema` with `json_object`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None
    schema: Any = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of the first five."""

    json: Any = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class StructuredOptions(UnsupportedOptions, kw_only=True):
    """Fields that constrain the reply; at most one may be present."""

    response_format: ResponseFormat | None = None
    json_schema: Any = None
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
