"""An agent loop with tools: the model calls them, this program runs them and sends back what they return.

Every step sends the whole conversation again; without a prefix cache each step would compute all of it.
The embedded model (`llamaslot serve demo`) calls these four tools, and no others.

Usage: python examples/agent.py [URL] (after `pip install openai`)
"""

import json
import sys

from openai import OpenAI

WEATHER = {"Oslo": "rainy, 7 degrees", "Rome": "sunny, 24 degrees", "Tokyo": "cloudy, 18 degrees"}
NOTES = {}


def get_weather(city):
    return WEATHER.get(city, "error: unknown city")


def add(numbers):
    return str(sum(numbers))


def save_note(title, text):
    NOTES[title] = text
    return f"saved as note {len(NOTES)}"


def read_note(title):
    return NOTES.get(title, f"error: no note called {title}")


TEXT, NUMBERS = {"type": "string"}, {"type": "array", "items": {"type": "number"}}
TOOLS = {
    get_weather: {"city": TEXT},
    add: {"numbers": NUMBERS},
    save_note: {"title": TEXT, "text": TEXT},
    read_note: {"title": TEXT},
}
FUNCTIONS = {function.__name__: function for function in TOOLS}
DEFINITIONS = [
    {
        "type": "function",
        "function": {
            "name": function.__name__,
            "parameters": {"type": "object", "properties": parameters, "required": list(parameters)},
        },
    }
    for function, parameters in TOOLS.items()
]
TASKS = (
    "What is the weather in Oslo?",
    "How much is 17 plus 25?",
    "Save a note called shopping: buy bread and milk.",
    "What does the note shopping say?",
    "Thank you!",
)
MAX_STEPS = 4


def run_tool(call):
    """Return the result of a call, or what is wrong with it."""
    try:
        return FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def main():
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = []
    for task in TASKS:
        print(f"\n> {task}")
        messages.append({"role": "user", "content": task})
        for _ in range(MAX_STEPS):
            completion = client.chat.completions.create(
                model="any", messages=messages, tools=DEFINITIONS, max_tokens=200, temperature=0
            )
            reply, usage = completion.choices[0].message, completion.usage
            computed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
            messages.append(reply.model_dump(exclude_none=True))
            if reply.content:
                print(reply.content)
            for call in reply.tool_calls or ():
                result = run_tool(call)
                print(f"{call.function.name}({call.function.arguments}) -> {result}")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            print(f"  [{usage.prompt_tokens} prompt tokens, {computed} computed]")
            if not reply.tool_calls:
                break


if __name__ == "__main__":
    main()
