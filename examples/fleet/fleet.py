"""Several llamaslot workers behind a gateway on one machine: `python examples/fleet/fleet.py`.

Needs llamaslot and a gateway: smg (`pip install smg`) or nginx; nothing else. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import shlex
import socket
import sys
import time
from pathlib import Path

from children import SUPERVISOR, Children, end_left_over, running
from gateways import GATEWAYS, FleetError, Settings, gateway
from supervisor import END_TIMEOUT_S, POLL_S, Child, Fleet, say

STATE = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "llamaslot-fleet"
SOCKET = "fleet.sock"
CHILDREN = "children.json"
"""The processes that the supervisor has started."""
REMOTE_KEY_FLAG, REMOTE_KEY_VARIABLE = "--cache-remote-key-file", "LLAMASLOT_CACHE_REMOTE_KEY"
MAX_SOCKET_PATH = 100
"""Bytes that the name of a Unix socket may have, by the system with the lowest limit."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="fleet.py",
        description="Several llamaslot workers behind a gateway on one machine.",
        epilog="Flags after -- go to every worker, such as: fleet.py -- -np 8 -c 32768",
    )
    result.add_argument("--dir", type=Path, default=STATE, metavar="DIR", help=f"folder for everything ({STATE})")
    commands = result.add_subparsers(dest="do", metavar="COMMAND")
    up = commands.add_parser("up", help="run workers and gateway until a signal or `down` (the default command)")
    up.add_argument("-m", "--model", default="demo", help="GGUF file or name, as for llamaslot serve")
    up.add_argument("--gateway", choices=GATEWAYS, default="smg", help="smg routes by cached prefix (default)")
    up.add_argument("--gateway-program", default="", metavar="FILE", help="smg or nginx, if it is not in PATH")
    text = 'more flags for it, such as --gateway-flags="--worker-warmup-secs 0"'
    up.add_argument("--gateway-flags", type=shlex.split, default=[], metavar="FLAGS", help=text)
    up.add_argument("--workers", type=int, default=3, metavar="N", help="how many (default: 3)")
    up.add_argument("--port", type=int, default=8080, help="the gateway's port, 0 for a free one (default: 8080)")
    text = "the first worker's port; the others have the next ones (default: free ones)"
    up.add_argument("--worker-port", type=int, default=0, metavar="PORT", help=text)
    up.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys of clients, one a line")
    text = "leave a worker that ended by itself, instead of starting it again"
    up.add_argument("--no-restart", dest="restart", action="store_false", help=text)
    text = "where workers share prefixes (llamaslot's --cache-remote)"
    up.add_argument("--cache-remote", default="", metavar="URL", help=text)
    status = commands.add_parser("status", help="print state, address and process id of gateway and workers")
    status.add_argument("--json", action="store_true", help="as JSON")
    for name, text in (
        ("drain", "end a worker once its requests have ended; the others take its conversations over"),
        ("start", "start a worker that was drained"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("worker", type=int, metavar="N", help="its number, from 1")
    commands.add_parser("rolling-restart", help="drain and start the workers one after the other")
    commands.add_parser("down", help="end all")
    return result


def main(argv: list[str]) -> int:
    """Run one command; the exit status."""
    place = argv.index("--") if "--" in argv else len(argv)
    own, worker_flags = argv[:place], argv[place + 1 :]
    options = parser().parse_args(own)
    if options.do is None:
        options = parser().parse_args([*own, "up"])
    try:
        if len(os.fsencode(options.dir.absolute() / SOCKET)) > MAX_SOCKET_PATH:
            raise FleetError("the path of --dir is too long for a socket in it")
        if options.do == "up":
            asyncio.run(up(options, worker_flags))
        else:
            ask(options)
    except FleetError as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 1
    return 0


async def up(options: argparse.Namespace, worker_flags: list[str]) -> None:
    """Run the fleet. Raises `FleetError`."""
    folder = options.dir.absolute()
    if not 1 <= options.workers <= 1000:
        raise FleetError("--workers must be 1 to 1000")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    control = folder / SOCKET
    if is_served(control):
        raise FleetError(f"a fleet already runs in {folder}: choose another --dir, or end it with `down`")
    if SUPERVISOR in running(folder / CHILDREN):
        # It would remove the socket of the new one.
        raise FleetError(f"the fleet in {folder} is still ending: try again, or choose another --dir")
    end_left_over(folder / CHILDREN, END_TIMEOUT_S, say)
    control.unlink(missing_ok=True)
    port, ports = ports_of(options)
    urls = [f"http://127.0.0.1:{each}" for each in ports]
    settings = Settings(folder, port, urls, program=options.gateway_program, flags=options.gateway_flags)
    settings.shares_prefixes = bool(options.cache_remote)
    if options.api_key_file is not None:
        read_keys(options.api_key_file, settings)
    routes = gateway(options.gateway, settings)
    # Says so at once if the gateway is missing, not after the models are loaded.
    routes.command()
    for each in (port, *ports):
        check_free(each)
    flags = ["-m", options.model, "--metrics", "--owned-by", "vllm", "--drain-delay", str(routes.drain_delay_s)]
    if options.cache_remote:
        flags += ["--cache-remote", options.cache_remote]
        if REMOTE_KEY_FLAG not in worker_flags and REMOTE_KEY_VARIABLE not in os.environ:
            flags += [REMOTE_KEY_FLAG, str(remote_key(folder))]
    if settings.worker_key:
        flags += ["--api-key-file", str(folder / "keys")]
    flags += worker_flags
    children = Children(folder / CHILDREN)
    workers = [
        worker(folder, number, each, flags, children, restarts=options.restart)
        for number, each in enumerate(ports, 1)
    ]
    front = Child("gateway", routes.command, f"http://127.0.0.1:{port}", folder / "gateway.log", children)
    await Fleet(workers, front, routes, control).run()


def worker(folder: Path, number: int, port: int, flags: list[str], children: Children, *, restarts: bool) -> Child:
    """Return a worker with a disk tier of its own, which makes it warm after a restart."""
    place = ["--host", "127.0.0.1", "--port", str(port), "--cache-disk", str(folder / f"disk-{number}")]
    command = [sys.executable, "-m", "llamaslot.cli.main", "serve", *place, *flags]
    log = folder / f"worker-{number}.log"
    return Child(f"worker {number}", lambda: command, f"http://127.0.0.1:{port}", log, children, restarts)


def remote_key(folder: Path) -> Path:
    """Return the file with the secret of the remote tier; it stays, so that later fleets can read the store."""
    file = folder / "remote-key"
    if not file.exists():
        write_secret(file, secrets.token_hex(32) + "\n")
    return file


def write_secret(file: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)


def read_keys(file: Path, settings: Settings) -> None:
    """Read the clients' keys, make one for the gateway, write the workers' file of keys. Raises `FleetError`."""
    try:
        lines = file.read_text().split("\n")
    except OSError as error:
        raise FleetError(f"--api-key-file {file}: {error.strerror}") from error
    settings.client_keys = [line.strip() for line in lines if line.strip()]
    if not settings.client_keys:
        raise FleetError(f"--api-key-file {file} has no key")
    settings.worker_key = secrets.token_hex(32)
    lines = [f"{settings.worker_key} admin", *(f"{key} user" for key in settings.client_keys)]
    write_secret(settings.folder / "keys", "\n".join(lines) + "\n")


def ports_of(options: argparse.Namespace) -> tuple[int, list[int]]:
    """Return the gateway's port, above which another one is free for its metrics, and those of the workers."""
    found = free_ports(2 + options.workers)
    first = options.worker_port or found[2]
    return options.port or found[0], list(range(first, first + options.workers))


def check_free(port: int) -> None:
    """Raise `FleetError` if a port is in use: whatever answers there would be taken for what is to be started."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise FleetError(f"port {port} cannot be used: {getattr(error, 'strerror', None) or error}") from error


def free_ports(n: int) -> range:
    """Return `n` free ports in a row, below those that Linux (32768) and macOS (49152) give to connections.

    A worker takes its port only after its model is loaded, and one of a connection could be taken by then.
    """
    for first in random.sample(range(20_000, 32_000 - n), 100):
        try:
            for port in range(first, first + n):
                check_free(port)
        except FleetError:
            continue
        return range(first, first + n)
    raise FleetError("no free ports were found")


def is_served(control: Path) -> bool:
    """Return True if a supervisor answers at a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(control)) == 0


def ask(options: argparse.Namespace) -> None:
    """Send a command to the running fleet, and print its answers. Raises `FleetError`."""
    path = options.dir.absolute() / SOCKET
    with socket.socket(socket.AF_UNIX) as control:
        if control.connect_ex(str(path)) != 0:
            if options.do == "down" and end_left_over(path.with_name(CHILDREN), END_TIMEOUT_S, say):
                path.unlink(missing_ok=True)
                return
            raise FleetError(f"no fleet runs in {options.dir}")
        asked = {"do": options.do, "worker": getattr(options, "worker", 0)}
        control.sendall(json.dumps(asked).encode() + b"\n")
        for line in control.makefile():
            answer = json.loads(line)
            if "error" in answer:
                raise FleetError(answer["error"])
            if "workers" in answer:
                show(answer, as_json=options.json)
            elif "line" in answer:
                print(answer["line"], flush=True)
    if options.do == "down":
        deadline = time.monotonic() + END_TIMEOUT_S
        while path.exists():
            if time.monotonic() > deadline:
                raise FleetError(f"it has not ended after {END_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)


def show(status: dict, *, as_json: bool) -> None:
    """Print the state of gateway and workers."""
    if as_json:
        print(json.dumps(status))
        return
    rows = [{"name": "gateway", **status["gateway"]}, *status["workers"]]
    for each in rows:
        print(f"{each['name']:10} {each['state']:10} {each['url']:28} pid {each['pid'] or '-'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
