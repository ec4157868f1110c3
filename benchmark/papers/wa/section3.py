"""Figures 4 to 10: reuse, its users, and lengths of conversations (3.2, 3.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
from artefact import Context

from canopy_lab.characterize.hits import ideal_hits
from canopy_lab.characterize.observe import Observation, observe
from canopy_lab.characterize.skew import skew
from canopy_lab.characterize.turns import turns
from wa.picture import COLOURS, heat, label, panels, save
from wa.sources import conversation, trace_a, trace_b

HEAT_USERS = 40


def figures_4_to_10(context: Context) -> Any:
    """Ideal hits over time, types, users, turns."""
    seen = {
        "trace-a": observe(trace_a()),
        "trace-b": observe(trace_b()),
        "conversation": observe(conversation(context.data)),
    }
    result = {name: _answers(one) for name, one in seen.items()}
    _draw(seen, result, context)
    for answers in result.values():
        for curve in ("heat", "turns_by_user", "hits_over_time"):
            answers.pop(curve, None)
    return result


def _answers(seen: Observation) -> dict[str, Any]:
    hits, shares, talk = ideal_hits(seen), skew(seen), turns(seen)
    kinds = {
        name: {
            "requests_percent": _percent((seen.kind == i).mean()),
            "multi_turn_percent": _percent((seen.turn[seen.kind == i] > 1).mean()),
        }
        for i, name in enumerate(seen.labels)
    }
    first = seen.turn == 1
    answers: dict[str, Any] = {
        "requests": seen.requests,
        "figure_4_ideal_block_hit_percent": _percent(hits.block_hit_ratio),
        "hits_over_time": [_percent(v) for v in hits.window_hit_ratio if not np.isnan(v)],
        "figure_5_types": kinds,
        "hits_of_first_turns_percent": _percent(seen.hits[first].sum() / max(seen.hits.sum(), 1)),
        "top_tenth_of_blocks_reuses_percent": _percent(shares.block_reuses.top_tenth),
    }
    if shares.user_hits and shares.user_requests:
        answers |= {
            "figure_6_hits_across_users_percent": _percent(shares.cross_user_hits or 0.0),
            "figure_7_users_with_90_percent_of_hits": _percent(shares.user_hits.owners_of_90),
            "figure_8_users_with_90_percent_of_requests": _percent(
                shares.user_requests.owners_of_90
            ),
            "heat": _heat(seen),
        }
    if talk is not None:
        answers["figure_9"] = {
            "first_turns_percent": _percent(talk.first_turn_share),
            "turn_p50": talk.p50,
            "turn_p90": talk.p90,
            "longest": talk.longest,
        }
    if seen.has_users and (seen.turn > 1).mean() > 0.05:
        mean, deviation = _turns_by_user(seen)
        answers["turns_by_user"] = (mean, deviation)
        top = np.sort(mean)[::-1]
        answers["figure_10"] = {
            "users": len(mean),
            "median_of_mean_turns": round(float(np.median(mean)), 2),
            "top_tenth_over_mean": round(float(top[: len(top) // 10].mean() / mean.mean()), 2),
            "deviation_p50": round(float(np.median(deviation)), 2),
            "deviation_most": round(float(deviation.max()), 2),
        }
    return answers


def _heat(seen: Observation) -> np.ndarray:
    """Return log10(1 + hits) by [previous user of the blocks, user that hits them], for the busiest users."""
    from_user, by_user = seen.user[seen.reused_from], seen.user[seen.reused_by]
    hits = np.bincount(by_user, seen.reused_blocks, int(seen.user.max()) + 1)
    busiest = np.argsort(-hits, kind="stable")[:HEAT_USERS]
    place = np.full(len(hits), -1)
    place[busiest] = np.arange(len(busiest))
    inside = (place[from_user] >= 0) & (place[by_user] >= 0)
    cells = np.zeros((HEAT_USERS, HEAT_USERS))
    np.add.at(cells, (place[from_user[inside]], place[by_user[inside]]), seen.reused_blocks[inside])
    return np.log10(1.0 + cells)


def _turns_by_user(seen: Observation) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation of turns per conversation, for users with two or more conversations."""
    last = np.zeros(int(seen.conversation.max()) + 1)
    np.maximum.at(last, seen.conversation, seen.turn)
    owner = np.zeros(len(last), int)
    owner[seen.conversation] = seen.user
    count = np.bincount(owner)
    mean = np.bincount(owner, last) / np.maximum(count, 1)
    square = np.bincount(owner, last**2) / np.maximum(count, 1)
    some = count >= 2
    return mean[some], np.sqrt(np.maximum(square - mean**2, 0.0))[some]


def _draw(seen: dict[str, Observation], result: dict[str, Any], context: Context) -> None:
    figure, axes = panels(2, 4)
    for colour, (name, answers) in zip(COLOURS, result.items()):
        values = answers["hits_over_time"]
        axes[0, 0].plot(np.linspace(0, 1, len(values)), values, color=colour, label=name)
        h = skew(seen[name])
        if h.user_hits and h.user_requests:
            for part, style in ((h.user_hits, "-"), (h.user_requests, "--")):
                what = "hits" if style == "-" else "requests"
                axes[0, 3].plot(part.top, part.share, style, color=colour, label=f"{name}, {what}")
        t = turns(seen[name])
        if t is not None and t.longest > 2:
            axes[1, 0].plot(t.turn, np.maximum(t.share_beyond, 1e-5), color=colour, label=name)
    label(axes[0, 0], "Figure 4: ideal hit ratio over time", "part of the trace", "block hits, %")
    axes[0, 0].set_ylim(0, 100)
    axes[0, 0].legend(loc="upper right")
    types = result["trace-a"]["figure_5_types"]
    x = np.arange(len(types))
    axes[0, 1].bar(x - 0.2, [t["requests_percent"] for t in types.values()], 0.4, color=COLOURS[0])
    axes[0, 1].bar(
        x + 0.2, [t["multi_turn_percent"] for t in types.values()], 0.4, color=COLOURS[1]
    )
    axes[0, 1].set_xticks(x, list(types))
    axes[0, 1].legend(["share of requests", "of them later turns"], loc="upper right")
    label(axes[0, 1], "Figure 5: types of trace-a", "", "%")
    heat(axes[0, 2], result["trace-a"]["heat"], "Figure 6: hits between users, trace-a",
         "user that hits", "user that used last")  # fmt: skip
    heat(axes[1, 1], result["trace-b"]["heat"], "Figure 6: the same, trace-b",
         "user that hits", "user that used last")  # fmt: skip
    label(axes[0, 3], "Figures 7, 8: what the busiest users hold", "share of users", "share")
    axes[0, 3].legend(loc="lower right")
    axes[1, 0].set_yscale("log")
    label(axes[1, 0], "Figure 9: turn numbers", "turn", "requests beyond", log_x=True)
    axes[1, 0].legend(loc="upper right")
    mean, deviation = result["trace-a"]["turns_by_user"]
    for axis, values, what in ((axes[1, 2], mean, "mean"), (axes[1, 3], deviation, "deviation")):
        axis.plot(np.linspace(0, 1, len(values)), np.sort(values)[::-1], color=COLOURS[0])
        label(axis, f"Figure 10: {what} of turns by user, trace-a", "users, sorted", "turns")
    save(figure, context.figure())


def _percent(value: float) -> float:
    return round(100.0 * float(value), 2)
