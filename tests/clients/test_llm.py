"""llm: its command line with a model of `extra-openai-models.yaml`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import Lead
from tests.clients.servers import Server, call

MODELS = """
- model_id: local
  model_name: demo
  api_base: "{url}/v1"
  supports_tools: true
  supports_schema: true
- model_id: local-responses
  model_name: demo
  api_base: "{url}/v1"
  responses: true
"""
TOOLS = '''
def degrees_in(city: str) -> str:
    """Return the temperature."""
    return "21 degrees"
'''


def run(folder: Path, server: Server, *arguments: str) -> str:
    """Run `llm` and return its output."""
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(url=server.url))
    environ = {**os.environ, "LLM_USER_PATH": str(folder)}
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("model", ["local", "local-responses"])
@pytest.mark.parametrize("more", [(), ("--no-stream",)])
def test_a_prompt(tmp_path: Path, server: Server, model: str, more: tuple[str, ...]) -> None:
    assert "Ada" in run(tmp_path, server, "-m", model, "Hello! My name is Ada.", *more)


def test_a_conversation_goes_on(tmp_path: Path, server: Server) -> None:
    run(tmp_path, server, "-m", "local", "Hello! My name is Ada.")
    assert "Ada" in run(tmp_path, server, "-c", "What is my name?")


def test_a_schema(tmp_path: Path, server: Server) -> None:
    schema = json.dumps({"type": "object", "properties": {"steps": {"enum": [1, 2]}}, "required": ["steps"]})
    assert json.loads(run(tmp_path, server, "-m", "local", "Go!", "--schema", schema))["steps"] in {1, 2}


def test_a_tool(tmp_path: Path, lead: Lead) -> None:
    server = lead(call("degrees_in", city="Oslo"), "It is 21 degrees.")
    printed = run(tmp_path, server, "-m", "local", "How warm is it?", "--functions", TOOLS, "--td")
    assert "It is 21 degrees." in printed
