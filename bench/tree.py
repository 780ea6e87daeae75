"""Time of the radix tree's own operations on a million tokens: lookup, insertion, eviction.

The shape: trunks of 255 nodes on which a leaf hangs behind each node, so that the longest paths have 256 nodes and
8,000 tokens. That is 39 conversations, each of them branched off at every turn:

    trunk    [31 tokens] - [31 tokens] - .. - [31 tokens] - [95 tokens]      a path of 256 nodes
                  |             |                  |
    leaves     [69 ..]       [69 ..]            [69 ..]

Every node branches, as all that does not is joined; and with every leaf that goes, two nodes of a trunk are joined.
"""

from __future__ import annotations

import random
import statistics
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.progress import Progress
from rich.table import Table

from bench.report import Summary, console, machine, notes, write_json
from llamaslot.base.tokens import WIDTH, packed
from llamaslot.kvcache.radix_tree import RadixTree

EVICTED = 1000
GOALS_MS = {"match": 0.3, "insert": 1.0, "evict": 50.0}
_LEAF_TOKENS_FROM = 100_000
"""Token ids below are those of trunks, so that every leaf branches off exactly where it should."""


@dataclass(frozen=True)
class Shape:
    """Shape of the tree to build; every number is met exactly."""

    n_tokens: int = 1_000_000
    n_leaves: int = 10_000
    n_path_nodes: int = 256
    n_path_tokens: int = 8_000
    n_node_tokens: int = 31

    @property
    def n_trunks(self) -> int:
        """Paths of the full length; leaves that are left over hang on their first nodes."""
        return self.n_leaves // self.n_path_nodes


@dataclass(frozen=True)
class Built:
    """A tree, the prompts that it has whole, and who holds a leaf, the least recently used first."""

    tree: RadixTree
    paths: list[bytes]
    order: list[int]


def build(shape: Shape, seed: str = "tree") -> Built:
    """A tree of that shape; the same seed gives the same tree."""
    chance = np.random.default_rng(list(seed.encode()))
    tree = RadixTree()
    paths = []
    for trunk in range(shape.n_trunks):
        tokens = chance.integers(0, _LEAF_TOKENS_FROM, shape.n_path_tokens).astype(np.int32)
        tokens[0] = trunk
        paths.append(packed(tokens))
        _hold(tree, trunk, paths[-1])
    n_hanging = shape.n_leaves - shape.n_trunks
    n_each, n_more = divmod(shape.n_tokens - shape.n_trunks * shape.n_path_tokens, n_hanging)
    for i in range(n_hanging):
        seq = shape.n_trunks + i
        depth, trunk = divmod(i, shape.n_trunks)
        behind = (depth % (shape.n_path_nodes - 1) + 1) * shape.n_node_tokens
        leaf = chance.integers(0, _LEAF_TOKENS_FROM, n_each + (i < n_more)).astype(np.int32)
        leaf[0] = _LEAF_TOKENS_FROM + seq
        _hold(tree, seq, paths[trunk][: behind * WIDTH] + packed(leaf))
    order = list(range(shape.n_leaves))
    random.Random(seed).shuffle(order)
    for now, seq in enumerate(order, start=1):
        node = tree.end_node(seq)
        assert node is not None
        tree.touch(node, now)
    return Built(tree, paths, order)


def _hold(tree: RadixTree, seq: int, tokens: bytes) -> None:
    found = tree.match("", tokens)
    tree.hold(seq, "", found.resident_end, found.n_resident)
    tree.extend(seq, tokens[found.n_resident * WIDTH :])


def run(*, repeats: int, folder: Path) -> None:
    """Measure, print a table, write `tree.json`."""
    facts = machine()
    shape = Shape()
    seconds: dict[str, list[float]] = {name: [] for name in GOALS_MS}
    with Progress(console=notes) as progress:
        task = progress.add_task("building and timing", total=repeats + 1)
        bytes_per_token = memory(shape) / shape.n_tokens
        progress.advance(task)
        for repeat in range(repeats):
            built = build(shape, f"tree {repeat}")
            seconds["match"] += match_times(built)
            seconds["insert"] += insert_times(built, shape)
            seconds["evict"].append(evict_time(built))
            progress.advance(task)
    console.print(table(seconds, bytes_per_token, shape))
    content = {"benchmark": "tree", "settings": asdict(shape) | {"repeats": repeats}, "machine": facts}
    summary = {name: asdict(Summary.of(values)) for name, values in seconds.items()}
    content |= {"summary": summary, "bytes_per_token": bytes_per_token, "runs": seconds}
    write_json(folder / "tree.json", content)


def memory(shape: Shape) -> int:
    """Bytes that a tree of that shape takes, its tokens included."""
    tracemalloc.start()
    built = build(shape)
    built.paths.clear()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert built.tree.n_tokens == shape.n_tokens
    return taken


def match_times(built: Built, n_rounds: int = 3) -> list[float]:
    """Seconds to find each of the prompts, which the tree has whole."""
    times = []
    for path in built.paths * n_rounds:
        times.append(_timed(lambda path=path: built.tree.match("", path)))
        assert built.tree.match("", path).n_resident == len(path) // WIDTH
    return times


def insert_times(built: Built, shape: Shape) -> list[float]:
    """Seconds to find, hold, extend and pin prompts of the same length that leave a trunk in its last node."""
    tree, times = built.tree, []
    behind = ((shape.n_path_nodes - 1) * shape.n_node_tokens - shape.n_node_tokens // 2) * WIDTH
    n_tokens, n_nodes = tree.n_tokens, _n_nodes(tree)
    for seq, path in enumerate(built.paths, start=shape.n_leaves):
        rest = np.arange(_LEAF_TOKENS_FROM + seq, _LEAF_TOKENS_FROM + seq + (len(path) - behind) // WIDTH)
        prompt = path[:behind] + packed(rest)

        def insert(seq: int = seq, prompt: bytes = prompt) -> None:
            _hold(tree, seq, prompt)
            tree.pin(seq)

        times.append(_timed(insert))
        assert (tree.n_tokens, _n_nodes(tree)) == (n_tokens + len(rest), n_nodes + 2)
        tree.release(seq)
        assert (tree.n_tokens, _n_nodes(tree)) == (n_tokens, n_nodes)
    return times


def _n_nodes(tree: RadixTree) -> int:
    return sum(1 for _ in tree.nodes())


def evict_time(built: Built, n: int = EVICTED) -> float:
    """Seconds to evict `n` leaves one after another, each with a plan of its own."""
    tree, total = built.tree, 0.0
    for seq in built.order[:n]:
        node = tree.end_node(seq)
        assert node is not None
        n_cells, n_tokens = node.n_tokens, tree.n_tokens
        total += _timed(lambda n_cells=n_cells: _evict(tree, n_cells))
        assert tree.end_node(seq) is None
        assert tree.n_tokens == n_tokens - n_cells
    return total


def _evict(tree: RadixTree, n_cells: int) -> None:
    # Heirs first, as in the cache itself: a node must not lose its last holder before its heir ends there.
    for seq, keep in sorted(tree.eviction.plan(n_cells).keeps.items(), key=lambda item: item[1] == 0):
        if keep:
            tree.truncate(seq, keep)
        else:
            tree.release(seq)


def table(seconds: dict[str, list[float]], bytes_per_token: float, shape: Shape) -> Table:
    """A line for each measure, in milliseconds."""
    prompt = f"a prompt of {shape.n_path_tokens:,} tokens"
    names = {
        "match": f"find {prompt}",
        "insert": f"insert {prompt}",
        "evict": f"evict {EVICTED:,} leaves in a row, one plan each",
    }
    result = Table(
        title=f"{shape.n_tokens:,} tokens in {shape.n_leaves:,} leaves, paths of {shape.n_path_nodes} nodes",
        caption=f"ms; {bytes_per_token:.1f} bytes a token, 4 of them the token itself",
    )
    result.add_column("what")
    for heading in ("median", "95 of 100", "range", "goal", "times"):
        result.add_column(heading, justify="right")
    for name, values in seconds.items():
        each = Summary.of(values)
        most = statistics.quantiles(values, n=20)[-1] if len(values) >= 20 else each.high
        spread = f"{1000 * each.low:.3f}-{1000 * each.high:.3f}"
        cells = f"{1000 * each.median:.3f}", f"{1000 * most:.3f}", spread, f"< {GOALS_MS[name]:g}"
        result.add_row(names[name], *cells, str(len(values)))
    return result


def _timed(action: Callable[[], object]) -> float:
    started = perf_counter()
    action()
    return perf_counter() - started
