"""The table of ``canopy simulate``: a line per policy and capacity, means over the seeds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from canopy_lab.report.table import short_number, text_table
from sglang_canopy.policy.registry import CANOPYS_LRU, SGLANGS_LRU

SweepRow = Mapping[str, Any]
BASELINE_POLICIES, BOUND_POLICY = (SGLANGS_LRU, CANOPYS_LRU), "belady"
"""Policies that others are compared with, the preferred first; and the bound."""


def group_by_cell(rows: Sequence[SweepRow]) -> dict[tuple[str, int], list[SweepRow]]:
    """Group rows that differ in the seed only, by label (with ``(placebo)``) and capacity's index."""
    cells: dict[tuple[str, int], list[SweepRow]] = {}
    capacity_counts: dict[tuple[str, int], int] = {}
    for row in rows:
        label = row["policy"] + (" (placebo)" if row["placebo"] else "")
        capacity_index = capacity_counts.get((label, row["seed"]), 0)
        capacity_counts[label, row["seed"]] = capacity_index + 1
        cells.setdefault((label, capacity_index), []).append(row)
    return cells


def mean(rows: Sequence[SweepRow], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


def sweep_table(rows: Sequence[SweepRow]) -> str:
    """Return a sweep's rows as text, with the gap to hindsight if it was simulated."""
    cells = group_by_cell(rows)
    baseline = _baseline({label for label, _ in cells})
    with_gap = baseline is not None and (BOUND_POLICY, 0) in cells
    header = ["policy", "capacity", "blocks", "block hit %", *["gap %"] * with_gap, "token hit %"]
    header += ["prefill s", f"against {baseline}"] if baseline else ["prefill s"]
    header += ["uncached p50", "p90", "p95", "p99", "TEL", "over", "s"]
    table = []
    for (label, index), group in cells.items():
        hits = [100 * row["block_hit_ratio"] for row in group]
        spread = np.ptp(hits) / 2
        texts = [
            label,
            f"{100 * mean(group, 'capacity_fraction'):.3g} %",
            f"{mean(group, 'capacity_blocks'):.0f}",
            f"{np.mean(hits):.2f}" + (f" ±{spread:.2f}" if spread else ""),
        ]
        if with_gap and baseline:
            texts.append(_gap(cells, index, float(np.mean(hits)), baseline))
        texts.append(f"{100 * mean(group, 'token_hit_ratio'):.2f}")
        seconds = mean(group, "prefill_s")
        texts.append(f"{seconds:.0f}")
        if baseline:
            baseline_s = mean(cells[baseline, index], "prefill_s")
            texts.append(f"{100 * (seconds / baseline_s - 1):+.1f} %")
        texts += [short_number(mean(group, f"uncached_tokens_p{p}")) for p in (50, 90, 95, 99)]
        texts += [short_number(mean(group, "tel_tokens")), f"{mean(group, 'slo_violations'):.0f}"]
        table.append([*texts, f"{mean(group, 'seconds'):.2f}"])
    return text_table(header, table)


def sweep_notes(rows: Sequence[SweepRow]) -> list[str]:
    """Explain the table's columns, and the sizes behind it."""
    first_row, seeds = rows[0], len({row["seed"] for row in rows})
    lower = min(row["tel_threshold_tokens"] for row in rows)
    upper = max(row["tel_threshold_tokens"] for row in rows)
    threshold_text = f"{lower:.0f}" if lower == upper else f"LRU's P90 ({lower:.0f} to {upper:.0f})"
    notes = [
        f"{first_row['requests']} requests, {first_row['distinct_blocks']} distinct blocks of "
        f"{first_row['block_tokens']} tokens"
    ]
    if seeds > 1:
        notes.append(f"means over {seeds} seeds, ± half the range")
    policies = {row["policy"] for row in rows}
    if BOUND_POLICY in policies and (baseline := _baseline(policies)):
        notes.append(f"gap: share of the way from {baseline} to the hindsight bound {BOUND_POLICY}")
    notes.append(
        f"prefill s: seconds of all requests, each alone, under the profile {first_row['prefill_profile']}"
    )
    notes.append(f"TEL: uncached tokens above {threshold_text}; over: requests above it")
    return notes


def _baseline(labels: Collection[str]) -> str | None:
    return next((base for base in BASELINE_POLICIES if base in labels), None)


def _gap(
    cells: Mapping[tuple[str, int], Sequence[SweepRow]], index: int, hits: float, base: str
) -> str:
    base_percent = 100 * mean(cells[base, index], "block_hit_ratio")
    bound_percent = 100 * mean(cells[BOUND_POLICY, index], "block_hit_ratio")
    if bound_percent - base_percent <= 0.5:  # a difference in points, too small for a share
        return ""
    return str(round(100 * (hits - base_percent) / (bound_percent - base_percent)))
