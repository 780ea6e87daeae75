"""`llamaslot chat`: talk to a running server from the terminal.

A small OpenAI client. It writes answers to stdout and everything else to stderr, so that
`llamaslot chat < questions > answers` also works.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from llamaslot.base.errors import ConfigError
from llamaslot.cli.client import Client, add_access

with suppress(ImportError):
    import readline  # noqa: F401  # The import gives input() line editing.

_INTERRUPTED = 130
_HELP = "/clear starts a new conversation, /system TEXT sets the system prompt, /exit or Ctrl-D ends"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llamaslot chat`."""
    add_access(parser)
    parser.add_argument("--url", dest="named_url", metavar="URL", help="the same as URL")
    parser.add_argument("-m", "--model", metavar="NAME", help="one of the models of a server that has several")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    parser.add_argument("--temp", type=float, metavar="X", help="the temperature (default: the server's)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="at most N tokens per answer")


def run(args: argparse.Namespace) -> int:
    """Chat until /exit or the end of the input; each line of stdin is a message.

    Raises ConfigError if the server fails; on a terminal, only before the first message.
    """
    options = {"model": args.model, "temperature": args.temp, "max_tokens": args.max_tokens}
    options = {key: value for key, value in options.items() if value is not None}
    url = args.named_url or args.url
    server = Server(url, args.api_key, args.cacert, options)
    chat = Chat(server, args.system, Console(stderr=True, highlight=False, markup=False, emoji=False))
    interactive = sys.stdin.isatty()
    model = server.model()
    if interactive:
        chat.notes.print(f"{model} at {url}. {_HELP}; Ctrl-C stops an answer.", style="dim")
    try:
        for line in _typed_lines() if interactive else sys.stdin:
            try:
                if not chat.take(line.strip()):
                    break
            except ConfigError as error:
                if not interactive:
                    raise
                chat.notes.print(f"error: {error.message}", style="red")
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _typed_lines() -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends)")


@dataclass
class Answer:
    """The part of a reply that has arrived."""

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    first_text_s: float | None = None
    """Seconds from the request to the first text, measured by the client."""

    def summary(self) -> str:
        """Return the reused tokens and the speed, if the server reports them."""
        parts = []
        if self.usage:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            parts.append(f"{self.usage.get('prompt_tokens', 0)} prompt tokens, {cached} cached")
        if self.first_text_s is not None:
            parts.append(f"TTFT {self.first_text_s * 1000:.0f} ms")
        if self.usage:
            speed = self.timings.get("predicted_per_second")
            parts.append(
                f"{self.usage.get('completion_tokens', 0)} tokens" + (f" at {speed:.1f}/s" if speed else "")
            )
        if n_drafted := self.timings.get("draft_n"):
            parts.append(f"{self.timings.get('draft_n_accepted', 0)} of {n_drafted} drafted tokens accepted")
        return " · ".join(parts)


class Chat:
    """A conversation, and the commands that change it."""

    def __init__(self, server: Server, system: str, notes: Console) -> None:
        self.server = server
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.notes = notes

    def take(self, line: str) -> bool:
        """Execute a command or send a message; return False to end the chat."""
        command, _, rest = line.partition(" ")
        match command:
            case "":
                pass
            case "/exit":
                return False
            case "/clear":
                self.turns.clear()
                self.notes.print("(new conversation)", style="dim")
            case "/system":
                self.system = rest.strip() or self.system
                self.notes.print(f"(system prompt: {self.system or 'none'})", style="dim")
            case _ if command.startswith("/"):
                self.notes.print(f"{command} is not a command; {_HELP}", style="dim")
            case _:
                self._answer(line)
        return True

    def _answer(self, message: str) -> None:
        """Send a message and print the answer as it arrives; keep both unless the answer is empty."""
        question = {"role": "user", "content": message}
        system = [{"role": "system", "content": self.system}] if self.system else []
        answer = Answer()
        try:
            for piece in self.server.answer([*system, *self.turns, question], answer):
                print(piece, end="", flush=True)
            note = answer.summary()
        except KeyboardInterrupt:
            note = "(stopped)"
        finally:
            if answer.text:
                print(flush=True)
                self.turns += [question, {"role": "assistant", "content": answer.text}]
        self.notes.print(note, style="dim")


class Server(Client):
    """Client of the server's chat API; `options` are added to the body of every request."""

    def __init__(self, url: str, api_key: str, cacert: str, options: dict[str, Any]) -> None:
        super().__init__(url, api_key, cacert)
        self._options = options

    def model(self) -> str:
        """Return the name of the model."""
        if self._options.get("model"):
            return str(self._options["model"])
        models = self.ask("GET", "/v1/models").get("data") or [{}]
        return str(models[0].get("id", "a model"))

    def answer(self, messages: list[dict[str, str]], answer: Answer) -> Iterator[str]:
        """Stream the reply to `messages`: yield its text as it arrives and update `answer`."""
        body = {
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        started = time.monotonic()
        with (
            closing(self.connect()) as connection,
            closing(self.send(connection, "POST", "/v1/chat/completions", body)) as response,
        ):
            for event in self.events(response):
                answer.usage = event.get("usage") or answer.usage
                answer.timings = event.get("timings") or answer.timings
                for choice in event.get("choices") or ():
                    if piece := (choice.get("delta") or {}).get("content"):
                        if answer.first_text_s is None:
                            answer.first_text_s = time.monotonic() - started
                        answer.text += piece
                        yield piece
