"""Downloads from a Hugging Face hub into its ordinary cache. Nothing else imports huggingface_hub.

That library finds files, follows its hub's rules and keeps the cache; two things it does not do are done here.
It throws a partial file away when a download is interrupted, and it checks a file's size but not its content.

    look_up      one API call: size, licence, SHA-256 and commit, before anything is downloaded
    download     1. lock     `blobs/<sha256>.llamaslot.incomplete`, locked against a second pull
                 2. receive  what it lacks, by Range requests
                 3. verify   the SHA-256 of the whole file; a bad one is deleted
                 4. record   rename to `blobs/<sha256>`; huggingface_hub finds it there and writes the links

Every failure is a ConfigError of one line. Nothing here prints.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import huggingface_hub as hf
import msgspec
from huggingface_hub import constants, errors
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from llamaslot.base.errors import ConfigError

_TIMEOUT_S = 10.0
_ATTEMPTS = 3
"""Requests in a row that may end without a new byte."""
_PAUSE_S = 1.0
_BLOCK = 1 << 20
_IS_SHA256 = re.compile(r"[0-9a-f]{64}").fullmatch

Stage: TypeAlias = Literal["download", "check"]
Report: TypeAlias = Callable[[Stage, int], None]
"""Called with the bytes of the file that a stage has done, those of an earlier run included."""


class RemoteFile(msgspec.Struct, frozen=True):
    """A file on the hub as it is at one commit."""

    repo: str
    file: str
    commit: str
    size: int
    sha256: str
    licence: str
    """As the repository states it, or empty."""


def look_up(repo: str, file: str) -> RemoteFile:
    """Return what the hub says of `file`. Raises ConfigError if it is not there or may not be read."""
    with _explained(repo):
        info = hf.HfApi().model_info(repo, files_metadata=True, timeout=_TIMEOUT_S)
    found = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    if file not in found:
        ggufs = ", ".join(sorted(name for name in found if name.endswith(".gguf"))) or "none"
        raise ConfigError(f"{repo} has no file {file}; its GGUF files: {ggufs}")
    stored = found[file]
    if stored.lfs is None or info.sha is None:
        raise ConfigError(f"the hub gives no SHA-256 for {file} of {repo}; it cannot be checked")
    if not _IS_SHA256(stored.lfs.sha256):
        # It becomes the name of a file.
        raise ConfigError(f"the hub's SHA-256 for {file} of {repo} is none: {stored.lfs.sha256!r}")
    card = info.card_data or {}
    licence = card.get("license_name") or card.get("license") or ""
    return RemoteFile(repo, file, info.sha, stored.lfs.size, stored.lfs.sha256, str(licence))


def cached(repo: str, file: str) -> Path | None:
    """Return the path of `file` in the cache, or None; of several commits the one that arrived last."""
    snapshots = (_repo_folder(repo) / "snapshots").glob("*")
    files = [path for snapshot in snapshots if (path := snapshot / file).is_file()]
    return max(files, key=lambda path: path.lstat().st_mtime, default=None)


def is_complete(remote: RemoteFile) -> bool:
    """Return True if the file is in the cache, and not to be downloaded any more."""
    return _blob(remote).exists()


def held_bytes(remote: RemoteFile) -> int:
    """Bytes of `remote` that are on this machine already."""
    for path in (_blob(remote), _partial(remote)):
        if path.exists():
            return min(path.stat().st_size, remote.size)
    return 0


def download(remote: RemoteFile, report: Report) -> Path:
    """Bring `remote` into the cache and return its path there; blocks, and reports as it goes.

    Interrupted in any way, it keeps what has arrived and goes on from there when called again.
    """
    blob, partial = _blob(remote), _partial(remote)
    with _explained(remote.repo):
        if not blob.exists():
            blob.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("ab") as file:
                _lock(file, remote)
                # Another pull may have finished between the look and the lock.
                if not blob.exists():
                    _receive(remote, file, report)
                    _verify(remote, partial, report)
                    partial.rename(blob)
        path = Path(hf.hf_hub_download(remote.repo, remote.file))
    if path != _repo_folder(remote.repo) / "snapshots" / remote.commit / remote.file:
        raise ConfigError(f"{remote.repo} changed on the hub during the download; run the same command again")
    return path


def _lock(file: BinaryIO, remote: RemoteFile) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another process is downloading {remote.file} already") from None


def _receive(remote: RemoteFile, file: BinaryIO, report: Report) -> None:
    """Append to `file` what it lacks; a request that breaks off is followed by one for the rest."""
    if file.tell() > remote.size:
        _empty(file)
    _check_free_bytes(remote.size - file.tell(), _partial(remote).parent)
    url = hf.hf_hub_url(remote.repo, remote.file, revision=remote.commit)
    stalled = 0
    while (start := file.tell()) < remote.size:
        report("download", start)
        try:
            _receive_once(url, file, report)
        except errors.HTTPError as error:
            response = getattr(error, "response", None)
            if response is not None and response.status_code < 500 and response.status_code != 429:
                raise
            failure = _reason(error)
        else:
            failure = "the hub ended the connection"
        file.flush()
        stalled = 0 if file.tell() > start else stalled + 1
        if stalled == _ATTEMPTS:
            raise ConfigError(
                f"the download of {remote.file} broke off ({failure}); {file.tell():,} of {remote.size:,} bytes "
                "are kept, the same command goes on from there",
            )
        if file.tell() < remote.size:
            time.sleep(_PAUSE_S)


def _receive_once(url: str, file: BinaryIO, report: Report) -> None:
    start = file.tell()
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with hf.get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:
            _empty(file)
        for block in response.iter_raw():
            file.write(block)
            report("download", file.tell())


def _empty(file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()


def _check_free_bytes(needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(f"the download needs {needed:,} bytes and {folder} has {free:,} free")


def _verify(remote: RemoteFile, partial: Path, report: Report) -> None:
    digest = hashlib.sha256()
    done = 0
    with partial.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            report("check", done)
    if digest.hexdigest() != remote.sha256:
        partial.unlink()
        raise ConfigError(
            f"{remote.file} arrived damaged: its SHA-256 is {digest.hexdigest()}, the hub names {remote.sha256}; "
            "the file was deleted, run the same command again",
        )


def _repo_folder(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / f"models--{repo.replace('/', '--')}"


def _blob(remote: RemoteFile) -> Path:
    return _repo_folder(remote.repo) / "blobs" / remote.sha256


def _partial(remote: RemoteFile) -> Path:
    return _blob(remote).with_name(f"{remote.sha256}.llamaslot.incomplete")


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn what can go wrong between here and the hub into one line; the order of the clauses matters."""
    endpoint = constants.ENDPOINT
    token = "log in with `hf auth login` or set HF_TOKEN"
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(f"{repo} is gated: accept its terms at {endpoint}/{repo}, then {token}") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(f"{endpoint} has no repository {repo}; if it is private, {token}") from None
    except errors.OfflineModeIsEnabled:
        raise ConfigError("HF_HUB_OFFLINE is set: nothing can be downloaded") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in {401, 403}:
            raise ConfigError(f"{endpoint} refuses access to {repo} ({status}); {token}") from None
        advice = "try again later" if status >= 500 or status == 429 else "is HF_ENDPOINT right?"
        raise ConfigError(f"{endpoint} answered {status} for {repo}; {advice}") from None
    except (errors.HTTPError, errors.LocalEntryNotFoundError) as error:
        raise ConfigError(f"{endpoint} cannot be reached ({_reason(error)})") from None
    except OSError as error:
        advice = ""
        if error.errno in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}:
            advice = "; what has arrived is kept: free some space and run the same command again"
        raise ConfigError(f"cannot write to the cache ({_reason(error)}){advice}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{endpoint} does not answer like a hub ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
