"""The engine alone, without HTTP or a client: `python -m bench.engine --streams N --tokens N [flags]`.

Prints the decode rate of that many greedy streams side by side, in tokens per second. It takes the flags of
`llamaslot serve` too; what HTTP costs is the difference to serving with the same flags.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from time import perf_counter

import numpy as np

from bench.report import decode_rate
from llamaslot.app.config import Config, add_flags, read_config
from llamaslot.app.models import resolve_model
from llamaslot.app.server import llama_settings
from llamaslot.backend.llama import LlamaBackend
from llamaslot.base.messages import TERMINAL, Event, Output, Sampling, Submit, TokensPart
from llamaslot.engine.engine import Engine
from llamaslot.engine.worker import model_thread

PROMPT_TOKENS = 16


async def measure(streams: int, tokens: int, config: Config) -> float:
    """Tokens per second of all streams together, while all of them decode."""
    thread = model_thread()
    settings = llama_settings(config, resolve_model(config.model))
    backend = await asyncio.get_running_loop().run_in_executor(thread, LlamaBackend, settings, lambda _share: True)
    arrivals: dict[str, list[float]] = {str(i): [] for i in range(streams)}
    ended = asyncio.Semaphore(0)

    def receive(events: list[Event]) -> None:
        now = perf_counter()
        for event in events:
            if isinstance(event, Output):
                arrivals[event.request_id] += [now] * len(event.tokens)
            elif isinstance(event, TERMINAL):
                ended.release()

    engine = Engine(backend, receive, thread=thread)
    running = asyncio.create_task(engine.run())
    random = np.random.default_rng()
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    for name in arrivals:
        prompt = tuple(random.integers(0, backend.info.n_vocab, PROMPT_TOKENS).tolist())
        engine.send(Submit(name, (TokensPart(prompt),), sampling=sampling, max_tokens=tokens))
    for _ in arrivals:
        await ended.acquire()
    engine.stop()
    await running
    backend.close()
    return decode_rate(list(arrivals.values()))


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    add_flags(parser)
    options = parser.parse_args(arguments)
    print(asyncio.run(measure(options.streams, options.tokens, read_config(options, {}))))


if __name__ == "__main__":
    main(sys.argv[1:])
