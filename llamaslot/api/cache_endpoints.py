"""Prefix cache and slots: `/cache` and below, `/sessions/{id}`, `/slots`, `/slots/{id}`, and `/events`, which feeds
the page.

Prefixes are other users' prompts: neither text nor token ids nor the salt of their namespace is shown, unless the
server was started with --cache-debug-text, and then only the text, for administrators. Where keys are tenants, only
administrators see `GET /cache` at all.
"""

from __future__ import annotations

import re
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from llamaslot.api.bodies import has_body, is_count, json_response, read
from llamaslot.api.completions.native_completion import generation_settings
from llamaslot.api.context import CALLER, SETTINGS, service_of
from llamaslot.api.credentials import GRANTED, Access
from llamaslot.api.generation.request_handling import probe_cache, warm_cache
from llamaslot.api.middleware import check_sees_all, given_key, sees_all, valid_unicode
from llamaslot.api.responses.responses import earlier_items
from llamaslot.api.sse import EventStream, typed_event
from llamaslot.base.commands import InspectCache, LocalTier, SlotAction, SlotActionDone, SlotVerb
from llamaslot.base.errors import (
    ForbiddenError,
    InvalidRequestError,
    NotSupportedError,
    UnavailableError,
    stopped_error,
)
from llamaslot.base.stats import SlotState, Warmed
from llamaslot.protocol.bodies import SessionBody, SlotBody
from llamaslot.protocol.text_requests import request_salt
from llamaslot.service.service import Service

_DEFAULT_TOP, MAX_TOP = 20, 2000
_IS_INVALID = re.compile(r"""^$|^\.|[. ]$|[\x00-\x1f\x7f/\\:*?"<>|\ud800-\udfff]""").search
"""Characters that some file system forbids, and names that leave the folder."""
_MAX_NAME_BYTES = 240
"""Bytes of a file name; the temporary name during writing is longer."""


async def cache(request: web.Request) -> web.Response:
    """Return the cache's statistics and the `top` prefixes with the most hits."""
    service = _service(request)
    # Even lengths, hits and counters tell what other keys send.
    check_sees_all(request, "statistics of the cache")
    settings, is_admin = request.app[SETTINGS], request[GRANTED] is Access.ADMIN
    query = InspectCache(
        top=_top(request, _DEFAULT_TOP),
        text=settings.cache_debug_text and is_admin,
        tenants=settings.cache_salt_from_api_key and is_admin,
    )
    return json_response(await service.cache_state(query))


async def advice(request: web.Request) -> web.Response:
    """Return where prompts diverged from what was cached, the likely culprits, and hit rates with other sizes."""
    return json_response(await _service(request).cache_advice())


async def probe(request: web.Request) -> web.Response:
    """Return what is cached of the prompt of a chat or a text completion, which is not run."""
    with earlier_items(request) as find:
        return json_response(await probe_cache(request, find))


async def warm(request: web.Request) -> web.Response:
    """Compute a prompt for later requests that begin with it, and generate nothing; `pin` keeps it cached."""
    info = service_of(request).info
    is_dropped = info.self_test == "failed" or (info.self_test == "pending" and not info.keeps_checkpoints)
    if is_dropped or not info.can_reuse:
        raise NotSupportedError(f"no prefix of this model is reused: {info.self_test_note or info.reuse_reason}")
    with earlier_items(request) as find:
        completion = await warm_cache(request, find)
    progress = completion.end.progress
    pinned = bool(completion.params.pin)
    return json_response(Warmed(progress.n_prompt, progress.n_cached, progress.n_prompt_computed, pinned))


async def clear(request: web.Request) -> web.Response:
    """Drop every idle prefix, in RAM and on disk too, or in one tier; the request's body is ignored."""
    try:
        tier = msgspec.convert(request.query.get("tier"), LocalTier | None)
    except msgspec.ValidationError:
        raise InvalidRequestError("'tier' must be pool, ram or disk", param="tier") from None
    return json_response(await _service(request).clear_cache(tier))


async def drop_session(request: web.Request) -> web.Response:
    """Drop a session of the caller's namespace or of the public one, and the KV that only it uses."""
    service, settings = service_of(request), request.app[SETTINGS]
    is_admin = request[GRANTED] is Access.ADMIN
    if not is_admin and not settings.cache_salt_from_api_key:
        raise ForbiddenError(
            "all keys share their sessions here: dropping one needs an administrator's API key, or "
            "--cache-salt-from-api-key"
        )
    session_id = valid_unicode(request.match_info["session_id"])
    body = await read(request, SessionBody) if has_body(request) else SessionBody()
    salt = request_salt(
        settings.key_secret(given_key(request)),
        body.cache_salt or "",
        is_public=bool(body.cache_public),
        is_admin=is_admin,
    )
    dropped = await service.drop_session(session_id, salt)
    return json_response(
        {
            "id": session_id,
            "deleted": True,
            "dropped_tokens": dropped.cleared_tokens,
            "dropped_ram_tokens": dropped.cleared_ram_tokens,
            "dropped_disk_tokens": dropped.cleared_disk_tokens,
        }
    )


async def events(request: web.Request) -> web.StreamResponse:
    """Stream the state of slots and cache once a second, each request that ends, and prefixes with `?top=N`."""
    settings, service = request.app[SETTINGS], _service(request)
    top = _top(request, 0)
    prefixes = InspectCache(top, text=settings.cache_debug_text) if top else None
    stream = EventStream(request, settings.sse_ping_interval, settings.max_stream_buffer_bytes)
    if request.method == "HEAD":
        await stream.open()
        return stream.response
    async with aclosing(service.activity.watch(prefixes)) as updates:
        first = await anext(updates, None)
        if first is None:
            raise stopped_error("")
        await stream.open()
        await stream.send([typed_event(first.update, first.json)])
        async for told in updates:
            await stream.send([typed_event(told.update, told.json)])
    return stream.response


def _service(request: web.Request) -> Service:
    if not request.app[SETTINGS].slots:
        raise NotSupportedError("this server does not show its slots and its cache; start it with --slots")
    return service_of(request)


def _top(request: web.Request, default: int) -> int:
    given = request.query.getall("top", [])
    if not given:
        return default
    if len(given) > 1 or not is_count(given[0]) or not 1 <= int(given[0]) <= MAX_TOP:
        raise InvalidRequestError(f"'top' must be an integer from 1 to {MAX_TOP}", param="top")
    return int(given[0])


async def slots(request: web.Request) -> web.Response:
    """Return the state of each slot; with `?fail_on_no_slot=1` an error if none is idle."""
    service = _service(request)
    state = await service.engine_state()
    if request.query.get("fail_on_no_slot") and all(slot.request_id for slot in state.slots):
        raise UnavailableError("no slot is idle")
    if not sees_all(request):
        owner = request[CALLER].owner
        state.slots = tuple(
            slot if service.owner_of(slot.request_id) == owner else _of_others(slot) for slot in state.slots
        )
    return json_response([_slot(slot) for slot in state.slots])


async def act(request: web.Request) -> web.Response:
    """Carry out the slot action in `?action=`, with llama-server's reply."""
    service = service_of(request)
    slot = request.match_info["id_slot"]
    if not is_count(slot):
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
    """Return a slot without anything about its requests, except whether one is running."""
    return SlotState(id=slot.id, n_ctx=slot.n_ctx, n_held=0, request_id="another key's" if slot.request_id else "")


def _slot(slot: SlotState) -> dict[str, Any]:
    running = bool(slot.request_id)
    body: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "n_held": slot.n_held,
        "speculative": slot.speculates,
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
        body["params"] = generation_settings(slot.sampling, slot.max_tokens, slot.shift)
    return body
