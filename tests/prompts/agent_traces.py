"""Bodies of requests as agents send them: Claude Code's messages, Codex's responses, opencode's chats.

The structure is theirs, the instructions are of this project. `Session` has what differs from one session, day or
turn to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RULES = "\n".join(
    f"- Rule {i}: when a {noun} is {verb}, say so in one sentence, and read the {noun} again before it is used."
    for i, (noun, verb) in enumerate(
        (noun, verb)
        for noun in ("file", "branch", "test", "command", "folder", "setting", "message")
        for verb in ("changed", "missing", "too long", "of another owner")
    )
)
IDENTITY = "You are a coding agent that works in a terminal, on the user's files."
NAMES = ("Read", "Edit", "Write", "Bash", "Grep", "Glob", "TodoWrite", "WebSearch")


def tool(name: str, about: str = "") -> dict[str, Any]:
    """A tool in Anthropic's form."""
    return {
        "name": name,
        "description": about
        or f"{name} does what its name says, within the folder of the project.\nUsage:\n"
        + "\n".join(f"- {name} takes care of the case {i}, and returns at most {i}00 lines." for i in range(1, 6)),
        "input_schema": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": f"The file or folder for {name}"},
                "limit": {"type": "integer", "description": "Most lines"},
            },
            "required": ["path"],
        },
    }


TOOLS = tuple(tool(name) for name in NAMES)


@dataclass(frozen=True)
class Session:
    """A session of an agent, at some day, in some folder, with some tools."""

    date: str = "2026-11-27"
    folder: str = "/home/ada/shop"
    status: str = " M src/cart.py\n?? notes.txt"
    commits: str = "1a2b3c4 Add a cart\n9f8e7d6 Read prices from a file"
    branch: str = "main"
    header: str = ""
    model: str = "You are powered by the model named Sonnet 4.5. The exact model ID is claude-sonnet-4-5-20250929."
    reminder: str = ""
    """What the last message by the user begins with."""
    id: str = ""
    tools: Sequence[dict[str, Any]] = TOOLS
    salt: str = ""
    question: str = (
        "Why does the total of my cart come out wrong when a price has three digits after the point? It was right "
        "until last week. The prices come from a file that my supplier sends me every morning, one line for each "
        "article, with the name, the price without tax and the tax. I add a few of them by hand."
    )

    def claude_code(self, *turns: str) -> dict[str, Any]:
        """A body of Anthropic's API; `turns` are replies and further messages by the user, in turn."""
        environment = (
            f"{RULES}\n\nHere is useful information about the environment you are running in:\n<env>\n"
            f"Working directory: {self.folder}\nIs directory a git repo: Yes\nPlatform: linux\n"
            f"Today's date: {self.date}\n</env>\n{self.model}\n"
            + (f"Scratchpad: /tmp/agent/{self.id}/scratchpad\n" if self.id else "")
            + f"\ngitStatus: This is the git status at the start of the conversation.\n"
            f"Current branch: {self.branch}\n\nMain branch (you will usually use this for PRs): main\n\n"
            f"Status:\n{self.status}\n\nRecent commits:\n{self.commits}"
        )
        system = [IDENTITY, environment]
        if self.header:
            system.insert(0, self.header)
        return {
            "model": "local",
            "max_tokens": 100,
            "system": [{"type": "text", "text": text} for text in system],
            "tools": list(self.tools),
            "messages": self._messages(turns),
            **({"cache_salt": self.salt} if self.salt else {}),
        }

    def opencode(self, *turns: str) -> dict[str, Any]:
        """A body of OpenAI's chats."""
        system = (
            f"{IDENTITY}\n{RULES}\n{self.model}\nHere is some useful information about the environment you are "
            f"running in:\n<env>\n  Working directory: {self.folder}\n  Is directory a git repo: yes\n"
            f"  Platform: linux\n  Today's date: {self.date}\n</env>\n<project>\n  src/\n    cart.py\n</project>"
        )
        functions = [
            {
                "type": "function",
                "function": {
                    "name": each["name"],
                    "description": each["description"],
                    "parameters": each["input_schema"],
                },
            }
            for each in self.tools
        ]
        return {
            "model": "local",
            "messages": [{"role": "system", "content": self.header + system}, *self._messages(turns)],
            "tools": functions,
            **({"cache_salt": self.salt} if self.salt else {}),
        }

    def codex(self, *turns: str) -> dict[str, Any]:
        """A body of the Responses API."""
        context = (
            f"<environment_context>\n  <cwd>{self.folder}</cwd>\n  <approval_policy>on-request</approval_policy>\n"
            f"  <current_date>{self.date}</current_date>\n  <shell>bash</shell>\n</environment_context>\n{RULES}"
        )
        messages = [{"role": "user", "content": context}, *self._messages(turns)]
        return {
            "model": "local",
            "instructions": f"{IDENTITY}\n{RULES}",
            "input": [
                {
                    "type": "message",
                    "role": each["role"],
                    "content": [
                        {
                            "type": "output_text" if each["role"] == "assistant" else "input_text",
                            "text": each["content"],
                        }
                    ],
                }
                for each in messages
            ],
            "tools": [
                {
                    "type": "function",
                    "name": each["name"],
                    "description": each["description"],
                    "parameters": each["input_schema"],
                    "strict": False,
                }
                for each in self.tools
            ],
            "store": False,
            **({"cache_salt": self.salt} if self.salt else {}),
        }

    def _messages(self, turns: Sequence[str]) -> list[dict[str, Any]]:
        texts = [self.question, *turns]
        texts[-1] = texts[-1] + (f"\n\n{self.reminder}" if self.reminder else "")
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
