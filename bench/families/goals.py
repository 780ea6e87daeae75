"""The results of workloads by kind of model, and whether llamaslot reaches its goals there.

1. llamaslot computes at most `MAX_SHARE` times what the dense oracle does, and at most one checkpoint interval more
   for each new fork. A turn that only continues a conversation computes at most `MAX_TURN` tokens beyond the new.
2. It never computes more than the best llama-server. In the workloads of `HALVED` it computes at most half (or
   `MAX_SHARE` times the oracle where that is more), and the mean TTFT is at most `MAX_TTFT` times.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.families.kinds import Kind
from bench.families.oracle import Need
from bench.peers.servers import OWN

MAX_SHARE = 1.15
MAX_TURN = 64
HALVED = ("fan-out cold", "fan-out warm", "agent", "interleaved")
MAX_TTFT = 0.6
COLUMNS = (
    *("workload", "prompt", "fewest", "own", "x", "limit", "turn", "1"),
    *("peer", "x", "limit", "own ms", "peer ms", "ratio", "2"),
)


@dataclass(frozen=True)
class FamilyRun:
    """One workload on one server with one kind of model; lists are by request, in the order of sending."""

    kind: str
    workload: str
    server: str
    repeat: int
    checkpoint_mib: int
    """Most that checkpoints of all slots together may take; 0 where none are taken."""
    ttft: list[float]
    """Seconds; of the measured requests only."""
    prompt_tokens: list[int]
    computed_tokens: list[int]
    """By the counts of the replies; their sum is that of the server's metrics."""
    needs: list[Need]

    @property
    def ttft_mean(self) -> float:
        """Mean time to the first token in seconds."""
        return statistics.fmean(self.ttft)

    @property
    def n_computed(self) -> int:
        """Prompt tokens that the server computed."""
        return sum(self.computed_tokens)

    @property
    def n_fewest(self) -> int:
        """Prompt tokens that the oracle computes for the same requests."""
        return sum(need.fewest for need in self.needs)

    @property
    def worst_turn(self) -> int | None:
        """Most tokens that a turn computed beyond the new ones; None if no request is a turn."""
        pairs = zip(self.computed_tokens, self.needs, strict=True)
        return max((computed - need.fewest for computed, need in pairs if need.is_turn), default=None)

    def limit(self, interval: int) -> float:
        """Most tokens that goal 1 allows with checkpoints `interval` tokens apart."""
        return MAX_SHARE * self.n_fewest + sum(min(interval, need.matched) for need in self.needs if need.is_branch)

    def is_frugal(self, interval: int) -> bool:
        """True if goal 1 is met."""
        return self.n_computed <= self.limit(interval) and (self.worst_turn or 0) <= MAX_TURN


@dataclass(frozen=True)
class Row:
    """A workload with one kind of model: medians over the repeats, and the goals."""

    kind: str
    workload: str
    prompt: float
    fewest: float
    computed: float
    limit: float
    worst_turn: int | None
    ttft_ms: float
    is_frugal: bool
    peer_computed: float | None = None
    """Of the llama-server that computes least; None without one."""
    peer_limit: float | None = None
    peer_ttft_ms: float | None = None
    """Of the llama-server with the shortest TTFT."""
    ttft_ratio: float | None = None
    """Median of the pairs."""

    @property
    def is_fast(self) -> bool:
        """False if goal 2 asks for a shorter mean TTFT."""
        return self.workload not in HALVED or self.ttft_ratio is None or self.ttft_ratio <= MAX_TTFT

    @property
    def computes_less(self) -> bool:
        """False if goal 2 asks for fewer computed tokens."""
        return self.peer_limit is None or self.computed <= self.peer_limit

    @property
    def is_ahead(self) -> bool | None:
        """True if goal 2 is met; None without a llama-server."""
        return None if self.peer_limit is None else self.is_fast and self.computes_less

    def cells(self) -> list[str]:
        """The row of the table."""
        turn = "" if self.worst_turn is None else f"{self.worst_turn:+,}"
        own = [self.workload, *(f"{n:,.0f}" for n in (self.prompt, self.fewest, self.computed))]
        own += [f"{self.computed / self.fewest:.2f}", f"{self.limit:,.0f}", turn, _verdict(self.is_frugal)]
        if self.peer_computed is None:
            return [*own, "", "", "", f"{self.ttft_ms:,.0f}", "", "", ""]
        peer = [f"{self.peer_computed:,.0f}", f"{self.peer_computed / self.fewest:.2f}", f"{self.peer_limit:,.0f}"]
        times = [f"{self.ttft_ms:,.0f}", f"{self.peer_ttft_ms:,.0f}", f"{self.ttft_ratio:.2f}"]
        return [*own, *peer, *times, _verdict(self.is_ahead)]


def rows(runs: Sequence[FamilyRun], interval: int) -> list[Row]:
    """Compare llamaslot's runs with those of the best llama-server, by kind and workload."""
    result = []
    for kind, workload in dict.fromkeys((run.kind, run.workload) for run in runs):
        chosen = [run for run in runs if (run.kind, run.workload) == (kind, workload)]
        own = {run.repeat: run for run in chosen if run.server == OWN}
        peers: dict[str, dict[int, FamilyRun]] = {}
        for run in chosen:
            if run.server != OWN:
                peers.setdefault(run.server, {})[run.repeat] = run
        if own:
            result.append(_row(kind, workload, own, list(peers.values()), interval))
    return result


def _row(
    kind: str, workload: str, own: dict[int, FamilyRun], peers: Sequence[dict[int, FamilyRun]], interval: int
) -> Row:
    runs = list(own.values())
    turns = [run.worst_turn for run in runs if run.worst_turn is not None]
    fewest = statistics.median(run.n_fewest for run in runs)
    alone = Row(
        kind=kind,
        workload=workload,
        prompt=statistics.median(sum(run.prompt_tokens) for run in runs),
        fewest=fewest,
        computed=_computed(runs),
        limit=statistics.median(run.limit(interval) for run in runs),
        worst_turn=max(turns, default=None),
        ttft_ms=1e3 * _ttft(runs),
        is_frugal=all(run.is_frugal(interval) for run in runs),
    )
    paired = [peer for peer in peers if peer.keys() & own.keys()]
    if not paired:
        return alone
    peer_computed = min(_computed(peer.values()) for peer in paired)
    fastest = min(paired, key=lambda peer: _ttft(peer.values()))
    ratios = [own[repeat].ttft_mean / fastest[repeat].ttft_mean for repeat in own.keys() & fastest.keys()]
    most = max(peer_computed / 2, MAX_SHARE * fewest) if workload in HALVED else peer_computed
    return Row(
        **vars(alone)
        | {
            "peer_computed": peer_computed,
            "peer_limit": min(peer_computed, most),
            "peer_ttft_ms": 1e3 * _ttft(fastest.values()),
            "ttft_ratio": statistics.median(ratios),
        }
    )


def _computed(runs: Iterable[FamilyRun]) -> float:
    return statistics.median(run.n_computed for run in runs)


def _ttft(runs: Iterable[FamilyRun]) -> float:
    return statistics.median(run.ttft_mean for run in runs)


def _verdict(is_met: bool | None) -> str:
    return "" if is_met is None else "met" if is_met else "missed"


def table(kind: Kind, chosen: Sequence[Row], title: str) -> Table:
    """A line for each workload with one kind of model."""
    result = Table(
        title=f"{kind.name} ({kind.keeps}: {kind.models}): {title}",
        collapse_padding=True,
        caption="prompt tokens computed by llamaslot (own) and the best llama-server (peer), x: of the fewest;\n"
        "limit: own at most, by goal 1 or 2; turn: most beyond a turn's new tokens; ms: mean TTFT, ratio: of pairs",
    )
    for i, name in enumerate(COLUMNS):
        result.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in chosen:
        result.add_row(*row.cells())
    return result
