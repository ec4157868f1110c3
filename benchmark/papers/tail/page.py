"""Numbers of docs/research/papers/tail.md."""

from __future__ import annotations

from typing import Any

from result_tables import (
    Claim,
    Results,
    Row,
    change,
    items,
    listed,
    near,
    over_cells,
    signed,
    table,
)

RESULTS = Results("tail")
CAPACITIES = (0.02, 0.05, 0.1, 0.2)
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
    return {row["arm"]: row for row in RESULTS[key][data] if row["threshold"] == threshold}


def best(key: str, metric: str, base: str = "lru") -> dict[str, float]:
    """The cell of a table in which T-LRU gains most."""
    cells = RESULTS[key][f"t_lru_over_{base}_pct"]
    return max(cells, key=lambda cell: cell[metric])


def best_cells(key: str, base: str = "lru") -> str:
    texts = []
    for name, metric in (("P90", "p90_ms"), ("P95", "p95_ms"), ("P99", "p99_ms")):
        cell = best(key, metric, base)
        texts.append(f"{name} {signed(-cell[metric])} % ({cell['threshold']:,.0f} tokens)")
    return f"at best {', '.join(texts)}"


def over_slo(key: str, threshold: float) -> list[float]:
    """Fewer requests over the target than LRU's, in per cent, by capacity."""
    cells = RESULTS[key]["t_lru_over_lru_pct"]
    return [cell["over_slo"] for cell in cells if cell["threshold"] == threshold]


def fewer(key: str, thresholds: tuple[float, ...]) -> str:
    parts = [
        f"{t:,.0f} tokens: {listed(signed(-x) for x in over_slo(key, t))} %" for t in thresholds
    ]
    return f"at {listed(f'{c:.0%}' for c in CAPACITIES)} of the blocks, threshold " + "; ".join(
        parts
    )


def worst(belief: str) -> float:
    """ET-LRU's greatest excess over the optimum, in per cent."""
    cases = RESULTS["theorem-2"].items()
    return max(c["worst_pct"] for name, c in cases if name.startswith(belief))


def figure_5() -> Row:
    thresholds = sorted({row["threshold"] for row in RESULTS["figure-5"]["conversation"]})
    points = [point("figure-5", "conversation", threshold) for threshold in thresholds]
    lru, ours, ends, lengths = (
        points[1][arm] for arm in ("lru", T_LRU, "end-aware", "length-aware")
    )
    tail = all(p[T_LRU]["p99_ms"] < p["lru"]["p99_ms"] for p in points)
    p95 = all(p[T_LRU]["p95_ms"] < p["lru"]["p95_ms"] for p in points)
    gain = ours["tel_ktokens"] - ends["tel_ktokens"]
    more = ends["tel_ktokens"] - lengths["tel_ktokens"]
    changes = ", ".join(
        f"{p.upper()} {change(ours[f'{p}_ms'], lru[f'{p}_ms'])}"
        for p in ("p50", "p90", "p95", "p99")
    )
    return Row(
        "Figure 5",
        (
            Claim("WildChat, three thresholds: P99 below LRU's at each", tail),
            Claim("P95 below LRU's at each", p95),
            Claim("the median above LRU's", ours["p50_ms"] > lru["p50_ms"]),
            Claim("knowing who ends helps, lengths little more", gain > 0 and more < gain),
        ),
        f"at {points[1]['lru']['threshold']:,.0f} tokens: {changes}",
        "`figure-5`",
        because="a threshold serves the percentile that it matches",
    )


def figure_7() -> Row:
    short = point("figure-7", "birth-death", 1000.0)
    long = point("figure-7", "birth-death long-lived", 1000.0)
    return Row(
        "Figure 7",
        (
            Claim("ShareGPT: knowing who ends adds little", _little(short) and _little(long)),
            Claim("all are near the bound", _near_bound(short) and _near_bound(long)),
        ),
        f"TEL in M tokens, conversations of 3 minutes: {_tels(short)}; of an hour: {_tels(long)}",
        "`figure-7`",
        because="the paper's rates are not given; with ours, ends matter where conversations end soon",
    )


def _little(rows: dict[str, dict[str, Any]]) -> bool:
    return rows["end-aware"]["tel_ktokens"] > 0.9 * rows[T_LRU]["tel_ktokens"]


def _near_bound(rows: dict[str, dict[str, Any]]) -> bool:
    return near(rows[T_LRU]["tel_ktokens"], rows["tail-belady"]["tel_ktokens"])


def _tels(rows: dict[str, dict[str, Any]]) -> str:
    arms = {"LRU": "lru", "T-LRU": T_LRU, "knowing ends": "end-aware", "the bound": "tail-belady"}
    return ", ".join(f"{name} {rows[arm]['tel_ktokens'] / 1e3:.2f}" for name, arm in arms.items())


def evaluation() -> list[Row]:
    line = RESULTS["figure-3"]
    short, whole = line["to 10,000 tokens"], line["all"]
    turns = RESULTS["figures-4-6"]
    real, model = turns["conversation"], turns["birth-death"]
    order = [best("tables-1-3", m)["threshold"] for m in ("p90_ms", "p95_ms", "p99_ms")]
    at = over_slo("tables-1-3", 21504.0)
    return [
        Row(
            "Figure 3",
            shows="TTFT is linear in uncached tokens (R2 over 0.95)",
            here=f"R2 {short['r2']:.2f} up to 10,000 tokens, {whole['r2']:.2f} over all",
            where="`figure-3`",
            follows="the roofline that our times come from: nothing was measured",
        ),
        Row(
            "Figure 4, Figure 6",
            shows="turns and tokens of WildChat and ShareGPT",
            here=f"turns a conversation {real['mean_turns']} and {model['mean_turns']}; tokens a turn "
            f"{real['mean_growth_tokens']:,} and {model['mean_growth_tokens']}, the paper's 200",
            where="`figures-4-6`",
            impossible="neither data set is here; Mooncake's conversations and the paper's own "
            "stochastic model stand in",
        ),
        figure_5(),
        figure_7(),
        Row(
            "Table 1",
            (
                over_cells("P90 and P95 shorter than LRU's", _shorter("tables-1-3")),
                Claim("each percentile gains most at its own threshold", order == sorted(order)),
                Claim("by up to 27.5 and 23.9 %", _sized("tables-1-3", 27.5, 23.9)),
            ),
            best_cells("tables-1-3"),
            "`tables-1-3`",
            because="three of four conversations here have one turn",
        ),
        Row(
            "Table 2",
            (
                over_cells(
                    "P90 and P95 shorter than Threshold-LRU's",
                    _shorter("tables-1-3", "threshold_lru"),
                ),
            ),
            best_cells("tables-1-3", "threshold_lru"),
            "`tables-1-3`",
            because="a threshold shortens the percentile that it matches, and lengthens others",
        ),
        Row(
            "Table 3",
            (
                Claim("fewer requests over the target at its own threshold", min(at) > 0),
                Claim("by 8.8 to 40.7 %", min(at) >= 8.8 and max(at) <= 40.7),
                Claim("little at a quarter of it", max(over_slo("tables-1-3", 5376.0)) < 5),
                Claim("some more at twice it", min(over_slo("tables-1-3", 43008.0)) < 0),
            ),
            fewer("tables-1-3", (5376.0, 21504.0, 43008.0)),
            "`tables-1-3`",
        ),
        Row(
            "Table 4",
            (
                over_cells("ShareGPT: P90 and P95 shorter than LRU's", _shorter("tables-4-6")),
                Claim("by up to 10 and 7 %", _sized("tables-4-6", 10, 7)),
            ),
            best_cells("tables-4-6"),
            "`tables-4-6`",
            because="rates and lengths are ours",
        ),
        Row(
            "Table 5",
            (
                over_cells(
                    "P90 and P95 shorter than Threshold-LRU's",
                    _shorter("tables-4-6", "threshold_lru"),
                ),
            ),
            best_cells("tables-4-6", "threshold_lru"),
            "`tables-4-6`",
            because="rates and lengths are ours",
        ),
        Row(
            "Table 6",
            (
                Claim(
                    "2 to 8 % fewer requests over the target",
                    min(over_slo("tables-4-6", 1000.0)) > 0,
                ),
            ),
            fewer("tables-4-6", (250.0, 1000.0)),
            "`tables-4-6`",
            because="T-LRU cuts each conversation to where the mean next prompt just meets the "
            "threshold; ours are log-normal, and longer ones exceed it",
        ),
    ]


def _gains(key: str, base: str = "lru") -> tuple[float, float]:
    return best(key, "p90_ms", base)["p90_ms"], best(key, "p95_ms", base)["p95_ms"]


def _shorter(key: str, base: str = "lru") -> list[bool]:
    """Whether P90 and P95 are shorter, cell by cell."""
    cells = RESULTS[key][f"t_lru_over_{base}_pct"]
    return [cell["p90_ms"] > 0 and cell["p95_ms"] > 0 for cell in cells]


def _sized(key: str, p90: float, p95: float) -> bool:
    ours = _gains(key)
    return near(ours[0], p90) and near(ours[1], p95)


def theory() -> list[Row]:
    lemma = RESULTS["lemma-1"]
    papers = worst("the paper's belief")
    return [
        Row(
            "Equation 8, Lemma 1",
            (
                Claim(
                    "greedy, token by token, solves ET-LRU's one-step problem",
                    lemma["greatest_excess_over_the_optimum"] == 0,
                ),
            ),
            f"greatest excess {lemma['greatest_excess_over_the_optimum']:.0f} in "
            f"{lemma['instances']:,} instances",
            "`lemma-1` `test/sim/test_tail_theorems.py`",
        ),
        Row(
            "Theorem 2",
            (Claim("ET-LRU has the least expected TEL, belief exp(-mu t)", papers == 0),),
            f"greatest excess over the recursion of Appendix B {papers:.1f} %, forced caching "
            f"(Appendix C) included; with Bayes' belief {worst('Bayes'):.1f} %",
            "`theorem-2` `test/sim/test_tail_theorems.py`",
        ),
    ]


def thresholds() -> str:
    """TEL against LRU at the threshold that matches the target, on both traces."""
    arms = ("wa", "SGLang's tlru", T_LRU, "canopy-tlru", "etlru")
    rows = []
    for name, key in (("conversation", "tables-1-3"), ("the model", "tables-4-6")):
        result = RESULTS[key]
        xi = [cell["threshold"] for cell in result["t_lru_over_lru_pct"]]
        for at in (i for i, threshold in enumerate(xi) if threshold == result["slo_tokens"]):
            capacity = result["t_lru_over_lru_pct"][at]["capacity"]
            cells = [f"{signed(-result['tel_over_lru_pct'][arm][at])} %" for arm in arms]
            rows.append([f"{name}, {capacity:.0%}", *cells])
    return table(["TEL against `lru`", *(NAMES[arm] for arm in arms)], rows, numbers=True)


def knowledge() -> str:
    """Return the gains of T-LRU with more knowledge."""
    rows = point("figure-5", "conversation", 21504.0)
    arms = ("lru", T_LRU, "etlru", "end-aware", "length-aware", "tail-belady")
    cells = [
        [
            NAMES[arm],
            f"{rows[arm]['hit_pct']:.1f} %",
            *(f"{rows[arm][p]:,.0f}" for p in ("p50_ms", "p90_ms", "p95_ms", "p99_ms")),
            f"{rows[arm]['tel_ktokens'] / 1e3:.2f}",
        ]
        for arm in arms
    ]
    return table(["", "block hits", "P50, ms", "P90", "P95", "P99", "TEL, M tokens"], cells, True)


def queued() -> str:
    """Seconds of TTFT with a queue, by load."""
    rows = {(r["load"], r["arm"]): r for r in RESULTS["milliseconds"]}
    loads = sorted({load for load, _ in rows})
    cells = [
        [
            NAMES[arm],
            f"{rows[loads[-1], arm]['hit_pct']:.1f} %",
            *(f"{rows[load, arm][f'{p}_s']:.2f}" for p in ("mean", "p90") for load in loads),
        ]
        for arm in ("lru", "SGLang's tlru", "canopy-tlru", "etlru", "wa")
    ]
    at = [f"{load:.0%}" for load in loads]
    header = ["policy", f"token hits at {at[-1]}", f"mean, s, at {at[0]}", *at[1:]]
    return table([*header, f"P90, s, at {at[0]}", *at[1:]], cells, True)


def all_rows() -> list[Row]:
    return [*evaluation(), *theory()]


def short() -> str:
    at = point("figure-5", "conversation", 21504.0)
    rows = {(r["load"], r["arm"]): r for r in RESULTS["milliseconds"]}
    p90 = [
        change(rows[load, "canopy-tlru"]["p90_s"], rows[load, "lru"]["p90_s"])
        for load in (0.6, 0.95)
    ]
    return (
        f"At a tenth of the blocks T-LRU lowers TEL by "
        f"{RESULTS['tables-1-3']['tel_over_lru_pct'][T_LRU][10]:.1f} %, and hits fall from {at['lru']['hit_pct']:.1f} to "
        f"{at[T_LRU]['hit_pct']:.1f} %. With a queue that costs: P90 {p90[0]} at 60 % load, "
        f"{p90[1]} at 95 %."
    )


PARTS = {
    "items": lambda: items(all_rows()),
    "short": short,
    "thresholds": thresholds,
    "knowledge": knowledge,
    "queued": queued,
}
