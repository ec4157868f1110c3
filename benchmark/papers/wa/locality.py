"""Figures 11 to 14 and 16 to 20: next turns, reuse times, places in the prompt, lifespans."""

from __future__ import annotations

from typing import Any

import numpy as np
from artefact import Context

from canopy_lab.characterize.lifespan import lifespan
from canopy_lab.characterize.locality import locality
from canopy_lab.characterize.observe import Observation, observe
from canopy_lab.characterize.reuse_time import reuse_times
from canopy_lab.characterize.turns import turns
from wa.picture import COLOURS, heat, label, panels, save
from wa.sources import agentic, conversation, trace_a, trace_b

AGES_S = np.geomspace(0.1, 36000.0, 200)


def figures_11_to_14(context: Context) -> Any:
    """Next turns by category over time; reuse times; single-turn and multi-turn reusers."""
    seen = {
        "trace-a": observe(trace_a()),
        "trace-b": observe(trace_b()),
        "conversation": observe(conversation(context.data)),
        "agentic": observe(agentic(context.data)),
    }
    figure, axes = panels(2, 3)
    result: dict[str, Any] = {}
    for colour, (name, one) in zip(COLOURS, seen.items()):
        talk, reuse = turns(one), reuse_times(one)
        row: dict[str, Any] = {
            "figure_12_reused_within_s_percent": {
                f"{s:g}": _percent(share) for s, share in reuse.within
            }
        }
        if talk is not None and (one.turn > 1).mean() > 0.01:
            row["figure_11"] = {
                "after_first_turn": round(talk.first_next, 3),
                "after_later_turn": round(talk.later_next, 3),
                "by_category": {n.name: round(n.probability, 3) for n in talk.next_turn},
                "mean_change_from_window_to_window": round(talk.drift, 3),
                "window_s": round(talk.window_s),
            }
        row["figure_13"] = _reusers(one)
        _cdf(axes[0, 1], one, np.ones(len(one.reused_from), bool), colour, name)
        first = one.turn[one.reused_from] == 1
        single = first & (one.turn[one.reused_by] == 1)
        if name != "agentic":
            _cdf(axes[0, 2], one, single, colour, f"{name}, by a first turn")
            if (first & ~single).sum() > 50:
                _cdf(axes[0, 2], one, first & ~single, colour, f"{name}, by a later turn", "--")
        result[name] = row
    a = seen["trace-a"]
    result["trace-a"]["figure_14_reuse_s_by_type"] = {}
    for colour, (i, kind) in zip(COLOURS, enumerate(a.labels)):
        mine = (a.kind[a.reused_from] == i) & (a.turn[a.reused_from] > 1)
        ages, weight = a.reuse_age_s[mine], a.reused_blocks[mine]
        result["trace-a"]["figure_14_reuse_s_by_type"][kind] = {
            "p50": round(_quantile(ages, weight, 0.5)),
            "p80": round(_quantile(ages, weight, 0.8)),
            "mean": round(float(np.average(ages, weights=weight))),
        }
        _cdf(axes[1, 0], a, mine, colour, kind)
    for place, name in ((axes[1, 1], "trace-a"), (axes[1, 2], "conversation")):
        talk = turns(seen[name])
        assert talk is not None
        rows = [np.nan_to_num(n.over_time) for n in talk.next_turn]
        heat(place, rows, f"Figure 11: next turn, {name}", "time window", "")
        place.set_yticks(range(len(rows)), [n.name for n in talk.next_turn])
    kinds = list(result["trace-a"]["figure_11"]["by_category"])
    axes[0, 0].barh(kinds, list(result["trace-a"]["figure_11"]["by_category"].values()),
                    color=COLOURS[0])  # fmt: skip
    axes[0, 0].invert_yaxis()
    label(axes[0, 0], "Figure 11: next turn by category, trace-a", "probability", "")
    label(axes[0, 1], "Figure 12: reuse time", "seconds", "share of reuses", log_x=True)
    label(axes[0, 2], "Figure 13: blocks of first turns, by who reuses", "seconds",
          "share of these reuses", log_x=True)  # fmt: skip
    label(axes[1, 0], "Figure 14: later turns, by type, trace-a", "seconds", "share of reuses",
          log_x=True)  # fmt: skip
    for axis, most in ((axes[0, 1], 1.5), (axes[0, 2], 1.7), (axes[1, 0], 1.5)):
        axis.set_ylim(0.0, most)  # room for the legend
        axis.legend(loc="upper left")
    save(figure, context.figure())
    return result


def _reusers(seen: Observation) -> dict[str, float]:
    """Return the shares of first-turn requests with a block that a first, or a later, turn reuses."""
    first = seen.turn[seen.reused_from] == 1
    later = seen.turn[seen.reused_by] > 1
    count = max(int((seen.turn == 1).sum()), 1)
    blocks = seen.reused_blocks
    total = max(int(blocks[first].sum()), 1)
    return {
        "first_turns_reused_by_a_first_turn_percent": _percent(
            len(np.unique(seen.reused_from[first & ~later])) / count
        ),
        "first_turns_reused_by_a_later_turn_percent": _percent(
            len(np.unique(seen.reused_from[first & later])) / count
        ),
        "reuses_of_their_blocks_by_a_later_turn_percent": _percent(
            blocks[first & later].sum() / total
        ),
        "p50_s_by_a_first_turn": round(
            _quantile(seen.reuse_age_s[first & ~later], blocks[first & ~later], 0.5), 1
        ),
        "p50_s_by_a_later_turn": round(
            _quantile(seen.reuse_age_s[first & later], blocks[first & later], 0.5), 1
        ),
    }


def figures_16_to_18(context: Context) -> Any:
    """Ideal hits when a part of every prompt is cached, by start and length; by type."""
    a, b = trace_a(), trace_b()
    seen = {
        "all types of trace-a": observe(a),
        **{
            f"trace-a, {kind}": observe([r for r in a if r.category == kind])
            for kind in ("text", "image", "file", "search")
        },
        "trace-b": observe(b),
        "conversation": observe(conversation(context.data)),
    }
    result, maps = {}, {}
    for name, one in seen.items():
        p = locality(one)
        maps[name] = p.all
        ideal = one.hits.sum() / one.blocks.sum()
        result[name] = {
            "whole_prompt_percent": _percent(ideal),
            "first_tenth_percent": _percent(p.first_tenth),
            "first_half_percent": _percent(p.first_half),
            "last_half_percent": _percent(p.last_half),
            "first_tenth_of_first_turns_percent": _percent(p.first_turns[0][0]),
        }
        if p.later_turns is not None and name == "all types of trace-a":
            maps["trace-a, later turns (Figure 17)"] = p.later_turns
    figure, axes = panels(2, 4)
    for axis, (name, rows) in zip(axes.flat, maps.items()):
        shown = heat(axis, rows, name, "start, tenths of the prompt", "length, tenths")
        shown.set_clim(0.0, 0.7)
    save(figure, context.figure())
    return result


def figures_19_20(context: Context) -> Any:
    """Lifespans, and their means by category over the day."""
    seen = {
        "trace-a": observe(trace_a()),
        "trace-b": observe(trace_b()),
        "conversation": observe(conversation(context.data)),
        "agentic": observe(agentic(context.data)),
    }
    figure, axes = panels(1, 3, 4.2)
    result = {}
    for colour, (name, one) in zip(COLOURS, seen.items()):
        life = lifespan(one)
        result[name] = {
            "used_once_percent": _percent(life.used_once),
            "p50_s": round(life.p50_s, 2),
            "p90_s": round(life.p90_s, 2),
            "p99_s": round(life.p99_s, 1),
            "longest_s": round(life.longest_s),
        }
        ages = np.maximum(life.age_s, 1e-2)
        axes[0, 0].plot(ages, life.dead, color=colour, label=name)
    label(axes[0, 0], "Figure 19: lifespan of blocks", "seconds", "share of blocks", log_x=True)
    axes[0, 0].legend(loc="lower right")
    for axis, name, windows in ((axes[0, 1], "trace-a", 24), (axes[0, 2], "conversation", 6)):
        names, rows, drift = _life_over_time(seen[name], windows)
        heat(axis, rows / np.nanmax(rows), f"Figure 20: mean lifespan, {name}", "window", "")
        axis.set_yticks(range(len(names)), names)
        result[name]["figure_20_change_from_window_to_window"] = round(drift, 3)
        result[name]["figure_20_windows"] = windows
    save(figure, context.figure())
    return result


def _life_over_time(seen: Observation, windows: int) -> tuple[list[str], np.ndarray, float]:
    """Mean lifespan by category of a block's last user and window of its first use; and the mean
    change from one window to the next, as a share of the category's mean."""
    category = seen.category[seen.last_request]
    life = seen.last_s - seen.first_s
    width = seen.span_s / windows
    window = np.minimum((seen.first_s - seen.time_s[0]) // width, windows - 1).astype(int)
    counts = np.bincount(category)
    chosen = np.argsort(-counts, kind="stable")[:10]
    rows, changes = [], []
    for one in chosen:
        mine = category == one
        blocks = np.bincount(window[mine], minlength=windows)
        total = np.bincount(window[mine], life[mine], windows)
        mean = np.divide(total, blocks, out=np.zeros(windows), where=blocks > 0)
        rows.append(mean)
        # The last windows are cut short by the trace's end.
        inside = mean[: windows - windows // 4]
        changes.append(np.abs(np.diff(inside)).mean() / max(inside.mean(), 1e-9))
    return [seen.category_name(int(c)) for c in chosen], np.array(rows), float(np.mean(changes))


def _cdf(
    axis: Any, seen: Observation, which: np.ndarray, colour: str, name: str, style: str = "-"
) -> None:
    ages, weight = seen.reuse_age_s[which], seen.reused_blocks[which]
    if len(ages):
        order = np.argsort(ages)
        below = np.cumsum(weight[order]) / weight.sum()
        at = np.searchsorted(ages[order], AGES_S, "right")
        axis.plot(AGES_S, np.concatenate([[0.0], below])[at], style, color=colour, label=name)


def _quantile(values: np.ndarray, weight: np.ndarray, q: float) -> float:
    if not len(values):
        return 0.0
    order = np.argsort(values)
    below = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(below, q * below[-1])])


def _percent(value: float) -> float:
    return round(100.0 * float(value), 2)
