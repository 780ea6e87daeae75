"""A request goes through its states by the table alone; an illegal event raises and changes nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from llamaslot.base.commands import GenerateParams
from llamaslot.base.errors import IllegalTransitionError
from llamaslot.base.tokens import TokenizedPrompt, packed
from llamaslot.scheduler.request import REQUEST_TABLE, Request, RequestEvent, RequestState

PROMPT = TokenizedPrompt(packed(np.arange(5, dtype=np.int32)))


def make_request(completion_id: str = "r", *, cache_prompt: bool = True) -> Request:
    return Request(GenerateParams(completion_id, cache_prompt=cache_prompt), PROMPT, arrival=1, now=0.0)


def test_the_table_allows_what_a_request_goes_through() -> None:
    allowed = {(before.name, event.name, after.name) for (before, event), after in REQUEST_TABLE.items()}
    assert allowed == {
        ("QUEUED", "ADMIT", "RUNNING"),
        ("RUNNING", "PREEMPT", "QUEUED"),
        ("RUNNING", "END", "DONE"),
        ("QUEUED", "END", "DONE"),
    }


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RequestState, RequestEvent)))
def test_a_request_follows_its_table(state: RequestState, event: RequestEvent) -> None:
    request = make_request()
    request.state = state
    after = REQUEST_TABLE.get((state, event))
    before = request.progress(2.0)
    if after is None:
        with pytest.raises(IllegalTransitionError):
            request.handle(event, 1.0)
        assert request.state is state
        assert request.progress(2.0) == before
    else:
        request.handle(event, 1.0)
        assert request.state is after


def test_a_request_that_is_done_never_moves_again() -> None:
    assert not [pair for pair in REQUEST_TABLE if pair[0] is RequestState.DONE]


def test_ending_a_request_frees_its_sampler_once() -> None:
    class Closing:
        n_closed = 0

        def close(self) -> None:
            self.n_closed += 1

    request = make_request()
    sampler = Closing()
    request.sampler = sampler
    request.handle(RequestEvent.ADMIT, 0.0)
    request.handle(RequestEvent.PREEMPT, 0.0)
    assert sampler.n_closed == 0
    request.handle(RequestEvent.END, 0.0)
    assert sampler.n_closed == 1


def test_a_private_request_shares_with_its_group_only() -> None:
    namespaces = {
        (cache_prompt, can_trim, salt, group): Request(
            GenerateParams("r", cache_prompt=cache_prompt, cache_salt=salt, group=group),
            PROMPT,
            arrival=1,
            now=0.0,
            can_reuse=can_trim,
        ).namespace
        for cache_prompt, can_trim, salt, group in itertools.product(
            (True, False), (True, False), ("", "s"), ("", "g")
        )
    }
    shared = {key: name for key, name in namespaces.items() if key[0] and key[1]}
    assert shared[True, True, "", ""] == shared[True, True, "", "g"] != shared[True, True, "s", ""]
    private = {key: name for key, name in namespaces.items() if key not in shared}
    assert not set(private.values()) & set(shared.values())
    assert len(set(private.values())) == 2
