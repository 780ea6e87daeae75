"""Fill-in-the-middle: `/infill`, and `suffix` on `/v1/completions`. A token is a byte, and its text a character."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llamaslot.base.model import FimTokens
from llamaslot.base.tokens import Tokens
from llamaslot.protocol.text_requests import CUT_TOKENS
from tests.api.conftest import Server, Start
from tests.fake_backend import BOS, FakeBackend, FakeVocab

INFILL, TEXT = "/infill", "/v1/completions"
PRE, SUF, MID, REP, SEP = "\x01", "\x02", "\x03", "\x04", "\x05"
NEEDED = FimTokens(prefix=1, suffix=2, middle=3)
ALL = FimTokens(prefix=1, suffix=2, middle=3, repository=4, file_separator=5, bos=BOS)
FILES = [{"filename": "a.h", "text": "int a;</s>"}, {"text": "int b;"}]
SHORT = {"n_predict": 4, "temperature": 0, "ignore_eos": True}


async def infilling(start: Start, fim: FimTokens | None = NEEDED, n_ctx: int = 1024) -> Server:
    backend = FakeBackend(n_ctx=n_ctx, n_slots=1)
    backend.info = msgspec.structs.replace(backend.info, fim=fim)
    return await start(backend=backend)


async def prompt_of(server: Server, **fields: Any) -> str:
    reply = await server.ok(INFILL, {"input_prefix": "", "input_suffix": "", **SHORT, **fields})
    assert len(reply["content"]) == 4
    return reply["prompt"]


@pytest.mark.parametrize(
    ("fim", "fields", "prompt"),
    [
        (NEEDED, {"input_prefix": "before", "input_suffix": "behind"}, f"{PRE}before{SUF}behind{MID}"),
        (NEEDED, {"input_suffix": "behind", "prompt": "here"}, f"{PRE}here{SUF}behind{MID}"),
        (
            NEEDED,
            {"input_prefix": "a</s>", "prompt": "b</s>", "input_suffix": "</s>"},
            f"{PRE}a</s>b</s>{SUF}</s>{MID}",
        ),
        (NEEDED, {"input_prefix": ["a", 98], "input_suffix": [99, "d"]}, f"{PRE}ab{SUF}cd{MID}"),
        (NEEDED, {"input_prefix": [], "input_extra": []}, f"{PRE}{SUF}{MID}"),
        (
            NEEDED,
            {"input_extra": FILES, "input_prefix": "before"},
            f"\n\n--- snippet ---\n\nint a;</s>\n\n--- snippet ---\n\nint b;{PRE}before{SUF}{MID}",
        ),
        (
            ALL,
            {"input_extra": FILES, "input_prefix": "before"},
            f"{REP}myproject\n{SEP}a.h\nint a;</s>{SEP}tmp\nint b;{SEP}filename\n<s>{PRE}before{SUF}{MID}",
        ),
        (ALL, {"input_prefix": "x"}, f"{REP}myproject\n{SEP}filename\n<s>{PRE}x{SUF}{MID}"),
    ],
)
async def test_the_prompt_has_llama_servers_layout(
    start: Start, fim: FimTokens, fields: dict[str, Any], prompt: str
) -> None:
    assert await prompt_of(await infilling(start, fim), **fields) == prompt


async def test_control_tokens_count_in_the_prompt_field_only(start: Start) -> None:
    server = await infilling(start)
    for field, n_tokens in (("prompt", 1), ("input_prefix", 4), ("input_suffix", 4)):
        reply = await server.ok(INFILL, {"input_prefix": "", "input_suffix": "", **SHORT, field: "</s>"})
        assert reply["tokens_evaluated"] == 3 + n_tokens, field


async def test_each_keystroke_computes_the_suffix_only(start: Start) -> None:
    server = await infilling(start)
    text, suffix = "def f(x):\n" * 20, "\nprint(f(1))"
    await server.ok(INFILL, {"input_prefix": text, "input_suffix": suffix, **SHORT})
    reply = await server.ok(INFILL, {"input_prefix": text + "  re", "input_suffix": suffix, **SHORT})
    assert reply["timings"]["cache_n"] == 1 + len(text)
    assert reply["timings"]["prompt_n"] == len(f"  re{SUF}{suffix}{MID}")


async def test_what_does_not_fit_is_cut_at_the_far_ends(start: Start) -> None:
    """Of 1,024 tokens 4 are left for the middle; then files go first, and prefix and suffix keep 3/4 and 1/4."""
    server = await infilling(start, ALL)
    n_max = 1024 - 4
    files = [{"filename": "f", "text": "f" * 600}]
    heading = f"{SEP}filename\n"
    prompt = await prompt_of(server, input_prefix="p" * 500, input_suffix="s" * 100, input_extra=files)
    assert prompt.endswith(f"f{heading}<s>{PRE}{'p' * 500}{SUF}{'s' * 100}{MID}")
    before = f"{REP}myproject\n{SEP}f\n{'f' * 600}{heading}"
    n_over = len(before) + 604 - n_max
    assert prompt.count("f") - heading.count("f") == len(before[CUT_TOKENS:]) - len(heading)
    assert 0 < n_over <= CUT_TOKENS
    prompt = await prompt_of(server, input_prefix="q" + "p" * 2000, input_suffix="s" * 2000, prompt="!")
    n_free = n_max - 5
    n_prefix, n_suffix = prompt.count("p"), prompt.count("s") - prompt.count("<s>")
    assert n_prefix + n_suffix == n_free
    assert 3 * n_free // 4 - CUT_TOKENS < n_prefix <= -(-3 * n_free // 4)
    assert prompt == f"<s>{PRE}{'p' * n_prefix}!{SUF}{'s' * n_suffix}{MID}"
    longer = await prompt_of(server, input_prefix="q" + "p" * 2001, input_suffix="s" * 2000, prompt="!")
    assert longer.count("p") == n_prefix + 1, "it begins where the shorter one began"


async def test_what_is_kept_of_long_texts_is_next_to_the_cursor(start: Start) -> None:
    """Of the texts, and of the parts of them that are tokenized."""
    server = await infilling(start)
    numbers = "".join(f"{i:06} " for i in range(10_000))
    prompt = await prompt_of(server, input_prefix=numbers, input_suffix=numbers)
    prefix, _, suffix = prompt.removeprefix(PRE).removesuffix(MID).partition(SUF)
    assert 500 < len(prefix) < len(numbers)
    assert 200 < len(suffix) < len(numbers)
    assert numbers.endswith(prefix)
    assert numbers.startswith(suffix)
    prompt = await prompt_of(server, input_extra=[{"text": numbers}])
    assert len(prompt) > 500
    assert numbers.endswith(prompt.removesuffix(f"{PRE}{SUF}{MID}"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"input_prefix": [999]}, "input_prefix"),
        ({"input_extra": {}}, "input_extra"),
        ({"input_extra": [{}]}, "input_extra"),
        ({"input_extra": [{"filename": "ok"}]}, "input_extra"),
        ({"input_extra": [{"filename": 123, "text": "abc"}]}, "input_extra"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "x" * 1024}, "prompt"),
        ({"best_of": 2}, "best_of"),
    ],
    ids=str,
)
async def test_wrong_fields_are_named(start: Start, fields: dict[str, Any], param: str) -> None:
    server = await infilling(start)
    status, reply = await server.post(INFILL, {"input_prefix": "a", "input_suffix": "b", **fields})
    assert status == 400, reply
    assert reply["error"]["param"].startswith(param)


async def test_a_model_without_such_tokens_cannot_infill(start: Start) -> None:
    server = await infilling(start, None)
    status, reply = await server.post(INFILL, {"input_prefix": "a", "input_suffix": "b"})
    assert (status, reply["error"]["type"]) == (501, "not_supported_error")
    status, reply = await server.post(TEXT, {"prompt": "a", "suffix": "b"})
    assert (status, reply["error"]["type"], reply["error"]["param"]) == (400, "not_supported_error", "suffix")
    assert "fill-in-the-middle" in reply["error"]["message"]
    await server.ok(TEXT, {"prompt": "a", "suffix": "", **SHORT})


async def test_infilling_streams_and_reduces_fields(start: Start) -> None:
    server = await infilling(start)
    body = {"input_prefix": "before", "input_suffix": "behind", **SHORT}
    whole = await server.ok(INFILL, {**body, "response_fields": ["content", "prompt"]})
    assert set(whole) == {"content", "prompt"}
    events = await server.stream(INFILL, body)
    assert "".join(event["content"] for event in events) == whole["content"]
    assert events[-1]["stop"] is True


@pytest.mark.parametrize("prompt", ["before", ["before"], [*b"before"]], ids=str)
async def test_a_suffix_gives_the_prompt_of_infilling(start: Start, prompt: Any) -> None:
    server = await infilling(start)
    infilled = await server.ok(INFILL, {"input_prefix": "before", "input_suffix": "behind", **SHORT})
    reply = await server.ok(TEXT, {"prompt": prompt, "suffix": "behind", **SHORT})
    assert reply["choices"][0]["text"] == infilled["content"]
    assert reply["usage"]["prompt_tokens"] == infilled["tokens_evaluated"]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == infilled["tokens_evaluated"] - 1


async def test_a_suffix_with_several_prompts_and_the_best_of_each(start: Start) -> None:
    server = await infilling(start)
    body = {"prompt": ["one", "two"], "suffix": "behind", "best_of": 2, "seed": 1, **SHORT}
    assert len((await server.ok(TEXT, body))["choices"]) == 2


async def test_a_suffix_cannot_be_combined_with_echo(start: Start) -> None:
    server = await infilling(start)
    status, reply = await server.post(TEXT, {"prompt": "a", "suffix": "b", "echo": True})
    assert (status, reply["error"]["param"]) == (400, "suffix")


class CountingVocab(FakeVocab):
    """Counts the characters that are tokenized, and the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.n_characters = self.n_calls = 0

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        self.n_characters, self.n_calls = self.n_characters + len(text), self.n_calls + 1
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"input_extra": [{"text": "", "filename": "a"}] * 20_000}, 200),
        ({"input_extra": [{"text": "x" * 10**6}]}, 200),
        ({"input_extra": [{"text": "x", "filename": "a" * 10**6}]}, 200),
        ({"input_prefix": "x" * 400_000, "input_suffix": "x" * 400_000}, 200),
        ({"prompt": "x" * 10**6}, 400),
        ({"input_prefix": ["x"] * 100_000}, 400),
        ({"input_suffix": ["x" * 10**6]}, 400),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_little_more_is_tokenized_than_can_fit(start: Start, fields: dict[str, Any], status: int) -> None:
    backend = FakeBackend(n_ctx=1024, n_slots=1)
    backend.info = msgspec.structs.replace(backend.info, fim=ALL)
    backend.vocab = vocab = CountingVocab()
    server = await start(backend=backend)
    vocab.n_characters = vocab.n_calls = 0
    reply = await server.post(INFILL, {"input_prefix": "", "input_suffix": "", **SHORT, **fields})
    assert reply[0] == status, reply
    assert vocab.n_characters < 200_000
    assert vocab.n_calls < 10_000
