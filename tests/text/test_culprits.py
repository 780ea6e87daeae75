"""Rules that name culprits: dates of many languages, what looks like one and is none, and whose message it is."""

from __future__ import annotations

import time

import pytest

from llamaslot.base.advice import Culprit, Role
from llamaslot.text.culprits import Change, culprit_of, role_at

AFTER = "\nYou have tools for files, and one for commands; be careful with both.\n"
SYSTEM = "\x1e<|im_start|>system\nYou are an agent.\n"


def named(old: str, new: str, before: str = SYSTEM, after: str = AFTER) -> Culprit | None:
    """The culprit where two texts part that begin and end in the same way."""
    n = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    before, old, new = before + old[:n], old[n:], new[n:]
    m = next(
        (i for i, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b), min(len(old), len(new))
    )
    found = culprit_of(Change(before, old[: len(old) - m], new[: len(new) - m], old[len(old) - m :] + after))
    return found[0] if found is not None else None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Today's date: 2026-11-27", "Today's date: 2026-12-01"),
        ("Today is Friday, November 27, 2026.", "Today is Saturday, November 28, 2026."),
        ("It is November 27th, 2026.", "It is December 1st, 2026."),
        ("Current time: 23:46:43 UTC", "Current time: 00:09:02 UTC"),
        ("Current Date: 11/27/2026, 9:05 AM", "Current Date: 11/27/2026, 10:15 PM"),
        ("Time: 2026-11-27T23:46:43.123Z", "Time: 2026-11-28T00:01:02.555Z"),
        ("date: Fri Nov 27 23:46:43 UTC 2026", "date: Sat Nov 28 00:01:02 UTC 2026"),
        ("Today Date: 26 Jul 2024", "Today Date: 27 Jul 2024"),
        ("now=1795823203", "now=1795823999"),
        ("It is Friday.", "It is Sunday."),
        ("Heute ist Freitag, der 27. November 2026.", "Heute ist Samstag, der 28. November 2026."),
        ("Heute: 27.11.2026, 9:05 Uhr", "Heute: 28.11.2026, 10:15 Uhr"),
        ("Nous sommes le lundi 30 novembre 2026", "Nous sommes le mardi 1er décembre 2026"),
        ("Hoy es viernes, 27 de noviembre de 2026", "Hoy es sábado, 28 de noviembre de 2026"),
        ("Сегодня пятница, 27 ноября 2026 г.", "Сегодня суббота, 28 ноября 2026 г."),
        ("Dnes je 30. listopadu 2026", "Dnes je 1. prosince 2026"),
        ("今天是2026年11月27日 星期五", "今天是2026年11月28日 星期六"),
        ("今日は2026年11月27日(金)です", "今日は2026年11月28日(土)です"),
        ("오늘은 2026년 11월 27일 금요일입니다", "오늘은 2026년 11월 28일 토요일입니다"),
    ],
)
def test_dates_and_times_of_many_forms(old: str, new: str) -> None:
    assert named(old, new) == "date"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Version 2.1.197 of the tool", "Version 2.1.198 of the tool"),
        ("Connect to 10.12.37.4", "Connect to 10.12.37.5"),
        ("Listening on 127.0.0.1:8080", "Listening on 127.0.0.1:8081"),
        ("See main.py:12:34 for more", "See main.py:12:35 for more"),
        ("You have 1234 tokens left", "You have 1200 tokens left"),
        ("You are Ann's helper", "You are Bob's helper"),
        ("Step 12 of 30", "Step 13 of 30"),
        ("the score is 3/4", "the score is 2/4"),
        ("a ratio of 16:9", "a ratio of 4:3"),
        ("it costs 12.50", "it costs 13.50"),
        ("Configuration: /etc/a.conf", "Configuration: /etc/b.conf"),
        ("may I help you?", "can I help you?"),
        ("Call 555-1234 for help", "Call 555-4321 for help"),
        ("Be brief. It is 2026-11-27.", "Be wordy. It is 2026-11-28."),
        ("It is 2026-11-27 and Ann asks.", "It is 2026-11-28 and Bob asks."),
        ("The models are good", "The modes are good"),
        ("M is for Mary", "D is for Dora"),
        ("You may read x-rays: a=1", "You may read x-files: a=1"),
    ],
)
def test_other_changes_are_not_named(old: str, new: str) -> None:
    assert named(old, new) == "unknown"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Working directory: /home/ada/one", "Working directory: /home/ada/two"),
        ("<cwd>/Users/x/a</cwd>", "<cwd>/tmp/b</cwd>"),
        ("工作目录: /srv/a", "工作目录: /srv/b/c"),
        ("Arbeitsverzeichnis: ~/a", "Arbeitsverzeichnis: ~/b"),
        (r"Primary working directory: C:\Users\ada", r"Primary working directory: D:\shop"),
    ],
)
def test_folders(old: str, new: str) -> None:
    assert named(old, new) == "directory"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Model: gpt-5.1-codex", "Model: gpt-5-mini"),
        ("model: qwen3-coder:30b", "model: qwen3:8b"),
        ("Das Modell ist qwen/Qwen3-8B.", "Das Modell ist mistralai/Mistral-Small."),
        ("You are the model Sonnet 4.5.", "You are the model Opus 4.1."),
    ],
)
def test_names_of_models(old: str, new: str) -> None:
    assert named(old, new) == "model"


STATUS = "gitStatus: the git status at the start.\nCurrent branch: main\n\nStatus:\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            f"{STATUS} M src/a.py\n?? b.txt\n\nRecent commits:\n1a2b3c4 Add x",
            f"{STATUS}(clean)\n\nRecent commits:\n9f8e7d6 Fix y",
        ),
        (f"{STATUS} M a.py", f"{STATUS} M b.py\nD  c.py"),
        ("On branch main\nChanges not staged for commit:\n\tmodified:   a.py", "On branch main\nnothing to commit"),
        ("Current branch: main", "Current branch: feature/x"),
    ],
)
def test_git_statuses(old: str, new: str) -> None:
    assert named(old, new) == "git_status"


def test_a_status_without_a_heading_is_not_named() -> None:
    assert named(" M is for milk", " D is for dates") == "unknown"


def test_the_changed_one_of_many_tools_is_found_at_once() -> None:
    names = [f"mcp__server-{i}.read" for i in range(1000)]
    lines = [f'{{"type": "function", "function": {{"name": "{name}", "description": "Reads."}}}}' for name in names]
    before, after = "\n".join([SYSTEM, *lines[:900]]), "\n".join(["", *lines[901:]])
    start, end = lines[900][:-10], lines[900][-4:]
    change = Change(f"{before}\n{start}", "a file", "two files", end + after, names, names)
    began = time.process_time()
    assert culprit_of(change) == ("tools", "tools")
    assert time.process_time() - began < 0.1


def test_prompts_that_differ_in_much_are_different_ones() -> None:
    one, other = (f"You are {name}. " + name * 200 for name in ("a cook. ", "a clerk. "))
    assert named(one, other) is None
    assert named(f"2026-11-27 {one}" * 2, f"2026-11-28 {other}" * 2) is None


@pytest.mark.parametrize(
    ("header", "role"),
    [
        ("^<|im_start|>user\nhi", "user"),
        ("^<|start_header_id|>system^<|end_header_id|>\n\nx", "system"),
        ("^<start_of_turn>model\nx", "assistant"),
        ("^<|turn>user\n", "user"),
        ("^<|user|>x", "user"),
        ("^<｜User｜>x", "user"),
        ("^[INST] x", "user"),
        ("^[INST] x^[/INST] y", "assistant"),
        ("^[AVAILABLE_TOOLS][]", "tools"),
        ("^[TOOL_RESULTS]", "tool"),
        ("^<|start|>developer<|message|>x^<|end|>^<|start|>assistant^<|channel|>", "assistant"),
        ("^<|START_OF_TURN_TOKEN|>^<|USER_TOKEN|>", "user"),
        ("^<|start_of_role|>user^<|end_of_role|>", "user"),
        ("^<|im_start|>assistant\n^<tool_call>", "assistant"),
        ("^<|im_start|>tool\n", "tool"),
        ("<|im_start|>user\nof a client, not a control token", ""),
        ("no message", ""),
    ],
)
def test_the_role_is_that_of_the_last_control_token_with_one(header: str, role: Role) -> None:
    assert role_at(header.replace("^", "\x1e")) == role
