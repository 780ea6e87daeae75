"""Shares of owners in a bounded memory: against a simple model, and what no owner can do to another."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from llamaslot.api.responses.store import ResponseStore, StoredResponse
from llamaslot.base.callers import INACTIVE_S
from llamaslot.base.text_records import TextAnchor
from llamaslot.prompts.token_memory import TokenMemory

CAPACITY = 20
Step = tuple[str, str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "use", "drop"]), st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 22)
    ),
    max_size=60,
)


class Value(TextAnchor, frozen=True, kw_only=True, tag="value"):
    """A record of any size."""

    size: int

    @property
    def n_bytes(self) -> int:
        return self.size


def value(key: bytes, owner: str, size: int) -> Value:
    return Value(key=key, tokens=b"", start=0, owner=owner, size=size)


class Model:
    """A list in the order of last use, which is read anew for each decision."""

    def __init__(self) -> None:
        self.entries: list[tuple[bytes, str, int]] = []

    def held(self) -> Counter[str]:
        held: Counter[str] = Counter()
        for _, owner, size in self.entries:
            held[owner] += size
        return held

    def drop(self, key: bytes) -> None:
        self.entries = [each for each in self.entries if each[0] != key]

    def use(self, key: bytes) -> None:
        self.entries.sort(key=lambda each: each[0] == key)

    def put(self, key: bytes, owner: str, size: int) -> None:
        earlier = [each for each in self.entries if each[0] == key]
        self.drop(key)
        unchanged = [*self.entries, *earlier]
        while sum(self.held().values()) + size > CAPACITY:
            held = self.held()
            held[owner] += size
            most = max(held.values())
            largest = owner if held[owner] == most else max(each for each in held if held[each] == most)
            theirs = [entry for entry in self.entries if entry[1] == largest]
            if not theirs:
                self.entries = unchanged
                return
            self.entries.remove(theirs[0])
        self.entries.append((key, owner, size))


@given(STEPS)
def test_a_memory_with_shares_is_as_the_model(steps: list[Step]) -> None:
    memory = TokenMemory(CAPACITY)
    model = Model()
    for action, owner, number, size in steps:
        key = number.to_bytes()
        if action == "put":
            memory.add(value(key, owner, size))
            model.put(key, owner, size)
        elif action == "use":
            memory._chain(Value, key)
            model.use(key)
        else:
            memory._drop((Value, key))
            model.drop(key)
        found = [(each.key, each.owner, each.n_bytes) for each in memory.records()]
        assert found == model.entries
        assert memory.n_bytes == sum(model.held().values()) <= CAPACITY


@given(STEPS)
def test_no_client_evicts_an_entry_of_one_that_is_below_its_share(steps: list[Step]) -> None:
    memory = TokenMemory(CAPACITY)
    for i, (_, owner, _, size) in enumerate(steps):
        before = memory.records()
        held: Counter[str] = Counter()
        for each in before:
            held[each.owner] += each.n_bytes
        memory.add(value(i.to_bytes(), owner, size))
        share = CAPACITY / len({*held, owner})
        for each in before:
            assert each in memory.records() or held[each.owner] > share or each.owner == owner


@given(STEPS, st.lists(st.booleans(), min_size=60, max_size=60))
def test_no_client_evicts_a_response_of_one_that_is_below_its_share(
    steps: list[Step], continues: list[bool]
) -> None:
    store = ResponseStore(max_responses=8, max_bytes=CAPACITY)
    known: list[StoredResponse] = []
    for i, (action, owner, number, size) in enumerate(steps):
        held, n_listed = Counter[str](), Counter[str]()
        for each in {each for one in known for each in one.turns()}:
            held[each.owner] += each.size
        n_listed.update(each.owner for each in known)
        if action == "drop" and known:
            store.delete(known[number % len(known)].namespace, known[number % len(known)].id)
        elif action == "put":
            own = [each for each in known if each.owner == owner]
            previous = own[number % len(own)] if own and continues[i] else None
            response = StoredResponse(owner, str(i), b"", b"x" * size, {}, previous, owner)
            n_owners = len({*held, owner})
            if store.put(response):
                known.append(response)
            else:
                chain = sum(each.size for each in response.turns())
                assert chain > CAPACITY or held[owner] + response.size > CAPACITY / n_owners
            for each in known:
                is_within = held[each.owner] <= CAPACITY / n_owners and n_listed[each.owner] <= 8 / n_owners
                assert each.is_listed or each.owner == owner or not is_within
        known = [each for each in known if each.is_listed]
        assert len(known) == len(store) <= 8
        kept = {each for one in known for each in one.turns()}
        assert store.n_bytes == sum(each.size for each in kept) <= CAPACITY


def test_a_conversation_that_a_request_continues_neither_refuses_others_nor_loses_turns() -> None:
    store = ResponseStore(max_responses=8, max_bytes=64)
    chain: StoredResponse | None = None
    for i in range(4):
        chain = StoredResponse("", f"a{i}", b"", b"x" * 10, {}, chain, "a")
        assert store.put(chain)
    assert chain is not None
    assert store.put(StoredResponse("", "c", b"", b"x" * 24, {}, None, "c"))
    store.hold(chain)
    assert store.put(StoredResponse("", "b", b"", b"x", {}, None, "b")), "what owner a holds stays"
    assert store.put(StoredResponse("", "a4", b"", b"x" * 10, {}, chain, "a"))
    store.release(chain)
    assert [store.get("", f"a{i}").is_listed for i in range(5)] == [True] * 5
    assert store.n_bytes == 51


def test_clients_that_are_inactive_for_an_hour_have_no_share() -> None:
    now = 0.0
    store = ResponseStore(max_responses=3, max_bytes=1000, clock=lambda: now)

    def put(owner: str) -> bool:
        return store.put(StoredResponse("", owner, b"", b"x", {}, None, owner))

    assert all(map(put, "abc"))
    now += INACTIVE_S - 1
    store.get("", "a")
    assert not put("d"), "the others hold as much, and are active"
    now += 1
    assert put("d")
    assert put("e")
    assert not put("f")
    assert {key for key in "abcde" if ("", key) in store._listed} == {"a", "d", "e"}
