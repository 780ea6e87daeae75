"""`GET /cache`: what the prefix cache holds and what came of it; `POST /cache/clear`: give up what is idle;
`DELETE /sessions/{id}`: forget a conversation.

Prefixes are other users' prompts: of their contents nothing is shown, neither text nor token ids nor the salt of
their namespace, unless the server was started with --cache-debug-text, and then the text only.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from aiohttp import web

from llamaslot.api import submits
from llamaslot.api.deliver import json_response
from llamaslot.api.gate import SETTINGS, given_key
from llamaslot.api.readiness import READINESS
from llamaslot.api.wire import SessionBody, read
from llamaslot.base.errors import InvalidRequestError, NotFoundError, NotSupportedError
from llamaslot.base.stats import CacheFigures, CachePrefix, CacheState
from llamaslot.service.service import Service

_session_decoder = msgspec.json.Decoder(SessionBody)
_TOP, _MOST = 20, 1000
_IS_COUNT = re.compile(r"[0-9]{1,9}").fullmatch


async def cache(request: web.Request) -> web.Response:
    """The tree's size, the pool's cells and ids, hits, and the `top` prefixes by hits."""
    service = _service(request)
    text = request.app[SETTINGS].cache_debug_text
    return json_response(_body(await service.cache(top=_top(request), text=text), text=text))


async def clear(request: web.Request) -> web.Response:
    """Give up every idle prefix; the request's body does not matter."""
    cleared = await _service(request).clear_cache()
    return json_response(
        {
            "cleared_tokens": cleared.n_tokens,
            "cleared_ram_tokens": cleared.n_ram_tokens,
            "cleared_disk_tokens": cleared.n_disk_tokens,
        }
    )


async def drop_session(request: web.Request) -> web.Response:
    """Forget a session of the caller's namespace, and give up what only it has of the cache."""
    service, settings = request.app[READINESS].check(), request.app[SETTINGS]
    session_id = request.match_info["session_id"]
    own = (await read(request, _session_decoder)).cache_salt if request.can_read_body else None
    salt = submits.salt(settings, own or "", given_key(request))
    dropped = await service.drop_session(session_id, salt)
    if not dropped.is_known:
        raise NotFoundError(f"there is no session {session_id!r}")
    return json_response(
        {
            "id": session_id,
            "deleted": True,
            "dropped_tokens": dropped.n_tokens,
            "dropped_ram_tokens": dropped.n_ram_tokens,
            "dropped_disk_tokens": dropped.n_disk_tokens,
        }
    )


def _service(request: web.Request) -> Service:
    if not request.app[SETTINGS].slots:
        raise NotSupportedError("this server does not show its slots and its cache; start it with --slots")
    return request.app[READINESS].check()


def _top(request: web.Request) -> int:
    given = request.query.getall("top", [])
    if not given:
        return _TOP
    if len(given) > 1 or not _IS_COUNT(given[0]) or not 1 <= int(given[0]) <= _MOST:
        raise InvalidRequestError(f"'top' must be an integer from 1 to {_MOST}", param="top")
    return int(given[0])


def _body(state: CacheState, *, text: bool) -> dict[str, Any]:
    return {
        "namespaces": state.n_namespaces,
        "nodes": state.n_nodes,
        "leaves": state.n_leaves,
        "tokens": state.n_tokens,
        "tokens_pinned": state.n_pinned_tokens,
        **_figures(state.figures),
        "prefixes": [_prefix(prefix, text=text) for prefix in state.prefixes],
    }


def _figures(figures: CacheFigures) -> dict[str, Any]:
    n_requests = figures.n_hits + figures.n_misses
    return {
        "cells": {
            "total": figures.cells_total,
            "used": figures.cells_used,
            "idle": figures.cells_idle,
            "pinned": figures.cells_pinned,
            "free": figures.cells_total - figures.cells_used,
        },
        "ram": {
            "total_bytes": figures.ram_total,
            "used_bytes": figures.ram_used,
            "tokens": figures.ram_tokens,
            "segments": figures.ram_segments,
        },
        "disk": {
            "total_bytes": figures.disk_total,
            "used_bytes": figures.disk_used,
            "tokens": figures.disk_tokens,
            "segments": figures.disk_segments,
            "bad_files": figures.n_bad,
        },
        "anchors": {"replies": figures.n_anchors, "bytes": figures.anchor_bytes},
        "sessions": {"known": figures.n_sessions, "bytes": figures.session_bytes},
        "sequences": {
            "slots": figures.seqs_slots,
            "reserved": figures.seqs_reserved,
            "used": figures.seqs_used,
            "total": figures.seqs_total,
        },
        "requests": {
            "hits": figures.n_hits,
            "misses": figures.n_misses,
            "hit_rate": figures.n_hits / n_requests if n_requests else 0.0,
            "same_slot": figures.n_same_slot,
            "cross_slot": figures.n_cross_slot,
            "from_ram": figures.n_from_ram,
            "from_disk": figures.n_from_disk,
            "anchored": figures.n_anchored_hits,
            "in_session": figures.n_session_hits,
            "waits": figures.n_waits,
        },
        "prompt_tokens": {
            "total": figures.n_prompt,
            "matched": figures.n_matched,
            "hit_rate": figures.n_matched / figures.n_prompt if figures.n_prompt else 0.0,
        },
        "miss_reasons": figures.misses,
        "copied_tokens": figures.n_copied,
        "evicted_tokens": figures.n_evicted,
        "stored_tokens": figures.n_stored,
        "loaded_tokens": figures.n_loaded,
        "written_tokens": figures.n_written,
        "read_tokens": figures.n_read,
        "parked_paths": figures.n_parked,
        "lost_paths": figures.n_lost_paths,
        "preemptions": figures.n_preempted,
    }


def _prefix(prefix: CachePrefix, *, text: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "parent": prefix.parent if prefix.parent >= 0 else None,
        "namespace": prefix.namespace,
        "tokens": prefix.n_tokens,
        "edge_tokens": prefix.n_edge,
        "hits": prefix.hits,
        "holders": prefix.holders,
        "pinned": prefix.pinned,
        "last_used": prefix.last_used,
    }
    if text:
        body["text"] = prefix.text
    return body
