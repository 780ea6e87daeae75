"""Ask a public list of advisories for known vulnerabilities of the packages in constraints.txt: `make audit`.

Runs pip-audit in a virtual environment of its own, so that nothing that it needs gets into `.venv`. It needs the
network, so it is no part of CI. Ends with 0 if nothing is known, 1 for a vulnerability, 2 if packages could not be
checked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
FOLDER = ROOT / ".venv" / "audit"
"""Deleted with `.venv` by `make clean`."""
UNREACHABLE = "audit: NOT DONE: the list of advisories could not be reached; nothing is known about any package"


def install() -> None:
    """Install the newest pip-audit. Raises `CalledProcessError`."""
    if not (FOLDER / "bin" / "pip").exists():
        venv.create(FOLDER, with_pip=True, clear=True)
    pip = [str(FOLDER / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*pip, "pip-audit"], check=True)


def audit() -> str:
    """Return pip-audit's report as JSON; anything else if it failed."""
    # The versions are exact and complete: nothing is to be resolved or installed.
    flags = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    command = [str(FOLDER / "bin" / "pip-audit"), "--requirement", str(CONSTRAINTS), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        print(done.stderr.strip()[-2000:], file=sys.stderr)
    return done.stdout


def summary(report: str) -> tuple[list[str], int]:
    """Return what to print for a report of pip-audit, and the exit status."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return [UNREACHABLE], 2
    lines = []
    for package in packages:
        for found in package.get("vulns", ()):
            fixed = ", ".join(found.get("fix_versions", ())) or "no version"
            lines.append(f"audit: {package['name']} {package['version']}: {found['id']}, fixed in {fixed}")
    n_found = len(lines)
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    n_checked = len(packages) - len(skipped)
    if not n_checked:
        return [UNREACHABLE], 2
    lines.append(f"audit: known vulnerabilities: {n_found}; packages checked: {n_checked}")
    if skipped:
        lines.append(f"audit: NOT CHECKED, since the list does not know them: {', '.join(skipped)}")
    return lines, 1 if n_found else 2 if skipped else 0


def main() -> int:
    """Install, audit and print."""
    try:
        install()
    except (OSError, subprocess.CalledProcessError):
        print("audit: NOT DONE: pip-audit could not be installed", file=sys.stderr)
        return 2
    lines, status = summary(audit())
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
