"""Trial process: compiles each grammar of a request in a fork of itself, with limits, before the engine does.

    prompt worker --- socket ---> trial process          has the tokens and llguidance, one thread
         |                           |-- fork ---> trial of a grammar, with limits of time, memory and stack
         +------- socket of the trial ------+

llguidance cannot be interrupted, takes as much memory as it needs, and recurses: a chain of 4,000 rules overflows
the stack. In a fork of a small process, all of that only ends the fork. A fork costs some milliseconds, and nothing
has to be restarted afterwards. Forking is safe there, because the process has one thread.

The stack of a trial is an eighth of the one that the engine compiles with, so what passes has a margin there.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from llamaslot.base.commands import Constraint
from llamaslot.base.errors import UnavailableError
from llamaslot.base.threads import GRAMMAR_STACK_BYTES
from llamaslot.text.grammars.compiling import ADVICE, LocalTrial, TrialResult, Vocabulary

MAX_CPU_S = 1.5
"""CPU time of a trial. The calls of 200 tools with five parameters take 0.3 s, an object of 4,000
properties 0.8 s.
"""
MAX_BYTES = 256 * 2**20
"""Memory of a trial. The calls of 200 tools take 20 MB."""
_STACK_BYTES = GRAMMAR_STACK_BYTES // 8
_MAX_WALL_S = 20.0
"""Wall time after which a trial is killed, because the machine gives it no CPU time."""
_QUICK_S = 0.25
"""Time after which a trial continues with low priority."""
_SLOW_NICENESS = 15
_START_S = 60.0
_CAUSES: dict[int, str] = {
    signal.SIGPROF: f"it takes more than {MAX_CPU_S:g} s to compile",
    signal.SIGABRT: f"it takes more than {MAX_BYTES >> 20} MB to compile",
    signal.SIGSEGV: "its rules, references or brackets are nested too deeply",
    signal.SIGBUS: "its rules, references or brackets are nested too deeply",
}


class TrialProcess:
    """Tries grammars in a process that is started for the first one; on any thread.

    `tokens` gives the texts of the model's tokens, and which of them end a reply; it is called once, on the thread
    that starts the process.
    """

    def __init__(self, tokens: Callable[[], tuple[Sequence[bytes], Sequence[int]]]) -> None:
        self._tokens = tokens
        self._encoded: bytes | None = None
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, constraint: Constraint) -> TrialResult:
        """Try a grammar.

        Raises `InvalidRequestError` for one that takes too much to compile, and `UnavailableError` if no process
        can be started for it.
        """
        param, grammar = constraint.param, constraint.grammar.encode()
        # Try again in a new process if the first one had ended, such as when memory ran out.
        result = self._tried(grammar) or self._tried(grammar)
        if result is None:
            raise UnavailableError(f"no process can be started to check '{param}'; try later", param=param)
        if isinstance(result, TrialResult):
            return result
        cause = _CAUSES.get(result)
        if cause is None:
            message = f"'{param}' was not checked in time, since the server is busy; try later"
            raise UnavailableError(message, param=param, retry_after=1)
        return TrialResult(f"{cause}; {ADVICE}")

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._disconnect()

    def _tried(self, grammar: bytes) -> TrialResult | int | None:
        """Try a grammar; None if the process, or its fork, could not be started or was ended."""
        try:
            ours, theirs = socket.socketpair()
            with ours:
                with theirs, self._lock:
                    try:
                        control = self._connected()
                        socket.send_fds(control, [b"t"], [theirs.fileno()])
                    except OSError:
                        # Also if only a part of the tokens was sent: the next message would be taken for the rest.
                        self._disconnect()
                        raise
                try:
                    return _answer(ours, grammar)
                except ConnectionError:
                    # It has ended.
                    with self._lock:
                        if self._socket is control:
                            self._disconnect()
                    return None
        except OSError:
            return None

    def _connected(self) -> socket.socket:
        """Return the socket of the running process; raises `OSError`."""
        if self._socket is not None and self._process is not None and self._process.poll() is None:
            return self._socket
        self._disconnect()
        if self._encoded is None:
            self._encoded = msgspec.msgpack.encode(self._tokens())
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # An arena for the thread would reserve address space, which counts against the limit.
                    env={**os.environ, "MALLOC_ARENA_MAX": "1"},
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:
                ours.close()
                raise
        self._socket = ours
        ours.settimeout(_START_S)
        ours.sendall(len(self._encoded).to_bytes(4, "little") + self._encoded)
        return ours

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None


def _answer(trial: socket.socket, grammar: bytes) -> TrialResult | int | None:
    """Send a grammar to its trial, and return the result, or the signal that ended the trial.

    A trial that takes long goes on with low priority.
    """
    trial.settimeout(_START_S)
    pid = int.from_bytes(_received(trial, 4), "little")
    if not pid:
        return None
    trial.settimeout(_QUICK_S)
    try:
        trial.sendall(grammar)
        trial.shutdown(socket.SHUT_WR)
    except OSError:
        # It has ended already.
        pass
    end = time.monotonic() + _MAX_WALL_S
    data = b""
    while True:
        try:
            part = trial.recv(2**16)
        except TimeoutError:
            with contextlib.suppress(OSError):
                if time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)
                os.setpriority(os.PRIO_PROCESS, pid, _SLOW_NICENESS)
            trial.settimeout(_MAX_WALL_S / 4)
            continue
        if not part:
            break
        data += part
    if len(data) <= 1:
        return data[0] if data else None
    return msgspec.msgpack.decode(data, type=TrialResult)


def _received(source: socket.socket, n_bytes: int) -> bytes:
    """Return exactly that many bytes; raises `OSError` at the end of the stream."""
    data = bytearray()
    while len(data) < n_bytes:
        part = source.recv(min(n_bytes - len(data), 2**20))
        if not part:
            raise ConnectionError
        data += part
    return bytes(data)


def _run_trial(trial: socket.socket, local: LocalTrial) -> NoReturn:
    """Try the grammar that the socket gives, in the fork."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    n_virtual, n_resident = _memory()
    if n_virtual:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        # A lower limit, such as that of `ulimit -v`, cannot be raised.
        most = n_virtual + MAX_BYTES if hard == resource.RLIM_INFINITY else min(n_virtual + MAX_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # llguidance runs on the thread below; a handler of Python's would wait for it.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # An overflow is reported to the client, so its message need not go to the log.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)

    def run() -> None:
        grammar = bytearray()
        while part := trial.recv(2**20):
            grammar += part
        try:
            result = local(Constraint(grammar.decode(), ""))
        except MemoryError:
            os.abort()
        result = msgspec.structs.replace(result, n_bytes=max(0, _memory()[1] - n_resident))
        trial.sendall(msgspec.msgpack.encode(result))
        os._exit(0)

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    # Reached only after an exception, without a result.
    os._exit(1)


def _memory() -> tuple[int, int]:
    """Return the bytes of address space and of memory that this process has; zeros where that is not known."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = [int(number) * resource.getpagesize() for number in file.read().split()]
    except OSError:
        return 0, 0
    return pages[0], pages[1]


def _serve(control: socket.socket, local: LocalTrial) -> None:
    """Fork a trial for each socket that arrives, and tell its client how it ended."""
    woken, waker = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                with running.pop(pid) as trial, contextlib.suppress(OSError):
                    if os.WIFSIGNALED(status):
                        # One byte, where a result has more.
                        trial.sendall(bytes([os.WTERMSIG(status)]))
        if control.fileno() in readable:
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                break
            for fd in fds:
                trial = socket.socket(fileno=fd)
                # Created for the first trial only: a second of work at the start would slow down the first
                # requests.
                local.create_tokenizer()
                try:
                    pid = os.fork()
                except OSError:
                    with trial, contextlib.suppress(OSError):
                        trial.sendall(bytes(4))
                    continue
                if not pid:
                    signal.set_wakeup_fd(-1)
                    control.close()
                    # The clients of other trials wait for the end of their streams.
                    for each in running.values():
                        each.close()
                    _run_trial(trial, local)
                running[pid] = trial
                with contextlib.suppress(OSError):
                    trial.sendall(pid.to_bytes(4, "little"))
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Serve until the other side closes the socket, or its process ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        size = int.from_bytes(_received(control, 4), "little")
        encoded = _received(control, size)
    except OSError:
        return
    tokens, eog = msgspec.msgpack.decode(encoded, type=tuple[list[bytes], list[int]])
    local = LocalTrial(Vocabulary(tokens, eog), time.thread_time)
    _serve(control, local)


if __name__ == "__main__":
    main()
