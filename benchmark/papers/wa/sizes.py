"""Figures 21 and 22: KV of a request, and of all that will be used again, in units of HBM (3.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from artefact import Context

from canopy_lab.characterize.observe import Observation, observe
from canopy_lab.sim.model import PRESETS, ModelShape
from wa.picture import COLOURS, label, panels, save
from wa.sources import conversation, trace_a, trace_b

GPU_BYTES = 80e9
ACTIVATION_BYTES = 4e9
"""Per GPU. With it, 973 tokens of Qwen2-7B are 0.09 % of the memory for KV, as in the paper."""
FLOPS = 0.55 * 312e12
"""A GPU's arithmetic that kernels reach (as in roofline.py)."""
PREFILL_SHARE = 0.5
"""Share of a busy GPU's time for prefill; the rest is decoding. Gives about the paper's 5 requests/s."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model on the GPUs of one instance."""

    shape: ModelShape
    weight_bytes: float
    gpus: int

    @property
    def hbm_bytes(self) -> float:
        """Left for KV."""
        return self.gpus * (GPU_BYTES - ACTIVATION_BYTES) - self.weight_bytes

    @property
    def hbm_tokens(self) -> int:
        return int(self.hbm_bytes / self.shape.kv_bytes_per_token())

    def most_requests_per_s(self, uncached_tokens: float) -> float:
        """Return the capacity for requests with that mean number of tokens to prefill."""
        seconds = uncached_tokens * self.shape.flops_per_token() / (FLOPS * self.gpus)
        return PREFILL_SHARE / seconds


MODELS = {
    "Qwen2-7B": Served(PRESETS["qwen2.5-7b"], 15.2e9, 1),
    "Llama2-13B": Served(ModelShape(40, 5120, 40, 40, 128, 13824), 26.0e9, 1),
    "Llama3-70B": Served(PRESETS["llama-3.1-70b"], 141e9, 4),
}
"""GQA, MHA, GQA."""


def figure_21(context: Context) -> Any:
    """A request's KV over the HBM that one instance has for KV, by type and turn."""
    a, b = observe(trace_a()), observe(trace_b())
    result: dict[str, Any] = {}
    figure, axes = panels(1, 3, 4.0)
    for axis, (model, served) in zip(axes[0], MODELS.items()):
        rows = {}
        unit = 100.0 * served.shape.kv_bytes_per_token() / served.hbm_bytes
        for colour, (name, seen, which) in zip(COLOURS, _groups(a, b)):
            percent = unit * (seen.input_tokens + seen.output_tokens)[which]
            rows[name] = {
                "mean": _round(percent.mean()),
                **{f"p{q}": _round(np.percentile(percent, q)) for q in (50, 90, 99)},
            }
            ordered = np.sort(percent)
            axis.plot(ordered, np.linspace(0, 1, len(ordered)), color=colour, label=name)
        label(axis, f"Figure 21: {model}, {served.hbm_bytes / 1e9:.0f} GB for KV",
              "KV of a request, % of HBM", "share of requests", log_x=True)  # fmt: skip
        axis.set_ylim(0.0, 1.7)  # room for the legend
        axis.legend(loc="upper left", ncols=2)
        result[model] = {
            "hbm_gb_for_kv": round(served.hbm_bytes / 1e9, 1),
            "kv_kib_per_token": served.shape.kv_bytes_per_token() / 1024,
            "percent_of_hbm": rows,
        }
    save(figure, context.figure())
    return result


def _groups(a: Observation, b: Observation) -> list[tuple[str, Observation, np.ndarray]]:
    groups = []
    for kind in ("text", "file", "search"):
        mine = a.kind == a.labels.index(kind)
        groups.append((f"{kind}, single-turn", a, mine & (a.turn == 1)))
        groups.append((f"{kind}, multi-turn", a, mine & (a.turn > 1)))
    return [*groups, ("API (trace-b)", b, b.turn == 1)]


def figure_22(context: Context) -> Any:
    """KV that will be used again, at the most requests/s that one instance serves."""
    seen = {
        "trace-a": observe(trace_a()),
        "trace-b": observe(trace_b()),
        "conversation": observe(conversation(context.data)),
    }
    result: dict[str, Any] = {}
    figure, axes = panels(1, 3, 4.0)
    for axis, (name, one) in zip(axes[0], seen.items()):
        rate = one.requests / one.span_s
        new = np.maximum(one.input_tokens - one.hits * one.block_tokens, 1).mean()
        again = one.uses > 1
        born, dead = np.sort(one.first_s[again]), np.sort(one.last_s[again])
        # The middle of the trace: nothing of it is cut off by the ends.
        span = one.span_s
        times = one.time_s[0] + np.linspace(0.35 * span, 0.65 * span, 200)
        live = np.searchsorted(born, times, "right") - np.searchsorted(dead, times, "right")
        rows = {}
        for colour, (model, served) in zip(COLOURS, MODELS.items()):
            most = served.most_requests_per_s(float(new))
            unit = one.block_tokens * served.shape.kv_bytes_per_token() / served.hbm_bytes
            need = live * unit * most / rate
            rows[model] = {
                "requests_per_s": round(most, 2),
                "hbm_needed_mean": _round(need.mean()),
                "hbm_needed_most": _round(need.max()),
            }
            axis.plot((times - times[0]) / 60, need, color=colour, label=model)
        label(axis, f"Figure 22: {name}", "minutes", "KV used again later / HBM")
        axis.set_yscale("log")
        axis.legend(loc="best")
        result[name] = {"mean_uncached_tokens": round(float(new)), "models": rows}
    save(figure, context.figure())
    return result


def _round(value: float) -> float:
    return float(f"{float(value):.3g}")
