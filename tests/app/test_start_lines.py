"""The start lines say what is reused of a model, by checkpoints or without, and why nothing is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from bench import synthetic
from llamaslot.app.config import Config
from llamaslot.app.start_lines import announce, host_gpus
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, library
from llamaslot.base.model import NOT_YET, CheckpointLimits, SelfTestOutcome, StateCost, StateKind
from llamaslot.kvcache.cache_settings import Budgets
from llamaslot.processes.messages import Loaded
from tests.fake_backend import FakeBackend

LINES = {
    "tiny": "Prefix reuse: on; 3 layers: KV of every token in 3",
    "tiny-swa": (
        "Prefix reuse: off, every prompt is computed whole (sliding-window model: it forgets what is more than 32 "
        "tokens back); 6 layers: KV of every token in 1, KV of the last 32 in 5"
    ),
    "tiny-lfm2": (
        "Prefix reuse: off, every prompt is computed whole (hybrid model: its recurrent state cannot be cut back); "
        "4 layers: KV of every token in 2"
    ),
    "tiny-mamba": (
        "Prefix reuse: off, every prompt is computed whole (recurrent model: its state cannot be cut back); "
        "2 layers: a recurrent state in all"
    ),
}


CHECKPOINTS = {
    "tiny-swa": r"sliding window of 32 tokens in 5 of 6 layers; one takes at most 0\.\d\d MiB",
    "tiny-lfm2": r"recurrent state beside KV of every token in 2 of 4 layers; one takes 0\.\d\d MiB",
    "tiny-mamba": r"recurrent state in 2 layers; one takes 0\.\d\d MiB",
}


def announced(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    shape: str,
    limits: CheckpointLimits | None = None,
    *,
    config: Config | None = None,
    beginning: tuple[str, ...] = ("Prefix reuse", "Checkpoints"),
) -> list[str]:
    """The lines about reuse of a model, or others, by their beginning; it has checkpoints if there are limits."""
    model = synthetic.ensure(shape, folder=folder)
    backend = LlamaBackend(
        LlamaSettings(model, n_ctx=512, n_slots=2, n_ubatch=64, n_threads=1, checkpoints=limits is not None)
    )
    info = msgspec.structs.replace(
        backend.info, checkpoint_limits=limits, state_cost=StateCost(1.25, 0.5) if limits is not None else None
    )
    backend.close()
    announce(Loaded(info, Budgets()), ["http://127.0.0.1:1"], config or Config())
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith(beginning)]


@pytest.mark.parametrize("shape", LINES)
def test_one_line_says_what_is_reused(tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str) -> None:
    assert announced(tmp_path, capsys, shape) == [LINES[shape]]


@pytest.mark.parametrize("shape", CHECKPOINTS)
def test_another_line_says_how_many_checkpoints_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str
) -> None:
    reuse, checkpoints = announced(tmp_path, capsys, shape, CheckpointLimits(2**25, 32, 1024))
    assert re.fullmatch(rf"Prefix reuse: by checkpoints \({CHECKPOINTS[shape]}\)", reuse)
    assert re.fullmatch(
        r"Checkpoints: 32 MiB of RAM, room for [1-9][\d,]+; at most 32 of one conversation, one every 1,024 tokens "
        r"of a long prompt \(1\.2 ms to take one, 0\.5 ms to restore it\)",
        checkpoints,
    )


@pytest.mark.parametrize("kind", [StateKind.HYBRID, StateKind.WINDOW, StateKind.NONE])
@pytest.mark.parametrize(
    ("outcome", "can_reuse", "expected"),
    [
        ("pending", True, ", once the self-test has passed (the reason; it runs between requests, and "),
        ("failed", False, "off, every prompt is computed whole (the reason; --reuse-self-test on reuses "),
        ("off", False, "off, every prompt is computed whole (the reason)"),
    ],
)
def test_the_line_says_why_the_self_test_does_not_allow_reuse(
    kind: StateKind, outcome: SelfTestOutcome, can_reuse: bool, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    info = msgspec.structs.replace(FakeBackend(kind=kind).info, self_test=outcome, self_test_reason="the reason")
    if not can_reuse:
        state = msgspec.structs.replace(info.state, can_trim=False)
        info = msgspec.structs.replace(info, keeps_checkpoints=False, checkpoint_size=None, state=state)
    announce(Loaded(info, Budgets()), ["http://127.0.0.1:1"], Config())
    [line] = [each for each in capsys.readouterr().out.splitlines() if each.startswith("Prefix reuse")]
    assert expected in line
    assert outcome == "off" or "--reuse-self-test on" in line


def test_a_line_says_that_there_is_no_room_for_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, line = announced(tmp_path, capsys, "tiny-lfm2", CheckpointLimits(100, 32, 1024))
    assert "room for 0; " in line
    assert line.endswith("Raise --checkpoint-ram: without one, only a slot's last request can be continued.")


@pytest.mark.skipif(library.gpus() != [], reason="the model runs on a GPU")
def test_a_line_says_that_no_gpu_is_used_although_one_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asking = Config(gpu_layers=99)
    (line,) = announced(
        tmp_path, capsys, "tiny", config=asking, beginning=("--gpu-layers 99 asks for a GPU, but ",)
    )
    assert "llama.cpp" in line
    assert "CPU" in line
    for config in (Config(gpu_layers=0), Config()) if not host_gpus() else (Config(gpu_layers=0),):
        assert announced(tmp_path, capsys, "tiny", config=config, beginning=("--gpu-layers", "This machine")) == []


@pytest.mark.parametrize("address", ["", "redis://127.0.0.1:6379"])
def test_a_line_and_the_log_say_whether_there_is_a_remote_tier(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with capture_logs() as logs:
        announce(Loaded(FakeBackend().info, Budgets(), remote_address=address), ["http://127.0.0.1:1"], Config())
    [ready] = [each for each in logs if each["event"] == "server.ready"]
    assert ready["remote"] == ("on" if address else "off")
    lines = [each for each in capsys.readouterr().out.splitlines() if each.startswith("Remote tier: ")]
    assert [line.startswith(f"Remote tier: {address}, shared with ") for line in lines] == [True] * bool(address)


@pytest.mark.parametrize(
    ("changes", "defaults"),
    [
        ({}, "idle prefixes stay in the pool until their cells are needed, small steps are not padded"),
        ({"unified": False}, "idle prefixes stay in the pool until their cells are needed"),
    ],
)
def test_a_line_says_that_costs_are_pending_and_what_holds_until_they_are_measured(
    capsys: pytest.CaptureFixture[str], changes: dict[str, Any], defaults: str
) -> None:
    reason = "threads waited 0.50 s for CPUs within 1.00 s"
    for pending, why in (
        (NOT_YET, "Costs of this model are not known yet on this machine"),
        (reason, f"Costs could not be measured ({reason})"),
    ):
        info = msgspec.structs.replace(FakeBackend().info, costs_pending=pending, **changes)
        announce(Loaded(info, Budgets()), ["http://127.0.0.1:1"], Config())
        [line] = [each for each in capsys.readouterr().out.splitlines() if each.startswith("Costs")]
        assert line == f"{why}. Until they are measured, while the server is idle: {defaults}."
