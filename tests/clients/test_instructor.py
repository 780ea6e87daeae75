"""instructor: models of pydantic as answers, by tools, by a schema and over Anthropic's API."""

from __future__ import annotations

from typing import Literal

import anthropic
import instructor
import pydantic
import pytest

from tests.clients.servers import Server

ASKED = {"model": "demo", "messages": [{"role": "user", "content": "Go left!"}], "max_tokens": 512}


class Move(pydantic.BaseModel):
    direction: Literal["left", "right"]
    steps: int = pydantic.Field(ge=1, le=9)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_a_model_of_pydantic(server: Server, mode: instructor.Mode) -> None:
    client = instructor.from_provider("openai/demo", base_url=f"{server.url}/v1", api_key="none", mode=mode)
    move = client.create(**ASKED, response_model=Move, max_retries=0)
    assert isinstance(move, Move)
    *_, last = client.create_partial(**ASKED, response_model=Move)
    assert last.direction in {"left", "right"}


def test_a_model_of_pydantic_over_anthropics_api(server: Server) -> None:
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=server.url, api_key="none"))
    assert isinstance(client.create(**ASKED, response_model=Move, max_retries=0), Move)
