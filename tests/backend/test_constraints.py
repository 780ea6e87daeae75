"""Constraints on the real vocabulary: masks, sampling within them, forced tokens, the grammars that are kept."""

from __future__ import annotations

import ctypes
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from llguidance import LLMatcher

from bench import synthetic
from llamaslot import demo
from llamaslot.backend import constraints as module
from llamaslot.backend.constraints import ConstraintCompiler, Matcher, TokenMask
from llamaslot.backend.llama.sampling.candidates import highest
from llamaslot.backend.llama.sampling.host_sampler import HostSampler
from llamaslot.backend.llama.sampling.penalties import BreakerIndex
from llamaslot.backend.llama.vocab import ConstraintTokenizer, LlamaVocab
from llamaslot.base.backend import CONSTRAINT_FAILED, NO_TOKEN
from llamaslot.base.commands import Constraint
from llamaslot.base.errors import InvalidRequestError, NotSupportedError
from llamaslot.base.generation.sampling import Sampling
from llamaslot.text.grammars.gbnf import gbnf_to_lark
from llamaslot.text.grammars.json_schema import json_schema_constraint

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind of é": {"enum": ["a fixed text of several words", "a fixed text <|im_end|> of others"]},
    },
    "required": ["name", "age", "kind of é"],
}


def of_lark(lark: str) -> Constraint:
    return Constraint(LLMatcher.grammar_from_lark(lark), "grammar")


@pytest.fixture(scope="module")
def vocab() -> LlamaVocab:
    return LlamaVocab.load(Path(demo.__file__).with_name("demo.gguf"))


@pytest.fixture(scope="module")
def compiler(vocab: LlamaVocab) -> Iterator[ConstraintCompiler]:
    eog = tuple(sorted(vocab.eog, key=lambda token: token != vocab.eos))
    tokenizer = ConstraintTokenizer(vocab)
    made = ConstraintCompiler(lambda: tokenizer.make(eog), n_vocab=vocab.n_tokens, eog=eog)
    yield made
    made.close()


class Chooser:
    """A sampler with a constraint, given random logits."""

    def __init__(self, vocab: LlamaVocab, matcher: Matcher, draw: int, **sampling: Any) -> None:
        self._draw = draw
        self._n = vocab.n_tokens
        settings = Sampling(**{"temperature": 0.0} | sampling)
        history = np.empty(0, dtype=np.int32)
        self.sampler = HostSampler(
            settings,
            history=history,
            n_ctx=512,
            n_vocab=self._n,
            eog=vocab.eog,
            breakers=BreakerIndex(vocab),
            matcher=matcher,
        )

    def next(self, position: int = 0) -> int:
        """Sample a token from logits that depend on its position only."""
        logits = np.random.default_rng((self._draw, position)).standard_normal(self._n).astype(np.float32)
        before = logits.copy()
        token = self.sampler.choose(logits)
        assert np.array_equal(logits, before), "logits that others sample from were changed"
        return token


def allowed(mask: TokenMask | None, n: int) -> set[int]:
    assert mask is not None
    tokens = set(mask.tokens.tolist())
    return tokens if mask.is_allowed else set(range(n)) - tokens


def generate(chooser: Chooser, vocab: LlamaVocab, *, fast_forward: bool, most: int = 400) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < most and not vocab.eog.intersection(tokens):
        tokens.append(chooser.next(len(tokens)))
        assert tokens[-1] >= 0, chooser.sampler.failure
        if fast_forward and tokens[-1] not in vocab.eog:
            tokens += chooser.sampler.advance(forced=())
    return tokens


def text_of(tokens: list[int], vocab: LlamaVocab) -> str:
    return b"".join(vocab.piece(token) for token in tokens).decode()


@pytest.mark.parametrize("n_vocab", [64, 250, 1000])
def test_a_mask_keeps_the_shorter_list(n_vocab: int) -> None:
    choice = random.Random(n_vocab)
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        expected = {i for i in range(n_vocab) if choice.random() < share}
        words = np.zeros((n_vocab + 31) // 32, dtype=np.int32)
        view = words.view(np.uint32)
        for token in expected:
            view[token // 32] |= np.uint32(1 << token % 32)
        mask = TokenMask.of(words, n_vocab)
        assert allowed(mask, n_vocab) == expected
        assert share not in (0.01, 0.99) or len(mask.tokens) < n_vocab / 2


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 0, "typical_p": 0.5}])
def test_answers_match_the_schema(vocab: LlamaVocab, compiler: ConstraintCompiler, sampling: Any) -> None:
    compiled = compiler.compile(json_schema_constraint(SCHEMA, "json_schema"))
    for seed in range(12):
        chooser = Chooser(vocab, compiled.matcher(), seed, seed=seed, **sampling)
        tokens = generate(chooser, vocab, fast_forward=seed % 2 == 0)
        answer = json.loads(text_of(tokens[:-1], vocab))
        assert set(answer) == set(SCHEMA["properties"])
        assert 0 <= answer["age"] <= 150
        assert len(answer["name"]) <= 20


def test_forced_tokens_are_those_that_would_be_sampled(vocab: LlamaVocab, compiler: ConstraintCompiler) -> None:
    """Where a grammar forces tokens, its masks have one token each: the same ids with and without fast-forward."""
    compiled = compiler.compile(json_schema_constraint(SCHEMA, "json_schema"))
    n_forced = 0
    for seed in range(10):
        stepwise, forward = compiled.matcher(), compiled.matcher()
        logits = np.random.default_rng(seed)
        tokens: list[int] = []
        while not vocab.eog.intersection(tokens):
            row = logits.standard_normal(vocab.n_tokens)
            token = max(allowed(forward.mask(), vocab.n_tokens), key=lambda t: row[t])
            assert token in allowed(stepwise.mask(), vocab.n_tokens)
            forward.accept(token)
            stepwise.accept(token)
            tokens.append(token)
            if token in vocab.eog:
                break
            for forced in forward.forced():
                choices = allowed(stepwise.mask(), vocab.n_tokens)
                assert choices == ({forced} if forced not in vocab.eog else set(vocab.eog))
                stepwise.accept(forced)
                tokens.append(forced)
                n_forced += 1
        json.loads(text_of(tokens[:-1], vocab))
    assert n_forced > 100


def test_every_end_of_generation_is_allowed_where_the_grammar_may_end(
    vocab: LlamaVocab, compiler: ConstraintCompiler
) -> None:
    assert len(vocab.eog) > 1
    matcher = compiler.compile(of_lark('start: "a"+')).matcher()
    assert not vocab.eog & allowed(matcher.mask(), vocab.n_tokens)
    (token,) = vocab.tokenize("a", add_special=False, parse_special=False).tolist()
    matcher.accept(token)
    assert vocab.eog < allowed(matcher.mask(), vocab.n_tokens)
    matcher = compiler.compile(of_lark('start: "a"')).matcher()
    matcher.accept(token)
    assert allowed(matcher.mask(), vocab.n_tokens) == set(vocab.eog)
    assert matcher.forced() == (vocab.eos,)


def test_biases_and_ignore_eos_give_way_to_the_constraint(vocab: LlamaVocab, compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(of_lark('start: "a" "b"?'))
    a, b = (vocab.tokenize(each, add_special=False, parse_special=False)[0] for each in "ab")
    for temperature in (0.0, 1.0):
        chooser = Chooser(
            vocab, compiled.matcher(), 1, ignore_eos=True, logit_bias={int(a): -np.inf}, temperature=temperature
        )
        tokens = generate(chooser, vocab, fast_forward=False)
        assert text_of(tokens[:-1], vocab) == "ab", "it might end before, and does not with `ignore_eos`"
        assert tokens[-1] in vocab.eog
    likes_b = Chooser(vocab, compiled.matcher(), 1, logit_bias={int(b): 100.0})
    assert text_of([likes_b.next()], vocab) == "a"


def test_penalties_count_forced_tokens(vocab: LlamaVocab, compiler: ConstraintCompiler) -> None:
    # The same words are forced and chosen.
    compiled = compiler.compile(
        of_lark('start: (" name and colour: " /[0-9]/ " " /(name|colour|and|city)/ ";"){6}')
    )
    for seed in range(5):
        forward, stepwise = (
            generate(
                Chooser(vocab, compiled.matcher(), seed, frequency_penalty=2.0, repeat_last_n=-1),
                vocab,
                fast_forward=fast_forward,
            )
            for fast_forward in (True, False)
        )
        assert forward[:-1] == stepwise[:-1]


def test_all_tokens_are_chosen_where_probabilities_are_wanted(
    vocab: LlamaVocab, compiler: ConstraintCompiler
) -> None:
    compiled = compiler.compile(of_lark('start: /[0-9]/ " name and colour"'))
    plain, scored = (Chooser(vocab, compiled.matcher(), 1, n_probs=n_probs) for n_probs in (-1, 0))
    assert plain.next() == scored.next()
    assert plain.sampler.force()
    assert scored.sampler.force() == scored.sampler.advance(forced=()) == ()
    tokens = generate(scored, vocab, fast_forward=True)
    assert len(scored.sampler.scores) == 1 + len(tokens)


def test_few_allowed_tokens_are_the_only_candidates() -> None:
    logits = np.full(20_000, -np.inf, dtype=np.float32)
    logits[[7, 5000, 9999]] = 1.0
    found = highest(logits, 40)
    assert found is not None
    assert found.tolist() == [7, 5000, 9999]


def test_control_tokens_come_only_by_name(vocab: LlamaVocab, compiler: ConstraintCompiler) -> None:
    mask = compiler.compile(of_lark("start: /(?s:.)*/")).matcher().mask()
    controls = {t for t in range(vocab.n_tokens) if not vocab.piece(t)}
    assert controls - vocab.eog
    assert not (controls - vocab.eog) & allowed(mask, vocab.n_tokens)
    name = next(iter(controls - vocab.eog))
    mask = compiler.compile(of_lark(f"start: <[{name}]>")).matcher().mask()
    assert allowed(mask, vocab.n_tokens) == {name}


def test_invalid_logits_are_seen_behind_the_mask(vocab: LlamaVocab, compiler: ConstraintCompiler) -> None:
    chooser = Chooser(vocab, compiler.compile(of_lark('start: "a"')).matcher(), 1)
    logits = np.zeros(vocab.n_tokens, dtype=np.float32)
    logits[vocab.tokenize("b", add_special=False, parse_special=False)[0]] = np.nan
    assert chooser.sampler.choose(logits) == NO_TOKEN
    assert chooser.next() >= 0, "the constraint was left where it was"


@pytest.mark.slow
def test_a_constraint_that_becomes_too_complex_fails_with_a_reason(
    vocab: LlamaVocab, compiler: ConstraintCompiler
) -> None:
    options = " | ".join(f'x{i} "!"' for i in range(12_000))
    rules = "\n".join(f"x{i}: /a/ x{i}?" for i in range(12_000))
    matcher = compiler.compile(of_lark(f"start: {options}\n{rules}")).matcher()
    chooser = Chooser(vocab, matcher, 1)
    tokens = [chooser.next(i) for i in range(50)]
    assert CONSTRAINT_FAILED in tokens
    assert chooser.sampler.failure
    assert chooser.sampler.advance(forced=()) == ()


def test_masks_are_computed_beside_the_thread_that_samples(vocab: LlamaVocab, compiler: ConstraintCompiler) -> None:
    threads: list[str] = []

    class Recorder:
        def submit(self, function: Any) -> Any:
            def run() -> Any:
                threads.append(threading.current_thread().name)
                return function()

            return compiler.executor.submit(run)

    matcher = compiler.compile(json_schema_constraint(SCHEMA, "json_schema")).matcher()
    matcher._executor = Recorder()  # type: ignore[assignment]
    chooser = Chooser(vocab, matcher, 3)
    tokens = generate(chooser, vocab, fast_forward=True)
    json.loads(text_of(tokens[:-1], vocab))
    assert len(threads) > 3
    assert all("masks" in name for name in threads)


def test_a_reply_whose_masks_take_too_long_ends(
    vocab: LlamaVocab, compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The items of such a grammar grow with the square of the text, and those beside it wait for its masks."""
    monkeypatch.setattr(module, "MASK_S", 0.0)
    monkeypatch.setattr(module, "MAX_MASK_EXCESS_S", 0.05)
    matcher = compiler.compile(of_lark('start: s\ns: s s | "a" | s s s')).matcher()
    free = compiler.compile(of_lark("start: /a*/")).matcher()
    token = vocab.tokenize("a", add_special=False, parse_special=False).tolist()[-1]
    for _ in range(300):
        if matcher.mask() is None:
            break
        matcher.accept(token)
        assert free.mask() is not None
        free.accept(token)
    assert "too long to follow" in matcher.failure


def test_copies_of_a_compiled_grammar_are_independent(vocab: LlamaVocab, compiler: ConstraintCompiler) -> None:
    constraint = json_schema_constraint(SCHEMA, "json_schema")
    alone = [
        generate(Chooser(vocab, compiler.compile(constraint).matcher(), seed), vocab, fast_forward=True)
        for seed in range(4)
    ]
    choosers = [Chooser(vocab, compiler.compile(constraint).matcher(), seed) for seed in range(4)]
    together: list[list[int]] = [[] for _ in choosers]
    while any(not vocab.eog.intersection(tokens) for tokens in together):
        for chooser, tokens in zip(choosers, together, strict=True):
            if not vocab.eog.intersection(tokens):
                tokens.append(chooser.next(len(tokens)))
                tokens.extend(chooser.sampler.advance(forced=()))
    assert together == alone


def test_compiled_grammars_are_kept_within_a_bound(vocab: LlamaVocab, monkeypatch: pytest.MonkeyPatch) -> None:
    n_made = 0
    tokenizer = ConstraintTokenizer(vocab)

    def make() -> Any:
        nonlocal n_made
        n_made += 1
        return tokenizer.make(tuple(vocab.eog))

    compiler = ConstraintCompiler(make, n_vocab=vocab.n_tokens, eog=tuple(vocab.eog))
    monkeypatch.setattr(module, "MAX_CACHE_BYTES", 3 * 2**20)
    first, second = of_lark('start: "a"'), of_lark('start: "b"')
    compiled = compiler.compile(first)
    assert compiler.compile(second) is not compiled
    assert compiler.compile(first) is compiled
    for i in range(20):
        compiler.compile(of_lark(f'start: "{i}"'))
        assert compiler.compile(first) is compiled, "the one used last must stay"
    assert 2 <= len(compiler._cache) <= 6
    assert n_made == 1
    with pytest.raises(InvalidRequestError, match="'grammar'"):
        compiler.compile(of_lark("start: /(/"))
    compiler.close()


def test_a_vocabulary_that_cannot_be_constrained_is_refused(vocab: LlamaVocab) -> None:
    class Lossy(LlamaVocab):
        """Gives every token the same text, as a tokenizer that drops what it does not know."""

        def __init__(self) -> None:
            self.__dict__ |= vocab.__dict__

        def piece(self, token: int) -> bytes:
            return b""

        def detokenize(self, tokens: Any) -> bytes:
            return b""

    tokenizer = ConstraintTokenizer(Lossy())
    compiler = ConstraintCompiler(lambda: tokenizer.make((0,)), n_vocab=vocab.n_tokens, eog=(0,))
    with pytest.raises((NotSupportedError, InvalidRequestError)):
        compiler.compile(of_lark('start: "a"')).matcher().mask()
    compiler.close()


def test_long_forced_texts_are_tokenized_in_parts(vocab: LlamaVocab) -> None:
    """Where llama.cpp takes stack for each character; the tokens still give the text that is forced."""

    class Splitting(LlamaVocab):
        def __init__(self) -> None:
            self.__dict__ |= vocab.__dict__
            self.stack_bytes = 2**29

    tokenizer = ConstraintTokenizer(Splitting())
    compiler = ConstraintCompiler(lambda: tokenizer.make(tuple(vocab.eog)), n_vocab=vocab.n_tokens, eog=[0])
    text = "é" * 3000 + "words, " * 300
    matcher = compiler.compile(json_schema_constraint({"const": text}, "json_schema")).matcher()
    (quote,) = allowed(matcher.mask(), vocab.n_tokens)
    matcher.accept(quote)
    tokens = matcher.forced()
    assert json.loads(text_of([quote, *tokens[:-1]], vocab)) == text
    assert len(text.encode()) > 4096
    compiler.close()


class TaggedWriter(gguf.GGUFWriter):
    """Makes the last token of a vocabulary an added tag, as Qwen3 and others have it."""

    def add_token_list(self, tokens: Any) -> None:
        super().add_token_list([*tokens[:-1], "<tool_call>"])

    def add_token_types(self, types: Any) -> None:
        super().add_token_types([*types[:-1], gguf.TokenType.USER_DEFINED])

    def add_token_merges(self, merges: Any) -> None:
        super().add_token_merges([merge for merge in merges if merge != merges[-1]])


def test_texts_with_added_tags_are_forced_without_the_tags_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp finds the token of `<tool_call>` in any text, and a grammar's text does not allow it."""
    monkeypatch.setattr(gguf, "GGUFWriter", TaggedWriter)
    vocab = LlamaVocab.load(synthetic.ensure("tiny", folder=tmp_path))
    assert list(vocab.added_tags) == ["<tool_call>"]
    tag = vocab.added_tags["<tool_call>"]
    tokenizer = ConstraintTokenizer(vocab)
    compiler = ConstraintCompiler(lambda: tokenizer.make(tuple(vocab.eog)), n_vocab=vocab.n_tokens, eog=[0])
    lark = gbnf_to_lark(r'root ::= "<tool_call>\nA" [ab] "</tool_call> of <tool_call>"', "grammar", lambda _: None)
    matcher = compiler.compile(of_lark(lark)).matcher()
    first = min(allowed(matcher.mask(), vocab.n_tokens), key=lambda token: len(vocab.piece(token)))
    matcher.accept(first)
    tokens = [first, *matcher.forced()]
    assert text_of(tokens, vocab) == "<tool_call>\nA"
    assert tag not in tokens
    named = compiler.compile(of_lark(f"start: <[{tag}]>")).matcher()
    assert allowed(named.mask(), vocab.n_tokens) == {tag}
    compiler.close()


@pytest.fixture
def tagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LlamaVocab, ConstraintCompiler]]:
    """A vocabulary with the added tag `<tool_call>`."""
    monkeypatch.setattr(gguf, "GGUFWriter", TaggedWriter)
    vocab = LlamaVocab.load(synthetic.ensure("tiny", folder=tmp_path))
    tokenizer = ConstraintTokenizer(vocab)
    eog = tuple(vocab.eog)
    compiler = ConstraintCompiler(lambda: tokenizer.make(eog), n_vocab=vocab.n_tokens, eog=eog)
    yield vocab, compiler
    compiler.close()


def test_a_tag_in_a_literal_is_offered_and_forced_as_its_token(
    tagged: tuple[LlamaVocab, ConstraintCompiler],
) -> None:
    vocab, compiler = tagged
    tag = vocab.added_tags["<tool_call>"]
    grammar = r'root ::= call+ "." #' "\n" r'call ::= "<tool_call>\n" [ab] " <tool_call>; "'
    texts = []
    for tags in ({}, vocab.added_tags):
        matcher = compiler.compile(of_lark(gbnf_to_lark(grammar, "grammar", lambda _: None, tags))).matcher()
        first = allowed(matcher.mask(), vocab.n_tokens)
        assert (first == {tag}) if tags else (tag not in first)
        tokens: list[int] = []
        for wanted in (b"<", b"a", b"<", b"b", b"."):
            mask = allowed(matcher.mask(), vocab.n_tokens)
            # Greedy: the longest token among those that begin as wanted.
            begins = [token for token in mask if vocab.piece(token).startswith(wanted)]
            tokens.append(max(begins, key=lambda token: len(vocab.piece(token))))
            matcher.accept(tokens[-1])
            tokens += matcher.forced()
        texts.append(text_of([token for token in tokens if token not in vocab.eog], vocab))
        assert tokens.count(tag) == (4 if tags else 0)
    assert texts == ["<tool_call>\na <tool_call>; <tool_call>\nb <tool_call>; ."] * 2


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= [a-c]{0,2} "<tool_call>"? "a"',
        'root ::= [a-c]{0,2} x "a"\nx ::= "b" | "<tool_call>"',
        'root ::= [a-c]* x "c"\nx ::= "a<tool_call>"?',
        'root ::= ([a-c] | "<tool_call>") [a-c]* "<tool_call>" "a"',
        'root ::= ("<tool_call>a" | "<tool_call>ab") "bc"',
        r'root ::= ("<tool_call>\n" | "<tool_call>\n\n") "\nA"',
        'root ::= x "bc" | "<tool_call>abb"\nx ::= "<tool_call>a"',
        'root ::= x "bc"\nx ::= ("<tool_call>" | "<tool_call>ab<tool_call>") "a"',
        'root ::= x "bc"\nx ::= ("<tool_call>abb"){1,2} "<tool_call>a"',
    ],
)
def test_a_tag_that_would_split_a_terminal_is_allowed_as_token_and_as_text(
    tagged: tuple[LlamaVocab, ConstraintCompiler], grammar: str
) -> None:
    vocab, compiler = tagged
    tag = vocab.added_tags["<tool_call>"]
    plain, both = (
        compiler.compile(of_lark(gbnf_to_lark(grammar, "grammar", lambda _: None, tags)))
        for tags in ({}, vocab.added_tags)
    )
    n_tags = 0
    for seed in range(20):
        choice, text, tagged_text = random.Random(seed), plain.matcher(), both.matcher()
        for _ in range(30):
            ours, theirs = (allowed(each.mask(), vocab.n_tokens) for each in (tagged_text, text))
            n_tags += tag in ours
            assert ours - {tag} == theirs
            token = choice.choice(sorted(theirs))
            if token in vocab.eog:
                break
            text.accept(token)
            tagged_text.accept(token)
    assert n_tags


def test_the_token_of_a_tag_is_offered_where_llama_cpp_offers_it_but_not_in_free_text(
    tagged: tuple[LlamaVocab, ConstraintCompiler],
) -> None:
    vocab, compiler = tagged
    tag = vocab.added_tags["<tool_call>"]
    grammar = 'root ::= "<tool_call>" text "<tool_call>"\ntext ::= "\\"" [^"]* "\\""'
    matcher = compiler.compile(
        of_lark(gbnf_to_lark(grammar, "grammar", lambda _: None, vocab.added_tags))
    ).matcher()
    sampler = llama_cpp.llama_sampler_init_grammar(vocab.pointer, grammar.encode(), b"root")
    controls = {token for token in range(vocab.n_tokens) if not vocab.piece(token)}
    for text in (None, b'"', b"a", b"<", b'"', None):
        ours, theirs = allowed(matcher.mask(), vocab.n_tokens), _llama_allows(sampler, vocab)
        assert (tag in ours) == (text is None)
        assert {each for each in ours if vocab.piece(each) != b"\0"} <= theirs
        assert not ours & controls
        token = tag if text is None else next(each for each in sorted(ours) if vocab.piece(each) == text)
        matcher.accept(token)
        llama_cpp.llama_sampler_accept(sampler, token)
    llama_cpp.llama_sampler_free(sampler)


GRAMMARS = (
    'root ::= "a" [a-z]* "a" | "é" .{2,3} [^a-c]',
    'root ::= e\ne ::= t ("+" t)*\nt ::= [0-9]+ | "(" e ")"',
    r'root ::= "\u00e9\U0001F600" [\u4e00-\u4fff]{1,2} ("x"|"")',
    'root ::= o\no ::= "{" ws (s ":" ws v ("," ws s ":" ws v)*)? "}" ws\nv ::= o | s | ("true" | "null") ws\n'
    r's ::= "\"" ([^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws'
    '\nws ::= | " " | "\\n" [ \\t]{0,20}',
)


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_gbnf_allows_the_tokens_that_llama_cpp_allows(
    vocab: LlamaVocab, compiler: ConstraintCompiler, grammar: str
) -> None:
    n_same = n_fewer = 0
    compiled = compiler.compile(of_lark(gbnf_to_lark(grammar, "grammar", lambda _: None)))
    for seed in range(6):
        choice = random.Random(seed)
        matcher = compiled.matcher()
        sampler = llama_cpp.llama_sampler_init_grammar(vocab.pointer, grammar.encode(), b"root")
        for _ in range(30):
            ours, theirs = allowed(matcher.mask(), vocab.n_tokens), _llama_allows(sampler, vocab)
            assert bool(ours & vocab.eog) == bool(theirs & vocab.eog)
            extra = {t for t in ours - theirs - vocab.eog if vocab.piece(t) != b"\0"}
            assert not extra, [vocab.piece(t) for t in extra]
            # Bytes that no valid UTF-8 has, and other spellings of a forced text, are not allowed here.
            valid = {t for t in theirs if not set(vocab.piece(t)) & set(range(0xF5, 0x100))}
            n_same += ours == valid
            n_fewer += ours != valid
            tokens = sorted(ours - vocab.eog - {t for t in ours if vocab.piece(t) == b"\0"})
            if not tokens:
                break
            token = choice.choice(tokens)
            matcher.accept(token)
            llama_cpp.llama_sampler_accept(sampler, token)
        llama_cpp.llama_sampler_free(sampler)
    assert n_same > n_fewer


def _llama_allows(sampler: Any, vocab: LlamaVocab) -> set[int]:
    candidates = np.zeros(vocab.n_tokens, np.dtype(llama_cpp.llama_token_data))
    candidates["id"] = np.arange(vocab.n_tokens)
    data = candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
    array = llama_cpp.llama_token_data_array(data=data, size=vocab.n_tokens, selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    found = set(np.flatnonzero(candidates["logit"] > -1).tolist())
    return {token for token in found if token in vocab.eog or vocab.piece(token)}
