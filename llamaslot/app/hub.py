"""Downloads from a Hugging Face hub into its standard cache. Only this module imports huggingface_hub.

huggingface_hub finds files, follows the hub's rules and manages the cache. It discards a partial file when a
download is interrupted, and checks a file's size but not its content. So the download itself is done here:

    look_up      one API call: size, licence, SHA-256 and commit, before anything is downloaded
    download     1. lock     `blobs/<sha256>.llamaslot.incomplete`, against a second pull
                 2. receive  the missing bytes, by Range requests
                 3. verify   the SHA-256 of the complete file; delete it if it differs
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import huggingface_hub as hf
import msgspec
from huggingface_hub import constants, errors
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from llamaslot.app.model_files import nearest_projector
from llamaslot.base.errors import ConfigError

_TIMEOUT_S = 10.0
_ATTEMPTS = 3
"""Consecutive requests without a new byte before the download fails."""
_PAUSE_S = 1.0
_BLOCK = 1 << 20
"""Bytes read at once when a file is verified."""
_IS_SHA256 = re.compile(r"[0-9a-f]{64}").fullmatch

_DEFAULT_QUANTIZATIONS = ("Q4_K_M", "Q8_0")
_IS_NO_MODEL = re.compile(r"mmproj|imatrix|mtp-|eagle3-|dflash-|dspark-").search
"""Finds the names that llama-server does not take for a model: projectors and drafts, for example."""
_IS_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$").search

Stage: TypeAlias = Literal["download", "check"]
Report: TypeAlias = Callable[[Stage, int], None]
"""Called with the bytes of the file that a stage has processed, including those of an earlier run."""


class RemoteFile(msgspec.Struct, frozen=True):
    """A file on the hub at one commit."""

    repo: str
    file: str
    commit: str
    size: int
    sha256: str
    licence: str
    """The licence that the repository states; empty if none."""


def look_up(repo: str, file: str) -> RemoteFile:
    """Return the hub's metadata of `file`. Raises ConfigError if it does not exist or access is denied."""
    with _explained(repo):
        info = hf.HfApi().model_info(repo, files_metadata=True, timeout=_TIMEOUT_S)
    found = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    if file not in found:
        ggufs = ", ".join(sorted(name for name in found if name.endswith(".gguf"))) or "none"
        raise ConfigError(f"{repo} has no file {file}; its GGUF files: {ggufs}")
    stored = found[file]
    if stored.lfs is None or info.sha is None:
        raise ConfigError(f"the hub has no SHA-256 for {file} of {repo}, so it cannot be verified")
    if not _IS_SHA256(stored.lfs.sha256):
        # The digest becomes a file name, so anything else could name a path.
        raise ConfigError(f"the hub's SHA-256 for {file} of {repo} is not a digest: {stored.lfs.sha256!r}")
    card = info.card_data or {}
    licence = card.get("license_name") or card.get("license") or ""
    return RemoteFile(repo, file, info.sha, stored.lfs.size, stored.lfs.sha256, str(licence))


def find_file(repo: str, quantization: str, *, offline: bool) -> str:
    """Return the name of a repository's file with a quantization, as llama-server chooses it.

    Without a quantization it is Q4_K_M, Q8_0 or the first. If that is on this machine, the hub is not asked. Raises
    `ConfigError`.
    """
    here = _cached_files(repo)
    if found := _chosen(here, quantization or _DEFAULT_QUANTIZATIONS[0]):
        return found
    if offline:
        if found := _chosen(here, quantization):
            return found
        advice = "without --offline, `llamaslot serve` downloads it"
        raise ConfigError(f"--hf-repo: no model of {repo} is on this machine; {advice}", param="--hf-repo")
    names = _files(repo)
    if found := _chosen(names, quantization):
        return found
    ggufs = ", ".join(sorted(name for name in names if name.endswith(".gguf"))) or "none"
    wanted = f"GGUF file for {quantization}" if quantization else "model"
    raise ConfigError(f"--hf-repo: {repo} has no {wanted}; its GGUF files: {ggufs}", param="--hf-repo")


def find_projector(repo: str, model: str, *, offline: bool) -> str:
    """Return the name of a repository's projector for one of its models (`nearest_projector`); empty without one.

    If there is one on this machine, the hub is not asked. Raises `ConfigError`.
    """
    found = nearest_projector(_cached_files(repo), model)
    return found if found or offline else nearest_projector(_files(repo), model)


def _files(repo: str) -> list[str]:
    """Return the names of a repository's files on the hub; raises `ConfigError`."""
    with _explained(repo):
        return [each.rfilename for each in hf.HfApi().model_info(repo, timeout=_TIMEOUT_S).siblings or ()]


def _chosen(names: Iterable[str], quantization: str) -> str | None:
    """Return the first model with the quantization in its name, in parts its first part; None if there is none."""
    models = [
        name for name in sorted(names) if name.endswith(".gguf") and not _IS_NO_MODEL(name.rpartition("/")[2])
    ]
    models = [name for name in models if not _IS_LATER_PART(name)]
    for each in [quantization] if quantization else _DEFAULT_QUANTIZATIONS:
        pattern = re.compile(re.escape(each) + "[.-]", re.IGNORECASE)
        if found := next(filter(pattern.search, models), None):
            return found
    return None if quantization or not models else models[0]


def _cached_files(repo: str) -> list[str]:
    """Return the names of a repository's GGUF files in the cache."""
    snapshots = _repo_folder(repo) / "snapshots"
    paths = (path for path in snapshots.glob("*/**/*.gguf") if path.is_file())
    return ["/".join(path.relative_to(snapshots).parts[1:]) for path in paths]


def cached(repo: str, file: str) -> Path | None:
    """Return the path of `file` in the cache, or None; of several commits, the one downloaded last."""
    snapshots = (_repo_folder(repo) / "snapshots").glob("*")
    files = [path for snapshot in snapshots if (path := snapshot / file).is_file()]
    return max(files, key=lambda path: path.lstat().st_mtime, default=None)


def is_complete(remote: RemoteFile) -> bool:
    """Return True if the complete file is in the cache."""
    return _blob(remote).exists()


def held_bytes(remote: RemoteFile) -> int:
    """Return how many bytes of `remote` are already on this machine."""
    for path in (_blob(remote), _partial(remote)):
        if path.exists():
            return min(path.stat().st_size, remote.size)
    return 0


def download(remote: RemoteFile, report: Report) -> Path:
    """Download `remote` into the cache and return its path there. Blocks and reports progress.

    If interrupted, it keeps the bytes received so far; the next call continues from there.
    """
    blob, partial = _blob(remote), _partial(remote)
    with _explained(remote.repo):
        if not blob.exists():
            blob.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("ab") as file:
                _lock(file, remote)
                # Another pull may have finished between the check and the lock.
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
        raise ConfigError(f"another process is already downloading {remote.file}") from None


def _receive(remote: RemoteFile, file: BinaryIO, report: Report) -> None:
    """Append the missing bytes to `file`; if a request fails, send another one for the rest."""
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
            failure = "the hub closed the connection"
        file.flush()
        stalled = 0 if file.tell() > start else stalled + 1
        if stalled == _ATTEMPTS:
            raise ConfigError(
                f"the download of {remote.file} was interrupted ({failure}); {file.tell():,} of {remote.size:,} "
                "bytes are kept, run the same command again to continue",
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
        raise ConfigError(f"the download needs {needed:,} bytes, but {folder} has only {free:,} free")


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
            f"{remote.file} was damaged in transfer: its SHA-256 is {digest.hexdigest()}, expected "
            f"{remote.sha256}; the file was deleted, run the same command again",
        )


def _repo_folder(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / f"models--{repo.replace('/', '--')}"


def _blob(remote: RemoteFile) -> Path:
    return _repo_folder(remote.repo) / "blobs" / remote.sha256


def _partial(remote: RemoteFile) -> Path:
    return _blob(remote).with_name(f"{remote.sha256}.llamaslot.incomplete")


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Convert errors of the hub and the connection into a ConfigError of one line.

    The order of the clauses matters, because some of these exceptions are subclasses of others.
    """
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
            raise ConfigError(f"{endpoint} denies access to {repo} ({status}); {token}") from None
        advice = "try again later" if status >= 500 or status == 429 else "is HF_ENDPOINT right?"
        raise ConfigError(f"{endpoint} answered {status} for {repo}; {advice}") from None
    except (errors.HTTPError, errors.LocalEntryNotFoundError) as error:
        raise ConfigError(f"{endpoint} cannot be reached ({_reason(error)})") from None
    except OSError as error:
        advice = ""
        if error.errno in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}:
            advice = "; the received bytes are kept: free some space and run the same command again"
        raise ConfigError(f"cannot write to the cache ({_reason(error)}){advice}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{endpoint} is not a hub: unexpected answer ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
