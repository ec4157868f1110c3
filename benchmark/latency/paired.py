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

BOOTSTRAP_SAMPLES = 4000
PERCENTILES = (50, 95, 99)

Slices = Sequence[Sequence[dict[str, Any]]]
"""Each slice's requests, as ``stepped.record_if_done`` makes them."""


def figures(slices: Slices) -> dict[str, float]:
    """Return figures of the requests of ``slices``, in seconds; ``hits`` is a share."""
    requests = [request for part in slices for request in part]
    ttft_s = np.array([request["ttft_s"] for request in requests])
    prompt_tokens = np.array([request["prompt_tokens"] for request in requests])
    decile_size = max(1, len(requests) // 10)
    by_length = np.argsort(prompt_tokens, kind="stable")
    values = {"mean": float(ttft_s.mean())}
    values |= {f"p{p}": float(np.percentile(ttft_s, p)) for p in PERCENTILES}
    values["max"] = float(ttft_s.max())
    values["shortest decile"] = float(ttft_s[by_length[:decile_size]].mean())
    values["longest decile"] = float(ttft_s[by_length[-decile_size:]].mean())
    values["done, mean"] = statistics.fmean(request["done_s"] for request in requests)
    cached_tokens = sum(request["cached_tokens"] for request in requests)
    values["hits"] = cached_tokens / max(int(prompt_tokens.sum()), 1)
    return values


def compare(base: Slices, changed: Slices, seed: int) -> dict[str, tuple[float, float, float]]:
    """Return the change of each figure and the bounds of its 95 % interval, by a bootstrap over slices.

    A change is a ratio minus one; of ``hits`` it is the difference.
    """
    rng = random.Random(seed)
    slice_numbers = range(len(base))
    changes: dict[str, list[float]] = {}
    samples = [list(slice_numbers)]
    samples += [rng.choices(slice_numbers, k=len(base)) for _ in range(BOOTSTRAP_SAMPLES)]
    for sample in samples:
        base_figures = figures([base[i] for i in sample])
        for name, figure in figures([changed[i] for i in sample]).items():
            base_figure = base_figures[name]
            change = figure - base_figure if name == "hits" else figure / base_figure - 1.0
            changes.setdefault(name, []).append(change)
    return {
        name: (values[0], *map(float, np.percentile(values[1:], [2.5, 97.5])))
        for name, values in changes.items()
    }


class ResultFile:
    """A JSON file with the results of each load, which a later command continues.

    Raises SystemExit if the file is of other ``settings``.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.report: dict[str, Any] = {"about": json.loads(json.dumps(settings)), "loads": []}
        if path.exists():
            earlier = json.loads(path.read_text())
            if earlier["about"] != self.report["about"]:
                raise SystemExit(f"{path} is of other arguments; change --out or remove it")
            self.report = earlier

    def is_measured(self, load: float) -> bool:
        """Whether ``load`` was measured before."""
        return any(stored["load"] == load for stored in self.report["loads"])

    def add(self, load_run: Mapping[str, Any]) -> None:
        """Add the result of a load, and replace the file at once."""
        self.report["loads"].append(load_run)
        replace_file(self.path, f"{json.dumps(self.report)}\n")
