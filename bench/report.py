"""Common parts of all reports: medians with their spread, ratios, the machine, files with results."""

from __future__ import annotations

import gzip
import json
import platform
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import psutil
from rich.console import Console
from rich.table import Table

from bench import synthetic
from bench.client import BenchmarkError

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""
TABLE_WIDTH = 132
console = Console(width=max(TABLE_WIDTH, Console().width))
notes = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


@dataclass(frozen=True)
class Summary:
    """Several measurements of one thing."""

    median: float
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """At least one value."""
        return cls(statistics.median(values), statistics.fmean(values), min(values), max(values))

    def milliseconds(self) -> tuple[str, str, str]:
        """Median, mean and range of times in seconds, for three cells of a table."""
        median, mean, low, high = (
            f"{1000 * value:,.0f}" for value in (self.median, self.mean, self.low, self.high)
        )
        return median, mean, f"{low}-{high}"


def new_table(title: str, headings: Sequence[str], left: Sequence[str] = (), caption: str | None = None) -> Table:
    """Return an empty table whose columns are aligned right, but for those in `left`."""
    result = Table(title=title, caption=caption)
    for heading in headings:
        result.add_column(heading, justify="left" if heading in left else "right")
    return result


def decode_rate(streams: Sequence[Sequence[float]]) -> float:
    """Tokens per second of all streams together, from the last one's first token to the first one's last.

    Each stream is given by the times, in seconds, at which its tokens came.
    """
    start = max(arrivals[0] for arrivals in streams)
    end = min(arrivals[-1] for arrivals in streams)
    if end <= start:
        raise BenchmarkError("the streams did not decode side by side: one ended before another began")
    return sum(start < came <= end for arrivals in streams for came in arrivals) / (end - start)


def model_file(model: str, *, folder: Path | None = None) -> Path:
    """The GGUF file of `--model`: a shape, written if it is missing, or a path."""
    if model in synthetic.SHAPES:
        return synthetic.ensure(model, folder=folder)
    path = Path(model)
    if not path.is_file():
        shapes = ", ".join(synthetic.SHAPES)
        raise BenchmarkError(f"--model {model}: no such file, and none of the shapes {shapes}")
    return path


def machine() -> dict[str, Any]:
    """The machine and libraries of a measurement."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(terse=True),
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "load_before": round(psutil.getloadavg()[0], 2),
        "llama_cpp_python": version("llama-cpp-python"),
        "llama_system_info": llama_cpp.llama_print_system_info().decode().strip(" |"),
        "gpu": bool(llama_cpp.llama_supports_gpu_offload()),
    }


def default_threads() -> int:
    """The number of physical cores, which both sides of a comparison use."""
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write results as JSON and print the path."""
    path.write_text(json.dumps(rounded(content), indent=1) + "\n")
    notes.print(f"results: {path}")


def wrapped(text: str) -> list[str]:
    """Return the lines of a paragraph of a page."""
    return textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)


def replaced_part(text: str, begin: str, end: str, part: str) -> str | None:
    """Return a page with what is between two lines replaced by `part`; None if it lacks these lines."""
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    return f"{before}{begin}\n{part}{end}{after}" if has_begin and has_end else None


def keep_raw(results: Path, raw: Path) -> None:
    """Keep what a published run wrote, compressed; without a time in it, the same results give the same bytes."""
    raw.write_bytes(gzip.compress(results.read_bytes(), mtime=0))


def raw_data(raw: Path) -> dict[str, Any]:
    """Return the results that `keep_raw` wrote."""
    content: dict[str, Any] = json.loads(gzip.decompress(raw.read_bytes()))
    return content


def page_with(page: Path, begin: str, end: str, lines: Sequence[str]) -> str:
    """Return a page with its generated part, between two lines, replaced; raises `BenchmarkError` without these."""
    text = replaced_part(page.read_text(), begin, end, "\n".join([*lines, ""]))
    if text is None:
        raise BenchmarkError(f"{page}: the lines {begin} and {end} are missing")
    return text


def rounded(value: Any, decimals: int = 6) -> Any:
    """The same with rounded floats."""
    if isinstance(value, Mapping):
        return {key: rounded(item, decimals) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item, decimals) for item in value]
    return round(value, decimals) if isinstance(value, float) else value


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
