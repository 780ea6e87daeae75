"""Shares of tenants: what each keeps in the pool, in RAM and on disk while others send many prompts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given

from llamaslot.base.callers import INACTIVE_S
from llamaslot.base.model import SegmentSize
from llamaslot.base.namespaces import (
    client_salt,
    key_salt,
    key_secret,
    private_namespace,
    salt_namespace,
    tenant_name,
    tenant_of,
)
from llamaslot.base.tokens import packed
from llamaslot.kvcache.disk_io import Write, Written
from llamaslot.kvcache.nodes import Segment
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.tiers.disk_tier import DiskTier
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers
from tests.cache_settings import tier_settings
from tests.scheduler.test_scheduler import Driver, as_tokens

KEYS = ["key-a", "key-b", "key-c"]
NAMESPACES = [salt_namespace(key_salt(key_secret(key), own)) for key in KEYS for own in ("", "own")]


def test_all_namespaces_of_a_key_are_one_tenant_and_clients_can_name_none_of_them() -> None:
    a, other = (
        salt_namespace(key_salt(key_secret("key-a"), "")),
        salt_namespace(key_salt(key_secret("key-a"), "other")),
    )
    assert a != other
    private = private_namespace("r.1", key_salt(key_secret("key-a"), ""))
    assert {tenant_of(each) for each in (a, other, private)} == {tenant_name("key-a")}
    assert tenant_name("key-a") != tenant_name("key-b")
    for salt in ("", "x", "x.y", "\0", key_salt(key_secret("key-a"), "")):
        own = salt_namespace(client_salt(salt))
        assert own != a
        assert tenant_of(own) == tenant_of(private_namespace("r.1", client_salt(salt))) == ""


@dataclass(eq=False)
class Kept:
    """A segment by the oracle's account."""

    segment: Segment
    tenant: str
    n_bytes: int
    last_used: int


def losses(
    kept: list[Kept], tenant: str, n_bytes: int, *, capacity: int, limit: int, active: set[str]
) -> list[Kept] | None:
    """Evictions before `tenant` gets `n_bytes`, by a simple model; None if that would take others' shares."""
    left, lost = list(kept), []
    others = Counter[str]()
    for each in kept:
        others[each.tenant] += each.n_bytes * (each.tenant != tenant and each.tenant in active)
    share = capacity // len({tenant, *+others})
    if n_bytes > capacity - sum(min(n, share) for n in others.values()) or 0 < limit < n_bytes:
        return None
    while True:
        used = Counter({tenant: n_bytes})
        for each in left:
            used[each.tenant] += each.n_bytes
        share = capacity // max(1, len(used.keys() & active))
        if limit and used[tenant] > limit:
            losers = {tenant}
        elif used.total() > capacity:
            losers = {name for name, n in used.items() if n > (share if name in active else 0)}
        else:
            return lost
        oldest = min((each for each in left if each.tenant in losers), key=lambda each: each.last_used)
        if oldest.tenant not in (tenant, *(used.keys() - active)):
            assert used[oldest.tenant] > capacity // len(used), "a tenant within its share loses to another"
        left.remove(oldest)
        lost.append(oldest)


class Tiers:
    """Tiers whose paths have one segment each, and the oracle's account of them."""

    def __init__(self, ram: int, limit: int, *, disk: int = 0, disk_limit: int = 0) -> None:
        self.tree = RadixTree()
        settings = tier_settings(
            ram_bytes=ram,
            segment_size=SegmentSize(0, 1),
            disk_bytes=disk,
            ram_bytes_per_key=limit,
            disk_bytes_per_key=disk_limit,
        )
        self.tiers = SegmentTiers(self.tree, settings)
        self.disk = DiskTier(self.tiers, self.tree, settings)
        self.kept: list[Kept] = []
        self.now = 0.0
        self.n_uses = 0
        self.last_request = dict.fromkeys(map(tenant_of, NAMESPACES), 0.0)
        self.disk.tick(0.0)

    @property
    def active(self) -> set[str]:
        return {name for name, at in self.last_request.items() if self.now - at < INACTIVE_S}

    def use(self, tenant: str) -> None:
        self.tiers.shares.use(tenant)
        self.last_request[tenant] = self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.disk.tick(self.now)

    def offload(self, namespace: str, n: int) -> Segment | None:
        """Offload a path that shares nothing with others, if it fits."""
        self.n_uses += 1
        tokens = packed(as_tokens(chr(self.n_uses % 128) + chr(self.n_uses // 128) + "x" * (n - 2)))
        self.tree.hold(0, namespace)
        self.tree.extend(0, tokens)
        node = self.tree.end_node(0)
        assert node is not None
        fits = self.tiers.fits(node, [(0, n)])
        segment = self.tiers.add(node, 0, n) if fits else None
        self.tree.release(0)
        return segment

    def check(self) -> None:
        self.tiers.check(self.tree.check())
        for tier in (self.tiers.ram, self.tiers.disk):
            used = Counter[str]()
            for segment in tier:
                used[tenant_of(segment.namespace)] += segment.n_bytes
            assert used == tier.used
            assert not tier.limit or max(used.values(), default=0) <= tier.limit


STEPS = st.lists(
    st.tuples(st.sampled_from(NAMESPACES), st.integers(2, 30), st.sampled_from([0, 0, 0, 0, 100, INACTIVE_S / 2])),
    max_size=60,
)


@given(STEPS, st.sampled_from([30, 60, 100]), st.sampled_from([0, 0, 20, 50]), st.data())
def test_who_exceeds_its_share_of_ram_loses_first_and_no_key_exceeds_its_limit(
    steps: list[tuple[str, int, float]], ram: int, limit: int, data: st.DataObject
) -> None:
    held = Tiers(ram, limit)
    for namespace, n, seconds in steps:
        tenant = tenant_of(namespace)
        held.wait(seconds)
        held.use(tenant)
        expected = losses(held.kept, tenant, n, capacity=ram, limit=limit, active=held.active)
        segment = held.offload(namespace, n)
        assert (segment is None) == (expected is None)
        if segment is not None and expected is not None:
            gone = {each.segment for each in held.kept if each.segment not in held.tiers.ram}
            assert gone == {each.segment for each in expected}
            held.kept = [each for each in held.kept if each.segment not in gone]
            held.kept.append(Kept(segment, tenant, n, held.n_uses))
        if held.kept and data.draw(st.booleans()):
            used = data.draw(st.sampled_from(held.kept))
            held.n_uses += 1
            used.last_used = held.n_uses
            held.tiers.touch([used.segment])
        held.check()


@given(STEPS, st.sampled_from([60, 100]), st.sampled_from([0, 0, 40]))
def test_the_disk_keeps_the_shares_too(steps: list[tuple[str, int, float]], disk: int, limit: int) -> None:
    held = Tiers(10_000, 0, disk=disk, disk_limit=limit)
    held.disk.flush()
    for namespace, n, seconds in steps:
        tenant = tenant_of(namespace)
        held.wait(seconds)
        held.use(tenant)
        before = Counter(held.tiers.disk.used)
        segment = held.offload(namespace, n)
        assert segment is not None
        held.disk.tick(held.now)
        for job in held.tiers.take_jobs():
            if isinstance(job, Write):
                held.disk.on_io(Written(job.meta.number, ok=True), held.now)
        active = held.active & (before.keys() | {tenant})
        for name in active - {tenant}:
            lost = before[name] - held.tiers.disk.used[name]
            assert not lost or before[name] > disk // len(active), "a tenant within its share loses to another"
        is_within = before[tenant] + n <= min(limit or disk, disk // len(active))
        assert segment in held.tiers.disk or not is_within, "what is within a tenant's share is not written"
        held.check()


def test_a_smaller_limit_is_kept_after_a_restart() -> None:
    held = Tiers(1000, 0, disk=1000)
    held.disk.flush()
    metas = []
    for i in range(6):
        held.offload(NAMESPACES[i % 2 * 2], 30)
        held.disk.tick(0.0)
        metas += [job.meta for job in held.tiers.take_jobs() if isinstance(job, Write)]
        held.disk.on_io(Written(metas[-1].number, ok=True), 0.0)
    a, b = tenant_of(NAMESPACES[0]), tenant_of(NAMESPACES[2])
    assert held.tiers.disk.used == {a: 90, b: 90}
    later = Tiers(1000, 0, disk=1000, disk_limit=70)
    assert later.disk.adopt(metas, 6) == []
    assert later.tiers.disk.used == {a: 60, b: 60}
    assert {segment.number for segment in later.tiers.disk} == {2, 3, 4, 5}, "the oldest of each goes"
    later.check()


def left_of_first(driver: Driver, mine: list[str], others: list[str], *, are_keys: bool) -> list[int]:
    """Tokens that are cached of each of one user's prompts, after another user sent all of theirs."""
    salts = [key_salt(key_secret(key), "") if are_keys else key for key in KEYS]
    for prompt in mine:
        driver.finish(driver.submit(prompt, cache_salt=salts[0]))
    for prompt in others:
        driver.finish(driver.submit(prompt, cache_salt=salts[1]))
    namespace = salt_namespace(salts[0])
    return [driver.cache.match(namespace, packed(as_tokens(each))).n_cached for each in mine]


@pytest.mark.parametrize("are_keys", [True, False])
def test_a_tenant_that_sends_many_prompts_leaves_the_idle_prefixes_of_another(are_keys: bool) -> None:
    """Without keys there is one tenant, whatever the salts, and the oldest prefixes go."""
    driver = Driver(n_slots=2, n_reserved=10, n_ctx=256, n_ubatch=64)
    others = [chr(128 + i) * 35 for i in range(40)]
    cached = left_of_first(driver, [letter * 25 for letter in "abc"], others, are_keys=are_keys)
    assert cached == ([25, 25, 25] if are_keys else [0, 0, 0])
    assert driver.cache.cells.used > 200, "what is free is used"


@pytest.mark.parametrize("are_keys", [True, False])
def test_a_tenant_that_uses_up_the_sequence_ids_leaves_those_of_another(are_keys: bool) -> None:
    driver = Driver(n_slots=2, n_reserved=5, n_ctx=8192, n_ubatch=128)
    others = [chr(128 + i) * 70 for i in range(12)]
    cached = left_of_first(driver, [letter * 70 for letter in "ab"], others, are_keys=are_keys)
    assert cached == ([70, 70] if are_keys else [0, 0])
    assert driver.cache.stats().dropped_prefixes > 4


def test_one_tenant_uses_what_others_leave() -> None:
    driver = Driver(n_slots=2, n_reserved=10, n_ctx=256, n_ubatch=64)
    driver.finish(driver.submit("a" * 10, cache_salt=key_salt(key_secret("key-a"), "")))
    for letter in "bcdef":
        driver.finish(driver.submit(letter * 40, cache_salt=key_salt(key_secret("key-b"), "")))
    tenants = driver.cache.listing(driver.cache.stats(), 1, None).tenants
    assert tenants
    found = {each.tenant: (each.cells, each.requests) for each in tenants}
    assert found == {tenant_name("key-a"): (10, 1), tenant_name("key-b"): (200, 5)}


def test_a_preempted_request_counts_once() -> None:
    driver = Driver(n_slots=2, n_ctx=256, n_ubatch=64)
    older, younger = (
        driver.submit(letter * 60, max_tokens=100, cache_salt=key_salt(key_secret(key), ""))
        for letter, key in zip("ab", KEYS, strict=False)
    )
    driver.finish(older, younger)
    assert driver.preempted == [younger]
    assert driver.admitted == [older, younger, younger]
    tenants = driver.cache.listing(driver.cache.stats(), 1, None).tenants
    assert tenants
    assert {each.tenant: each.requests for each in tenants} == {tenant_name(key): 1 for key in KEYS[:2]}
