"""The cache state machine with a store that several servers share, and that fails in every way it may.

`SharedStore` has prefixes that this server uploaded and prefixes of other servers. Lookups, fetches and uploads are
made as `RemoteWorker` does, but slowly: any number of plans, evictions and deletions come between two objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from llamaslot.base.backend import Backend
from llamaslot.base.kv_ops import Kv
from llamaslot.base.tokens import WIDTH, unpacked
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.tiers import pacing, remote_tier, segment_tiers
from llamaslot.kvcache.tiers.remote_tier import (
    Block,
    Choice,
    Found,
    Lookup,
    Portion,
    RemoteObject,
    Upload,
    portions_of,
)
from llamaslot.scheduler.step import StepPlan
from tests.cache_settings import cache_settings
from tests.conftest import LONG
from tests.kvcache.test_cache_machine import COUNTS, OFTEN, Asked, FakeMachine, Shape
from tests.recorder import Offloaded

BLOCK, GRID = 8, 4
REMOTE_OFTEN = "uploads", "uploaded blocks", "lookups", "fetched", "loaded of what was fetched"
"""Events that must come up in any run."""
REMOTE_SELDOM = "failed uploads", "fetched too late", "late fetches", "refused: length", "store unavailable"
"""Events that must come up in a long run."""


class SharedStore:
    """Which prefixes the store has, by namespace and tokens; each ends at a position of the grid."""

    def __init__(self) -> None:
        self.prefixes: set[tuple[str, tuple[int, ...]]] = set()

    def put(self, namespace: str, tokens: Sequence[int]) -> None:
        """Add the object of the last block of these tokens, which end at the grid."""
        start = remote_tier.block_start(len(tokens))
        self.prefixes |= {
            (namespace, tuple(tokens[:end])) for end in remote_tier.grid_positions(start, len(tokens))
        }

    def find(self, lookup: Lookup, size: int) -> Found:
        """Return the portions that continue what is cached; `size` is that of a token in bytes."""
        tokens = tuple(unpacked(lookup.tokens).tolist())
        entries = {}
        for at in remote_tier.grid_positions(lookup.start, len(tokens)):
            if (lookup.namespace, tokens[:at]) in self.prefixes:
                start = remote_tier.block_start(at)
                entries[at] = RemoteObject(start, at, repr(tokens[:at]).encode(), size * (at - start))
        return Found(tuple(portions_of(entries, lookup.start, len(tokens))))


@dataclass
class Fetch:
    """A fetch that is under way: the portions that are left of its choice."""

    lookup: Lookup
    choice: Choice
    left: list[Portion]


@dataclass(frozen=True)
class Sending:
    """An upload that is under way, with the KV of its blocks as it was when it began."""

    upload: Upload
    blocks: list[tuple[Block, list[Kv]]]


class RemoteMachine(FakeMachine):
    """A cache whose misses may be fetched, and whose segments are uploaded."""

    layouts = ("shared",)

    def new_backend(self, shape: Shape) -> Backend:
        self.store = SharedStore()
        self.fetches: list[Fetch] = []
        self.sending: list[Sending] = []
        self.fetched: set[int] = set()
        """Prefixes that came from the store."""
        sizes = {"BLOCK_TOKENS": BLOCK, "GRID_TOKENS": GRID}
        patches = [mock.patch.object(remote_tier, name, n) for name, n in sizes.items()]
        patches += [mock.patch.object(remote_tier, "_PIN_S", 0.05)]
        patches += [mock.patch.object(segment_tiers, name, 0.005) for name in ("RETRY_UPLOAD_S", "OFFER_AGAIN_S")]
        for patch in patches:
            patch.start()
        self.patches += patches
        return super().new_backend(shape)

    def cache_settings(self, **fields: Any) -> CacheSettings:
        return cache_settings(**fields, has_remote=True)

    def end(self, asked: Asked) -> None:
        super().end(asked)
        assert asked.request.id not in self.tiers.load_pins, "KV stays pinned for a request that has ended"

    # --- uploads ---

    def carry_out(self, plan: StepPlan) -> None:
        super().carry_out(plan)
        for upload in plan.uploads:
            self.check_upload(upload)
            blocks = []
            for block in upload.blocks:
                kvs = [kv for part in block.parts if (kv := self.backend.kv_of(part.segment.number)) is not None]
                if len(kvs) == len(block.parts):
                    blocks.append((block, kvs))
            self.sending.append(Sending(upload, blocks))
            COUNTS["uploads"] += 1

    def check_upload(self, upload: Upload) -> None:
        """Nothing private is uploaded, and a block has all tokens from its start to an end on the grid."""
        assert len(self.sending) < 2, "too many uploads at a time"
        tokens = unpacked(upload.tokens).tolist()
        [namespace] = {each.namespace for each in self.asked if each.request.namespace == upload.namespace}
        assert not namespace.startswith("private"), "a private prefix is uploaded"
        named = self.backend.named(namespace, tokens)
        for block in upload.blocks:
            assert block.start % BLOCK == 0
            assert block.end % GRID == 0
            assert 0 < block.end - block.start <= BLOCK
            at = block.start
            for part in block.parts:
                saved = self.backend.saved.get(part.segment.number)
                if saved is None:
                    # There was no memory to save it in; its block is not sent.
                    assert self.is_short
                    at = part.end
                    continue
                assert part.segment.number in self.backend.segments, "a part that is not in RAM"
                assert part.start == at, "a gap in a block"
                assert range(part.segment.start, part.segment.end) == range(
                    saved.start, saved.start + len(saved.tokens)
                )
                wanted = slice(part.start - saved.start, part.end - saved.start)
                assert saved.prefixes[wanted] == named[part.start : part.end], "another prefix"
                at = part.end
            assert at == block.end, "a block without its end"

    @precondition(lambda self: self.sending)
    @rule(ok=st.sampled_from([True] * 6 + [False]))
    def end_upload(self, ok: bool) -> None:
        """The KV must be that of the tokens, whatever has happened to the segments since the upload began."""
        sending = self.sending.pop(0)
        upload = sending.upload
        if ok:
            tokens = unpacked(upload.tokens).tolist()
            for block, kvs in sending.blocks:
                sent = []
                for part, kv in zip(block.parts, kvs, strict=True):
                    # The fake model saves its cells in any order.
                    pairs = kv[: 8 * part.segment.n_tokens].view(np.int32).reshape(-1, 2).tolist()
                    sent += sorted(
                        (pair for pair in pairs if part.start <= pair[1] < part.end), key=lambda pair: pair[1]
                    )
                expected = [[tokens[at], at] for at in range(block.start, block.end)]
                assert sent == expected, "KV of other tokens was uploaded"
                self.store.put(upload.namespace, tokens[: block.end])
                COUNTS["uploaded blocks"] += 1
        COUNTS["failed uploads"] += not ok
        self.cache.remote.on_uploaded(upload.number, self.now, len(sending.blocks) if ok else None)

    # --- what others do to the store ---

    @rule(
        origin=st.integers(0, 5), share=st.sampled_from([0, 0.3, 1]), tail=FakeMachine.tails,
        n_tail=st.integers(1, 40), more=st.integers(0, 15), salt=FakeMachine.kinds[0], at_once=st.booleans(),
    )  # fmt: skip
    def ask_what_another_server_had(
        self, *, origin: int, share: float, tail: int, n_tail: int, more: int, salt: int, at_once: bool
    ) -> None:
        """A prompt that begins like one of another server."""
        if self.n_waiting >= 6:
            return
        self.new_request(self.prompt(origin, share, tail, n_tail), salt=salt)
        asked = self.asked[-1]
        tokens = [*asked.prompt[: len(asked.prompt) - more % 4], *(97 + (more >> i & 1) for i in range(more))]
        for end in (*range(BLOCK, len(tokens), BLOCK), len(tokens) // GRID * GRID):
            if end:
                self.store.put(asked.request.namespace, tokens[:end])
        self.look_up_for(asked, at_once)

    @rule(kind=st.sampled_from(["gone", "unavailable", *["answers"] * 9, "cleared"]))
    def change_store(self, kind: str) -> None:
        """The store loses its objects, does not answer, answers again, or is cleared by a client."""
        if kind == "unavailable":
            self.cache.remote.on_unavailable(self.now)
        elif kind == "answers":
            self.now += pacing.RETRY_DELAY_S
        else:
            self.store.prefixes.clear()
        if kind == "cleared":
            self.cache.remote.uploads.offer_all_again()
        COUNTS[f"store {kind}"] += 1

    # --- fetches ---

    @precondition(lambda self: [asked for asked in self.living if asked.slot < 0])
    @rule(index=st.integers(0, 9), at_once=st.booleans())
    def look_up(self, index: int, at_once: bool) -> None:
        """Look up the prompt of a request that waits, and fetch at once or over the next plans."""
        waiting = [asked for asked in self.living if asked.slot < 0]
        self.look_up_for(waiting[index % len(waiting)], at_once)

    def look_up_for(self, asked: Asked, at_once: bool) -> None:
        remote, request = self.cache.remote, asked.request
        match = self.cache.match(request.namespace, request.prefix)
        lookup = remote.wanted(request.id, match, request.prefix, self.now)
        if lookup is None:
            return
        COUNTS["lookups"] += 1
        assert not asked.is_private, "a private prompt is looked up"
        assert self.shape.ram
        self.check_lookup(asked.namespace, lookup)
        COUNTS["lookups before a segment"] += lookup.end < len(lookup.tokens) // WIDTH
        found = self.store.find(lookup, 10)
        choice = remote.choose(lookup, found)
        at = lookup.start
        for portion in choice.portions:
            assert portion.start == at, "a gap in what is fetched"
            assert portion.end <= lookup.end
            at = portion.end
        if choice.portions:
            self.fetches.append(Fetch(lookup, choice, list(choice.portions)))
        while at_once and self.fetches:
            self.add_fetched(len(self.fetches) - 1, "good")

    def check_lookup(self, namespace: str, lookup: Lookup) -> None:
        """What precedes the lookup is cached, and no segment has what follows."""
        named = self.backend.named(namespace, unpacked(lookup.tokens).tolist())
        cached = self.backend.prefixes() | self.offloaded
        assert cached.issuperset(named[: lookup.start]), "a prefix that is not cached is not looked up"
        # What the cache has evicted is there until these are carried out.
        pending = self.cache._sequences.operations, self.tiers._freed, self.tiers.jobs, self.disk.writes
        if not any(pending):
            is_new = self.offloaded.isdisjoint(named[lookup.start : lookup.end])
            assert is_new, "a prefix that is cached is looked up"
            COUNTS["lookups of what is not cached"] += 1

    @precondition(lambda self: self.fetches)
    @rule(index=st.integers(0, 3), answer=st.sampled_from(["good"] * 9 + ["length", "late"]))
    def add_fetched(self, index: int, answer: str) -> None:
        """Add the next portion of a fetch, unless it comes too late or is not what it should be."""
        fetch = self.fetches[index % len(self.fetches)]
        remote, lookup = self.cache.remote, fetch.lookup
        if answer == "late":
            self.fetches.remove(fetch)
            remote.on_late(fetch.choice, self.now)
            COUNTS["late fetches"] += 1
            return
        portion = fetch.left.pop(0)
        if not fetch.left:
            self.fetches.remove(fetch)
        n = portion.end - portion.start
        remote.on_fetched(portion.object.n_bytes, 1e-9, self.now)
        number = remote.add(lookup, portion, self.size_of(n) + (answer == "length"))
        if answer == "length":
            assert number is None
            COUNTS["refused: length"] += 1
        elif number is None:
            COUNTS["fetched too late"] += 1
        else:
            self.put_fetched(lookup, portion, number)

    def put_fetched(self, lookup: Lookup, portion: Portion, number: int) -> None:
        namespace = next(each.namespace for each in self.asked if each.request.namespace == lookup.namespace)
        tokens = unpacked(lookup.tokens).tolist()[: portion.end]
        named = self.backend.named(namespace, tokens)
        part = slice(portion.start, portion.end)
        cached = self.backend.prefixes() | self.offloaded
        assert cached.issuperset(named[: portion.start]), "KV is added after a gap"
        self.backend.saved[number] = Offloaded(namespace, portion.start, tokens[part], named[part])
        kv = np.zeros(self.size_of(portion.end - portion.start), dtype=np.uint8)
        pairs = [[tokens[at], at] for at in range(portion.start, portion.end)]
        kv[: 8 * len(pairs)] = np.array(pairs, dtype=np.int32).view(np.uint8).ravel()
        self.backend.put(number, portion.start, portion.end, kv)
        self.fetched |= {*named[part]}
        COUNTS["fetched"] += 1

    def check_loaded(self, plan: StepPlan) -> None:
        super().check_loaded(plan)
        held = self.backend.prefixes(asked.slot for asked in self.running)
        COUNTS["loaded of what was fetched"] += len(held & self.fetched)

    def finish(self) -> None:
        for fetch in self.fetches:
            self.cache.remote.on_late(fetch.choice, self.now)
        super().finish()


@pytest.mark.slow
def test_the_cache_with_a_store_that_servers_share() -> None:
    before = COUNTS.copy()
    chosen = settings(max_examples=1000 if LONG else 20, stateful_step_count=100, deadline=None)
    run_state_machine_as_test(RemoteMachine, settings=chosen)
    counts: Counter[str] = COUNTS - before
    # So few examples have only the machine's own events; tests/kvcache/test_cache_machine.py asks for the others.
    expected = (*REMOTE_OFTEN, *((*OFTEN, *REMOTE_SELDOM) if LONG else ()))
    missing = [event for event in expected if not counts[event]]
    assert not missing, "no example came to these"
