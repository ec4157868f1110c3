"""Figure 14: TTLs by group against one TTL, on the disk's average use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from kareto.algorithm2 import group_ttls
from kareto.setting import TRACE_NAMES, TRACES, h20_profile, long_trace

from canopy_lab.group_ttl.allocate import allocate
from canopy_lab.group_ttl.groups import GroupSelection, choose_groups
from canopy_lab.group_ttl.histogram import GRID_S
from canopy_lab.group_ttl.learn import LearningOptions, equal_bytes_hit_ratio, learn, learnt_table
from canopy_lab.group_ttl.paths import Paths, paths_of, segments_of
from canopy_lab.group_ttl.replay import TTLOutcome, fixed_ttls, simulate_ttl
from canopy_lab.plan.disk_class import GIB
from question import Question, QuestionRun
from sglang_canopy.ttl.table import TRACE_HASH, TTLTable

TTLS_S = (10.0, 30.0, 60.0, 300.0)
LEARNT_TTLS_S = (30.0, 300.0)
SPAN_S = {"A": 2400.0, "B": 600.0, "C": 7200.0}


def figure_14(run: QuestionRun) -> Any:
    """Return points of hit ratio over one TTL at the same average bytes, replayed, by trace."""
    rows_by_trace = {name: _compare_trace(name, run) for name in TRACES}
    _draw(rows_by_trace, run.figure_path())
    return rows_by_trace


def _compare_trace(name: str, run: QuestionRun) -> list[dict[str, Any]]:
    """Return a row for each TTL: its hit ratio (``one_ttl``) and GiB; by method the gain in points in
    hindsight, with its GiB, and the gain in the second half if learnt from the first."""
    trace = long_trace(name, run.data_folder)
    end_s = trace[0].time_s + SPAN_S[name]
    log = paths_of([r for r in trace if r.time_s <= end_s])
    segments = segments_of(log)
    half_s = (log.start_s + log.end_s) / 2
    grid_s = GRID_S[(GRID_S >= 1) & (GRID_S <= 8192)]
    outcomes = {from_s: fixed_ttls(segments, grid_s, from_s) for from_s in (log.start_s, half_s)}
    rows = []
    for ttl_s in TTLS_S:
        one_ttl = fixed_ttls(segments, [ttl_s])[0]
        row = {
            "like_ttl_s": ttl_s,
            "one_ttl": round(one_ttl.hit_ratio, 4),
            "mean_gib": _gib_of(one_ttl.mean_tokens),
        }
        for method, table in _hindsight_tables(log, one_ttl.mean_tokens).items():
            replayed = simulate_ttl(log, [(log.start_s, table)])
            row[method] = _gain_points(replayed, outcomes[log.start_s])
            row[f"{method}, GiB"] = _gib_of(replayed.mean_tokens)
        if ttl_s in LEARNT_TTLS_S:
            first_table = TTLTable(residual_ttl_s=ttl_s, hash=TRACE_HASH)
            for method, table in _learnt_tables(log, half_s, ttl_s).items():
                replayed = simulate_ttl(log, [(log.start_s, first_table), (half_s, table)], half_s)
                row[method] = _gain_points(replayed, outcomes[half_s])
        rows.append(row)
    return rows


def _hindsight_tables(log: Paths, tokens: float) -> dict[str, TTLTable]:
    """Return the tables by method for an average of ``tokens``, from the whole log."""
    groups = choose_groups(segments_of(log), tokens, GroupSelection(64))
    allocation = allocate(groups.curves, tokens)
    # The paper charges every block a whole TTL after its last use, the trace's end or not.
    return {
        "Algorithm 2": group_ttls(log, tokens * (log.end_s - log.start_s)),
        "canopy": learnt_table(groups, allocation, "hindsight", log.block_tokens, TRACE_HASH).table,
    }


def _learnt_tables(log: Paths, half_s: float, ttl_s: float) -> dict[str, TTLTable]:
    """Return the tables by method for as many mean tokens as one TTL, from the log before ``half_s``."""
    before, learning_s = log.until(half_s), half_s - log.start_s
    mean_tokens = fixed_ttls(segments_of(before), [ttl_s])[0].mean_tokens
    learning = LearningOptions(reference_ttl_s=ttl_s, refresh_s=learning_s)
    return {
        "Algorithm 2, next half": group_ttls(before, mean_tokens * learning_s),
        "canopy, next half": learn(before, None, learning, TRACE_HASH).table,
    }


def _gain_points(replayed: TTLOutcome, outcomes: list[TTLOutcome]) -> float:
    """Return the points of hit ratio over one TTL with the same average tokens."""
    return round(100 * (replayed.hit_ratio - equal_bytes_hit_ratio(replayed, outcomes)), 2)


def _gib_of(tokens: float) -> float:
    return round(tokens * h20_profile().kv_bytes_per_token / GIB, 1)


def _draw(rows_by_trace: dict[str, list[dict[str, Any]]], path: Path) -> None:
    figure, panels = plt.subplots(1, 3, figsize=(11.5, 3.6), layout="constrained")
    for panel, (name, rows) in zip(panels, rows_by_trace.items()):
        x = np.arange(len(rows))
        for i, method in enumerate(("Algorithm 2", "canopy")):
            gains = [row[method] for row in rows]
            panel.bar(x + 0.4 * (i - 0.5), gains, 0.38, label=f"{method}, in hindsight")
        learnt_rows = [i for i, row in enumerate(rows) if "canopy, next half" in row]
        for method, marker in (("Algorithm 2, next half", "v"), ("canopy, next half", "^")):
            gains = [rows[i][method] for i in learnt_rows]
            panel.plot(learnt_rows, gains, "k" + marker, ms=6, label=method)
        panel.axhline(0, color="k", lw=0.8)
        panel.set_xticks(x, [f"{r['like_ttl_s']:g} s\n{100 * r['one_ttl']:.0f} %" for r in rows])
        panel.set_title(TRACE_NAMES[name], fontsize=10)
        panel.set_xlabel("bytes of one TTL of ..., and what it hits")
        panel.grid(alpha=0.25, axis="y")
    panels[0].set_ylabel("points of hit ratio over one TTL\nat the same average bytes")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)  # fmt: skip
    figure.savefig(path, dpi=90)
    plt.close(figure)


QUESTIONS = (Question("figure-14", "hits by group TTLs and by one TTL", figure_14, 2.0),)
