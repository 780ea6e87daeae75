"""Source packages of the SDKs, in which their tests are."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path, PurePosixPath

from tests.clients.servers import ROOT

CACHE = ROOT / "build" / "sdk-tests"
TAKEN = ("tests/__init__.py", "tests/utils.py", "tests/api_resources/")
"""Files that the tests of endpoints import; the plugin replaces `conftest.py`."""


def source_of(package: str) -> Path:
    """The folder with the `tests` of the installed version of a package, downloaded once."""
    release = version(package)
    folder = CACHE / f"{package}-{release}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    unpacked = CACHE / f"{folder.name}.part"
    shutil.rmtree(unpacked, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    target = [f"{package}=={release}", "--dest", str(unpacked)]
    subprocess.run([*pip, "--no-binary", package, *target], check=True)
    (archive,) = unpacked.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            place = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if str(place).startswith(TAKEN):
                packed.extract(member.replace(name=str(place)), unpacked, filter="data")
    archive.unlink()
    unpacked.rename(folder)
    return folder
