"""Verdicts by paper, for docs/research/papers/index.md."""

from __future__ import annotations

import result_pages
from result_tables import KINDS, PAPERS, table, tally

TITLES = {
    "wa": "KVCache Cache in the Wild",
    "tail": "Tail-Optimized Caching",
    "cachetune": "CacheTune",
    "kareto": "Kareto",
}


def verdicts() -> str:
    """Number of numbered items by paper and verdict."""
    rows = []
    for paper, title in TITLES.items():
        counts = tally(result_pages.render((PAPERS / f"{paper}.md").read_text(encoding="utf-8")))
        rows.append([f"[{title}]({paper}.md)", *map(str, counts.values())])
    return table(["items of the paper", *KINDS], rows, numbers=True)


PARTS = {"verdicts": verdicts}
