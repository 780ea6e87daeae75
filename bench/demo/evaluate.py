"""Measures the demo model: `python -m bench.demo.evaluate [--model PATH] [--dialogues 500]`.

Runs the GGUF itself, greedily, on held-out dialogues with 0, 500 and 2,000 tokens of chatter between the facts and
the question, on dialogues that end in a request for a tool, in its result or in something that needs none, and on
chatter alone. Prints a table with goals and exits 1 where a goal is missed. A reply is right if it is the expected
text, calls included. Several sequences are decoded side by side; each dialogue has a sequence of its own.
"""

import argparse
import ctypes
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np

from bench.demo.checker import is_grammatical, sentences
from bench.demo.corpus import Dialogue, chatml, chatter, held_out
from bench.demo.tool_talk import held_out_calls, held_out_without_call

DEFAULT_MODEL = Path(__file__).parents[2] / "llamaslot" / "demo" / "demo.gguf"
SEQUENCES, CONTEXT, CHUNK = 8, 4096, 512
LONGEST_REPLY = 224
NOISE_CHUNKS = (512, 64, 17)  # the ways the same tokens are cut to see what that alone changes
NOISE_SAMPLE = 40
FILLERS = (0, 500, 2000)
GOAL_RECALL, GOAL_MARGIN = 0.95, 10.0


@dataclass
class Reply:
    """Answer of the model, and the margin by which each token won."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    text: str = ""
    stopped: bool = False


def top_two(row: np.ndarray) -> tuple[int, int]:
    second, first = np.argpartition(row, -2)[-2:]
    return (int(first), int(second)) if row[first] >= row[second] else (int(second), int(first))


class Runner:
    """The model in a context of several sequences, filled through numpy."""

    def __init__(self, path: Path, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise FileNotFoundError(f"cannot load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = SEQUENCES * CONTEXT, SEQUENCES
        settings.n_batch = settings.n_ubatch = CHUNK
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        self.batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        room = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self.vocabulary, data, len(data), room, len(room), False, True)
        return list(room[:count])

    def text(self, tokens: Iterable[int]) -> str:
        room, data = ctypes.create_string_buffer(64), b""
        for token in tokens:
            count = llama_cpp.llama_token_to_piece(self.vocabulary, token, room, len(room), 0, False)
            data += room.raw[:count]
        return data.decode(errors="replace")

    def ends(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self.vocabulary, token))

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> list[np.ndarray]:
        """Decodes (token, position, sequence, wanted) and returns the rows of the wanted ones."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        status = llama_cpp.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, index), (self.size,)).copy()
            for index, entry in enumerate(entries)
            if entry[3]
        ]

    def prefill(self, tokens: list[int], sequence: int, chunk: int, wanted_from: int) -> list[np.ndarray]:
        """Computes the tokens in chunks of that size and returns the rows from `wanted_from` on."""
        rows: list[np.ndarray] = []
        for start in range(0, len(tokens), chunk):
            rows += self.decode(
                [
                    (token, start + offset, sequence, start + offset >= wanted_from)
                    for offset, token in enumerate(tokens[start : start + chunk])
                ]
            )
        return rows

    def reply_all(self, prompts: list[list[int]]) -> list[Reply]:
        """Greedy replies to at most `SEQUENCES` prompts."""
        llama_cpp.llama_memory_clear(self.memory, True)
        replies = [Reply() for _ in prompts]
        rows = {
            index: self.prefill(prompt, index, CHUNK, len(prompt) - 1)[0] for index, prompt in enumerate(prompts)
        }
        while rows:
            entries = []
            for index, row in rows.items():
                reply, (first, second) = replies[index], top_two(row)
                reply.margins.append(float(row[first] - row[second]))
                reply.stopped = self.ends(first)
                if not reply.stopped and len(reply.tokens) < LONGEST_REPLY:
                    entries.append((first, len(prompts[index]) + len(reply.tokens), index, True))
                    reply.tokens.append(first)
            rows = dict(zip((entry[2] for entry in entries), self.decode(entries), strict=True)) if entries else {}
        for reply in replies:
            reply.text = self.text(reply.tokens)
        return replies

    def noise(self, prompt: list[int], reply: Reply) -> float:
        """The most that cutting the same tokens into other chunks changes a margin of the reply."""
        tokens, runs = prompt + reply.tokens, []
        for chunk in NOISE_CHUNKS:
            llama_cpp.llama_memory_clear(self.memory, True)
            runs.append(np.array(self.prefill(tokens, 0, chunk, len(prompt) - 1)))
        positions, pairs = np.arange(len(runs[0])), np.array([top_two(row) for row in runs[0]])
        margins = [run[positions, pairs[:, 0]] - run[positions, pairs[:, 1]] for run in runs]
        margins.append(np.array(reply.margins))
        return float(np.ptp(margins, axis=0).max())


@dataclass
class Result:
    """The figures of one set of dialogues."""

    name: str
    replies: list[Reply]
    dialogues: list[Dialogue]
    tokens: float
    noise: float
    seconds: float

    def right(self, index: int) -> bool:
        return self.replies[index].text == self.dialogues[index].answer

    @property
    def recall(self) -> float:
        return sum(map(self.right, range(len(self.replies)))) / len(self.replies)

    @property
    def stopped(self) -> float:
        return sum(reply.stopped for reply in self.replies) / len(self.replies)

    @property
    def foreign(self) -> list[str]:
        """Sentences that the grammar does not have."""
        return [
            sentence for reply in self.replies for sentence in sentences(reply.text) if not is_grammatical(sentence)
        ]

    @property
    def margins(self) -> np.ndarray:
        """The margins of every token of the replies that are right."""
        won = [margin for index, reply in enumerate(self.replies) if self.right(index) for margin in reply.margins]
        return np.array(won or [0.0])

    def kinds(self) -> Iterator[tuple[str, float, int]]:
        counts = Counter(dialogue.kind for dialogue in self.dialogues)
        for kind, count in sorted(counts.items()):
            right = sum(self.right(i) for i, dialogue in enumerate(self.dialogues) if dialogue.kind == kind)
            yield kind, right / count, count


def measure(runner: Runner, name: str, dialogues: list[Dialogue]) -> Result:
    began, replies = time.monotonic(), []
    prompts = [runner.tokenize(chatml(dialogue.messages)) for dialogue in dialogues]
    for start in range(0, len(prompts), SEQUENCES):
        replies += runner.reply_all(prompts[start : start + SEQUENCES])
    seconds = time.monotonic() - began
    noise = max(runner.noise(prompts[i], replies[i]) for i in range(min(NOISE_SAMPLE, len(prompts))))
    return Result(name, replies, dialogues, float(np.mean([len(p) for p in prompts])), noise, seconds)


def report(results: list[Result], chat: Result, show: int) -> list[tuple[str, str, bool]]:
    """Prints the figures and returns goals, values and verdicts."""
    print(
        f"{'set':<22}{'n':>5}{'prompt':>8}{'recall':>8}{'stop':>8}{'foreign':>9}"
        f"{'margin':>8}{'1st pct':>9}{'noise':>8}{'s':>6}"
    )
    for result in (*results, chat):
        margins, known = result.margins, result is not chat
        low = (f"{margins.min():.3f}", f"{np.percentile(margins, 1):.2f}") if known else ("-", "-")
        print(
            f"{result.name:<22}{len(result.replies):>5}{result.tokens:>8.0f}"
            f"{f'{result.recall:.1%}' if known else '-':>8}{result.stopped:>8.1%}{len(result.foreign):>9}"
            f"{low[0]:>8}{low[1]:>9}{result.noise:>8.4f}{result.seconds:>6.0f}"
        )
    for result in results:
        print(
            f"{result.name}: "
            + ", ".join(f"{kind} {share:.1%} of {count}" for kind, share, count in result.kinds())
        )
    for result in (*results, chat):
        for sentence in result.foreign[:show]:
            print(f"not in the grammar: {sentence!r}")
    for result in results:
        wrong = [index for index in range(len(result.replies)) if not result.right(index)]
        for index in wrong[:show]:
            print(f"{result.name}: expected {result.dialogues[index].answer!r}, got {result.replies[index].text!r}")
    everything = [*results, chat]
    margin, noise = min(float(result.margins.min()) for result in results), max(result.noise for result in results)
    goals = [(f"right, {result.name}", f"{result.recall:.1%}", result.recall >= GOAL_RECALL) for result in results]
    stopped = min(result.stopped for result in everything)
    foreign = sum(len(result.foreign) for result in everything)
    return [
        *goals,
        ("own stop", f"{stopped:.1%}", stopped == 1.0),
        ("sentences outside the grammar", str(foreign), foreign == 0),
        (
            "smallest margin / noise",
            f"{margin:.3f} / {noise:.4f} = {margin / noise:.1f}x",
            margin >= GOAL_MARGIN * noise,
        ),
    ]


def dialogue_sets(
    n: int, seed: int, count: Callable[[str], int], fillers: Sequence[int] = FILLERS, *, tools: bool = True
) -> Iterator[tuple[str, list[Dialogue]]]:
    """Sets by the names that they have in the model card."""
    for filler in fillers:
        name = f"after {filler:,} tokens" if filler else "fact asked at once"
        yield name, list(held_out(n, seed, filler, count))
    if not tools:
        return
    calls = list(held_out_calls(n * 3 // 5, seed))
    yield "request for a tool", [dialogue.asking() for dialogue in calls]
    yield "result of a tool", [dialogue.answering() for dialogue in calls]
    yield "no tool needed", list(held_out_without_call(max(1, n // 5), seed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--dialogues", type=int, default=500)
    parser.add_argument("--fillers", type=int, nargs="+", default=FILLERS, help="tokens between fact and question")
    parser.add_argument("--without-tools", action="store_true", help="for a model that has not learned them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", type=int, default=3, help="how many mistakes of each set to print")
    arguments = parser.parse_args()
    runner = Runner(arguments.model, arguments.threads)
    sets = dialogue_sets(
        arguments.dialogues,
        arguments.seed,
        lambda text: len(runner.tokenize(text)),
        arguments.fillers,
        tools=not arguments.without_tools,
    )
    results = [measure(runner, name, dialogues) for name, dialogues in sets]
    chat = measure(runner, "chatter", list(chatter(max(1, arguments.dialogues // 5), arguments.seed)))
    goals = report(results, chat, arguments.show)
    for name, value, met in goals:
        print(f"{'pass' if met else 'FAIL'}  {name}: {value}")
    return 0 if all(met for _, _, met in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
