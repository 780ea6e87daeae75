"""The files of `examples/deploy`: they parse, and their commands, variables and paths are ones that exist here."""

from __future__ import annotations

import fnmatch
import json
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamaslot.app.config import Config, options
from llamaslot.app.config_reader import read_config
from llamaslot.app.http_config import api_settings
from llamaslot.cli.main import command_line

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "examples" / "deploy"
DRAIN_S = 30 + 20
"""Seconds that a server may take to end: `--shutdown-timeout`, then disk, threads and connections."""


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, with their arguments."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return parsed


def unit() -> dict[str, list[str]]:
    """The settings of the systemd unit, each with its values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "llamaslot.service").read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def property_list() -> dict[str, Any]:
    parsed: dict[str, Any] = plistlib.loads((DEPLOY / "com.llamaslot.server.plist").read_bytes())
    return parsed


def served(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Config:
    """The configuration that a command line and variables stand for; raises `ConfigError` where they are wrong."""
    assert command[0] == "serve"
    unknown = {name for name in environ or {} if name.startswith(("LLAMA_", "LLAMASLOT_"))} - {
        option.env for option in options()
    }
    assert not unknown
    config = read_config(command_line(["serve"]).parse(command), environ or {})
    api_settings(config)
    return config


def variables(words: Sequence[str]) -> dict[str, str]:
    return dict(each.split("=", 1) for each in words)


def test_the_image_serves_with_a_key_and_not_without() -> None:
    found = dict(instructions())
    assert json.loads(found["ENTRYPOINT"]) == ["llamaslot"]
    command, environ = json.loads(found["CMD"]), variables(shlex.split(found["ENV"]))
    assert served(command, {**environ, "LLAMA_API_KEY": "secret"}).port == int(found["EXPOSE"])
    with pytest.raises(Exception, match="lets other machines use this server"):
        served(command, environ)
    assert f"useradd --system --uid {found['USER']} " in found["RUN"]
    check = json.loads(found["HEALTHCHECK"].partition("CMD ")[2])
    assert f":{found['EXPOSE']}/health" in check[2]
    compile(check[2], "HEALTHCHECK", "exec")


def test_the_image_is_built_from_all_files_that_it_needs(tmp_path: Path) -> None:
    *excluded, _ = ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split("\n")[1:]
    assert excluded[0] == "*"
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copied = set()
    for word, rest in instructions():
        if word == "COPY" and "--from" not in rest:
            *sources, target = rest.split()
            for source in sources:
                place = tmp_path / target / ("" if (ROOT / source).is_dir() else Path(source).name)
                place.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / source).is_dir():
                    skip = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / source, place, symlinks=True, ignore=skip, dirs_exist_ok=True)
                else:
                    shutil.copy2(ROOT / source, place, follow_symlinks=False)
                copied.add(source)
    assert copied == sent, "what is copied is what is sent to the builder"
    dangling = [path for path in tmp_path.rglob("*") if not path.exists()]
    assert not dangling
    constraints = (tmp_path / ".ci" / "constraints.txt").read_text()
    assert fnmatch.filter(constraints.splitlines(), "llama_cpp_python==*")


def test_compose_files_name_what_the_dockerfile_has() -> None:
    service = compose()["services"]["llamaslot"]
    config = served(service["command"])
    assert (config.api_key_file, config.host) == ("/run/secrets/api_keys", "0.0.0.0")
    assert Path(config.cache_disk).is_relative_to(service["volumes"][0].split(":")[1])
    assert service["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    assert set(service["secrets"]) == set(compose()["secrets"]) == {"api_keys"}
    assert service["read_only"]
    assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_S
    build = service["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert ROOT / build["dockerfile"] == DEPLOY / "Dockerfile"
    arguments = {rest.partition("=")[0] for word, rest in instructions() if word == "ARG"}
    cuda = compose("compose.cuda.yaml")["services"]["llamaslot"]["build"]["args"]
    assert set(cuda) == arguments
    assert "-DGGML_CUDA=on" in cuda["CMAKE_ARGS"].split()


def test_the_systemd_unit_starts_a_server_with_keys_on_its_own_folders() -> None:
    found = unit()
    program, *command = shlex.split(found["ExecStart"][0])
    assert Path(program).name == "llamaslot"
    config = served(command, variables(found["Environment"][0].split()))
    assert config.api_key_file == "%d/" + found["LoadCredential"][0].split(":")[0]
    assert config.cache_disk.startswith(f"%S/{found['StateDirectory'][0]}/")
    assert int(found["TimeoutStopSec"][0]) > DRAIN_S
    assert int(found["LimitNOFILE"][0]) > config.max_connections
    # Hidden from the server otherwise: free memory, and whether it is short.
    assert "ProcSubset" not in found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "llamaslot.service"
    program = Path(sys.prefix) / "bin" / "llamaslot"
    copy.write_text(
        (DEPLOY / "llamaslot.service").read_text().replace("/opt/llamaslot/bin/llamaslot", str(program))
    )
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_launchd_daemon_starts_a_server_with_keys() -> None:
    found = property_list()
    program, *command = found["ProgramArguments"]
    assert Path(program).name == "llamaslot"
    config = served(command, found["EnvironmentVariables"])
    assert config.api_key_file
    assert Path(config.cache_disk).is_relative_to(found["WorkingDirectory"])
    assert found["Umask"] == 0o077
    assert found["ExitTimeOut"] > DRAIN_S
    assert found["Label"] == "com.llamaslot.server"


def test_the_readme_links_to_every_file() -> None:
    linked = set(re.findall(r"\]\(([\w.]+)\)", (DEPLOY / "README.md").read_text()))
    assert linked | {"README.md", "Dockerfile.dockerignore"} == {path.name for path in DEPLOY.iterdir()}
