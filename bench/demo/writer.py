"""One conversation of the demo model's language, written turn by turn: what is said, and what is true in it.

Pure Python, no torch and no tokenizer. Values come from word lists and, in part, from open sets (coined words,
digits, codes).
"""

import random
import re
from dataclasses import dataclass, field
from typing import TypedDict

from bench.demo import grammar as g
from bench.demo.grammar import Attribute
from bench.demo.values import Values, is_held_out

RAW_TEXT = "text"  # the role of a text that stands outside of any chat
MARK_OPEN, MARK_CLOSE = "\x01", "\x02"  # around values the assistant has to copy, until `plain` removes them
Key = tuple[Attribute, str]


class Message(TypedDict):
    role: str
    content: str


def plain(text: str) -> str:
    """The text without the marks around copied values."""
    return text.replace(MARK_OPEN, "").replace(MARK_CLOSE, "")


def mark(value: str) -> str:
    """Marks a value; `fill` moves the opening mark before the space in front of it."""
    return f"{MARK_OPEN}{value}{MARK_CLOSE}"


def fill(template: str, **slots: str) -> str:
    return template.format(**slots).replace(f" {MARK_OPEN}", f"{MARK_OPEN} ")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass
class TalkWriter:
    """Writes one conversation and knows what has been said in it.

    The assistant's part is a function of the conversation: nothing in it is left to chance. The assistant takes
    note of a fact in the words in which it answers the question for it.
    """

    rng: random.Random
    held_out: bool = False
    ledger: dict[Key, str] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = Values(self.rng)
        self.people: list[str] = []
        self.unasked: dict[Key, bool] = {}
        """Facts told since anybody asked for them; whether the last telling was a correction."""

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
            pool = g.ATTRIBUTES if roll < 0.65 else g.WORLD if roll < 0.77 else g.PERSON
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
        """The user states facts."""
        keys, clauses = [], []
        for _ in range(count):
            key = self.new_key()
            self.ledger[key] = self.new_value(key)
            self.unasked[key] = False
            keys.append(key)
            clauses.append(self.clause(key, self.ledger[key]))
        if count == 2 and self.rng.random() < 0.4:
            clauses = [" and ".join(clauses)]
        parts = [
            self.rng.choice(g.TELL if index == 0 else g.TELL[:3]).format(c=clause, C=_capital(clause))
            for index, clause in enumerate(clauses)
        ]
        self.say(self.rough(" ".join(parts)), " ".join((g.NOTED, *map(self.reply, keys))))

    def fix(self, key: Key) -> None:
        """The user corrects a fact."""
        old = self.ledger[key]
        self.ledger[key] = value = self.new_value(key)
        self.unasked[key] = True
        clause = self.clause(key, value)
        self.say(self.rough(self.rng.choice(g.FIX).format(c=clause, old=old)), f"{g.CORRECTED} {self.reply(key)}")

    def question(self, key: Key) -> str:
        attribute, person = key
        direct = self.rng.choice(attribute.questions).format(p=person)
        indirect = attribute.indirect.format(p=person)
        return self.rng.choice(g.ASK).format(q=direct, l=direct[0].lower() + direct[1:], i=indirect)

    def reply(self, key: Key) -> str:
        """The assistant's marked answer to a question for the fact."""
        if key not in self.ledger:
            return g.SELF if key[0].key == "self" else g.UNKNOWN
        return fill(key[0].answer, v=mark(self.ledger[key]), p=mark(key[1]))

    def ask(self, key: Key) -> None:
        self.unasked.pop(key, None)
        self.say(self.rough(self.question(key)), self.reply(key))

    def tell_and_ask(self) -> None:
        """A fact and the question for it in one message."""
        key = self.new_key()
        self.ledger[key] = self.new_value(key)
        self.say(f"{_capital(self.clause(key, self.ledger[key]))}. {self.question(key)}", self.reply(key))

    def rough(self, text: str) -> str:
        """Now and then without capital or final mark, as people type."""
        roll = self.rng.random()
        if roll < 0.08 and text.split(maxsplit=1)[0] not in self.people:
            text = text[0].lower() + text[1:]
        if roll < 0.05 or roll > 0.96:
            text = text.rstrip(".?!")
        if 0.85 < roll < 0.88:
            text = f"Hello! {text}"
        return text

    # --- what is said besides ---

    def small_talk(self) -> None:
        users, assistant = self.rng.choice(g.CHAT)
        self.say(self.rough(self.rng.choice(users)), assistant)

    def echo(self) -> None:
        kinds = ("name", "number", "code", "city", "title", "colour")
        text = " ".join(self.values.draw(self.rng.choice(kinds)) for _ in range(self.rng.randint(1, 3)))
        self.say(self.rng.choice(g.ECHO).format(w=text), fill(g.ECHOED, w=mark(text)))

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
        self.say(self.rough(re.sub(r"\{(\w+)\}", word, template)), g.CONFUSED)

    def story(self, animal: str, name: str, copied: bool = False) -> str:
        """The one story about that animal, with that name for its hero."""
        story, number = g.STORIES[animal], tuple(g.STORIES).index(animal)
        slots = {
            "a": animal,
            "N": mark(name) if copied else name,
            "home": story.home,
            "find": story.find,
            "f": story.friend,
            "M": story.friend_name,
            "j": g.STORY_ADJECTIVES[number % len(g.STORY_ADJECTIVES)],
        }
        parts = [variants[number % len(variants)] for variants in g.STORY_PARTS]
        return fill(" ".join(parts), **slots)

    def tell_story(self) -> None:
        """A story by the assistant, or one the user tells, and sometimes the question whom it was about."""
        roll = self.rng.random()
        animals = tuple(g.STORIES)
        animal = animals[0] if roll < 0.3 else self.rng.choice(animals)
        name = g.STORIES[animal].hero
        if roll < 0.3:
            self.say(self.rng.choice(g.STORY_ASK), self.story(animal, name))
        elif roll < 0.5:
            self.say(self.rng.choice(g.STORY_ASK_ANIMAL).format(a=animal), self.story(animal, name))
        elif roll < 0.8:
            name = self.values.draw("name")
            self.say(
                self.rng.choice(g.STORY_ASK_HERO).format(a=animal, N=name), self.story(animal, name, copied=True)
            )
        else:
            name = self.values.draw("name")
            self.say(self.rng.choice(g.STORY_TOLD).format(s=self.story(animal, name)), g.STORY_THANKS)
        if self.rng.random() < 0.25:
            self.say(self.rng.choice(g.STORY_WHO), fill(g.STORY_ANSWER, a=animal, N=mark(name)))

    def chatter(self) -> None:
        """One turn without any fact."""
        self.rng.choices((self.small_talk, self.echo, self.oddity, self.tell_story), (0.4, 0.15, 0.2, 0.25))[0]()

    def system_prompt(self, facts: int, rules: int) -> None:
        """Opens the conversation with rules and facts, the assistant's own name among them at times."""
        parts = self.rng.choices(g.SYSTEM_RULES, k=rules)
        for _ in range(facts):
            key = self.new_key()
            if (
                key[0].third_person is None
                and key[0].key != "self"
                and key[0] not in g.WORLD
                and key[0] not in g.PERSON
            ):
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
