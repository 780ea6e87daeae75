"""Models that attend to later tokens: whole inputs only, however many share a step; without a KV memory too."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from bench import synthetic
from bench.encoders import CLS, SEP, TINY_CONTEXT, TINY_TOKENS, UNK, tiny_bert, tiny_reranker
from llamaslot.backend.llama import LlamaBackend
from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.backend import Run, Status
from llamaslot.base.commands import VectorParams
from llamaslot.base.errors import ConfigError
from llamaslot.base.events import Cancelled, Failed, Finished
from llamaslot.base.files import check_metadata
from llamaslot.base.kv_ops import IllegalCallError, Remove
from llamaslot.base.model import Pooling, RerankFormat, StateKind
from tests.backend.test_models import failing
from tests.backend.test_vectors import loaded, whole_reference
from tests.conftest import new_seed
from tests.engine.harness import running
from tests.gguf_copies import rewritten
from tests.raw_context import RawContext, RawModel

TOLERANCE = 1e-4
"""Of normalized vectors: other texts in a step change the order of additions."""
N_UBATCH = 256


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert") / "bert.gguf")


def texts(chance: random.Random, n: int, most: int = TINY_CONTEXT) -> list[list[int]]:
    """Token ids of texts, with the tokens around them."""
    ids = range(SEP + 2, len(TINY_TOKENS))
    return [[CLS, *chance.choices(ids, k=chance.randint(0, most - 2)), SEP] for _ in range(n)]


def embed(backend: LlamaBackend, inputs: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The raw vectors of inputs that are computed in one step."""
    runs = [Run(seq, 0, np.array(tokens, np.int32), 1) for seq, tokens in enumerate(inputs)]
    decoded = backend.decode(runs)
    assert decoded.status is Status.OK
    assert decoded.sent == {seq: (0, len(tokens)) for seq, tokens in enumerate(inputs)}
    found = [np.frombuffer(backend.vector(seq), "<f4") for seq in range(len(inputs))]
    for seq, tokens in enumerate(inputs):
        assert backend.seq_len(seq) == len(tokens)
        assert backend.seq_range(seq) == range(len(tokens))
        backend.change(Remove(seq, 0))
        assert backend.seq_len(seq) == 0
    return found


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def test_such_a_model_needs_the_flag(bert: Path) -> None:
    for refuse in (lambda: check_metadata(bert), lambda: loaded(bert, embeds=False)):
        with pytest.raises(ConfigError, match=r"is an embedding model \(bert\).*with --embeddings"):
            refuse()
    check_metadata(bert, embeds=True)


@pytest.mark.parametrize("n_ubatch", [64, N_UBATCH])
def test_facts_about_it(bert: Path, n_ubatch: int) -> None:
    backend = loaded(bert, n_ubatch=n_ubatch, n_slots=3)
    info = backend.info
    assert not llama_cpp.llama_get_memory(backend._context)
    assert (info.pooling, info.embeds_whole, info.n_vector, info.rerank) == ("mean", True, 64, None)
    assert (info.n_ctx, info.n_ctx_slot) == (n_ubatch, min(n_ubatch, TINY_CONTEXT))
    assert info.max_prompt == info.n_ctx_slot
    assert (info.can_reuse, info.keeps_checkpoints, info.n_cache_seqs) == (False, False, 0)
    assert info.reuse_reason == "its tokens attend to later ones too"
    assert (info.state.kind, info.state.n_swa, info.state.can_trim) == (StateKind.NONE, 0, False)
    assert info.segment_size is None
    backend.close()


@pytest.mark.parametrize("n_slots", [1, 3, 7])
@pytest.mark.parametrize("pooling", ["none", "mean", "cls", "last"])
def test_vectors_do_not_depend_on_what_else_is_in_the_step(bert: Path, pooling: Pooling, n_slots: int) -> None:
    """For no number of sequences, and though it may not divide the tokens of a step."""
    chance = random.Random(new_seed())
    backend = loaded(bert, pooling, n_slots=n_slots, n_ubatch=N_UBATCH)
    longest = [CLS, *[SEP + 2] * (TINY_CONTEXT - 2), SEP]
    for inputs in ([longest], [[CLS]] * n_slots, texts(chance, n_slots, N_UBATCH // max(n_slots, 2))):
        for tokens, got in zip(inputs, embed(backend, inputs), strict=True):
            rows = whole_reference(bert, "none", tokens)
            expected = {"none": rows, "mean": rows.mean(axis=0), "cls": rows[0], "last": rows[-1]}[pooling]
            assert np.abs(unit(got.reshape(expected.shape)) - unit(expected)).max() < TOLERANCE
    backend.close()


def test_a_part_of_an_input_is_refused(bert: Path) -> None:
    backend = loaded(bert, n_ubatch=64)
    tokens = np.full(65, 9, np.int32)
    for run in (Run(0, 0, tokens[:5], 0), Run(0, 0, tokens, 1), Run(0, 5, tokens[:5], 1)):
        with pytest.raises(IllegalCallError):
            backend.decode([run])
    embed(backend, [[CLS, 9, SEP]])
    backend.close()


@pytest.mark.cpu_only
def test_steps_that_fail_and_sizes_from_one_token_to_a_whole_step(bert: Path) -> None:
    chance = random.Random(new_seed())
    backend = loaded(bert, n_slots=4, n_ubatch=N_UBATCH)
    for n in [1, 2, TINY_CONTEXT - 1, TINY_CONTEXT, *(chance.randint(1, TINY_CONTEXT) for _ in range(8))]:
        tokens = [CLS, *[SEP + 2 + n % 50] * (n - 1)]
        alone = unit(embed(backend, [tokens])[0])
        others = texts(chance, 3, (N_UBATCH - n) // 3) if n < N_UBATCH - 6 else []
        runs = [Run(seq, 0, np.array(each, np.int32), 1) for seq, each in enumerate([tokens, *others])]
        with failing(backend, chance.randint(1, 20)):
            assert backend.decode(runs).status is Status.ABORTED
        assert [backend.seq_len(seq) for seq in range(4)] == [0] * 4
        assert np.abs(unit(embed(backend, [tokens, *others])[0]) - alone).max() < TOLERANCE
    backend.close()


@pytest.mark.cpu_only
async def test_random_texts_failures_and_cancels_end_once_each_with_the_right_vector(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(new_seed())
    n_ubatch = chance.choice((TINY_CONTEXT, N_UBATCH))
    backend = loaded(bert, n_slots=chance.randint(1, 6), n_ubatch=n_ubatch)
    compute = backend._compute

    def fails_sometimes(runs: Sequence[Run], *others: Any, **options: Any) -> Status:
        if chance.random() < 0.9:
            return compute(runs, *others, **options)
        with failing(backend, chance.randint(1, 20)):
            return compute(runs, *others, **options)

    letters = [token[-1] for token in TINY_TOKENS[SEP + 2 : SEP + 20]]
    prompts = {str(i): "".join(chance.choices(letters, k=chance.randint(0, TINY_CONTEXT - 2))) for i in range(60)}
    tokens = {
        name: backend.vocab.tokenize(text, add_special=True, parse_special=True).tolist()
        for name, text in prompts.items()
    }
    async with running(backend, debug_invariants=True) as harness:
        monkeypatch.setattr(backend, "_compute", fails_sometimes)
        ends = {}
        for name, text in prompts.items():
            ends[name] = harness.submit(name, text, max_tokens=0, vector=VectorParams(2))
            if chance.random() < 0.1:
                harness.cancel(name)
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        finished = {name: end for name, future in ends.items() if isinstance(end := await future, Finished)}
        assert len(finished) > len(prompts) / 4
        for name in prompts:
            assert sum(isinstance(each, Finished | Failed | Cancelled) for each in harness.events[name]) == 1
    assert harness.stopped is not None
    assert not harness.stopped.reason
    for name, end in finished.items():
        expected = unit(whole_reference(bert, "none", tokens[name]).mean(axis=0))
        assert np.abs(np.frombuffer(end.vector, "<f4") - expected).max() < TOLERANCE
        assert (end.progress.n_cached, end.progress.n_prompt) == (0, len(tokens[name]))


@pytest.mark.parametrize("head", ["cls.output", "cls cls.output"])
def test_scores(tmp_path: Path, head: str) -> None:
    path = tiny_bert(tmp_path / "ranker.gguf", "rank", head=head)
    backend = loaded(path, n_ubatch=N_UBATCH, n_slots=3)
    info = backend.info
    assert (info.pooling, info.embeds_whole, info.n_vector) == ("rank", True, 2)
    # As in llama-server, which puts no SEP behind the document.
    assert info.rerank == RerankFormat(start=(CLS,), middle=(SEP,))
    inputs = texts(random.Random(5), 3, 60)
    raw = RawModel(path)
    context = RawContext(raw, embeddings=True, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_RANK, n_outputs_max=256)
    for tokens, got in zip(inputs, embed(backend, inputs), strict=True):
        assert context.decode((0, 0, tokens)) == 0
        expected = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings_seq(context._context, 0), (2,))
        assert np.abs(got - expected).max() < TOLERANCE
    context.close()
    raw.close()
    backend.close()


def test_a_separator_stands_between_query_and_document_behind_the_end_of_a_text(tmp_path: Path) -> None:
    """As llama-server makes prompts for Jina's rerankers, whose vocabulary adds BOS, EOS and SEP."""
    path = tiny_reranker(tmp_path / "ranker.gguf", ["whale"], n_positions=64)
    backend = loaded(path, n_ubatch=N_UBATCH)
    bos, eos, sep = 1, 2, backend.info.n_vocab - 1
    assert backend.info.rerank == RerankFormat(start=(bos,), middle=(eos, sep), end=(eos,))
    backend.close()


@pytest.mark.parametrize("head", ["", "cls"])
def test_a_model_without_a_head_for_scores_cannot_rerank(tmp_path: Path, head: str) -> None:
    with pytest.raises(ConfigError, match="no classification head"):
        loaded(tiny_bert(tmp_path / "headless.gguf", "rank", head=head))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_decoder_without_causal_attention_is_computed_whole(tmp_path: Path, pooling: Pooling) -> None:
    source = synthetic.ensure("tiny", folder=tmp_path, is_exact=True)
    path = rewritten(source, tmp_path / "bidirectional.gguf", "llama", values={"attention.causal": False})
    backend = loaded(path, pooling, n_ubatch=N_UBATCH, n_slots=3)
    assert llama_cpp.llama_get_memory(backend._context)
    assert (backend.info.embeds_whole, backend.info.can_reuse) == (True, False)
    chance = random.Random(7)
    inputs = [[chance.randint(300, 500) for _ in range(n)] for n in (80, 1, 40)]
    for tokens, got in zip(inputs, embed(backend, inputs), strict=True):
        rows = whole_reference(path, "none", tokens)
        expected = rows[-1] if pooling == "last" else rows.mean(axis=0)
        assert np.abs(unit(got) - unit(expected)).max() < TOLERANCE
    backend.close()
    with pytest.raises(ConfigError, match=r"has no causal attention.*--embeddings"):
        check_metadata(path)
    check_metadata(path, {"llama.attention.causal": True})
    # By an override a causal one becomes such a model, and the other way round.
    override: Any = (("llama.attention.causal", False),)
    backend = loaded(source, "last", overrides=override)
    assert backend.info.embeds_whole
    backend.close()
    backend = loaded(path, "last", overrides=(("llama.attention.causal", True),))
    assert not backend.info.embeds_whole
    backend.close()


def test_a_decoder_whose_graph_does_not_read_its_cache_is_computed_whole(tmp_path: Path) -> None:
    source = synthetic.ensure("tiny", folder=tmp_path, is_exact=True)
    path = rewritten(source, tmp_path / "llama-embed.gguf", "llama-embed")
    backend = loaded(path, "last", n_ubatch=N_UBATCH, n_slots=3)
    assert llama_cpp.llama_get_memory(backend._context)
    assert backend.info.embeds_whole
    inputs = [[300 + i for i in range(n)] for n in (80, 1, 40)]
    for tokens, got in zip(inputs, embed(backend, inputs), strict=True):
        assert np.abs(unit(got) - unit(whole_reference(path, "none", tokens)[-1])).max() < TOLERANCE
    backend.close()


def test_a_model_of_which_only_llama_cpp_knows_it_is_refused(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaslot.backend.llama.capabilities.attends_later", lambda *_: False)
    with pytest.raises(ConfigError, match="attend to later ones"):
        loaded(bert, "last")


def test_it_is_unloaded_and_loaded_again(bert: Path) -> None:
    backend = loaded(bert, may_unload=True)
    before = embed(backend, [[CLS, 9, 9, SEP]])[0]
    backend.unload()
    backend.reload()
    assert np.array_equal(embed(backend, [[CLS, 9, 9, SEP]])[0], before)
    backend.close()


def test_costs_are_measured(bert: Path) -> None:
    backend = loaded(bert, measure_costs=True)
    assert backend.info.costs_pending
    backend.measure_costs()
    assert (backend.info.kv_cost, backend.info.step_cost, backend.info.state_cost) == (None, None, None)
    embed(backend, [[CLS, 9, SEP]])
    backend.close()


def test_texts_end_with_sep_also_if_they_are_tokenized_in_parts(bert: Path) -> None:
    vocab = LlamaVocab.load(bert)

    def ids(text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return list(vocab.tokenize(text, add_special=add_special, parse_special=parse_special).tolist())

    words = ids("The WHALE is, where?", add_special=False)
    assert [TINY_TOKENS[each] for each in words] == ["▁the", "▁whale", "▁is", "▁,", "▁where", "▁?"]
    assert ids("The whale is, where?") == [CLS, *words, SEP]
    assert ids("") == [CLS, SEP]
    assert ids("\u2603") == [CLS, UNK, SEP]
    long = "the whale [SEP] " * 5_000
    for add_special in (True, False):
        whole = vocab._tokenize(long.encode(), add_special, True).tolist()
        assert ids(long, add_special=add_special) == whole
        assert whole.count(SEP) == 5_000 + add_special
    assert SEP not in ids("[SEP]", add_special=False, parse_special=False)


def aborted(code: str, *args: str | Path) -> bytes:
    """Return the error output of a process that llama.cpp ends."""
    ended = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, check=False, timeout=120
    )
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    return ended.stderr


def test_tokens_of_bytes_are_refused(bert: Path, tmp_path: Path) -> None:
    data = bytearray(bert.read_bytes())
    types = data.index(b"tokenizer.ggml.token_type")
    # After the key: its type, that of an item, the number of items.
    at = types + len(b"tokenizer.ggml.token_type") + 4 + 4 + 8 + 4 * (SEP + 2)
    assert data[at : at + 4] == b"\1\0\0\0"
    data[at] = 6
    path = tmp_path / "bytes.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="has tokens of bytes"):
        check_metadata(path, embeds=True)
    load = "import sys; from pathlib import Path; from llamaslot.backend.llama import loading as l"
    aborted(f"{load}; l.load_vocab(Path(sys.argv[1]))", path)


def test_a_vocabulary_that_adds_a_token_that_it_does_not_have_is_refused(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "llama_vocab_sep", lambda _: -1)
    with pytest.raises(ConfigError, match="adds the token SEP to texts, and has no such token"):
        loaded(bert)


ABORTING = """
import sys
from pathlib import Path
from tests.raw_context import RawContext, RawModel
model = RawModel(Path(sys.argv[1]))
fields = {}
if sys.argv[2] == "sequences":
    fields = {"embeddings": True, "pooling_type": 1, "n_seq_max": 3, "n_outputs_max": 256}
context = RawContext(model, **{"n_ubatch": 64, **fields})
if sys.argv[2] == "tokens":
    context.n_ubatch = 256
    context.decode((0, 0, [9] * 65))
if sys.argv[2] == "positions":
    context.decode((0, 128, [9]))
"""


@pytest.mark.parametrize("what", ["sequences", "tokens", "positions"])
def test_llama_cpp_aborts(bert: Path, what: str) -> None:
    """If it does not any more, less need be refused (fact 40)."""
    assert aborted(ABORTING, bert, what)
