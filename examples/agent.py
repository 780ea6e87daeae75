"""An agent loop: a long system prompt, tool results added to the conversation, and the cost of each step.

Every step sends the whole conversation again; without a prefix cache each step would compute all of it.
A reply that is a JSON object naming a tool is executed; any other reply ends the task.

Usage: python examples/agent.py [URL]
"""

import json
import sys
import time

from openai import OpenAI

TOOLS = {
    "add": lambda numbers: round(sum(numbers), 6),
    "count_words": lambda text: len(text.split()),
    "today": lambda: time.strftime("%Y-%m-%d"),
}
SYSTEM = "You are a careful assistant. To use a tool, answer with one line of JSON and nothing else:\n" + "\n".join(
    [
        '{"tool": "add", "arguments": {"numbers": [1, 2]}}  adds numbers.',
        '{"tool": "count_words", "arguments": {"text": "..."}}  counts the words of a text.',
        '{"tool": "today", "arguments": {}}  tells the date.',
        "When you know the answer, say it in one sentence.",
    ]
)
TASKS = ("Hello! What can you do?", "What day is it?", "How many words has the sentence: the cat sat on the mat?")
MAX_STEPS = 4


def run_tool(reply):
    """Return the result of the tool call in `reply`, or None without one."""
    try:
        call = json.loads(reply)
        return str(TOOLS[call["tool"]](**call["arguments"]))
    except (ValueError, KeyError, TypeError):
        return None


def main():
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "system", "content": SYSTEM}]
    for task in TASKS:
        print(f"\n> {task}")
        messages.append({"role": "user", "content": task})
        for _ in range(MAX_STEPS):
            completion = client.chat.completions.create(
                model="any", messages=messages, max_tokens=80, temperature=0
            )
            reply, usage = completion.choices[0].message.content, completion.usage
            computed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
            print(f"{reply}\n  [{usage.prompt_tokens} prompt tokens, {computed} computed]")
            messages.append({"role": "assistant", "content": reply})
            result = run_tool(reply)
            if result is None:
                break
            messages.append({"role": "user", "content": f"The tool answered: {result}"})


if __name__ == "__main__":
    main()
