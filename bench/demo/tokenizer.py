"""The demo model's tokenizer: byte-level BPE as GPT-2 has it, trained on the generated corpus.

Digits never merge, so a number is copied digit by digit. `TalkEncoder` turns marked conversations into token ids
and loss weights; its ids equal those of the whole text, because marks lie where the pre-tokenizer cuts anyway.
"""

import random
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.demo.corpus import IM_END, IM_START, training_talk
from bench.demo.writer import MARK_CLOSE, MARK_OPEN, RAW_TEXT, Message, plain

END_OF_TEXT = "<|endoftext|>"
SPECIALS = (END_OF_TEXT, IM_START, IM_END)
WEIGHT_CONTEXT, WEIGHT_REPLY, WEIGHT_VALUE = 0.1, 1.0, 4.0


def train_tokenizer(seed: int, size: int, talks: int = 4000) -> Tokenizer:
    """Byte-level BPE of exactly `size` tokens, specials first."""
    rng = random.Random(f"tokenizer {seed}")
    texts = (
        re.sub(r"[0-9]+", "", "\n".join(f"{m['role']}\n{plain(m['content'])}" for m in talk))
        for talk in (training_talk(rng, 1500, far=index % 2 == 0) for index in range(talks))
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {size}")
    return tokenizer


def load_or_train(path: Path, seed: int, size: int) -> Tokenizer:
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
        if tokenizer.get_vocab_size() != size:
            raise ValueError(f"{path} has {tokenizer.get_vocab_size()} tokens, not {size}")
        return tokenizer
    tokenizer = train_tokenizer(seed, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


class TalkEncoder:
    """Marked conversations to token ids and the weight of each token as a target."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.start, self.end = tokenizer.token_to_id(IM_START), tokenizer.token_to_id(IM_END)

    def _segments(self, messages: list[Message]) -> list[tuple[str, float]]:
        """Text runs with their weights; a special token is a run of its own."""
        runs: list[tuple[str, float]] = []
        for message in messages:
            if message["role"] == RAW_TEXT:
                runs += [(message["content"], WEIGHT_REPLY), (IM_END, WEIGHT_REPLY)]
                continue
            reply = message["role"] == "assistant"
            runs += [(IM_START, WEIGHT_CONTEXT), (f"{message['role']}\n", WEIGHT_CONTEXT)]
            for index, run in enumerate(re.split(f"[{MARK_OPEN}{MARK_CLOSE}]", message["content"])):
                weight = WEIGHT_CONTEXT if not reply else WEIGHT_VALUE if index % 2 else WEIGHT_REPLY
                runs.append((run, weight))
            runs += [(IM_END, WEIGHT_REPLY if reply else WEIGHT_CONTEXT), ("\n", WEIGHT_CONTEXT)]
        return [run for run in runs if run[0]]

    def encode(self, talks: list[list[Message]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids and weights of every conversation."""
        segments = [self._segments(talk) for talk in talks]
        encoded = iter(self.tokenizer.encode_batch_fast([run for talk in segments for run, _ in talk]))
        result = []
        for talk in segments:
            ids: list[int] = []
            weights: list[float] = []
            for _, weight in talk:
                run_ids = next(encoded).ids
                ids += run_ids
                weights += [weight] * len(run_ids)
            result.append((np.array(ids, np.int64), np.array(weights, np.float32)))
        return result
