"""The benchmark that says where a step's time goes."""

from __future__ import annotations

from pathlib import Path

from bench import profile


async def test_each_part_is_counted(tiny_model: Path, tmp_path: Path) -> None:
    (measured,) = await profile.measure(tiny_model, ["-np", "1", "-c", "2048"], 512, tmp_path / "log", streams=[1])
    assert set(measured.parts) == set(profile.PLACES)
    assert not [part for part, taken in measured.parts.items() if taken == 0]
    assert min(measured.parts[part] for part in ("decode", "engine's turns", "parent's turns", "client")) > 0
    assert measured.rate > 0
