"""The demo model's language: what it teaches is in its grammar, repeatable, and never what it is examined on."""

from __future__ import annotations

import random

import pytest

from bench.demo import grammar
from bench.demo.checker import is_grammatical, sentences
from bench.demo.corpus import chatter, held_out, training_talk
from bench.demo.values import is_held_out
from bench.demo.writer import MARK_CLOSE, MARK_OPEN, TalkWriter, plain


@pytest.mark.parametrize("far", [False, True])
def test_the_checker_knows_every_sentence_that_the_assistant_is_taught(far: bool) -> None:
    rng = random.Random(7)
    said = [
        plain(message["content"])
        for _ in range(100)
        for message in training_talk(rng, 4000, far)
        if message["role"] != "user" and message["role"] != "system"
    ]
    assert len(said) > 1000
    assert not [sentence for text in said for sentence in sentences(text) if not is_grammatical(sentence)]


@pytest.mark.parametrize(
    "sentence",
    [
        "Your cat is called Your cat is called Your cat is called Milo.",
        "Your favourite colour is blue blue blue blue blue blue.",
        "Your cat is called.",
        "Your cat are called Milo.",
        "Once upon a time.",
        "Okay",
        "I know that Milo.",
        ".",
    ],
)
def test_the_checker_refuses_what_no_template_gives(sentence: str) -> None:
    assert not is_grammatical(sentence)


def test_a_seed_repeats_a_conversation() -> None:
    assert training_talk(random.Random(3), 3000, True) == training_talk(random.Random(3), 3000, True)
    assert list(held_out(5, 1, 300)) == list(held_out(5, 1, 300))
    assert list(chatter(5, 1)) == list(chatter(5, 1))


@pytest.mark.parametrize("examined", [False, True])
def test_no_fact_is_both_taught_and_examined(examined: bool) -> None:
    for seed in range(200):
        writer = TalkWriter(random.Random(seed), held_out=examined)
        writer.tell(3)
        writer.fix(random.Random(seed).choice(list(writer.ledger)))
        for (attribute, _), value in writer.ledger.items():
            assert is_held_out(attribute.key, value) == examined


def test_facts_are_noted_in_the_words_in_which_they_are_asked_back() -> None:
    for dialogue in held_out(200, 5, 200):
        noted = [m["content"] for m in dialogue.messages if m["role"] == "assistant"]
        assert dialogue.value in dialogue.answer
        if dialogue.kind in {"told", "corrected"}:
            assert any(
                text.startswith((grammar.NOTED, grammar.CORRECTED)) and dialogue.answer in text for text in noted
            )


def test_marks_stand_around_values_of_replies_only() -> None:
    rng = random.Random(11)
    for message in (m for _ in range(50) for m in training_talk(rng, 2000, False)):
        opened = message["content"].count(MARK_OPEN)
        assert opened == message["content"].count(MARK_CLOSE)
        assert not opened or message["role"] in ("assistant", "text")
