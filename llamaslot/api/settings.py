"""What the HTTP layer can be told, with llama-server's defaults."""

from __future__ import annotations

import msgspec

from llamaslot.base.messages import Sampling


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP layer; the requests' own fields override the last group."""

    api_keys: tuple[str, ...] = ()
    """Keys that open the server; none leaves it open."""
    max_body_bytes: int = 64 * 1024 * 1024
    alias: str = ""
    """The model's name in replies; empty means its own."""
    cors_origins: tuple[str, ...] = ("*",)
    """Origins that browsers may call from; `*` is any, `localhost` any port of this machine."""
    metrics: bool = False
    slots: bool = True
    sse_ping_interval: int = 30
    """Seconds of silence after which a stream gets a comment line; -1 none."""

    n_predict: int = -1
    cache_prompt: bool = True
    sampling: Sampling = Sampling(seed=-1)
    """A `seed` of -1 stands for another one in each request."""
