"""Table of server set-ups and their support, for the documentation and the doctor.

A cell has the level of testing of a set-up with one part of Canopy. ``refusals.py`` defines the refused
set-ups; ``test/doctor/test_setups.py`` compares this table with it, and names the test of each cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sglang_canopy.config.refusals import (
    ADDITIONS,
    DISK,
    POLICIES,
    unsupported,
    whole_prefill_graph,
)

SERVED, CACHE, REFUSED, UNTESTED = "served here", "cache level", "refused", "untested"
"""States: tested on a CPU with a real server; tested with the real cache, pools or scheduler objects
without a server; refused at start with the reason; neither refused nor tested."""

FEATURES = {
    "device": (POLICIES,),
    "host": (POLICIES,),
    "disk": (POLICIES, DISK),
}
"""Part -> features that may be refused: policies on the device, in host memory and on the disk."""


def parts() -> tuple[str, ...]:
    """Return the parts above, and the features that other plugins have added."""
    return (*FEATURES, *ADDITIONS)


@dataclass(frozen=True, slots=True)
class Cell:
    """Level of testing of one part of Canopy in a set-up."""

    state: str
    why: str = ""
    """Reason for ``REFUSED`` or ``UNTESTED``."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One row. ``option`` (of ``ServerArgs`` or the model) selects the set-up; ``value`` is a sample."""

    name: str
    option: str
    value: Any
    device: str | None = None
    host: str | None = None
    disk: str | None = None
    """State of each part; ``None`` means refused, or untested if it is not refused."""
    applies: Callable[[Any], bool] = bool
    """Whether the option's value selects this set-up."""

    def cell(self, part: str) -> Cell:
        """Return the state of ``part``."""
        sample = SimpleNamespace(**{self.option: self.value})
        why = refused(part, sample)
        added = ADDITIONS.get(part)
        if added is None:
            state = getattr(self, part)
        else:
            state = SERVED if self.name in added.served else None
        if why is not None:
            return Cell(REFUSED, why=why.partition(";")[0])
        return Cell(state) if state else Cell(UNTESTED, why="not tried yet")


def refused(part: str, configured: Any) -> str | None:
    """Return the reason why ``part`` (of ``parts()``) is refused with ``configured``, or ``None``."""
    reasons = (
        unsupported(feature, configured, environment={}) for feature in FEATURES.get(part, (part,))
    )
    return next((why for why in reasons if why is not None), None)


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _other(*usual: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in usual


def _above(limit: int) -> Callable[[Any], bool]:
    return lambda value: (value or 0) > limit


SETUPS = (
    Setup(
        "one process, CPU",
        "device",
        "cpu",
        device=SERVED,
        host=SERVED,
        disk=SERVED,
        applies=_is("cpu"),
    ),
    Setup("CUDA", "device", "cuda", applies=_is("cuda")),
    Setup(
        "`--tp-size 2`",
        "tp_size",
        2,
        device=SERVED,
        host=SERVED,
        disk=SERVED,
        applies=_is(2),
    ),
    Setup("`--tp-size` above 2", "tp_size", 4, applies=_above(2)),
    Setup("`--dp-size`", "dp_size", 2, device=SERVED, disk=CACHE, applies=_above(1)),
    Setup("`--enable-dp-attention`", "enable_dp_attention", True, device=CACHE),
    Setup("`--pp-size`", "pp_size", 2, device=SERVED, disk=CACHE, applies=_above(1)),
    Setup("MLA models (DeepSeek, Kimi)", "is_mla", True, device=SERVED, host=SERVED, disk=SERVED),
    Setup("sliding-window models", "is_hybrid_swa", True, device=SERVED, host=SERVED),
    Setup("Mamba and linear attention", "is_hybrid_ssm", True, device=SERVED, host=SERVED),
    Setup("`--enable-unified-memory`", "enable_unified_memory", True),
    Setup("images in prompts", "is_multimodal", True, device=SERVED, host=CACHE),
    Setup("LoRA adapters", "enable_lora", True, device=SERVED, host=SERVED, disk=SERVED),
    Setup("pages of 1 token", "page_size", 1, device=SERVED, host=CACHE, applies=_is(1)),
    Setup(
        "pages of 16 tokens",
        "page_size",
        16,
        device=SERVED,
        host=SERVED,
        disk=SERVED,
        applies=_is(16),
    ),
    Setup("pages of 64 tokens", "page_size", 64, device=SERVED, applies=_is(64)),
    Setup("the overlap schedule", "overlap_schedule", True, device=SERVED),
    Setup(
        "chunked prefill",
        "chunked_prefill_size",
        256,
        device=SERVED,
        applies=_above(0),
    ),
    Setup("`--enable-mixed-chunk`", "enable_mixed_chunk", True, device=SERVED),
    Setup("`--enable-priority-scheduling`", "enable_priority_scheduling", True, device=SERVED),
    Setup("structured output", "structured_output", True, device=SERVED),
    Setup("`sglang.Engine` in Python", "engine", True, device=SERVED),
    Setup(
        "speculative decoding by n-grams",
        "speculative_algorithm",
        "NGRAM",
        device=SERVED,
        host=SERVED,
        disk=SERVED,
        applies=_is("NGRAM"),
    ),
    Setup(
        "speculative decoding with a draft model (EAGLE, MTP)",
        "speculative_algorithm",
        "EAGLE",
        device=CACHE,
        host=CACHE,
        applies=lambda algorithm: algorithm not in (None, "NGRAM"),
    ),
    Setup(
        "`--disaggregation-mode prefill`",
        "disaggregation_mode",
        "prefill",
        device=CACHE,
        host=CACHE,
        applies=_is("prefill"),
    ),
    Setup("`--disaggregation-mode decode`", "disaggregation_mode", "decode", applies=_is("decode")),
    Setup("`--grpc-port`", "grpc_port", 30001, device=CACHE),
    Setup("`--grpc-mode`", "grpc_mode", True, device=CACHE),
    Setup("`--smg-grpc-mode`", "smg_grpc_mode", True, device=CACHE),
    Setup(
        "`--tokenizer-worker-num` above 1",
        "tokenizer_worker_num",
        2,
        device=SERVED,
        applies=_above(1),
    ),
    Setup("`--ep-size` above 1", "ep_size", 8, applies=_above(1)),
    Setup("`--moe-a2a-backend`", "moe_a2a_backend", "deepep", applies=_other("none")),
    Setup("`--moe-runner-backend`", "moe_runner_backend", "deep_gemm", applies=_other("auto")),
    Setup("several nodes (`--nnodes`)", "nnodes", 2, applies=_above(1)),
    Setup(
        "HiCache storage `mooncake`",
        "hicache_storage_backend",
        "mooncake",
        host=CACHE,
        applies=_is("mooncake"),
    ),
    Setup(
        "HiCache storage other than `canopy` and `mooncake` (file, nixl, hf3fs, ...)",
        "hicache_storage_backend",
        "nixl",
        applies=_other("canopy", "mooncake", "dynamic"),
    ),
    Setup("`--use-ray`", "use_ray", True),
    Setup("`--enable-streaming-session`", "enable_streaming_session", True),
    Setup("`--enable-session-radix-cache`", "enable_session_radix_cache", True),
    Setup("`--enable-lmcache`", "enable_lmcache", True),
    Setup("`--enable-flexkv`", "enable_flexkv", True),
    Setup("an external cache linker", "enable_unified_cache_external_linker", True),
    Setup("`--disable-radix-cache`", "disable_radix_cache", True),
    Setup("`--radix-cache-backend`", "radix_cache_backend", "other"),
    Setup(
        "`--kv-cache-dtype`",
        "kv_cache_dtype",
        "fp8_e5m2",
        applies=lambda v: v not in (None, "auto"),
    ),
    Setup("quantised weights", "quantization", "awq"),
    Setup(
        "`--cuda-graph-backend-prefill full`",
        "cuda_graph_backend_prefill",
        "full",
        applies=lambda v: v == "full",
    ),
    Setup(
        "`--cuda-graph-config` with prefill full",
        "cuda_graph_config",
        {"prefill": {"backend": "full"}},
        applies=whole_prefill_graph,
    ),
    Setup("`--enable-return-hidden-states`", "enable_return_hidden_states", True),
    Setup("`--enable-encoder-swa-bounded-replay`", "enable_encoder_swa_bounded_replay", True),
)


def tested(configured: Any, parts: tuple[str, ...]) -> list[tuple[Setup, dict[str, list[str]]]]:
    """Return the set-ups of the arguments ``configured``, with tested ``parts`` by level."""
    found = []
    for setup in SETUPS:
        if setup.applies(getattr(configured, setup.option, None)):
            levels: dict[str, list[str]] = {}
            for part in parts:
                state = setup.cell(part).state
                if state in (SERVED, CACHE):
                    levels.setdefault(state, []).append(part)
            if levels:
                found.append((setup, levels))
    return found


def untested(configured: Any, parts: tuple[str, ...]) -> list[tuple[Setup, list[str]]]:
    """Return the set-ups of a server's arguments ``configured``, each with its untested ``parts``."""
    found = []
    for setup in SETUPS:
        if setup.applies(getattr(configured, setup.option, None)):
            untried = [part for part in parts if setup.cell(part).state == UNTESTED]
            if untried:
                found.append((setup, untried))
    return found
