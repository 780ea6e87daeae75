"""The engine alone, without HTTP or a client: `python -m bench.engine --streams N --tokens N --prompt-tokens N`.

Prints the decode rate of that many greedy streams side by side, in tokens per second. It takes the flags of
`llamaslot serve` too; the difference to serving with the same flags is the cost of HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from time import perf_counter

import numpy as np
import uvloop

from bench.client import BenchmarkError
from bench.report import decode_rate, notes
from llamaslot.app.config import Config
from llamaslot.app.config_reader import add_flags, read_config
from llamaslot.app.logs import configure_logging
from llamaslot.app.model_files import resolve_model
from llamaslot.app.runtime.engine_host import llama_settings
from llamaslot.backend.llama import LlamaBackend
from llamaslot.base.commands import Generate, GenerateParams
from llamaslot.base.errors import ConfigError
from llamaslot.base.events import Cancelled, Event, Failed, Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.tokens import TokenizedPrompt, packed
from llamaslot.engine.engine import Engine
from llamaslot.engine.model_worker import StepWatch, model_thread
from llamaslot.kvcache.cache_settings import Budgets

_TRIES = 10
"""Most tries to measure costs, which another program may disturb."""


async def measure(config: Config, *, streams: int, tokens: int, prompt_tokens: int) -> float:
    """Tokens per second of all streams together, while all of them decode; raises `BenchmarkError`."""
    thread = model_thread()
    model = llama_settings(config, resolve_model(config.model))
    loop = asyncio.get_running_loop()
    backend = await loop.run_in_executor(thread, LlamaBackend, model, lambda _share: True)
    for _ in range(_TRIES):
        if await loop.run_in_executor(thread, backend.measure_costs):
            break
        await asyncio.sleep(1.0)
    else:
        raise BenchmarkError(f"costs could not be measured: {backend.info.costs_pending}")
    arrivals: dict[str, list[float]] = {str(i): [] for i in range(streams)}
    ended: asyncio.Queue[Event] = asyncio.Queue()

    def receive(events: list[Event]) -> None:
        now = perf_counter()
        for event in events:
            if isinstance(event, Output | Finished):
                arrivals[event.completion_id] += [now] * len(event.tokens)
            if isinstance(event, Finished | Failed | Cancelled):
                ended.put_nowait(event)

    engine = Engine(backend, receive, Budgets(), gap_ms=config.prefill_gap_ms, thread=thread, watch=StepWatch(0))
    running = asyncio.create_task(engine.run())
    random = np.random.default_rng()
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    for name in arrivals:
        prompt = TokenizedPrompt(packed(random.integers(0, backend.info.n_vocab, prompt_tokens)))
        engine.send(Generate(GenerateParams(name, sampling=sampling, max_tokens=tokens), prompt))
    ends = [await ended.get() for _ in arrivals]
    engine.stop()
    await running
    backend.close()
    for end in ends:
        if not isinstance(end, Finished) or len(arrivals[end.completion_id]) != tokens:
            raise BenchmarkError(f"a stream did not bring its {tokens} tokens: {end}")
    return decode_rate(list(arrivals.values()))


def main(arguments: list[str]) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    for flag in ("--streams", "--tokens", "--prompt-tokens"):
        parser.add_argument(flag, type=int, required=True, metavar="N")
    add_flags(parser)
    options = parser.parse_args(arguments)
    counts = {"streams": options.streams, "tokens": options.tokens, "prompt_tokens": options.prompt_tokens}
    try:
        config = read_config(options, os.environ)
        configure_logging(config.log_format, config.log_level)
        print(uvloop.run(measure(config, **counts)))
    except (BenchmarkError, ConfigError) as error:
        notes.print(f"bench.engine: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
