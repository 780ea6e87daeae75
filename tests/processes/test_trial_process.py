"""The process that tries grammars: what is too deep, too slow or too large is refused, in every language."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llguidance import LLMatcher

from llamaslot.base.commands import Constraint
from llamaslot.base.errors import InvalidRequestError, UnavailableError
from llamaslot.processes.trial_process import TrialProcess
from llamaslot.text.grammars.compiling import GrammarChecker
from llamaslot.text.grammars.gbnf import gbnf_to_lark
from llamaslot.text.grammars.json_schema import json_schema_constraint

TOKENS = [bytes([byte]) for byte in range(256)], [0]
FAR = 4000
"""Links of a chain that overflows the stack of a trial."""


@pytest.fixture(scope="module")
def trials() -> Iterator[TrialProcess]:
    process = TrialProcess(lambda: TOKENS)
    yield process
    process.close()


def gbnf(text: str) -> Constraint:
    return lark(gbnf_to_lark(text, "field", lambda _: None))


def lark(text: str) -> Constraint:
    return Constraint(LLMatcher.grammar_from_lark(text), "field")


def regex(text: str) -> Constraint:
    return Constraint(LLMatcher.grammar_from_regex(text), "field")


def schema(value: Any) -> Constraint:
    return json_schema_constraint(value, "field")


def chain(n: int, link: Callable[[str], Any], last: Any) -> Constraint:
    """A schema whose definitions refer each to the next one."""
    links = {f"{i}": link(f"#/$defs/{i + 1}") for i in range(n)}
    return schema({"$ref": "#/$defs/0", "$defs": {**links, f"{n}": last}})


def rules(n: int, line: str, last: str) -> str:
    return "\n".join([*(line.format(i, i + 1) for i in range(n)), last.format(n)]) + "\n"


def nested(n: int, around: Callable[[Any], Any], inner: Any) -> Any:
    for _ in range(n):
        inner = around(inner)
    return inner


TOO_DEEP: dict[str, Callable[[], Constraint]] = {
    "gbnf rules": lambda: gbnf("root ::= r0\n" + rules(FAR, "r{} ::= r{}", 'r{} ::= "a" root?')),
    "gbnf recursive rules": lambda: gbnf(
        "root ::= r0\n" + rules(FAR, 'r{} ::= "a" r{} | "b"', 'r{} ::= "a" root?')
    ),
    "gbnf terminals": lambda: gbnf("root ::= r0\n" + rules(FAR, "r{} ::= r{}", 'r{} ::= "a"')),
    "gbnf parentheses": lambda: gbnf(f'root ::= {"(" * FAR}"a"{")" * FAR}'),
    "lark rules": lambda: lark("start: r0\n" + rules(FAR, "r{}: r{}", 'r{}: "a" start?')),
    "lark terminals": lambda: lark("start: R0\n" + rules(FAR, "R{}: R{}", 'R{}: "a"')),
    "lark parentheses": lambda: lark(f'start: {"(" * FAR}"a"{")" * FAR}'),
    "lark grammars": lambda: lark(nested(200, lambda each: f"start: %lark {{\n{each}\n}}\n", 'start: "a"')),
    "lark schema": lambda: lark("start: %json " + nested(FAR, lambda each: f'{{"items":{each}}}', "{}")),
    "regex groups": lambda: regex("(" * FAR + "a" + ")" * FAR),
    "regex alternatives": lambda: regex("(a|" * FAR + "a" + ")" * FAR),
    "regex repetitions": lambda: regex("a" + "*" * FAR),
    "references": lambda: chain(3900, lambda to: {"$ref": to}, {"const": 1}),
    "properties": lambda: chain(
        1200, lambda to: {"properties": {"a": {"$ref": to}}, "required": ["a"]}, {"const": 1}
    ),
    "items": lambda: chain(2200, lambda to: {"items": {"$ref": to}}, {"const": 1}),
    "anyOf": lambda: chain(2000, lambda to: {"anyOf": [{"type": "null"}, {"$ref": to}]}, {"const": 1}),
    "allOf": lambda: chain(2600, lambda to: {"allOf": [{"$ref": to}]}, {"const": 1}),
    "oneOf": lambda: chain(2000, lambda to: {"oneOf": [{"type": "null"}, {"$ref": to}]}, {"const": 1}),
    "prefixItems": lambda: chain(2200, lambda to: {"prefixItems": [{"$ref": to}]}, {"const": 1}),
    "additionalProperties": lambda: chain(1800, lambda to: {"additionalProperties": {"$ref": to}}, {"const": 1}),
    "nested items": lambda: schema(nested(3000, lambda each: {"items": each}, {})),
    "nested allOf": lambda: schema(nested(900, lambda each: {"allOf": [each]}, {})),
    "nested const": lambda: schema({"const": nested(900, lambda each: [each], 1)}),
    "pattern groups": lambda: schema({"type": "string", "pattern": "(" * FAR + "a" + ")" * FAR}),
    "propertyNames": lambda: chain(1800, lambda to: {"propertyNames": {"$ref": to}}, {"pattern": "^a$"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", TOO_DEEP.values(), ids=TOO_DEEP)
def test_what_is_nested_too_deeply_is_refused(trials: TrialProcess, make: Callable[[], Constraint]) -> None:
    with pytest.raises(InvalidRequestError, match="'field'") as caught:
        GrammarChecker(trials).check(make())
    assert caught.value.param == "field"
    assert len(caught.value.message) < 500


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: Constraint(LLMatcher.grammar_from_regex("(a{1000}){1000}"), "field"),
        lambda: lark('start: a{1000000}\na: "b"'),
    ],
    ids=["regex", "forced"],
)
def test_what_fails_after_its_first_token_is_refused(trials: TrialProcess, make: Callable[[], Constraint]) -> None:
    with pytest.raises(InvalidRequestError, match=r"'field'.*(many expressions|Too many items)") as caught:
        GrammarChecker(trials).check(make())
    assert "non-verbose" not in caught.value.message


FAR_APART = [rf"/.*a.{{{i}}}b.*/" for i in range(16)]
DOUBLING: dict[str, Any] = {
    f"{i}": {
        "type": "object",
        "properties": {
            "a": {"$ref": f"#/$defs/{i + 1}", "required": ["a"]},
            "b": {"$ref": f"#/$defs/{i + 1}", "required": ["b"]},
        },
        "required": ["a", "b"],
    }
    for i in range(40)
}
"""Each reference with a keyword beside it is a copy; llguidance itself does not end this."""
EXPENSIVE: dict[str, Callable[[], Constraint]] = {
    "intersection": lambda: lark("start: T\nT: " + " & ".join(FAR_APART)),
    "doubling rules": lambda: gbnf("root ::= r0\n" + rules(24, "r{0} ::= r{1} r{1}", 'r{} ::= "a"')),
    "doubling references": lambda: schema({"$ref": "#/$defs/0", "$defs": {**DOUBLING, "40": {"type": "object"}}}),
}


@pytest.mark.slow
def test_a_small_grammar_is_checked_while_expensive_ones_are_refused(trials: TrialProcess) -> None:
    checker, bombs = GrammarChecker(trials), [make() for make in EXPENSIVE.values()]
    checker.check(gbnf('root ::= "a"'))
    with ThreadPoolExecutor(len(bombs)) as threads:
        running = [threads.submit(checker.check, bomb) for bomb in bombs]
        for i in range(3):
            checker.check(gbnf(f'root ::= "{i}"'))
        assert not all(each.done() for each in running)
        messages = [str(each.exception()) for each in running]
    assert all(message.startswith("'field': ") for message in messages), messages
    assert all("simplify it" in message for message in messages), messages
    assert "to compile" in messages[-1]
    # They are known then.
    for bomb in bombs:
        with pytest.raises(InvalidRequestError):
            checker.check(bomb, may_compile=False)


@pytest.mark.slow
def test_a_small_grammar_does_not_wait_for_those_that_come_after_it(trials: TrialProcess) -> None:
    """A trial that is begun meanwhile has copies of what the process has open."""
    checker = GrammarChecker(trials)
    bomb = EXPENSIVE["doubling references"]()
    checker.check(gbnf('root ::= "a"'))
    with ThreadPoolExecutor(9) as threads:
        small = [threads.submit(checker.check, gbnf(f'root ::= "small {i}"')) for i in range(8)]
        running = threads.submit(checker.check, bomb)
        for each in small:
            each.result()
        assert not running.done()
        assert "to compile" in str(running.exception())


def test_the_cost_of_what_passes_is_known(trials: TrialProcess) -> None:
    large = schema({"properties": {f"p{i}": {"type": "integer"} for i in range(300)}})
    checked = GrammarChecker(trials).check(large)
    assert checked.seconds > 0.01
    assert checked.n_bytes > 2**20
    assert checked.grammar == large.grammar


def test_the_process_is_started_again(trials: TrialProcess) -> None:
    assert not trials(gbnf('root ::= "a"')).error
    assert trials._process is not None
    os.kill(trials._process.pid, signal.SIGKILL)
    assert not trials(gbnf('root ::= "b"')).error


def test_without_a_process_one_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    process = TrialProcess(lambda: TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", fails)
        with pytest.raises(UnavailableError, match="'field'"):
            process(gbnf('root ::= "a"'))
    assert not process(gbnf('root ::= "a"')).error
    process.close()


@pytest.mark.slow
def test_grammars_are_tried_below_a_limit_of_memory_that_cannot_be_raised() -> None:
    """As by `ulimit -v`; root may raise it, unless it gives that up."""
    code = (
        "import os, resource; from llamaslot.base.commands import Constraint\n"
        "from llamaslot.processes import trial_process as module\n"
        "process = module.TrialProcess(lambda: ([b'a'], [0])); process(Constraint('{}', 'field'))\n"
        "pid = process._process.pid; pages = int(open(f'/proc/{pid}/statm').read().split()[0])\n"
        "most = pages * resource.getpagesize() + module.MAX_BYTES // 2\n"
        "resource.prlimit(pid, resource.RLIMIT_AS, (most, most))\n"
        "print(process(Constraint('start: \"a\"', 'field')), process._process.pid == pid)"
    )
    pr_capbset_drop = cap_sys_resource = 24
    ended = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: ctypes.CDLL(None).prctl(pr_capbset_drop, cap_sys_resource, 0, 0, 0),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.startswith("TrialResult(error=''"), ended
    assert ended.stdout.strip().endswith("True"), "the process that has the limit did it"


def test_the_process_ends_with_the_one_that_started_it() -> None:
    code = (
        "import os; from llamaslot.base.commands import Constraint\n"
        "from llamaslot.processes.trial_process import TrialProcess\n"
        "process = TrialProcess(lambda: ([b'a'], [0])); process(Constraint('{}', 'field'))\n"
        "print(process._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(ended.stdout)
    gone = threading.Event()
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except (FileNotFoundError, ProcessLookupError):
            return
        gone.wait(0.1)
    raise AssertionError(pid)
