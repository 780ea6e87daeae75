"""The demo model's language: seeded dialogues in which people state facts, correct them and ask for them back.

Pure Python, no torch and no tokenizer. `TalkWriter` writes one conversation turn by turn and keeps the ledger of what
is true in it; `training_talk` and `held_out` are the two ways to use it. Values come from large open sets (names of
syllables, digits, codes), so an answer can only be copied out of the context, and a combination of fact and value
whose hash says "held out" is never drawn for training. `is_grammatical` tells whether the assistant could have said a
sentence.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TypedDict

from bench.demo import grammar as g
from bench.demo.grammar import Attribute

MARK_OPEN, MARK_CLOSE = "\x01", "\x02"  # around values the assistant has to copy, until `plain` removes them
HELD_OUT_ONE_IN = 8
Key = tuple[Attribute, str]


class Message(TypedDict):
    role: str
    content: str


@dataclass(frozen=True)
class Dialogue:
    """A conversation that ends in a question, the exact reply to it and the value in that reply."""

    messages: list[Message]
    answer: str
    value: str
    kind: str


def plain(text: str) -> str:
    """The text without the marks around copied values."""
    return text.replace(MARK_OPEN, "").replace(MARK_CLOSE, "")


def mark(value: str) -> str:
    """Marks a value; `_fill` moves the opening mark before the space in front of it."""
    return f"{MARK_OPEN}{value}{MARK_CLOSE}"


def _fill(template: str, **slots: str) -> str:
    return template.format(**slots).replace(f" {MARK_OPEN}", f"{MARK_OPEN} ")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def is_held_out(key: str, value: str) -> bool:
    """Whether this combination of fact and value is kept away from training."""
    return zlib.crc32(f"{key}|{value}".encode()) % HELD_OUT_ONE_IN == 0


class Values:
    """Draws values of every kind from open sets."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def draw(self, kind: str) -> str:
        maker = getattr(self, f"_{kind}", None)
        if maker is not None:
            return str(maker())
        roll = self.rng.random()
        if roll < 0.25:
            return self._coined().lower()
        word = self.rng.choice(g.VALUE_WORDS[kind])
        return f"{self._coined().lower()} {word}" if roll < 0.45 else word

    def _syllables(self, count: int) -> str:
        pick = self.rng.choice
        return "".join(pick(g.ONSETS) + pick(g.VOWELS) for _ in range(count))

    def _coined(self) -> str:
        roll = self.rng.random()
        if roll < 0.06:
            return "".join(self.rng.choices("abcdefghijklmnopqrstuvwxyz", k=self.rng.randint(3, 8))).capitalize()
        text = self._syllables(self.rng.choice((1, 2, 2, 2, 3)))
        if len(text) < 4 or self.rng.random() < 0.5:
            text += self.rng.choice(g.CODAS)
        return text.capitalize()

    def _name(self) -> str:
        roll = self.rng.random()
        if roll < 0.12:
            return self.rng.choice(g.VALUE_WORDS["name"])
        return f"{self._coined()} {self._coined()}" if roll < 0.18 else self._coined()

    def _city(self) -> str:
        roll = self.rng.random()
        if roll < 0.15:
            return self.rng.choice(g.VALUE_WORDS["city"])
        town = self._coined()
        if roll < 0.5:
            town = self._syllables(self.rng.randint(1, 2)).capitalize() + self.rng.choice(g.CITY_ENDS)
        return f"{self.rng.choice(('New', 'Old', 'Port', 'San'))} {town}" if roll > 0.85 else town

    def _colour(self) -> str:
        colour = self.rng.choice(g.VALUE_WORDS["colour"])
        roll = self.rng.random()
        if roll < 0.3:
            return f"{self.rng.choice(g.SHADES)} {colour}"
        return f"{self._coined().lower()} {colour}" if roll < 0.6 else colour

    def _title(self) -> str:
        tail = f"{self.rng.choice(g.TITLE_ADJECTIVES)} {self.rng.choice(g.TITLE_NOUNS)}"
        return f"{self._coined()} {tail}" if self.rng.random() < 0.6 else f"The {tail}"

    def _spot(self) -> str:
        return f"the {self._colour()} {self.rng.choice(g.SPOTS)}"

    def _number(self) -> str:
        return "".join(self.rng.choices("0123456789", k=self.rng.choice((2, 3, 4, 4, 5, 6, 7))))

    def _age(self) -> str:
        return str(self.rng.randint(2, 99) if self.rng.random() < 0.7 else self.rng.randint(100, 9999))

    def _time(self) -> str:
        return f"{self.rng.randint(0, 23)}:{self.rng.randint(0, 59):02d}"

    def _code(self) -> str:
        pick, roll = self.rng.choice, self.rng.random()
        if roll < 0.4:
            return f"{self._syllables(self.rng.randint(1, 2))}-{self._number()}"
        if roll < 0.7:
            return "".join(self.rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=self.rng.randint(4, 8)))
        if roll < 0.85:
            return "".join(self.rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=3)) + pick("- ") + self._number()
        return f"{self._coined().lower()} {self._coined().lower()}"


@dataclass
class TalkWriter:
    """Writes one conversation and knows what has been said in it.

    The assistant's part is a function of the conversation wherever it can be: only stories without a given hero leave
    it a choice, and there the choices are skewed so that the likeliest is clear.
    """

    rng: random.Random
    held_out: bool = False
    ledger: dict[Key, str] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = Values(self.rng)
        self.people: list[str] = []

    # --- what is said ---

    def say(self, user: str, assistant: str) -> None:
        self.messages.append({"role": "user", "content": user})
        self.messages.append({"role": "assistant", "content": assistant})

    def new_value(self, key: Key) -> str:
        attribute, person = key
        while True:
            value = self.values.draw(attribute.values)
            if is_held_out(attribute.key, value) == self.held_out and value not in (*self.ledger.values(), person):
                return value

    def new_key(self) -> Key:
        """A fact that nobody has told yet."""
        while True:
            roll = self.rng.random()
            pool = g.ATTRIBUTES if roll < 0.7 else g.WORLD if roll < 0.82 else g.PERSON
            key = (self.rng.choice(pool), "")
            if roll < 0.2:
                key = (self.rng.choice(g.ATTRIBUTES[:6]), "")
            if pool is g.PERSON:
                if not self.people or self.rng.random() < 0.7:
                    self.people.append(self.values.draw("name"))
                key = (key[0], self.rng.choice(self.people))
            if key not in self.ledger:
                return key

    def clause(self, key: Key, value: str) -> str:
        return self.rng.choice(key[0].clauses).format(v=value, p=key[1])

    def tell(self, count: int = 1) -> None:
        """The user states facts; one alone gets its own thanks."""
        parts = []
        key = self.new_key()
        for index in range(count):
            if index:
                key = self.new_key()
            self.ledger[key] = self.new_value(key)
            clause = self.clause(key, self.ledger[key])
            template = self.rng.choice(g.TELL[:3] if index else g.TELL)
            parts.append(template.format(c=clause, C=_capital(clause)))
        if count == 2 and self.rng.random() < 0.4:
            parts = [f"{parts[0].rstrip('.')} and {parts[1][0].lower()}{parts[1][1:]}"]
            parts = [re.sub(r" and i(?=[ '])", " and I", parts[0])]
        reply = _fill(key[0].thanks, v=mark(self.ledger[key])) if count == 1 else g.SEVERAL
        self.say(self._rough(" ".join(parts)), reply)

    def fix(self, key: Key) -> None:
        """The user corrects a fact."""
        old = self.ledger[key]
        self.ledger[key] = value = self.new_value(key)
        clause = self.clause(key, value)
        self.say(self._rough(self.rng.choice(g.FIX).format(c=clause, old=old)), g.FIXED)

    def question(self, key: Key) -> str:
        attribute, person = key
        direct = self.rng.choice(attribute.questions).format(p=person)
        indirect = attribute.indirect.format(p=person)
        return self.rng.choice(g.ASK).format(q=direct, l=direct[0].lower() + direct[1:], i=indirect)

    def reply(self, key: Key) -> str:
        """The assistant's marked answer to a question for the fact."""
        if key not in self.ledger:
            return g.SELF if key[0].key == "self" else g.UNKNOWN
        return _fill(key[0].answer, v=mark(self.ledger[key]), p=key[1])

    def ask(self, key: Key) -> None:
        self.say(self._rough(self.question(key)), self.reply(key))

    def tell_and_ask(self) -> None:
        """A fact and the question for it in one message."""
        key = self.new_key()
        self.ledger[key] = self.new_value(key)
        self.say(f"{_capital(self.clause(key, self.ledger[key]))}. {self.question(key)}", self.reply(key))

    def _rough(self, text: str) -> str:
        """Now and then without capital or final mark, as people type."""
        roll = self.rng.random()
        if roll < 0.08:
            text = text[0].lower() + text[1:]
        if roll < 0.05 or roll > 0.96:
            text = text.rstrip(".?!")
        if 0.85 < roll < 0.88:
            text = f"Hello! {text}"
        return text

    # --- what is said besides ---

    def small_talk(self) -> None:
        users, assistant = self.rng.choice(g.CHAT)
        self.say(self._rough(self.rng.choice(users)), assistant)

    def echo(self) -> None:
        kinds = ("name", "number", "code", "city", "title", "colour")
        text = " ".join(self.values.draw(self.rng.choice(kinds)) for _ in range(self.rng.randint(1, 4)))
        self.say(self.rng.choice(g.ECHO).format(w=text), _fill(g.ECHOED, w=mark(text)))

    def oddity(self) -> None:
        """Something the assistant does not understand."""
        def word(match: re.Match[str]) -> str:
            kind = match.group(1)
            if kind == "x":
                return self.values.draw(self.rng.choice(("name", "code", "city", "food")))
            if kind == "n":
                return self.values.draw("number")
            text = self.rng.choice(g.NOUNS if kind == "noun" else g.VERBS)
            return text.capitalize() if kind == "Verb" else text
        template = " ".join(self.rng.sample(g.ODDITIES, self.rng.choice((1, 1, 1, 2))))
        self.say(self._rough(re.sub(r"\{(\w+)\}", word, template)), g.CONFUSED)

    def _skewed(self, items: tuple[str, ...]) -> str:
        for item in items[:-1]:
            if self.rng.random() < 0.55:
                return item
        return items[0]

    def story(self, animal: str, name: str, copied: bool = False) -> str:
        usual = g.HEROES[animal]
        slots = {"a": animal, "N": mark(name) if copied else name, "home": usual[1], "f": usual[2], "M": usual[3],
                 "j": self._skewed(g.STORY_ADJECTIVES), "o": self._skewed(g.STORY_OBJECTS),
                 "where": self._skewed(g.STORY_WHERES), "n": self._skewed(("three", "seven", "nine", "twelve"))}
        parts = [self._skewed(g.STORY_START), g.STORY_HOME, self._skewed(g.STORY_DAY), self._skewed(g.STORY_OWNER),
                 self._skewed(g.STORY_MIDDLE), self._skewed(g.STORY_THEN), self._skewed(g.STORY_END), g.STORY_LAST]
        return _fill(" ".join(parts), **slots)

    def tell_story(self) -> None:
        """A story by the assistant, or one the user tells, and sometimes the question whom it was about."""
        roll = self.rng.random()
        animal = self._skewed(tuple(g.HEROES)) if roll < 0.3 else self.rng.choice(tuple(g.HEROES))
        name = g.HEROES[animal][0]
        if roll < 0.3:
            self.say(self.rng.choice(g.STORY_ASK), self.story(animal, name))
        elif roll < 0.5:
            self.say(self.rng.choice(g.STORY_ASK_ANIMAL).format(a=animal), self.story(animal, name))
        elif roll < 0.8:
            name = self.values.draw("name")
            self.say(self.rng.choice(g.STORY_ASK_HERO).format(a=animal, N=name), self.story(animal, name, copied=True))
        else:
            name = self.values.draw("name")
            self.say(self.rng.choice(g.STORY_TOLD).format(s=self.story(animal, name)), g.STORY_THANKS)
        if self.rng.random() < 0.25:
            self.say(self.rng.choice(g.STORY_WHO), _fill(g.STORY_ANSWER, a=animal, N=mark(name)))

    def chatter(self) -> None:
        """One turn without any fact."""
        self.rng.choices((self.small_talk, self.echo, self.oddity, self.tell_story), (0.4, 0.15, 0.2, 0.25))[0]()

    def system_prompt(self, facts: int, rules: int) -> None:
        """Opens the conversation with rules and facts, the assistant's own name among them at times."""
        parts = self.rng.choices(g.SYSTEM_RULES, k=rules)
        for _ in range(facts):
            key = self.new_key()
            if key[0].third_person is None and key[0].key != "self" and key[0] not in g.WORLD and key[0] not in g.PERSON:
                continue
            self.ledger[key] = value = self.new_value(key)
            text = (key[0].third_person or self.rng.choice(key[0].clauses)).format(v=value, p=key[1])
            parts.insert(self.rng.randint(0, len(parts)), f"{_capital(text)}.")
        if not facts or self.rng.random() < 0.5:
            parts.insert(0, self.rng.choice(g.SYSTEM_SHORT))
        self.messages.append({"role": "system", "content": " ".join(parts)})

    def odd_system_prompt(self) -> None:
        """A system prompt outside the grammar."""
        self.oddity()
        del self.messages[-1]
        self.messages[-1]["role"] = "system"
