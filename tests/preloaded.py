"""Imports of the process from which `tests/forked.py` forks; none may start a thread or read the environment.

huggingface_hub reads it when it is imported, so only the libraries that it imports are here.
"""

# ruff: noqa: F401

from __future__ import annotations

import os

# Threads of OpenBLAS would not be in the forked processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import filelock
import httpx2
import rich.progress
import tqdm
import yaml

import llamaslot.api.http_server
import llamaslot.app.composition
import llamaslot.app.logs
import llamaslot.app.runtime.engine_host
import llamaslot.app.start_lines
import llamaslot.cli.cache_command
import llamaslot.cli.chat_command
import llamaslot.cli.pull_command
import llamaslot.cli.serve_command
import llamaslot.cli.top_command
