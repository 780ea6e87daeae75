"""Prompts of sessions on the embedded model's vocabulary: taken over by their text as far as that is the same.

Replies are spelled at random by tokens that the vocabulary's own rules would not choose. Whatever comes of a prompt
spells its text, with real control tokens where the prompt has them.
"""

from __future__ import annotations

import random
from itertools import takewhile

import numpy as np
import pytest

from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.commands import Submit, TextPart, TokensPart
from llamaslot.base.tokens import Tokens
from llamaslot.prompts.anchoring import Anchoring, Prompt, tokenized
from llamaslot.prompts.continuing import Continuing, spelled
from llamaslot.prompts.cuts import Cutter
from llamaslot.prompts.sessions import Sessions
from llamaslot.prompts.tokenizer import Tokenizer
from tests.engine.test_anchoring import END, canonical, spelled_otherwise, turn, words

LONG = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep for a while. " * 3


class Talk:
    """Asks, and replies by tokens at random."""

    def __init__(self, vocab: LlamaVocab, *, min_match: float = 0.8) -> None:
        self.vocab = vocab
        self.anchoring = Anchoring(vocab)
        self.continuing = Continuing(vocab, self.anchoring, min_match=min_match)
        self.rng = random.Random(7)

    def submit(self, *parts: TextPart | TokensPart | str, **fields: object) -> Submit:
        prompt = tuple(TextPart(part) if isinstance(part, str) else part for part in parts)
        return Submit("r", prompt, **({"session_id": "mine"} | fields))  # type: ignore[arg-type]

    def ask(self, *parts: TextPart | TokensPart | str, **fields: object) -> Prompt:
        submit = self.submit(*parts, **fields)
        prompt = self.continuing.submitted(submit)
        texts = [part for part in submit.prompt if isinstance(part, TextPart)]
        if len(texts) == len(submit.prompt):
            cutter = self.anchoring.cutter
            assert cutter is not None
            assert spelled(self.vocab, prompt.tokens.tolist()).text == cutter.marked(texts), (
                "it spells something else"
            )
        return prompt

    def reply(
        self, prompt: Prompt, content: str, *parts: TextPart | TokensPart | str, **fields: object
    ) -> list[int]:
        """End the session with a reply; all its tokens."""
        ids = spelled_otherwise(self.vocab, self.rng, content)
        ended = np.append(ids, min(self.vocab.eog)).astype(np.int32)
        self.continuing.replied(self.submit(*parts, **fields), prompt, ended, len(content))
        return [*prompt.tokens.tolist(), *ids.tolist()]


@pytest.fixture
def talk(vocab: LlamaVocab) -> Talk:
    return Talk(vocab)


@pytest.mark.parametrize("seed", range(20))
def test_a_conversation_goes_on_from_what_was_generated(vocab: LlamaVocab, seed: int) -> None:
    talk = Talk(vocab)
    rng = talk.rng = random.Random(seed)
    text, known = "", []
    for i in range(6):
        text += ("" if not text else END + "\n") + turn(words(rng, rng.randint(1, 8)))
        prompt = talk.ask(text)
        assert prompt.session_match == ("extend" if i else "new")
        assert prompt.tokens[: len(known)].tolist() == known, "it does not go on from its reply"
        content = words(rng, rng.randint(1, 12))
        known = talk.reply(prompt, content, text)
        text += content


def test_all_of_a_text_is_taken_over_as_it_was(talk: Talk) -> None:
    known = talk.reply(talk.ask(turn("Hi")), "Hello world.", turn("Hi"))
    again = talk.ask(turn("Hi") + "Hello world.")
    assert (again.session_match, again.tokens.tolist(), again.n_approximate) == ("exact", known, 0)


def test_a_reply_that_came_back_trimmed_is_kept_up_to_there(vocab: LlamaVocab, talk: Talk) -> None:
    known = talk.reply(talk.ask(turn("Hi")), LONG + "Bye. \n", turn("Hi"))
    text = turn("Hi") + LONG + "Bye." + END + "\n" + turn("And?")
    prompt = talk.ask(text)
    n = next(i for i, (a, b) in enumerate(zip(prompt.tokens.tolist(), known, strict=False)) if a != b)
    own = canonical(vocab, text)
    n_own = next(i for i, (a, b) in enumerate(zip(own, known, strict=False)) if a != b)
    assert (prompt.session_match, prompt.n_approximate, prompt.is_changed) == ("diverge", n - n_own, True)
    assert n > n_own
    assert len(vocab.detokenize(known[:n])) >= len(turn("Hi") + LONG) - 4


def test_where_a_reply_was_changed_the_rest_is_cut_at_a_word(vocab: LlamaVocab, talk: Talk) -> None:
    known = talk.reply(talk.ask(turn("Hi")), LONG + " Blackbirds sing", turn("Hi"))
    prompt = talk.ask(turn("Hi") + LONG + " Blackboards fall")
    assert prompt.session_match == "diverge"
    same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt.tokens.tolist(), known, strict=False))
    kept = vocab.detokenize([token for token, _ in same])
    assert (turn("Hi") + LONG).encode().startswith(kept)
    rest = prompt.tokens.tolist()[len(prompt.tokens) - len(canonical(vocab, " Blackboards fall")) :]
    assert rest == canonical(vocab, " Blackboards fall")


@pytest.mark.parametrize(
    ("min_match", "reply", "back"),
    [
        (0.8, LONG + LONG, LONG + "Else"),
        (0.0, "Hello you there my friend", "Hello you there else"),
        (1.0, LONG + " and more", LONG + " or more"),
    ],
    ids=["too little of the text", "too few characters", "all of it is wanted"],
)
def test_too_little_that_is_the_same_is_not_taken_over(
    vocab: LlamaVocab, min_match: float, reply: str, back: str
) -> None:
    talk = Talk(vocab, min_match=min_match)
    talk.reply(talk.ask(turn("Hi")), reply, turn("Hi"))
    text = turn("Hi") + back + END
    prompt = talk.ask(text)
    assert (prompt.session_match, prompt.tokens.tolist()) == ("tokens", canonical(vocab, text))
    assert prompt.is_changed


def test_a_prompt_that_is_asked_again_has_its_own_tokens_and_was_not_changed(vocab: LlamaVocab, talk: Talk) -> None:
    talk.reply(talk.ask(turn("Hi")), LONG, turn("Hi"))
    again = talk.ask(turn("Hi"))
    assert (again.session_match, again.tokens.tolist()) == ("tokens", canonical(vocab, turn("Hi")))
    assert not again.is_changed


def test_a_text_that_was_only_evaluated_goes_on_at_a_place_that_cuts_no_word(vocab: LlamaVocab, talk: Talk) -> None:
    first = talk.ask("Hello wor")
    talk.continuing.replied(talk.submit("Hello wor"), first, np.empty(0, dtype=np.int32), 0)
    assert talk.ask("Hello world, hello").tokens.tolist() == canonical(vocab, "Hello world, hello")


def test_what_was_generated_and_not_sent_stands_for_no_text_but_belongs_to_the_session(
    vocab: LlamaVocab, talk: Talk
) -> None:
    prompt = talk.ask(turn("Hi"))
    ids = vocab.tokenize("Hello world. STOP", add_special=False, parse_special=False)
    _, session = talk.continuing.replied(talk.submit(turn("Hi")), prompt, ids, len("Hello world."))
    assert session.tokens.tolist() == [*prompt.tokens.tolist(), *ids.tolist()]
    assert vocab.detokenize(session.spelled.tolist()).decode() == turn("Hi") + "Hello world."
    again = talk.ask(turn("Hi") + "Hello world." + END)
    assert again.session_match == "extend"


def test_a_control_token_that_is_only_spelled_is_no_control_token(vocab: LlamaVocab, talk: Talk) -> None:
    real = (turn("Hi"), LONG, END)
    prompt = talk.ask(*real)
    talk.reply(prompt, "Yes.", *real)
    parts = (TextPart(turn("Hi")), TextPart(LONG), TextPart(END, special=False), TextPart("Yes."))
    other = talk.ask(*parts)
    assert other.tokens.tolist() == tokenized(vocab, parts, add_special=True).tolist()
    assert len(other.tokens) > len(prompt.tokens)


@pytest.mark.parametrize(
    "other",
    [{"cache_salt": "another"}, {"cache_prompt": False}, {"session_id": "yours"}, {"session_id": ""}],
    ids=str,
)
def test_nobody_elses_session_is_taken_over(vocab: LlamaVocab, other: dict[str, object]) -> None:
    talk = Talk(vocab)
    fields = {"cache_salt": "mine"}
    prompt = talk.ask(turn("Hi"), **fields)
    known = talk.reply(prompt, "Hello world.", turn("Hi"), **fields)
    text = turn("Hi") + "Hello world." + END
    assert talk.ask(text, **fields).tokens[: len(known)].tolist() == known
    prompt = talk.ask(text, **(fields | other))
    assert prompt.tokens.tolist() == canonical(vocab, text)
    assert prompt.session_match == (
        "new" if {"session_id", "cache_salt"} & other.keys() and other != {"session_id": ""} else ""
    )


def test_token_ids_stand_for_no_text_and_text_for_no_token_ids(vocab: LlamaVocab, talk: Talk) -> None:
    text = turn("Hi") + LONG
    odd = TokensPart(tuple(spelled_otherwise(vocab, talk.rng, text).tolist()))
    talk.reply(talk.ask(odd), "Yes.", odd)
    prompt = talk.ask(text + "Yes.")
    assert (prompt.session_match, prompt.tokens.tolist()) == ("tokens", canonical(vocab, text + "Yes."))
    talk.reply(prompt, "No.", text + "Yes.")
    again = talk.ask(odd)
    assert (again.session_match, tuple(again.tokens.tolist())) == ("tokens", odd.tokens)


def test_a_reply_behind_a_session_is_named_for_those_without_one(vocab: LlamaVocab, talk: Talk) -> None:
    known = talk.reply(talk.ask(turn("Hi")), "Hello world.", turn("Hi"))
    text = turn("Hi") + "Hello world." + END + "\n" + turn("More")
    prompt = talk.ask(text)
    assert prompt.session_match == "extend"
    ids = spelled_otherwise(vocab, talk.rng, "And more of it.")
    talk.anchoring.replied(prompt, np.append(ids, min(vocab.eog)).astype(np.int32), len("And more of it."))
    later = text + "And more of it." + END + "\n" + turn("Last")
    other = talk.ask(later, session_id="")
    assert other.n_anchored == len(prompt.tokens) + len(ids)
    assert other.tokens[: len(known)].tolist() == known


def test_without_anchors_a_session_goes_by_its_tokens(vocab: LlamaVocab) -> None:
    continuing = Continuing(vocab, Anchoring(vocab, is_wanted=False), min_match=0.8)
    submit = Submit("r", (TextPart("Hello"),), session_id="mine")
    assert continuing.submitted(submit).session_match == "new"
    continuing.replied(submit, continuing.submitted(submit), np.array([5], dtype=np.int32), 1)
    prompt = continuing.submitted(submit)
    assert (prompt.session_match, prompt.tokens.tolist()) == ("tokens", canonical(vocab, "Hello"))


def byte_tokens(vocab: LlamaVocab, raw: bytes) -> list[int]:
    """Tokens of single bytes."""
    by_piece = {vocab.piece(token): token for token in range(vocab.n_tokens)}
    return [by_piece[bytes([byte])] for byte in raw]


def test_a_reply_that_ends_inside_a_character_is_no_front_of_that_character(vocab: LlamaVocab, talk: Talk) -> None:
    prompt = talk.ask(turn("Hi"))
    ids = np.array(byte_tokens(vocab, "Hello 日".encode()[:-1]), dtype=np.int32)
    talk.continuing.replied(talk.submit(turn("Hi")), prompt, ids, len("Hello \ufffd"))
    again = talk.ask(turn("Hi") + "Hello 日本" + END)
    assert again.session_match == "extend"
    assert again.tokens.tolist()[-len(canonical(vocab, " 日本" + END)) :] == canonical(vocab, " 日本" + END)


def test_a_byte_that_no_text_has_is_no_control_token(vocab: LlamaVocab, talk: Talk) -> None:
    prompt = talk.ask(turn("Hi"))
    plain = vocab.tokenize(END, add_special=False, parse_special=False).tolist()
    ids = np.array([*byte_tokens(vocab, b"\xff"), *plain], dtype=np.int32)
    talk.continuing.replied(talk.submit(turn("Hi")), prompt, ids, 1 + len(END))
    again = talk.ask(turn("Hi") + END)
    assert again.tokens.tolist() == canonical(vocab, turn("Hi") + END)


class Spaced(LlamaVocab):
    """Puts a space in front of every text that does not begin with a control token, as some vocabularies do."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        space = " " if text and not (parse_special and text.startswith(tuple(self.special_tokens))) else ""
        return super().tokenize(space + text, add_special=add_special, parse_special=parse_special)


@pytest.fixture
def spaced(model: int) -> Spaced:
    return Spaced(model)


def continuing_of(vocab: LlamaVocab) -> Continuing:
    anchoring = Anchoring(vocab)
    anchoring._cutter, anchoring._is_prepared = Cutter(vocab.boundaries, vocab.special_tokens), True
    return Continuing(vocab, anchoring, min_match=0.8)


def test_tokens_that_spell_more_than_their_prompt_stand_for_no_text(spaced: Spaced) -> None:
    continuing = continuing_of(spaced)
    submit = Submit("r", (TextPart("Hello there"),), session_id="mine")
    continuing.replied(submit, continuing.submitted(submit), np.empty(0, dtype=np.int32), 0)
    other = Submit("r", (TextPart(" Hello there"),), session_id="mine")
    prompt = continuing.submitted(other)
    assert prompt.session_match == "tokens"
    assert prompt.tokens.tolist() == tokenized(spaced, other.prompt, add_special=True).tolist()


def test_a_rest_that_would_spell_something_else_is_not_put_behind_a_session(spaced: Spaced) -> None:
    continuing = continuing_of(spaced)
    submit = Submit("r", (TextPart(turn("Hi")),), session_id="mine")
    prompt = continuing.submitted(submit)
    ids = spaced.tokenize("Hello", add_special=False, parse_special=False)
    continuing.replied(submit, prompt, ids, len(" Hello"))
    for rest, outcome in ((END, "extend"), (" and more", "tokens")):
        again = continuing.submitted(Submit("r", (TextPart(turn("Hi") + " Hello" + rest),), session_id="mine"))
        assert again.session_match == outcome, rest
    assert spaced.detokenize(again.tokens.tolist()).decode() == turn("Hi") + " Hello and more"


def test_what_is_worked_out_of_a_session_goes_with_it(vocab: LlamaVocab, talk: Talk) -> None:
    talk.continuing.sessions = Sessions(3000)
    for i in range(10):
        fields = {"session_id": f"{i % 7}"}
        talk.reply(talk.ask(turn(f"Hi {i}"), **fields), "Hello.", turn(f"Hi {i}"), **fields)
    assert 0 < len(talk.continuing.sessions) < 7
    assert len(talk.continuing._spellings) == len(talk.continuing.sessions)


def test_a_prompt_too_long_by_its_sessions_tokens_has_its_own(vocab: LlamaVocab) -> None:
    tokenizer = Tokenizer(vocab, 100)
    submit = Submit("r", (TextPart(turn("Hi")),), session_id="mine")
    prompt = tokenizer.submitted(submit)
    ids = np.array(byte_tokens(vocab, LONG[:90].encode()), dtype=np.int32)
    tokenizer.remembered(submit, prompt, ids, 90)
    text = turn("Hi") + LONG[:90] + END
    again = tokenizer.submitted(Submit("r", (TextPart(text),), session_id="mine"))
    assert (again.session_match, again.tokens.tolist()) == ("tokens", canonical(vocab, text))
    tokenizer.close()
