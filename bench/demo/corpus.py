"""The demo model's dialogues: people state facts, correct them and ask for them back, with chatter in between.

`training_talk` teaches, `held_out` and `chatter` examine. A combination of fact and value whose hash says "held
out" is never drawn for training, so no answer can be known by heart.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.demo import grammar as g
from bench.demo.writer import RAW_TEXT, Message, TalkWriter, plain

IM_START, IM_END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Dialogue:
    """A conversation that ends in a question, the exact reply to it and the value in that reply, if it has one."""

    messages: list[Message]
    answer: str
    value: str
    kind: str


def chatml(messages: list[Message]) -> str:
    """The prompt for a reply, as the chat template in the model's metadata renders it."""
    turns = "".join(f"{IM_START}{message['role']}\n{message['content']}{IM_END}\n" for message in messages)
    return f"{turns}{IM_START}assistant\n"


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

    `far` strews chatter and questions behind a start full of facts; otherwise facts, corrections and questions mix.
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
            if rng.random() < 0.6:
                writer.fix(rng.choice(list(writer.ledger)))
    turn, share = (_far_turn, rng.uniform(0.2, 0.8)) if far else (_dense_turn, 0.07)
    while _length(writer.messages) < characters:
        turn(writer, share)
    return writer.messages


def _raw_stories(writer: TalkWriter, characters: int) -> list[Message]:
    while _length(writer.messages) < characters:
        animal = writer.rng.choice(tuple(g.STORIES))
        name = writer.values.draw("name") if writer.rng.random() < 0.5 else g.STORIES[animal].hero
        writer.messages.append({"role": RAW_TEXT, "content": writer.story(animal, name)})
    return writer.messages


def _dense_turn(writer: TalkWriter, chatter: float) -> None:
    """Chatter with that chance; else something told, corrected or asked for."""
    rng, known = writer.rng, list(writer.ledger)
    roll = rng.random()
    if rng.random() < chatter:
        writer.chatter()
    elif roll < 0.06:
        writer.tell_and_ask()
    elif roll < 0.14:
        writer.ask(writer.new_key())
    elif roll < 0.26 and known:
        key = rng.choice(known[-8:])
        writer.fix(key)
        if rng.random() < 0.6:
            writer.ask(key)
    elif known and (roll < 0.7 or len(known) > 13):
        writer.ask(rng.choice(known))
    else:
        writer.tell(rng.choice((1, 1, 2, 3)))


def _far_turn(writer: TalkWriter, chatter: float) -> None:
    """Chatter with that chance; else mostly a question that nobody asked yet, so that its answer lies far back."""
    rng, known = writer.rng, list(writer.ledger)
    roll = rng.random()
    if rng.random() < chatter:
        writer.chatter()
    elif roll < 0.08:
        writer.ask(writer.new_key())
    elif roll < 0.2:
        writer.fix(rng.choice(known))
    elif roll < 0.3 and len(known) < 24:
        writer.tell(rng.choice((1, 1, 2, 3)))
    else:
        corrected = [key for key, fixed in writer.unasked.items() if fixed]
        writer.ask(rng.choice(corrected if corrected and rng.random() < 0.5 else list(writer.unasked) or known))


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
    """`n` conversations that end in small talk, a wish for a story or something odd, and the reply to it."""
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
