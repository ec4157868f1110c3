"""Figures of docs/research/papers/index.md: verdicts by paper."""

from __future__ import annotations

import importlib
import re

from result_tables import PAPERS, table, tally

TITLES = {
    "wa": "KVCache Cache in the Wild",
    "tail": "Tail-Optimized Caching",
    "cachetune": "CacheTune",
    "kareto": "Kareto",
}


def verdicts() -> str:
    """Number of numbered items by paper and verdict."""
    counts = {paper: tally(importlib.import_module(f"{paper}.page").all_rows()) for paper in TITLES}
    for paper, count in counts.items():
        page = (PAPERS / f"{paper}.md").read_text(encoding="utf-8")
        written = re.sub("<!-- results:.*?<!-- end -->", "", page, flags=re.S)
        for items, verdict in re.findall(
            r"^\| (.*?) \|.* \| (built|follows|not possible here)[^|]* \| ", written, re.M
        ):
            count[verdict] += len(items.split(", "))
    kinds = list(next(iter(counts.values())))
    rows = [
        [f"[{title}]({paper}.md)", *(str(counts[paper][kind]) for kind in kinds)]
        for paper, title in TITLES.items()
    ]
    return table(["items of the paper", *kinds], rows, numbers=True)


PARTS = {"verdicts": verdicts}
