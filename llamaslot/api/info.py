"""What can be asked about the server and its model: health, models, properties, slots, metrics.

And what can be done to a single slot.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import psutil
from aiohttp import web

from llamaslot.api.deliver import json_response
from llamaslot.api.gate import SETTINGS
from llamaslot.api.native import generation_settings
from llamaslot.api.readiness import READINESS
from llamaslot.api.replies import FINGERPRINT
from llamaslot.api.wire import SlotBody, read
from llamaslot.base.errors import InvalidRequestError, NotFoundError, NotSupportedError, UnavailableError
from llamaslot.base.messages import SlotReport

_IS_SLOT = re.compile(r"[0-9]{1,9}").fullmatch
_IS_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,127}").fullmatch
_slot_decoder = msgspec.json.Decoder(SlotBody)


async def health(_: web.Request) -> web.Response:
    """Only reached when there is a model."""
    return json_response({"status": "ok"})


async def models(request: web.Request) -> web.Response:
    """The one model, in OpenAI's list and in Ollama's."""
    info = request.app[READINESS].check().info
    described = _model(request)
    ollama = {
        "name": described["id"],
        "model": described["id"],
        "type": "model",
        "description": info.description,
        "capabilities": ["completion"],
        "details": {"format": "gguf", "family": info.architecture},
    }
    return json_response({"object": "list", "data": [described], "models": [ollama]})


async def model(request: web.Request) -> web.Response:
    """The model, by any of its names."""
    name, described = request.match_info["name"], _model(request)
    if name not in described["aliases"]:
        raise NotFoundError(f"there is no model '{name}' here, only '{described['id']}'", param="model")
    return json_response(described)


async def props(request: web.Request) -> web.Response:
    """How the server was started."""
    service, settings = request.app[READINESS].check(), request.app[SETTINGS]
    info = service.info
    return json_response(
        {
            "default_generation_settings": {
                "n_ctx": info.n_ctx_slot,
                "params": {**generation_settings(settings.sampling, settings.n_predict), "stream": False},
            },
            "total_slots": info.n_slots,
            "model_alias": settings.model_names(info)[0],
            "model_path": info.path,
            "modalities": {"vision": False, "video": False, "audio": False},
            "endpoint_slots": settings.slots,
            "endpoint_props": False,
            "endpoint_metrics": settings.metrics,
            "chat_template": service.chat_template.source,
            "bos_token": info.bos_token,
            "eos_token": info.eos_token,
            "build_info": FINGERPRINT,
            "is_sleeping": False,
        }
    )


async def slots(request: web.Request) -> web.Response:
    """What each slot does; with `?fail_on_no_slot=1` an error when none is idle."""
    if not request.app[SETTINGS].slots:
        raise NotSupportedError("this server does not show its slots; start it with --slots")
    state = await request.app[READINESS].check().state()
    if request.query.get("fail_on_no_slot") and all(slot.request_id for slot in state.slots):
        raise UnavailableError("no slot is idle")
    return json_response([_slot(slot) for slot in state.slots])


async def metrics(request: web.Request) -> web.Response:
    """Counters and gauges for Prometheus."""
    if not request.app[SETTINGS].metrics:
        raise NotSupportedError("this server does not show its metrics; start it with --metrics")
    return web.Response(
        body=await request.app[READINESS].check().exposition(),
        headers={
            "Content-Type": "text/plain; version=0.0.4; charset=utf-8",
            "Process-Start-Time-Unix": str(_started()),
        },
    )


def _model(request: web.Request) -> dict[str, Any]:
    """The model in OpenAI's words, with what llama-server says of it besides."""
    info = request.app[READINESS].check().info
    names = request.app[SETTINGS].model_names(info)
    return {
        "id": names[0],
        "aliases": names,
        "tags": [],
        "object": "model",
        "created": _started(),
        "owned_by": "llamaslot",
        "meta": {
            "vocab_type": info.vocab_type,
            "n_vocab": info.n_vocab,
            "n_ctx": info.n_ctx_slot,
            "n_ctx_train": info.n_ctx_train,
            "n_embd": info.n_embd,
            "n_params": info.n_params,
            "size": info.size_bytes,
        },
    }


async def act_on_slot(request: web.Request) -> web.Response:
    """Save a slot to a file (`?action=save`), restore it from there or erase it, in llama-server's words."""
    service = request.app[READINESS].check()
    slot, action = request.match_info["id_slot"], request.query.get("action")
    if not _IS_SLOT(slot):
        raise InvalidRequestError(f"{slot!r} is no slot's number", param="id_slot")
    id_slot = int(slot)
    if action == "erase":
        return json_response(
            {"id_slot": id_slot, "n_erased": (await service.act_on_slot(id_slot, "erase")).n_tokens}
        )
    if action == "save":
        filename = await _filename(request)
        acted = await service.act_on_slot(id_slot, "save", filename)
        figures = {"n_saved": acted.n_tokens, "n_written": acted.n_bytes, "timings": {"save_ms": acted.ms}}
    elif action == "restore":
        filename = await _filename(request)
        acted = await service.act_on_slot(id_slot, "restore", filename)
        figures = {"n_restored": acted.n_tokens, "n_read": acted.n_bytes, "timings": {"restore_ms": acted.ms}}
    else:
        raise InvalidRequestError("'action' must be save, restore or erase", param="action")
    return json_response({"id_slot": id_slot, "filename": filename, **figures})


async def _filename(request: web.Request) -> str:
    filename = (await read(request, _slot_decoder)).filename
    if not _IS_FILE_NAME(filename):
        raise InvalidRequestError(
            "'filename' is a name without a folder: letters, digits, dots, dashes, underscores and spaces, "
            "beginning with a letter or a digit, at most 128",
            param="filename",
        )
    return filename


def _slot(slot: SlotReport) -> dict[str, Any]:
    running = bool(slot.request_id)
    body: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "n_held": slot.n_held,
        "speculative": False,
        "is_processing": running,
        "next_token": [
            {
                "has_next_token": running,
                "n_remain": max(slot.max_tokens - slot.n_generated, 0) if running and slot.max_tokens >= 0 else -1,
                "n_decoded": slot.n_generated if running else 0,
            }
        ],
    }
    if running:
        body["request_id"] = slot.request_id
        body["n_prompt_tokens"] = slot.n_prompt
        body["n_prompt_tokens_processed"] = slot.n_prompt_computed
        body["params"] = generation_settings(slot.sampling, slot.max_tokens)
    return body


def _started() -> int:
    """Start of this process in seconds since 1970."""
    return int(psutil.Process().create_time())
