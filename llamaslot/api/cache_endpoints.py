"""The prefix cache: `GET /cache`, `POST /cache/probe`, `POST /cache/clear`, `DELETE /sessions/{id}`.

Prefixes are other users' prompts: neither text nor token ids nor the salt of their namespace is shown, unless the
server was started with --cache-debug-text, and then only the text, for administrators. Where keys are tenants, only
administrators see `GET /cache` at all.
"""

from __future__ import annotations

import re

from aiohttp import web

from llamaslot.api.context import READINESS, SETTINGS
from llamaslot.api.generation.request_handling import probe_cache
from llamaslot.api.json_bodies import json_response, read
from llamaslot.api.keys import GRANTED, Access
from llamaslot.api.middleware import check_sees_all, given_key, valid_unicode
from llamaslot.base.commands import InspectCache
from llamaslot.base.errors import ForbiddenError, InvalidRequestError, NotSupportedError
from llamaslot.protocol.bodies import SessionBody
from llamaslot.protocol.text_requests import request_salt
from llamaslot.service.service import Service

_DEFAULT_TOP, MAX_TOP = 20, 1000
_IS_COUNT = re.compile(r"[0-9]{1,9}").fullmatch


async def cache(request: web.Request) -> web.Response:
    """Return the cache's statistics and the `top` prefixes with the most hits."""
    service = _service(request)
    # Even lengths, hits and counters tell what other keys send.
    check_sees_all(request, "statistics of the cache")
    settings, is_admin = request.app[SETTINGS], request[GRANTED] is Access.ADMIN
    query = InspectCache(
        top=_top(request),
        text=settings.cache_debug_text and is_admin,
        tenants=settings.cache_salt_from_api_key and is_admin,
    )
    return json_response(await service.cache_state(query))


async def probe(request: web.Request) -> web.Response:
    """Return what is cached of the prompt of a chat or a text completion, which is not run."""
    return json_response(await probe_cache(request))


async def clear(request: web.Request) -> web.Response:
    """Drop every idle prefix, in RAM and on disk too; the request's body is ignored."""
    return json_response(await _service(request).clear_cache())


async def drop_session(request: web.Request) -> web.Response:
    """Drop a session of the caller's namespace or of the public one, and the KV that only it uses."""
    service, settings = request.app[READINESS].check(), request.app[SETTINGS]
    is_admin = request[GRANTED] is Access.ADMIN
    if not is_admin and not settings.cache_salt_from_api_key:
        raise ForbiddenError(
            "all keys share their sessions here: dropping one needs an administrator's API key, or "
            "--cache-salt-from-api-key"
        )
    session_id = valid_unicode(request.match_info["session_id"])
    body = await read(request, SessionBody) if request.can_read_body else SessionBody()
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


def _service(request: web.Request) -> Service:
    if not request.app[SETTINGS].slots:
        raise NotSupportedError("this server does not show its slots and its cache; start it with --slots")
    return request.app[READINESS].check()


def _top(request: web.Request) -> int:
    given = request.query.getall("top", [])
    if not given:
        return _DEFAULT_TOP
    if len(given) > 1 or not _IS_COUNT(given[0]) or not 1 <= int(given[0]) <= MAX_TOP:
        raise InvalidRequestError(f"'top' must be an integer from 1 to {MAX_TOP}", param="top")
    return int(given[0])
