"""Configuration of a simulation: instances, tiers and the scheduler's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from canopy_lab.sim.system.gate import SESSION_GATES, make_session_gate
from canopy_lab.sim.system.queue_order import QUEUE_ORDERS, make_queue_order
from canopy_lab.sim.system.tier_spec import TierSpec, check_number
from canopy_lab.sim.system.waiting import WAITING_PREFIXES
from canopy_lab.sim.system.write_policy import WRITE_POLICIES
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import QUANTUM_TOKENS
from sglang_canopy.policy.registry import make_policy

ROUTINGS = ("round-robin", "least-loaded", "prefix-aware")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """Identical instances with device and host memory each, the disk, routing and scheduling."""

    device_tokens: int
    """KV pool of one instance, in tokens (SGLang's ``--max-total-tokens``)."""
    instances: int = 1
    routing: str = "round-robin"
    device_policy: str = "lru"
    device_policy_config: Mapping[str, Any] = field(default_factory=dict)
    host: TierSpec | None = None
    """Host tier of each instance."""
    disk: TierSpec | None = None
    """One for all instances, unless ``disk_per_instance``. Needs a host tier, as in SGLang."""
    disk_per_instance: bool = False
    max_running: int = 256
    """Requests that decode concurrently (``--max-running-requests``)."""
    chunked_prefill_tokens: int = 8192
    """Tokens of one prefill step, over all its requests (``--chunked-prefill-size``)."""
    max_prefill_tokens: int = 16384
    """Tokens of one prefill step; a single long request may exceed it (``--max-prefill-tokens``)."""
    page_tokens: int = 1
    max_new_tokens: int | None = None
    """``max_tokens`` of each request if larger than its output; SGLang reserves memory for it.
    ``None``: equal to the output."""
    fixed_outputs: bool = False
    """True if clients fix the output length (``ignore_eos``), as replays do. SGLang then reserves
    all of it instead of a share of ``new_token_ratio``."""
    schedule_conservativeness: float = 1.0
    """``--schedule-conservativeness``: larger values run fewer requests concurrently."""
    write_policy: str = "write_through"
    """Time of the copy to the host, a name in ``write_policy.py``: ``write_through`` at insertion,
    ``write_through_selective`` at the second use, ``write_back`` at eviction, which delays the next
    step. Host copies are then written to the disk.
    """
    schedule_policy: str = "fcfs"
    """Queue order, a name in ``queue_order.py`` (``--schedule-policy``)."""
    schedule_policy_config: Mapping[str, Any] = field(default_factory=dict)
    session_gate: str = "none"
    """Session gate, a name in ``gate.py``."""
    session_gate_config: Mapping[str, Any] = field(default_factory=dict)
    waiting_prefixes: str = "by-place"
    """Protection of the cached prefixes of waiting requests, a name in ``waiting.py``:
    ``by-place`` as in the live tree, ``awaited`` from the first lookup on,
    ``touched`` as SGLang's ``lru``."""
    prefetch_policy: str = "best_effort"
    """Start of a request with a disk prefetch: at once with the pages read so far
    (``best_effort``), after all pages (``wait_complete``), or after a time (``timeout``)."""
    prefetch_threshold_tokens: int = 256
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_ki_token_s: float = 0.25
    load_back_threshold_tokens: int = 10
    """Minimum tokens on the host for a load; fewer are recomputed."""
    whole_nodes: bool = False
    """Evict whole nodes, as SGLang's policies do, instead of only the tokens needed."""
    quantum_tokens: int = QUANTUM_TOKENS
    """Minimum tokens per eviction by need, as on a server."""
    model: str | None = None
    """Name of the model; profiles of other models are refused."""

    def __post_init__(self) -> None:
        for name in (
            "device_tokens",
            "instances",
            "max_running",
            "chunked_prefill_tokens",
            "max_prefill_tokens",
            "page_tokens",
            "quantum_tokens",
        ):
            check_number(name, getattr(self, name), above=0)
        check_number("schedule_conservativeness", self.schedule_conservativeness, above=0)
        if self.max_new_tokens is not None:
            check_number("max_new_tokens", self.max_new_tokens, above=0)
        for name in ("prefetch_threshold_tokens", "load_back_threshold_tokens"):
            check_number(name, getattr(self, name), least=0)
        _one_of("routing", self.routing, ROUTINGS)
        _one_of("write_policy", self.write_policy, tuple(WRITE_POLICIES))
        _one_of("schedule_policy", self.schedule_policy, tuple(QUEUE_ORDERS))
        _one_of("session_gate", self.session_gate, tuple(SESSION_GATES))
        _one_of("waiting_prefixes", self.waiting_prefixes, tuple(WAITING_PREFIXES))
        _arguments(
            f"schedule_policy {self.schedule_policy!r}",
            lambda: make_queue_order(self.schedule_policy, self.schedule_policy_config),
        )
        _arguments(
            f"session_gate {self.session_gate!r}",
            lambda: make_session_gate(
                self.session_gate, self.device_tokens, 0, self.session_gate_config
            ),
        )
        _one_of("prefetch_policy", self.prefetch_policy, PREFETCH_POLICIES)
        if self.disk is not None and self.host is None:
            raise CanopyError(
                "a disk tier needs a host tier: SGLang reads from storage into host memory; "
                "give host as well"
            )
        make_policy(self.device_policy, self.device_policy_config)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise CanopyError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _arguments(name: str, make: Callable[[], object]) -> None:
    try:
        make()
    except TypeError as error:
        raise CanopyError(f"{name} does not take the arguments given: {error}") from None
