"""Statistics and snapshots of the cache, against the fake pool and against what each request reused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llamaslot.base.commands import CacheCleared, GenerateParams
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.stats import CacheState, CacheStats
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.scheduler.request import Request
from tests.pool import tokens_of
from tests.scheduler.test_scheduler import Driver, as_tokens, tokenized

PROMPTS = st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=25)


def stats(driver: Driver) -> CacheStats:
    return driver.scheduler.cache_stats()


def state_of(driver: Driver, top: int = 1000, *, text: bool = False) -> CacheState:
    detokenize = driver.backend.vocab.detokenize if text else None
    return driver.cache.listing(stats(driver), top, detokenize)


def texts_of(state: CacheState) -> list[str]:
    """The whole text of each prefix, put together from the edges."""
    whole: list[str] = []
    for prefix in state.prefixes:
        whole.append((whole[prefix.parent] if prefix.parent is not None else "") + str(prefix.text))
    return whole


@given(prompts=PROMPTS, n_running=st.integers(0, 3), top=st.integers(1, 9))
def test_a_snapshot_lists_the_pool_and_no_prefix_before_its_ancestors(
    prompts: list[str], n_running: int, top: int
) -> None:
    driver = Driver(n_slots=4, n_reserved=4, n_ctx=96, n_ubatch=32, min_shared=2)
    for prompt in prompts:
        driver.run(prompt, max_tokens=2)
    for prompt in prompts[:n_running]:
        driver.submit(prompt + "c", max_tokens=50)
    for _ in range(2 * bool(n_running)):
        driver.step()
    state = state_of(driver, text=True)
    texts = texts_of(state)
    for i, (prefix, text) in enumerate(zip(state.prefixes, texts, strict=True)):
        assert prefix.parent is None or prefix.parent < i
        assert prefix.tokens == len(text)
        assert prefix.edge_tokens == len(str(prefix.text))
        assert prefix.holders
        for seq in prefix.holders:
            assert bytes(tokens_of(driver.cache._tree, seq)).decode().startswith(text)
        runs = {slot.id for slot in driver.scheduler.slots if slot.request}
        assert prefix.pinned == bool(runs & set(prefix.holders))
    parents = {prefix.parent for prefix in state.prefixes}
    assert (state.nodes, state.leaves) == (len(texts), len(set(range(len(texts))) - parents))
    assert {(prefix.ram_tokens, prefix.disk_tokens) for prefix in state.prefixes} <= {(0, 0)}
    assert len(set(texts)) == len(texts)
    assert sum(prefix.edge_tokens for prefix in state.prefixes) == state.tokens
    assert sum(prefix.edge_tokens for prefix in state.prefixes if prefix.pinned) == state.tokens_pinned
    order = [(-prefix.hits, prefix.last_used, prefix.tokens - prefix.edge_tokens) for prefix in state.prefixes]
    assert order == sorted(order)
    short = state_of(driver, top, text=True)
    assert [each.tokens for each in short.prefixes] == [each.tokens for each in state.prefixes[:top]]
    assert (short.nodes, short.cells) == (state.nodes, state.cells)
    cells = state.cells
    assert cells.used == driver.backend.cells_used
    assert cells.used == cells.idle + cells.pinned
    assert state.sequences.used == sum(driver.backend.seq_len(seq) > 0 for seq in range(driver.backend.n_seqs))


@given(prompts=PROMPTS)
def test_hits_and_misses_are_what_the_requests_reused(prompts: list[str]) -> None:
    driver = Driver(n_slots=3, n_reserved=3, n_ctx=96, n_ubatch=32, min_shared=2)
    ended = [driver.run(prompt) for prompt in prompts]
    found = [request.progress(0.0) for request in ended]
    total = stats(driver)
    assert total.requests.hits == sum(p.n_cached > 0 for p in found)
    assert total.requests.misses == sum(p.n_cached == 0 for p in found)
    assert total.requests.cross_slot == sum(p.n_copied > 0 for p in found)
    assert total.prompt_tokens.total == sum(map(len, prompts))
    assert total.prompt_tokens.matched == sum(p.n_cached for p in found)
    assert all(p.n_copied <= p.n_cached for p in found)


def test_a_hit_counts_for_its_own_slot_or_for_another() -> None:
    driver = Driver(n_slots=2, n_reserved=2, n_ctx=128, n_ubatch=64, min_shared=2)
    driver.run("shared head, tail one")
    assert stats(driver).requests.misses == 1
    driver.run("shared head, tail one and more")
    assert (stats(driver).requests.hits, stats(driver).requests.cross_slot) == (1, 0)
    other = driver.run("shared head, tail two")
    assert (stats(driver).requests.hits, stats(driver).requests.cross_slot) == (2, 1)
    assert other.progress(0.0).n_copied == other.n_cached == len("shared head, tail ")


def test_namespaces_are_told_apart_by_numbers_and_not_by_their_names() -> None:
    driver = Driver(n_slots=4, n_reserved=4, n_ctx=128, n_ubatch=64)
    for i, salt in enumerate(("", "pepper", "pepper")):
        params = GenerateParams(f"r{i}", sampling=Sampling(ignore_eos=True), max_tokens=1, cache_salt=salt)
        request = Request(params, tokenized("the same prompt"), arrival=i, now=0.0)
        driver.scheduler.submit(request)
        driver.finish(request)
    state = state_of(driver)
    assert state.namespaces == 2
    assert sorted((p.namespace, p.tokens, p.hits) for p in state.prefixes) == [(0, 15, 1), (1, 15, 0)]
    assert "pepper" not in repr(state)
    assert not any(prefix.text for prefix in state.prefixes)


def test_the_text_of_a_long_edge_is_cut() -> None:
    driver = Driver(n_slots=2, n_ctx=512, n_ubatch=64)
    driver.run("x" * 400)
    [prefix] = state_of(driver, text=True).prefixes
    assert (prefix.tokens, prefix.text) == (400, "x" * 256)


def test_a_request_that_ended_during_prefill_did_not_reuse_the_rest_of_its_prompt() -> None:
    driver = Driver(n_slots=2, n_reserved=2, n_ctx=256, n_ubatch=8)
    cold = driver.submit("c" * 100)
    for _ in range(3):
        driver.step()
    assert 0 < cold.n_prompt_computed < 50
    driver.scheduler.end(cold, 0.0)
    assert cold.progress(0.0).n_cached == 0
    held = cold.n_prompt_computed
    warm = driver.submit("c" * 100)
    driver.step()
    driver.scheduler.end(warm, 0.0)
    assert warm.progress(0.0).n_cached == held
    assert (stats(driver).requests.misses, stats(driver).requests.hits) == (1, 1)


def test_private_and_unstarted_requests_are_neither_hits_nor_misses() -> None:
    driver = Driver(n_slots=1, n_ctx=256, n_ubatch=64)
    driver.run("a prompt")
    private = Request(
        GenerateParams("private", cache_prompt=False, max_tokens=1), tokenized("a prompt"), arrival=5, now=0.0
    )
    driver.scheduler.submit(private)
    driver.finish(private)
    busy = driver.submit("another", max_tokens=9)
    driver.step()
    queued = driver.submit("another")
    driver.step()
    driver.scheduler.end(queued, 0.0)
    driver.finish(busy)
    total = stats(driver)
    assert (total.requests.hits, total.requests.misses, total.prompt_tokens.total) == (
        0,
        2,
        len("a prompt" + "another"),
    )


def test_dropping_everything_spares_running_requests() -> None:
    driver = Driver(n_slots=3, n_reserved=3, n_ctx=256, n_ubatch=64, min_shared=2)
    for prompt in ("head and one", "head and two", "something else", "head and three"):
        driver.run(prompt)
    runs = driver.submit("head and two, then more", max_tokens=40)
    driver.step()
    before = state_of(driver)
    assert before.cells.idle > 0
    assert driver.cache.dropper.drop() == CacheCleared(before.tokens - before.tokens_pinned)
    driver.step()
    after = state_of(driver)
    assert (after.cells.idle, after.leaves, after.sequences.used) == (0, 1, 1)
    assert after.cells.used == driver.backend.cells_used == driver.held(runs)
    assert after.evicted_tokens == before.evicted_tokens
    driver.finish(runs)
    alone = Driver(n_slots=1, n_ctx=256, n_ubatch=64).run("head and two, then more", max_tokens=40)
    assert runs.tokens.view().tolist() == alone.tokens.view().tolist()
    assert driver.run("something else").n_cached == 0


def test_every_slot_of_a_partitioned_pool_counts_its_own_cells() -> None:
    driver = Driver(n_slots=4, n_ctx=256, n_ubatch=64, unified=False)
    for slot in (0, 1):
        driver.run("the same", id_slot=slot)
    runs = driver.submit("the same", max_tokens=9, id_slot=2)
    driver.step()
    state = state_of(driver)
    assert state.tokens == len("the same")
    cells = state.cells
    assert (cells.idle, cells.pinned) == (2 * len("the same"), driver.held(runs))
    assert cells.used == driver.backend.cells_used
    assert state.sequences.used == 3


def test_spare_sequences_of_a_partitioned_pool_count_too() -> None:
    driver = Driver(n_slots=1, n_reserved=2, n_ctx=256, n_ubatch=64, unified=False)
    for letter in "abc":
        driver.run(letter * 100)
    driver.step()
    found = state_of(driver)
    cells = found.cells
    assert found.sequences.used > 1
    assert cells.total == 3 * 256
    assert cells.used == cells.idle == driver.backend.cells_used
    assert cells.pinned == 0


def test_dropping_everything_clears_an_idle_slot_whose_path_a_running_one_has_too() -> None:
    cache = KVCache(CacheSettings(n_slots=2, n_cells=64, n_seqs=2, unified=False, gap_ms=100.0))
    for seq in (0, 1):
        cache.acquire([seq], cache.match("", b""))
        cache.append(seq, as_tokens("the same"))
    cache.release(0)
    assert cache.dropper.drop() == CacheCleared(0)
    assert (cache.length(0), cache.length(1)) == (0, 8)


@given(prompts=PROMPTS, top=st.integers(1, 9))
def test_a_snapshot_lists_what_is_in_ram_beside_the_pool(prompts: list[str], top: int) -> None:
    size = Driver().backend.info.segment_size
    driver = Driver(
        n_slots=2, n_reserved=2, n_ctx=96, n_ubatch=32, min_shared=2, ram_bytes=size.of(200), offload_after=1
    )
    for prompt in prompts:
        driver.run(prompt, max_tokens=2)
    state = state_of(driver, text=True)
    texts = texts_of(state)
    assert len(set(texts)) == len(texts)
    assert sum(each.edge_tokens for each in state.prefixes if each.holders) == state.tokens
    assert sum(each.ram_tokens for each in state.prefixes) == state.ram.tokens
    for prefix, text in zip(state.prefixes, texts, strict=True):
        assert prefix.tokens == len(text)
        assert prefix.ram_tokens <= prefix.edge_tokens
    parents = {prefix.parent for prefix in state.prefixes}
    leaves = [prefix for i, prefix in enumerate(state.prefixes) if i not in parents]
    assert all(leaf.holders or leaf.ram_tokens for leaf in leaves)
    order = [(-prefix.hits, prefix.last_used, prefix.tokens - prefix.edge_tokens) for prefix in state.prefixes]
    assert order == sorted(order)
    assert len(state_of(driver, top).prefixes) == min(top, len(state.prefixes))


def test_statistics_of_ram_agree_with_the_backend() -> None:
    driver = Driver(n_slots=2, n_reserved=2, n_ctx=512, n_ubatch=64, ram_bytes=9000, offload_after=1)
    requests = [driver.run(prompt) for prompt in ("a" * 70, "b" * 90, "a" * 70 + "c" * 9, "d" * 40, "b" * 90)]
    found = stats(driver)
    stored = driver.backend.segments.values()
    assert (found.ram.total_bytes, found.ram.used_bytes) == (9000, driver.backend.n_segment_bytes)
    assert (found.ram.segments, found.ram.tokens) == (len(stored), sum(map(len, stored)))
    assert found.ram.segments != found.ram.tokens
    n_loaded = [request.n_loaded for request in requests]
    assert n_loaded == [0, 0, 70, 0, 89]
    assert found.loaded_tokens == sum(n_loaded)
    assert (found.requests.hits, found.requests.from_ram, found.requests.cross_slot) == (2, 2, 0)
    left = [driver.cache._tree.n_tokens, found.loaded_tokens]
    n_computed = sum(len(work.run.tokens) for plan in driver.plans for work in plan.work)
    assert found.offloaded_tokens == n_computed + left[1] - left[0]
    assert found.evicted_tokens == 0


def test_segments_are_evicted_from_ram_before_more_are_saved() -> None:
    size = Driver().backend.info.segment_size
    driver = Driver(n_slots=2, n_reserved=2, n_ctx=512, n_ubatch=64, ram_bytes=size.of(100), offload_after=1)
    most = 0
    change = driver.backend.change

    def watched(operation: object) -> None:
        nonlocal most
        change(operation)
        most = max(most, driver.backend.n_segment_bytes)

    driver.backend.change = watched
    for letter in "abcdef":
        driver.run(letter * 60)
    assert size.of(60) <= most <= size.of(100)
