"""What each part of `wa` but its signals (`signals.py`) is worth, and what was tried and left out.

    python benchmark/eviction/ablations.py --data DIR --out OUT

Replaces one part of the policy at a time. Writes OUT/ablations.json and OUT/ablations.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tqdm import tqdm

from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.policy.structures import cells
from sglang_canopy.reuse import fitting, learner
from sglang_canopy.reuse.bins import BINS, EDGES, age_bin
from sglang_canopy.reuse.categories import features

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from overlays import overlay

CAPACITIES = {"conversation": (0.02, 0.05, 0.1), "synthetic": (0.05, 0.1), "agentic": (0.05, 0.1)}


def wa(**options: Any) -> Policy:
    return make_policy("wa", {"max_categories": 1024, **options})


def with_features(choose: Callable[[Any, Any], tuple[str, ...]]) -> Policy:
    """``choose(tip, request)`` gives the features of a label."""
    policy: Any = wa()
    model = policy.model
    model._categorise = lambda tip, request: model.categories.refine(choose(tip, request))
    return policy


def usual(tip: Any, request: Any) -> tuple[str, ...]:
    return features(
        request.category,
        request.stop,
        tip.turn,
        request.output_tokens,
        tip.own_gap_s,
        tip.added,
    )


def turn_after_tools(tip: Any, request: Any) -> tuple[str, ...]:
    return (*usual(tip, request), f"turn{min(tip.turn, 5)}")


def own_gaps_in_chat(tip: Any, request: Any) -> tuple[str, ...]:
    names = usual(tip, request)
    if request.stop == "tool" or tip.own_gap_s is None:
        return names
    return (*names, f"gap{sum(tip.own_gap_s >= e for e in (2, 8, 30, 120))}")


def prompt_length(tip: Any, request: Any) -> tuple[str, ...]:
    return (*usual(tip, request), f"in{request.prompt_tokens.bit_length() // 2}")


def no_shared_prefixes() -> Policy:
    policy: Any = wa()
    policy._category = lambda leaf: policy.model.categories.get(leaf.category)
    return policy


def nobody_waits() -> Policy:
    """The mistake of learning from those who came back only."""

    def forget(categories: Any, shadow: Any, now: float) -> None:
        for category in categories:
            category.waiting = [0.0] * BINS

    return patched(fitting, "_count_waiting", forget)


def least_horizon(bins: int) -> Policy:
    def rank(curve: Sequence[float]) -> list[float]:
        held = [0.0]
        for i in range(BINS - 1):
            held.append(held[-1] + (curve[i] + curve[i + 1]) / 2 * (EDGES[i + 1] - EDGES[i]))
        best = [0.0] * BINS
        for i in range(BINS - 1):
            for j in range(min(i + bins, BINS - 1), BINS):
                if held[j] > held[i]:
                    best[i] = max(best[i], (curve[i] - curve[j]) / (held[j] - held[i]))
        return best

    return patched(fitting, "gittins_rank", rank)


def blended(power: float) -> Policy:
    gittins = fitting.gittins_rank

    def rank(curve: Sequence[float]) -> list[float]:
        pull = [max(edge, 30.0) ** (power - 1.0) for edge in EDGES]
        return [rank**power * factor for rank, factor in zip(gittins(curve), pull)]

    return patched(fitting, "gittins_rank", rank)


def full_scan() -> Policy:
    def least(self: Any, now: float) -> Any:
        found = None
        for cell in self.cells():
            for leaf in cell:
                rank = cell.category.rank[age_bin(now - leaf.last_access)]
                order = (rank, leaf.last_access, -leaf.offset)
                if found is None or order < found[0]:
                    found = (order, leaf)
        return found

    return patched(cells.Cells, "least", least)


def patched(owner: Any, name: str, value: Any) -> Policy:
    """``wa`` under a patch, which lasts until the policy is let go."""
    patch = mock.patch.object(owner, name, value)
    patch.start()
    policy: Any = wa()
    policy.undo = patch.stop
    return policy


def last_gap_only() -> Policy:
    return patched(learner, "_OWN_GAP_STEP", 1.0)


VARIANTS: dict[str, Callable[[], Policy]] = {
    "lru": lambda: make_policy("lru"),
    "wa": wa,
    "without shared prefixes": no_shared_prefixes,
    "without censored samples": nobody_waits,
    "turn after tool calls too": lambda: with_features(turn_after_tools),
    "own gaps in chat too": lambda: with_features(own_gaps_in_chat),
    "last gap instead of an average": last_gap_only,
    "prompt length too": lambda: with_features(prompt_length),
    "no leaning on the parent": lambda: patched(fitting, "SHRINK", 0.01),
    "leaning with 50 samples": lambda: patched(fitting, "SHRINK", 50.0),
    "leaning with 200 samples": lambda: patched(fitting, "SHRINK", 200.0),
    "horizon of 4 bins or more": lambda: least_horizon(4),
    "G^0.8 x (1/age)^0.2": lambda: blended(0.8),
    "all leaves, not queue ends": full_scan,
    "window of 20 minutes": lambda: wa(window_s=1200.0),
    "16 categories": lambda: make_policy("wa", {"max_categories": 16}),
    "64 categories": lambda: make_policy("wa", {"max_categories": 64}),
}


def measure(traces: dict[str, list[TraceRequest]]) -> list[dict[str, Any]]:
    rows = []
    total = len(VARIANTS) * sum(len(CAPACITIES[name]) for name in traces)
    with tqdm(total=total, unit="run", disable=None) as bar:
        for name, trace in traces.items():
            distinct = distinct_blocks(trace)
            for variant, make in VARIANTS.items():
                for capacity in CAPACITIES[name]:
                    policy: Any = make()
                    try:
                        result = simulate(trace, policy, int(distinct * capacity))
                    finally:
                        getattr(policy, "undo", lambda: None)()
                    rows.append(
                        {
                            "trace": name,
                            "variant": variant,
                            "capacity_fraction": capacity,
                            "block_hit_ratio": result.block_hit_ratio,
                        }
                    )
                    bar.update()
    return rows


def with_profile(trace: list[TraceRequest]) -> list[dict[str, Any]]:
    """The second half of the conversation trace, started with what the first half taught."""
    half = len(trace) // 2
    teacher = wa()
    simulate(trace[:half], teacher, 5000)
    taught = json.loads(json.dumps(teacher.state()))
    distinct = distinct_blocks(trace[half:])
    rows = []
    for variant in ("lru", "wa", "wa with the profile of the first half"):
        for capacity in CAPACITIES["conversation"]:
            policy = make_policy("lru") if variant == "lru" else wa()
            if variant.endswith("half"):
                policy.restore(taught)
            result = simulate(trace[half:], policy, int(distinct * capacity))
            rows.append(
                {
                    "trace": "2nd half",
                    "variant": variant,
                    "capacity_fraction": capacity,
                    "block_hit_ratio": result.block_hit_ratio,
                }
            )
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys((r["trace"], r["capacity_fraction"]) for r in rows))
    lines = [
        "| variant | " + " | ".join(f"{name} {capacity:.0%}" for name, capacity in columns) + " |",
        "|" + " --- |" * (len(columns) + 1),
    ]
    for variant in dict.fromkeys(r["variant"] for r in rows):
        cells_of = {
            (r["trace"], r["capacity_fraction"]): f"{100 * r['block_hit_ratio']:.2f}"
            for r in rows
            if r["variant"] == variant
        }
        lines.append(f"| {variant} | " + " | ".join(cells_of.get(c, "") for c in columns) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the public traces")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    args = parser.parse_args()
    mooncake, agents = args.data / "mooncake", args.data / "agentic_coding" / "traces_500.tar.xz"
    traces = {
        "conversation": list(open_trace(mooncake / "conversation_first60.jsonl", "mooncake")),
        "synthetic": list(open_trace(mooncake / "synthetic_trace.jsonl", "mooncake")),
        "agentic": list(overlay(agents, 200, 7200.0, 1, own_prefixes=True)),
    }
    rows = measure(traces) + with_profile(traces["conversation"])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "ablations.json").write_text(json.dumps(rows) + "\n")
    (args.out / "ablations.md").write_text(report(rows))
    print(report(rows))


if __name__ == "__main__":
    main()
