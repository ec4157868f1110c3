"""Group TTLs against one TTL at the same average bytes on the disk (Kareto, Figure 14).

    python benchmark/tiers/ttl.py --data DIR --out OUT --trace conversation
    python benchmark/tiers/ttl.py --out OUT --figure docs/figures/ttl-curves.png

DIR holds `mooncake/` and `agentic_coding/`. The first form simulates one trace (`trace-a`,
`trace-b`, `agentic`, `conversation`; 1 to 10 minutes) and writes OUT/ttl-TRACE.json, a row a run;
the second makes the tables (OUT/ttl.md) and the figure of every such file in OUT.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullFormatter
from tqdm import tqdm

from canopy_lab.group_ttl.histogram import GRID_S
from canopy_lab.group_ttl.learn import (
    FIXED,
    GROUPS,
    Learning,
    Learnt,
    at_equal_bytes,
    in_hindsight,
    learn,
)
from canopy_lab.group_ttl.path_log import PathSnapshot
from canopy_lab.group_ttl.path_segments import segments_of
from canopy_lab.group_ttl.replay import TTLOutcome, fixed_ttls, simulate_ttl
from canopy_lab.sim.model import PRESETS
from canopy_lab.sim.ttl import path_snapshot, window_snapshots
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.ttl.table import TRACE_HASH, TTLTable

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from overlays import overlay
from synthetic.presets import get_preset
from synthetic.trace import write_trace

BYTES_A_TOKEN = PRESETS["llama-3.1-8b"].kv_bytes_per_token()
REFRESH_S = {"conversation": 300.0}
WINDOW_S = {"conversation": 900.0}
TTLS_S = (10.0, 30.0, 60.0, 120.0, 300.0)
FULL_TTLS_S = GRID_S[(GRID_S >= 4) & (GRID_S <= 4096)]
NAMES = ("trace-a", "trace-b", "agentic", "conversation")

HINDSIGHT, DEALT = (
    "groups, in hindsight",
    "placebo, hindsight",
)
HALF = "first half's, on the second"
ONLINE_ROOTS, ONLINE, ONLINE_DEALT = "online, subtrees", "online, all kinds", "placebo, online"
STYLES: dict[str, dict[str, Any]] = {
    HINDSIGHT: {"color": "C1", "ls": "--", "marker": "o"},
    DEALT: {"color": "grey", "ls": ":", "marker": "x"},
    HALF: {"color": "C2", "ls": "", "marker": "s"},
    ONLINE_ROOTS: {"color": "C4", "marker": "^"},
    ONLINE: {"color": "C3", "marker": "o"},
    ONLINE_DEALT: {"color": "C3", "ls": ":", "marker": "x"},
}


def load(name: str, data: Path, out: Path) -> list[TraceRequest]:
    if name == "conversation":
        path = data / "mooncake" / "conversation_first60.jsonl"
        return list(open_trace(path, "mooncake"))
    if name == "agentic":
        archive = data / "agentic_coding" / "traces_500.tar.xz"
        # The hours in which conversations start, without the tail after them.
        requests = overlay(archive, 200, 7200.0, 1)
        return list(itertools.takewhile(lambda r: r.time_s <= 7200.0, requests))
    path = out / f"{name}.jsonl"
    write_trace(path, get_preset(name), 7200.0, 1)
    trace = list(open_trace(path, "bailian"))
    path.unlink()
    path.with_name(f"{name}.meta.json").unlink()
    return trace


def dealt(table: TTLTable, seed: int = 1) -> TTLTable:
    """The same groups and the same TTLs, dealt at random: what remains is not the groups'."""
    draw = random.Random(seed)
    ttls = [g.ttl_s for g in table.groups]
    draw.shuffle(ttls)
    values = list(table.categories.values())
    draw.shuffle(values)
    return replace(
        table,
        groups=tuple(replace(g, ttl_s=t) for g, t in zip(table.groups, ttls)),
        categories=dict(zip(table.categories, values)),
    )


def one(ttl_s: float) -> TTLTable:
    return TTLTable(residual_ttl_s=float(ttl_s), hash=TRACE_HASH)


def only_groups(log: PathSnapshot, found: Learnt, learning: Learning) -> Learnt:
    """Return a window's result with subtrees as the only kind of table."""
    if found.kind == GROUPS:
        return found
    kinds = (GROUPS,) if found.gains.get(GROUPS, -1.0) > learning.margin else ()
    return learn(log, None, replace(learning, kinds=kinds, held_out=0.0), TRACE_HASH)


def measure(name: str, trace: list[TraceRequest]) -> Iterator[dict[str, Any]]:
    """Rows of every way to set TTLs, at each of ``TTLS_S``'s bytes."""
    refresh_s, window_s = REFRESH_S.get(name, 900.0), WINDOW_S.get(name, 1800.0)
    log = path_snapshot(trace)
    segments = segments_of(log)
    half_s = (log.start_s + log.end_s) / 2
    first_half = log.until(half_s)
    warm_s = log.start_s + 2 * refresh_s
    sweeps = {
        since: fixed_ttls(segments, FULL_TTLS_S, since) for since in (log.start_s, half_s, warm_s)
    }
    for ttl_s, outcome in zip(FULL_TTLS_S, sweeps[log.start_s]):
        yield row(name, FIXED, ttl_s, outcome, None)
    snapshots = window_snapshots(trace, window_s, refresh_s)

    def ran(way: str, ttl_s: float, schedule: list, since_s: float, **more: Any) -> dict[str, Any]:
        outcome = simulate_ttl(log, schedule, since_s)
        against = at_equal_bytes(outcome, sweeps[since_s])
        return row(name, way, ttl_s, outcome, against, **more)

    for ttl_s in TTLS_S:
        budget = fixed_ttls(segments, [ttl_s])[0].mean_tokens
        start = (log.start_s, one(ttl_s))
        best = in_hindsight(log, budget, hash=TRACE_HASH)
        yield ran(HINDSIGHT, ttl_s, [(log.start_s, best.table)], log.start_s)
        yield ran(DEALT, ttl_s, [(log.start_s, dealt(best.table))], log.start_s)
        learning = Learning(like_ttl_s=ttl_s, refresh_s=half_s - log.start_s)
        made = learn(first_half, None, learning, TRACE_HASH)
        yield ran(HALF, ttl_s, [start, (half_s, made.table)], half_s, kinds={made.kind: 1})
        learning = replace(learning, refresh_s=refresh_s)
        began = time.perf_counter()
        found = [(at, learn(s, None, learning, TRACE_HASH)) for at, s in snapshots]
        seconds = (time.perf_counter() - began) / max(1, len(found))
        roots = [(at, only_groups(s, f, learning)) for (at, s), (_, f) in zip(snapshots, found)]
        for way, tables in ((ONLINE, found), (ONLINE_ROOTS, roots)):
            schedule = [start, *((at, f.table) for at, f in tables)]
            kinds = dict(Counter(f.kind for _, f in tables))
            yield ran(way, ttl_s, schedule, warm_s, kinds=kinds, seconds=seconds)
        schedule = [start, *((at, dealt(f.table)) for at, f in found)]
        yield ran(ONLINE_DEALT, ttl_s, schedule, warm_s)


def row(
    name: str, way: str, ttl_s: float, outcome: TTLOutcome, against: float | None, **more: Any
) -> dict[str, Any]:
    return {
        "trace": name,
        "way": way,
        "like_ttl_s": float(ttl_s),
        "hit_ratio": outcome.hit_ratio,
        "mean_gb": outcome.mean_tokens * BYTES_A_TOKEN / 1e9,
        "fixed_hit_ratio": against,
        **more,
    }


def tables(rows: list[dict[str, Any]]) -> str:
    """Markdown: points of hit ratio over one TTL at the same bytes."""
    parts = []
    for name in dict.fromkeys(r["trace"] for r in rows):
        mine = [r for r in rows if r["trace"] == name]
        ttls = sorted({r["like_ttl_s"] for r in mine if r["way"] != FIXED})
        fixed = {t: at_ttl(mine, t) for t in ttls}
        lines = [
            "| one TTL, s | " + " | ".join(f"{t:g}" for t in ttls) + " |",
            "|---" * (len(ttls) + 1) + "|",
            "| GB on the disk | " + " | ".join(f"{fixed[t][0]:.0f}" for t in ttls) + " |",
            "| its hit ratio, % | " + " | ".join(f"{100 * fixed[t][1]:.2f}" for t in ttls) + " |",
        ]
        for way in dict.fromkeys(r["way"] for r in mine if r["way"] != FIXED):
            cells = []
            for t in ttls:
                found = [r for r in mine if r["way"] == way and r["like_ttl_s"] == t]
                gain = 100 * (found[0]["hit_ratio"] - found[0]["fixed_hit_ratio"]) if found else 0
                cells.append(f"{gain:+.2f}" if found else "")
            lines.append(f"| {way} | " + " | ".join(cells) + " |")
        parts.append(f"### {name}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def at_ttl(rows: list[dict[str, Any]], ttl_s: float) -> tuple[float, float]:
    fixed = [r for r in rows if r["way"] == FIXED]
    ttls = [r["like_ttl_s"] for r in fixed]
    return tuple(  # type: ignore[return-value]
        float(np.interp(ttl_s, ttls, [r[key] for r in fixed])) for key in ("mean_gb", "hit_ratio")
    )


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Draw hit ratio against bytes above, points over one TTL at the same bytes below."""
    names = [n for n in NAMES if any(r["trace"] == n for r in rows)]
    figure, panels = plt.subplots(
        2, len(names), figsize=(3.9 * len(names), 6.2), layout="constrained", squeeze=False
    )
    for column, name in enumerate(names):
        mine = [r for r in rows if r["trace"] == name]
        fixed = [r for r in mine if r["way"] == FIXED]
        above, below = panels[0][column], panels[1][column]
        x = [r["mean_gb"] for r in fixed]
        above.plot(x, [100 * r["hit_ratio"] for r in fixed], color="C0", label="one TTL")
        below.axhline(0, color="C0")
        for way, style in STYLES.items():
            some = sorted((r for r in mine if r["way"] == way), key=lambda r: r["mean_gb"])
            gb = [r["mean_gb"] for r in some]
            gain = [100 * (r["hit_ratio"] - r["fixed_hit_ratio"]) for r in some]
            # Other measured periods have other curves: shown as the gain over this one.
            base = np.interp(gb, x, [100 * r["hit_ratio"] for r in fixed])
            if way in (HINDSIGHT, ONLINE):
                above.plot(gb, base + gain, label=way, ms=4, **style)
            below.plot(gb, gain, label=way, ms=4, **style)
        low = min(0.0, *(below.get_ylim()))
        below.set_ylim(max(low, -6), None)
        for panel in (above, below):
            panel.set_xscale("log")
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.grid(alpha=0.25)
        above.set_title(name, fontsize=10)
        below.set_xlabel("average GB on the disk")
    panels[0][0].set_ylabel("token hit ratio, %")
    panels[1][0].set_ylabel("points over one TTL, same bytes")
    handles, labels = panels[1][0].get_legend_handles_labels()
    line = panels[0][0].get_lines()[0]
    figure.legend(
        [line, *handles], ["one TTL", *labels], loc="outside lower center", ncols=4, frameon=False
    )
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the public traces")
    parser.add_argument("--out", type=Path, required=True, help="folder for the rows")
    parser.add_argument("--trace", choices=NAMES, help="simulate this one")
    parser.add_argument("--figure", type=Path, help="draw what is in --out")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.trace:
        rows = []
        for made in tqdm(measure(args.trace, load(args.trace, args.data, args.out)), disable=None):
            rows.append(made)
            (args.out / f"ttl-{args.trace}.json").write_text(json.dumps(rows) + "\n")
    found = [args.out / f"ttl-{name}.json" for name in NAMES]
    rows = [r for path in found if path.is_file() for r in json.loads(path.read_text())]
    (args.out / "ttl.md").write_text(tables(rows))
    print(tables(rows))
    if args.figure:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
