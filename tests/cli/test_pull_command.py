"""`llamaslot pull` as a process of its own against a hub on localhost: whole, broken and resumed downloads."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.fake_hub import COMMIT, FakeHub, StoredFile
from tests.forked import Command

REPO = "somebody/Some-GGUF"
FILE = "some-Q8_0.gguf"
NAME = f"{REPO}:{FILE}"
CONTENT = random.Random(7).randbytes(300_000)
SHORT_PAUSE = "from llamaslot.app import hub\nhub._PAUSE_S = 0.05\n"
FULL_DISK = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"


@dataclass
class Ended:
    """Result of a pull."""

    status: int
    out: str
    err: str

    @property
    def path(self) -> Path:
        """Where a pull that went well says the file is."""
        assert self.status == 0, self.err
        return Path(self.out.removesuffix("\n"))

    @property
    def error(self) -> str:
        """The one line of a pull that failed, without what was shown before it."""
        assert self.status == 2, self.err
        assert "Traceback" not in self.err
        (line,) = (line for line in self.err.splitlines() if line.startswith("llamaslot: "))
        assert self.err.endswith(line + "\n")
        return line


@dataclass
class Puller:
    """Starts pulls that all use the same hub and the same cache."""

    hub: FakeHub
    cache: Path

    def start(self, name: str | None = NAME, *, fault: str = "", **environment: str) -> Command:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        variables = {
            **inherited,
            "HF_HOME": str(self.cache.parent),
            "HF_HUB_CACHE": str(self.cache),
            "HF_ENDPOINT": self.hub.url,
            "NO_PROXY": "127.0.0.1",
            "COLUMNS": "200",
            **environment,
        }
        args = ("pull", *([name] if name else ()))
        return Command(*args, folder=self.cache.parent, environ=variables, fault=SHORT_PAUSE + fault)

    async def pull(self, name: str | None = NAME, *, fault: str = "", **environment: str) -> Ended:
        return await finish(self.start(name, fault=fault, **environment))

    def blobs(self) -> list[Path]:
        return list((self.cache / "models--somebody--Some-GGUF" / "blobs").glob("*"))


async def finish(command: Command) -> Ended:
    ended = await asyncio.to_thread(command.finish)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture
async def hub() -> AsyncIterator[FakeHub]:
    async with FakeHub({REPO: {FILE: StoredFile(CONTENT)}}).running() as hub:
        yield hub


@pytest.fixture
def puller(hub: FakeHub, tmp_path: Path) -> Puller:
    return Puller(hub, tmp_path / "hub")


async def test_a_pulled_file_has_the_cache_layout_of_the_hub(puller: Puller, hub: FakeHub):
    ended = await puller.pull(HF_TOKEN="hf_secret")
    assert ended.path.read_bytes() == CONTENT
    repo = puller.cache / "models--somebody--Some-GGUF"
    assert ended.path == repo / "snapshots" / COMMIT / FILE
    assert (repo / "refs" / "main").read_text() == COMMIT
    assert puller.blobs() == [ended.path.resolve()]
    assert hub.tokens == {"hub": {"Bearer hf_secret"}, "storage": {None}}


async def test_size_and_licence_are_shown_before_the_download(puller: Puller, hub: FakeHub):
    hub.statuses = [403]
    ended = await puller.pull()
    assert "denies access" in ended.error
    assert "300,000 bytes" in ended.err
    assert "apache-2.0" in ended.err
    assert "nothing (see models.txt)" in ended.err


async def test_a_missing_licence_is_shown_as_missing(puller: Puller, hub: FakeHub):
    hub.licence = None
    ended = await puller.pull()
    assert ended.path.exists()
    assert "the repository states none" in ended.err


async def test_a_file_in_the_cache_is_not_downloaded_again(puller: Puller, hub: FakeHub):
    first = await puller.pull()
    assert (await puller.pull()).path == first.path
    assert hub.requested == [None]


async def test_a_broken_connection_is_resumed(puller: Puller, hub: FakeHub):
    hub.cuts = [120_000, 50_000]
    ended = await puller.pull()
    assert ended.path.read_bytes() == CONTENT
    assert hub.requested == [None, "bytes=120000-", "bytes=170000-"]


async def test_an_interrupted_pull_is_resumed(puller: Puller, hub: FakeHub):
    hub.stalls = [120_000]
    command = puller.start()
    await asyncio.wait_for(hub.stalled.wait(), 60)
    await until(lambda: sum(blob.stat().st_size for blob in puller.blobs()) > 0)
    command.process.send_signal(signal.SIGINT)
    stopped = await finish(command)
    assert stopped.status == 130
    assert "Traceback" not in stopped.err
    assert "run the same command again to continue" in stopped.err
    (partial,) = puller.blobs()
    assert 0 < partial.stat().st_size <= 120_000
    kept = partial.stat().st_size
    assert (await puller.pull()).path.read_bytes() == CONTENT
    assert hub.requested == [None, f"bytes={kept}-"]


async def test_a_killed_pull_is_resumed(puller: Puller, hub: FakeHub):
    hub.stalls = [250_000]
    command = puller.start()
    await asyncio.wait_for(hub.stalled.wait(), 60)
    await until(lambda: sum(blob.stat().st_size for blob in puller.blobs()) > 0)
    command.process.kill()
    await finish(command)
    kept = puller.blobs()[0].stat().st_size
    assert (await puller.pull()).path.read_bytes() == CONTENT
    assert hub.requested == [None, f"bytes={kept}-"]


async def test_a_hub_that_ignores_ranges_sends_the_whole_file_again(puller: Puller, hub: FakeHub):
    hub.cuts = [120_000]
    hub.ranges = False
    assert (await puller.pull()).path.read_bytes() == CONTENT
    assert hub.requested == [None, "bytes=120000-"]


async def test_a_hub_that_stays_down_ends_the_pull_and_a_later_pull_resumes(puller: Puller, hub: FakeHub):
    hub.cuts = [120_000, 0, 0, 0]
    error = (await puller.pull()).error
    assert "120,000 of 300,000 bytes are kept" in error
    assert (await puller.pull()).path.read_bytes() == CONTENT
    assert hub.requested[-1] == "bytes=120000-"


async def test_requests_to_an_overloaded_hub_are_repeated(puller: Puller, hub: FakeHub):
    hub.statuses = [503]
    assert (await puller.pull()).path.read_bytes() == CONTENT


async def test_a_damaged_file_is_refused_and_deleted(puller: Puller, hub: FakeHub):
    stored = hub.repos[REPO][FILE]
    damaged = bytearray(CONTENT)
    damaged[1234] ^= 1
    hub.repos[REPO][FILE] = StoredFile(bytes(damaged), sha256=stored.sha256)
    assert f"expected {stored.sha256}" in (await puller.pull()).error
    assert puller.blobs() == []
    hub.repos[REPO][FILE] = stored
    assert (await puller.pull()).path.read_bytes() == CONTENT


_slow = pytest.mark.skipif(not LONG, reason="each pull is a process, and takes seconds")


def listed(digest: str) -> str:
    """Code that puts the file into models.txt."""
    line = f"some {REPO} {FILE} shape sha256:{digest}"
    patched = f"lambda: model_files.parse_models({line!r})"
    return f"from llamaslot.app import model_files\nmodel_files.known_models = {patched}"


async def test_a_listed_digest_is_checked_before_the_download(puller: Puller, hub: FakeHub):
    wanted, found = "0" * 64, hub.repos[REPO][FILE].sha256
    error = (await puller.pull("some", fault=listed(wanted))).error
    assert "some " in error
    assert f"is {found}, expected {wanted}" in error
    assert hub.requested == []
    assert puller.blobs() == []


@_slow
async def test_a_listed_digest_is_checked_when_a_download_is_resumed(puller: Puller, hub: FakeHub):
    known = listed(hub.repos[REPO][FILE].sha256)
    hub.cuts = [120_000, 0, 0, 0]
    assert "120,000 of 300,000 bytes are kept" in (await puller.pull("some", fault=known)).error
    (partial,) = puller.blobs()
    partial.write_bytes(b"x" + partial.read_bytes()[1:])
    assert "was damaged in transfer" in (await puller.pull("some", fault=known)).error
    path = (await puller.pull("some", fault=known)).path
    assert path.read_bytes() == CONTENT


@_slow
async def test_a_listed_digest_is_checked_of_a_file_in_the_cache(puller: Puller, hub: FakeHub):
    digest = hub.repos[REPO][FILE].sha256
    path = (await puller.pull("some", fault=listed(digest))).path
    path.resolve().write_bytes(CONTENT[:-1] + b"x")
    error = (await puller.pull("some", fault=listed(digest))).error
    assert "some is not the file" in error
    assert f"expected {digest}; delete {path.resolve()}" in error


@_slow
async def test_a_digest_that_leads_out_of_the_cache_is_refused(puller: Puller, hub: FakeHub):
    hub.repos[REPO][FILE].sha256 = "../" * 21 + "a"
    assert "SHA-256" in (await puller.pull()).error
    assert hub.requested == []


async def test_two_pulls_of_one_file_do_not_write_into_each_other(puller: Puller, hub: FakeHub):
    hub.stalls = [120_000]
    command = puller.start()
    await asyncio.wait_for(hub.stalled.wait(), 60)
    assert "another process is already downloading" in (await puller.pull()).error
    command.process.kill()
    await finish(command)


async def test_a_missing_repository_is_one_line(puller: Puller, hub: FakeHub):
    assert f"{hub.url} has no repository nobody/none" in (await puller.pull("nobody/none:x.gguf")).error


async def test_a_missing_file_lists_the_files_of_the_repository(puller: Puller):
    assert (await puller.pull(f"{REPO}:other.gguf")).error == (
        f"llamaslot: {REPO} has no file other.gguf; its GGUF files: {FILE}"
    )


async def test_a_gated_repository_says_where_its_terms_are(puller: Puller, hub: FakeHub):
    hub.gated = True
    assert f"accept its terms at {hub.url}/{REPO}" in (await puller.pull()).error


async def test_a_missing_network_is_one_line(puller: Puller, hub: FakeHub):
    hub.url = "http://127.0.0.1:9"
    assert "http://127.0.0.1:9 cannot be reached" in (await puller.pull()).error


async def test_offline_mode_is_one_line(puller: Puller):
    assert "HF_HUB_OFFLINE" in (await puller.pull(HF_HUB_OFFLINE="1")).error


async def test_an_address_without_a_hub_is_one_line(puller: Puller, hub: FakeHub):
    assert "is HF_ENDPOINT right?" in (await puller.pull(HF_ENDPOINT=f"{hub.url}/elsewhere")).error


async def test_a_web_page_instead_of_the_hub_is_one_line(puller: Puller, hub: FakeHub):
    hub.portal = True
    assert "is not a hub" in (await puller.pull()).error


async def test_a_file_larger_than_the_disk_is_refused_before_the_download(puller: Puller, hub: FakeHub):
    hub.repos[REPO][FILE].size = 1 << 60
    error = (await puller.pull()).error
    assert f"needs {1 << 60:,} bytes" in error
    assert "free" in error
    assert hub.requested == []


async def test_a_pull_that_fills_the_disk_can_be_resumed(puller: Puller, hub: FakeHub):
    error = (await puller.pull(fault=FULL_DISK)).error
    assert "free some space and run the same command again" in error
    kept = puller.blobs()[0].stat().st_size
    assert 0 < kept <= 200_000
    assert (await puller.pull()).path.read_bytes() == CONTENT
    assert hub.requested == [None, f"bytes={kept}-"]


async def test_a_read_only_cache_is_one_line(puller: Puller, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    error = (await puller.pull(HF_HUB_CACHE=str(tmp_path / "file" / "hub"))).error
    assert "cannot write to the cache" in error


async def test_an_unknown_name_is_one_line(puller: Puller):
    assert "did you mean 'qwen3-0.6b'?" in (await puller.pull("qwen3-0.6")).error


async def test_without_a_name_the_known_models_are_listed(puller: Puller):
    ended = await puller.pull(None)
    assert ended.status == 0
    for text in ("demo", "weights", "qwen3-0.6b", "shape", "Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf"):
        assert text in ended.out


async def until(true: Callable[[], bool]) -> None:
    for _ in range(6000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not become true in time")
