"""TTFT against request rate with and without reuse, from the file of `serve.py load`.

    python benchmark/chunk/plot_load.py load.json docs/figures/chunk_load.png

Several files are drawn together (`--side prefix` and `--side reuse` may have run by themselves).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = {"prefix": "prefix cache", "reuse": "documents in any order, r = 0.15"}


def main() -> None:
    *files, output = map(Path, sys.argv[1:])
    rows = [row for f in files for row in json.loads(f.read_text())["rows"]]
    target = next(r["target_s"] for r in rows if "target_s" in r)
    tokens = next(r["tokens"] for r in rows if "tokens" in r)
    fig, axis = plt.subplots(figsize=(6.4, 3.6))
    for side, colour in (("prefix", "tab:gray"), ("reuse", "tab:blue")):
        mine = sorted((r for r in rows if r.get("side") == side), key=lambda r: r["rate"])
        rates = [r["rate"] for r in mine]
        axis.plot(
            rates, [r["p90_s"] for r in mine], "o-", color=colour, label=f"{NAMES[side]}, p90"
        )
        axis.plot(
            rates, [r["p50_s"] for r in mine], ".:", color=colour, label=f"{NAMES[side]}, p50"
        )
    axis.axhline(target, color="black", linewidth=0.8, linestyle="--")
    axis.annotate(f"target {target:.1f} s", (0, target), xytext=(2, 3), textcoords="offset points")
    axis.set_xlim(left=0)
    axis.set_ylim(0, 2.2 * target)
    axis.set_xlabel("requests a second (Poisson arrivals)")
    axis.set_ylabel("time to first token, s")
    axis.set_title(f"{tokens}-token prompts, one CPU core", fontsize=10)
    axis.legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(output, dpi=130)


if __name__ == "__main__":
    main()
