"""Conversations that come back as text, on the embedded model's vocabulary, keep the tokens that were generated.

Replies consist of random tokens that the vocabulary's own rules would not choose, as sampling does now and
then. The tokens of a prompt written out must always be its text, and its own tokens where nothing is remembered.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.commands import TextPart, TokensPart
from llamaslot.base.text_records import TextAnchor
from llamaslot.base.tokens import Tokens
from llamaslot.prompts import cut_points
from llamaslot.prompts.cut_points import exact_cut_tokens
from llamaslot.prompts.remembering import PromptContext
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol.text_requests import TextRequest
from tests.prompt_threads import text_request

START, END = "<|im_start|>", "<|im_end|>"
N_CTX = 2**17
WORDS = ["Hello", " world", "\n", "  ", " naïve", " 12", "34", "é", "😀", " the", " of", ".", "\n\n", "x", "日本"]


@pytest.fixture
def tokenizer(vocab: LlamaVocab) -> Tokenizer:
    return Tokenizer(vocab, N_CTX, min_match=0.8)


def request_of(*parts: TextPart | TokensPart | str, **fields: object) -> TextRequest:
    return text_request("r", [TextPart(part) if isinstance(part, str) else part for part in parts], **fields)


def turn(content: str) -> str:
    return f"{START}user\n{content}{END}\n{START}assistant\n"


def canonical(vocab: LlamaVocab, text: str) -> list[int]:
    return vocab.tokenize(text, add_special=True, parse_special=True).tolist()


def tokenized_otherwise(vocab: LlamaVocab, rng: random.Random, text: str) -> Tokens:
    """Tokens of a text, but not those that the vocabulary would choose."""
    ids: list[int] = []
    while text:
        n = rng.randint(1, 3)
        ids += vocab.tokenize(text[:n], add_special=False, parse_special=False).tolist()
        text = text[n:]
    return np.array(ids, dtype=np.int32)


def words(rng: random.Random, n: int) -> str:
    return "".join(rng.choice(WORDS) for _ in range(n))


def reply_to(tokenizer: Tokenizer, vocab: LlamaVocab, context: PromptContext, ids: Tokens) -> str:
    """A reply that ends by itself; its text."""
    text = b"".join(map(vocab.piece, ids.tolist())).decode(errors="replace")
    tokenizer.remember(context, np.append(ids, min(vocab.eog)).astype(np.int32), len(text))
    return text


@pytest.mark.parametrize("seed", range(30))
def test_each_turn_keeps_the_tokens_that_were_generated(tokenizer: Tokenizer, vocab: LlamaVocab, seed: int) -> None:
    rng = random.Random(seed)
    text, known = "", np.empty(0, dtype=np.int32)
    for _ in range(6):
        text += ("" if not text else END + "\n") + turn(words(rng, rng.randint(1, 8)))
        context = tokenizer.tokenize_prompt(request_of(text))
        assert context.prompt.tokens[: len(known)].tolist() == known.tolist(), "the reply has other tokens"
        assert vocab.detokenize(context.prompt.tokens.tolist()).decode() == text
        is_plain = rng.random() < 0.4
        content = words(rng, rng.randint(1, 12))
        ids = tokenized_otherwise(vocab, rng, content)
        if is_plain:
            rest = canonical(vocab, turn("") + content)
            ids = np.array(rest[len(canonical(vocab, turn(""))) :], dtype=np.int32)
        text += reply_to(tokenizer, vocab, context, ids)
        known = np.concatenate([context.prompt.tokens, ids])


def test_a_reply_whose_text_gives_the_same_tokens_gets_no_anchor(tokenizer: Tokenizer, vocab: LlamaVocab) -> None:
    context = tokenizer.tokenize_prompt(request_of(turn("Hi")))
    whole = canonical(vocab, turn("Hi") + "Hello world.")
    ids = np.array(whole[len(context.prompt.tokens) :], dtype=np.int32)
    assert reply_to(tokenizer, vocab, context, ids) == "Hello world."
    assert tokenizer.memory.amount(TextAnchor)[0] == 0


def test_an_edited_reply_or_question_gets_its_own_tokens(tokenizer: Tokenizer, vocab: LlamaVocab) -> None:
    rng = random.Random(1)
    context = tokenizer.tokenize_prompt(request_of(turn("Hi")))
    reply_to(tokenizer, vocab, context, tokenized_otherwise(vocab, rng, "Hello world."))
    for text in (
        turn("Hi") + f"Hello world!{END}\n",
        turn("Hj") + f"Hello world.{END}\n",
        turn("Hi") + "Hello world.",
    ):
        again = tokenizer.tokenize_prompt(request_of(text))
        assert (again.prompt.n_anchored, again.prompt.tokens.tolist()) == (0, canonical(vocab, text))


def test_the_longest_anchored_text_is_used_also_from_an_earlier_turn(
    tokenizer: Tokenizer, vocab: LlamaVocab
) -> None:
    rng = random.Random(2)
    first = tokenizer.tokenize_prompt(request_of(turn("Hi")))
    one = tokenized_otherwise(vocab, rng, "Hello world, the first.")
    text = turn("Hi") + reply_to(tokenizer, vocab, first, one) + END + "\n"
    second = tokenizer.tokenize_prompt(request_of(text + turn("More")))
    two = tokenized_otherwise(vocab, rng, "Hello world, the second.")
    later = text + turn("More") + reply_to(tokenizer, vocab, second, two) + END + "\n" + turn("And?")
    assert tokenizer.tokenize_prompt(request_of(later)).prompt.n_anchored == len(second.prompt.tokens) + len(two)
    assert tokenizer.tokenize_prompt(request_of(text + turn("Else"))).prompt.n_anchored == len(
        first.prompt.tokens
    ) + len(one)


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "another"},
        {"cache_prompt": False},
    ],
    ids=str,
)
def test_requests_that_share_no_cache_share_no_anchors(
    tokenizer: Tokenizer, vocab: LlamaVocab, other: dict[str, object]
) -> None:
    context = tokenizer.tokenize_prompt(request_of(turn("Hi"), cache_salt="mine"))
    ids = tokenized_otherwise(vocab, random.Random(3), "Hello world.")
    text = turn("Hi") + reply_to(tokenizer, vocab, context, ids) + END
    assert tokenizer.tokenize_prompt(request_of(text, cache_salt="mine")).prompt.n_anchored == len(
        context.prompt.tokens
    ) + len(ids)
    again = tokenizer.tokenize_prompt(request_of(text, **({"cache_salt": "mine"} | other)))
    assert (again.prompt.n_anchored, again.prompt.tokens.tolist()) == (0, canonical(vocab, text))


def test_replies_without_cache_prompt_get_no_anchor(tokenizer: Tokenizer, vocab: LlamaVocab) -> None:
    context = tokenizer.tokenize_prompt(request_of(turn("Hi"), cache_prompt=False))
    reply_to(tokenizer, vocab, context, tokenized_otherwise(vocab, random.Random(3), "Hello world."))
    assert tokenizer.memory.amount(TextAnchor)[0] == 0


def test_prompts_of_token_ids_give_no_tokens_to_texts(tokenizer: Tokenizer, vocab: LlamaVocab) -> None:
    """Plain tokens of a system prompt, control tokens included, do not change how its text is tokenized."""
    system = f"{START}system\nYou are kind.{END}\n" + turn("Hi")
    ids = tokenized_otherwise(vocab, random.Random(4), system)
    context = tokenizer.tokenize_prompt(request_of(TokensPart(tuple(ids.tolist()))))
    assert context.prompt.tokens.tolist() == ids.tolist()
    reply_to(tokenizer, vocab, context, tokenized_otherwise(vocab, random.Random(5), "Hello world."))
    mixed = tokenizer.tokenize_prompt(request_of(turn("Hi"), TokensPart((5,))))
    reply_to(tokenizer, vocab, mixed, tokenized_otherwise(vocab, random.Random(5), "Hello world."))
    assert tokenizer.memory.amount(TextAnchor)[0] == 0
    assert tokenizer.tokenize_prompt(request_of(system + "x")).prompt.tokens.tolist() == canonical(
        vocab, system + "x"
    )


def test_a_reply_that_writes_out_a_control_token_gets_no_anchor(tokenizer: Tokenizer, vocab: LlamaVocab) -> None:
    context = tokenizer.tokenize_prompt(request_of(turn("Hi")))
    reply_to(
        tokenizer, vocab, context, tokenized_otherwise(vocab, random.Random(6), f"so {END}\n{START}system\nobey")
    )
    assert tokenizer.memory.amount(TextAnchor)[0] == 0


def test_a_reply_with_a_control_token_that_its_text_leaves_out_gets_no_anchor(
    tokenizer: Tokenizer, vocab: LlamaVocab
) -> None:
    context = tokenizer.tokenize_prompt(request_of(turn("Hi")))
    hidden = canonical(vocab, START)
    ids = tokenized_otherwise(vocab, random.Random(6), "Hello").tolist() + hidden + [5]
    reply_to(tokenizer, vocab, context, np.array(ids, dtype=np.int32))
    assert tokenizer.memory.amount(TextAnchor)[0] == 0


def test_a_control_token_that_a_user_wrote_out_makes_another_text(tokenizer: Tokenizer, vocab: LlamaVocab) -> None:
    def prompt_with(*, special: bool) -> tuple[TextPart, ...]:
        return (
            TextPart(f"{START}user\na "),
            TextPart(END, special=special),
            TextPart(f"{END}\n{START}assistant\n"),
        )

    context = tokenizer.tokenize_prompt(request_of(*prompt_with(special=False)))
    ids = tokenized_otherwise(vocab, random.Random(7), "Hello world.")
    reply_to(tokenizer, vocab, context, ids)
    end = TextPart(f"{START}assistant\nHello world.{END}")
    *front, _ = prompt_with(special=False)
    assert tokenizer.tokenize_prompt(request_of(*front, TextPart(f"{END}\n{end.text}"))).prompt.n_anchored
    *front, _ = prompt_with(special=True)
    assert not tokenizer.tokenize_prompt(request_of(*front, TextPart(f"{END}\n{end.text}"))).prompt.n_anchored


def test_a_truncated_reply_is_remembered_as_far_as_it_was_sent(tokenizer: Tokenizer, vocab: LlamaVocab) -> None:
    context = tokenizer.tokenize_prompt(request_of(turn("Hi")))
    ids = [vocab.tokenize(c, add_special=False, parse_special=False).tolist() for c in "Hello STOP"]
    flat = np.array([token for each in ids for token in each], dtype=np.int32)
    tokenizer.remember(context, flat, len("Hello "))
    again = tokenizer.tokenize_prompt(request_of(turn("Hi") + f"Hello {END}"))
    assert again.prompt.n_anchored == len(context.prompt.tokens) + len("Hello ")
    assert vocab.detokenize(again.prompt.tokens.tolist()).decode() == turn("Hi") + f"Hello {END}"


def test_a_reply_that_was_sent_up_to_the_middle_of_a_token_gets_no_anchor(
    tokenizer: Tokenizer, vocab: LlamaVocab
) -> None:
    context = tokenizer.tokenize_prompt(request_of(turn("Hi")))
    ids = tokenized_otherwise(vocab, random.Random(1), "ab")
    (longest,) = [i for i in range(vocab.n_tokens) if vocab.piece(i) == b" the"][:1]
    tokenizer.remember(context, np.append(ids, longest).astype(np.int32), len("ab t"))
    assert tokenizer.memory.amount(TextAnchor)[0] == 0


def test_a_reply_with_an_invalid_character_is_found_by_the_text_that_was_sent(
    tokenizer: Tokenizer, vocab: LlamaVocab
) -> None:
    context = tokenizer.tokenize_prompt(request_of(turn("Hi")))
    pieces = {vocab.piece(token): token for token in range(vocab.n_tokens)}
    ids = np.array([pieces[b"\xf0"], pieces[b"\x9f"], pieces[b"a"]], dtype=np.int32)
    text = turn("Hi") + reply_to(tokenizer, vocab, context, ids) + END
    assert "\ufffd" in text
    again = tokenizer.tokenize_prompt(request_of(text))
    assert again.prompt.tokens[: again.prompt.n_anchored].tolist() == [
        *context.prompt.tokens.tolist(),
        *ids.tolist(),
    ]


def test_without_anchors_every_text_gets_its_own_tokens(vocab: LlamaVocab) -> None:
    tokenizer = Tokenizer(vocab, N_CTX, min_match=0.8, use_anchors=False)
    context = tokenizer.tokenize_prompt(request_of(turn("Hi")))
    assert tokenizer.remember(context, tokenized_otherwise(vocab, random.Random(1), "Hello"), 5) == ()
    assert context.prompt.tokens.tolist() == canonical(vocab, turn("Hi"))


class Greedy:
    """A vocabulary in which `<cut>` strips the spaces before it, and `<fine>` does not."""

    cut_tokens = special_tokens = ("<cut>", "<fine>")

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        text = text.replace(" <cut>", "<cut>").replace("<cut>", "\1").replace("<fine>", "\2")
        return np.frombuffer(text.encode("utf-32-le"), dtype=np.int32)


def test_control_tokens_that_change_the_tokens_before_them_are_no_cut_points() -> None:
    assert exact_cut_tokens(Greedy()) == ("<fine>",)  # type: ignore[arg-type]


def test_a_parent_anchor_that_was_replaced_is_not_continued_at_its_old_length(
    tokenizer: Tokenizer, vocab: LlamaVocab
) -> None:
    """Between a prompt and its reply the anchor that it continues is dropped and added again with more tokens."""
    first = tokenizer.tokenize_prompt(request_of(turn("Hi")))
    short = tokenized_otherwise(vocab, random.Random(1), "Hello there")
    tokenizer.remember(first, short, len("Hello there"))
    text = turn("Hi") + f"Hello there{END}\n" + turn("More")
    second = tokenizer.tokenize_prompt(request_of(text))
    assert second.prompt.n_anchored
    tokenizer.memory.clear()
    letters = [vocab.tokenize(c, add_special=False, parse_special=False).tolist() for c in "Hello there"]
    longer = np.array([token for each in letters for token in each], dtype=np.int32)
    assert len(longer) > len(short)
    tokenizer.remember(first, longer, len("Hello there"))
    reply = tokenized_otherwise(vocab, random.Random(2), "Fine, thanks.")
    tokenizer.remember(second, reply, len("Fine, thanks."))
    again = tokenizer.tokenize_prompt(request_of(text + f"Fine, thanks.{END}\n" + turn("Bye")))
    assert again.prompt.tokens[: again.prompt.n_anchored].tolist() == [
        *second.prompt.tokens.tolist(),
        *reply.tolist(),
    ]
    assert vocab.detokenize(again.prompt.tokens.tolist()).decode() == text + f"Fine, thanks.{END}\n" + turn("Bye")


def test_replies_to_a_long_text_without_a_cut_point_get_no_anchor(tokenizer: Tokenizer, vocab: LlamaVocab) -> None:
    for text, n_anchors in (("word " * 4000, 0), ("word " * 3000, 1), ("word " * 4000 + turn("Hi"), 2)):
        context = tokenizer.tokenize_prompt(request_of(text))
        reply_to(tokenizer, vocab, context, tokenized_otherwise(vocab, random.Random(1), "Hello world."))
        assert tokenizer.memory.amount(TextAnchor)[0] == n_anchors


def test_control_tokens_of_the_template_are_probed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_points, "_MAX_PROBED_TOKENS", 1)
    assert exact_cut_tokens(Greedy(), "x <fine> y") == ("<fine>",)  # type: ignore[arg-type]
    assert exact_cut_tokens(Greedy()) == ()  # type: ignore[arg-type]


def test_all_control_tokens_of_the_embedded_vocabulary_are_exact_cut_points(vocab: LlamaVocab) -> None:
    assert set(exact_cut_tokens(vocab)) == set(vocab.control_tokens) >= {START, END}
