"""Certificates of tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -out {cert} -keyout {key}".split(),
        check=True,
        capture_output=True,
    )
    return cert, key
