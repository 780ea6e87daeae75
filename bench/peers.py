"""Builds llama.cpp's own tools as peers to measure against.

A peer is compiled from the source package of the installed llama-cpp-python and linked to the very library files
that llamaslot loads (the wheel also installs `libllama-common`, which the tools need). Both sides then run the same
machine code for a model, on whatever device the wheel was built for, and a build takes seconds, not minutes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import distribution, version
from pathlib import Path

import llama_cpp
import platformdirs

from bench.client import BenchmarkError
from bench.report import notes

PACKAGE = "llama-cpp-python"
INCLUDES = ("common", "include", "ggml/include", "vendor")


def batched_bench() -> Path:
    """`llama-batched-bench`, built unless the cache has it for exactly these libraries."""
    folders = library_folders()
    key = _key(folders)
    binary = _cache() / f"llama-batched-bench-{key}"
    if not binary.is_file():
        source = _source()
        notes.print("building llama-batched-bench ...")
        unfinished = binary.with_name(f".{binary.name}.{os.getpid()}")
        try:
            _compile(sorted((source / "tools/batched-bench").glob("*.cpp")), source, folders, unfinished)
            unfinished.replace(binary)
        finally:
            unfinished.unlink(missing_ok=True)
    notes.print(f"llama-batched-bench and llamaslot both run {folders[0]}")
    return binary


def library_folders() -> list[Path]:
    """Where the libraries are: the ones that llamaslot loads first, then that of `libllama-common`."""
    loaded = Path(llama_cpp.__file__).parent / "lib"
    for file in distribution(PACKAGE).files or ():
        if file.name.startswith("libllama-common."):
            return [loaded, Path(str(file.locate())).resolve().parent]
    raise BenchmarkError(f"the installed {PACKAGE} has no libllama-common: reinstall it from source")


def _key(folders: list[Path]) -> str:
    """Changes with the libraries' content and place (the binary holds their path)."""
    digest = hashlib.sha256(repr(folders).encode())
    for library in sorted(path for folder in folders for path in folder.glob("lib*") if path.is_file()):
        digest.update(library.name.encode() + library.stat().st_size.to_bytes(8))
        if library.name.startswith(("libllama", "libggml-base")):
            digest.update(library.read_bytes())
    return digest.hexdigest()[:12]


def _cache() -> Path:
    folder = platformdirs.user_cache_path("llamaslot") / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _source() -> Path:
    """llama.cpp's source as it came with the installed llama-cpp-python."""
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


def _compile(files: list[Path], source: Path, folders: list[Path], binary: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BenchmarkError("no C++ compiler found: install one, or name it in the environment variable CXX")
    command = [compiler, "-O2", "-std=c++17", *(f"-I{source / path}" for path in INCLUDES), *map(str, files)]
    for folder in folders:
        command += [f"-L{folder}", f"-Wl,-rpath,{folder}"]
    if sys.platform == "linux":
        command.append("-Wl,--disable-new-dtags")  # the path then also serves the libraries' own dependencies
    command += ["-lllama-common", "-lllama", "-lggml", "-lggml-base", "-o", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{compiler} could not build {binary.name}:\n{done.stderr[-2000:]}")
