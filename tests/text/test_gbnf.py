"""GBNF as Lark: the same texts match as in llama.cpp."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from llamaslot.base.commands import Constraint
from llamaslot.base.errors import InvalidRequestError
from llamaslot.text.grammars import compiling
from llamaslot.text.grammars.compiling import GrammarChecker, UnknownGrammarError
from llamaslot.text.grammars.gbnf import gbnf_to_lark, is_lark
from tests.fake_backend import byte_tokenizer, byte_trial

TOKENIZER = byte_tokenizer()


def matcher_of(grammar: str) -> LLMatcher:
    lark = gbnf_to_lark(grammar, "grammar", {"<s>": 256}.get)
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), (lark, matcher.get_error())
    return matcher


def matches(grammar: str, text: str) -> bool:
    data = list(text.encode())
    matcher = matcher_of(grammar)
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "a"{5,5}', ["aaaaa"], ["aaaa", "aaaaaa"]),
        ('root ::= "a"{2} | "b"{1,} | "c"{0,2}', ["aa", "bbb", "", "cc"], ["a", "ccc"]),
        (r'root ::= "\u00e9\U0001F600\x41\"\\"', ['é😀A"\\'], ["eA"]),
        (r"root ::= [\u00e0-\u00ff] [^\u00e9a-c]", ["éd", "éê"], ["ea", "éa", "éé"]),
        ("root ::= .", ["a", "\n", "é"], ["", "aa"]),
        (r"root ::= [a&&b~~\]\[/^-]", list("a&b~][/^-"), ["c", "&&"]),
        (r"root ::= [^\n]+ [\n]", ["ab\n"], ["\n", "ab"]),
        (
            "root ::= a-b\na-b ::= # a comment\n  fooBar |\n  x_y\nfooBar ::= [0-9]\nx_y ::= (\n [a] # b\n )",
            "7a",
            "b",
        ),
        ('root ::= [a-z]* "a"', ["a", "ba", "aaa"], ["b", ""]),
        ('root ::= word ("," word)*\nword ::= [a-z,]+ "!"', ["a,b!", "a!,b!"], ["a,b"]),
        ('root ::= "(" root ")" | [0-9]+', ["((12))", "3"], ["((1)", "()"]),
        ('root ::= "" | "a" root', ["", "aa"], ["b"]),
        ('root ::= e\ne ::= t ("+" t)*\nt ::= [0-9]+ | "(" e ")"', ["1+(2+3)"], ["1+", "(1"]),
    ],
)
def test_texts_match(grammar: str, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert matches(grammar, text), text
    for text in bad:
        assert not matches(grammar, text), text


def test_token_rules_match_tokens() -> None:
    for grammar in ('root ::= <[256]> "a"', 'root ::= <s> "a"', 'root ::= !<[97]> "a"'):
        matcher = matcher_of(grammar)
        assert matcher.try_consume_tokens([256, 97]) == 2
        assert matcher.is_accepting()
    assert matcher_of("root ::= !<s>").try_consume_tokens([256]) == 0


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root ::= this is (not valid GBNF", ["expected )", "line 1", "(not valid"]),
        ('a ::= "b"', ["no rule 'root'"]),
        ('root ::= "a"\n\nroot ::= "b"', ["'root' is defined twice", "line 3"]),
        ("root ::= item", ["no rule 'item'"]),
        ('root ::= "a', ["ends within a text"]),
        ("root ::= [a", ["ends within a text"]),
        ("root ::= [z-a]", ["range"]),
        ("root ::= []", ["empty class"]),
        (r'root ::= "\q"', [r"'\\q' is not a valid escape".replace("\\\\", "\\")]),
        (r'root ::= "\ud800"', ["not a valid escape"]),
        (r'root ::= "\u00"', ["not a valid escape"]),
        ("root ::= <think>", ["'<think>' is not one token"]),
        ("root ::= <think", ["a token is written"]),
        ('root ::= "a"{5,2}', ["fewer repetitions"]),
        ('root ::= "a"{99999}', ["more than 2000 repetitions"]),
        ('root ::= "a"{x}', ["a number of repetitions"]),
        ('root ::= ("a")))', ["expected the end of the line"]),
        ("root = a", ["expected ::="]),
        ("", ["no rule 'root'"]),
        ("root ::= " + "(" * 500 + '"a"' + ")" * 500, ["nested"]),
    ],
)
def test_errors_tell_what_is_wrong_and_where(grammar: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        gbnf_to_lark(grammar, "grammar", lambda _: None)
    assert caught.value.param == "grammar"
    for word in words:
        assert word in caught.value.message


def test_lark_is_told_from_gbnf() -> None:
    assert is_lark('%llguidance {}\nstart: "a"')
    assert is_lark("WORD: /a/\nstart: WORD")
    assert not is_lark('root ::= start\nstart ::= "a"')


def test_long_grammars_are_converted_without_recursion() -> None:
    rules = "\n".join(f'r{i} ::= "a" r{i + 1}?' for i in range(3000))
    lark = gbnf_to_lark(f'root ::= r0\n{rules}\nr3000 ::= "b" root?', "grammar", lambda _: None)
    assert "start: " in lark


def test_random_texts_of_random_grammars_match() -> None:
    for seed in range(60):
        choice = random.Random(seed)
        maker = _Maker(choice)
        grammar = maker.grammar()
        matcher = matcher_of(grammar)
        for _ in range(5):
            data = list(maker.text("root").encode())
            copy = matcher.deep_copy()
            assert copy.try_consume_tokens(data) == len(data), (seed, grammar, bytes(data))
            assert copy.is_accepting(), (seed, grammar, bytes(data))


class _Maker:
    """Draws grammars without recursion, whose conversion is exact, and texts of theirs."""

    def __init__(self, choice: random.Random) -> None:
        self._random = choice
        self._rules: dict[str, tuple[str, list]] = {}

    def grammar(self) -> str:
        names = ["c", "b", "a", "root"]
        for i, name in enumerate(names):
            self._rules[name] = self._node(names[:i], 0)
        return "\n".join(f"{name} ::= {self._rules[name][0]}" for name in reversed(names))

    def text(self, name: str) -> str:
        return self._text(self._rules[name])

    def _node(self, names: list[str], depth: int) -> tuple[str, list]:
        kind = self._random.choice(
            ["text", "class", "ref", "seq", "or", "repeat"] if depth < 3 else ["text", "class"]
        )
        if kind == "ref" and names:
            name = self._random.choice(names)
            return name, ["ref", name]
        if kind in ("seq", "or"):
            nodes = [self._node(names, depth + 1) for _ in range(self._random.randint(1, 3))]
            joint = " " if kind == "seq" else " | "
            return f"({joint.join(text for text, _ in nodes)})", [kind, nodes]
        if kind == "repeat":
            node = self._node(names, depth + 1)
            sign, least, most = self._random.choice([("*", 0, 3), ("+", 1, 3), ("?", 0, 1), ("{1,2}", 1, 2)])
            return f"({node[0]}){sign}", ["repeat", node, least, most]
        if kind == "class":
            return self._random.choice([("[a-c]", ["chars", "abc"]), (r"[^b\n]", ["chars", "acé/&"])])
        word = self._random.choice(["a", "ab", "/", "é"])
        return f'"{word}"', ["text", word]

    def _text(self, node: tuple[str, list]) -> str:
        match node[1]:
            case ["ref", name]:
                return self.text(name)
            case ["seq", nodes]:
                return "".join(map(self._text, nodes))
            case ["or", nodes]:
                return self._text(self._random.choice(nodes))
            case ["repeat", inner, least, most]:
                return "".join(self._text(inner) for _ in range(self._random.randint(least, most)))
            case ["chars", chars]:
                return self._random.choice(chars)
            case [_, word]:
                return word
        raise AssertionError(node)


def test_the_checker_knows_the_names_and_the_number_of_tokens() -> None:
    checker = GrammarChecker(byte_trial(["<s>"], 1000))
    for good in ("start: <s> <[999]>", 'start: "a" | <[^5]>'):
        checker.check(Constraint(LLMatcher.grammar_from_lark(good), "grammar"))
    for bad in ("start: <think>", "start: <[1000]>", 'start: "a', "start: start", 'start: %json {"not": {}}'):
        with pytest.raises(InvalidRequestError, match="'grammar'"):
            checker.check(Constraint(LLMatcher.grammar_from_lark(bad), "grammar"))


def test_no_check_waits_until_the_tokenizer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()

    def made(vocabulary: TokenizerWrapper, **options: list[int]) -> LLTokenizer:
        begun.set()
        assert gate.wait(10)
        return LLTokenizer(vocabulary, **options)

    monkeypatch.setattr(compiling, "LLTokenizer", made)
    checker = GrammarChecker(byte_trial((), 1000))
    constraint = Constraint(LLMatcher.grammar_from_lark('start: "a"'), "grammar")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(checker.check, constraint)
        assert begun.wait(10)
        prompt = threads.submit(checker.check, constraint, may_compile=False)
        error = wait([prompt], 1).done and prompt.exception()
        gate.set()
        first.result()
    assert isinstance(error, UnknownGrammarError)


def test_the_checker_lets_other_threads_run() -> None:
    """Otherwise prompts, which are tokenized on another thread, would wait for it."""
    checker = GrammarChecker(byte_trial((), 1000))
    checker.check(Constraint(LLMatcher.grammar_from_lark('start: "a"'), "grammar"))
    many = 1900
    rules = "\n".join(f"x{i}: /a/ x{i}?" for i in range(many))
    lark = f"start: {' | '.join(f'x{i} /!/' for i in range(many))}\n{rules}"
    thread = threading.Thread(target=checker.check, args=[Constraint(LLMatcher.grammar_from_lark(lark), "grammar")])
    begin = time.perf_counter()
    thread.start()
    n_turns, longest, last = 0, 0.0, begin
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        n_turns, longest, last = n_turns + 1, max(longest, now - last), now
    assert n_turns > 20
    assert longest < (last - begin) / 2, "it held the GIL"
