"""Values of page.md, from the result files."""

from __future__ import annotations

from typing import Any

from result_tables import Results, change, near, signed, table

R = Results("tail")
TARGET = 21504.0
"""The threshold in tokens that matches the target of the conversation trace."""
T_LRU = "canopy-tlru, fixed Q"
"""The paper's rule: it plans with the mean growth."""

NAMES = {
    "lru": "`lru`",
    "wa": "`wa`",
    "SGLang's tlru": "SGLang's `tlru`",
    T_LRU: "T-LRU, the paper's",
    "canopy-tlru": "`canopy-tlru`",
    "etlru": "`etlru`",
    "end-aware": "T-LRU that knows who ends",
    "length-aware": "and how long the next prompt is",
    "tail-belady": "hindsight (Theorem 1)",
}


def point(key: str, data: str, threshold: float) -> dict[str, dict[str, Any]]:
    """Rows of a figure at one threshold, by policy."""
    return {row["arm"]: row for row in R[key][data] if row["threshold"] == threshold}


lengths = R["figures-4-6"]
_points = [
    point("figure-5", "conversation", threshold)
    for threshold in sorted({row["threshold"] for row in R["figure-5"]["conversation"]})
]
_at_target = point("figure-5", "conversation", TARGET)
lru, t_lru = _at_target["lru"], _at_target[T_LRU]
below = {
    p: all(of[T_LRU][f"{p}_ms"] < of["lru"][f"{p}_ms"] for of in _points) for p in ("p95", "p99")
}
_tel = {arm: of["tel_ktokens"] for arm, of in _at_target.items()}
ends_help = 0 < _tel[T_LRU] - _tel["end-aware"] > _tel["end-aware"] - _tel["length-aware"]
changes = ", ".join(
    f"{p.upper()} {change(t_lru[f'{p}_ms'], lru[f'{p}_ms'])}" for p in ("p50", "p90", "p95", "p99")
)
_lived = {
    "short": point("figure-7", "birth-death", 1000.0),
    "long": point("figure-7", "birth-death long-lived", 1000.0),
}
_tels = {
    name: {arm: of["tel_ktokens"] for arm, of in rows.items()} for name, rows in _lived.items()
}
ends_add_little = all(of["end-aware"] > 0.9 * of[T_LRU] for of in _tels.values())
near_bound = all(near(of[T_LRU], of["tail-belady"]) for of in _tels.values())
_SHOWN = {"LRU": "lru", "T-LRU": T_LRU, "knowing ends": "end-aware", "the bound": "tail-belady"}
tels = {
    name: ", ".join(f"{label} {of[arm] / 1e3:.2f}" for label, arm in _SHOWN.items())
    for name, of in _tels.items()
}

# Tables 1 to 6: gains in per cent, of each cell (a capacity and a threshold)
_cells = {
    f"{key}, {base}": R[key][f"t_lru_over_{base}_pct"]
    for key in ("tables-1-3", "tables-4-6")
    for base in ("lru", "threshold_lru")
}
_most = {
    name: {p: max(of, key=lambda cell, p=p: cell[f"{p}_ms"]) for p in ("p90", "p95", "p99")}  # type: ignore[misc]
    for name, of in _cells.items()
}
best = {
    name: "at best "
    + ", ".join(
        f"{p.upper()} {signed(-cell[f'{p}_ms'])} % ({cell['threshold']:,.0f} tokens)"
        for p, cell in of.items()
    )
    for name, of in _most.items()
}
shorter = {
    name: [cell["p90_ms"] > 0 and cell["p95_ms"] > 0 for cell in of] for name, of in _cells.items()
}
_order = [cell["threshold"] for cell in _most["tables-1-3, lru"].values()]
own_threshold = _order == sorted(_order)
gains_of_wildchat, gains_of_sharegpt = (
    near(_most[name]["p90"]["p90_ms"], p90) and near(_most[name]["p95"]["p95_ms"], p95)
    for name, p90, p95 in (("tables-1-3, lru", 27.5, 23.9), ("tables-4-6, lru", 10, 7))
)
fewer: dict[str, list[float]] = {}
"""Fewer requests over the target than LRU's in per cent, by capacity, at each threshold."""
for _key in ("tables-1-3", "tables-4-6"):
    for _cell in _cells[f"{_key}, lru"]:
        fewer.setdefault(f"{_key}, {_cell['threshold']:.0f}", []).append(_cell["over_slo"])
over = {name: [-x for x in of] for name, of in fewer.items()}
_own = fewer["tables-1-3, 21504"]
fewer_as_printed = min(_own) >= 8.8 and max(_own) <= 40.7
some_more = min(fewer["tables-1-3, 43008"]) < 0
excess = {
    name: max(c["worst_pct"] for case, c in R["theorem-2"].items() if case.startswith(belief))
    for name, belief in (("papers", "the paper's belief"), ("bayes", "Bayes"))
}
tel_at_a_tenth = R["tables-1-3"]["tel_over_lru_pct"][T_LRU][10]
_queued = {(r["load"], r["arm"]): r for r in R["milliseconds"]}
p90 = {
    round(100 * load): change(_queued[load, "canopy-tlru"]["p90_s"], _queued[load, "lru"]["p90_s"])
    for load in (0.6, 0.95)
}


def thresholds() -> str:
    """TEL against LRU at the threshold that matches the target, on both traces."""
    arms = ("wa", "SGLang's tlru", T_LRU, "canopy-tlru", "etlru")
    rows = []
    for name, key in (("conversation", "tables-1-3"), ("the model", "tables-4-6")):
        for at, cell in enumerate(_cells[f"{key}, lru"]):
            if cell["threshold"] == R[key]["slo_tokens"]:
                cells = [f"{signed(-R[key]['tel_over_lru_pct'][arm][at])} %" for arm in arms]
                rows.append([f"{name}, {cell['capacity']:.0%}", *cells])
    return table(["TEL against `lru`", *(NAMES[arm] for arm in arms)], rows, numbers=True)


def knowledge() -> str:
    """Return the gains of T-LRU with more knowledge."""
    cells = [
        [
            NAMES[arm],
            f"{_at_target[arm]['hit_pct']:.1f} %",
            *(f"{_at_target[arm][p]:,.0f}" for p in ("p50_ms", "p90_ms", "p95_ms", "p99_ms")),
            f"{_tel[arm] / 1e3:.2f}",
        ]
        for arm in ("lru", T_LRU, "etlru", "end-aware", "length-aware", "tail-belady")
    ]
    return table(["", "block hits", "P50, ms", "P90", "P95", "P99", "TEL, M tokens"], cells, True)


def queued() -> str:
    """Seconds of TTFT with a queue, by load."""
    loads = sorted({load for load, _ in _queued})
    cells = [
        [
            NAMES[arm],
            f"{_queued[loads[-1], arm]['hit_pct']:.1f} %",
            *(f"{_queued[load, arm][f'{p}_s']:.2f}" for p in ("mean", "p90") for load in loads),
        ]
        for arm in ("lru", "SGLang's tlru", "canopy-tlru", "etlru", "wa")
    ]
    at = [f"{load:.0%}" for load in loads]
    header = ["policy", f"token hits at {at[-1]}", f"mean, s, at {at[0]}", *at[1:]]
    return table([*header, f"P90, s, at {at[0]}", *at[1:]], cells, True)
