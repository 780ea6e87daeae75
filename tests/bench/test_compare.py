"""The comparison with other servers: counts, the servers' commands, and runs on a real server."""

from __future__ import annotations

import asyncio
import hashlib
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import llama_cpp
import pytest

from bench.client import Answer, BenchmarkError
from bench.decode import Commands
from bench.peers import build, compare, servers
from bench.peers.goals import Selection
from bench.peers.results import RunResult
from bench.peers.runner import Runner
from bench.peers.servers import OWN, SERVERS, CommonSettings, ServerSetup
from bench.peers.workloads import WORKLOADS, Workload, WorkloadRun, user
from bench.server import Server
from bench.tokens import Tokens, fewest

BY_NAME = {each.name: each for each in WORKLOADS}


@pytest.mark.parametrize(
    ("requests", "n"),
    [
        ([], 0),
        ([([1, 2, 3], [])], 3),
        ([([1, 2, 3], []), ([1, 2, 4], [])], 3 + 1),
        ([([1, 2, 3], []), ([1, 2, 3], [])], 3 + 1),
        ([([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [])], 2 + 2),
        ([([1, 2], [3, 4]), ([2, 1], [])], 2 + 2),
        ([([1, 2, 3], []), ([1, 9, 3], []), ([1, 9, 3, 5], [])], 3 + 2 + 1),
    ],
)
def test_the_fewest_tokens_that_can_be_computed(requests: list[tuple[list[int], list[int]]], n: int) -> None:
    assert fewest(requests) == n


def test_drawn_text_has_the_exact_number_of_tokens_and_renders_as_in_servers(tiny_model: Path) -> None:
    tokens = Tokens(tiny_model)
    text = tokens.draw(random.Random(1), 37)
    assert len(tokens.of(text)) == 37
    alone = tokens.prompt([{"role": "user", "content": " abc"}])
    both = tokens.prompt([{"role": "user", "content": " abc"}, {"role": "assistant", "content": text}])
    assert both[: len(alone) - 3] == alone[: len(alone) - 3]
    with pytest.raises(BenchmarkError, match="cannot read"):
        Tokens(Path(__file__))


def answer(started: float, *arrivals: float, finish_reason: str = "length") -> Answer:
    pieces = ("a", *[""] * (len(arrivals) - 1))
    return Answer("a", started, arrivals, pieces, arrivals[-1], finish_reason, 0, 0, {})


@dataclass
class StandIn:
    """A server and its client that record the requests."""

    answers: list[Answer] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)

    @property
    def client(self) -> StandIn:
        return self

    async def chat(self, messages: Any, **_parameters: Any) -> Answer:
        self.asked.append(messages)
        got = self.answers.pop(0)
        await asyncio.sleep(got.ended / 1000)
        return got

    async def get(self, path: str) -> Any:
        self.asked.append(path)
        return [{"id": 0}, {"id": 1}]

    async def post(self, path: str, **body: Any) -> Any:
        self.asked.append((path, body["filename"]))
        return {"n_saved": 7 if "/1?" in path else 0}

    async def crash(self) -> None:
        self.asked.append("crash")

    async def start(self) -> None:
        self.asked.append("start")


def run_on(stand_in: StandIn, *, saves_slots: bool = False) -> WorkloadRun:
    return WorkloadRun(cast("Server", stand_in), cast("Tokens", None), random.Random(1), saves_slots=saves_slots)


async def test_requests_are_ordered_by_the_time_at_which_they_were_sent() -> None:
    run = run_on(StandIn([answer(1.0, 9.0), answer(2.0, 2.5)]))
    await asyncio.gather(run.ask(user("first")), run.ask(user("second"), measured=False))
    assert [each.answer.started for each in run.answered] == [2.0, 1.0]
    assert [each.answer.started for each in run.requests] == [1.0, 2.0]
    assert [each.measured for each in run.requests] == [True, False]


async def test_an_answer_that_was_cut_off_is_an_error() -> None:
    run = run_on(StandIn([answer(1.0, 2.0, finish_reason="")]))
    with pytest.raises(BenchmarkError, match="cut off"):
        await run.ask(user("a"))


async def test_saved_slots_are_restored_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.workloads.RESTART_DELAY_S", 0)
    plain, saving = StandIn(), StandIn()
    await run_on(plain).restart()
    assert plain.asked == ["crash", "start"]
    await run_on(saving, saves_slots=True).restart()
    save, restore = "/slots/{}?action=save", "/slots/{}?action=restore"
    assert saving.asked == [
        "/slots",
        *((save.format(slot), f"{slot}.bin") for slot in (0, 1)),
        *("crash", "start"),
        (restore.format(1), "1.bin"),
    ]


@pytest.mark.slow
async def test_a_long_prompt_that_comes_too_late_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkloadRun, "text", lambda *_: "a")
    early = [answer(0.0, 0.1, 0.2) for _ in range(4)]
    with pytest.raises(BenchmarkError, match="larger model"):
        await BY_NAME["long prefill"].script(run_on(StandIn([*early, answer(0.5, 0.6)])))
    await BY_NAME["long prefill"].script(run_on(StandIn([*early, answer(0.15, 0.6)])))


def test_every_slot_can_hold_the_longest_prompt_unless_the_pool_is_small() -> None:
    assert BY_NAME["agent"].n_ctx(1.0) >= 8 * 10_600
    for scale in (1.0, 0.25):
        wanted = 8 * (1500 * scale + 60)
        assert BY_NAME["pressure"].n_ctx(scale) < 0.35 * wanted
    for n_slots in (1, 5, 8):
        assert replace(BY_NAME["chat"], n_slots=n_slots).n_ctx(0.3) % (256 * n_slots) == 0


def test_all_servers_get_the_same_settings(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.servers.build.llama_server", lambda: Path("llama-server"))
    load = CommonSettings(tiny_model, n_slots=8, n_threads=2, n_ctx=4096, more=("-ngl", "9"))
    for server in SERVERS:
        words = " ".join(server.command(load))
        assert str(tiny_model) in words
        assert ("-np 8 -c 4096 -t 2 -tb 2 -fa on" in words) == (server.kind != "llama-cpp-python")


def test_a_workloads_flags_are_added_if_llamaslot_has_them(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = CommonSettings(tiny_model, n_slots=8, n_threads=2, n_ctx=4096)
    own = ServerSetup(OWN, "llamaslot")
    disk = BY_NAME["restart"].flags["llamaslot"]
    for known, expected in (({"-np"}, []), ({"--cache-disk"}, ["--cache-disk", str(tmp_path)])):
        monkeypatch.setattr(servers, "llamaslot_flags", lambda _checkout, known=known: known)
        plain = own.command(load)
        assert own.command(load, disk, tmp_path)[len(plain) :] == expected


def test_the_help_of_llamaslot_names_its_flags() -> None:
    assert {"-np", "--cache-seqs"} <= servers.llamaslot_flags()


def test_slots_are_saved_only_in_the_restart_workload() -> None:
    [saving] = [each for each in SERVERS if each.saves_slots]
    assert [each.name for each in WORKLOADS if saving.takes_part(each.name)] == ["restart"]
    assert all(each.takes_part("restart") for each in SERVERS if each.name != "llama-server -bs")


def test_a_server_of_another_build_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "server"
    own = llama_cpp.llama_print_system_info().decode()
    for said, is_same in ((f"system_info: n_threads = 2 | {own}", True), ("system_info: ABACUS = 1", False)):
        binary.write_text(f"#!/bin/sh\necho '{said}'\nexit 1\n")
        binary.chmod(0o755)
        if is_same:
            build._check_same(binary)
        else:
            with pytest.raises(BenchmarkError, match="built otherwise"):
                build._check_same(binary)


def test_other_flags_of_the_compiler_are_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_cache", lambda: tmp_path)
    assert not build.has_llama_server()
    key = build._key(build.library_folders(), build.SERVER_FLAGS)
    (tmp_path / f"llama-server-{key}").touch()
    assert build.has_llama_server()
    monkeypatch.setattr(build, "SERVER_FLAGS", (*build.SERVER_FLAGS, "-DMORE"))
    assert not build.has_llama_server()


def test_tools_that_were_brought_to_a_machine_without_a_network_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for GPUs have the names that a version had which did not know the flags."""
    libraries = tmp_path / "lib"
    libraries.mkdir()
    (libraries / "libllama.so").write_bytes(b"code")
    size = (4).to_bytes(8)
    digest = hashlib.sha256(repr([libraries]).encode() + b"libllama.so" + size + b"code").hexdigest()[:12]
    monkeypatch.setattr(build, "library_folders", lambda: [libraries])
    monkeypatch.setattr(build, "_cache", lambda: tmp_path)
    monkeypatch.setattr(build, "_check_same", lambda _: None)
    monkeypatch.setattr(build, "_run", lambda _: pytest.fail("nothing can be compiled"))
    (tmp_path / f"llama.cpp-{build.version(build.PACKAGE)}").mkdir()
    for name, found in (
        ("llama-server", build.llama_server.__wrapped__),
        ("llama-batched-bench", build.batched_bench),
    ):
        (tmp_path / f"{name}-{digest}").touch()
        assert found().name == f"{name}-{digest}"


def test_the_engine_and_its_peer_take_turns(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def rate(side: str) -> float:
        order.append(side)
        return {"engine": 90.0, "peer": 100.0}[side]

    monkeypatch.setattr(Commands, "engine_rate", lambda _, streams: rate("engine"))
    monkeypatch.setattr(Commands, "peer_rate", lambda _, streams: rate("peer"))
    monkeypatch.setattr("bench.decode.build.batched_bench", lambda: Path("llama-batched-bench"))
    runner = Runner(Tokens(tiny_model), CommonSettings(tiny_model, 8, 1, 0), 1.0, tmp_path)
    [ratio] = compare.engine_ratio(runner.measure_engine(4))
    assert order == ["engine", "peer", "peer", "engine"] * 2
    assert (ratio.median, ratio.n_pairs, ratio.verdict) == (0.9, 4, "few pairs")
    assert compare.engine_ratio([]) == []


def run_workloads(model: Path, folder: Path, *names: str) -> dict[str, RunResult]:
    """Run workloads on llamaslot, at a twentieth of their length."""
    runner = Runner(Tokens(model), CommonSettings(model, 8, 1, 0), 0.05, folder)
    own = Selection([each for each in SERVERS if each.name == OWN])
    workloads: list[Workload] = [BY_NAME[name] for name in names]
    results = asyncio.run(runner.measure(dict.fromkeys(names, 1), workloads, own))
    assert runner.failures == {}
    return {each.workload: each for each in results}


@pytest.mark.slow
def test_workloads_run_on_a_real_server_that_also_dies(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.peers.workloads.RESTART_DELAY_S", 0.1)
    runs = run_workloads(tiny_model, tmp_path, "branching", "restart")
    assert len(runs["branching"].ttft) == 1 + 8 * 2
    assert len(runs.pop("restart").ttft) == 1
    for each in runs.values():
        assert each.n_computed is not None
        assert each.n_fewest <= each.n_computed <= 1.05 * each.n_fewest + 16
        assert each.n_prompt > 2 * each.n_computed
        assert each.n_output == 16 * len(each.ttft)


def test_no_pair_begins_that_would_exceed_the_time_limit(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Building it takes minutes where the cache does not have it.
    monkeypatch.setattr("bench.peers.servers.build.llama_server", lambda: Path("llama-server"))
    runner = Runner(Tokens(tiny_model), CommonSettings(tiny_model, 8, 1, 0), 1.0, tmp_path)
    chat = BY_NAME["chat"]
    assert asyncio.run(runner.measure({"chat": 1}, [chat], Selection(SERVERS), time_limit_s=chat.seconds)) == []
