"""Gain of the order of a hybrid model's states, at equal memory.

    python benchmark/eviction/states.py --data DIR [--out FILE] [--traces agentic-1 conversation]

DIR holds `mooncake/` and `agentic_coding/`. KV and states share a memory of fixed size: SGLang and
Canopy split it, in several proportions (SGLang's own is .9 bytes of states for each byte of KV);
Marconi, built from its paper, has one budget, and the best of four alphas in hindsight. Prints
prompt tokens found, in %, and seconds of prefill left, at 100 TFLOP/s; ratios do not depend on that
rate. One process, five to ten minutes a trace.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hybrid.driver import (
    HybridResult,
    simulate_marconi,
    simulate_split,
    split_memory,
)
from hybrid.shape import preset

from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.policy.states import LeastRecentStates, State, StatePolicy, WorthOfStates

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from overlays import overlay

MODEL = "qwen3-next-80b-a3b"
FLOPS_PER_S = 1e14
SHARES = (0.05, 0.1, 0.2, 0.9)
"""Bytes of states for each byte of KV."""
ALPHAS = (0.0, 0.3, 1.0, 2.0)
MEMORY_GIB = {"agentic-1": (20, 40), "agentic-2": (20,), "conversation": (80, 160)}


class RandomWorth(WorthOfStates):
    """The placebo: each state has the saving of another state, drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self._draw = random.Random(1)
        self._seen: list[float] = []

    def admit(self, state: State, now: float) -> None:
        self._seen.append(state.saves)
        true, state.saves = state.saves, self._draw.choice(self._seen)
        super().admit(state, now)
        state.saves = true


ARMS: dict[str, tuple[str, Callable[[], StatePolicy]]] = {
    "SGLang": ("lru", LeastRecentStates),
    "`wa` on KV": ("wa", LeastRecentStates),
    "`wa` and states by worth": ("wa", WorthOfStates),
    "random savings (placebo)": ("wa", RandomWorth),
}
"""The policy on KV, and the order of states."""


def requests_of(data: Path, name: str) -> list[TraceRequest]:
    """A trace by name; the agentic ones are overlays of 60 conversations in 2 h, by seed."""
    kind, _, seed = name.partition("-")
    if kind == "agentic":
        archive = data / "agentic_coding" / "traces_500.tar.xz"
        return list(overlay(archive, 60, 7200.0, int(seed)))
    return list(open_trace(data / "mooncake" / "conversation_first60.jsonl", "mooncake"))


def measure(name: str, requests: list[TraceRequest]) -> Iterator[dict[str, Any]]:
    """Every arm at every memory and split of one trace."""
    shape, block = preset(MODEL), requests[0].block_tokens
    for gib in MEMORY_GIB[name]:
        memory = gib << 30
        for alpha in ALPHAS:
            result = simulate_marconi(requests, shape, memory, alpha)
            yield _row(name, gib, "Marconi", result, alpha=alpha)
        for share in SHARES:
            blocks, slots = split_memory(shape, memory, block, share)
            for arm, (policy, states) in ARMS.items():
                result = simulate_split(
                    requests,
                    make_policy(policy),
                    states(),
                    shape,
                    memory,
                    share=share,
                    unusable_first=arm != "SGLang",
                )
                yield _row(
                    name, gib, arm, result, share=share, kv_tokens=blocks * block, slots=slots
                )


def _row(name: str, gib: int, arm: str, result: HybridResult, **more: Any) -> dict[str, Any]:
    return {
        "trace": name,
        "gib": gib,
        "arm": arm,
        **more,
        "hit": round(100 * result.token_hit_ratio, 2),
        "recompute_s": round(result.recompute_s(FLOPS_PER_S), 1),
        "saved": round(100 * result.flops_saved_ratio, 2),
        "states_evicted": result.states_evicted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--traces", nargs="+", choices=MEMORY_GIB, default=list(MEMORY_GIB))
    parser.add_argument("--out", type=Path, help="write the rows as JSON, beside those it has")
    options = parser.parse_args()
    rows = []
    for name in options.traces:
        for row in measure(name, requests_of(options.data, name)):
            print(row, flush=True)
            rows.append(row)
    if options.out:
        if options.out.exists():
            old = json.loads(options.out.read_text(encoding="utf-8"))
            rows = [r for r in old if r["trace"] not in options.traces] + rows
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
