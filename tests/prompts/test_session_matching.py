"""Prompts of sessions, on the embedded model's vocabulary, keep the session's tokens as far as the text agrees.

Replies consist of random tokens that the vocabulary's own rules would not choose. The tokens of a prompt written
out must always be its text, with real control tokens where the prompt has them.
"""

from __future__ import annotations

import random
from itertools import takewhile

import numpy as np
import pytest

from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.commands import TextPart, TokensPart
from llamaslot.base.text_records import Session, TextAnchor
from llamaslot.base.tokens import TokenizedPrompt, Tokens
from llamaslot.prompts.cut_points import MarkedText, Pieces, TextScanner
from llamaslot.prompts.token_memory import TokenMemory
from llamaslot.prompts.tokenizer import Tokenizer, tokenize_parts
from tests.prompt_threads import text_request
from tests.prompts.test_anchored_prompts import END, N_CTX, canonical, tokenized_otherwise, turn, words

LONG = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep for a while. " * 3


class Talk:
    """Conversations with random tokens in their replies, through one tokenizer."""

    def __init__(self, vocab: LlamaVocab, *, min_match: float = 0.8) -> None:
        self.vocab = vocab
        self.tokenizer = Tokenizer(vocab, N_CTX, min_match=min_match)
        self.scanner = TextScanner((), vocab.special_tokens)
        self.rng = random.Random(7)

    def ask(self, *parts: TextPart | TokensPart | str, **fields: object) -> TokenizedPrompt:
        """Tokenize a prompt, whose tokens must be its text."""
        prompt = tuple(TextPart(part) if isinstance(part, str) else part for part in parts)
        request = text_request("r", prompt, **({"session_id": "mine"} | fields))
        self.context = self.tokenizer.tokenize_prompt(request)
        texts = [part for part in prompt if isinstance(part, TextPart)]
        if len(texts) == len(prompt):
            written = MarkedText.of(self.context.prompt.tokens.tolist(), Pieces(self.vocab)).data
            assert written == self.scanner.scan(texts, "").data, "the tokens are another text"
        return self.context.prompt

    def reply(self, content: str) -> list[int]:
        """Reply to the last prompt; return all tokens of its session."""
        ids = tokenized_otherwise(self.vocab, self.rng, content)
        self.remember(np.append(ids, min(self.vocab.eog)).astype(np.int32), len(content))
        return [*self.context.prompt.tokens.tolist(), *ids.tolist()]

    def remember(self, generated: Tokens, n_sent: int, *, keep_anchor: bool = False) -> Session:
        """End the last request, without a text anchor, so that only sessions give tokens."""
        *_, session = self.tokenizer.remember(self.context, generated, n_sent)
        assert isinstance(session, Session)
        if not keep_anchor:
            memory = self.tokenizer.memory
            records = memory.records()
            memory.clear()
            for each in records:
                if not isinstance(each, TextAnchor):
                    memory.add(each)
        return session


@pytest.fixture
def talk(vocab: LlamaVocab) -> Talk:
    return Talk(vocab)


@pytest.mark.parametrize("seed", range(20))
def test_each_turn_keeps_the_tokens_that_were_generated(vocab: LlamaVocab, seed: int) -> None:
    talk = Talk(vocab)
    rng = talk.rng = random.Random(seed)
    text, known = "", []
    for i in range(6):
        text += ("" if not text else END + "\n") + turn(words(rng, rng.randint(1, 8)))
        prompt = talk.ask(text)
        assert prompt.session_match == ("extend" if i else "new")
        assert prompt.tokens[: len(known)].tolist() == known, "the reply has other tokens"
        content = words(rng, rng.randint(1, 12))
        known = talk.reply(content)
        text += content


def test_an_equal_text_keeps_all_tokens(talk: Talk) -> None:
    talk.ask(turn("Hi"))
    known = talk.reply("Hello world.")
    again = talk.ask(turn("Hi") + "Hello world.")
    assert (again.session_match, again.tokens.tolist(), again.n_approximate) == ("exact", known, 0)


def test_a_reply_that_comes_back_trimmed_is_kept_up_to_there(vocab: LlamaVocab, talk: Talk) -> None:
    talk.ask(turn("Hi"))
    known = talk.reply(LONG + "Bye. \n")
    text = turn("Hi") + LONG + "Bye." + END + "\n" + turn("And?")
    prompt = talk.ask(text)
    n = next(i for i, (a, b) in enumerate(zip(prompt.tokens.tolist(), known, strict=False)) if a != b)
    own = canonical(vocab, text)
    n_own = next(i for i, (a, b) in enumerate(zip(own, known, strict=False)) if a != b)
    assert (prompt.session_match, prompt.n_approximate, prompt.is_reply_edited) == ("diverge", n - n_own, True)
    assert n > n_own
    assert len(vocab.detokenize(known[:n])) >= len(turn("Hi") + LONG) - 4


def test_an_edited_reply_is_kept_up_to_a_word(vocab: LlamaVocab, talk: Talk) -> None:
    talk.ask(turn("Hi"))
    known = talk.reply(LONG + " Blackbirds sing")
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
def test_a_prompt_that_keeps_too_little_gets_its_own_tokens(
    vocab: LlamaVocab, min_match: float, reply: str, back: str
) -> None:
    talk = Talk(vocab, min_match=min_match)
    talk.ask(turn("Hi"))
    talk.reply(reply)
    text = turn("Hi") + back + END
    prompt = talk.ask(text)
    assert (prompt.session_match, prompt.tokens.tolist()) == ("tokens", canonical(vocab, text))
    assert prompt.is_reply_edited


def test_a_prompt_without_its_earlier_reply_gets_its_own_tokens_and_counts_as_unedited(
    vocab: LlamaVocab, talk: Talk
) -> None:
    talk.ask(turn("Hi"))
    talk.reply(LONG)
    again = talk.ask(turn("Hi"))
    assert (again.session_match, again.tokens.tolist()) == ("tokens", canonical(vocab, turn("Hi")))
    assert not again.is_reply_edited


def test_a_prompt_without_a_reply_is_kept_up_to_a_word(vocab: LlamaVocab, talk: Talk) -> None:
    talk.ask("Hello wor")
    talk.remember(np.empty(0, dtype=np.int32), 0)
    assert talk.ask("Hello world, hello").tokens.tolist() == canonical(vocab, "Hello world, hello")


def test_tokens_that_were_not_sent_match_no_text_but_belong_to_the_session(vocab: LlamaVocab, talk: Talk) -> None:
    prompt = talk.ask(turn("Hi"))
    ids = vocab.tokenize("Hello world. STOP", add_special=False, parse_special=False)
    session = talk.remember(ids, len("Hello world."))
    assert session.ids.tolist() == [*prompt.tokens.tolist(), *ids.tolist()]
    assert vocab.detokenize(session.text_tokens.tolist()).decode() == turn("Hi") + "Hello world."
    again = talk.ask(turn("Hi") + "Hello world." + END)
    assert again.session_match == "extend"


def test_a_control_token_written_out_as_plain_text_is_another_text(vocab: LlamaVocab, talk: Talk) -> None:
    real = (turn("Hi"), LONG, END)
    prompt = talk.ask(*real)
    talk.reply("Yes.")
    parts = (TextPart(turn("Hi")), TextPart(LONG), TextPart(END, special=False), TextPart("Yes."))
    other = talk.ask(*parts)
    assert other.tokens.tolist() == tokenize_parts(vocab, parts, add_special=True).tolist()
    assert len(other.tokens) > len(prompt.tokens)


@pytest.mark.parametrize(
    "other",
    [{"cache_salt": "another"}, {"cache_prompt": False}, {"session_id": "yours"}, {"session_id": ""}],
    ids=str,
)
def test_sessions_of_other_clients_are_not_used(vocab: LlamaVocab, other: dict[str, object]) -> None:
    talk = Talk(vocab)
    fields = {"cache_salt": "mine"}
    talk.ask(turn("Hi"), **fields)
    known = talk.reply("Hello world.")
    text = turn("Hi") + "Hello world." + END
    assert talk.ask(text, **fields).tokens[: len(known)].tolist() == known
    prompt = talk.ask(text, **(fields | other))
    assert prompt.tokens.tolist() == canonical(vocab, text)
    assert prompt.session_match == (
        "new" if {"session_id", "cache_salt"} & other.keys() and other != {"session_id": ""} else ""
    )


def test_token_ids_match_no_text_and_text_matches_no_token_ids(vocab: LlamaVocab, talk: Talk) -> None:
    text = turn("Hi") + LONG
    odd = TokensPart(tuple(tokenized_otherwise(vocab, talk.rng, text).tolist()))
    talk.ask(odd)
    talk.reply("Yes.")
    prompt = talk.ask(text + "Yes.")
    assert (prompt.session_match, prompt.tokens.tolist()) == ("tokens", canonical(vocab, text + "Yes."))
    talk.reply("No.")
    again = talk.ask(odd)
    assert (again.session_match, tuple(again.tokens.tolist())) == ("tokens", odd.tokens)


def test_a_reply_in_a_session_gets_an_anchor_for_requests_without_one(vocab: LlamaVocab, talk: Talk) -> None:
    talk.ask(turn("Hi"))
    known = talk.reply("Hello world.")
    text = turn("Hi") + "Hello world." + END + "\n" + turn("More")
    prompt = talk.ask(text)
    assert prompt.session_match == "extend"
    ids = tokenized_otherwise(vocab, talk.rng, "And more of it.")
    talk.remember(np.append(ids, min(vocab.eog)).astype(np.int32), len("And more of it."), keep_anchor=True)
    later = text + "And more of it." + END + "\n" + turn("Last")
    other = talk.ask(later, session_id="")
    assert other.n_anchored == len(prompt.tokens) + len(ids)
    assert other.tokens[: len(known)].tolist() == known


def test_without_anchors_sessions_are_not_compared_by_text(vocab: LlamaVocab) -> None:
    tokenizer = Tokenizer(vocab, N_CTX, min_match=0.8, use_anchors=False)
    params = text_request("r", (TextPart("Hello"),), session_id="mine")
    context = tokenizer.tokenize_prompt(params)
    assert context.prompt.session_match == "new"
    tokenizer.remember(context, np.array([5], dtype=np.int32), 1)
    prompt = tokenizer.tokenize_prompt(params).prompt
    assert (prompt.session_match, prompt.tokens.tolist()) == ("tokens", canonical(vocab, "Hello"))


def byte_tokens(vocab: LlamaVocab, raw: bytes) -> list[int]:
    """Tokens of single bytes."""
    by_piece = {vocab.piece(token): token for token in range(vocab.n_tokens)}
    return [by_piece[bytes([byte])] for byte in raw]


def test_a_reply_that_ends_within_a_character_is_not_continued_with_its_rest(vocab: LlamaVocab, talk: Talk) -> None:
    talk.ask(turn("Hi"))
    ids = np.array(byte_tokens(vocab, "Hello 日".encode()[:-1]), dtype=np.int32)
    talk.remember(ids, len("Hello \ufffd"))
    again = talk.ask(turn("Hi") + "Hello 日本" + END)
    assert again.session_match == "extend"
    assert again.tokens.tolist()[-len(canonical(vocab, " 日本" + END)) :] == canonical(vocab, " 日本" + END)


def test_a_generated_marker_byte_is_no_control_token(vocab: LlamaVocab, talk: Talk) -> None:
    talk.ask(turn("Hi"))
    plain = vocab.tokenize(END, add_special=False, parse_special=False).tolist()
    ids = np.array([*byte_tokens(vocab, b"\xff"), *plain], dtype=np.int32)
    talk.remember(ids, 1 + len(END))
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


def without_probing(vocab: LlamaVocab) -> Tokenizer:
    """A tokenizer that takes all control tokens for exact cut points."""
    tokenizer = Tokenizer(vocab, N_CTX, min_match=0.8)
    tokenizer._scanner = TextScanner(vocab.cut_tokens, vocab.special_tokens)
    return tokenizer


def test_a_prompt_whose_tokens_are_another_text_is_not_compared_by_text(spaced: Spaced) -> None:
    tokenizer = without_probing(spaced)
    params = text_request("r", (TextPart("Hello there"),), session_id="mine")
    tokenizer.remember(tokenizer.tokenize_prompt(params), np.empty(0, dtype=np.int32), 0)
    other = text_request("r", (TextPart(" Hello there"),), session_id="mine")
    prompt = tokenizer.tokenize_prompt(other).prompt
    assert prompt.session_match == "tokens"
    assert prompt.tokens.tolist() == tokenize_parts(spaced, other.parts, add_special=True).tolist()


def test_a_session_is_not_continued_where_the_rest_would_become_another_text(spaced: Spaced) -> None:
    tokenizer = without_probing(spaced)
    context = tokenizer.tokenize_prompt(text_request("r", (TextPart(turn("Hi")),), session_id="mine"))
    ids = spaced.tokenize("Hello", add_special=False, parse_special=False)
    tokenizer.remember(context, ids, len(" Hello"))
    for rest, outcome in ((END, "extend"), (" and more", "tokens")):
        params = text_request("r", (TextPart(turn("Hi") + " Hello" + rest),), session_id="mine")
        again = tokenizer.tokenize_prompt(params).prompt
        assert again.session_match == outcome, rest
    assert spaced.detokenize(again.tokens.tolist()).decode() == turn("Hi") + " Hello and more"


def test_the_least_recently_used_sessions_go_first(talk: Talk) -> None:
    talk.tokenizer.memory = TokenMemory(3000)
    for i in range(10):
        talk.ask(turn(f"Hi {i}"), session_id=f"{i % 7}")
        talk.reply("Hello.")
    assert 0 < talk.tokenizer.memory.amount(Session)[0] < 7
    assert talk.ask(turn("Hi 9") + "Hello.", session_id="2").session_match == "exact"


def test_a_prompt_too_long_with_its_sessions_tokens_gets_its_own(vocab: LlamaVocab) -> None:
    tokenizer = Tokenizer(vocab, 100, min_match=0.8)
    context = tokenizer.tokenize_prompt(text_request("r", (TextPart(turn("Hi")),), session_id="mine"))
    tokenizer.remember(context, np.array(byte_tokens(vocab, LONG[:90].encode()), dtype=np.int32), 90)
    text = turn("Hi") + LONG[:90] + END
    again = tokenizer.tokenize_prompt(text_request("r", (TextPart(text),), session_id="mine")).prompt
    assert (again.session_match, again.tokens.tolist()) == ("tokens", canonical(vocab, text))
