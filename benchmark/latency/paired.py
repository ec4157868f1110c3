"""Results of served requests: figures, paired intervals, and a file that grows."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_canopy.private_file import replace_file

BOOTSTRAP_DRAWS = 4000
PERCENTILES = (50, 95, 99)

Slices = Sequence[Sequence[dict[str, Any]]]
"""Each slice's requests, as ``stepped.record_if_done`` makes them."""


def figures(slices: Slices) -> dict[str, float]:
    """Return figures of the requests of ``slices``, in seconds; ``hits`` is a share."""
    rows = [r for part in slices for r in part]
    ttft_s = np.array([r["ttft_s"] for r in rows])
    prompts = np.array([r["prompt_tokens"] for r in rows])
    tenth = max(1, len(rows) // 10)
    by_length = np.argsort(prompts, kind="stable")
    values = {"mean": float(ttft_s.mean())}
    values |= {f"p{p}": float(np.percentile(ttft_s, p)) for p in PERCENTILES}
    values["max"] = float(ttft_s.max())
    values["shortest decile"] = float(ttft_s[by_length[:tenth]].mean())
    values["longest decile"] = float(ttft_s[by_length[-tenth:]].mean())
    values["done, mean"] = statistics.fmean(r["done_s"] for r in rows)
    values["hits"] = sum(r["cached_tokens"] for r in rows) / max(int(prompts.sum()), 1)
    return values


def compare(base: Slices, changed: Slices, seed: int) -> dict[str, tuple[float, float, float]]:
    """Change of each figure and its 95 % interval, over slices drawn with replacement. Ratios
    minus one; for hits, the difference."""
    rng = random.Random(seed)
    numbers = range(len(base))
    changes: dict[str, list[float]] = {}
    draws = [list(numbers)] + [rng.choices(numbers, k=len(base)) for _ in range(BOOTSTRAP_DRAWS)]
    for drawn in draws:
        old, new = figures([base[i] for i in drawn]), figures([changed[i] for i in drawn])
        for name in old:
            change = new[name] - old[name] if name == "hits" else new[name] / old[name] - 1.0
            changes.setdefault(name, []).append(change)
    return {
        name: (values[0], *map(float, np.percentile(values[1:], [2.5, 97.5])))
        for name, values in changes.items()
    }


class ResultFile:
    """A JSON file that is saved after each load, and resumed.

    Ends the command where the file is of another set-up (``settings``).
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.result: dict[str, Any] = {"about": json.loads(json.dumps(settings)), "loads": []}
        if path.exists():
            earlier = json.loads(path.read_text())
            if earlier["about"] != self.result["about"]:
                raise SystemExit(
                    f"{path} is of other arguments; give another --out or --name, or remove it"
                )
            self.result = earlier

    def is_measured(self, load: float) -> bool:
        """Whether ``load`` was measured before."""
        return any(stored["load"] == load for stored in self.result["loads"])

    def add(self, load: Mapping[str, Any]) -> None:
        """One more, written at once; never half a file."""
        self.result["loads"].append(load)
        replace_file(self.path, f"{json.dumps(self.result)}\n")
