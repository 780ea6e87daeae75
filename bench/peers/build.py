"""Build llama.cpp's own tools, to compare llamaslot with.

A tool is compiled from the source package of the installed llama-cpp-python and linked to the very library files
that llamaslot loads (the wheel also installs `libllama-common`, which the tools need). Both sides then run the same
machine code for a model, on whatever device the wheel was built for. llama-server takes 2 to 9
minutes to compile on 2 cores, once: the binary is kept in the user's cache until the installed libraries change.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path

import llama_cpp
import platformdirs

from bench.client import BenchmarkError
from bench.progress import progress
from bench.report import notes

PACKAGE = "llama-cpp-python"
INCLUDES = ("common", "include", "ggml/include", "vendor")
HTTPLIB = (
    "-DCPPHTTPLIB_FORM_URL_ENCODED_PAYLOAD_MAX_LENGTH=1048576",
    "-DCPPHTTPLIB_LISTEN_BACKLOG=512",
    "-DCPPHTTPLIB_REQUEST_URI_MAX_LENGTH=32768",
    "-DCPPHTTPLIB_TCP_NODELAY=1",
)
"""As `vendor/cpp-httplib/CMakeLists.txt` builds it."""
SERVER_FLAGS = (*HTTPLIB, "-DLLAMA_SUBPROCESS")
"""`common/CMakeLists.txt` defines the latter, on which the layout of a class of `libllama-common` depends."""
BUILD_TIMES = {"llama-server": "2 to 9 minutes on 2 cores", "llama-batched-bench": "a minute"}


def batched_bench() -> Path:
    """`llama-batched-bench`, built unless the cache has it for exactly these libraries."""
    return _built("llama-batched-bench", ("tools/batched-bench/*.cpp",), libraries=("llama-common",))


@cache
def llama_server() -> Path:
    """`llama-server` without its web UI, built unless the cache has it for exactly these libraries and flags."""
    binary = _built(
        "llama-server",
        ("tools/server/*.cpp", "vendor/cpp-httplib/httplib.cpp"),
        includes=("tools/server", "tools/mtmd", "."),
        flags=SERVER_FLAGS,
        libraries=("llama-common", "mtmd"),
        has_ui=True,
    )
    _check_same(binary)
    return binary


def has_llama_server() -> bool:
    """Return True if the cache has `llama-server` for exactly these libraries and flags."""
    return (_cache() / f"llama-server-{_key(library_folders(), SERVER_FLAGS)}").is_file()


def vocabulary(name: str) -> Path:
    """A GGUF from llama.cpp's source with a vocabulary and no weights."""
    return llama_cpp_source() / "models" / f"ggml-vocab-{name}.gguf"


def chat_template(name: str) -> Path:
    """A model's chat template from llama.cpp's source."""
    return llama_cpp_source() / "models" / "templates" / f"{name}.jinja"


def _check_same(binary: Path) -> None:
    """Raise `BenchmarkError` if the server's libraries were not built as those that llamaslot loads."""
    own = llama_cpp.llama_print_system_info().decode().strip()
    command = [str(binary), "-m", "no-such-file", "-lv", "4", "--host", "127.0.0.1", "--port", "0"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    [theirs] = re.findall(r"system_info: .*", said.stdout + said.stderr) or ["it does not say how"]
    notes.print(f"{binary.name}: {theirs}")
    if own not in theirs:
        raise BenchmarkError(f"{binary.name} is built otherwise than what llamaslot loads: {theirs}; {own}")


def _built(
    name: str,
    patterns: Sequence[str],
    *,
    includes: Sequence[str] = (),
    flags: Sequence[str] = (),
    libraries: Sequence[str],
    has_ui: bool = False,
) -> Path:
    folders = library_folders()
    binary, without_flags = (_cache() / f"{name}-{_key(folders, each)}" for each in (flags, ()))
    if not binary.is_file():
        source = llama_cpp_source()
        files = sorted(file for pattern in patterns for file in source.glob(pattern))
        if not files and without_flags.is_file():
            # On a machine without a network. What the flags are for, such as child servers, is not measured.
            notes.print(f"{without_flags.name} was built by an earlier version")
            return without_flags
        with tempfile.TemporaryDirectory(dir=_cache()) as work:
            files += [_no_ui(source, Path(work))] if has_ui else []
            paths = [Path(work), *(source / path for path in (*INCLUDES, *includes))]
            objects = _compile(name, files, [*flags, *(f"-I{path}" for path in paths)], Path(work))
            unfinished = Path(work) / name
            _link(objects, folders, libraries, unfinished)
            unfinished.replace(binary)
    notes.print(f"{name} and llamaslot both run {folders[0]}")
    return binary


def library_folders() -> list[Path]:
    """The folders of the libraries: that of the ones that llamaslot loads, then that of `libllama-common`."""
    loaded = Path(llama_cpp.__file__).parent / "lib"
    for file in distribution(PACKAGE).files or ():
        if file.name.startswith("libllama-common."):
            return [loaded, Path(str(file.locate())).resolve().parent]
    raise BenchmarkError(f"the installed {PACKAGE} has no libllama-common: reinstall it from source")


def _key(folders: list[Path], flags: Sequence[str]) -> str:
    """A digest of the libraries' content and path (the binary holds their path), and of the compiler's flags.

    Without flags it must not change: binaries that are brought to machines without a network are named by it.
    """
    digest = hashlib.sha256(repr((folders, flags) if flags else folders).encode())
    for library in sorted(path for folder in folders for path in folder.glob("lib*") if path.is_file()):
        digest.update(library.name.encode() + library.stat().st_size.to_bytes(8))
        if library.name.startswith(("libllama", "libggml-base")):
            digest.update(library.read_bytes())
    return digest.hexdigest()[:12]


def _cache() -> Path:
    folder = platformdirs.user_cache_path("llamaslot") / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def llama_cpp_source() -> Path:
    """The folder of llama.cpp's source, as it came with the installed llama-cpp-python."""
    release = version(PACKAGE)
    source = _cache() / f"llama.cpp-{release}"
    if source.is_dir():
        return source
    download = _cache() / f"download-{os.getpid()}"
    notes.print(f"fetching the source of {PACKAGE} {release} ...")
    try:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            PACKAGE,
            "--dest",
            str(download),
        ]
        if subprocess.run([*command, f"{PACKAGE}=={release}"], stdout=sys.stderr, check=False).returncode != 0:
            raise BenchmarkError(f"pip could not download the source of {PACKAGE} {release}")
        (archive,) = download.glob("*.tar.gz")
        with tarfile.open(archive) as package:
            package.extractall(download, filter="data")
        (unpacked,) = download.glob("*/vendor/llama.cpp")
        unpacked.replace(source)
    finally:
        shutil.rmtree(download, ignore_errors=True)
    return source


def _no_ui(source: Path, folder: Path) -> Path:
    """Write the header and the source file that stand for an absent web UI; return the latter."""
    values = {"N_ASSETS": "0", "USE_GZIP": "false"}
    for template in ("ui.h.in", "ui.cpp.in"):
        (found,) = source.glob(f"tools/ui/**/{template}")
        text = re.sub(r"#cmakedefine .*\n", "", found.read_text())
        text = re.sub(r"@(\w+)@", lambda match: values.get(match[1], ""), text)
        (folder / template.removesuffix(".in")).write_text(text)
    return folder / "ui.cpp"


def _compile(name: str, files: Sequence[Path], flags: Sequence[str], folder: Path) -> list[Path]:
    """Compile each file to an object file, as many at a time as there are cores."""
    objects = [folder / f"{i}.o" for i in range(len(files))]
    commands = [
        [_compiler(), "-O2", "-std=c++17", "-w", "-c", str(file), "-o", str(to), *flags]
        for file, to in zip(files, objects, strict=True)
    ]
    notes.print(f"building {name} from {len(files)} files: {BUILD_TIMES[name]}, once")
    shown = progress(f"building {name}:", len(files), interval_s=15)
    with shown as advance, ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in as_completed([pool.submit(_run, command) for command in commands]):
            done.result()
            advance()
    return objects


def _link(objects: Sequence[Path], folders: Sequence[Path], libraries: Sequence[str], binary: Path) -> None:
    command = [_compiler(), *map(str, objects)]
    for folder in folders:
        command += [f"-L{folder}", f"-Wl,-rpath,{folder}"]
    if sys.platform == "linux":
        command.append("-Wl,--disable-new-dtags")  # the path then also serves the libraries' own dependencies
    names = (*libraries, "llama", "ggml", "ggml-base")
    _run([*command, *(f"-l{library}" for library in names), "-pthread", "-o", str(binary)])


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BenchmarkError("no C++ compiler found: install one, or name it in the environment variable CXX")
    return compiler


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{' '.join(command[:8])} ... failed:\n{done.stderr[-2000:]}")
