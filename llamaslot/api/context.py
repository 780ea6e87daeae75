"""The state that handlers share: settings, the models, and of a request its model's service and its ids."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import msgspec
import psutil
from aiohttp import web

from llamaslot.base.callers import Caller
from llamaslot.base.commands import ContextShift
from llamaslot.base.errors import ServerError, UnavailableError, stopped_error
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.tools import ReasoningFormat
from llamaslot.base.model import MAX_DRAFT, ModelInfo
from llamaslot.base.namespaces import key_secret
from llamaslot.base.prompt_jobs import RequestPolicy
from llamaslot.service.models import Models
from llamaslot.service.service import Service


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP layer; the fields of a request override the last group.

    The defaults are those of the flags (`app/config.py`); a test compares them.
    """

    api_keys: tuple[str, ...] = ()
    api_key_file: str = ""
    """Keys of administrators, and a file with further keys; without both, no key is asked for."""
    max_body_bytes: int = 64 * 2**20
    max_total_body_bytes: int = 64 * 2**20
    """Bytes of all bodies that are being received or parsed."""
    body_timeout: float = 60.0
    """Seconds for a body to arrive."""
    max_logit_bias_entries: int = 1024
    max_choices: int = 256
    """Completions of a request: `n` for each of its prompts."""
    max_reply_probs: int = 2**19
    """Probabilities of tokens in a reply."""
    max_stop_strings: int = 256
    max_stop_chars: int = 8192
    """Characters of all stop strings of a request."""
    max_stored_responses: int = 1024
    max_stored_responses_bytes: int = 24 * 2**20
    """Limits of the responses that can be continued by their ids."""
    max_connections: int = 1024
    keep_alive_timeout: float = 75.0
    """Seconds after which a connection without a request is closed."""
    write_timeout: float = 60.0
    """Seconds after which the connection of a client that does not read its reply is closed."""
    max_stream_buffer_bytes: int = 4 * 2**20
    """Bytes of a stream that wait for a client to read them."""
    alias: str = ""
    """The model's names in replies, comma-separated; empty means its file's name."""
    tags: str = ""
    """Tags of the model in `/models`, comma-separated."""
    owned_by: str = "llamaslot"
    """Owner of the model in `/models`, by which gateways tell engines apart."""
    cors_origins: tuple[str, ...] = ("localhost",)
    """Origins of pages that may use the server; `*` is any, `localhost` any port of this machine."""
    allowed_hosts: tuple[str, ...] = ("localhost",)
    """Names in the `Host` header; none for any, `localhost` for this machine's loopback addresses."""
    metrics: bool = False
    slots: bool = True
    """Offer `/slots` and `/cache`."""
    webui: bool = True
    """Serve the page at `/`."""
    cache_debug_text: bool = False
    """Show the text of prefixes in `/cache`, whoever wrote them."""
    cache_salt_from_api_key: bool = False
    """Make the API key a part of the salt, so that only requests with the same key share KV."""
    sse_ping_interval: int = 30
    """Seconds without an event after which a stream gets a comment line; -1 for none."""

    verbose: bool = False
    """Default of the field: replies in OpenAI's form include llama-server's reply, with the prompt."""
    n_predict: int = -1
    context_shift: bool = False
    """Discard a part of a full context, so that the reply continues, where the model allows that."""
    keep: int = 0
    """First tokens that are kept then; -1 for the whole prompt."""
    cache_prompt: bool = True
    reasoning: bool = True
    """True if the model reasons before it answers; only for chat templates that leave the choice."""
    reasoning_budget: int = -1
    """Tokens that the model may reason; -1 for no limit."""
    reasoning_format: ReasoningFormat = "auto"
    """Place of the reasoning in chat replies."""
    template_kwargs: dict[str, Any] = {}
    """Variables of the chat template."""
    embd_normalize: int = 2
    """How vectors are normalized: `VectorParams.normalize`."""
    max_draft: int = MAX_DRAFT
    """Most tokens to draft at once."""
    sampling: dict[str, Any] = {}
    """Fields of `Sampling` that flags set; they win over those that the model file recommends."""

    def default_sampling(self, info: ModelInfo) -> Sampling:
        """Return the default sampling parameters; a `seed` of -1 stands for a new one each time."""
        return Sampling(**{"seed": -1, **info.sampling, **self.sampling})

    def request_policy(self, info: ModelInfo, max_queue: int) -> RequestPolicy:
        """Return the settings for all requests, of which `max_queue` may wait."""
        return RequestPolicy(
            max_prompts=info.n_slots + max_queue,
            max_choices=self.max_choices,
            max_logit_bias_entries=self.max_logit_bias_entries,
            max_stop_strings=self.max_stop_strings,
            max_stop_chars=self.max_stop_chars,
            sampling=self.default_sampling(info),
            max_tokens=self.n_predict,
            shift=ContextShift(self.context_shift and not info.unshifted_reason, n_keep=self.keep),
            cache_prompt=self.cache_prompt,
            verbose=self.verbose,
            reasoning=self.reasoning,
            reasoning_budget=self.reasoning_budget,
            reasoning_format=self.reasoning_format,
            template_kwargs=self.template_kwargs,
            embd_normalize=self.embd_normalize,
            max_draft=self.max_draft,
        )

    def key_secret(self, api_key: str) -> str:
        """Return what the salts of an API key are made from; empty where keys share their namespaces."""
        return key_secret(api_key) if self.cache_salt_from_api_key else ""

    def model_names(self, info: ModelInfo) -> list[str]:
        """Return all names of the model in alphabetical order, as llama-server does; the first one is its id."""
        return _sorted_names(self.alias) or [PurePath(info.path).name]

    def model_tags(self) -> list[str]:
        """Return the tags of the model in alphabetical order, as llama-server does."""
        return _sorted_names(self.tags)


def _sorted_names(text: str) -> list[str]:
    return sorted({name.strip() for name in text.split(",")} - {""})


class Readiness:
    """The models once the server takes requests, or the error that requests get until then."""

    def __init__(self) -> None:
        self._models: Models | None = None
        self._reason: ServerError | UnavailableError = UnavailableError("Loading model", retry_after=1)
        self._is_draining = False

    def set(self, models: Models) -> None:
        """Accept requests: a server of one model has loaded it."""
        self._models = models

    def fail(self, reason: ServerError | UnavailableError) -> None:
        """Answer every request with this error from now on."""
        self._models = None
        self._reason = reason

    def drain(self) -> None:
        """Report unhealthy from now on, before the server stops. Requests are served until the models refuse."""
        self._is_draining = True
        for service in self._models.services if self._models is not None else ():
            service.activity.close()

    def check(self) -> Models:
        """Return the models; raises the error if there are none."""
        if self._models is None:
            raise type(self._reason)(self._reason.message, retry_after=self._reason.retry_after)
        return self._models

    def check_health(self) -> None:
        """Raise the error of a server that new requests should not be sent to.

        It is one that loads its only model, or whose engine is restarting, or which is about to stop.
        """
        models = self.check()
        if self._is_draining:
            raise stopped_error("")
        if models.is_one:
            models.running("").check_running()


def service_of(request: web.Request) -> Service:
    """Return the service of the model that a request names, which the middleware has chosen."""
    return request[SERVICE]


def started() -> int:
    """Return the start of this process in seconds since 1970."""
    return int(psutil.Process().create_time())


def shown_id(request: web.BaseRequest) -> str:
    """Return the id for the reply's `X-Request-Id` and for the log; empty before it has one."""
    return (request[CLIENT_REQUEST_ID] or request[UNIQUE_ID]) if UNIQUE_ID in request else ""


READINESS = web.AppKey("READINESS", Readiness)
SETTINGS = web.AppKey("SETTINGS", ApiSettings)
SERVICE = web.RequestKey("SERVICE", Service)
"""The service of the model that a request is for."""
LOADING_S = web.RequestKey("LOADING_S", float)
"""Seconds that a request has waited until its model was loaded."""
UNIQUE_ID = web.RequestKey("UNIQUE_ID", str)
"""The server's id of a request; the ids of completions and replies derive from it."""
CALLER = web.RequestKey("CALLER", Caller)
"""The caller of a request, by its key and address alone."""
CLIENT_REQUEST_ID = web.RequestKey("CLIENT_REQUEST_ID", str)
"""The client's `X-Request-Id`; empty without a valid one."""
