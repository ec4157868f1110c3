"""Figure 28 and section 4.1: GDFS, LRU, the paper's formula and the survival rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from known import agents, mooncake, trace_a
from wa.picture import COLOURS, label, panels, save
from wa.sizes import MODELS

from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.trace.record import TraceRequest
from question import Context, Question
from sglang_canopy.policy.registry import make_policy

PAPER = {"model": "exponential", "categories": "type-turn"}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gdfs": ("gdfs", {}),
    "lru": ("lru", {}),
    "WA (the paper's)": ("wa", PAPER),
    "survival": ("wa", {}),
}
LOAD_PER_S = 5.0
"""Requests a second of one instance (Section 3.5)."""


def figure_28(context: Context) -> Any:
    """Block hit ratio in %, by policy, at #CPU cache / HBM = 1 on trace-a, and by size elsewhere."""
    result: dict[str, Any] = {}
    for name, trace, sizes in _cases(context):
        result[name] = {}
        for arm, (policy, options) in ARMS.items():
            result[name][arm] = {
                size: round(
                    100 * simulate(trace, make_policy(policy, options), blocks).block_hit_ratio, 2
                )
                for size, blocks in sizes.items()
            }
    _draw(result, context)
    return result


def _merged(r: TraceRequest, factor: int) -> TraceRequest:
    """Return the request in blocks of ``factor`` blocks. A block's id depends on its whole prefix."""
    chained, blocks = 0, []
    for start in range(0, len(r.blocks), factor):
        chained = hash((chained, r.blocks[start : start + factor]))
        blocks.append(chained)
    return replace(r, blocks=tuple(blocks), block_tokens=r.block_tokens * factor)


def _cases(context: Context) -> list[tuple[str, list[TraceRequest], dict[str, int]]]:
    day = trace_a()
    # In blocks of 64 tokens; the first 10,000 requests.
    merged = [_merged(r, 4) for r in day[:10_000]]
    # The day has a tenth of an instance's load, so it gets a tenth of its memory.
    part = 0.5 / LOAD_PER_S
    hbm = part * MODELS["Qwen2-7B"].hbm_tokens / merged[0].block_tokens
    cases = [
        ("trace-a, CPU cache / HBM", merged, {f"{x:g}": int(hbm * (1 + x)) for x in (0.0, 1.0)})
    ]
    for name, trace in (
        ("conversation, share of its blocks", mooncake(context.data, "conversation")),
        ("Mooncake synthetic, share of its blocks", mooncake(context.data, "synthetic")),
        ("agentic, share of its blocks", agents(context.data, 60)),
    ):
        distinct = distinct_blocks(trace)
        cases.append((name, trace, {f"{c:.0%}": int(c * distinct) for c in (0.05,)}))
    return cases


def _draw(result: dict[str, Any], context: Context) -> None:
    figure, axes = panels(1, len(result), 3.6, 3.2)
    for axis, (name, arms) in zip(axes[0], result.items()):
        sizes = list(next(iter(arms.values())))
        width = 0.8 / len(arms)
        for i, (arm, row) in enumerate(arms.items()):
            axis.bar([x + (i - len(arms) / 2) * width for x in range(len(sizes))],
                     [row[s] for s in sizes], width, color=COLOURS[i], label=arm)  # fmt: skip
        axis.set_xticks(range(len(sizes)), sizes)
        least = min(min(row.values()) for row in arms.values())
        axis.set_ylim(0.8 * least, None)
        label(axis, name, "", "block hits, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save(figure, context.figure())


QUESTIONS = (
    Question("figure-28", "GDFS, LRU, the paper's formula, the survival rank.", figure_28, 3.0),
)
