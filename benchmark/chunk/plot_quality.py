"""Quality against the recompute ratio, one line a selector, from what ``canopy chunk-eval`` wrote.

canopy chunk-eval --model DIR --data FILE --selector all --ratio 0,0.05,0.1,0.15,0.3,0.5 --json Q.json
python benchmark/chunk/plot_quality.py Q.json quality.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    report = json.loads(args.rows.read_text())
    encodings = dict.fromkeys(r["encode"] for r in report["rows"])
    figure, axes = plt.subplots(
        1, len(encodings), figsize=(5.5 * len(encodings), 4), squeeze=False, sharey=True
    )
    for axis, how in zip(axes[0], encodings):
        mine = [r for r in report["rows"] if r["encode"] == how]
        for name in dict.fromkeys(r["selector"] for r in mine):
            line = sorted((r for r in mine if r["selector"] == name), key=lambda r: r["ratio"])
            x, y, e = ([r[f] for r in line] for f in ("ratio", "kl", "kl_se"))
            axis.errorbar(x, y, e, marker="o", markersize=3, capsize=2, label=name)
        axis.set(title=f"encoded {how}", xlabel="share recomputed", ylabel="KL, nats a token")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
