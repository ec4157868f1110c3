"""Tables 1 to 3 and Figure 5 of Tail-Optimized Caching (arXiv 2510.15152)."""

from __future__ import annotations

from typing import Any

from tail import pictures, runs

from question import Question, QuestionRun

THRESHOLDS = (5376.0, 10752.0, 21504.0, 43008.0)
FIGURE_5_THRESHOLDS = (10752.0, 21504.0, 32256.0)
SLO_TOKENS = 21504.0
"""Below LRU's P90 at 10 % (24,464), as the paper's 200 ms are below its 240 ms."""
COLUMNS = ("p50_ms", "p90_ms", "p95_ms", "p99_ms", "tel_ktokens", "over_slo")


def tables_1_3(run: QuestionRun) -> Any:
    """Three tables: against LRU, against Threshold-LRU, and requests over the SLO."""
    workbench = runs.conversation(run.data_folder)
    rows = runs.sweep(workbench, runs.CAPACITY_SHARES, THRESHOLDS, SLO_TOKENS, runs.ONLINE_ARMS)
    paper_arm, base = "canopy-tlru, fixed Q", f"threshold-lru {runs.MIN_KEPT_TOKENS}"
    return {
        "requests": len(workbench.trace),
        "growth_tokens": workbench.growth_tokens,
        "slo_tokens": SLO_TOKENS,
        "t_lru_over_lru_pct": runs.gains_over(rows, paper_arm, "lru", COLUMNS),
        "t_lru_over_threshold_lru_pct": runs.gains_over(rows, paper_arm, base, COLUMNS),
        "tel_over_lru_pct": {
            arm.label: [r["tel_ktokens"] for r in runs.gains_over(rows, arm.label, "lru", COLUMNS)]
            for arm in runs.ONLINE_ARMS[1:]
        },
        "columns": list(rows[0]),
        "rows": [" ".join(str(v).replace(" ", "_") for v in r.values()) for r in rows],
    }


def figure_5(run: QuestionRun) -> Any:
    """Return the value of prediction: T-LRU against policies that know ends, lengths, everything."""
    names = ["lru", "SGLang's tlru", "canopy-tlru, fixed Q", "etlru"]
    names.append(f"threshold-lru {runs.MIN_KEPT_TOKENS}")
    arms = [*(a for a in runs.ONLINE_ARMS if a.label in names), *runs.HINDSIGHT_ARMS]
    rows = runs.sweep(
        runs.conversation(run.data_folder), (0.1,), FIGURE_5_THRESHOLDS, SLO_TOKENS, arms
    )
    panels = {
        f"threshold {threshold:,.0f} tokens": [r for r in rows if r["threshold"] == threshold]
        for threshold in FIGURE_5_THRESHOLDS
    }
    pictures.draw_ttft(run.figure_path(), panels, "conversation, capacity 10 % of distinct blocks")
    return {"conversation": rows}


QUESTIONS = (
    Question("tables-1-3", "TEL and tail TTFT by policy, threshold and capacity", tables_1_3, 4),
    Question("figure-5", "P50 to P99, and what knowing the future adds", figure_5, 1),
)
