"""Tables on ``depth_weight`` for docs/research/policies.md, from the results of depth_weight.py."""

from __future__ import annotations

import json
import math
import statistics
from functools import cache
from typing import Any

from scipy.stats import t

from result_tables import ROOT, listed, load, signed, table

ALONE, QUEUED = "depth_weight", "depth_weight_queued"
SHARES, LOADS = (0.02, 0.05, 0.1), (0.8, 0.95, 1.2)
NAMES = {
    "lru": "`lru`",
    "gdfs": "GDFS, cost by depth",
    "s3fifo": "S3-FIFO",
    "auto": "`wa`, `auto`",
    "soft": "`wa`, `soft`",
    "auto, placebo": "`auto`, another leaf's depth",
    "soft, placebo": "`soft`, another leaf's depth",
    "hindsight": "hindsight by hits",
    "hindsight by cost": "hindsight by cost",
    "sglang": "SGLang's defaults",
}
FALL, RISE = 5.0, 5.0
"""Limits of the rule for ``soft`` in percent: least fall of busy seconds, most rise of the median."""

Cell = tuple[float, float, float, int]
"""Change in percent, its 95 % interval, and the number of overlays."""


@cache
def _rows(name: str) -> dict[tuple[str, int, float, str], dict[str, Any]]:
    path = f"benchmark/eviction/results/{name}.json"
    return {(r["split"], r["seed"], r["at"], r["arm"]): r for r in load(path)}


def changes(name: str, split: str, at: float, arm: str, key: str, base: str = "wa") -> list[float]:
    """Return the logarithm of an arm's value over that of ``base`` in each overlay."""
    rows = _rows(name)
    seeds = sorted({seed for kind, seed, _, _ in rows if kind == split})
    pairs = ((rows.get((split, s, at, arm)), rows.get((split, s, at, base))) for s in seeds)
    return [math.log(a[key] / b[key]) for a, b in pairs if a is not None and b is not None]


def cell(logs: list[float]) -> Cell:
    """Return the geometric mean change in percent, and Student's interval."""
    mean, count = statistics.fmean(logs), len(logs)
    half = 0.0
    if count > 1:
        half = float(t.ppf(0.975, count - 1)) * statistics.stdev(logs) / math.sqrt(count)
    low, middle, high = (100 * math.expm1(x) for x in (mean - half, mean, mean + half))
    return middle, low, high, count


def _shown(found: Cell) -> str:
    middle, low, high, count = found
    interval = f" [{signed(low)}, {signed(high)}]" if count > 1 else ""
    return signed(middle) + interval


def _quantile(logs: list[float]) -> str:
    return f"{signed(cell(logs)[0], 0)} %"


_ARMS = ("lru", "auto", "auto, placebo", "soft", "soft, placebo", "gdfs", "s3fifo")
_ARMS += ("hindsight", "hindsight by cost")


def judged() -> str:
    """Prefill seconds against ``wa``, users that nothing was chosen on."""
    split, lines = "judge", []
    for arm in _ARMS:
        cells = []
        for share in SHARES:
            seconds = changes(ALONE, split, share, arm, "seconds")
            rows = _rows(ALONE)
            points = [
                row["hits"] - rows[split, seed, share, "wa"]["hits"]
                for (kind, seed, at, name), row in rows.items()
                if (kind, at, name) == (split, share, arm)
            ]
            text = f"{_shown(cell(seconds))}; hits {signed(statistics.fmean(points))}"
            cells.append(text)
        p50, p99 = (_quantile(changes(ALONE, split, 0.05, arm, q)) for q in ("p50", "p99"))
        lines.append([NAMES[arm], *cells, f"{p50} / {p99}"])
    count = cell(changes(ALONE, split, SHARES[0], "lru", "seconds"))[3]
    head = [f"{split}, {count} runs", *(f"{share:.0%}" for share in SHARES), "P50 / P99 at 5%"]
    return table(head, lines, numbers=True)


def verdict() -> str:
    """Whether the rule makes ``soft`` the default."""
    texts, meets = [], []
    for load_ in LOADS:
        busy = cell(changes(QUEUED, "judge", load_, "soft", "busy_s"))
        median = cell(changes(QUEUED, "judge", load_, "soft", "p50"))
        meets.append(busy[0] <= -FALL and busy[2] < 0 and median[0] <= RISE)
        texts.append(f"{_shown(busy)} % at {load_:.0%} load (median {signed(median[0])} %)")
    count = busy[3]
    said = "and `soft` becomes the default" if all(meets) else "so `depth_weight` stays off"
    return f"Over {count} overlays `soft` changes the busy seconds of a session by {listed(texts)}: {said}."


def floors() -> str:
    """The policy alone and under either floor, against LRU."""
    path = "benchmark/whatif/results/floor_seconds.json"
    rows = json.loads((ROOT / path).read_text(encoding="utf-8"))
    lines = []
    for share, policy in dict.fromkeys((r["share"], r["policy"]) for r in rows):
        mine = [r for r in rows if (r["share"], r["policy"]) == (share, policy)]
        texts = []
        for name in ("policy", "tokens", "seconds"):
            seconds = statistics.fmean(
                100 * (r["seconds"][name] / r["seconds"]["lru"] - 1) for r in mine
            )
            hits = statistics.fmean(r["hits"][name] - r["hits"]["lru"] for r in mine)
            texts.append(f"{signed(seconds)} %; hits {signed(hits, 2)}")
        falls = " and ".join(str(sum(r["falls"][f] for r in mine)) for f in ("tokens", "seconds"))
        name = "`wa`" if policy == "wa" else f"`wa`, `{policy}`"
        lines.append([f"{share:.0%}: {name}", *texts, falls])
    head = ["prefill seconds against LRU", "alone", "floor in tokens", "floor in seconds", "falls"]
    return table(head, lines, numbers=True)


def _against_lru(split: str) -> str:
    """Hits of LRU and of ``wa`` at 5 % of the blocks, and the seconds of ``wa`` against LRU's."""
    of = {
        arm: statistics.fmean(
            row["hits"]
            for (kind, _, at, name), row in _rows(ALONE).items()
            if (kind, at, name) == (split, 0.05, arm)
        )
        for arm in ("lru", "wa")
    }
    seconds = cell(changes(ALONE, split, 0.05, "wa", "seconds", base="lru"))
    return f"{of['lru']:.1f} % | {of['wa']:.1f} % | {signed(seconds[0])} %"


def against_lru() -> str:
    """README's numbers in a sentence."""
    texts = []
    for split, name in (("judge", "sessions of users 4 and 8"), ("conversation", "conversation")):
        lru, mine, seconds = _against_lru(split).split(" | ")
        texts.append(f"on {name} LRU hits {lru} of the tokens and `wa` {mine} (seconds {seconds})")
    return f"At 5 % of the blocks, {'; '.join(texts)}."


def readme_agents() -> str:
    return _against_lru("judge")


def readme_conversation() -> str:
    return _against_lru("conversation")


PARTS = {
    "against-lru": against_lru,
    "readme-agents": readme_agents,
    "readme-conversation": readme_conversation,
    "judged": judged,
    "verdict": verdict,
    "floors": floors,
}
