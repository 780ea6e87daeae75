"""`llamaslot completion`: the scripts, run by the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamaslot.cli.main import main

BASH = """
source "$1"; shift
complete -p llamaslot
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_llamaslot
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = "source $argv[1]; complete -C (string join ' ' $argv[2..]) | cut -f 1"
ZSH = """
zmodload zsh/zpty
zpty -b shell zsh -f -i
drain() { while zpty -r -t shell text; do print -rn -- "$text"; done }
zpty -w shell "PS1=; autoload -Uz compinit; fpath=(${1:h} \\$fpath); compinit -u -D; print -r READ''Y"
zpty -r shell text '*READY*'
zpty -w -n shell "$2"$'\\t'
for i in {1..50}; do sleep 0.1; text=$(drain); print -rn -- "$text"; [[ $text = *$3* ]] && break; done
zpty -d shell
"""
CASES: list[tuple[str, set[str]]] = [
    ("", {"serve", "chat", "cache", "advise", "pull", "doctor", "completion"}),
    ("serve --cache-d", {"--cache-disk", "--cache-disk-size", "--cache-debug-text"}),
    ("serve -ngl ", {"auto", "all"}),
    ("serve --mmap -np 4 --log-f", {"--log-format"}),
    ("serve --flash-attn=on -fa ", {"on", "off", "auto"}),
    ("pull ", {"demo"}),
    ("doctor --no-b", {"--no-bench"}),
    ("completion ", {"bash", "zsh", "fish"}),
]


def script(folder: Path, shell: str, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell]) == 0
    path = folder / f"llamaslot.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def run(command: Sequence[str | Path]) -> list[str]:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.slow
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "bash", capsys)
    (tmp_path / "model.gguf").touch()
    (tmp_path / "other.txt").touch()
    for line, expected in CASES:
        registered, *found = run(["bash", "-c", BASH, "bash", path, "llamaslot", *line.split(" ")])
        assert registered.endswith("-F _shtab_llamaslot llamaslot")
        assert expected <= set(found), line
    _, *models = run(["bash", "-c", BASH, "bash", path, "llamaslot", "serve", "-m", f"{tmp_path}/"])
    assert models == [str(tmp_path / "model.gguf")]
    _, *hidden = run(["bash", "-c", BASH, "bash", path, "llamaslot", "serve", "--no-warm"])
    assert hidden == [""], "a flag without effect is not offered"


@pytest.mark.slow
def test_fish_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "fish", capsys)
    for line, expected in CASES:
        found = run(["fish", "--no-config", "-c", FISH, path, f"llamaslot {line}"])
        assert expected <= set(found), line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "completed"),
    [("serve -np 4 --log-fo", "rmat"), ("doctor --no-ben", "ch")],
)
def test_zsh_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, completed: str) -> None:
    # As a function of that name, where zsh looks for them.
    path = script(tmp_path, "zsh", capsys).rename(tmp_path / "_llamaslot")
    shown = run(["zsh", "-f", "-c", ZSH, "zsh", path, f"llamaslot {line}", completed])
    assert completed in "".join(shown).rpartition(line)[2]


def test_an_unknown_shell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


def test_the_help_has_a_command_for_each_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "--help"])
    commands = [
        line.strip()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  source ") or " > " in line
    ]
    assert commands == [
        "source <(llamaslot completion bash)",
        'llamaslot completion zsh > "${fpath[1]}/_llamaslot"',
        "llamaslot completion fish > ~/.config/fish/completions/llamaslot.fish",
    ]
