"""`llamaslot advise`: print why prompts are computed again, what helps, and hit rates with other sizes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from rich.text import Text

from llamaslot.base.advice import CacheAdvice, ClientAdvice, PlaceAdvice, SizeAdvice
from llamaslot.cli.client import Client, add_access, counted, plain_console


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llamaslot advise`."""
    add_access(parser)
    parser.add_argument("--top", type=int, default=10, metavar="N", help="clients to show (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the advice of a server. Raises ConfigError if the server has no such endpoint."""
    client = Client(args.url, args.api_key, args.cacert)
    console = plain_console()
    for line in lines(client.fetch("GET", "/cache/advice", CacheAdvice), args.top):
        console.print(line, soft_wrap=True)
    return 0


def lines(advice: CacheAdvice, top: int) -> Iterator[Text]:
    """Yield the advice for the `top` clients with the most tokens computed again."""
    yield Text(f"{advice.hit_rate:.1%} of all prompt tokens were reused")
    for name, sizes in (("RAM ", advice.ram), ("disk", advice.disk)):
        if sizes:
            yield Text(f"{name}  {_rates(sizes)}")
    if not advice.clients:
        yield Text("no prompt has diverged from earlier ones in a way that advice helps against")
    for client in advice.clients[:top]:
        yield Text("")
        yield from _of_client(client)
    if len(advice.clients) > top:
        yield Text(f"\n{counted(len(advice.clients) - top, 'more client')} (--top)")


def _rates(sizes: Sequence[SizeAdvice]) -> str:
    return ", ".join(
        f"{each.bytes / 2**20:,.0f} MiB{' (now)' if each.is_current else ''}: {each.hit_rate:.1%}" for each in sizes
    )


def _of_client(client: ClientAdvice) -> Iterator[Text]:
    yield Text(
        f"client {client.client}: {counted(client.requests, 'request')}, {client.computed_tokens:,} of "
        f"{counted(client.prompt_tokens, 'prompt token')} computed",
        style="bold",
    )
    for place in client.places:
        where = f" {place.where}" if place.where else ""
        at = f", at character {place.offset:,}" if place.offset >= 0 else ""
        yield Text(
            f"  {counted(place.tokens, 'token')} computed again in {counted(place.requests, 'request')}: "
            f"{place.meaning}{where}{at}; last in {place.last_request_id}"
        )
        yield from _texts(place)
        yield Text(f"      {place.fix}", style="dim")


def _texts(place: PlaceAdvice) -> Iterator[Text]:
    """Yield the texts as Python literals, so that control characters of a prompt do not reach the terminal."""
    for sign, text in ((" ", place.before), ("-", place.old), ("+", place.new)):
        if isinstance(text, str):
            yield Text(f"      {sign} {text!r}")
