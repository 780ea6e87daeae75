"""Checks of the configuration: is it valid, who can reach the server, is its port free?"""

from __future__ import annotations

import argparse
import errno
import http.client
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from llamaslot.api.credentials import ApiKeys, certificate
from llamaslot.api.middleware import is_loopback
from llamaslot.app.cache_tiers import remote_settings
from llamaslot.app.config import Config
from llamaslot.app.config_reader import listed, read_config, read_template
from llamaslot.app.doctor import Check, fail, ok, warn
from llamaslot.app.http_config import api_settings
from llamaslot.base.errors import ConfigError

_ASK_TIMEOUT_S = 1.0
_FIX_CONFIG = "correct it: `llamaslot serve` would exit with this message"


def configuration(flags: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Config, Check]:
    """Return the configuration and a check of its validity; the default configuration if it cannot be read."""
    file = flags.config or environ.get("LLAMASLOT_CONFIG")
    config = Config()
    try:
        config = read_config(flags, environ)
        read_template(config)
        api_settings(config)
        certificate(config.ssl_cert_file, config.ssl_key_file)
        remote_settings(config)
    except ConfigError as error:
        return config, fail("configuration", error.message, _FIX_CONFIG)
    changed = sum(getattr(config, name) != getattr(Config(), name) for name in Config.__slots__)
    found = f"{changed} settings other than the default" + (f"; file {file}" if file else "")
    return config, ok("configuration", found)


def access(config: Config) -> Check:
    """Check who can use the server: other machines, and other users of this one."""
    outside = [host for host in listed(config.host) if not is_loopback(host)]
    where = f"listens on {config.host}"
    try:
        has_keys = bool(ApiKeys(listed(config.api_key), config.api_key_file))
    except ConfigError as error:
        return fail("access", error.message, _FIX_CONFIG)
    if outside and not has_keys:
        advice = "use --api-key-file: anyone who reaches the port can use the model and clear the cache"
        return warn("access", f"{where}, without API keys (--insecure)", f"{advice} (docs/security.md)")
    if config.api_key_file and others_can_read(Path(config.api_key_file)):
        return warn("access", f"other users may read {config.api_key_file}", f"chmod 600 {config.api_key_file}")
    if outside and not config.ssl_cert_file:
        advice = (
            "use --ssl-cert-file and --ssl-key-file, or a TLS proxy in front: keys and prompts are sent unencrypted"
        )
        return warn("access", f"{where}, with API keys, without TLS", advice)
    if not has_keys:
        return ok("access", f"{where}: all users of this machine, without API keys")
    return ok("access", f"{where}, with API keys{', over TLS' if config.ssl_cert_file else ''}")


def port(config: Config) -> Check:
    """Check whether the addresses are free and, if not, who uses them."""
    for host in listed(config.host):
        try:
            _bind(host, config.port)
        except OSError as error:
            return _not_bound(host, config.port, error)
    if config.port == 0:
        return ok("port", "the server will choose a free one")
    return ok("port", f"{config.port} is free")


def _bind(host: str, number: int) -> None:
    """Listen on an address for a moment, as the server would. Raises `OSError`."""
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(1)


def _not_bound(host: str, number: int, error: OSError) -> Check:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return fail("port", f"{host} is not an address of this machine ({error.strerror})", "give another --host")
    if isinstance(error, PermissionError):
        advice = "give a --port of 1024 or higher, or use a proxy"
        return fail("port", f"this user may not listen on port {number}", advice)
    if error.errno != errno.EADDRINUSE:
        return fail("port", f"cannot listen on {host}:{number}: {error.strerror}", "give another --host or --port")
    name = _asked(host, number)
    found = f"{number} is in use by {' '.join(_listeners(number)) or 'another program'}"
    if name == "llamaslot":
        return warn("port", f"{found}: a llamaslot server", "give another --port for a second server")
    answers = f", which answers as {name}" if name else ""
    return fail("port", found + answers, "give another --port or end that program")


def _asked(host: str, number: int) -> str:
    """Return the name that the HTTP server on a port gives itself; empty if there is none."""
    nearby = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(nearby, number, timeout=_ASK_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().headers.get("Server", "") or "an HTTP server"
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


def _listeners(number: int) -> Iterator[str]:
    """Yield the processes that listen on a port, as far as this user can see them."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return
    listening = (each for each in connections if each.status == "LISTEN" and each.laddr.port == number)
    for pid in sorted({each.pid for each in listening if each.pid is not None}):
        try:
            yield f"{psutil.Process(pid).name()} (process {pid})"
        except psutil.Error:
            continue


def others_can_read(path: Path) -> bool:
    """Return True if users outside the file's group have any access to it or its group may write to it."""
    try:
        return bool(path.stat().st_mode & (stat.S_IRWXO | stat.S_IWGRP)) and os.name == "posix"
    except OSError:
        return False
