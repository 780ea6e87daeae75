"""The lines by which `llamaslot serve` tells the terminal what runs where, and how to talk to it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

import structlog

from llamaslot import __version__
from llamaslot.app.config import Config
from llamaslot.base.model import QUERY_BLOCK, StepCost
from llamaslot.processes.messages import Loaded

_log = structlog.get_logger(__name__)


def announce(loaded: Loaded, urls: Sequence[str], config: Config) -> None:
    """Print the start lines, and log the same as one event."""
    info = loaded.info
    size = f"{info.size_bytes / 2**20:,.0f} MiB"
    print(f"llamaslot {__version__}: {_bold(info.name)} ({info.description}, {size}) on {info.device}")
    if info.sizing:
        print(info.sizing)
    pool = "shared by all slots" if info.unified else "in equal parts"
    spare = f", {info.n_cache_seqs} more sequences for idle prefixes" if info.n_cache_seqs else ""
    print(
        f"{info.n_slots} slots, {info.n_ctx:,} cells (tokens of KV) {pool}, at most {info.n_ctx_slot:,} tokens a "
        f"request{spare}; KV {info.cache_type_k}/{info.cache_type_v}, flash attention "
        f"{'on' if info.flash_attn else 'off'}"
    )
    if not info.reuse:
        print(_yellow(f"No prefix is reused ({info.reuse_reason}): every prompt is computed whole."))
    print(loaded.ram_line)
    if info.step_cost is not None:
        print(_small_steps_line(info.step_cost))
    if loaded.disk_line:
        print(loaded.disk_line)
    elif config.cache_disk:
        print(_yellow("--cache-disk is not used: it keeps only prefixes that are offloaded to RAM."))
    if not info.flash_attn:
        print(_yellow("Without flash attention, idle prefixes slow running requests down."))
    print(f"listening on {', '.join(urls)}")
    key = " -H 'Authorization: Bearer KEY'" if config.api_key or config.api_key_file else ""
    ca = f" --cacert {shlex.quote(config.ssl_cert_file)}" if config.ssl_cert_file else ""
    print(
        f"try:  curl{ca} {urls[0]}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        """-d '{"messages": [{"role": "user", "content": "Hello!"}]}'""",
    )
    sys.stdout.flush()
    _log.info(
        "server.ready",
        urls=urls,
        model=info.name,
        device=info.device,
        slots=info.n_slots,
        cells=info.n_ctx,
        tokens_a_slot=info.n_ctx_slot,
        cache_seqs=info.n_cache_seqs,
        flash_attention=info.flash_attn,
        reuse=info.reuse_reason or "on",
        disk=config.cache_disk if loaded.disk_line else "off",
    )


def _bold(text: str) -> str:
    return _styled(text, 1)


def _yellow(text: str) -> str:
    return _styled(text, 33)


def _styled(text: str, code: int) -> str:
    """Text in an ANSI style, on terminals alone. Not by rich: importing it would make every start take longer."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def _small_steps_line(cost: StepCost) -> str:
    n_cells, n = 1024, 16
    small, whole = cost.small_ms(n, n * n_cells), cost.block_ms(n_cells)
    return (
        f"Steps: after {n_cells:,} cached tokens, {n} more take {small:,.0f} ms and {QUERY_BLOCK} take "
        f"{whole:,.0f} ms; "
        f"small steps are padded to {QUERY_BLOCK} tokens where that is faster"
    )
