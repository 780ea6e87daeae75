"""What drafting would gain by the choices of the drafter, by perfect ones, and by a fixed length.

Replies of a model are recorded without drafts, and replayed token by token: the drafter proposes, what it proposed
is compared with the reply, and the time of each step is computed from `StepCost`. So the figures have no noise, and
what would be drafted on another machine is seen too. Steps are those of one stream.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from rich.table import Table

from bench.client import BenchmarkError
from bench.peers.baseline import revision
from bench.peers.workloads import GREEDY
from bench.progress import progress
from bench.quoting import CHAT, REWRITE, TOOLS, Prompts
from bench.report import ROOT, console, machine, new_table, write_json
from bench.speculate import SAMPLED, context, model_of, prompts_for
from bench.steps import backend_settings
from llamaslot.backend.llama import LlamaBackend
from llamaslot.base.backend import Run, Status
from llamaslot.base.commands import GenerateParams, TokenizedPrompt
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Remove
from llamaslot.base.model import MAX_DRAFT, QUERY_BLOCK, ModelInfo, StepCost
from llamaslot.base.tokens import packed
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.scheduler.chunk_sizer import ChunkSizer
from llamaslot.scheduler.drafter import LENGTHS, MIN_MATCH, Drafter, prompt_lookup
from llamaslot.scheduler.request import Request

KINDS = (REWRITE, TOOLS, CHAT)
HERE, GPU = "here", "a GPU"
GPU_COST = StepCost(step_us=5000, token_us=100, token_cell_us=0.05, block_us=9000, block_cell_us=0.1)
"""As on a GPU on which a step of 64 tokens takes twice as long as one of a single token."""
FIXED_MATCH = 24
"""Tokens that must be repeated before a draft of fixed length, as by llama-server's `ngram-mod`."""
_CHUNK = 512


@dataclass(frozen=True)
class Text:
    """A prompt and its reply without drafts."""

    kind: str
    sampled: bool
    prompt: list[int]
    reply: list[int]


@dataclass(frozen=True)
class Replayed:
    """A reply as it would be computed; times in ms."""

    ms: float
    plain_ms: float
    """Without drafts."""
    n_drafted: int
    n_accepted: int


class Policy(Protocol):
    """Decides what is drafted in a reply."""

    draft: Sequence[int]
    """What may follow the tokens so far: the next step computes it."""

    def observe(self, taken: Sequence[int], n_drafted: int, ms: float) -> None:
        """Take over the tokens of a step and its time, and choose the next draft."""


def run(*, model: str, repeats: int, scale: float, folder: Path, server_flags: Sequence[str]) -> None:
    """Record, replay, print, write `drafting.json`."""
    path, title = model_of(model)
    flags = ["-c", str(context(scale)), "-np", "1", "-fa", "on", *server_flags]
    backend = LlamaBackend(backend_settings(path, flags))
    try:
        if not backend.measure_costs() or backend.info.step_cost is None:
            raise BenchmarkError(f"costs could not be measured: {backend.info.costs_pending}")
        texts = record(backend, prompts_for(path, model, scale), repeats)
    finally:
        backend.close()
    costs = {HERE: backend.info.step_cost, GPU: GPU_COST}
    results = [
        {"costs": name, "policy": policy, "kind": text.kind, "sampled": text.sampled}
        | asdict(replayed(text, POLICIES[policy](backend.info, cost, text), cost))
        for name, cost in costs.items()
        for text in texts
        for policy in POLICIES
    ]
    console.print(table(title, results))
    content = {"benchmark": "drafting", "commit": revision(ROOT), "machine": machine(), "model": title}
    content |= {"costs": {name: msgspec.to_builtins(cost) for name, cost in costs.items()}}
    write_json(folder / "drafting.json", content | {"texts": [asdict(each) for each in texts], "results": results})


def record(backend: LlamaBackend, prompts: Prompts, n_each: int) -> list[Text]:
    """Return replies to `n_each` prompts of each kind, greedy and sampled."""
    wanted = [(kind, sampled, i) for kind in KINDS for sampled in (False, True) for i in range(n_each)]
    texts = []
    with progress("text", len(wanted)) as advance:
        for kind, sampled, i in wanted:
            prompt = prompts.draw(kind, random.Random(f"{kind} {sampled} {i}"))
            bias = {token: -np.inf for token, _ in prompt.fields.get("logit_bias", ())}
            sampling = Sampling(**(SAMPLED if sampled else GREEDY), seed=i, ignore_eos=True, logit_bias=bias)
            texts.append(Text(kind, sampled, prompt.ids, _reply(backend, prompt.ids, prompt.n_reply, sampling)))
            advance(f"{kind}, {'sampled' if sampled else 'greedy'}")
    return texts


def _reply(backend: LlamaBackend, prompt: Sequence[int], n: int, sampling: Sampling) -> list[int]:
    """Generate `n` tokens in sequence 0, which is empty afterwards."""
    tokens = np.array(prompt, dtype=np.int32)
    sampler = backend.new_sampler(sampling, tokens)
    reply: list[int] = []
    try:
        for at in range(0, len(tokens), _CHUNK):
            chunk = tokens[at : at + _CHUNK]
            _decode(backend, Run(0, at, chunk, n_outputs=int(at + len(chunk) == len(tokens))))
        while True:
            [(token,)] = backend.sample([(0, sampler)])
            reply.append(token)
            if len(reply) == n:
                return reply
            _decode(backend, Run(0, backend.seq_len(0), np.array([token], dtype=np.int32), n_outputs=1))
    finally:
        sampler.close()
        backend.change(Remove(0, 0))


def _decode(backend: LlamaBackend, run: Run) -> None:
    if (status := backend.decode([run]).status) is not Status.OK:
        raise BenchmarkError(f"llama.cpp could not compute a step: {status.name}")


def replayed(text: Text, policy: Policy, cost: StepCost) -> Replayed:
    """Replay a reply with the drafts of a policy."""
    ms = plain_ms = 0.0
    n_drafted = n_accepted = at = 0
    while at < len(text.reply):
        n_cells = len(text.prompt) + at
        draft = policy.draft[: len(text.reply) - at - 1]
        right = next((i for i, token in enumerate(draft) if token != text.reply[at + i]), len(draft))
        took = step_ms(cost, 1 + len(draft), n_cells)
        taken = text.reply[at : at + right + 1]
        policy.observe(taken, len(draft), took)
        plain_ms += sum(step_ms(cost, 1, n_cells + i) for i in range(len(taken)))
        ms, at = ms + took, at + len(taken)
        n_drafted, n_accepted = n_drafted + len(draft), n_accepted + right
    return Replayed(ms, plain_ms, n_drafted, n_accepted)


def step_ms(cost: StepCost, n_tokens: int, n_cells: int) -> float:
    """Return the time of a step of one stream, which is padded to a query block where that is faster."""
    few, block = cost.small_ms(n_tokens, n_tokens * n_cells), cost.block_ms(n_cells)
    return min(few, block) if n_tokens <= QUERY_BLOCK else block


class Ours:
    """The drafts of llamaslot."""

    def __init__(self, info: ModelInfo, cost: StepCost, text: Text) -> None:
        n = len(text.prompt) + len(text.reply) + 1
        self._chunks = ChunkSizer(n_ubatch=_CHUNK, gap_ms=100.0)
        cache = KVCache(CacheSettings(n_slots=1, n_cells=n, n_seqs=1, gap_ms=100.0))
        limits = {"step_cost": cost, "n_ctx_slot": n, "n_spare_rows": MAX_DRAFT}
        self._drafter = Drafter(msgspec.structs.replace(info, **limits), self._chunks, cache)
        params = GenerateParams("r", max_draft=MAX_DRAFT, max_tokens=len(text.reply))
        prompt = TokenizedPrompt(packed(np.array(text.prompt, dtype=np.int32)))
        self._request = Request(params, prompt, arrival=0, now=0.0)
        self.draft: list[int] = []

    def observe(self, taken: Sequence[int], n_drafted: int, ms: float) -> None:
        request = self._request
        if n_drafted:
            self._drafter.observe(n_drafted, 1, len(request.tokens), ms / 1e3)
        else:
            self._chunks.observe(0, 1, ms / 1e3)
        for token in taken:
            request.add_token(token, 0.0)
        if n_drafted:
            request.count_draft(n_drafted, len(taken) - 1)
        self._drafter.propose([request])
        self.draft = request.draft.tolist()


class Lookup:
    """What prompt lookup finds, as many tokens of it as `length` says."""

    def __init__(self, _: ModelInfo, cost: StepCost, text: Text) -> None:
        self._cost = cost
        self._tokens, self._rest = list(text.prompt), list(text.reply)
        self.draft: list[int] = []

    def observe(self, taken: Sequence[int], n_drafted: int, ms: float) -> None:
        self._tokens += taken
        self._rest = self._rest[len(taken) :]
        n_matched, follows = prompt_lookup(np.array(self._tokens, dtype=np.int32), MAX_DRAFT)
        found = follows.tolist()
        self.draft = found[: self.length(n_matched, found)]

    def length(self, n_matched: int, found: Sequence[int]) -> int:
        """Return the number of tokens to draft."""
        raise NotImplementedError


class Fixed(Lookup):
    """All that a query block holds, if enough is repeated."""

    def length(self, n_matched: int, found: Sequence[int]) -> int:
        return len(found) if n_matched >= FIXED_MATCH else 0


class Perfect(Lookup):
    """The length with the most tokens per second, knowing what will be accepted."""

    def length(self, n_matched: int, found: Sequence[int]) -> int:
        if n_matched < MIN_MATCH:
            return 0
        pairs = zip(found, self._rest, strict=False)
        right = next(
            (i for i, (token, other) in enumerate(pairs) if token != other), min(len(found), len(self._rest))
        )
        n_cells = len(self._tokens)
        return max((0, *LENGTHS), key=lambda n: (1 + min(n, right)) / step_ms(self._cost, 1 + n, n_cells))


POLICIES: Mapping[str, Callable[[ModelInfo, StepCost, Text], Policy]] = {
    "llamaslot": Ours,
    "perfect": Perfect,
    f"{FIXED_MATCH} tokens, then {MAX_DRAFT}": Fixed,
}


def table(title: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each kind of text and policy: how much faster than without drafts, all texts together and each."""
    headings = ("costs", "text", "policy", "x", "least", "drafted", "right")
    caption = (
        "x: time without drafts over time with them; least: of one text; drafted: of the tokens, right: of these"
    )
    found = new_table(f"Drafts, replayed: {title}", headings, ("costs", "text", "policy"), caption)
    for costs, kind, sampled, policy in dict.fromkeys(map(_key, results)):
        own = [each for each in results if _key(each) == (costs, kind, sampled, policy)]
        gain = sum(each["plain_ms"] for each in own) / sum(each["ms"] for each in own)
        least = min(each["plain_ms"] / each["ms"] for each in own)
        n_drafted, n_accepted = (sum(each[name] for each in own) for name in ("n_drafted", "n_accepted"))
        right = f"{n_accepted / n_drafted:.0%}" if n_drafted else ""
        text = f"sampled {kind}" if sampled else kind
        found.add_row(costs, text, policy, f"{gain:.2f}", f"{least:.2f}", str(n_drafted), right)
    return found


def _key(result: Mapping[str, Any]) -> tuple[str, str, bool, str]:
    return result["costs"], result["kind"], result["sampled"], result["policy"]
