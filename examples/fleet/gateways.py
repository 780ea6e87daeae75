"""The gateways that `fleet.py` can put in front of the workers: their command lines and nginx's configuration."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

TEMPLATE = Path(__file__).with_name("nginx.conf.in")
TIMEOUT_S = 5.0
HEALTH_INTERVAL_S = 1
HEALTH_FAILURES = 2
"""smg checks the health of each worker at this interval; after so many failures in a row it sends no more to it."""


class FleetError(Exception):
    """A fleet that cannot start or do what it was asked; the message says why."""


@dataclass
class Settings:
    """Settings of a gateway: its port, workers, keys and program."""

    folder: Path
    port: int
    workers: list[str]
    """URLs of the workers in their order."""
    worker_key: str = ""
    """API key of the gateway at the workers; empty without keys."""
    client_keys: list[str] = field(default_factory=list)
    shares_prefixes: bool = False
    """True if workers share prefixes (`--cache-remote`)."""
    program: str = ""
    """Path of smg or nginx; empty to look for it."""
    flags: list[str] = field(default_factory=list)
    """Further flags of the gateway; of a flag that is given twice, the last one counts."""


class Gateway(Protocol):
    """A gateway's process."""

    drain_delay_s: float
    """Seconds that a worker should still serve requests after it has become unhealthy."""

    def command(self) -> list[str]:
        """The command line that starts it in the foreground. Raises `FleetError`."""

    def routes_to(self, worker: int) -> bool:
        """True if the gateway considers a worker, by its index, healthy."""


class Smg:
    """Shepherd gateway: routes by cached prefix, or round robin, to the workers whose `/health` is a 200."""

    drain_delay_s = HEALTH_INTERVAL_S * (HEALTH_FAILURES + 1.0)

    def __init__(self, settings: Settings, policy: str) -> None:
        self._settings = settings
        self._policy = policy

    def command(self) -> list[str]:
        """The command line of `smg launch`; its metrics are on the next port."""
        own = self._settings
        command = [found("smg", own.program, "pip install smg"), "launch", "--host", "127.0.0.1"]
        command += ["--port", str(own.port), "--worker-urls", *own.workers, "--policy", self._policy]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(own.port + 1)]
        command += ["--health-check-interval-secs", str(HEALTH_INTERVAL_S)]
        command += ["--health-failure-threshold", str(HEALTH_FAILURES), "--health-success-threshold", "1"]
        # A worker that was killed gets requests again soon after it is back; by default only after a minute.
        command += ["--cb-timeout-duration-secs", "5"]
        # Prompts are compared as text: smg cannot read a GGUF's tokenizer.
        command += ["--disable-tokenizer-autoload", "--log-level", "warn", "--shutdown-grace-period-secs", "5"]
        if not own.shares_prefixes:
            # By default smg moves a conversation from a worker with 1.5 times the mean load, or with 8 requests
            # that wait. Then another one computes all of it again. No worker can have more than all of the load, or
            # so many requests: nothing moves.
            command += ["--balance-rel-threshold", str(max(len(own.workers), 2))]
            command += ["--worker-overload-waiting-requests", "1000000", "--worker-overload-token-usage", "1"]
        if own.worker_key:
            command += ["--api-key", own.worker_key]
            for number, key in enumerate(own.client_keys, 1):
                command += ["--tenant-api-key", f"client{number}:{key}"]
        return [*command, *own.flags]

    def routes_to(self, worker: int) -> bool:
        """True if smg lists the worker as healthy."""
        own = self._settings
        answer = get(f"http://127.0.0.1:{own.port}/workers", own.worker_key)
        workers = answer.get("workers", []) if answer else []
        return any(each["url"] == own.workers[worker] and each["is_healthy"] for each in workers)


class Nginx:
    """nginx with consistent hashing over a session header.

    It has no health checks of its own: a request that a worker refuses goes to the next one.
    """

    # So a worker may refuse at once. To take it out of the configuration before would lose requests: a reload
    # closes connections on which clients may just be sending.
    drain_delay_s = 0.0

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def command(self) -> list[str]:
        """The command line of nginx in the foreground, with all its files in the fleet's folder."""
        own = self._settings
        configuration = own.folder / "nginx.conf"
        configuration.write_text(self._configuration())
        program = found("nginx", own.program, "apt-get install nginx, and stop its service")
        command = [program, "-p", str(own.folder), "-c", str(configuration)]
        return [*command, "-e", str(own.folder / "nginx.log"), "-g", "daemon off;", *own.flags]

    def routes_to(self, worker: int) -> bool:
        """True: nginx checks no health, and finds out with the next request."""
        return True

    def _configuration(self) -> str:
        own = self._settings
        servers = [f"server {url.removeprefix('http://')} max_fails=0;" for url in own.workers]
        # Its worker processes would else be another user's, who may not write to this folder.
        user = f"user {pwd.getpwuid(0).pw_name};" if os.geteuid() == 0 else ""
        text = TEMPLATE.read_text()
        for name, value in (("USER", user), ("PORT", str(own.port)), ("WORKERS", "\n        ".join(servers))):
            text = text.replace(f"@{name}@", value)
        return text


GATEWAYS = ("smg", "nginx", "roundrobin")


def gateway(name: str, settings: Settings) -> Gateway:
    """Return a gateway by its name."""
    if name == "nginx":
        return Nginx(settings)
    return Smg(settings, "round_robin" if name == "roundrobin" else "cache_aware")


def found(name: str, given: str, how: str) -> str:
    """Return the path of a program: the given one, one beside this Python, or one of PATH. Raises `FleetError`."""
    beside = Path(sys.executable).with_name(name)
    path = given or (str(beside) if beside.exists() else shutil.which(name) or shutil.which(f"/usr/sbin/{name}"))
    if not path or not Path(path).exists():
        raise FleetError(f"{path or name} was not found: {how}, or name it with --gateway-program")
    return path


def get(url: str, key: str = "", *, is_json: bool = True) -> Any:
    """Return what is at a URL, as JSON or as text; None if the status is not 200."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            body = reply.read().decode()
            return json.loads(body) if is_json else body
    except (OSError, ValueError):
        return None
