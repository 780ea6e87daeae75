"""The demo model's language: seeded dialogues in which people state facts, correct them and ask for them back.

Pure Python, no torch and no tokenizer. `TalkWriter` writes one conversation turn by turn and keeps the ledger of
what is true in it; `training_talk` and `held_out` are the two ways to use it. Values come from large open sets
(names of syllables, digits, codes), so an answer can only be copied out of the context, and a combination of fact
and value whose hash says "held out" is never drawn for training. `is_grammatical` tells whether the assistant could
have said a sentence.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TypedDict

from bench.demo import grammar as g
from bench.demo.grammar import Attribute
from bench.demo.values import Values, is_held_out

RAW_TEXT = "text"  # the role of a text that stands outside of any chat
MARK_OPEN, MARK_CLOSE = "\x01", "\x02"  # around values the assistant has to copy, until `plain` removes them
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
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


def chatml(messages: list[Message]) -> str:
    """The prompt for a reply, as the chat template in the model's metadata renders it."""
    turns = "".join(f"{IM_START}{message['role']}\n{message['content']}{IM_END}\n" for message in messages)
    return f"{turns}{IM_START}assistant\n"


def mark(value: str) -> str:
    """Marks a value; `_fill` moves the opening mark before the space in front of it."""
    return f"{MARK_OPEN}{value}{MARK_CLOSE}"


def _fill(template: str, **slots: str) -> str:
    return template.format(**slots).replace(f" {MARK_OPEN}", f"{MARK_OPEN} ")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass
class TalkWriter:
    """Writes one conversation and knows what has been said in it.

    The assistant's part is a function of the conversation wherever it can be: only stories leave it a choice, and
    there the choices are skewed so that the likeliest is clear.
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
        """The user states facts; one alone gets its own thanks."""
        clauses = []
        for _ in range(count):
            key = self.new_key()
            self.ledger[key] = self.new_value(key)
            clauses.append(self.clause(key, self.ledger[key]))
        if count == 2 and self.rng.random() < 0.4:
            clauses = [" and ".join(clauses)]
        parts = [
            self.rng.choice(g.TELL if index == 0 else g.TELL[:3]).format(c=clause, C=_capital(clause))
            for index, clause in enumerate(clauses)
        ]
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
        slots = {
            "a": animal,
            "N": mark(name) if copied else name,
            "home": usual[1],
            "f": usual[2],
            "M": usual[3],
            "j": self._skewed(g.STORY_ADJECTIVES),
            "o": self._skewed(g.STORY_OBJECTS),
            "where": self._skewed(g.STORY_WHERES),
            "n": self._skewed(("three", "seven", "nine", "twelve")),
        }
        parts = [
            self._skewed(g.STORY_START),
            g.STORY_HOME,
            self._skewed(g.STORY_DAY),
            self._skewed(g.STORY_OWNER),
            self._skewed(g.STORY_MIDDLE),
            self._skewed(g.STORY_THEN),
            self._skewed(g.STORY_END),
            g.STORY_LAST,
        ]
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
            self.say(
                self.rng.choice(g.STORY_ASK_HERO).format(a=animal, N=name), self.story(animal, name, copied=True)
            )
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


def _open_talk(writer: TalkWriter, long: bool) -> None:
    """No system prompt, a short one, one with facts, or one that makes no sense."""
    rng, roll = writer.rng, writer.rng.random()
    if roll < 0.5:
        return
    if roll < 0.65:
        writer.system_prompt(facts=0, rules=rng.choice((0, 0, 1, 3)))
    elif roll < 0.95:
        writer.system_prompt(facts=rng.randint(1, 20 if long else 4), rules=rng.randint(0, 60 if long else 4))
    else:
        writer.odd_system_prompt()


def _length(messages: list[Message]) -> int:
    return sum(len(message["content"]) + 20 for message in messages)


def training_talk(rng: random.Random, characters: int, far: bool) -> list[Message]:
    """A conversation of at least that many characters, values marked, never with a held-out combination.

    `far` puts chatter between the facts and a burst of questions; otherwise facts, corrections and questions mix.
    """
    writer = TalkWriter(rng)
    if rng.random() < 0.02:
        return _raw_stories(writer, characters)
    _open_talk(writer, far)
    if rng.random() < 0.15:
        writer.small_talk()
    if far:
        for _ in range(rng.randint(2, 8)):
            writer.tell(rng.choice((1, 1, 2, 3)))
            if rng.random() < 0.3:
                writer.fix(rng.choice(list(writer.ledger)))
        limit = characters * rng.uniform(0.3, 0.85)
        while _length(writer.messages) < limit:
            writer.chatter()
    while _length(writer.messages) < characters:
        _dense_turn(writer)
    return writer.messages


def _raw_stories(writer: TalkWriter, characters: int) -> list[Message]:
    while _length(writer.messages) < characters:
        animal = writer.rng.choice(tuple(g.HEROES))
        name = writer.values.draw("name") if writer.rng.random() < 0.5 else g.HEROES[animal][0]
        writer.messages.append({"role": RAW_TEXT, "content": writer.story(animal, name)})
    return writer.messages


def _dense_turn(writer: TalkWriter) -> None:
    rng, known = writer.rng, list(writer.ledger)
    roll = rng.random()
    if roll < 0.07:
        writer.chatter()
    elif roll < 0.13:
        writer.tell_and_ask()
    elif roll < 0.18:
        writer.ask(writer.new_key())
    elif roll < 0.3 and known:
        key = rng.choice(known[-8:])
        writer.fix(key)
        if rng.random() < 0.6:
            writer.ask(key)
    elif roll < 0.72 and known:
        writer.ask(rng.choice(known))
    elif len(known) < 14:
        writer.tell(rng.choice((1, 1, 2, 3)))
    elif known:
        writer.ask(rng.choice(known))


def approximate_tokens(text: str) -> int:
    return len(text) // 3


def held_out(
    n: int, seed: int, filler_tokens: int = 0, count: Callable[[str], int] = approximate_tokens
) -> Iterator[Dialogue]:
    """`n` dialogues of unseen combinations, with that many tokens of chatter between the facts and the question."""
    for index in range(n):
        yield _held_out_one(random.Random(f"held out {seed} {index}"), filler_tokens, count)


def _held_out_one(rng: random.Random, filler_tokens: int, count: Callable[[str], int]) -> Dialogue:
    writer = TalkWriter(rng, held_out=True)
    _open_talk(writer, long=False)
    in_system = set(writer.ledger)
    for _ in range(rng.randint(2, 4)):
        writer.tell(rng.choice((1, 1, 2)))
    key = rng.choice(list(writer.ledger))
    corrected = rng.random() < 0.4
    if corrected:
        writer.fix(key)
    kind = "corrected" if corrected else "third person" if key[1] else "system" if key in in_system else "told"
    if rng.random() < 0.5:
        writer.tell(1)
    filler = 0
    while filler < filler_tokens:
        start = len(writer.messages)
        writer.chatter()
        filler += sum(count(plain(message["content"])) + 5 for message in writer.messages[start:])
    writer.ask(key)
    messages: list[Message] = [{"role": m["role"], "content": plain(m["content"])} for m in writer.messages]
    answer = messages.pop()["content"]
    return Dialogue(messages, answer, writer.ledger[key], kind)


def chatter(n: int, seed: int) -> Iterator[Dialogue]:
    """`n` conversations that end in small talk, a wish for a story or something odd, with the likeliest reply."""
    for index in range(n):
        writer = TalkWriter(random.Random(f"chatter {seed} {index}"), held_out=True)
        _open_talk(writer, long=False)
        for _ in range(writer.rng.randint(0, 2)):
            writer.tell()
        writer.chatter()
        answer = writer.messages[-1]["content"]
        messages: list[Message] = [
            {"role": m["role"], "content": plain(m["content"])} for m in writer.messages[:-1]
        ]
        yield Dialogue(messages, plain(answer), "", "chatter")


# --- the checker ---


def sentences(text: str) -> list[str]:
    """Cuts a reply into sentences; values hold no sentence mark."""
    return [part for part in re.split(r"(?<=[.!?]) ", text) if part]


def _assistant_templates() -> Iterator[str]:
    for attribute in (*g.ATTRIBUTES, *g.WORLD, *g.PERSON):
        yield attribute.answer
        yield attribute.thanks
    for _, assistant in g.CHAT:
        yield assistant
    yield from (g.FIXED, g.UNKNOWN, g.SEVERAL, g.CONFUSED, g.ECHOED, g.STORY_THANKS, g.STORY_ANSWER)
    for part in (g.STORY_START, g.STORY_DAY, g.STORY_OWNER, g.STORY_MIDDLE, g.STORY_THEN, g.STORY_END):
        yield from part
    yield from (g.STORY_HOME, g.STORY_LAST)


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    def one_of(items: tuple[str, ...]) -> str:
        return "(?:" + "|".join(map(re.escape, items)) + ")"

    value = r"[^.!?,;]{1,60}"
    heroes = tuple(g.HEROES.values())
    slots = {
        "v": value,
        "p": value,
        "w": r"[^.!?,;]{1,200}",
        "N": value,
        "M": one_of(tuple(h[3] for h in heroes)),
        "f": one_of(tuple(h[2] for h in heroes)),
        "home": one_of(tuple(h[1] for h in heroes)),
        "a": one_of(tuple(g.HEROES)),
        "j": one_of(g.STORY_ADJECTIVES),
        "o": one_of(g.STORY_OBJECTS),
        "where": one_of(g.STORY_WHERES),
        "n": "(?:three|seven|nine|twelve)",
    }
    unique = {sentence for template in _assistant_templates() for sentence in sentences(template)}
    return tuple(
        re.compile(re.sub(r"\\\{(\w+)\\\}", lambda match: slots[match.group(1)], re.escape(sentence)))
        for sentence in sorted(unique)
    )


def is_grammatical(sentence: str) -> bool:
    """Whether the grammar has this sentence among those of the assistant."""
    return any(pattern.fullmatch(sentence) for pattern in _patterns())
