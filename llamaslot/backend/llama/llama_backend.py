"""`Backend` on a llama.cpp context. Every call is first checked against the backend's own record."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import llama_cpp
import msgspec
import numpy as np
import structlog

from llamaslot.backend import page_locked
from llamaslot.backend.constraints import Compiled, ConstraintCompiler
from llamaslot.backend.host import host_cpus, host_memory, trim_heap
from llamaslot.backend.llama import (
    capabilities,
    costs,
    first_steps,
    library,
    loading,
    model_info,
    self_test,
    sizing,
)
from llamaslot.backend.llama.batch import Batch
from llamaslot.backend.llama.costs import DisturbedError, Measurements, Quiet, StoppedError
from llamaslot.backend.llama.loading import Context, LlamaSettings, LoadingStopped, sequences
from llamaslot.backend.llama.operations import KvOperations
from llamaslot.backend.llama.positions import TileSpan
from llamaslot.backend.llama.sampling.candidates import Logits, score_of
from llamaslot.backend.llama.sampling.device_sampler import ChainSpec, DeviceChains, DeviceSampler
from llamaslot.backend.llama.sampling.host_sampler import HostSampler
from llamaslot.backend.llama.sampling.penalties import BreakerIndex
from llamaslot.backend.llama.threads import StepThreads
from llamaslot.backend.llama.vocab import ConstraintTokenizer, LlamaVocab
from llamaslot.base import kv_ops
from llamaslot.base.adapters import Adapters
from llamaslot.base.backend import (
    CompiledConstraint,
    Decoded,
    Draws,
    Run,
    Status,
    accepted,
    check_adapters,
    check_runs,
)
from llamaslot.base.commands import Constraint
from llamaslot.base.errors import ConfigError, NotSupportedError
from llamaslot.base.files import parts
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.token_probs import TokenScore
from llamaslot.base.images import ImageLayout, ImageSize, Tile
from llamaslot.base.model import CPU, NOT_YET, QUERY_BLOCK, ModelFile, ModelInfo, ProjectorInfo
from llamaslot.base.stats import BackendStats
from llamaslot.base.tokens import Tokens

if TYPE_CHECKING:
    from llamaslot.backend.llama.projector import EncodedTile, Projector

_log = structlog.get_logger(__name__)

_MAX_VIEWS = 1024
"""Most arrays over rows of logits that are kept: more addresses than llama.cpp uses at any time."""


class LlamaBackend:
    """A loaded model with its context."""

    _context: Any
    _memory: Any
    _applied: Adapters = ()
    """Adapters that the context has."""
    _has_vectors = False
    """True if the outputs of the last decode are vectors."""
    _projector: Projector | None = None
    _n_tiles_encoded = 0

    def __init__(self, settings: LlamaSettings, on_progress: Callable[[float], bool] = lambda _share: True) -> None:
        library.initialise()
        self._closed = self._is_unloaded = False
        self._settings = settings
        self._n_threads = settings.n_threads or host_cpus().n_threads
        # On a GPU few threads have something to do, and reading the CPU times would only delay its steps.
        is_on_cpu = library.device_used(loading.gpus(settings)) == CPU
        chooses = is_on_cpu and not (settings.n_threads or settings.n_threads_batch)
        self._threads = StepThreads(self._n_threads) if chooses else None
        self._rows: dict[int, tuple[int, list[int]]] = {}
        """First batch row to sample from, and the drafted tokens, by sequence."""
        self._targets: dict[int, tuple[int, Tokens]] = {}
        """First batch row and tokens to be scored, by sequence."""
        self._views: dict[int, Logits] = {}
        """Arrays over rows of logits by address, kept because llama.cpp uses the same few addresses again."""
        self._costs: dict[str, Any] = {}
        """Those measured so far while others are pending, by the names of `Measurements`' fields."""
        self._measured = Measurements(has_costs=False)
        """All that is known, by measurements or from an earlier start."""
        self._is_slow: bool | None = None
        """True if the model is too slow to be measured; None until that is known."""
        # `ModelInfo.kv_files`, in the version that is loaded next.
        kv_files = model_info.kv_files(settings)
        self._model, n_mapped = loading.load_model(settings, on_progress)
        try:
            self.info = self._load_rest(kv_files, n_mapped)
        except ConfigError:
            self._free_model()
            raise
        library.expect_gaps(has_mrope=self.info.state.has_mrope)
        self._batch = Batch(self.info.n_ubatch)
        self._kv = KvOperations(self._context, self.info, self.n_seqs)
        self._breakers = BreakerIndex(self.vocab)
        self._constraints = _constraint_compiler(self.vocab)
        try:
            self._warm_up()
            measured = self._measurements()
        except ConfigError:
            self.close()
            raise
        self._set_measured(measured)
        if settings.may_partition and self._can_partition():
            part = loading.part_cells(self._model, self._context, self._settings)
            self.info = msgspec.structs.replace(self.info, part_cells=part)
        trim_heap()

    def _load_rest(self, kv_files: tuple[ModelFile, ...], n_mapped: int) -> ModelInfo:
        """Load what belongs to the model, make the first context, and return the facts about them.

        `n_mapped` bytes of the weights are mapped from the file. Raises `ConfigError`.
        """
        model = self._model
        # Before the pool, which gets what memory they leave.
        self._adapters, adapters = loading.load_adapters(model, self._settings)
        projector = self._first_projector()
        settings = self._settings = loading.for_vectors(model, self._settings)
        n_cache_seqs, n_seqs = self._sequences()
        # Other threads may use the vocabulary while the model is unloaded.
        self.vocab = (
            LlamaVocab.load(settings.model, settings.overrides)
            if settings.may_unload
            else LlamaVocab(model, settings.overrides)
        )
        n_ctx, n_rollback, sizing_line = sizing.choose(model, settings, n_seqs, n_mapped)
        settings = self._settings = replace(settings, n_rollback=n_rollback)
        made = loading.make_context(model, settings, n_ctx=n_ctx, n_seqs=n_seqs, n_threads=self._n_threads)
        self._chains = DeviceChains(self.vocab.n_tokens, partial(sizing.free_bytes, settings))
        self._use(made)
        return model_info.describe(
            model,
            made,
            self.vocab,
            settings,
            n_cache_seqs=n_cache_seqs,
            sizing=sizing_line,
            kv_files=kv_files,
            adapters=adapters,
            projector=projector,
        )

    def change(self, operation: kv_ops.Operation) -> None:
        """Check and execute a KV operation."""
        if not isinstance(operation, kv_ops.Free):
            self._check_open()
        self._kv.change(operation)

    def kv_of(self, segment: int) -> kv_ops.Kv | None:
        """Return the bytes of a segment or checkpoint in host memory; None if it is not there."""
        kv = self._kv.segments.get(segment)
        return kv if kv is not None else self._kv.partial.states.get(segment)

    def put(self, segment: int, start: int, end: int, kv: kv_ops.Kv) -> None:
        """Add a segment or checkpoint that was read from disk, a file or the remote tier."""
        checkpoint, size = self.info.checkpoint_size, self.info.segment_size
        if start == end and (checkpoint is None or len(kv) not in checkpoint.all_of(end)):
            raise ValueError(f"a checkpoint after {end} tokens does not have {len(kv)} bytes")
        if start != end and (size is None or len(kv) != size.of(end - start)):
            raise ValueError(f"a segment of {end - start} tokens does not have {len(kv)} bytes")
        self._kv.put(segment, range(start, end), kv)

    def end_changes(self) -> None:
        """Free what was kept to speed up further operations on the same sequences."""
        self._kv.transfer.end_changes()

    def seq_len(self, seq: int) -> int:
        """Return the number of tokens in a sequence. Asks llama.cpp, and corrects the backend's own record."""
        self._check_seq(seq)
        if self._kv.states.has_states or not self._memory:
            # llama.cpp reports the position of the partial state, which the sequence may have lost; without a
            # memory it knows of no sequence.
            return self._kv.lengths[seq]
        end = llama_cpp.llama_memory_seq_pos_max(self._memory, seq) + 1
        self._kv.set_length(seq, self._kv.positions.n_tokens(seq, end))
        return self._kv.lengths[seq]

    def seq_range(self, seq: int) -> range:
        """Return the tokens that a sequence holds, from the first to the last."""
        self._check_seq(seq)
        if not self._kv.states.is_live(seq) or not self._memory:
            return range(self._kv.lengths[seq])
        end = self._kv.positions.n_tokens(seq, llama_cpp.llama_memory_seq_pos_max(self._memory, seq) + 1)
        # With windows and recurrent states, llama.cpp's lowest position is not that of the KV of every token.
        start = llama_cpp.llama_memory_seq_pos_min(self._memory, seq) if self.info.can_trim else 0
        return range(start, end) if end else range(0)

    def use_adapters(self, adapters: Adapters) -> None:
        """Have the next batches computed with these adapters; a change takes time (fact 42)."""
        self._check_open()
        check_adapters(adapters, self.info)
        if adapters == self._applied:
            return
        n = len(adapters)
        handles = (llama_cpp.llama_adapter_lora_p_ctypes * n)(*(self._adapters[each.id] for each in adapters))
        scales = (ctypes.c_float * n)(*(each.scale for each in adapters))
        llama_cpp.llama_set_adapters_lora(self._context, handles, n, scales)
        self._applied = adapters

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        """Compute a batch, and on the device as many of the `draws` as can be."""
        self._check_open()
        check_runs(runs, length_of=self._kv.length, info=self.info, states=self._kv.states)
        self._kv.transfer.end_changes()
        status, sent = Status.OK, {run.seq: (run.start, 0) for run in runs}
        encoded = None
        if runs[0].tile is not None:
            encoded = self._encode(runs[0].tile)
            if encoded is None:
                return Decoded(Status.INVALID, sent)
        self._chains.prepare(runs, draws)
        batches = self._batches(runs)
        for i, batch in enumerate(batches, start=1):
            status = self._compute(batch, encoded, embeds=self._has_vectors and i == len(batches))
            for seq, (first, n) in self._batch.sent().items():
                n_before = sent[seq][1]
                sent[seq] = first - n_before, n_before + n
            if status is not Status.OK:
                break
        if status in (Status.ABORTED, Status.FATAL):
            for run in reversed(runs):
                self._kv.set_length(run.seq, run.start)
            self._kv.failed(runs)
        return Decoded(status, sent)

    def _batches(self, runs: Sequence[Run]) -> Sequence[Sequence[Run]]:
        """Return the batches of a step: one, two if its vectors need that, or several parts of a long tile.

        With embeddings on, every token has an output and gets logits too, and llama.cpp aborts if there may not be
        so many (facts 4 and 40). So of a large step most tokens are computed before that. The others are those with
        vectors, and what makes them a query block: fewer are rounded unlike those of a single batch (fact 9).
        """
        if runs[0].tile is not None:
            (run,) = runs
            ends = range(self.info.n_ubatch, len(run.tokens), self.info.n_ubatch)
            starts, n_outputs = (0, *ends), (*(0 for _ in ends), run.n_outputs)
            return [
                [replace(run, start=run.start + start, tokens=run.tokens[start:end], n_outputs=n)]
                for start, end, n in zip(starts, (*ends, len(run.tokens)), n_outputs, strict=True)
            ]
        wants_vectors = bool(self.info.pooling) and any(run.n_outputs for run in runs)
        self._has_vectors = wants_vectors and all(run.targets is None for run in runs)
        n_rows = self.n_seqs + self.info.n_spare_rows
        if not self._has_vectors or sum(len(run.tokens) for run in runs) <= n_rows:
            return [runs]
        n_last: dict[int, int] = {}
        n_left = min(QUERY_BLOCK, self.info.n_spare_rows)
        ordered = sorted(runs, key=lambda run: (not run.n_outputs, len(run.tokens)))
        for i, run in enumerate(ordered, start=1):
            n_vectors = sum(each.n_outputs for each in ordered[i:])
            n_last[run.seq] = min(max(-(-n_left // (1 + n_vectors)), run.n_outputs), len(run.tokens))
            n_left = max(n_left - n_last[run.seq], 0)
        before, last = [], []
        for run in runs:
            n = len(run.tokens) - n_last[run.seq]
            if n:
                before.append(replace(run, tokens=run.tokens[:n], n_outputs=0))
            if n_last[run.seq]:
                last.append(replace(run, start=run.start + n, tokens=run.tokens[n:]))
        return [before, last]

    def image_layout(self, size: ImageSize) -> ImageLayout:
        """Return the tokens of an image of a size."""
        if self._projector is None:
            raise NotSupportedError("this server takes no images: start it with --mmproj")
        return self._projector.layout(size)

    def _encode(self, tile: Tile) -> EncodedTile | None:
        """Return what is computed in place of a tile's tokens; None if that fails."""
        assert self._projector is not None
        encoded = self._projector.encode(tile)
        self._n_tiles_encoded += encoded is not None
        return encoded

    def _compute(self, runs: Sequence[Run], encoded: EncodedTile | None = None, *, embeds: bool = False) -> Status:
        """Compute one batch; with `embeds` each of its sequences gets a vector. A failure is left to the caller.

        `encoded` is the tile of which the only run is a part.
        """
        starts, part, span = self._begin(runs, encoded)
        is_acausal = part is not None and not part.is_causal
        self._rows, self._targets = self._batch.fill(runs, starts, has_outputs=embeds, tile=part)
        if self.info.pooling:
            llama_cpp.llama_set_embeddings(self._context, embeds)
        if self._threads is not None:
            n_threads = self._threads.choose(sum(len(run.tokens) for run in runs))
            llama_cpp.llama_set_n_threads(self._context, n_threads, n_threads)
        try:
            if is_acausal:
                llama_cpp.llama_set_causal_attn(self._context, False)
            code = llama_cpp.llama_decode(self._context, self._batch.struct)
        finally:
            if is_acausal:
                llama_cpp.llama_set_causal_attn(self._context, True)
        if self._threads is not None:
            self._threads.ended_at = perf_counter()
        if code == 0:
            for run in runs:
                self._kv.lengths[run.seq] += len(run.tokens)
            if span is not None:
                self._kv.positions.append(runs[0].seq, [span])
            self._kv.states.decoded(run.seq for run in runs)
        return _status(code)

    def _begin(
        self, runs: Sequence[Run], encoded: EncodedTile | None
    ) -> tuple[list[int], EncodedTile | None, TileSpan | None]:
        """Return the positions of a batch's runs, its part of the tile, and with M-RoPE the span of that part."""
        of, run = self._kv.positions.of, runs[0]
        starts = [of(each.seq, each.start) for each in runs]
        if encoded is None or run.tile is None:
            return starts, None, None
        first, n = run.start - run.tile.start, len(run.tokens)
        part = encoded.part(first, first + n)
        if part.places is None:
            return starts, part, None
        start = of(run.seq, run.tile.start)
        return [start], part, TileSpan(run.start, run.start + n, start, part.n_positions)

    @property
    def stats(self) -> BackendStats:
        """Statistics as of now."""
        return BackendStats(
            n_tiles_encoded=self._n_tiles_encoded,
            n_device_sampled=self._chains.n_sampled,
            n_sampler_changes=self._chains.n_set,
            n_step_threads=self._n_threads if self._threads is None else self._threads.n_small,
            page_locked_bytes=page_locked.n_bytes(),
        )

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Compile a constraint for this vocabulary."""
        return self._constraints.compile(constraint)

    def new_sampler(
        self, sampling: Sampling, history: Tokens, constraint: CompiledConstraint | None = None
    ) -> HostSampler | DeviceSampler:
        """Create a sampler whose penalties take the tokens of `history` into account, but not those of images."""
        if not isinstance(constraint, Compiled | None):
            raise kv_ops.IllegalCallError("a foreign constraint")
        if self._projector is not None:
            history = history[history >= 0]
        if self.info.samples_on_device and constraint is None:
            return self._device_sampler(sampling, history) or self._host_sampler(sampling, history)
        return self._host_sampler(sampling, history, constraint)

    def _device_sampler(self, sampling: Sampling, history: Tokens) -> DeviceSampler | None:
        """Create a sampler for the device; None if the device cannot sample so."""
        n_ctx, n_vocab = self.info.n_ctx_slot, self.vocab.n_tokens
        spec = ChainSpec.of(sampling, n_ctx=n_ctx, n_vocab=n_vocab, eog=self.vocab.eog)
        if spec is None:
            return None
        return DeviceSampler(spec, history=history, n_vocab=n_vocab, seed=sampling.seed)

    def _host_sampler(self, sampling: Sampling, history: Tokens, constraint: Compiled | None = None) -> HostSampler:
        return HostSampler(
            sampling,
            history=history,
            n_ctx=self.info.n_ctx_slot,
            n_vocab=self.vocab.n_tokens,
            eog=self.vocab.eog,
            breakers=self._breakers,
            matcher=constraint.matcher() if constraint is not None else None,
        )

    def sample(self, draws: Draws) -> list[tuple[int, ...]]:
        """Sample for each sequence id and its sampler: drafted tokens as far as it chooses them, and one more."""
        sampled: list[tuple[int, ...]] = []
        for seq, sampler in draws:
            if not isinstance(sampler, HostSampler | DeviceSampler) or seq not in self._rows:
                raise kv_ops.IllegalCallError(f"sequence {seq} has no logits or a foreign sampler")
            first, draft = self._rows[seq]
            if isinstance(sampler, DeviceSampler) and seq in self._chains.on_device:
                sampled.append((self._chains.token(first, sampler),))
                continue
            sampler.scores.clear()
            choose = partial(self._choose, sampler, first)
            sampled.append(accepted(draft, self.vocab.eog, choose, sampler.force))
        return sampled

    def _choose(self, sampler: HostSampler | DeviceSampler, first: int, row: int) -> int:
        return sampler.choose(self._logits(first + row))

    def score(self, seq: int, n_top: int) -> list[TokenScore]:
        """Return the log-probabilities of a sequence's targets in the last `decode`."""
        if seq not in self._targets:
            raise kv_ops.IllegalCallError(f"sequence {seq} has nothing to score")
        first, targets = self._targets[seq]
        return [score_of(token, self._logits(first + i), n_top) for i, token in enumerate(targets.tolist())]

    def vector(self, seq: int) -> bytes:
        """Return the vector of a sequence after the last `decode`, or its scores."""
        if seq not in self._rows or not self._has_vectors:
            raise kv_ops.IllegalCallError(f"sequence {seq} has no vector")
        if self.info.pooling == "none":
            # Inputs are computed whole, so these rows are those of all tokens of the sequence.
            end = self._rows[seq][0] + 1
            rows = range(end - self._kv.lengths[seq], end)
            pointers = [llama_cpp.llama_get_embeddings_ith(self._context, row) for row in rows]
        else:
            pointers = [llama_cpp.llama_get_embeddings_seq(self._context, seq)]
        if not all(pointers):
            raise kv_ops.IllegalCallError(f"llama.cpp has no vector for sequence {seq}")
        size = (self.info.n_vector,)
        return b"".join(np.ctypeslib.as_array(each, size).astype("<f4").tobytes() for each in pointers)

    def run_self_test(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Run the self-test of reuse if it is pending; returns False if `should_stop` ended it without a result."""
        self._check_open()
        if self.info.self_test != "pending":
            return True
        held = self._kv.set_aside()
        self.use_adapters(())
        result = self_test.run(self, self._context, limit_s=None, should_stop=should_stop)
        self._rows, self._targets = {}, {}
        if not self._kv.put_back(held):
            reason = "self-test failed: not enough memory to restore the sequences after it"
            result = self_test.SelfTestResult("failed", reason, is_lasting=False)
        if result.outcome == "pending":
            return False
        measured = msgspec.structs.replace(self._measured, self_test=result)
        self._keep(measured)
        self._set_measured(measured, is_later=True)
        trim_heap()
        return True

    def measure_costs(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Measure costs that are pending; returns False if they still are."""
        self._check_open()
        if not self.info.costs_pending:
            return True
        if any(self._kv.lengths):
            raise kv_ops.IllegalCallError("costs are measured on empty sequences")
        folder = self._settings.measurements
        # Another server may have measured meanwhile.
        kept = costs.read_kept(folder, self._key()) if folder else None
        if kept is not None and kept.has_costs:
            self._set_costs(kept)
            self.info = msgspec.structs.replace(self.info, costs_pending="")
            return True
        self.use_adapters(())
        measured = self._measure(should_stop)
        self._rows, self._targets = {}, {}
        if measured is not None:
            self._set_costs(measured)
            if self.info.self_test not in ("failed", "off"):
                # Without reuse little is measured, so the result is not kept for a later start that may allow
                # reuse.
                self._keep(self._measured)
            trim_heap()
        return measured is not None

    def set_layout(self, *, unified: bool) -> None:
        """Create the context again in another layout, if `info.part_cells` allows it. Segments are kept."""
        self._check_open()
        if not self.info.part_cells or any(self._kv.lengths):
            raise kv_ops.IllegalCallError("the layout of this pool is fixed, or a sequence holds something")
        was_unified = self.info.unified
        self._free_context()
        try:
            self._remake(unified=unified)
        except ConfigError as error:
            self._remake(unified=was_unified)
            raise MemoryError(str(error)) from error

    def clear(self) -> None:
        """Clear the data of all cells; no sequence may hold any."""
        self._check_open()
        if any(self._kv.lengths):
            raise kv_ops.IllegalCallError("a sequence holds something")
        self._clear()

    def unload(self) -> None:
        """Free context and model until `reload`; vocabulary, segments and checkpoints are kept."""
        self._check_open()
        if not self._settings.may_unload or any(self._kv.lengths):
            raise kv_ops.IllegalCallError("this model stays loaded, or a sequence holds something")
        self._is_unloaded = True
        self._free_context()
        self._free_model()
        trim_heap()

    def reload(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Load the model again after `unload`; it is still unloaded after an error."""
        if self._closed or not self._is_unloaded:
            raise kv_ops.IllegalCallError("the model is not unloaded")
        settings = self._settings
        try:
            self._model, _ = loading.load_model(settings, lambda _: not should_stop())
        except LoadingStopped:
            raise ConfigError("loading the model was stopped") from None
        try:
            # After it was read: it may have been changed until then. The library stays as it was loaded first.
            n = len(parts(settings.model))
            if model_info.kv_files(settings)[:n] != self.info.kv_files[:n]:
                raise RuntimeError(f"{settings.model} was changed since it was loaded first")
            self._adapters, adapters = loading.load_adapters(self._model, settings)
            if adapters != self.info.adapters:
                raise RuntimeError("a file of --lora was changed since it was loaded first")
            if self._load_projector() != self.info.projector:
                raise RuntimeError("the file of --mmproj was changed since it was loaded first")
            self._remake(unified=self.info.unified)
            self._is_unloaded = False
            self._compute_once()
            self._clear()
        except (ConfigError, RuntimeError):
            self._is_unloaded = True
            self._free_context()
            self._free_model()
            raise

    def close(self) -> None:
        """Free context and model. May be called again."""
        if not self._closed:
            self._closed = True
            self._constraints.close()
            self._free_context()
            self._free_model()

    def _free_context(self) -> None:
        llama_cpp.llama_free(self._context)
        self._chains.clear()
        # If no other one can be created, `close` must not free this one again. The arrays point to its logits.
        self._context = self._memory = None
        self._rows, self._targets, self._views = {}, {}, {}

    def _first_projector(self) -> ProjectorInfo | None:
        """Load the projector as `_load_projector`; if it is optional and cannot be used, do without it for good."""
        try:
            return self._load_projector()
        except ConfigError as error:
            if not self._settings.mmproj_is_optional:
                raise
            reason = error.message.removeprefix("--mmproj: ")
            _log.warning(
                "projector.not_used",
                reason=reason,
                advice="images are refused; with --no-mmproj none is looked for",
            )
            self._settings = replace(self._settings, mmproj=None)
            return None

    def _load_projector(self) -> ProjectorInfo | None:
        """Load the projector of the settings, if any, and return facts about it; raises `ConfigError`."""
        if self._settings.mmproj is None:
            return None
        from llamaslot.backend.llama import projector  # noqa: PLC0415 - its libraries cost time and memory

        self._projector = projector.load(self._model, self._settings, self._n_threads)
        return self._projector.info

    def _free_model(self) -> None:
        if self._projector is not None:
            self._projector.close()
        llama_cpp.llama_model_free(self._model)
        self._model = None

    def _sequences(self) -> tuple[int, int]:
        """Return the numbers of spare and of all sequences in the layout in which the pool is made first."""
        return sequences(
            self._settings,
            reusable=not (capabilities.why_not_reusable(self._model) or self._settings.why_whole),
            has_states=capabilities.has_partial_state(self._model),
        )

    def _use(self, made: Context) -> None:
        self._context = made.handle
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.n_seqs: int = llama_cpp.llama_n_seq_max(self._context)
        self._chains.context = made.handle
        self._applied = ()

    def _remake(self, *, unified: bool) -> None:
        """Create a context in place of one that was freed; raises `ConfigError`."""
        info = msgspec.structs.replace(self.info, unified=unified)
        settings = replace(self._settings, unified=unified)
        if unified == self._settings.unified:
            n_ctx, n_seqs = info.n_ctx, self._sequences()[1]
        else:
            # A spare id would take as much memory as a slot (fact 3).
            n_ctx, n_seqs = info.part_cells * info.n_slots, info.n_slots
        made = loading.make_context(self._model, settings, n_ctx=n_ctx, n_seqs=n_seqs, n_threads=self._n_threads)
        self._use(made)
        self._kv = KvOperations(self._context, info, self.n_seqs, earlier=self._kv)
        self.info = info

    def _logits(self, row: int) -> Logits:
        """Return the logits of a batch row (float32, of the vocabulary's size), valid until the next decode."""
        address = ctypes.addressof(llama_cpp.llama_get_logits_ith(self._context, row).contents)
        view = self._views.get(address)
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = np.ctypeslib.as_array((ctypes.c_float * self.vocab.n_tokens).from_address(address))
            self._views[address] = view
        return view

    def _can_partition(self) -> bool:
        """True if KV can be saved and loaded in both layouts, and the model needs no self-test in each."""
        info = self.info
        can_save = info.can_trim and info.segment_size is not None
        return info.unified and info.n_slots > 1 and can_save and not self_test.is_needed(info)

    def _warm_up(self) -> None:
        """Compute one token, so that the first request need not wait until the weights are read.

        Beside that, the first page-locked memory is allocated.
        """
        if self.info.device != CPU:
            page_locked.use(library.page_locked_allocator(), host_memory()[0])
        token = self._compute_once()
        if self.info.keeps_checkpoints:
            self._kv.partial.save_blanks(one=0, empty=1)
        found: dict[str, Any] = {}
        if self.info.can_reuse and (self.n_seqs > self.info.n_slots or not self.info.unified):
            found["segment_size"], found["checkpoint_size"] = first_steps.state_sizes(self, self._kv, token)
        if self.info.adapters:
            found["adapter_switch_ms"] = first_steps.adapter_switch_ms(self, self._context, token)
        if self._settings.context_shift and not self.info.unshifted_reason:
            found["shift_failure"] = first_steps.shift_failure(self, self._kv, token)
        self.info = msgspec.structs.replace(self.info, **found)
        self._kv = KvOperations(self._context, self.info, self.n_seqs, earlier=self._kv)
        self._clear()

    def _compute_once(self) -> Tokens:
        """Compute one token in sequence 0, with all weights, and return it; raises `ConfigError`."""
        token = np.array([max(self.vocab.bos, 0)], dtype=np.int32)
        llama_cpp.llama_set_warmup(self._context, True)
        status = self.decode([Run(seq=0, start=0, tokens=token, n_outputs=1)]).status
        llama_cpp.llama_set_warmup(self._context, False)
        if status is not Status.OK:
            raise ConfigError(f"the model loads but cannot compute ({status.name})", param="--model")
        return token

    def _clear(self) -> None:
        self._kv.clear()
        self._rows, self._targets = {}, {}

    def _measurements(self) -> Measurements:
        """Return what an earlier start has kept; without a result of the self-test, that is run now.

        Costs are measured later (`measure_costs`), because that takes seconds, unless `measure_at_load` is set.
        """
        settings, folder = self._settings, self._settings.measurements
        kept = costs.read_kept(folder, self._key()) if folder else None
        measured = kept or Measurements(has_costs=not settings.measure_costs)
        if not measured.has_costs:
            self.info = msgspec.structs.replace(self.info, costs_pending=NOT_YET)
            if settings.measure_at_load and (now := self._measure()) is not None:
                measured = msgspec.structs.replace(now, self_test=measured.self_test)
        chosen = self_test.overridden(settings.reuse_self_test)
        if chosen is None and self_test.is_needed(self.info) and measured.self_test is None:
            result = self_test.run(self, self._context, limit_s=self_test.START_LIMIT_S)
            self._rows, self._targets = {}, {}
            measured = msgspec.structs.replace(measured, self_test=result)
        self._keep(measured)
        if chosen is not None and self_test.is_needed(self.info):
            measured = msgspec.structs.replace(measured, self_test=chosen)
        return measured

    def _keep(self, measured: Measurements) -> None:
        if self._is_slow:
            # A later start measures again: the weights may have been read from disk.
            measured = Measurements(self_test=measured.self_test, has_costs=False)
        if folder := self._settings.measurements:
            costs.keep(folder, self._key(), measured.to_keep)

    def _key(self) -> str:
        return costs.key_of(self._settings, self.info, self.n_seqs)

    def _measure(self, should_stop: Callable[[], bool] = lambda: False) -> Measurements | None:
        """Measure all costs; None, with the reason in `info`, if that was disturbed or stopped."""
        page_locked.wait()
        info = self.info
        n_threads = max(self._settings.n_threads, self._settings.n_threads_batch)
        if self._threads is not None:
            self._threads.use_all()
        quiet = Quiet(
            on_cpu=info.device == CPU,
            exceeds_cpus=n_threads > host_cpus().n_at_once,
            should_stop=should_stop,
            has_fewer_threads=self._were_threads_left_out,
        )

        measures: dict[str, Callable[[], object]] = {
            "kv_cost": lambda: costs.measure_kv_cost(self, self._context, quiet),
            "step_cost": lambda: costs.measure_step_cost(self, self._context, quiet),
            "state_cost": lambda: costs.measure_state_cost(self, self._context, self._kv.partial, quiet),
        }
        if self._settings.backend_sampling is None and info.device != CPU and not info.pooling:
            measures["samples_faster"] = lambda: self._measure_sampling(quiet)
        pending = ""
        try:
            if self._is_slow is None:
                is_slow = costs.is_slow(self, self._context, quiet)
                if is_slow:
                    # Only then it matters: a disturbed step that is fast enough is fast enough. These steps are
                    # the first after a pause, and in 30 ms one wait for a CPU is too much.
                    quiet.check()
                self._is_slow = is_slow
            if self._is_slow:
                return Measurements()
            for name, measure in measures.items():
                if name not in self._costs:
                    quiet.begin()
                    cost = measure()
                    quiet.check()
                    # Not measured again if one of the others is stopped.
                    self._costs[name] = cost
            return Measurements(**self._costs)
        except StoppedError:
            pending = info.costs_pending
        except (DisturbedError, ConfigError) as error:
            pending = str(error)
        except (kv_ops.NotSavedError, kv_ops.NotLoadedError, MemoryError):
            pending = "not enough memory to save a prefix and load it again"
        finally:
            self.info = msgspec.structs.replace(self.info, costs_pending=pending)
        return None

    def _were_threads_left_out(self) -> bool:
        return self._threads is not None and self._threads.were_left_out

    def _measure_sampling(self, quiet: Quiet) -> bool | None:
        request = Sampling(), np.zeros(0, dtype=np.int32)
        try:
            return costs.measure_sampling(
                self,
                quiet,
                host=lambda: self._host_sampler(*request),
                device=lambda: self._device_sampler(*request) or self._host_sampler(*request),
            )
        finally:
            # They take memory, and time in each step.
            self._chains.remove_all()

    def _set_costs(self, measured: Measurements) -> None:
        """Set the measured costs in `info`; the result of the self-test stays."""
        self._measured = msgspec.structs.replace(measured, self_test=self._measured.self_test)
        chosen = self._settings.backend_sampling
        on_device = bool(measured.samples_faster) if chosen is None else chosen and not self.info.pooling
        self.info = msgspec.structs.replace(self.info, **measured.costs, samples_on_device=on_device)

    def _set_measured(self, measured: Measurements, *, is_later: bool = False) -> None:
        """Set the measured values in `info`; sequences must be empty.

        `is_later` is True if requests run already. Then a failed self-test leaves the KV operations as they are,
        because plans in progress may still save and truncate sequences.
        """
        result = measured.self_test
        self._measured = measured
        self._set_costs(measured)
        if result is None:
            return
        self.info = self_test.applied(self.info, result)
        if result.outcome in ("failed", "off") and not is_later:
            # Operations that failed the self-test are refused from now on.
            self._kv = KvOperations(self._context, self.info, self.n_seqs)

    def _check_open(self) -> None:
        if self._closed or self._is_unloaded:
            raise kv_ops.IllegalCallError("the model is not loaded")

    def _check_seq(self, seq: int) -> None:
        self._check_open()
        kv_ops.check_seq(seq, self.n_seqs)


def _constraint_compiler(vocab: LlamaVocab) -> ConstraintCompiler:
    tokenizer = ConstraintTokenizer(vocab)
    # The token that is forced at a grammar's end comes first.
    eog = tuple(sorted(vocab.eog, key=lambda token: (token != vocab.eos, token)))
    return ConstraintCompiler(lambda: tokenizer.make(eog), n_vocab=vocab.n_tokens, eog=eog)


def _status(code: int) -> Status:
    if code in (Status.OK, Status.NO_CELLS, Status.ABORTED, Status.INVALID):
        return Status(code)
    return Status.FATAL
