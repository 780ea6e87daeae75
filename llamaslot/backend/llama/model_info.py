"""Facts about a loaded model and its context, as a `ModelInfo`, before anything is computed."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import llama_cpp
import msgspec

from llamaslot.backend.llama import capabilities, library, loading
from llamaslot.backend.llama.loading import Context, LlamaSettings
from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.files import parts
from llamaslot.base.model import Adapter, ModelFile, ModelInfo, ProjectorInfo, RerankFormat

_INT32_MAX = 2**31 - 1
_SAMPLING_KEYS: dict[str, tuple[str, type[int] | type[float], float, float]] = {
    "temp": ("temperature", float, 0, 100),
    "top_k": ("top_k", int, 0, _INT32_MAX),
    "top_p": ("top_p", float, 0, 1),
    "min_p": ("min_p", float, 0, 1),
    "penalty_last_n": ("repeat_last_n", int, -1, _INT32_MAX),
    "penalty_repeat": ("repeat_penalty", float, 0.01, 100),
    "xtc_probability": ("xtc_probability", float, 0, 1),
    "xtc_threshold": ("xtc_threshold", float, 0, 1),
    "mirostat": ("mirostat", int, 0, 2),
    "mirostat_tau": ("mirostat_tau", float, 0, 100),
    "mirostat_eta": ("mirostat_eta", float, 0, 100),
}
"""Fields of `Sampling` with their types and bounds, by the keys of GGUF files after `general.sampling.`.

The order of the samplers (`sequence`) is not read.
"""


def describe(
    model: Any,
    made: Context,
    vocab: LlamaVocab,
    settings: LlamaSettings,
    *,
    n_cache_seqs: int,
    sizing: str,
    kv_files: tuple[ModelFile, ...],
    adapters: tuple[Adapter, ...],
    projector: ProjectorInfo | None,
) -> ModelInfo:
    """Return the facts about a model in the context that was made first; keywords are fields of `ModelInfo`."""
    context = made.handle
    n_ctx_train = llama_cpp.llama_model_n_ctx_train(model)
    n_ctx_seq = llama_cpp.llama_n_ctx_seq(context)
    n_ctx = llama_cpp.llama_n_ctx(context) if settings.unified else n_ctx_seq * settings.n_slots
    n_ubatch = llama_cpp.llama_n_ubatch(context)
    reason = capabilities.why_not_reusable(model, made.caches)
    state = capabilities.read(model, context, made.caches)
    if settings.why_whole:
        n_ctx = n_ctx_seq = n_ubatch
        reason = settings.why_whole
        state = msgspec.structs.replace(state, can_trim=False)
    has_checkpoints = settings.checkpoints and capabilities.has_partial_state(model, made.caches)
    has_scratch = settings.unified and llama_cpp.llama_n_seq_max(context) > settings.n_slots
    template = (llama_cpp.llama_model_chat_template(model, None) or b"").decode(errors="replace")
    return ModelInfo(
        name=library.metadata(model, "general.name") or settings.model.stem,
        path=str(settings.model),
        architecture=library.metadata(model, "general.architecture"),
        description=_description(model),
        n_params=llama_cpp.llama_model_n_params(model),
        size_bytes=llama_cpp.llama_model_size(model),
        n_vocab=vocab.n_tokens,
        vocab_type=vocab.type,
        n_embd=llama_cpp.llama_model_n_embd(model),
        n_ctx_train=n_ctx_train,
        n_ctx=n_ctx,
        n_ctx_slot=min(n_ctx_seq, n_ctx_train) if n_ctx_train > 0 else n_ctx_seq,
        n_slots=settings.n_slots,
        n_cache_seqs=n_cache_seqs,
        n_batch=llama_cpp.llama_n_batch(context),
        n_ubatch=n_ubatch,
        n_spare_rows=loading.spare_rows(model, settings, n_ubatch),
        unified=settings.unified,
        context_ms=1e3 * made.seconds,
        flash_attn=made.flash_attn,
        kv_facts=loading.kv_facts(model, context, settings, flash_attn=made.flash_attn),
        kv_files=kv_files,
        sizing=sizing,
        adapters=adapters,
        projector=projector,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        device=library.device_used(loading.gpus(settings)),
        backends=library.backends(),
        reuse_reason=reason,
        state=state,
        keeps_checkpoints=has_checkpoints and has_scratch,
        chat_template=template,
        builtin_template=builtin_template(template),
        sampling=sampling_defaults(model),
        bos_token=vocab.text(vocab.bos),
        eos_token=vocab.text(vocab.eos),
        fim=vocab.fim,
        adds_bos=vocab.adds_bos,
        adds_eos=vocab.adds_eos,
        control_tokens=vocab.control_tokens,
        eog=tuple(sorted(vocab.eog)),
        **_vector_facts(model, settings),
    )


def kv_files(settings: LlamaSettings) -> tuple[ModelFile, ...]:
    """Return the files on which KV depends, as they are now: those of the model, then those of llama.cpp."""
    return tuple(map(ModelFile.of, (*parts(settings.model), *library.paths())))


def sampling_defaults(model: Any) -> dict[str, int | float]:
    """Return the fields of `Sampling` for which the model file recommends a value (`general.sampling.*`).

    Values outside the bounds of request fields are ignored, because llama.cpp would use them unchecked.
    """
    found: dict[str, int | float] = {}
    for key, (name, kind, low, high) in _SAMPLING_KEYS.items():
        text = library.metadata(model, f"general.sampling.{key}")
        try:
            value = kind(text) if text else math.nan
        except ValueError:
            value = math.nan
        if math.isfinite(value) and low <= value <= high:
            found[name] = value
    return found


def builtin_template(source: str) -> str:
    """Return the name of the built-in template that llama.cpp recognizes in a Jinja source; empty if none."""
    names = (ctypes.c_char_p * 256)()
    n = min(llama_cpp.llama_chat_builtin_templates(names, len(names)), len(names))
    prompt = _prompt_by_builtin(source.encode())
    fitting = (name for name in names[:n] if name and prompt and _prompt_by_builtin(name) == prompt)
    return next(fitting, b"").decode()


def _prompt_by_builtin(template: bytes) -> bytes:
    """Render a conversation for which all built-in templates differ, by a template's name or Jinja source."""
    roles = (b"system", b"user", b"assistant", b"user")
    chat = (llama_cpp.llama_chat_message * len(roles))(*((role, b" " + role + b" ") for role in roles))
    buffer = ctypes.create_string_buffer(4096)
    n = llama_cpp.llama_chat_apply_template(template, chat, len(roles), True, buffer, len(buffer))
    return buffer.raw[: max(n, 0)]


def _vector_facts(model: Any, settings: LlamaSettings) -> dict[str, Any]:
    """Return the fields of `ModelInfo` about vectors and scores; empty for a server that generates text."""
    if not settings.embeds:
        return {}
    facts: dict[str, Any] = {"pooling": settings.pooling, "embeds_whole": bool(settings.why_whole)}
    if settings.pooling == "rank":
        return facts | {"n_vector": llama_cpp.llama_model_n_cls_out(model), "rerank": _rerank_format(model)}
    return facts | {"n_vector": llama_cpp.llama_model_n_embd_out(model)}


def _rerank_format(model: Any) -> RerankFormat:
    """Return the form of prompts that llama-server uses for a reranker (`format_prompt_rerank`)."""
    if template := llama_cpp.llama_model_chat_template(model, b"rerank"):
        return RerankFormat(template.decode(errors="replace"))
    vocab = llama_cpp.llama_model_get_vocab(model)
    eos = llama_cpp.llama_vocab_eos(vocab)
    sep = llama_cpp.llama_vocab_sep(vocab)
    ends = (eos if eos >= 0 else sep,) if llama_cpp.llama_vocab_get_add_eos(vocab) else ()
    seps = (sep,) if llama_cpp.llama_vocab_get_add_sep(vocab) else ()
    starts = (llama_cpp.llama_vocab_bos(vocab),) if llama_cpp.llama_vocab_get_add_bos(vocab) else ()
    start, middle, end = (tuple(each for each in ids if each >= 0) for ids in (starts, ends + seps, ends))
    return RerankFormat(start=start, middle=middle, end=end)


def _description(model: Any) -> str:
    """Return architecture, size and element type, as in `llama 2.32M F16`. llama.cpp writes `?B` for most sizes."""
    buffer = ctypes.create_string_buffer(256)
    llama_cpp.llama_model_desc(model, buffer, len(buffer))
    n_params = llama_cpp.llama_model_n_params(model)
    divisor, unit = next((each for each in ((1e9, "B"), (1e6, "M")) if n_params >= each[0]), (1e3, "K"))
    return buffer.value.decode(errors="replace").replace("?B", f"{n_params / divisor:.3g}{unit}")
