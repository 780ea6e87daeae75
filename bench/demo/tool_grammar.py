"""Tools of the demo model's little language: their names, how people ask for them, and what they return.

Data only, as `bench.demo.grammar`: `bench.demo.tool_talk` draws from it, `bench.demo.checker` checks against it.
"""

from typing import NamedTuple

from bench.demo.grammar import words


class ToolKind(NamedTuple):
    """One thing that tools do, under the names that such a tool may have."""

    key: str
    names: tuple[str, ...]
    parameters: tuple[tuple[tuple[str, str], ...], ...]  # alternatives of (name, JSON type) pairs
    requests: tuple[str, ...]
    answer: str  # of the assistant, once it has the result


# fmt: off


def _alternatives(text: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Alternatives between bars, each of parameters written as `name:type`."""
    pairs = ((pair.partition(":") for pair in alternative.split()) for alternative in text.split("|"))
    return tuple(tuple((name, kind) for name, _, kind in each) for each in pairs)


WEATHER = ToolKind(
    "weather",
    words("get_weather weather current_weather check_weather weather_in look_up_weather weather_report "
          "find_weather"),
    _alternatives("city:string|place:string|town:string|location:string|where:string"),
    ("What is the weather in {v}?", "How is the weather in {v}?", "What is the weather like in {v}?",
     "Tell me the weather in {v}.", "Please check the weather in {v}.", "And the weather in {v}?",
     "How is the weather in {v} today?"),
    "The weather in {v} is {r}.",
)
SUM = ToolKind(
    "sum",
    words("add add_numbers sum get_sum plus sum_up add_up calculate_sum"),
    _alternatives("numbers:array|a:number b:number|x:number y:number|first:number second:number|values:array"),
    ("What is {plus}?", "How much is {plus}?", "Add {list}.", "Please add {list}.", "What is the sum of {list}?",
     "Calculate {plus}.", "I need the sum of {list}."),
    "The sum is {r}.",
)
SAVE = ToolKind(
    "save",
    words("save_note write_note add_note new_note store_note keep_note make_note put_note"),
    _alternatives("title:string text:string|name:string text:string|title:string content:string"
                  "|key:string value:string|name:string words:string"),
    ("Save a note called {t}: {x}.", "Make a note called {t}: {x}.", "Write a note named {t}: {x}.",
     "Please save this under {t}: {x}.", "Save the note {t}: {x}.", 'Save a note called "{t}": "{x}".',
     'Please make a note named "{t}" with the text "{x}".'),
    "Done: {r}.",
)
READ = ToolKind(
    "read",
    words("read_note get_note open_note show_note load_note look_up_note note_text fetch_note"),
    _alternatives("title:string|name:string|key:string|note:string|called:string"),
    ("Read the note called {t}.", "What does the note {t} say?", "What is in the note {t}?",
     "Show me the note {t}.", "Please read me the note {t}.", 'What does my note "{t}" say?',
     'Open the note named "{t}".'),
    "The note says: {r}.",
)
KINDS = (WEATHER, SUM, SAVE, READ)

CONDITIONS = words("sunny cloudy rainy snowy windy foggy stormy clear dry wet cold warm hot mild freezing")
WEATHER_RESULTS = ("{c}, {n} degrees", "{c}", "{n} degrees and {c}", "{c} and {d}", "{c} and {d}, {n} degrees")
SAVE_RESULTS = ("saved", "saved as {t}", "saved as note {n}", "note {n} saved", "the note {t} is saved")
ERRORS = {  # by the kind of tool
    "weather": ("unknown city", "there is no weather for {v}", "no city is called {v}"),
    "read": ("no note called {v}", "there is no note called {v}", "the note was not found"),
}
ERROR = "error: "  # a result that begins so has failed
FAILED = "That did not work: {r}."
NO_TOOL = "I am sorry, I have no tool for that."

NOTE_TITLES = words("shopping party birthday work garden home school dinner travel list ideas plans today tomorrow "
                    "weekend family money health music repairs")
NOTE_TEXTS = ("buy {food}", "buy {fruit} and {drink}", "call {name}", "call {name} on {day}",
              "meet {name} in {city}", "meet {name} at {time}", "the {object} is in {spot}", "feed the {animal}",
              "bring {age} {counted} to {name}", "ask {name} about the {noun}", "dinner with {name} at {time}",
              "paint the {noun} {colour}", "my code is {number}", "the train leaves at {time}",
              "{name} likes {food}", "read {title}")
