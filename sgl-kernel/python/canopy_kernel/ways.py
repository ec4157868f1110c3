"""Triton alone or a stock kernel with Triton for the rest: by what was measured on the server's chip.

``ways.json`` beside this file has the times; ``scripts/gpu_lease/ways.py`` writes it from a report of
``benchmark/kernels/gpu_check.py``. Without it, or for another chip, the server's backend decides.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("ways.json")


@dataclass(frozen=True, slots=True)
class Measured:
    """One layer's attention of ``share`` of a prompt of ``tokens``: milliseconds by way (``triton``,
    ``flashinfer``, ``fa3``), on ``chip`` as torch names it."""

    chip: str
    tokens: int
    share: float
    ms: dict[str, float]


@functools.cache
def table(path: Path = TABLE) -> tuple[Measured, ...]:
    """What was measured; nothing where there is no file."""
    if not path.exists():
        return ()
    return tuple(Measured(**row) for row in json.loads(path.read_text()))


def of_report(report: dict) -> list[Measured]:
    """The table that a report of ``gpu_check.py`` holds: its attention rows with a stock kernel."""
    found = []
    for row in report.get("attention", []):
        if "failed" in row:
            continue
        ms = {
            way: 1000 * row[f"{way}_s"]
            for way in ("triton", "flashinfer", "fa3")
            if f"{way}_s" in row
        }
        if len(ms) > 1:
            found.append(Measured(report["device"], row["tokens"], row["ratio"], ms))
    return found


def triton_is_faster(
    measured: Sequence[Measured],
    chip: str,
    way: str,
    counts: Sequence[int],
    lengths: Sequence[int],
) -> bool:
    """Whether Triton alone beat ``way`` at the measured prompt that is nearest, in the logarithms of
    length and share, to the batch's: ``counts`` rows of requests of ``lengths`` keys."""
    usable = [m for m in measured if m.chip == chip and {way, "triton"} <= m.ms.keys()]
    if not usable or not sum(counts):
        return False
    keys = sum(m * n for m, n in zip(counts, lengths)) / sum(counts)  # as a row sees it
    share = sum(counts) / sum(lengths)
    near = min(
        usable, key=lambda m: abs(math.log(m.tokens / keys)) + abs(math.log(m.share / share))
    )
    return near.ms["triton"] < near.ms[way]
