"""Tools of the demo model's little language: how users ask for them, and what they return.

Data only, as `bench.demo.grammar`: `bench.demo.tool_talk` draws from it, `bench.demo.checker` checks against it.
"""

import json
from typing import NamedTuple

from bench.demo.grammar import words


class Tool(NamedTuple):
    """A tool of fixed name and parameters: the model is too small to learn tools that differ in each dialogue."""

    name: str
    parameters: tuple[tuple[str, str], ...]  # pairs of name and JSON type
    requests: tuple[str, ...]
    answer: str  # of the assistant, once it has the result

    def line(self) -> str:
        """Return the tool as the chat template renders it: like a call, with types in place of values.

        A call then repeats the text behind the same name, which is what small models learn first.
        """
        return json.dumps({"name": self.name, "arguments": dict(self.parameters)})


# fmt: off


WEATHER = Tool(
    "get_weather",
    (("city", "string"),),
    ("What is the weather in {v}?", "How is the weather in {v}?", "What is the weather like in {v}?",
     "Tell me the weather in {v}.", "Please check the weather in {v}.", "And the weather in {v}?",
     "How is the weather in {v} today?"),
    "The weather in {v} is {r}.",
)
SUM = Tool(
    "add",
    (("numbers", "array"),),
    ("What is {plus}?", "How much is {plus}?", "Add {list}.", "Please add {list}.", "What is the sum of {list}?",
     "Calculate {plus}.", "I need the sum of {list}."),
    "The sum is {r}.",
)
SAVE = Tool(
    "save_note",
    (("title", "string"), ("text", "string")),
    ("Save a note called {t}: {x}.", "Make a note called {t}: {x}.", "Write a note named {t}: {x}.",
     "Please save this under {t}: {x}.", "Save the note {t}: {x}.", 'Save a note called "{t}": "{x}".',
     'Please make a note named "{t}" with the text "{x}".'),
    "Done: {r}.",
)
READ = Tool(
    "read_note",
    (("title", "string"),),
    ("Read the note called {t}.", "What does the note {t} say?", "What is in the note {t}?",
     "Show me the note {t}.", "Please read me the note {t}.", 'What does my note "{t}" say?',
     'Open the note named "{t}".'),
    "The note says: {r}.",
)
TOOLS = (WEATHER, SUM, SAVE, READ)

CONDITIONS = words("sunny cloudy rainy snowy windy foggy stormy clear dry wet cold warm hot mild freezing")
WEATHER_RESULTS = ("{c}, {n} degrees", "{c}", "{n} degrees and {c}", "{c} and {d}", "{c} and {d}, {n} degrees")
SAVE_RESULTS = ("saved", "saved as {t}", "saved as note {n}", "note {n} saved", "the note {t} is saved")
ERRORS = {  # by the name of the tool
    "get_weather": ("unknown city", "there is no weather for {v}", "no city is called {v}"),
    "read_note": ("no note called {v}", "there is no note called {v}", "the note was not found"),
}
ERROR = "error: "  # a result that begins so has failed
FAILED = "That did not work: {r}."

NOTE_TITLES = words("shopping party birthday work garden home school dinner travel list ideas plans today tomorrow "
                    "weekend family money health music repairs")
NOTE_TEXTS = ("buy {food}", "buy {fruit} and {drink}", "call {name}", "call {name} on {day}",
              "meet {name} in {city}", "meet {name} at {time}", "the {object} is in {spot}", "feed the {animal}",
              "bring {age} {counted} to {name}", "ask {name} about the {noun}", "dinner with {name} at {time}",
              "paint the {noun} {colour}", "my code is {number}", "the train leaves at {time}",
              "{name} likes {food}", "read {title}")
