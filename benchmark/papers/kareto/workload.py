"""Figures 1, 2, 3, 10 and 11: reuse in the traces, without a simulation."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from artefact import Context
from scipy.stats import ks_2samp

from canopy_lab.group_ttl.path_segments import PathSegments, segments_of
from canopy_lab.plan.prices import GIB
from canopy_lab.sim.stack import lru_curve
from canopy_lab.sim.ttl import path_snapshot
from kareto.setting import NAMES, TRACES, long_trace, profile

SIZES_GIB = (62.5, 125.0, 250.0, 500.0, 1000.0, 2000.0, 4000.0, 8000.0)
PHASE_S = 3600.0


def reuse_in_traces(context: Context) -> Any:
    """Figures 1, 2, 3, 10 and 11."""
    return {
        "figure 1": _figure_1(context),
        "figure 2": _figure_2(context),
        "figure 3": _figure_3(context),
        "figure 10": _figure_10(context),
        "figure 11": _figure_11(context),
    }


@cache
def _segments(name: str, context: Context) -> PathSegments:
    return segments_of(path_snapshot(long_trace(name, context.data)))


def _figure_1(context: Context) -> Any:
    """Storage over time: everything kept, and an oracle that drops a block after its last use."""
    found: dict[str, Any] = {}
    figure, panels = plt.subplots(1, 3, figsize=(11.5, 3.4), layout="constrained")
    for panel, name in zip(panels, TRACES):
        s = _segments(name, context)
        times = s.times_s[s.use_request]
        size = len(s)
        first, last = np.full(size, np.inf), np.full(size, -np.inf)
        np.minimum.at(first, s.use_segment, times)
        np.maximum.at(last, s.use_segment, times)
        held = s.tokens * profile().kv_bytes_per_token / GIB
        at = np.linspace(s.start_s, s.end_s, 121)
        kept = np.array([held[first <= t].sum() for t in at])
        oracle = np.array([held[(first <= t) & (last > t)].sum() for t in at])
        found[name] = {
            "kept_gib": round(float(kept.max()), 1),
            "oracle_peak_gib": round(float(oracle.max()), 1),
            "oracle_share_of_peak": round(float(oracle.max() / kept.max()), 4),
            "oracle_share_of_mean": round(float(oracle.mean() / kept.mean()), 4),
        }
        panel.plot((at - at[0]) / 60, kept, label="no TTL: everything kept")
        panel.plot((at - at[0]) / 60, oracle, label="oracle: gone after the last use")
        panel.set_title(NAMES[name], fontsize=10)
        panel.set_xlabel("minutes")
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("storage, GiB")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)  # fmt: skip
    figure.savefig(context.figure("-1"), dpi=95)
    plt.close(figure)
    return found


def _figure_2(context: Context) -> Any:
    """Return the share of blocks that have most hits."""
    found: dict[str, Any] = {}
    figure, panel = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    for name in TRACES:
        s = _segments(name, context)
        reuses = np.bincount(s.use_segment, minlength=len(s)) - 1
        order = np.argsort(-reuses, kind="stable")
        blocks = np.cumsum(s.tokens[order]) / s.tokens.sum()
        hits = np.cumsum((reuses * s.tokens)[order]) / (reuses * s.tokens).sum()
        found[name] = {
            f"blocks_for_{share:.0%}_of_hits": round(float(blocks[np.searchsorted(hits, share)]), 5)
            for share in (0.5, 0.9, 0.99)
        }
        found[name]["reused_blocks"] = round(float(s.tokens[reuses > 0].sum() / s.tokens.sum()), 5)
        keep = np.unique(np.searchsorted(blocks, np.geomspace(1e-5, 1, 300)).clip(0, len(s) - 1))
        panel.plot(100 * blocks[keep], 100 * hits[keep], label=NAMES[name])
    panel.axhline(90, color="grey", ls=":")
    panel.set_xscale("log")
    panel.set_xlabel("blocks, most reused first, %")
    panel.set_ylabel("hits, %")
    panel.grid(alpha=0.25)
    panel.legend(fontsize=8)
    figure.savefig(context.figure("-2"), dpi=95)
    plt.close(figure)
    return found


def _figure_3(context: Context) -> Any:
    """Token hit ratio against capacity (LRU), every size from one pass."""
    found: dict[str, Any] = {}
    figure, panel = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    for name in TRACES:
        trace = long_trace(name, context.data)
        block = trace[0].block_tokens * profile().kv_bytes_per_token / GIB
        curve = lru_curve(trace)
        ratio = [round(curve.token_hits(round(gib / block)) / curve.tokens, 4) for gib in SIZES_GIB]
        found[name] = {
            "gib": SIZES_GIB,
            "hits": ratio,
            "250_to_1000": round(ratio[4] - ratio[2], 4),
            "1000_to_2000": round(ratio[5] - ratio[4], 4),
        }
        panel.plot(SIZES_GIB, [100 * r for r in ratio], "o-", ms=4, label=NAMES[name])
    panel.set_xscale("log")
    panel.set_xlabel("capacity, GiB")
    panel.set_ylabel("prompt tokens hit, %")
    panel.set_ylim(0, 100)
    panel.grid(alpha=0.25)
    panel.legend(fontsize=8)
    figure.savefig(context.figure("-3"), dpi=95)
    plt.close(figure)
    return found


def _subtrees(s: PathSegments) -> tuple[np.ndarray, np.ndarray]:
    """(s,) the top of each segment's path, and (s,) reused tokens by top."""
    top = np.arange(len(s))
    for i, above in enumerate(s.parent.tolist()):
        if above >= 0:
            top[i] = top[above]
    reuses = (np.bincount(s.use_segment, minlength=len(s)) - 1) * s.tokens
    return top, np.bincount(top, weights=reuses, minlength=len(s))


def _figure_10(context: Context) -> Any:
    """Reuse of the subtrees below each initial prefix, ranked."""
    found: dict[str, Any] = {}
    figure, panel = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    for name in TRACES:
        s = _segments(name, context)
        ranked = np.sort(_subtrees(s)[1])[::-1]
        whole = ranked.sum()
        tops = int((s.parent < 0).sum())
        found[name] = {
            "subtrees": tops,
            **{f"top_{k}": round(float(ranked[:k].sum() / whole), 4) for k in (1, 10, 64)},
            "for_90%": int(np.searchsorted(np.cumsum(ranked) / whole, 0.9)) + 1,
        }
        some = ranked[: max(1, int((ranked > 0).sum()))]
        blocks = some / profile_block(name, context)
        panel.plot(np.arange(1, len(some) + 1), blocks, label=NAMES[name])
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("rank of the subtree")
    panel.set_ylabel("block reuses")
    panel.grid(alpha=0.25)
    panel.legend(fontsize=8)
    figure.savefig(context.figure("-10"), dpi=95)
    plt.close(figure)
    return found


def profile_block(name: str, context: Context) -> int:
    """Tokens of a block of a trace."""
    return long_trace(name, context.data)[0].block_tokens


def _figure_11(context: Context) -> Any:
    """Reuse intervals of the three most reused subtrees, in the first and the last hour."""
    found: dict[str, Any] = {}
    figure, panels = plt.subplots(3, 3, figsize=(10.5, 7.2), layout="constrained", sharex=True)
    edges = np.geomspace(0.1, 3600, 40)
    for column, name in enumerate(TRACES):
        s = _segments(name, context)
        top, reused = _subtrees(s)
        best = np.argsort(-reused, kind="stable")[:3]
        times = s.times_s[s.use_request]
        of, gaps = top[s.use_segment], s.gaps_s
        again = times + gaps
        early = np.isfinite(gaps) & (again <= s.start_s + PHASE_S)
        late = np.isfinite(gaps) & (times >= s.end_s - PHASE_S)
        samples = [(gaps[early & (of == b)], gaps[late & (of == b)]) for b in best]
        same = [round(float(ks_2samp(a, b).statistic), 3) for a, b in samples if len(a) and len(b)]
        across = [
            round(float(ks_2samp(x[p], y[p]).statistic), 3)
            for x, y in combinations(samples, 2)
            for p in (0, 1)
            if len(x[p]) and len(y[p])
        ]
        found[name] = {
            "median_s": [
                [round(float(np.median(p)), 1) if len(p) else None for p in pair]
                for pair in samples
            ],
            "intervals": [[len(a), len(b)] for a, b in samples],
            "ks_first_to_last_hour": same,
            "ks_between_subtrees": across,
        }
        for line, (a, b) in enumerate(samples):
            for part, label in ((a, "first hour"), (b, "last hour")):
                if len(part):
                    share = np.full(len(part), 100 / len(part))
                    panels[line][column].hist(part, edges, weights=share, alpha=0.55, label=label)
            panels[line][column].set_xscale("log")
            panels[line][column].grid(alpha=0.25)
        panels[0][column].set_title(NAMES[name], fontsize=10)
        panels[2][column].set_xlabel("seconds until the next use")
    for line in range(3):
        panels[line][0].set_ylabel(f"subtree {line + 1}: % of reuses")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)  # fmt: skip
    figure.savefig(context.figure("-11"), dpi=85)
    plt.close(figure)
    return found
