"""Figures 25 to 27: hits and queued TTFT by policy and host memory, on three models (Section 4.3).

Simulated (`sim/system`, costs of an A100 from published figures), not served: trends, not
milliseconds. Trace A is `trace-a`, split over instances as TraceSplitter does. Cache and
policies begin empty; with profiles of earlier traffic, as in the paper: commit 39a3e052.
"""

from __future__ import annotations

from typing import Any

from known import mooncake, trace_a
from roofline import Device, roofline_profile
from wa.picture import COLOURS, label, panels, save
from wa.sizes import MODELS, ServedModel
from wa.split import one_part

from canopy_lab.sim.driver import simulate
from canopy_lab.sim.system import SystemConfig, TierSpec, Workload, simulate_system
from canopy_lab.sim.system.engine_profile import EngineProfile
from canopy_lab.trace.record import TraceRequest
from question import Context, Question
from sglang_canopy.policy.registry import make_policy

A100 = Device("NVIDIA A100 SXM 80 GB", 312e12, 2.039e12, 32e9, ("NVIDIA A100 datasheet",))
PAPER = {"model": "exponential", "categories": "type-turn"}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "LRU": ("lru", {}),
    "FIFO": ("fifo", {}),
    "LFU": ("lfu", {}),
    "S3-FIFO": ("s3fifo", {}),
    "WA (the paper's)": ("wa", PAPER),
    "WA, survival": ("wa", {}),
}
RATIOS = (0.0, 1.0, 2.0)
"""Host memory over HBM for KV."""
REQUESTS = 3000
PAUSES_S = {"under 1 min": 60.0, "1 to 2 min": 120.0, "over 2 min": float("inf")}


Case = tuple[str, list[TraceRequest]]
"""Model, and traffic of an instance."""


def figure_25(context: Context) -> Any:
    """Qwen2-7B."""
    whole = mooncake(context.data, "conversation")
    return _run(
        context,
        {
            "Qwen2-7B on trace-a": ("Qwen2-7B", _load(1)),
            "Qwen2-7B on a sixth of conversation": ("Qwen2-7B", list(one_part(whole, 6, 0))),
        },
    )


def figure_26(context: Context) -> Any:
    """Llama2-13B, whose KV takes 14 times as much a token."""
    return _run(context, {"Llama2-13B on a 24th of trace-a": ("Llama2-13B", _load(24))})


def figure_27(context: Context) -> Any:
    """Llama3-70B on four GPUs."""
    return _run(context, {"Llama3-70B on a third of trace-a": ("Llama3-70B", _load(3))})


def _load(parts: int) -> list[TraceRequest]:
    """Return the traffic of one of ``parts`` instances: 40 minutes at the public sample's rate."""
    return list(one_part(trace_a(2400.0, 5.98, 1), parts))[:REQUESTS]


def _run(context: Context, cases: dict[str, Case]) -> Any:
    """Token hits in % and mean queued TTFT in seconds, by policy and host memory over HBM."""
    result = {name: _one(*case) for name, case in cases.items()}
    _draw(result, context)
    return result


def _one(model: str, trace: list[TraceRequest]) -> dict[str, Any]:
    served = MODELS[model]
    device = Device(
        A100.name,
        A100.flops * served.gpus,
        A100.bytes_per_s * served.gpus,
        A100.host_bytes_per_s * served.gpus,
        A100.sources,
    )
    profile = roofline_profile(
        model, model, served.shape, served.weight_bytes, device, "2026-11-22"
    )
    workload = Workload(trace)
    rows = {
        arm: {f"{ratio:g}": _served(workload, served, profile, *how, ratio) for ratio in RATIOS}
        for arm, how in POLICIES.items()
    }
    return {
        "requests": len(trace),
        "hbm_tokens": served.kv_capacity_tokens,
        "policies": rows,
        "hits_by_pause": _by_pause(trace, served.kv_capacity_tokens),
    }


def _by_pause(trace: list[TraceRequest], capacity_tokens: int) -> dict[str, dict[str, int]]:
    """Return tokens hit on the device, without a queue, by policy and time since the conversation's
    previous turn."""
    last: dict[Any, float] = {}
    classes = []
    for request in trace:
        before = last.get(request.conversation)
        pause = "first turn" if before is None else _pause(request.time_s - before)
        classes.append(pause)
        last[request.conversation] = request.time_s
    found: dict[str, dict[str, int]] = {}
    for arm in ("LRU", "WA (the paper's)", "WA, survival"):
        hits = _hits(trace, *POLICIES[arm], capacity_tokens // trace[0].block_tokens)
        found[arm] = dict.fromkeys(("first turn", *PAUSES_S), 0)
        for pause, tokens in zip(classes, hits, strict=True):
            found[arm][pause] += tokens
    return found


def _hits(
    trace: list[TraceRequest], policy: str, options: dict[str, Any], blocks: int
) -> list[int]:
    """Tokens that each request hits."""
    hits: list[int] = []
    simulate(trace, make_policy(policy, options), blocks, on_request=lambda _, n: hits.append(n))
    return hits


def _pause(seconds: float) -> str:
    return next(name for name, most in PAUSES_S.items() if seconds < most)


def _served(
    workload: Workload,
    served: ServedModel,
    profile: EngineProfile,
    policy: str,
    options: dict[str, Any],
    ratio: float,
) -> dict[str, float]:
    host = None
    if ratio:
        assert profile.host is not None
        speed = profile.host.read_bytes_per_s
        host = TierSpec(
            ratio * served.kv_capacity_bytes, speed, speed, policy=policy, policy_config=options
        )
    config = SystemConfig(
        device_tokens=served.kv_capacity_tokens,
        device_policy=policy,
        device_policy_config=options,
        host=host,
        page_tokens=16,
        waiting_prefixes="awaited",
        # To the host when the device has no room, as in the paper (Section 4.1).
        write_policy="write_back",
    )
    out = simulate_system(workload, config, profile)
    return {
        "hit_percent": round(100 * out.token_hit_ratio, 2),
        "qttft_s": round(out.mean_ttft_s, 4),
        "p99_s": round(out.p99_ttft_s, 3),
        "busy": round(out.busy_share, 2),
    }


def _draw(result: dict[str, Any], context: Context) -> None:
    figure, axes = panels(2, len(result), 4.2 if len(result) == 1 else 3.3, 2.6)
    for column, (name, case) in enumerate(result.items()):
        for i, (arm, row) in enumerate(case["policies"].items()):
            x = [float(r) for r in row]
            style = {"color": COLOURS[i], "marker": ".", "label": arm}
            axes[0, column].plot(x, [v["hit_percent"] for v in row.values()], **style)
            axes[1, column].plot(x, [v["qttft_s"] for v in row.values()], **style)
        label(axes[0, column], name, "", "token hits, %")
        label(axes[1, column], "", "CPU cache / HBM", "mean queued TTFT, s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3 * len(result), frameon=False)
    save(figure, context.figure())


QUESTIONS = (
    Question("figure-25", "Hits and queued TTFT by policy and memory, Qwen2-7B.", figure_25, 2.0),
    Question("figure-26", "The same, Llama2-13B.", figure_26),
    Question("figure-27", "The same, Llama3-70B.", figure_27),
)
