"""First impression: the embedded model through the openai client, the examples and the terminal."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from bench.demo.checker import is_grammatical, sentences
from tests.live import Server

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def client(demo: Server) -> OpenAI:
    return OpenAI(base_url=f"{demo.url}/v1", api_key="none")


def ask(client: OpenAI, messages: list[dict[str, str]]) -> tuple[str, int, int, int]:
    """The streamed answer, and the prompt, cached and generated tokens."""
    stream = client.chat.completions.create(
        model="demo", messages=messages, stream=True, temperature=0, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    assert usage is not None
    return text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens


def test_a_streamed_chat_is_english_and_the_second_turn_reuses_the_first(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello! My cat is called Milo."}]
    answer, n_prompt, _, n_generated = ask(client, messages)
    assert all(is_grammatical(sentence) for sentence in sentences(answer)), answer
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "What is my cat called?"}]
    recalled, _, n_cached, _ = ask(client, messages)
    # The end-of-turn token was sampled and never decoded.
    assert n_cached == n_prompt + n_generated - 1
    assert "Milo" in recalled


@pytest.mark.slow
def test_at_its_own_defaults_the_embedded_model_tells_a_name_right_100_times_of_100(demo: Server) -> None:
    """llama-server's temperature of 0.8 gets up to one in ten wrong."""
    assert demo.get("/props")["default_generation_settings"]["params"]["temperature"] == pytest.approx(0.2)

    def answer(messages: list[dict[str, str]]) -> str:
        text: str = demo.post("/v1/chat/completions", {"messages": messages})["choices"][0]["message"]["content"]
        return text

    told = [{"role": "user", "content": "Hello! My name is Ada."}]

    def name(_: int) -> tuple[str, str]:
        noted = answer(told)
        return noted, answer(
            [*told, {"role": "assistant", "content": noted}, {"role": "user", "content": "What is my name?"}]
        )

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(name, range(100))) == {("Okay. Your name is Ada.", "Your name is Ada.")}


def run(*command: str | Path, stdin: str = "") -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in command], input=stdin, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_openai_example(demo: Server) -> None:
    output = run(sys.executable, EXAMPLES / "openai_chat.py", demo.url)
    assert output.count("prompt tokens were cached]") == 3


@pytest.mark.slow
def test_the_agent_example(demo: Server) -> None:
    output = run(sys.executable, EXAMPLES / "agent.py", demo.url)
    assert output.count("\n> ") == 5
    assert output.count(" computed]") >= 5


def test_the_curl_example(demo: Server) -> None:
    output = run(EXAMPLES / "curl.sh", demo.url)
    assert "data: [DONE]" in output
    assert '"cached_tokens":0' in output
    assert '"is_processing":false' in output


def test_the_terminal_chat(demo: Server) -> None:
    output = run(
        *(sys.executable, "-m", "llamaslot.cli.main", "chat", "--url", demo.url, "--temp", "0"),
        stdin="My dog is called Bruno.\nWhat is my dog called?\n",
    )
    assert "Bruno" in output
