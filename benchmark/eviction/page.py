"""Tables and figures on simulated evictions, for docs/research/policies.md, README and guides."""

from __future__ import annotations

import functools
from statistics import geometric_mean, mean
from typing import Any

from result_tables import listed, load, signed, table

CAPACITIES = (0.02, 0.05, 0.1, 0.2)
TRACES = {"conversation": "conversation", "synthetic": "Mooncake synthetic", "agentic": "agents"}


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load(f"benchmark/eviction/results/{name}.json")
    return found


@functools.cache
def hits(trace: str, policy: str) -> dict[float, float]:
    """Block hits in per cent by capacity, mean over seeds."""
    runs: dict[float, dict[int, float]] = {}
    for row in rows("claims"):
        if (row["trace"], row["policy"]) == (trace, policy):
            runs.setdefault(row["capacity_fraction"], {})[row["seed"]] = row["block_hit_ratio"]
    return {capacity: 100 * mean(seeds.values()) for capacity, seeds in runs.items()}


def _cell(values: dict[float, float], capacity: float) -> str:
    return f"{values[capacity]:.2f}" if capacity in values else "-"


def claims() -> str:
    """`wa` against LRU, placebos and hindsight, three traces."""
    policies = {
        "lru": "`lru`",
        "wa": "`wa`",
        "wa, random labels": "`wa`, random labels",
        "wa, type-turn": "`wa`, type and turn only",
        "wa, exponential, type-turn": "the paper's formula",
        "hindsight": "hindsight",
    }
    lines = [
        [f"{name}: {label}", *(_cell(hits(trace, policy), c) for c in CAPACITIES)]
        for trace, name in TRACES.items()
        for policy, label in policies.items()
        if hits(trace, policy)
    ]
    return table(["block hits, %", *(f"{c:.0%}" for c in CAPACITIES)], lines, numbers=True)


def classics() -> dict[str, list[float]]:
    """Fewest and most points of classic policies over LRU, over the same traces and capacities."""
    found = {}
    for policy in ("s3fifo", "gdfs"):
        points = [
            value - hits(trace, "lru")[capacity]
            for trace in TRACES
            for capacity, value in hits(trace, policy).items()
            if capacity in CAPACITIES
        ]
        found[policy] = [min(points), max(points)]
    return found


def tail() -> str:
    """Policies with a target against LRU on agents; conversations are in the paper's page."""
    lines = []
    kept = [r for r in rows("claims") if r["threshold_tokens"] and r["trace"] == "agentic"]
    cases = list(
        dict.fromkeys((r["trace"], r["capacity_fraction"], r["threshold_tokens"]) for r in kept)
    )
    for trace, capacity, threshold in cases:
        of = [
            r
            for r in kept
            if (r["trace"], r["capacity_fraction"], r["threshold_tokens"])
            == (trace, capacity, threshold)
        ]
        for policy in dict.fromkeys(r["policy"] for r in of):
            runs = [r for r in of if r["policy"] == policy]
            lines.append(
                [
                    f"{trace}, {capacity:.0%}: `{policy}`",
                    f"{100 * mean(r['block_hit_ratio'] for r in runs):.2f}",
                    *(
                        f"{mean(r[f'uncached_tokens_{p}'] for r in runs):,.0f}"
                        for p in ("p50", "p95")
                    ),
                    f"{mean(r['tel_tokens'] for r in runs) / 1e6:.2f}",
                ]
            )
    return table(["", "hits, %", "uncached P50", "P95", "TEL, M tokens"], lines, numbers=True)


@functools.cache
def hinted(trace: str) -> dict[tuple[float, float], float]:
    """Hits in per cent by share of clients and accuracy, mean over seeds."""
    runs: dict[tuple[float, float], list[float]] = {}
    for row in rows("hints"):
        if row["trace"] == trace and "share" in row:
            runs.setdefault((row["share"], row["accuracy"]), []).append(
                100 * row["block_hit_ratio"]
            )
    return {key: mean(values) for key, values in runs.items()}


def baseline(trace: str, policy: str) -> float:
    (row,) = (r for r in rows("hints") if (r["trace"], r["policy"]) == (trace, policy))
    return 100 * row["block_hit_ratio"]


def hints() -> str:
    """Hits by the share of clients that give hints and the share of true hints."""
    shares = (0.0, 0.5, 1.0)
    lines = [
        [
            f"{trace}, {accuracy:.0%} true",
            *(f"{_hint(trace, share, accuracy):.2f}" for share in shares),
        ]
        for trace in ("conversation", "agentic", "agentic, no names")
        for accuracy in (1.0, 0.75, 0.5, 0.0)
        if (1.0, accuracy) in hinted(trace)
    ]
    return table(
        ["block hits at 5 %, %", *(f"{share:.0%} give" for share in shares)], lines, numbers=True
    )


def _hint(trace: str, share: float, accuracy: float) -> float:
    known = hinted(trace)
    return known[share, accuracy if share else 1.0]


def kv_hints() -> str:
    """Hits by action of `kv_hints`, mean over seeds."""
    runs: dict[tuple[str, str, str, str], dict[float, list[float]]] = {}
    for r in rows("kv_hints"):
        if r["retain_share"] in (0.0, 1.5):
            arm = (r["trace"], r["policy"], r["hints"], r["actions"])
            runs.setdefault(arm, {}).setdefault(r["capacity"], []).append(r["block_hits"])
    names = {
        ("lru", "none", ""): "`lru`, no hints",
        ("wa", "none", ""): "`wa`, no hints",
        ("obeys", "true", "release"): "`lru` that obeys, true `release`",
        ("wa", "true", "release"): "`wa`, true `release`",
        ("wa", "true", "return"): "`wa`, true `return`",
        ("wa", "true", "retain"): "`wa`, true `retain`",
        ("wa", "true", "release, return"): "`wa`, true `release` and `return`",
        ("wa", "true", "release, return, retain"): "`wa`, all three, true",
        ("obeys", "wrong", "release"): "`lru` that obeys, wrong `release`",
        ("wa", "wrong", "release, return"): "`wa`, wrong `release` and `return`",
        ("wa", "random", "release, return"): "`wa`, the same at random (placebo)",
        ("wa", "wrong", "release, return, retain"): "`wa`, all three, wrong",
        ("hindsight", "none", ""): "hindsight",
    }
    shares = (0.02, 0.05, 0.1)
    traces = dict.fromkeys(trace for trace, *_ in runs)
    lines = [
        [name, *(f"{mean(runs[(trace, *arm)][share]):.1f}" for trace in traces for share in shares)]
        for arm, name in names.items()
    ]
    heads = [f"{trace}, {share:.0%}" for trace in traces for share in shares]
    return table(["block hits, %", *heads], lines, numbers=True)


def signals() -> str:
    """Points that `wa` has without a signal and with another request's, mean over seeds."""
    runs: dict[tuple[str, float], dict[tuple[str, str], list[float]]] = {}
    for r in rows("signals"):
        of = runs.setdefault((r["trace"], r["capacity_fraction"]), {})
        of.setdefault((r["signal"], r["kind"]), []).append(100 * r["block_hit_ratio"])
    names = {
        "added": "tokens added",
        "turn": "turn",
        "output": "output",
        "stop": "stop reason",
        "own gaps": "own gaps",
    }
    lines = []
    for (trace, capacity), arms in runs.items():
        base = mean(arms["wa", ""])
        for kind, label in (("without", "without"), ("placebo", "another's")):
            cells = [
                signed(mean(arms[name, kind]) - base, 2) if (name, kind) in arms else "-"
                for name in names
            ]
            if capacity == 0.05:
                lines.append([f"{trace}, `wa` {base:.2f} %: {label}", *cells])
    return table(["points of block hits, 5 %", *names.values()], lines, numbers=True)


def at_5() -> dict[str, dict[str, float]]:
    """Block hits in per cent at 5 % of the distinct blocks; ``placebo``: points over LRU."""
    found = {
        trace: {policy: hits(trace, policy)[0.05] for policy in ("wa", "lru")}
        for trace in ("conversation", "agentic")
    }
    placebo = hits("conversation", "wa, random labels")[0.05]
    return {**found, "random": {"placebo": placebo - found["conversation"]["lru"]}}


def _against_lru(split: str) -> tuple[float, float, float]:
    """Token hits of LRU and of `wa` in %, and the change of prefill seconds in %, at 5 %."""
    runs: dict[str, dict[int, dict[str, float]]] = {"lru": {}, "wa": {}}
    for r in rows("prefill_seconds"):
        if (r["split"], r["at"]) == (split, 0.05):
            runs[r["arm"]][r["seed"]] = r
    lru, wa = ([run["hits"] for run in runs[arm].values()] for arm in ("lru", "wa"))
    ratios = [runs["wa"][seed]["seconds"] / run["seconds"] for seed, run in runs["lru"].items()]
    return mean(lru), mean(wa), 100 * (geometric_mean(ratios) - 1)


def tokens_at_5() -> dict[str, dict[str, float]]:
    keys = ("lru", "wa", "seconds")
    return {split: dict(zip(keys, _against_lru(split))) for split in ("judge", "conversation")}


def _readme_seconds(split: str) -> str:
    lru, wa, seconds = _against_lru(split)
    return f"{lru:.1f} % | {wa:.1f} % | {signed(seconds)} %"


def true_hints() -> str:
    """README's row."""
    lru, all_true = baseline("conversation", "lru"), hinted("conversation")[1.0, 1.0]
    return f"{lru:.1f} % | {all_true:.1f} %"


def victim() -> str:
    """README's row: freeing one of 50,000 leaves."""
    costs = {(r["core"], r["leaves"]): r["evict"] for r in rows("victim_cost")}
    return f"{costs['rust', 50000]:.0f} us | {costs['wa', 50000]:.0f} us"


def victims() -> str:
    """Microseconds a call on SGLang's own cache."""
    lines = [
        [f"{r['leaves']:,}: `{r['core']}`", *(f"{r[key]:,.1f}" for key in _CALLS)]
        for r in rows("victim_cost")
        if r["leaves"] == 50_000
    ]
    return table(["leaves, us", *(f"`{key}`" for key in _CALLS)], lines, numbers=True)


_CALLS = ("evict", "evict_many", "insert", "match")


def paired() -> str:
    """CPU time of each call against an earlier commit's, with its interval."""
    known = {(r["policy"], r["cost"]): r for r in rows("paired_cost")}
    costs = ("arrival", "evict", "evict_many")
    lines = [
        [
            f"`{policy}`",
            *(
                "{ratio:.2f} [{low:.2f}, {high:.2f}]".format(**known[policy, cost])
                for cost in costs
            ),
        ]
        for policy in dict.fromkeys(policy for policy, _ in known)
    ]
    return table(["new / old", "arrival", "`evict`", "`evict_many`"], lines, numbers=True)


def long_prompts() -> str:
    """Match and insert against SGLang's Rust core."""
    known = {(r["page"], r["tokens"], r["arm"]): r for r in rows("long_prompts")}
    lines = [
        [
            f"{tokens:,} tokens",
            *(
                f"{known[page, tokens, arm][f'{call}/rust']:.2f}"
                for call in ("match", "insert")
                for arm in ("wa", "python")
            ),
        ]
        for page, tokens in dict.fromkeys((page, tokens) for page, tokens, _ in known)
        if page == 1
    ]
    return table(
        ["", "match: `wa`", "Python core", "insert: `wa`", "Python core"], lines, numbers=True
    )


STATES = {
    "SGLang": "SGLang",
    "`wa` on KV": "`wa` on KV",
    "`wa` and states by worth": "`wa`, states by worth",
    "random savings (placebo)": "placebo",
    "Marconi": "Marconi",
}


def states() -> str:
    """Prompt tokens found by order of states, each at its split with the least left to compute."""
    best: dict[tuple[str, int, str], dict[str, Any]] = {}
    for row in rows("states"):
        key = row["trace"], row["gib"], row["arm"]
        if key not in best or row["recompute_s"] < best[key]["recompute_s"]:
            best[key] = row
    places = list(dict.fromkeys((trace, gib) for trace, gib, _ in best))
    lines = [
        [f"{trace}, {gib} GiB", *(f"{best[trace, gib, arm]['hit']:.1f}" for arm in STATES)]
        for trace, gib in places
    ]
    return table(["tokens found, %", *STATES.values()], lines, numbers=True)


def state_shares() -> dict[str, list[float]]:
    """Tokens found under SGLang's order with 0.05, 0.2 and 0.9 bytes of states for a byte of KV."""
    known = {(r["trace"], r["gib"], r["arm"], r.get("share")): r["hit"] for r in rows("states")}
    return {
        trace: [known[trace, gib, "SGLang", share] for share in (0.05, 0.2, 0.9)]
        for trace, gib in (("agentic-1", 20), ("conversation", 160))
    }


def _curve(policy: str, placebo: bool = False) -> dict[float, float]:
    """Block hits in per cent by capacity, of the runs behind the figure of the start page."""
    return {
        row["capacity_fraction"]: 100 * row["block_hit_ratio"]
        for row in rows("conversation")
        if (row["policy"], row["placebo"]) == (policy, placebo)
    }


def figure() -> str:
    """The figure of the start page in words."""
    capacities = (0.02, 0.05, 0.1)
    curves = {
        "`lru` hits": _curve("lru"),
        "`wa`": _curve("wa"),
        "`wa` with the labels of other requests (the placebo)": _curve("wa", placebo=True),
    }
    texts = [
        f"{name} {listed((curve[c] for c in capacities), '{:.1f}')} %"
        for name, curve in curves.items()
    ]
    shares = listed((100 * c for c in capacities), "{:g}")
    return f"with {shares} % of the distinct blocks {', '.join(texts)}"


def closed() -> str:
    """The share of the gap to hindsight that `wa` closes."""
    lru, wa, bound = _curve("lru"), _curve("wa"), _curve("belady")
    shares = {c: 100 * (wa[c] - lru[c]) / (bound[c] - lru[c]) for c in (0.02, 0.05, 0.1)}
    return "here `wa` " + ", ".join(
        f"{share:.0f} % at {100 * c:g} %" for c, share in shares.items()
    )


PARTS = {
    "figure": figure,
    "closed": closed,
    "states": states,
    "victims": victims,
    "long-prompts": long_prompts,
    "paired": paired,
    "claims": claims,
    "tail": tail,
    "kv-hints": kv_hints,
    "hints": hints,
    "signals": signals,
    "true-hints": true_hints,
    "victim": victim,
    "readme-agents": functools.partial(_readme_seconds, "judge"),
    "readme-conversation": functools.partial(_readme_seconds, "conversation"),
}
