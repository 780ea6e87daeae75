"""Install client programs, each in an environment of its own, and run their tests: `make test-clients`.

Usage: python .ci/clients.py [CLIENT ...] [--heavy] [-- PYTEST_ARGUMENT ...]

The clients need different versions of the same packages, so no environment can hold them all. That of CLIENT has
the versions of `.ci/clients/CLIENT.txt` and lies in `.venv-clients/CLIENT`; the server runs in `.venv`.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "clients"
LOCKS = ROOT / ".ci" / "clients"
ENVIRONMENTS = ROOT / ".venv-clients"
LIGHT: dict[str, tuple[str, ...]] = {
    "sdk": ("test_openai.py", "test_anthropic.py", "test_sdk_suites.py"),
    "langchain": ("test_langchain.py",),
    "pydantic-ai": ("test_pydantic_ai.py",),
    "instructor": ("test_instructor.py",),
    "litellm": ("test_litellm.py",),
    "llm": ("test_llm.py",),
    "ollama": ("test_ollama.py",),
    "lm-eval": ("test_lm_eval.py",),
}
"""Files of tests by client; together they take minutes."""
HEAVY = {"aider": ("test_aider.py",)}
"""Clients that are installed with `--heavy` alone."""
NOTHING_COLLECTED = 5


def prepared(client: str) -> Path:
    """The interpreter of a client's environment, which is installed unless it is there already."""
    lock = LOCKS / f"{client}.txt"
    folder = ENVIRONMENTS / client
    python, stamp = folder / "bin" / "python", folder / "stamp"
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        print(f"llamaslot clients: installing {client}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([*pip, "--no-deps", "--requirement", str(lock)], check=True)
        stamp.write_text(digest)
    return python


def main() -> int:
    """Run the tests of the clients that are asked for; 1 if any failed."""
    clients = {**LIGHT, **HEAVY}
    parser = argparse.ArgumentParser(description="Tests with client programs.")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(clients))
    parser.add_argument("--heavy", action="store_true", help="also those that are large: " + ", ".join(HEAVY))
    own, _, pytest = _divided(sys.argv[1:])
    asked = parser.parse_args(own)
    if unknown := set(asked.clients) - set(clients):
        parser.error(f"unknown clients: {', '.join(sorted(unknown))}")
    names = asked.clients or [*LIGHT, *(HEAVY if asked.heavy else ())]
    failed = []
    for name in names:
        python = prepared(name)
        print(f"llamaslot clients: {name}", flush=True)
        files = [str(TESTS / file) for file in clients[name]]
        command = [str(python), "-m", "pytest", "-c", str(TESTS / "pytest.ini"), "--rootdir", str(ROOT)]
        status = subprocess.run([*command, "--confcutdir", str(TESTS), *files, *pytest], cwd=ROOT, check=False)
        if status.returncode not in (0, NOTHING_COLLECTED):
            failed.append(name)
    if failed:
        print(f"llamaslot clients: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _divided(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    """The arguments before and behind `--`."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], "--", arguments[place + 1 :]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"llamaslot clients: pip failed ({error.returncode})")
