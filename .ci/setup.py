"""Everything `make` needs before it can run something: `.venv`, a llama-cpp-python wheel, the project.

Usage: python .ci/setup.py [EXTRA ...]    where EXTRA is an optional dependency group of pyproject.toml

Three steps, each skipped when its result is there already:

1. create `.venv`;
2. find the llama-cpp-python wheel in the cache, or build it (minutes) and put it there;
3. install the wheel, then the project (editable, with the extras), at the versions of `constraints.txt`.

pip keeps built wheels too, but by version alone: after a CPU build it would answer a CUDA build with the
CPU wheel. Here the cache key is everything that the compiled code depends on (`build_key`).

The script uses the standard library only and must stay readable for Python 3.8, so that an old interpreter gets as
far as the line that says what to do. It never touches the network when nothing has changed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "llamaslot-setup.json"

OLDEST_PYTHON = (3, 11)
NEWER_PYTHONS = ("python3.13", "python3.12", "python3.11", "python3.14", "python3")

BUILD_VARIABLES = (
    "CMAKE_ARGS", "CMAKE_GENERATOR", "CMAKE_PREFIX_PATH", "CMAKE_TOOLCHAIN_FILE", "SKBUILD_CMAKE_ARGS",
    "SKBUILD_CMAKE_BUILD_TYPE", "CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDACXX", "CUDAFLAGS",
    "CUDAARCHS", "CUDAHOSTCXX", "CUDA_HOME", "CUDA_PATH", "HIPCXX", "MACOSX_DEPLOYMENT_TARGET",
)  # fmt: skip
LOG_LINES_SHOWN = 25
SECONDS_BETWEEN_LINES = 20


class SetupError(Exception):
    """The set-up cannot go on; the message says why and what to do."""


# --- Python ---------------------------------------------------------------------------------------


def require_python() -> None:
    """Go on under a Python that is new enough: this one, or else a newer one on PATH.

    Raises:
        SetupError: there is none.
    """
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return
    for name in NEWER_PYTHONS:
        path = shutil.which(name)
        if path and _is_new_enough(path):
            os.execv(path, [path, *sys.argv])
    fix = "brew install python" if sys.platform == "darwin" else "sudo apt install python3 python3-venv"
    raise SetupError(
        f"Python {_dotted(OLDEST_PYTHON)} or newer is needed, this is {_dotted(sys.version_info[:3])}: {fix} "
        "(too old there as well: https://www.python.org/downloads), or name one: make PYTHON=/path/to/python3",
    )


def _is_new_enough(python: str) -> bool:
    probe = f"import sys; sys.exit(sys.version_info[:2] < {OLDEST_PYTHON!r})"
    return subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def create_venv() -> None:
    """Make `.venv` with pip in it, unless it is there and works."""
    if VENV_PYTHON.exists() and (VENV / "bin" / "pip").exists():
        return
    if importlib.util.find_spec("ensurepip") is None:
        package = f"python{_dotted(sys.version_info[:2])}-venv"
        raise SetupError(f"this Python cannot create virtual environments: sudo apt install {package}")
    say(f"creating .venv with Python {platform.python_version()}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)


# --- the wheel and its key ------------------------------------------------------------------------


def wanted_version(constraints: str) -> str:
    """The exact version of llama-cpp-python in the text of a constraints file."""
    match = re.search(r"^llama[-_]cpp[-_]python==(\S+)$", constraints, re.MULTILINE)
    if match is None:
        raise SetupError(f"{CONSTRAINTS} has no line llama_cpp_python==VERSION")
    return match.group(1)


def build_key(version: str) -> dict[str, str]:
    """Everything that decides what the compiled wheel contains and where it runs, by name.

    Raises:
        SetupError: there is no C++ compiler.
    """
    key = {name: os.environ[name] for name in BUILD_VARIABLES if os.environ.get(name)}
    if is_amx_broken():
        for name in ("CFLAGS", "CXXFLAGS"):
            key[name] = f"{key.get(name, '')} -U__AMX_INT8__".strip()
    key["version"] = version
    key["platform"] = sysconfig.get_platform()
    key["compiler"] = compiler_identity()
    key["cpu"] = cpu_features()
    if "CUDA" in key.get("CMAKE_ARGS", ""):
        key["nvcc"] = _first_line([*shlex.split(key.get("CUDACXX", "nvcc")), "--version"], pattern="release")
    return key


def digest(key: dict[str, str]) -> str:
    """A short name for a key, the same whatever the order of its entries."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def compiler_identity() -> str:
    """The C++ compiler that CMake will find, as it introduces itself.

    Raises:
        SetupError: there is none, or it does not run (macOS without its command line tools has such a one).
    """
    name = _compiler()
    if name:
        return f"{name}: {_first_line([*shlex.split(name), '--version'])}"
    if os.environ.get("CXX"):
        raise SetupError(f"CXX={os.environ['CXX']} does not run: unset CXX, or name a C++ compiler that does")
    if sys.platform == "darwin":
        raise SetupError("a C++ compiler is needed to build llama.cpp: xcode-select --install")
    raise SetupError(
        "a C++ compiler is needed to build llama.cpp: sudo apt install build-essential "
        "(Fedora: sudo dnf install gcc-c++; Alpine: apk add build-base linux-headers)",
    )


def _compiler() -> str:
    """The command of the C++ compiler that CMake will find; empty if there is none that runs."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((name for name in names if _first_line([*shlex.split(name), "--version"])), "")


def cpu_features() -> str:
    """The instruction sets of this CPU: ggml compiles for exactly these unless CMAKE_ARGS says otherwise."""
    if sys.platform == "darwin":
        names = ["machdep.cpu.brand_string", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
        probe = subprocess.run(["sysctl", "-n", *names], capture_output=True, text=True, check=False)
        return probe.stdout.strip()
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    match = re.search(r"^(?:flags|Features|isa)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return " ".join(sorted(match.group(1).split())) if match else platform.machine()


AMX_PROBE = """
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
int main() {
    syscall(SYS_arch_prctl, 0x1023, 18);  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    alignas(64) unsigned char config[64] = {1}, tile[64] = {};
    config[16] = 64;  // bytes of a row of tile 0
    config[48] = 1;   // its rows
    _tile_loadconfig(config);
    _tile_loadd(0, tile, 64);
}
"""


def is_amx_broken() -> bool:
    """True if code with AMX would crash: llama.cpp would end with SIGILL at its first prompt.

    GCC's `_tile_loadconfig` reads 64 bytes and declares 8, so that the optimizer removes the stores to the others
    (GCC 12 does so; llama.cpp's pull request 26954). A hypervisor may also announce AMX and not provide it.
    """
    compiler = _compiler()
    if "amx_int8" not in cpu_features().split() or not compiler:
        return False
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "probe")
        command = [*shlex.split(compiler), "-O3", "-march=native", "-x", "c++", "-", "-o", program]
        built = subprocess.run(command, input=AMX_PROBE, text=True, capture_output=True, check=False)
        has_run = built.returncode == 0 and Path(program).exists() and subprocess.run([program], check=False)
        return not has_run or has_run.returncode != 0


def _first_line(command: list[str], pattern: str = "") -> str:
    """The first line of a command's output that contains `pattern`; empty if the command fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return ""
    lines = result.stdout.splitlines() if result.returncode == 0 else []
    return next((line.strip() for line in lines if pattern in line), "")


def wheel_cache() -> Path:
    """Where built wheels are kept: LLAMASLOT_WHEEL_CACHE, or a folder of the user's cache directory."""
    if os.environ.get("LLAMASLOT_WHEEL_CACHE"):
        return Path(os.environ["LLAMASLOT_WHEEL_CACHE"]).expanduser().resolve()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "llamaslot" / "wheels"


def get_or_build(source: str, key: dict[str, str], cache: Path, python: Path) -> Path:
    """The wheel of `source` (a requirement or a folder) for `key`, built by `python`'s pip unless it is cached.

    An entry appears in the cache by one rename of a finished folder, so it is whole or absent; of two builds
    of the same key that run at once the first to finish stays.

    Raises:
        SetupError: the build failed; its log stays, and no entry is made.
    """
    entry = cache / digest(key)
    cached = sorted(entry.glob("*.whl"))
    if cached:
        return cached[0]
    cache.mkdir(parents=True, exist_ok=True)
    cmake_args = key.get("CMAKE_ARGS", "none")
    say(f"building {source} with CMAKE_ARGS: {cmake_args}")
    say(f"a CPU build takes 4-6 minutes on 2 cores, CUDA takes longer; it happens once and is kept in {entry}")
    with tempfile.TemporaryDirectory(prefix=f"{entry.name}-building-", dir=cache) as scratch:
        log = Path(f"{scratch}.log")
        finished = Path(scratch) / "entry"
        finished.mkdir()
        command = [str(python), "-m", "pip", "wheel", "--verbose", "--no-cache-dir", "--no-deps"]
        command += ["--no-binary", "llama-cpp-python", "--wheel-dir", str(finished), source]
        variables = {name: key[name] for name in BUILD_VARIABLES if name in key}
        run_showing_progress(command, f"building {Path(source).name}", log, BUILD_FIXES, variables)
        log.rename(finished / "build.log")
        (finished / "key.json").write_text(json.dumps(key, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        try:
            finished.rename(entry)
        except OSError:
            if not any(entry.glob("*.whl")):
                raise
    return sorted(entry.glob("*.whl"))[0]


# --- running pip ----------------------------------------------------------------------------------

INSTALL_FIXES = (
    "  - the package index was not reached: check the network and pip's proxy settings, then try again",
    "  - the disk is full: pip needs about 1 GB in TMPDIR while it builds",
)
BUILD_FIXES = (
    "  - the compiler was killed, or memory ran out: CMAKE_BUILD_PARALLEL_LEVEL=1 make setup",
    "  - no CUDA compiler: install the CUDA toolkit, put nvcc on PATH (or set CUDACXX), or leave CMAKE_ARGS out",
    "  - a compiler too old for C++17: CC=gcc-12 CXX=g++-12 make setup",
    *INSTALL_FIXES,
)
PROGRESS = re.compile(r"\[ *(\d+/\d+|\d+%)\] |(?:Collecting|Downloading) ([A-Za-z][\w.]*(?:-[A-Za-z]\w*)*)")


def run_showing_progress(
    command: list[str], what: str, log: Path, fixes: tuple[str, ...], variables: dict[str, str] | None = None
) -> None:
    """Run a command with its output in `log`, and show on one line how long it has run and how far it is.

    `variables` are environment variables besides our own.

    Raises:
        SetupError: it failed; the message holds the log's last lines, its path, and the usual fixes.
    """
    started = time.monotonic()
    progress = ProgressLine(what)
    with log.open("wb") as sink, log.open(encoding="utf-8", errors="replace") as source:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=str(ROOT),
            env={**os.environ, **(variables or {})},
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                try:
                    process.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    progress.update(time.monotonic() - started, source.read())
        except KeyboardInterrupt:
            _interrupt(process)
            raise
        finally:
            progress.close()
    if process.returncode != 0:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        lines = [*tail, "", f"{what} failed; the whole log is in {log}. The usual reasons:", *fixes]
        raise SetupError("\n".join(lines))
    say(f"{what}: done in {_minutes(time.monotonic() - started)}")


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """End a command and all it has started; it has a moment to tidy up first."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class ProgressLine:
    """A line that is rewritten in place on a terminal, and printed now and then into a file."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._newest = ""
        self._next_print = float(SECONDS_BETWEEN_LINES)

    def update(self, elapsed: float, output: str) -> None:
        """Take in what the command has written since the last call."""
        for step, package in PROGRESS.findall(output):
            self._newest = f", step {step}" if step else f", {package}"
        line = f"llamaslot setup: {self._what}, {_minutes(elapsed)}{self._newest}"
        if sys.stdout.isatty():
            print(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K", end="", flush=True)
        elif elapsed >= self._next_print:
            self._next_print = elapsed + SECONDS_BETWEEN_LINES
            print(line, flush=True)

    def close(self) -> None:
        """Clear the line, so that the next output starts at its beginning."""
        if sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def say(line: str) -> None:
    """One line about what the set-up does."""
    print(f"llamaslot setup: {line}", flush=True)


# --- installing -----------------------------------------------------------------------------------


def read_stamp() -> dict[str, Any]:
    """What the last set-up left in `.venv`; empty if there was none or the checkout has moved since."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if stamp.get("root") == str(ROOT) and VENV_PYTHON.exists() else {}


def wanted_stamp(key: dict[str, str], declared: str, extras: set[str]) -> dict[str, Any]:
    """What the stamp says when `.venv` holds the wheel of `key`, all that is `declared`, and the extras."""
    return {
        "root": str(ROOT),
        "wheel": digest(key),
        "declared": hashlib.sha256(declared.encode()).hexdigest(),
        "extras": sorted(extras),
    }


def install(wheel: Path | None, extras: list[str]) -> None:
    """Put the wheel (if it is not in `.venv` yet) and the project with its extras into `.venv`."""
    log = VENV / "llamaslot-setup.log"
    pip = [str(VENV_PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    if wheel is not None:
        command = [*pip, "--no-deps", "--force-reinstall", str(wheel)]
        run_showing_progress(command, "installing llama-cpp-python", log, INSTALL_FIXES)
    project = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    # Python compiles what it imports, a small part of what is installed.
    command = [*pip, "--no-compile", "--constraint", str(CONSTRAINTS), "--editable", project]
    run_showing_progress(command, "installing llamaslot and what it needs", log, INSTALL_FIXES)


def main(extras: list[str]) -> None:
    """Bring `.venv` to where the project runs with these extras (and with those that it has already)."""
    require_python()
    constraints = CONSTRAINTS.read_text(encoding="utf-8")
    declared = constraints + (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = wanted_version(constraints)
    key = build_key(version)
    stamp = read_stamp()
    wanted = wanted_stamp(key, declared, {*extras, *stamp.get("extras", [])})
    if stamp == wanted:
        return
    create_venv()
    wheel = None
    if stamp.get("wheel") != wanted["wheel"]:
        wheel = get_or_build(f"llama-cpp-python=={version}", key, wheel_cache(), VENV_PYTHON)
    STAMP.unlink(missing_ok=True)
    install(wheel, wanted["extras"])
    STAMP.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main(sys.argv[1:])
    except SetupError as error:
        sys.exit(f"llamaslot setup: {error}")
    except KeyboardInterrupt:
        sys.exit("\nllamaslot setup: interrupted; what was finished is kept")
