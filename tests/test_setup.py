"""The set-up that `make` does first: which wheel it takes, when it builds, what it says when it cannot.

Builds run through pip on a tiny package whose wheel records the CMAKE_ARGS it was built with, without any network.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / ".ci" / "setup.py"

TINY_BACKEND = """
import os, pathlib, time, zipfile

INFO = "tiny-1.dist-info"
FILES = {
    f"{INFO}/METADATA": "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\\nGenerator: tiny\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    f"{INFO}/RECORD": "",
}

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    for name, text in FILES.items():
        path = pathlib.Path(directory, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return INFO

def build_wheel(directory, config_settings=None, metadata_directory=None):
    cmake_args = os.environ.get("CMAKE_ARGS", "")
    with open("builds.log", "a") as log:
        log.write(cmake_args + "\\n")
    if "endless" in cmake_args:
        pathlib.Path("pid.part").write_text(str(os.getpid()))
        pathlib.Path("pid.part").rename("pid")
        time.sleep(120)
    if "broken" in cmake_args:
        raise SystemExit("tiny.cpp:7: error: no such backend")
    with zipfile.ZipFile(pathlib.Path(directory, "tiny-1-py3-none-any.whl"), "w") as wheel:
        for name, text in {**FILES, "tiny_cmake_args.txt": cmake_args}.items():
            wheel.writestr(name, text)
    return "tiny-1-py3-none-any.whl"
"""
TINY_PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def load_script(path: Path = SCRIPT) -> ModuleType:
    spec = importlib.util.spec_from_file_location("llamaslot_setup", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load_script()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No build setting of whoever runs the tests, no package index, and no outer make."""
    for name in (*setup.BUILD_VARIABLES, "ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "LLAMASLOT_WHEEL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    source = tmp_path / "tiny"
    source.mkdir()
    (source / "pyproject.toml").write_text(TINY_PYPROJECT)
    (source / "backend.py").write_text(TINY_BACKEND)
    return source


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def get_tiny(source: Path, cache: Path) -> Path:
    wheel = setup.get_or_build(str(source), setup.build_key("1"), cache, Path(sys.executable))
    assert isinstance(wheel, Path)
    return wheel


def cmake_args_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return archive.read("tiny_cmake_args.txt").decode()


def builds_of(source: Path) -> list[str]:
    return (source / "builds.log").read_text().splitlines()


# --- the key


def test_the_same_build_has_the_same_key() -> None:
    assert setup.digest(setup.build_key("1")) == setup.digest(setup.build_key("1"))


@pytest.mark.slow
def test_a_key_names_everything_the_compiled_code_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [setup.digest(setup.build_key("1")), setup.digest(setup.build_key("2"))]
    for name, value in {
        "CMAKE_ARGS": "-DGGML_CUDA=on",
        "CFLAGS": "-O1",
        "MACOSX_DEPLOYMENT_TARGET": "14.0",
    }.items():
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            digests.append(setup.digest(setup.build_key("1")))
    for version in ("12.2", "13.1"):
        monkeypatch.setenv("CXX", str(write_program(tmp_path / "c++", f"echo 'c++ {version}'; echo more")))
        digests.append(setup.digest(setup.build_key("1")))
    monkeypatch.setattr(setup, "cpu_features", lambda: "avx2 avx512f")
    digests.append(setup.digest(setup.build_key("1")))
    assert len(set(digests)) == len(digests)


@pytest.mark.slow
def test_a_cuda_key_names_the_cuda_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = write_program(tmp_path / "nvcc", "echo 'nvcc: NVIDIA (R)'; echo 'Cuda tools, release 12.4, V12.4.131'")
    monkeypatch.setenv("CUDACXX", str(nvcc))
    assert "nvcc" not in setup.build_key("1")
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert setup.build_key("1")["nvcc"] == "Cuda tools, release 12.4, V12.4.131"


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux tells CPU features in /proc/cpuinfo")
def test_cpu_features_are_those_of_this_machine() -> None:
    features = setup.cpu_features().split()
    assert features == sorted(features)
    assert set(features) <= set(Path("/proc/cpuinfo").read_text().split())


@pytest.mark.parametrize(
    ("features", "probe", "expected"),
    [
        ("avx2 avx512_vnni", "kill -ILL $$", "-O1"),
        ("amx_int8 avx2", "exit 0", "-O1"),
        ("amx_int8 avx2", "kill -ILL $$", "-O1 -U__AMX_INT8__"),
        ("amx_int8 avx2", None, "-O1 -U__AMX_INT8__"),
    ],
    ids=["no AMX", "it works", "it crashes", "it does not compile"],
)
def test_amx_is_left_out_where_it_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: str, probe: str | None, expected: str
) -> None:
    result = tmp_path / "probe"
    if probe is not None:
        write_program(result, probe)
    compiler = f"""
        [ "$1" = --version ] && {{ echo 'c++ 12'; exit 0; }}
        for output in "$@"; do true; done
        cp {result} "$output" """
    monkeypatch.setenv("CXX", str(write_program(tmp_path / "bin" / "c++", compiler)))
    monkeypatch.setattr(setup, "cpu_features", lambda: features)
    for name in ("CFLAGS", "CXXFLAGS"):
        monkeypatch.setenv(name, "-O1")
    key = setup.build_key("1")
    assert {key[name] for name in ("CFLAGS", "CXXFLAGS")} == {expected}


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux tells CPU features in /proc/cpuinfo")
def test_the_probe_compiles_where_the_cpu_has_amx(tmp_path: Path) -> None:
    compiler = setup._compiler()
    if "clang" in setup.compiler_identity():
        pytest.skip("GCC only")
    source = tmp_path / "probe.cpp"
    source.write_text(setup.AMX_PROBE)
    command = [*compiler.split(), "-O3", "-mamx-tile", "-mamx-int8", str(source), "-o", str(tmp_path / "probe")]
    if "x86_64" in setup.sysconfig.get_platform():
        assert subprocess.run(command, check=False).returncode == 0


# --- the wheel cache


@pytest.mark.slow
def test_a_wheel_is_built_once_and_rebuilt_when_cmake_args_change(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "wheels"
    cpu = get_tiny(tiny, cache)
    assert get_tiny(tiny, cache) == cpu
    assert builds_of(tiny) == [""]

    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    cuda = get_tiny(tiny, cache)
    assert cmake_args_of(cuda) == "-DGGML_CUDA=on"
    assert json.loads((cuda.parent / "key.json").read_text())["CMAKE_ARGS"] == "-DGGML_CUDA=on"

    monkeypatch.delenv("CMAKE_ARGS")
    assert get_tiny(tiny, cache) == cpu
    assert cmake_args_of(cpu) == ""
    assert builds_of(tiny) == ["", "-DGGML_CUDA=on"]


@pytest.mark.slow
def test_a_failed_build_leaves_no_entry_and_says_why(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "wheels"
    monkeypatch.setenv("CMAKE_ARGS", "-Dbroken=on")
    with pytest.raises(setup.SetupError) as failure:
        get_tiny(tiny, cache)
    assert list(cache.rglob("*.whl")) == []
    [log] = cache.iterdir()
    assert "tiny.cpp:7: error: no such backend" in log.read_text()
    for part in ("tiny.cpp:7: error: no such backend", str(log), "CMAKE_BUILD_PARALLEL_LEVEL=1 make setup"):
        assert part in str(failure.value)
    with pytest.raises(setup.SetupError):
        get_tiny(tiny, cache)
    assert builds_of(tiny) == ["-Dbroken=on", "-Dbroken=on"]


@pytest.mark.slow
def test_builds_of_one_key_at_once_leave_one_whole_entry(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "wheels"
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: get_tiny(tiny, cache), range(2))
    assert first == second
    assert cmake_args_of(first) == ""
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [first.parent.name]
    assert sorted(path.name for path in first.parent.iterdir()) == ["build.log", "key.json", first.name]


@pytest.mark.slow
def test_an_interrupted_build_ends_what_it_started_and_leaves_no_entry(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "wheels"
    code = [
        "import pathlib, runpy, signal, sys",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        f"script = runpy.run_path({str(SCRIPT)!r})",
        f"source, cache = {str(tiny)!r}, pathlib.Path({str(cache)!r})",
        "script['get_or_build'](source, script['build_key']('1'), cache, pathlib.Path(sys.executable))",
    ]
    environment = {**os.environ, "CMAKE_ARGS": "-Dendless=on"}
    with subprocess.Popen([sys.executable, "-c", "\n".join(code)], env=environment, stderr=subprocess.PIPE) as run:
        assert wait_until((tiny / "pid").exists)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    assert run.returncode != 0
    assert b"KeyboardInterrupt" in errors
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    assert wait_until(lambda: not is_running(int((tiny / "pid").read_text())))


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_the_cache_lies_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = Path.home() / "Library" / "Caches" if sys.platform == "darwin" else tmp_path
    assert setup.wheel_cache() == expected / "llamaslot" / "wheels"
    monkeypatch.setenv("LLAMASLOT_WHEEL_CACHE", str(tmp_path / "mine"))
    assert setup.wheel_cache() == tmp_path / "mine"


# --- the stamp


@pytest.mark.slow
def test_a_finished_set_up_is_silent_and_a_changed_one_installs_again(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / ".ci").mkdir(parents=True)
    for name in (".ci/setup.py", ".ci/constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, project / name)
    write_program(project / ".venv" / "bin" / "python", 'echo "ran $*"; exit 1')
    write_program(project / ".venv" / "bin" / "pip", "exit 1")
    copy = load_script(project / ".ci" / "setup.py")
    constraints, pyproject = (project / ".ci/constraints.txt").read_text(), (project / "pyproject.toml").read_text()
    key = copy.build_key(copy.wanted_version(constraints))
    stamp = json.dumps(copy.wanted_stamp(key, constraints + pyproject, {"dev"}))

    def run_set_up(*extras: str) -> subprocess.CompletedProcess[str]:
        (project / ".venv" / "llamaslot-setup.json").write_text(stamp)
        command = [sys.executable, str(project / ".ci" / "setup.py"), *extras]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    for extras in ([], ["dev"]):
        fresh = run_set_up(*extras)
        assert (fresh.returncode, fresh.stdout, fresh.stderr) == (0, "", "")

    more = run_set_up("bench")
    assert more.returncode == 1
    assert f"--editable {project}[bench,dev]" in more.stderr
    assert not (project / ".venv" / "llamaslot-setup.json").exists()

    (project / "pyproject.toml").write_text(pyproject + "\n")
    changed = run_set_up()
    assert changed.returncode == 1
    assert f"--editable {project}[dev]" in changed.stderr


# --- what is missing on the machine


def run_with_path(directory: Path, prelude: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script as `make` does, after `prelude`, with only `directory` on PATH."""
    lines = [
        "import runpy, sys",
        f"sys.argv = [{str(SCRIPT)!r}]",
        prelude,
        "runpy.run_path(sys.argv[0], run_name='__main__')",
    ]
    directory.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": str(directory), **environment},
    )


OLD_PYTHON = "sys.version_info = (3, 8, 18, 'final', 0)"


def test_an_old_python_gets_one_line_with_the_fix(tmp_path: Path) -> None:
    result = run_with_path(tmp_path / "bin", OLD_PYTHON)
    assert result.returncode == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert "Python 3.11 or newer is needed, this is 3.8.18" in line
    assert "make PYTHON=" in line


def test_an_old_python_hands_over_to_a_newer_one_that_works(tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "python3.13", "exit 127")
    write_program(tmp_path / "bin" / "python3.12", 'if [ "$1" = -c ]; then exit 0; fi; echo "3.12 ran $*"')
    result = run_with_path(tmp_path / "bin", OLD_PYTHON)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"3.12 ran {SCRIPT}\n", "")


def test_the_script_parses_under_an_old_python() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 8))


def test_a_missing_compiler_is_one_line_with_the_fix(tmp_path: Path) -> None:
    result = run_with_path(tmp_path / "bin")
    assert result.returncode == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert "a C++ compiler is needed" in line
    assert ("xcode-select --install" if sys.platform == "darwin" else "apt install build-essential") in line


def test_a_compiler_that_does_not_run_is_one_line_with_the_fix(tmp_path: Path) -> None:
    result = run_with_path(tmp_path / "bin", CXX="no-such-compiler")
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert "CXX=no-such-compiler does not run" in line


def test_a_python_without_ensurepip_is_one_line_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup, "VENV_PYTHON", tmp_path / "python")
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(setup.SetupError, match=r"apt install python3\.\d+-venv$"):
        setup.create_venv()


# --- the Makefile


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("make")
    if program is None:
        pytest.skip("make is not installed")
    return subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_make_serve_passes_arguments_on() -> None:
    result = make("-n", "serve", "ARGS=-m model.gguf --port 9000")
    assert result.stdout.splitlines()[-1] == ".venv/bin/llamaslot serve -m model.gguf --port 9000"
    assert ".ci/setup.py" in result.stdout.splitlines()[0]


def test_make_test_includes_the_checks() -> None:
    lines = make("-n", "test").stdout
    for command in ("ruff check", "ruff format --check", "mypy", "lint-imports", "-m pytest"):
        assert f".venv/bin/{command}" in lines or f".venv/bin/python {command}" in lines


def test_make_alone_lists_every_target() -> None:
    listed = re.findall(r"^  make ([a-z-]+)", make().stdout, re.MULTILINE)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == [name for name in targets if not name.startswith("setup-")]


def test_make_without_python_is_one_line_with_the_fix() -> None:
    result = make("setup", "PYTHON=no-such-python")
    assert result.returncode != 0
    assert result.stderr.splitlines()[0].startswith(
        "llamaslot setup: no-such-python was not found: install Python 3.11"
    )


# --- the constraints


def test_the_constraints_pin_every_dependency_and_hold_no_url() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pinned = {
        match[1].lower().replace("_", "-") for line in lines if (match := re.fullmatch(r"([\w.-]+)==[\w.]+", line))
    }
    assert len(pinned) == len(lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    assert {re.split(r"[<>=~!\[]", requirement)[0] for requirement in declared} <= pinned
