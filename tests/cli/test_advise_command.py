"""`llamaslot advise` prints what a server says of its clients, and nothing that could control the terminal."""

from __future__ import annotations

from msgspec import UNSET

from llamaslot.base.advice import CacheAdvice, ClientAdvice, PlaceAdvice, SizeAdvice
from llamaslot.cli.advise_command import lines


def place(**fields: object) -> PlaceAdvice:
    given = {
        "culprit": "date",
        "meaning": "a date or time",
        "fix": "Leave it out.",
        "role": "system",
        "where": "in the system prompt",
        "offset": 8812,
    }
    return PlaceAdvice(**{**given, "requests": 1, "tokens": 9000, "last_request_id": "r1", **fields})  # type: ignore[arg-type]


def printed(advice: CacheAdvice, top: int = 10) -> list[str]:
    return [line.plain for line in lines(advice, top)]


def test_places_and_sizes_are_printed() -> None:
    sizes = SizeAdvice(2**30, 0.5), SizeAdvice(2**31, 0.75, is_current=True)
    told = printed(CacheAdvice((ClientAdvice("3fa2", 2, 20_000, 9_500, (place(),)),), 0.7512, sizes, ()))
    assert told == [
        "75.1% of all prompt tokens were reused",
        "RAM   1,024 MiB: 50.0%, 2,048 MiB (now): 75.0%",
        "",
        "client 3fa2: 2 requests, 9,500 of 20,000 prompt tokens computed",
        "  9,000 tokens computed again in 1 request: a date or time in the system prompt, at character 8,812; "
        "last in r1",
        "      Leave it out.",
    ]


def test_texts_are_printed_as_literals() -> None:
    told = printed(
        CacheAdvice((ClientAdvice("a", 1, 9, 9, (place(before="is ", old="\x1b[2J", new=UNSET),)),), 0, (), ())
    )
    assert told[4:6] == ["        'is '", "      - '\\x1b[2J'"]


def test_a_server_without_places_says_so_and_further_clients_are_counted() -> None:
    assert "no prompt has diverged" in printed(CacheAdvice((), 1.0, (), ()))[1]
    clients = tuple(ClientAdvice(f"{i}", 1, 9, 9, (place(offset=-1, role="", where=""),)) for i in range(12))
    told = printed(CacheAdvice(clients, 1.0, (), ()))
    assert told[-1] == "\n2 more clients (--top)"
    assert "a date or time; last in r1" in told[3]
