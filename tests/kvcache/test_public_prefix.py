"""The public prefix: found by every tenant, extended by none; copied into what is the tenant's own."""

from __future__ import annotations

import pytest

from llamaslot.base.callers import INACTIVE_S
from llamaslot.base.kv_ops import Load, NotSavedError, Operation, Save
from llamaslot.base.model import StateKind
from llamaslot.base.namespaces import (
    PUBLIC_NAMESPACE,
    PUBLIC_SALT,
    PUBLIC_TENANT,
    client_salt,
    key_salt,
    key_secret,
    private_namespace,
    reads_public,
    salt_namespace,
    tenant_name,
    tenant_of,
)
from llamaslot.base.tokens import WIDTH, packed, unpacked
from llamaslot.kvcache.tiers.pacing import RETRY_DELAY_S
from llamaslot.scheduler.request import Request
from tests.scheduler.test_scheduler import Driver, as_tokens, generated

ANN, BOB = (key_salt(key_secret(key), "") for key in ("ann", "bob"))
SYSTEM = "the system prompt of all " * 2
N_SYSTEM = len(SYSTEM)


def driver(**shape: float | None) -> Driver:
    """A scheduler with plenty of RAM, and segments of 16 tokens."""
    given = {"n_slots": 2, "n_reserved": 4, "n_ctx": 512, "n_ubatch": 64, "ram_bytes": 10**6, "segment_tokens": 16}
    return Driver(**given | {"min_shared": 8} | shape)


def ask(shared: Driver, prompt: str, salt: str, **fields: object) -> Request:
    request = shared.submit(prompt, cache_salt=salt, **{"max_tokens": 4, **fields})
    shared.finish(request)
    return request


def cold(prompt: str) -> list[int]:
    return generated(ask(driver(), prompt, ANN))


def n_public(shared: Driver, tokens: str) -> int:
    """Leading tokens that the public namespace has, wherever they are."""
    return shared.cache._tree.match(PUBLIC_NAMESPACE, packed(as_tokens(tokens))).n_matched


def test_only_the_namespaces_of_keys_read_what_is_public_and_clients_cannot_name_it() -> None:
    own = salt_namespace(ANN)
    assert reads_public(own)
    assert reads_public(salt_namespace(key_salt(key_secret("ann"), "own")))
    for other in ("", salt_namespace("s"), PUBLIC_NAMESPACE, private_namespace("r", ANN), private_namespace("r")):
        assert not reads_public(other)
    assert salt_namespace(PUBLIC_SALT) == PUBLIC_NAMESPACE
    assert tenant_of(PUBLIC_NAMESPACE) == tenant_of(private_namespace("r", PUBLIC_SALT)) == PUBLIC_TENANT
    for salt in (PUBLIC_SALT, "public", PUBLIC_NAMESPACE):
        assert tenant_of(salt_namespace(client_salt(salt))) == ""
        assert tenant_of(salt_namespace(key_salt(key_secret("ann"), salt))) == tenant_name("ann")


@pytest.mark.parametrize("n_left", [N_SYSTEM, 37, 16, 9])
def test_each_tenant_finds_the_public_prefix_up_to_where_its_prompt_differs(n_left: int) -> None:
    shared = driver()
    ask(shared, SYSTEM, PUBLIC_SALT)
    for salt, tail in ((ANN, "Hello from Ann"), (BOB, "This is Bob")):
        prompt = SYSTEM[:n_left] + tail
        request = ask(shared, prompt, salt)
        assert request.n_cached == request.n_loaded == n_left
        assert generated(request) == cold(prompt)
        # By now it is its own, and takes no load.
        again = ask(shared, prompt + " again", salt)
        assert (again.n_cached, again.n_loaded) == (len(prompt), 0)
        assert again.miss in ("", "diverged")
    assert shared.cache.stats().public_tokens == 2 * n_left


def test_a_tenant_adds_nothing_to_what_is_public() -> None:
    shared = driver()
    ask(shared, SYSTEM, PUBLIC_SALT, max_tokens=0)
    ask(shared, SYSTEM + "a secret of Ann's", ANN, max_tokens=20)
    assert n_public(shared, SYSTEM + "a secret of Ann's") == N_SYSTEM
    assert ask(shared, SYSTEM + "a secret of Ann's", BOB).n_cached == N_SYSTEM
    assert ask(shared, "a secret of Ann's", BOB).n_cached == 0
    # Nor does it find what others have in their own namespace.
    ask(shared, "something of Ann's alone", ANN)
    assert ask(shared, "something of Ann's alone", PUBLIC_SALT).n_cached == 0


def test_the_public_prefix_continues_what_a_tenant_has() -> None:
    shared = driver()
    ask(shared, SYSTEM[:23], ANN, max_tokens=0)
    ask(shared, SYSTEM, PUBLIC_SALT)
    request = ask(shared, SYSTEM + "and more", ANN)
    assert (request.n_cached, request.n_loaded) == (N_SYSTEM, N_SYSTEM - 23)
    assert generated(request) == cold(SYSTEM + "and more")


def test_the_public_prefix_fills_a_gap_between_a_tenants_own_segments() -> None:
    shared = driver()
    ask(shared, SYSTEM, PUBLIC_SALT, max_tokens=0)
    ask(shared, SYSTEM + "a conversation of Ann's", ANN, max_tokens=0)
    shared.step()
    cache, path = shared.cache, packed(as_tokens(SYSTEM + "a conversation of Ann's"))
    cache.evict(cache.cells.idle)
    own = cache._tree.match(salt_namespace(ANN), path)
    assert own.n_resident == 0
    cache._tiers.drop([own.segments[1]])
    assert cache._tree.match(salt_namespace(ANN), path).parts[-1].end == 16
    assert cache.match(salt_namespace(ANN), path).n_cached == len(path) // WIDTH


def test_a_longer_prefix_of_its_own_is_used_instead() -> None:
    shared = driver()
    ask(shared, SYSTEM + "and a long conversation", ANN, max_tokens=0)
    ask(shared, SYSTEM, PUBLIC_SALT)
    request = ask(shared, SYSTEM + "and a long conversation, continued", ANN)
    assert request.n_cached == len(SYSTEM + "and a long conversation")
    assert shared.cache.stats().public_tokens == 0


def test_what_a_public_request_loads_itself_is_not_counted_as_shared() -> None:
    shared = driver()
    ask(shared, SYSTEM, PUBLIC_SALT, max_tokens=0)
    shared.step()
    shared.cache.evict(shared.cache.cells.idle)
    assert ask(shared, SYSTEM + "!", PUBLIC_SALT).n_loaded == N_SYSTEM
    assert shared.cache.stats().public_tokens == 0


def test_a_path_that_is_not_trusted_is_invalidated_where_it_was_loaded_from_too() -> None:
    shared = driver()
    ask(shared, SYSTEM, PUBLIC_SALT, max_tokens=0)
    ask(shared, SYSTEM + "!", ANN, max_tokens=0)
    shared.step()
    path = packed(as_tokens(SYSTEM))
    longer = packed(as_tokens(SYSTEM + "!"))
    shared.cache.dropper.invalidate_path("", path, with_public=False)
    shared.cache.dropper.invalidate_path(salt_namespace(ANN), longer, with_public=True)
    assert n_public(shared, SYSTEM) == N_SYSTEM, "nothing was loaded from there, or the fault is further down"
    shared.cache.dropper.invalidate_path(salt_namespace(ANN), path, with_public=True)
    assert n_public(shared, SYSTEM) < N_SYSTEM


def test_requests_without_a_key_or_without_the_cache_do_not_find_it() -> None:
    shared = driver()
    ask(shared, SYSTEM, PUBLIC_SALT)
    for salt in ("", "s"):
        assert ask(shared, SYSTEM, salt).n_cached == 0
    assert ask(shared, SYSTEM, ANN, cache_prompt=False).n_cached == 0


def test_full_segments_are_found_while_the_public_request_runs() -> None:
    shared = driver()
    public = shared.submit(SYSTEM, max_tokens=60, cache_salt=PUBLIC_SALT)
    while not generated(public):
        shared.step()
    request = shared.submit(SYSTEM + "!", max_tokens=1, cache_salt=ANN)
    shared.finish(request)
    assert generated(public), "it still runs"
    assert request.n_cached == N_SYSTEM // 16 * 16
    shared.finish(public)


def test_a_segment_is_loaded_by_the_step_after_the_one_that_saves_it() -> None:
    shared = driver()
    ask(shared, SYSTEM, PUBLIC_SALT, max_tokens=1)
    shared.submit(SYSTEM + "!", cache_salt=ANN)
    first, second = shared.step(), shared.step()
    assert [type(each) for each in first.operations if isinstance(each, Save | Load)] == [Save] * 4
    (load,) = [each for each in second.operations if isinstance(each, Save | Load)]
    assert isinstance(load, Load)
    assert len(load.parts) == 4


def test_a_prefix_is_not_public_while_there_is_no_memory_to_save_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = driver()
    change = shared.backend.change

    def refuse(operation: Operation) -> None:
        if isinstance(operation, Save):
            raise NotSavedError(operation.segment)
        change(operation)

    monkeypatch.setattr(shared.backend, "change", refuse)
    ask(shared, SYSTEM, PUBLIC_SALT)
    request = ask(shared, SYSTEM + "!", ANN)
    assert request.n_loaded == 0
    assert generated(request) == cold(SYSTEM + "!")
    monkeypatch.undo()
    shared.backend.now += RETRY_DELAY_S
    ask(shared, SYSTEM, PUBLIC_SALT)
    assert ask(shared, SYSTEM + "!", BOB).n_loaded == N_SYSTEM


def test_what_was_published_again_is_found_again() -> None:
    shared = driver()
    ask(shared, SYSTEM, PUBLIC_SALT)
    shared.step()
    shared.cache.dropper.drop(PUBLIC_NAMESPACE)
    assert ask(shared, SYSTEM + "!", ANN).n_cached == 0
    ask(shared, SYSTEM, PUBLIC_SALT)
    assert ask(shared, SYSTEM + "!", BOB).n_cached == N_SYSTEM


def test_public_kv_counts_to_a_tenant_of_its_own_which_has_a_share_while_others_use_it() -> None:
    size = driver().backend.info.segment_size
    assert size is not None
    shared = driver(ram_bytes=20 * size.of(16), n_ctx=256)
    ask(shared, SYSTEM, PUBLIC_SALT, max_tokens=0)
    shares, tick = shared.cache._tiers.shares, 0.0
    for i in range(40):
        tick += INACTIVE_S / 2
        shared.backend.now = tick
        ask(shared, chr(33 + i) * 90, BOB, max_tokens=1)
        assert ask(shared, SYSTEM + chr(33 + i), ANN).n_cached == N_SYSTEM
        shared.cache.dropper.drop(salt_namespace(ANN))
    listed = shared.cache.listing(shared.cache.stats(), 1, None).tenants
    assert listed
    found = {each.tenant: (each.requests, each.ram_bytes) for each in listed}
    assert found[PUBLIC_TENANT] == (1, 3 * size.of(16) + size.of(N_SYSTEM % 16))
    assert shares.n_requests[tenant_name("ann")] == 40


def test_public_segments_count_as_used_when_a_tenant_starts_from_them() -> None:
    shared = driver()
    ask(shared, SYSTEM, PUBLIC_SALT, max_tokens=0)
    ask(shared, "another public prompt, which no tenant uses", PUBLIC_SALT, max_tokens=0)
    ask(shared, SYSTEM + "!", ANN)
    public = [each for each in shared.cache._tiers.ram if each.tenant == PUBLIC_TENANT]
    by_rank = sorted(public, key=lambda segment: segment.rank)
    is_system = [SYSTEM.encode().startswith(bytes(unpacked(each.prefix).tolist())) for each in by_rank]
    assert is_system == [False] * 3 + [True] * 4


def test_the_miss_reason_tells_that_public_tokens_continue_differently() -> None:
    shared = driver()
    ask(shared, SYSTEM + "the end", PUBLIC_SALT)
    assert ask(shared, SYSTEM + "another end", ANN).miss == "diverged"
    assert ask(shared, "nothing in common", ANN).miss == "salted"
    assert ask(shared, SYSTEM + "the end", BOB).miss == ""


@pytest.mark.parametrize("kind", [StateKind.WINDOW, StateKind.RECURRENT, StateKind.HYBRID])
def test_no_public_state_is_restored_behind_the_place_where_a_prompt_departs(kind: StateKind) -> None:
    def new() -> Driver:
        return driver(kind=kind, n_slots=1, n_reserved=2, n_ubatch=32, segment_tokens=512)

    shared = new()
    # A checkpoint lies a few tokens before the end: in the same node, but behind where they part.
    ask(shared, SYSTEM + "p" * 20, PUBLIC_SALT)
    own = SYSTEM + "x" * 60
    ask(shared, own, ANN)
    for n in range(N_SYSTEM + 17, N_SYSTEM + 24, 2):
        prompt = own[:n] + "z" * 4
        assert generated(ask(shared, prompt, ANN)) == generated(ask(new(), prompt, ANN))


@pytest.mark.parametrize("kind", [StateKind.WINDOW, StateKind.RECURRENT, StateKind.HYBRID])
def test_a_tenant_restores_the_public_state_while_a_public_sequence_is_live_there(kind: StateKind) -> None:
    shared = driver(kind=kind, n_slots=3, n_reserved=2, n_ubatch=32, offload_after=10**6)
    ask(shared, SYSTEM, PUBLIC_SALT, max_tokens=0)
    for _ in range(4):
        shared.backend.now += 1
        shared.step()
    for slot, letter in ((1, "x"), (2, "y")):
        request = ask(shared, SYSTEM + letter * 30, ANN, id_slot=slot)
        assert (request.n_cached, request.n_prompt_computed) == (N_SYSTEM, 30)


@pytest.mark.parametrize("kind", [StateKind.WINDOW, StateKind.RECURRENT, StateKind.HYBRID])
def test_no_own_state_is_restored_behind_the_place_where_only_the_public_prefix_goes_on(kind: StateKind) -> None:
    def new() -> Driver:
        return driver(kind=kind, n_slots=1, n_reserved=2, n_ubatch=32, segment_tokens=512)

    shared = new()
    ask(shared, SYSTEM + "p" * 40, PUBLIC_SALT)
    # Its checkpoint lies in a node that begins like the public one.
    ask(shared, SYSTEM + "x" * 8, ANN)
    prompt = SYSTEM + "p" * 10 + "z" * 9
    assert generated(ask(shared, prompt, ANN)) == generated(ask(new(), prompt, ANN))
