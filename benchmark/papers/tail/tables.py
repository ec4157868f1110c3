"""Tables 1 to 3 and Figure 5 of Tail-Optimized Caching (arXiv 2510.15152)."""

from __future__ import annotations

from typing import Any

from tail import pictures
from tail.runs import CAPACITIES, KNOWING, ONLINE, SHORT, conversation, relative, sweep

from question import Question, RunContext

XI = (5376.0, 10752.0, 21504.0, 43008.0)
FIGURE_5_XI = (10752.0, 21504.0, 32256.0)
SLO = 21504.0
"""Below LRU's P90 at 10 % (24,464), as the paper's 200 ms are below its 240 ms."""
COLUMNS = ("p50_ms", "p90_ms", "p95_ms", "p99_ms", "tel_ktokens", "over_slo")


def tables_1_3(context: RunContext) -> Any:
    """Three tables: against LRU, against Threshold-LRU, and requests over the SLO."""
    setting = conversation(context.data)
    rows = sweep(setting, CAPACITIES, XI, SLO, ONLINE)
    literal, base = "canopy-tlru, fixed Q", f"threshold-lru {SHORT}"
    return {
        "requests": len(setting.trace),
        "growth_tokens": setting.growth,
        "slo_tokens": SLO,
        "t_lru_over_lru_pct": relative(rows, literal, "lru", COLUMNS),
        "t_lru_over_threshold_lru_pct": relative(rows, literal, base, COLUMNS),
        "tel_over_lru_pct": {
            arm.label: [r["tel_ktokens"] for r in relative(rows, arm.label, "lru", COLUMNS)]
            for arm in ONLINE[1:]
        },
        "columns": list(rows[0]),
        "rows": [" ".join(str(v).replace(" ", "_") for v in r.values()) for r in rows],
    }


def figure_5(context: RunContext) -> Any:
    """Return the value of prediction: T-LRU against policies that know ends, lengths, everything."""
    labels = ("lru", "SGLang's tlru", "canopy-tlru, fixed Q", "etlru", f"threshold-lru {SHORT}")
    arms = [*(a for a in ONLINE if a.label in labels), *KNOWING]
    rows = sweep(conversation(context.data), (0.1,), FIGURE_5_XI, SLO, arms)
    panels = {
        f"threshold {xi:,.0f} tokens": [r for r in rows if r["threshold"] == xi]
        for xi in FIGURE_5_XI
    }
    pictures.latencies(
        context.figure(), panels, "conversation, capacity 10% of the distinct blocks"
    )
    return {"conversation": rows}


QUESTIONS = (
    Question("tables-1-3", "TEL and tail TTFT by policy, threshold and capacity", tables_1_3, 4),
    Question("figure-5", "P50 to P99, and what knowing the future adds", figure_5, 1),
)
