"""Artefacts of Tail-Optimized Caching (arXiv 2510.15152) for ``benchmark/papers/run.py``."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from artefact import Artefact, Context

from tail import pictures, program
from tail.queued import queued
from tail.runs import (
    CAPACITIES,
    KNOWING,
    ONLINE,
    Arm,
    Workbench,
    conversation,
    relative,
    stochastic,
    sweep,
)

CONVERSATION_XI = (5376.0, 10752.0, 21504.0, 43008.0)
CONVERSATION_SLO = 21504.0
"""Below LRU's P90 at 10 % (24,464), as the paper's 200 ms are below its 240 ms."""
STOCHASTIC_XI = (250.0, 500.0, 1000.0, 2000.0)
STOCHASTIC_SLO = 1000.0
COLUMNS = ("p50_ms", "p90_ms", "p95_ms", "p99_ms", "tel_ktokens", "over_slo")


def tables(
    bench: Callable[[Context], Workbench], thresholds: Sequence[float], slo: float, short: int
) -> Callable[[Context], Any]:
    """Three tables: against LRU, against Threshold-LRU, and requests over the SLO."""

    def run(context: Context) -> Any:
        made = bench(context)
        arms = [_shortest(arm, short) for arm in ONLINE]
        rows = sweep(made, CAPACITIES, thresholds, slo, arms)
        literal = "canopy-tlru, fixed Q"
        base = next(a.label for a in arms if a.policy == "threshold-lru")
        return {
            "requests": len(made.trace),
            "growth_tokens": made.growth,
            "slo_tokens": slo,
            "t_lru_over_lru_pct": relative(rows, literal, "lru", COLUMNS),
            "t_lru_over_threshold_lru_pct": relative(rows, literal, base, COLUMNS),
            "tel_over_lru_pct": {
                arm.label: [
                    r["tel_ktokens"] for r in relative(rows, arm.label, "lru", ("tel_ktokens",))
                ]
                for arm in arms[1:]
            },
            "columns": list(rows[0]),
            "rows": [" ".join(str(v).replace(" ", "_") for v in r.values()) for r in rows],
        }

    return run


def _shortest(arm: Arm, tokens: int) -> Arm:
    if arm.policy != "threshold-lru":
        return arm
    options = {"threshold_tokens": tokens}
    return Arm(f"threshold-lru {tokens}", arm.policy, options, aims=False)


def prediction(
    benches: dict[str, Callable[[Context], Workbench]],
    capacity: float,
    thresholds: Sequence[float],
    short: int,
) -> Callable[[Context], Any]:
    """Return the value of prediction: T-LRU against policies that know ends, lengths, everything."""
    labels = ("lru", "SGLang's tlru", "canopy-tlru, fixed Q", "etlru")
    online = [a for a in ONLINE if a.label in labels or a.policy == "threshold-lru"]

    def run(context: Context) -> Any:
        result = {}
        for name, make in benches.items():
            made = make(context)
            arms = [_shortest(arm, short) for arm in (*online, *KNOWING)]
            rows = sweep(made, (capacity,), thresholds, thresholds[1], arms)
            result[name] = rows
            panels = {
                f"threshold {threshold:,.0f} tokens": [
                    r for r in rows if r["threshold"] == threshold
                ]
                for threshold in thresholds
            }
            suffix = "" if name == next(iter(benches)) else f"-{name.replace(' ', '-')}"
            title = f"{name}, capacity {capacity:.0%} of the distinct blocks"
            pictures.latencies(context.figure(suffix), panels, title)
        return result

    return run


def linear(context: Context) -> Any:
    """TTFT by a profile of an 8B model against uncached tokens, over real prompts."""
    bench = conversation(context.data)
    uncached = np.frombuffer(
        bench.run(ONLINE[0], 0.1, CONVERSATION_SLO).uncached_tokens, dtype=np.int64
    )
    times = bench.ttft_ms(uncached)
    made: dict[str, Any] = {"profile": bench.profile.name, "source": bench.profile.source}
    for name, most in (("all", np.inf), ("to 10,000 tokens", 10_000)):
        near = uncached <= most
        x, y = uncached[near], times[near]
        alpha, beta = np.polyfit(x, y, 1)
        left = y - alpha * x - beta
        made[name] = {
            "ms_per_1000_tokens": round(1000 * float(alpha), 1),
            "beta_ms": round(float(beta), 1),
            "r2": round(1 - float(left.var() / y.var()), 4),
            "requests": int(near.sum()),
        }
        if name == "all":
            pictures.line_fit(context.figure(), x, y, float(alpha), float(beta))
    return made


def shapes(context: Context) -> Any:
    """Turns and tokens of the two traces used in place of WildChat and ShareGPT."""
    real, made = conversation(context.data), stochastic()
    panels: dict[str, dict[str, list[float]]] = {
        "turns of a conversation": {},
        "tokens of a prompt": {},
        "tokens of an answer": {},
    }
    summary: dict[str, dict[str, Any]] = {}
    for name, bench in (("conversation", real), ("birth-death", made)):
        turns = list(Counter(_conversations(bench)).values())
        answers = [r.output_tokens for r in bench.trace]
        for panel, values in zip(panels, (turns, bench.prompts, answers), strict=True):
            panels[panel][name] = [float(v) for v in values]
        summary[name] = {
            "requests": len(bench.trace),
            "conversations": len(turns),
            "mean_turns": round(float(np.mean(turns)), 2),
            "one_turn_pct": round(100 * float(np.mean(np.array(turns) == 1)), 1),
            "prompt_tokens_p50_p90_p99": np.percentile(bench.prompts, (50, 90, 99)).round(),
            "answer_tokens_p50_p90_p99": np.percentile(answers, (50, 90, 99)).round(),
            "mean_growth_tokens": bench.growth,
        }
        for key, value in summary[name].items():
            if isinstance(value, np.ndarray):
                summary[name][key] = value.tolist()
    pictures.distributions(context.figure(), panels)
    return summary


def _conversations(bench: Workbench) -> list[int]:
    """Return the first request of each request's conversation, by name or by its blocks."""
    names: dict[Any, int] = {}
    owner: dict[int, int] = {}
    found = []
    for index, record in enumerate(bench.trace):
        if record.conversation is not None:
            first = names.setdefault(record.conversation, index)
        else:
            full = record.input_tokens // record.block_tokens
            # Blocks that many share (a system prompt) lie at the front: the deepest known decides,
            # from the third block on.
            known = [owner[b] for b in record.blocks[2:full] if b in owner]
            first = known[-1] if known else index
        for block in record.blocks[2:]:
            owner.setdefault(block, first)
        found.append(first)
    return found


def lemma_1(context: Context) -> Any:
    """The greedy of Policy 2 against every allocation."""
    draw, worst, cases = random.Random(1), 0.0, 2000
    for _ in range(cases):
        count = draw.randint(2, 4)
        rates = [draw.choice((0.25, 0.5, 1.0, 2.0)) for _ in range(count)]
        history = [draw.randint(1, 6) for _ in range(count)]
        most = [draw.randint(0, length) for length in history]
        xi, room = draw.randint(0, 5), draw.randint(1, 8)
        growth = draw.choice(({2: 1.0}, {1: 0.5, 3: 0.25, 4: 0.25}, {0: 0.5, 5: 0.5}))
        kept = program.greedy(rates, history, most, growth, xi, room)
        least = program.least_excess(rates, history, most, growth, xi, room)
        ours = program.next_turn_excess(rates, history, kept, growth, xi)
        worst = max(worst, ours - least)
    return {"instances": cases, "greatest_excess_over_the_optimum": worst}


GROWTHS: tuple[program.Growth, ...] = ({2: 1.0}, {1: 0.5, 2: 0.5}, {0: 0.5, 3: 0.5})
RATES = ((1.0, 1.0, 1.0), (1.0, 0.25, 0.5), (2.0, 0.5, 0.5))


def theorem_2(context: Context) -> Any:
    """ET-LRU against the optimum of Appendix B's recursion, and where beliefs are Bayes'."""
    result: dict[str, Any] = {}
    for name, options in (
        ("the paper's belief", {}),
        ("the paper's belief, forced caching", {"forced": True}),
        ("Bayes' belief", {"belief": program.silent_posterior(0.25)}),
    ):
        for rates in RATES:
            kind = "one rate" if len(set(rates)) == 1 else "several rates"
            for growth in GROWTHS:
                gaps = []
                for xi in (0, 1, 2):
                    model = program.Model(rates, growth, 1, xi, 3, **options)  # type: ignore[arg-type]
                    least, ours = program.values(model, (0, 1, 2), 3)
                    gaps.append((ours - least) / least if least else 0.0)
                known = "Q fixed" if len(growth) == 1 else "Q random"
                row = result.setdefault(
                    f"{name}, {kind}, {known}", {"instances": 0, "worst_pct": 0.0}
                )
                row["instances"] += len(gaps)
                row["worst_pct"] = max(row["worst_pct"], round(100 * max(gaps), 4))
    return result


def milliseconds(context: Context) -> Any:
    """TTFT with queueing, by load."""
    return queued(conversation(context.data), 0.1, CONVERSATION_SLO)


def _stochastic(context: Context) -> Workbench:
    return stochastic()


def _long_lived(context: Context) -> Workbench:
    return stochastic(ends_per_s=1 / 3600, conversations_per_s=0.025)


def _conversation(context: Context) -> Workbench:
    return conversation(context.data)


ARTEFACTS = (
    Artefact("figure-3", "TTFT grows about linearly with the uncached tokens", linear, minutes=0.2),
    Artefact("figures-4-6", "turns and tokens of the two data sets", shapes, minutes=0.2),
    Artefact(
        "tables-1-3",
        "T-LRU against LRU and Threshold-LRU by threshold and capacity, on real conversations",
        tables(_conversation, CONVERSATION_XI, CONVERSATION_SLO, 8192),
        minutes=4,
    ),
    Artefact(
        "tables-4-6",
        "the same on the stochastic model's conversations",
        tables(_stochastic, STOCHASTIC_XI, STOCHASTIC_SLO, 1024),
        minutes=4,
    ),
    Artefact(
        "figure-5",
        "P50 to P99 at three thresholds, and what knowing the future adds, on real conversations",
        prediction({"conversation": _conversation}, 0.1, (10752.0, 21504.0, 32256.0), 8192),
        minutes=1,
    ),
    Artefact(
        "figure-7",
        "the same on the stochastic model, whose conversations end soon or late",
        prediction(
            {"birth-death": _stochastic, "birth-death long-lived": _long_lived},
            0.05,
            (500.0, 1000.0, 1500.0),
            1024,
        ),
        minutes=2,
    ),
    Artefact("lemma-1", "the greedy solves the one-step problem", lemma_1, minutes=0.1),
    Artefact("theorem-2", "ET-LRU is optimal in the stochastic model", theorem_2, minutes=0.2),
    Artefact("milliseconds", "TTFT by policy with requests that queue", milliseconds, minutes=1.5),
)
