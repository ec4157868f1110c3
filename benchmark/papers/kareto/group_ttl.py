"""Figure 14: TTLs by group against one TTL, on the disk's average use."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from kareto.algorithm2 import group_ttls
from kareto.setting import NAMES, TRACES, long_trace, profile

from canopy_lab.group_ttl.histogram import GRID_S
from canopy_lab.group_ttl.learn import Learning, at_equal_bytes, in_hindsight, learn
from canopy_lab.group_ttl.paths import paths_of, segments_of
from canopy_lab.group_ttl.replay import fixed_ttls, simulate_ttl
from canopy_lab.plan.disk_class import GIB
from question import Context, Question
from sglang_canopy.ttl.table import TRACE_HASH, TTLTable

TTLS_S = (10.0, 30.0, 60.0, 300.0)
LEARNT_S = (30.0, 300.0)
SPAN_S = {"A": 2400.0, "B": 600.0, "C": 7200.0}


def figure_14(context: Context) -> Any:
    """Points of hit ratio over one TTL at the same average bytes, replayed."""
    found: dict[str, Any] = {}
    figure, panels = plt.subplots(1, 3, figsize=(11.5, 3.6), layout="constrained")
    for panel, name in zip(panels, TRACES):
        trace = long_trace(name, context.data)
        end_s = trace[0].time_s + SPAN_S[name]
        log = paths_of([r for r in trace if r.time_s <= end_s])
        segments = segments_of(log)
        half = (log.start_s + log.end_s) / 2
        before = log.until(half)
        grid = GRID_S[(GRID_S >= 1) & (GRID_S <= 8192)]
        sweep = {since: fixed_ttls(segments, grid, since) for since in (log.start_s, half)}
        rows = []
        for ttl_s in TTLS_S:
            one = fixed_ttls(segments, [ttl_s])[0]
            tokens = one.mean_tokens
            # The paper charges every block a whole TTL after its last use, the trace's end or not.
            seconds = log.end_s - log.start_s
            tables = {
                "Algorithm 2": group_ttls(log, tokens * seconds),
                "canopy": in_hindsight(log, tokens, hash=TRACE_HASH).table,
            }
            row: dict[str, Any] = {"like_ttl_s": ttl_s, "one_ttl": round(one.hit_ratio, 4)}
            row["mean_gib"] = round(tokens * profile().kv_bytes_per_token / GIB, 1)
            for way, table in tables.items():
                won = simulate_ttl(log, [(log.start_s, table)])
                gain = won.hit_ratio - at_equal_bytes(won, sweep[log.start_s])
                row[way] = round(100 * gain, 2)
                row[f"{way}, GiB"] = round(won.mean_tokens * profile().kv_bytes_per_token / GIB, 1)
            if ttl_s in LEARNT_S:
                past = fixed_ttls(segments_of(before), [ttl_s])[0].mean_tokens
                first = TTLTable(residual_ttl_s=ttl_s, hash=TRACE_HASH)
                learning = Learning(like_ttl_s=ttl_s, refresh_s=half - log.start_s)
                later = {
                    "Algorithm 2, next half": group_ttls(before, past * (half - log.start_s)),
                    "canopy, next half": learn(before, None, learning, TRACE_HASH).table,
                }
                for way, table in later.items():
                    won = simulate_ttl(log, [(log.start_s, first), (half, table)], half)
                    row[way] = round(100 * (won.hit_ratio - at_equal_bytes(won, sweep[half])), 2)
            rows.append(row)
        found[name] = rows
        x = np.arange(len(rows))
        for i, way in enumerate(("Algorithm 2", "canopy")):
            panel.bar(x + 0.4 * (i - 0.5), [r[way] for r in rows], 0.38, label=f"{way}, in hindsight")  # fmt: skip
        some = [i for i, r in enumerate(rows) if "canopy, next half" in r]
        for way, mark in (("Algorithm 2, next half", "v"), ("canopy, next half", "^")):
            panel.plot(some, [rows[i][way] for i in some], "k" + mark, ms=6, label=way)
        panel.axhline(0, color="k", lw=0.8)
        panel.set_xticks(x, [f"{r['like_ttl_s']:g} s\n{100 * r['one_ttl']:.0f} %" for r in rows])
        panel.set_title(NAMES[name], fontsize=10)
        panel.set_xlabel("bytes of one TTL of ..., and what it hits")
        panel.grid(alpha=0.25, axis="y")
    panels[0].set_ylabel("points of hit ratio over one TTL\nat the same average bytes")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)  # fmt: skip
    figure.savefig(context.figure(), dpi=90)
    plt.close(figure)
    return found


QUESTIONS = (Question("figure-14", "hits by group TTLs and by one TTL", figure_14, 2.0),)
