"""Figures 25 to 27: hits and queued TTFT by policy and host memory, on three models (Section 4.3).

Simulated (`sim/system`, costs of an A100 from published figures), not served: trends, not
milliseconds. Trace A is `trace-a`, split over instances as TraceSplitter does.
"""

from __future__ import annotations

from typing import Any

from artefact import Context
from roofline import Device, roofline_profile

from canopy_lab.sim.system import SystemConfig, TierSpec, Workload, simulate_system
from canopy_lab.trace.record import TraceRequest
from wa.picture import COLOURS, label, panels, save
from wa.sizes import MODELS
from wa.sources import conversation, trace_a
from wa.split import one_part

A100 = Device("NVIDIA A100 SXM 80 GB", 312e12, 2.039e12, 32e9, ("NVIDIA A100 datasheet",))
PAPER = {"model": "exponential", "reading": "formula", "categories": "type-turn"}
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


def figure_25(context: Context) -> Any:
    """Qwen2-7B."""
    sixth = list(one_part(conversation(context.data), 6))
    return _run(
        context,
        {
            "Qwen2-7B on trace-a": ("Qwen2-7B", _load(1)),
            "Qwen2-7B on a sixth of conversation": ("Qwen2-7B", sixth),
        },
    )


def figure_26(context: Context) -> Any:
    """Llama2-13B, whose KV takes 14 times as much a token."""
    return _run(context, {"Llama2-13B on a 24th of trace-a": ("Llama2-13B", _load(24))})


def figure_27(context: Context) -> Any:
    """Llama3-70B on four GPUs."""
    return _run(context, {"Llama3-70B on a third of trace-a": ("Llama3-70B", _load(3))})


def _load(parts: int) -> list[TraceRequest]:
    """What one of ``parts`` instances gets of 40 minutes at the public sample's rate."""
    return list(one_part(trace_a(2400.0, 5.98), parts))[:REQUESTS]


def _run(context: Context, cases: dict[str, tuple[str, list[TraceRequest]]]) -> Any:
    """Token hits in % and mean queued TTFT in seconds, by policy and host memory over HBM."""
    result: dict[str, Any] = {}
    for name, (model, trace) in cases.items():
        served = MODELS[model]
        profile = roofline_profile(
            model, model, served.shape, served.weight_bytes,
            Device(A100.name, A100.flops * served.gpus, A100.bytes_per_s * served.gpus,
                   A100.host_bytes_per_s * served.gpus, A100.sources),
            "2026-11-22",
        )  # fmt: skip
        workload = Workload(trace)
        rows: dict[str, Any] = {}
        for arm, (policy, options) in POLICIES.items():
            rows[arm] = {}
            for ratio in RATIOS:
                host = None
                if ratio:
                    speed = profile.host.read_bytes_per_s
                    host = TierSpec(
                        ratio * served.hbm_bytes, speed, speed, policy=policy, policy_config=options
                    )
                config = SystemConfig(
                    device_tokens=served.hbm_tokens,
                    device_policy=policy,
                    device_policy_config=options,
                    host=host,
                    page_tokens=16,
                    # What the results were made with: --canopy-protect-waiting off.
                    waiting_prefixes="awaited",
                    # To the host when the device has no room, as in the paper (Section 4.1).
                    write_policy="write_back",
                )
                out = simulate_system(workload, config, profile)
                rows[arm][f"{ratio:g}"] = {
                    "hit_percent": round(100 * out.token_hit_ratio, 2),
                    "qttft_s": round(out.mean_ttft_s, 4),
                    "p99_s": round(out.p99_ttft_s, 3),
                    "busy": round(out.busy_share, 2),
                }
        result[name] = {"requests": len(trace), "hbm_tokens": served.hbm_tokens, "policies": rows}
    _draw(result, context)
    return result


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
