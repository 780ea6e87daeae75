"""The sets that the demo model's facts take their values from, and what is kept away from training.

Names, cities and things come from word lists and some from syllables, numbers from digits, codes from both. Which
value goes with which fact is drawn anew each time, so every answer has to be copied from the context.
"""

import random
import zlib

from bench.demo import grammar as g

HELD_OUT_ONE_IN = 8


def is_held_out(key: str, value: str) -> bool:
    """True if this combination of fact and value is kept away from training."""
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
        if roll < 0.2:
            return self._coined().lower()
        word = self.rng.choice(g.VALUE_WORDS[kind])
        return f"{self._coined().lower()} {word}" if roll < 0.3 else word

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
        if roll < 0.6:
            return self.rng.choice(g.VALUE_WORDS["name"])
        return f"{self._coined()} {self._coined()}" if roll < 0.63 else self._coined()

    def _city(self) -> str:
        roll = self.rng.random()
        if roll < 0.55:
            return self.rng.choice(g.VALUE_WORDS["city"])
        town = self._coined()
        if roll < 0.75:
            town = self._syllables(self.rng.randint(1, 2)).capitalize() + self.rng.choice(g.CITY_ENDS)
        return f"{self.rng.choice(('New', 'Old', 'Port', 'San'))} {town}" if roll > 0.92 else town

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
