"""Endpoints about the server and its model: health, models, properties, metrics; template and tokenizer."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from aiohttp import web

from llamaslot.api.bodies import BODY_READER, json_response, read, send_json
from llamaslot.api.completions.native_completion import generation_settings
from llamaslot.api.completions.openai_completions import FINGERPRINT
from llamaslot.api.context import READINESS, SETTINGS, service_of, started
from llamaslot.api.middleware import caller_of, check_sees_all
from llamaslot.base.errors import NotFoundError, NotSupportedError
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.model import ModelInfo
from llamaslot.base.prompt_jobs import AnswerBody
from llamaslot.protocol.bodies import AdapterScale
from llamaslot.protocol.images import MEDIA_MARKER
from llamaslot.protocol.text_requests import adapter_scales
from llamaslot.service.models import Models, ServedModel


async def health(request: web.Request) -> web.Response:
    """Return 200; a model that is loading, an engine that is restarting or a server that is stopping is a 503."""
    request.app[READINESS].check_health()
    return json_response({"status": "ok"})


async def models(request: web.Request) -> web.Response:
    """Return the models in OpenAI's list and in Ollama's; with their state if there may be several."""
    served = request.app[READINESS].check()
    described = [_described(request, each, has_status=not served.is_one) for each in served.all]
    ollama = [_in_ollamas_form(each) for each in served.all]
    return json_response({"object": "list", "data": described, "models": ollama})


async def model(request: web.Request) -> web.Response:
    """Return a model, by any of its names."""
    served, name = request.app[READINESS].check(), request.match_info["name"]
    # A server of one model answers to any name, but has only its own.
    found = next((each for each in served.all if name in each.names), None)
    if found is None:
        known = "', '".join(each.id for each in served.all)
        raise NotFoundError(f"there is no model '{name}' here, only '{known}'", param="model")
    return json_response(_described(request, found, has_status=not served.is_one))


class ModelBody(msgspec.Struct):
    """`POST /models/load` and `/models/unload`."""

    model: str


async def load(request: web.Request) -> web.Response:
    """Begin to load a model; its state is in the list of models."""
    _of_several(request).load((await read(request, ModelBody)).model)
    return json_response(Success())


async def unload(request: web.Request) -> web.Response:
    """Begin to unload a model, once the requests that use it have ended; what is cached stays in RAM or on disk."""
    _of_several(request).unload((await read(request, ModelBody)).model)
    return json_response(Success())


def _of_several(request: web.Request) -> Models:
    models = request.app[READINESS].check()
    if models.is_one:
        raise NotSupportedError("this server has one model, which stays loaded; several come by --models-dir")
    return models


async def props(request: web.Request) -> web.Response:
    """Return the server's properties."""
    models, settings = request.app[READINESS].check(), request.app[SETTINGS]
    name = request.query.get("model", "")
    if not models.is_one and not name:
        return json_response(
            {
                "role": "router",
                "max_instances": models.max_loaded,
                "models_autoload": models.autoload,
                "build_info": FINGERPRINT,
            }
        )
    service = models.running(name)
    info = service.info
    return json_response(
        {
            "default_generation_settings": {
                "n_ctx": info.n_ctx_slot,
                "params": {
                    **generation_settings(service.policy.sampling, service.policy.max_tokens, service.policy.shift),
                    **_texts_of_flags(service.policy.sampling),
                    "stream": False,
                },
            },
            "total_slots": info.n_slots,
            "model_alias": service.names[0],
            "model_path": info.path,
            "modalities": {"vision": info.projector is not None, "video": False, "audio": False},
            "media_marker": MEDIA_MARKER,
            "endpoint_slots": settings.slots,
            "endpoint_props": False,
            "endpoint_metrics": settings.metrics,
            "chat_template": service.chat_template,
            "chat_format": service.output_format.name,
            "pooling": info.pooling,
            "bos_token": info.bos_token,
            "eos_token": info.eos_token,
            "build_info": FINGERPRINT,
            "is_sleeping": not service.is_loaded,
            "prefix_reuse": _prefix_reuse(info),
        }
    )


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics for Prometheus."""
    if not request.app[SETTINGS].metrics:
        raise NotSupportedError("this server does not show its metrics; start it with --metrics")
    check_sees_all(request, "metrics")
    return web.Response(
        body=await service_of(request).exposition(),
        headers={
            "Content-Type": "text/plain; version=0.0.4; charset=utf-8",
            "Process-Start-Time-Unix": str(started()),
        },
    )


def _prefix_reuse(info: ModelInfo) -> dict[str, Any]:
    """Return whether and how prefixes are reused, for `/props`."""
    size, limits, checkpoints = info.checkpoint_size, info.checkpoint_limits, None
    if size is not None and limits is not None:
        checkpoints = {
            "checkpoint_bytes": size.of(info.n_ctx_slot),
            "total_bytes": limits.ram_bytes,
            "max_per_path": limits.on_path,
            "interval_tokens": limits.step,
        }
    is_pending = info.self_test == "pending"
    return {
        "enabled": info.can_reuse and not is_pending,
        "reason": info.self_test_note or ("" if info.can_reuse else info.reuse_reason),
        "self_test": info.self_test,
        "state": info.state,
        "checkpoints": checkpoints,
    }


def _texts_of_flags(sampling: Sampling) -> dict[str, Any]:
    """Return the defaults that `/slots` hides in requests, if flags set them, in the form that requests take.

    No request can ask for no sequence breakers, as with llama-server.
    """
    texts = {name: getattr(sampling, name) for name in ("logit_bias", "dry_sequence_breakers")}
    shown = {name: value for name, value in texts.items() if value and value != getattr(Sampling(), name)}
    if "logit_bias" in shown:
        shown["logit_bias"] = [
            [token, False if bias == float("-inf") else bias] for token, bias in shown["logit_bias"].items()
        ]
    return shown


def _described(request: web.Request, model: ServedModel, *, has_status: bool) -> dict[str, Any]:
    """Return a model in OpenAI's format with llama-server's `meta`, if it has been loaded so far."""
    described: dict[str, Any] = {
        "id": model.id,
        "aliases": model.names,
        "tags": model.tags,
        "object": "model",
        "created": started(),
        "owned_by": request.app[SETTINGS].owned_by,
        # Agents such as pi learn from it whether they may send images.
        "architecture": {
            "input_modalities": ["text", "image"] if model.takes_images else ["text"],
            "output_modalities": ["text"],
        },
    }
    if has_status:
        described["status"] = {"value": model.status}
        if model.failure is not None:
            described["status"] |= {"failed": True, "reason": model.failure.message}
    if (info := model.info) is not None:
        described["meta"] = {
            "vocab_type": info.vocab_type,
            "n_vocab": info.n_vocab,
            "n_ctx": info.n_ctx_slot,
            "n_ctx_train": info.n_ctx_train,
            "n_embd": info.n_embd,
            "n_params": info.n_params,
            "size": info.size_bytes,
        }
    return described


def _in_ollamas_form(model: ServedModel) -> dict[str, Any]:
    info = model.info
    return {
        "name": model.id,
        "model": model.id,
        "type": "model",
        "description": info.description if info is not None else "",
        "capabilities": [model.task, *(["multimodal"] if model.takes_images else [])],
        "details": {"format": "gguf", "family": info.architecture if info is not None else ""},
    }


class LoraAdapter(msgspec.Struct):
    """A LoRA adapter, as in llama-server."""

    id: int
    path: str
    scale: float
    task_name: str
    prompt_prefix: str
    alora_invocation_string: str | msgspec.UnsetType = msgspec.UNSET
    alora_invocation_tokens: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class Success(msgspec.Struct):
    """llama-server's reply to a change."""

    success: Literal[True] = True


async def lora_adapters(request: web.Request) -> web.Response:
    """Return the LoRA adapters, and the scales of requests that name none."""
    service = service_of(request)
    pairs = zip(service.info.adapters, service.adapter_scales, strict=True)
    return json_response(
        [
            LoraAdapter(
                *(i, each.path, scale, each.task_name, each.prompt_prefix),
                *((each.invocation_text, each.invocation) if each.invocation else ()),
            )
            for i, (each, scale) in enumerate(pairs)
        ]
    )


async def scale_adapters(request: web.Request) -> web.Response:
    """Set the scales of LoRA adapters for later requests that name none; those that it does not name get 0."""
    service = service_of(request)
    chosen = await read(request, list[AdapterScale])
    service.adapter_scales = adapter_scales(chosen, len(service.info.adapters), "id")
    return json_response(Success())


class TokenizerInfo(msgspec.Struct):
    """Control tokens of the vocabulary, and the chat template, as vLLM names them."""

    bos_token: str | None
    eos_token: str | None
    model_max_length: int
    chat_template: str


async def apply_template(request: web.Request) -> web.StreamResponse:
    """Return the prompt that the template makes of a conversation and its tools."""
    return await _answered(request, "apply_template")


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Return the token ids of a text or of texts and ids, with the text of each token if asked for."""
    return await _answered(request, "tokenize")


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Return the text of token ids."""
    return await _answered(request, "detokenize")


async def tokenizer_info(request: web.Request) -> web.StreamResponse:
    """Return what vLLM's clients need to know of the vocabulary, such as lm-eval."""
    service = service_of(request)
    info, template = service.info, service.chat_template
    return json_response(TokenizerInfo(info.bos_token or None, info.eos_token or None, info.n_ctx_slot, template))


async def _answered(
    request: web.Request, kind: Literal["apply_template", "tokenize", "detokenize"]
) -> web.StreamResponse:
    service = service_of(request)
    async with request.app[BODY_READER].body(request) as raw:
        caller = caller_of(request)
        job = AnswerBody(kind, raw, caller.client())
        reply: bytes = await service.answer(job)
    with service.reply_budget.held(caller.owner, len(reply)):
        return await send_json(request, [reply])
