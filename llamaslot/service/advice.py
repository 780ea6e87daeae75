"""Adviser: counts, for each client, where its prompts parted from what was cached, for `GET /cache/advice`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from msgspec import UNSET

from llamaslot.base.advice import MEANINGS, WHERE, ClientAdvice, Culprit, Parting, PlaceAdvice, Role

MAX_CLIENTS = 256
"""Clients that are known: those that sent a request most recently."""


@dataclass(slots=True)
class _Client:
    n_requests: int = 0
    n_prompt: int = 0
    n_computed: int = 0
    places: dict[tuple[Culprit, Role], PlaceAdvice] = field(default_factory=dict)


class Adviser:
    """Requests of each client, and the places where they parted. There are few kinds of places, so few are kept."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    def count(self, client: str, n_prompt: int, n_cached: int) -> None:
        """Count a request that got a slot."""
        known = self._clients.setdefault(client, _Client())
        self._clients.move_to_end(client)
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        known.n_requests += 1
        known.n_prompt += n_prompt
        known.n_computed += n_prompt - n_cached

    def add(self, client: str, request_id: str, parting: Parting) -> None:
        """Add the place where a counted request parted."""
        known = self._clients.get(client)
        if known is None:
            # Many others have sent requests since.
            return
        kind = parting.culprit, parting.role
        before = known.places.get(kind)
        meaning, fix = MEANINGS[parting.culprit]
        has_text = bool(parting.before or parting.old or parting.new)
        known.places[kind] = PlaceAdvice(
            culprit=parting.culprit,
            meaning=meaning,
            fix=fix,
            role=parting.role,
            where=WHERE[parting.role],
            offset=parting.offset,
            requests=1 + (before.requests if before is not None else 0),
            tokens=parting.tokens + (before.tokens if before is not None else 0),
            last_request_id=request_id,
            before=parting.before if has_text else UNSET,
            old=parting.old if has_text else UNSET,
            new=parting.new if has_text else UNSET,
        )

    def drop_texts(self) -> None:
        """Forget the texts of all places, but not the counts."""
        for known in self._clients.values():
            for place in known.places.values():
                place.before = place.old = place.new = UNSET

    def clients(self) -> tuple[ClientAdvice, ...]:
        """Return the advice for each client that has a place, those with the most tokens computed again first."""
        found = [
            ClientAdvice(
                client=client,
                requests=known.n_requests,
                prompt_tokens=known.n_prompt,
                computed_tokens=known.n_computed,
                places=tuple(sorted(known.places.values(), key=lambda place: -place.tokens)),
            )
            for client, known in self._clients.items()
            if known.places
        ]
        return tuple(sorted(found, key=lambda each: -sum(place.tokens for place in each.places)))
