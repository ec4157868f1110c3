"""Values of page.md, from the result files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from result_tables import Results, near, signed, table

R = Results("wa")

# Section 3: what reuse looks like
_totals = R["figures-4-10"]
ideal = {t: _totals[t]["figure_4_ideal_block_hit_percent"] for t in _totals}
text_percent = _totals["trace-a"]["figure_5_types"]["text"]["requests_percent"]
across_users = _totals["trace-a"]["figure_6_hits_across_users_percent"]
hit_users = {t: of.get("figure_7_users_with_90_percent_of_hits") for t, of in _totals.items()}
sending_users = {
    t: of.get("figure_8_users_with_90_percent_of_requests") for t, of in _totals.items()
}
turns = {t: of["figure_9"] for t, of in _totals.items()}
top_tenth = _totals["trace-a"]["figure_10"]["top_tenth_over_mean"]

_turns = R["figures-11-14"]
next_turn = {t: _turns[t]["figure_11"] for t in ("trace-a", "conversation")}
likelier = all(n["after_later_turn"] > n["after_first_turn"] for n in next_turn.values())
moves = {t: n["mean_change_from_window_to_window"] for t, n in next_turn.items()}
next_turns = "; ".join(
    f"{t} {n['after_first_turn']:.2f} and {n['after_later_turn']:.2f}, moving by {moves[t]:.2f}"
    for t, n in next_turn.items()
)
within_10_min = _turns["trace-a"]["figure_12_reused_within_s_percent"]["600"]
within_10_s = _turns["trace-b"]["figure_12_reused_within_s_percent"]["10"]
single = {
    t: of["figure_13"]["first_turns_reused_by_a_first_turn_percent"]
    for t, of in _turns.items()
    if "figure_13" in of
}
medians = [
    _turns["trace-a"]["figure_14_reuse_s_by_type"][kind]["p50"]
    for kind in ("image", "text", "search", "file")
]
in_order = medians == sorted(medians)

_fit = {
    name: row["mean_by_blocks"]
    for name, row in R["figures-15-29"].items()
    if "mean_by_blocks" in row
}
halves_fit = _fit["conversation, first half on second"]
curve_next = {
    "trace-a": next(of["curve_next"] for name, of in _fit.items() if "another day" in name),
    "synthetic": _fit["Mooncake synthetic, first half on second"]["curve_next"],
}
parts = R["figures-16-18"]
leads = {name: of["first_half_percent"] - of["last_half_percent"] for name, of in parts.items()}
"""Hits in the first half of the prompts over those in the last."""
heads = {
    kind: parts[f"trace-a, {kind}"]["first_tenth_of_first_turns_percent"]
    for kind in ("text", "image", "search", "file")
}
heads_differ = min(heads["text"], heads["image"]) > 2 * max(heads["search"], heads["file"])
lives = R["figures-19-20"]
lifetimes = ", ".join(f"{name} {life['p90_s']:,.1f} s" for name, life in lives.items())
life_moves = {
    t: lives[t]["figure_20_change_from_window_to_window"] for t in ("trace-a", "conversation")
}
_share = R["figure-21"]["Qwen2-7B"]["percent_of_hbm"]
kv = {"single": _share["text, single-turn"], "multi": _share["text, multi-turn"]}
as_large, as_large_p99 = (
    all(
        near(kv["single"][p], single) and near(kv["multi"][p], multi) for p, single, multi in theirs
    )
    for theirs in ([("p50", 0.09, 0.36), ("p90", 0.15, 1.31)], [("p99", 0.37, 2.21)])
)
need = {
    t: {name: model["hbm_needed_mean"] for name, model in case["models"].items()}
    for t, case in R["figure-22"].items()
}
mha_needs_more = need["trace-a"]["Llama2-13B"] > 5 * need["trace-a"]["Llama3-70B"]

# Figures 25 to 28
FIGURES = ("figure-25", "figure-26", "figure-27")
RATIOS = ("0", "1", "2")
"""CPU cache over HBM."""
PAPERS_WA, OURS = "WA (the paper's)", "WA, survival"
PROFILED = ", profiled"
"""Started from a profile of other traffic, as the paper's; else from nothing."""
ROWS = [arm + how for arm in (PAPERS_WA, OURS) for how in ("", PROFILED)]

_set_ups = [one for key in FIGURES for one in R[key].items()]
"""Set-ups, the to-C traces first."""
_cells = [(name, case["policies"]) for name, case in _set_ups]
_models = {
    name.partition(" on ")[0]: case["policies"]
    for name, case in (next(iter(R[key].items())) for key in FIGURES)
}
qwen = {name: {int(r): of for r, of in case.items()} for name, case in _models["Qwen2-7B"].items()}


def _hits(policies: dict[str, Any], name: str, ratio: str = "0") -> float:
    return float(policies[name][ratio]["hit_percent"])


def _best_other(policies: dict[str, Any]) -> str:
    return max((p for p in policies if not p.startswith("WA")), key=lambda p: _hits(policies, p))


def _for_all_models(holds: Iterable[bool]) -> bool:
    """Whether a claim holds. It must do so for all models or for none: they share a row."""
    (found,) = set(holds)
    return found


_gain = {
    name: (
        _hits(p, PAPERS_WA + PROFILED) - _hits(p, _best_other(p)),
        p[PAPERS_WA + PROFILED]["0"]["qttft_s"] / p[_best_other(p)]["0"]["qttft_s"] - 1,
    )
    for name, p in _models.items()
}
against_best = "; ".join(
    f"{name} {signed(points)} points, TTFT {signed(100 * ttft, 0)} % ({_best_other(_models[name])})"
    for name, (points, ttft) in _gain.items()
)
most_hits = _for_all_models(points >= 1.5 for points, _ in _gain.values())
least_ttft = _for_all_models(ttft <= -0.28 for _, ttft in _gain.values())
lfu_worst = _for_all_models(
    _hits(p, "LFU") < min(_hits(p, name) for name in p if name != "LFU") for p in _models.values()
)


def _spread(policies: dict[str, Any], ratio: str) -> float:
    hits = [_hits(policies, name, ratio) for name in policies]
    return max(hits) - min(hits)


together = _for_all_models(_spread(p, "2") < _spread(p, "0") for p in _models.values())

real = {k: v["5%"] for k, v in R["figure-28"]["conversation, share of its blocks"].items()}
steps = {
    name: [
        hits["+ distribution"] - max(hits["lru"], hits["gdfs"]),
        hits["+ life"] - hits["+ distribution"],
    ]
    for name, hits in (
        ("conversation", real),
        ("trace-a", {k: v["1"] for k, v in R["figure-28"]["trace-a, CPU cache / HBM"].items()}),
    )
}
distribution_adds, life_adds = (list(of) for of in zip(*steps.values()))


def _points(policies: dict[str, Any], policy: str, ratio: str, base: str = "LRU") -> float:
    return _hits(policies, policy, ratio) - _hits(policies, base, ratio)


def _range(points: Iterable[float], digits: int = 2) -> str:
    found = list(points)
    return f"{signed(min(found), digits)} to {signed(max(found), digits)}"


_pairs = [(policies, ratio) for _, policies in _cells for ratio in RATIOS]
count = len(_pairs)
losses = {arm: sum(_points(p, arm, ratio) < 0 for p, ratio in _pairs) for arm in ROWS}
"""Cells in which a policy hits less than LRU."""
worst = {
    arm: f"{qwen[arm][0]['hit_percent']:.2f} % at "
    f"{qwen[arm][0]['qttft_s'] / qwen['LRU'][0]['qttft_s']:.1f} times LRU's queued TTFT"
    for arm in ROWS
}
fifo = max(abs(_points(p, "FIFO", ratio)) for p, ratio in _pairs)
with_cpu = {int(r): _range(_points(p, arm, r) for _, p in _cells for arm in ROWS) for r in "12"}
profiled = _range(_points(p, OURS + PROFILED, ratio, OURS) for p, ratio in _pairs)


def _returning(*pauses: str) -> str:
    """Change of LRU's hits in per cent, in turns that return after such pauses."""
    shares = []
    for _, case in _set_ups:
        lru, ours = (case["hits_by_pause"][arm] for arm in ("LRU", OURS))
        shares.append(100 * sum(ours[p] - lru[p] for p in pauses) / sum(lru.values()))
    return _range(shares, 1)


early, late = _returning("under 1 min", "1 to 2 min"), _returning("over 2 min")


def served() -> str:
    """Hits and queued TTFT of Figures 25 to 27 without host memory."""
    rows = []
    for policy in ("LRU", "LFU", *ROWS):
        cases = [policies[policy]["0"] for _, policies in _cells]
        pairs = [(f"{c['hit_percent']:.2f}", f"{c['qttft_s']:.2f}") for c in cases]
        rows.append([policy, *(cell for pair in pairs for cell in pair)])
    heads = [cell for name, _ in _cells for cell in (f"{name}: hits, %", "TTFT, s")]
    return table(["HBM alone", *heads], rows, numbers=True)


def ablation() -> str:
    """Block hits by step, four traces."""
    labels = {
        "gdfs": "GDFS",
        "lru": "LRU",
        "+ distribution": "distribution",
        "+ life": "and life: the paper's",
        "given not used until t": "the distribution's hazard at t",
        "survival": "survival, our categories (`wa`)",
    }
    sizes = {"0": "HBM alone", "1": "and as much CPU cache", "5%": "5 %"}
    columns = {
        f"{name.partition(',')[0]}, {sizes[size]}": (hits, size)
        for name, hits in R["figure-28"].items()
        for size in hits["lru"]
    }
    rows = [
        [label, *(f"{hits[key][size]:.2f}" for hits, size in columns.values())]
        for key, label in labels.items()
    ]
    return table(["block hits, %", *columns], rows, numbers=True)
