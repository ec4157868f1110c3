"""Figures 15, 23 and 29: a category's reuse probability, fitted on one stretch of time and tried on
the next (Sections 3.4, 4.2, A.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
from shared_traces import mooncake, trace_a, trace_b
from wa.picture import COLOURS, name_axes, new_panels, save

from canopy_lab.characterize.observe import TOP_TURN, Observation, observe
from canopy_lab.sim.driver import distinct_blocks, simulate
from question import Question, QuestionRun
from sglang_canopy.policy.registry import make_policy

MIN_BLOCKS = 2000
MAX_CATEGORIES = 6
HORIZON_SHARE = 0.45
"""Uses of a stretch are followed for this share of its length."""


def figures_15_29(run: QuestionRun) -> Any:
    """Fit an hour, test the next, another hour of the day, and another day."""
    day, next_day = observe(trace_a()), observe(trace_a(seed=2))
    hour_s = 3600.0
    cases = {  # fitted on, from, tested on, from, and the seconds of either stretch
        "trace-a, 9 to 10 h on 10 to 11 h": (day, 9 * hour_s, day, 10 * hour_s, hour_s),
        "trace-a, 9 to 10 h on 3 to 4 h": (day, 9 * hour_s, day, 3 * hour_s, hour_s),
        "trace-a, a morning on another day's": (day, 8 * hour_s, next_day, 8 * hour_s, 4 * hour_s),
    }
    for name, trace in (
        ("trace-b", trace_b(2400.0)),
        ("conversation", mooncake(run.data_folder, "conversation")),
        ("Mooncake synthetic", mooncake(run.data_folder, "synthetic")),
    ):
        observation = observe(trace)
        half_s, start_s = observation.span_s / 2.0, float(observation.time_s[0])
        halves = (observation, start_s, observation, start_s + half_s, half_s)
        cases[f"{name}, first half on second"] = halves
    result: dict[str, Any] = {}
    rows_by_case = {}
    for name, case in cases.items():
        rows = _compare_stretches(*case)
        rows_by_case[name] = rows
        weight = np.array([r["blocks"] for r in rows], float)
        result[name] = {
            "categories": {
                r["name"]: {
                    k: round(r[k], 3)
                    for k in ("reused", "exponential_here", "exponential_next", "curve_next",
                              "everybody_next")
                }
                for r in rows
            },
            "mean_by_blocks": {
                k: round(float(np.average([r[k] for r in rows], weights=weight)), 3)
                for k in ("exponential_here", "exponential_next", "curve_next", "everybody_next")
            },
        }  # fmt: skip
    result["what a profile of the first half wins in the second"] = _profiled_hits(run)
    _draw_curves(rows_by_case, run)
    return result


def _reuse_curve(
    observation: Observation, category: int | None, start_s: float, length_s: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """(ages, share of what the category used in the stretch that was used again by each, blocks).

    Uses in its first 55 % are each followed for the other 45 %: all have the same horizon.
    """
    categories = observation.kind * TOP_TURN + np.clip(observation.turn, 1, TOP_TURN) - 1
    horizon_s = HORIZON_SHARE * length_s
    until_s = start_s + length_s - horizon_s
    used_s = observation.time_s[observation.reused_from]
    reused_mask = (used_s >= start_s) & (used_s < until_s)
    waiting_mask = (observation.last_s >= start_s) & (observation.last_s < until_s)
    if category is not None:
        reused_mask &= categories[observation.reused_from] == category
        waiting_mask &= categories[observation.last_request] == category
    total = float(observation.reused_blocks[reused_mask].sum() + waiting_mask.sum())
    ages = np.linspace(0.0, horizon_s, 120)
    order = np.argsort(observation.reuse_age_s[reused_mask])
    weight = np.concatenate([[0], np.cumsum(observation.reused_blocks[reused_mask][order])])
    counts = np.searchsorted(observation.reuse_age_s[reused_mask][order], ages, "right")
    return ages, weight[counts] / max(total, 1.0), total


def _fit_exponential(ages: np.ndarray, cdf: np.ndarray) -> np.ndarray:
    """P (1 - exp(-x / m)) with P the share used again and m their mean gap."""
    share = cdf[-1]
    share_of_age = np.diff(cdf, prepend=0.0)
    mean_gap_s = (ages * share_of_age).sum() / share if share > 0 else 1.0
    return share * -np.expm1(-ages / max(mean_gap_s, 1e-9))


def _compare_stretches(
    first: Observation, first_s: float, second: Observation, second_s: float, length_s: float
) -> list[dict[str, Any]]:
    """Largest distances of distribution functions, by category."""
    in_stretch = (first.time_s >= first_s) & (first.time_s < first_s + length_s)
    category = first.kind * TOP_TURN + np.clip(first.turn, 1, TOP_TURN) - 1
    counts = np.bincount(category[in_stretch], first.blocks[in_stretch])
    _, all_cdf, _ = _reuse_curve(first, None, first_s, length_s)
    rows = []
    for code in np.argsort(-counts, kind="stable")[:MAX_CATEGORIES]:
        ages, first_cdf, blocks = _reuse_curve(first, int(code), first_s, length_s)
        name = first.category_name(int(code))
        kind, turn = divmod(int(code), TOP_TURN)
        other = second.labels.index(first.labels[kind]) * TOP_TURN + turn
        _, second_cdf, second_blocks = _reuse_curve(second, other, second_s, length_s)
        if min(blocks, second_blocks) < MIN_BLOCKS:
            continue
        fitted = _fit_exponential(ages, first_cdf)
        rows.append(
            {
                "name": name, "blocks": blocks, "reused": float(first_cdf[-1]), "ages": ages,
                "here": first_cdf, "there": second_cdf, "fitted": fitted,
                "exponential_here": float(np.abs(fitted - first_cdf).max()),
                "exponential_next": float(np.abs(fitted - second_cdf).max()),
                "curve_next": float(np.abs(first_cdf - second_cdf).max()),
                "everybody_next": float(np.abs(all_cdf - second_cdf).max()),
            }
        )  # fmt: skip
    return rows


def _profiled_hits(run: QuestionRun) -> dict[str, Any]:
    """Block hits in % on the second half of the conversation trace, at 5 % of its blocks."""
    trace = mooncake(run.data_folder, "conversation")
    half = len(trace) // 2
    first, second = trace[:half], trace[half:]
    capacity_blocks = int(0.05 * distinct_blocks(second))
    rows = {"lru": simulate(second, make_policy("lru"), capacity_blocks).block_hit_ratio}
    for name, options in (("exponential", {"model": "exponential"}), ("survival", {})):
        learnt = make_policy("wa", options)
        simulate(first, learnt, int(0.05 * distinct_blocks(first)))
        restored = make_policy("wa", options)
        restored.restore(learnt.state())
        rows[f"{name}, started from the first half"] = simulate(
            second, restored, capacity_blocks
        ).block_hit_ratio
        rows[f"{name}, started from nothing"] = simulate(
            second, make_policy("wa", options), capacity_blocks
        ).block_hit_ratio
    return {k: round(100.0 * v, 2) for k, v in rows.items()}


def _draw_curves(rows_by_case: dict[str, Any], run: QuestionRun) -> None:
    names = [n for n in rows_by_case if not n.endswith("3 to 4 h")]
    figure, axes = new_panels(1, len(names), 3.3)
    for axis, name in zip(axes[0], names):
        for colour, row in zip(COLOURS, rows_by_case[name][:4]):
            axis.plot(row["ages"], row["here"], color=colour, label=row["name"])
            axis.plot(row["ages"], row["there"], ":", color=colour)
            axis.plot(row["ages"], row["fitted"], "--", color=colour, linewidth=0.8)
        name_axes(axis, name.replace(", ", ",\n", 1), "seconds since the use", "used again by then")
        axis.set_ylim(0, 1.7 * axis.get_ylim()[1])
        axis.legend(loc="upper left", ncols=2, title="line: first, dots: second, dashes: fitted")
    save(figure, run.figure_path())


QUESTIONS = (
    Question(
        "figures-15-29",
        "Reuse probability by category: one hour, the next, another day.",
        figures_15_29,
        1.5,
    ),
)
