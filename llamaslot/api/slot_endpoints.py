"""`GET /slots`: the state of each slot; `POST /slots/{id}`: save it to a file, restore it from one, or erase it."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from aiohttp import web

from llamaslot.api.completions.native_body import generation_settings
from llamaslot.api.context import CALLER, READINESS, SETTINGS
from llamaslot.api.json_bodies import json_response, read
from llamaslot.api.middleware import sees_all
from llamaslot.base.commands import SlotAction, SlotActionDone, SlotVerb
from llamaslot.base.errors import InvalidRequestError, NotSupportedError, UnavailableError
from llamaslot.base.stats import SlotState
from llamaslot.protocol.bodies import SlotBody

_IS_SLOT = re.compile(r"[0-9]{1,9}").fullmatch
_IS_INVALID = re.compile(r"""^$|^\.|[. ]$|[\x00-\x1f\x7f/\\:*?"<>|\ud800-\udfff]""").search
"""Characters that some file system forbids, and names that leave the folder."""
_MAX_NAME_BYTES = 240
"""Bytes of a file name; the temporary name during writing is longer."""


async def slots(request: web.Request) -> web.Response:
    """Return the state of each slot; with `?fail_on_no_slot=1` an error if none is idle."""
    if not request.app[SETTINGS].slots:
        raise NotSupportedError("this server does not show its slots; start it with --slots")
    state = await request.app[READINESS].check().engine_state()
    if request.query.get("fail_on_no_slot") and all(slot.request_id for slot in state.slots):
        raise UnavailableError("no slot is idle")
    if not sees_all(request):
        owner, service = request[CALLER].owner, request.app[READINESS].check()
        state.slots = tuple(
            slot if service.owner_of(slot.request_id) == owner else _of_others(slot) for slot in state.slots
        )
    return json_response([_slot(slot) for slot in state.slots])


async def act(request: web.Request) -> web.Response:
    """Carry out the slot action in `?action=`, with llama-server's reply."""
    service = request.app[READINESS].check()
    slot = request.match_info["id_slot"]
    if not _IS_SLOT(slot):
        raise InvalidRequestError(f"{slot!r} is not a slot number", param="id_slot")
    try:
        action: SlotVerb = msgspec.convert(request.query.get("action"), SlotVerb)
    except msgspec.ValidationError:
        raise InvalidRequestError("'action' must be save, restore or erase", param="action") from None
    filename = "" if action == "erase" else await _filename(request)
    id_slot = int(slot)
    done = await service.ask(SlotAction(id_slot, action, filename), SlotActionDone)
    if action == "erase":
        return json_response({"id_slot": id_slot, "n_erased": done.n_tokens})
    counts = {
        "save": {"n_saved": done.n_tokens, "n_written": done.n_bytes, "timings": {"save_ms": done.ms}},
        "restore": {"n_restored": done.n_tokens, "n_read": done.n_bytes, "timings": {"restore_ms": done.ms}},
    }
    return json_response({"id_slot": id_slot, "filename": filename, **counts[action]})


async def _filename(request: web.Request) -> str:
    filename = (await read(request, SlotBody)).filename
    if _IS_INVALID(filename) or len(filename.encode()) > _MAX_NAME_BYTES:
        raise InvalidRequestError(
            "'filename' is a name without a folder and without :*?\"<>|, that does not begin with a dot, nor ends "
            f"with one or with a space, of at most {_MAX_NAME_BYTES} bytes",
            param="filename",
        )
    return filename


def _of_others(slot: SlotState) -> SlotState:
    """Return a slot without what its request is and was, but for whether there is one."""
    return SlotState(id=slot.id, n_ctx=slot.n_ctx, n_held=0, request_id="another key's" if slot.request_id else "")


def _slot(slot: SlotState) -> dict[str, Any]:
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
