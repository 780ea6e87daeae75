"""`POST /slots/{id}`: replies in llama-server's format, and refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from llamaslot.backend.disk import SlotFiles
from llamaslot.base.commands import EngineCommand, Query, SlotAction
from tests.fake_backend import FakeBackend


@pytest.fixture
async def server(start: Any, tmp_path: Path) -> Any:
    backend = FakeBackend(n_ctx=1024, n_slots=2, n_reserved=2)
    assert backend.info.segment_size is not None
    store = SlotFiles(tmp_path, lambda: b"k" * 32, backend.info.segment_size, backend.info.n_ctx_slot)
    return await start(backend=backend, engine={"snapshots": store})


async def test_a_slot_is_saved_restored_and_erased(server: Any, tmp_path: Path) -> None:
    await server.ok("/completion", {"prompt": "Hello", "n_predict": 3, "id_slot": 0, "ignore_eos": True})
    saved = await server.ok("/slots/0?action=save", {"filename": "_mein slöt-1.bin"})
    n_bytes = (tmp_path / "_mein slöt-1.bin").stat().st_size
    assert saved.pop("timings")["save_ms"] > 0
    assert saved == {"id_slot": 0, "filename": "_mein slöt-1.bin", "n_saved": 8, "n_written": n_bytes}
    assert await server.ok("/slots/0?action=erase", {}) == {"id_slot": 0, "n_erased": 8}
    assert await server.ok("/slots/0?action=erase", {}) == {"id_slot": 0, "n_erased": 0}
    restored = await server.ok("/slots/1?action=restore", {"filename": "_mein slöt-1.bin"})
    assert restored.pop("timings")["restore_ms"] > 0
    assert restored == {"id_slot": 1, "filename": "_mein slöt-1.bin", "n_restored": 8, "n_read": n_bytes}


async def test_an_action_is_carried_out_although_its_client_goes_away(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    send = server.service._send

    def sent(command: EngineCommand) -> None:
        send(command)
        if isinstance(command, Query) and isinstance(command.body, SlotAction):
            asked.set()

    monkeypatch.setattr(server.service, "_send", sent)
    body = {"prompt": "Hello", "n_predict": -1, "id_slot": 0, "ignore_eos": True}
    running = asyncio.create_task(server.post("/completion", body))
    await server.state_where(lambda state: state.slots[0].n_generated > 2)
    erasing = asyncio.create_task(server.post("/slots/0?action=erase", {}))
    await asyncio.wait_for(asked.wait(), 30)
    assert not erasing.done()
    for task in (erasing, running):
        task.cancel()
        await asyncio.wait([task])
    await server.state_where(lambda state: state.slots[0].n_held == 0)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/slots/7?action=save", {"filename": "a"}, "id_slot"),
        ("/slots/x?action=save", {"filename": "a"}, "id_slot"),
        ("/slots/-1?action=erase", {}, "id_slot"),
        ("/slots/0?action=copy", {"filename": "a"}, "action"),
        ("/slots/0", {"filename": "a"}, "action"),
        ("/slots/0?action=save", {}, "filename"),
        ("/slots/0?action=save", {"filename": 5}, "filename"),
        ("/slots/0?action=save", {"filename": "../a"}, "filename"),
        ("/slots/0?action=save", {"filename": "a/b"}, "filename"),
        ("/slots/0?action=save", {"filename": "/tmp/a"}, "filename"),
        ("/slots/0?action=save", {"filename": "a\\b"}, "filename"),
        ("/slots/0?action=restore", {"filename": "..\\a"}, "filename"),
        ("/slots/0?action=restore", {"filename": "a/../b"}, "filename"),
        ("/slots/0?action=save", {"filename": ".a"}, "filename"),
        ("/slots/0?action=save", {"filename": ""}, "filename"),
        ("/slots/0?action=save", {"filename": "a\x00b"}, "filename"),
        ("/slots/0?action=save", {"filename": "a."}, "filename"),
        ("/slots/0?action=save", {"filename": "é" * 121}, "filename"),
        ("/slots/0?action=restore", {"filename": "nothing"}, "filename"),
    ],
)
async def test_invalid_actions_are_refused(server: Any, path: str, body: Any, param: str) -> None:
    status, reply = await server.post(path, body)
    assert (status, reply["error"]["param"]) == (400, param)


async def test_a_save_over_what_is_no_slot_file_is_refused(server: Any, tmp_path: Path) -> None:
    await server.ok("/completion", {"prompt": "Hello", "n_predict": 3, "id_slot": 0})
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name, reason in (("notes", "not a slot file"), ("folder", "is a folder")):
        status, reply = await server.post("/slots/0?action=save", {"filename": name})
        assert (status, reply["error"]["param"]) == (400, "filename")
        assert name in reply["error"]["message"]
        assert reason in reply["error"]["message"]


async def test_a_save_that_another_process_is_in_the_way_of_is_refused(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.ok("/completion", {"prompt": "Hello", "n_predict": 3, "id_slot": 0})
    (tmp_path / ".a.unfinished").touch()
    # As if it were there again at once.
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    status, reply = await server.post("/slots/0?action=save", {"filename": "a"})
    assert (status, reply["error"]["param"]) == (400, "filename")
    assert "a is being saved by another process" in reply["error"]["message"]


async def test_a_server_without_a_folder_says_which_flag_it_lacks(start: Any) -> None:
    server = await start()
    status, reply = await server.post("/slots/0?action=erase", {})
    assert (status, reply["error"]["type"]) == (501, "not_supported_error")
    assert "--slot-save-path" in reply["error"]["message"]
