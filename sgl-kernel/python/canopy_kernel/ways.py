"""Choice of Triton alone, or a stock kernel with Triton spans, by measurements on the server's chip.

``ways.json`` in this folder has the times; ``of_report`` makes its rows from a report of
``benchmark/kernels/gpu_check.py``. Without the file, or for another chip, the server's backend decides.
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
    """Milliseconds of one layer's attention for ``share`` of a prompt of ``tokens``, by way
    (``triton``, ``flashinfer``, ``fa3``), on ``chip`` (torch's name)."""

    chip: str
    tokens: int
    share: float
    ms: dict[str, float]


@functools.cache
def table(path: Path = TABLE) -> tuple[Measured, ...]:
    """Return the measurements, or an empty tuple if the file does not exist."""
    if not path.exists():
        return ()
    return tuple(Measured(**row) for row in json.loads(path.read_text()))


def of_report(report: dict) -> list[Measured]:
    """Return the attention rows with a stock kernel in a report of ``gpu_check.py``."""
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
    """Whether Triton alone was faster than ``way`` at the nearest measured prompt.

    Distance is in the logarithms of length and share. The batch has ``counts`` rows of requests of
    ``lengths`` keys.
    """
    usable = [m for m in measured if m.chip == chip and {way, "triton"} <= m.ms.keys()]
    if not usable or not sum(counts):
        return False
    keys = sum(m * n for m, n in zip(counts, lengths)) / sum(counts)  # mean over rows
    share = sum(counts) / sum(lengths)
    near = min(
        usable, key=lambda m: abs(math.log(m.tokens / keys)) + abs(math.log(m.share / share))
    )
    return near.ms["triton"] < near.ms[way]
