"""Quality against the recompute ratio, one line a selector, from what ``python benchmark/chunk/chunk_eval.py`` wrote.

python benchmark/chunk/chunk_eval.py --model DIR --data FILE --selector all --ratio 0,0.05,0.1,0.15,0.3,0.5 --json Q.json
python benchmark/chunk/plot_quality.py Q.json [MORE.json ...] quality.png

Several files (of the same questions) make one picture: more ratios for some selectors, say.
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
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    rows = [r for path in args.rows for r in json.loads(path.read_text())["rows"]]
    encodings = list(dict.fromkeys(r["encode"] for r in rows))
    figure, axes = plt.subplots(
        1, len(encodings), figsize=(6.5 * len(encodings), 4.2), squeeze=False, sharey=True
    )
    for axis, how in zip(axes[0], encodings):
        mine = [r for r in rows if r["encode"] == how]
        names = list(dict.fromkeys(r["selector"] for r in mine))
        for shift, name in enumerate(names):
            line = {r["ratio"]: r for r in mine if r["selector"] == name}
            x = sorted(line)
            y, e = ([line[r][f] for r in x] for f in ("kl", "kl_se"))
            apart = [r + 0.0015 * (shift - len(names) / 2) for r in x]  # bars side by side
            axis.errorbar(apart, y, e, marker="o", markersize=3, capsize=2, lw=1.2, label=name)
        count = max(r["n"] for r in mine)
        axis.set(title=f"chunks encoded: {how} ({count} questions)", xlabel="share recomputed")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("KL to full recompute, nats a token (s.e.)")
    figure.tight_layout()
    figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
