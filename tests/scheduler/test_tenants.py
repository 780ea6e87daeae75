"""Noninterference: what a tenant sees of scheduler and cache does not depend on what others' prompts say.

An administrator publishes prefixes meanwhile, with which the prompts of all may begin.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given

from llamaslot.base.namespaces import PUBLIC_NAMESPACE, PUBLIC_SALT, key_salt
from llamaslot.base.tokens import unpacked
from tests.scheduler.test_scheduler import Driver, generated

SALTS = [key_salt("prober", ""), key_salt("victim", ""), PUBLIC_SALT]
PROBER, VICTIM, ADMIN = 0, 1, 2
PUBLIC = "p" * 25 + "q" * 25
COUNTS: Counter[str] = Counter()


@dataclass(frozen=True)
class Sent:
    """A request: who sends it, what its prompt begins with (index of a text), and how many steps follow.

    Before that come `n_public` tokens of what the administrator publishes. The administrator sends only those.
    """

    who: int
    n_public: int
    text: int
    n_prompt: int
    n_tail: int
    n_generated: int
    n_steps: int


SENT = st.builds(
    Sent,
    st.sampled_from([PROBER, PROBER, VICTIM, VICTIM, ADMIN]),
    st.sampled_from([0, 0, 20, 32, 50]),
    st.integers(0, 2),
    st.integers(1, 90),
    st.integers(0, 20),
    st.integers(1, 12),
    st.integers(0, 12),
)


def observed(requests: list[Sent], texts: list[str]) -> list[object]:
    """All that the prober sees; the victim's prompts are made from `texts`."""
    driver = Driver(
        n_slots=2, n_reserved=4, n_ctx=256, n_ubatch=64, ram_bytes=6000, segment_tokens=16, min_shared=8
    )
    # A reply must not happen to continue a prompt, as it would for some letters and not for others.
    driver.backend.alphabet = b"0123456789"
    own = ["a" * 90, "b" * 90, "ab" * 45]
    seen, published = [], []
    for i, sent in enumerate(requests):
        text = (own if sent.who == PROBER else texts)[sent.text]
        # The tail differs from that of any other request.
        prompt = PUBLIC[: sent.n_public] + text[: sent.n_prompt] + chr(200 + i) * sent.n_tail
        if sent.who == ADMIN:
            prompt = PUBLIC[: sent.n_public or 8]
        request = driver.submit(prompt, max_tokens=sent.n_generated, cache_salt=SALTS[sent.who])
        if sent.who == PROBER:
            seen.append(request)
        elif sent.who == ADMIN:
            published.append(request)
        for _ in range(sent.n_steps):
            driver.step()
    driver.finish(*seen)
    while driver.scheduler.running or driver.scheduler.queue:
        driver.step()
    COUNTS["public"] += driver.cache.stats().public_tokens
    COUNTS["found"] += sum(request.n_cached for request in seen)
    sent_by_admin = [each.tokens.view().tolist() for each in published]
    for node in driver.cache._tree.nodes(PUBLIC_NAMESPACE):
        prefix = unpacked(node.prefix()).tolist()
        assert any(tokens[: len(prefix)] == prefix for tokens in sent_by_admin), "no administrator sent this"
    now = driver.backend.now
    return [(each.progress(now), generated(each), each.n_waited_for, each.n_overtaken) for each in seen]


@given(st.lists(SENT, max_size=10))
def check_noninterference(requests: list[Sent]) -> None:
    same = observed(requests, ["a" * 90, "b" * 90, "ab" * 45])
    # The same pattern in other letters: what the victim's prompts have in common with each other stays the same.
    other = observed(requests, ["c" * 90, "d" * 90, "cd" * 45])
    assert same == other


def test_equal_prompts_of_another_tenant_change_nothing() -> None:
    COUNTS.clear()
    check_noninterference()
    assert COUNTS["public"] > 0, "nothing public was found"
    assert COUNTS["found"] > 0, "the prober found nothing"
