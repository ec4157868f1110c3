"""Configuration of a simulation: instances, tiers and the scheduler's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

from canopy_lab.sim.system.gate import SESSION_GATES, make_session_gate
from canopy_lab.sim.system.queue_order import QUEUE_ORDERS, make_queue_order
from canopy_lab.sim.system.tier_spec import TierSpec
from sglang_canopy import declared
from sglang_canopy.declared import declare, declare_key
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import QUANTUM_TOKENS
from sglang_canopy.policy.registry import CANOPYS_LRU, make_policy

ROUTINGS = ("round-robin", "prefix-aware")
USES_BEFORE_COPY = {"write_through": 1, "write_through_selective": 2, "write_back": 0}
"""SGLang's ``--hicache-write-policy`` -> uses after which a node is copied to the host; 0: at its
eviction. Only the latter blocks: the next step starts after the copies of the victims
(SGLang 0.5.23, ``unified_radix_cache.py``, ``writing_check(write_back=True)``)."""
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """Servers."""

    device_tokens: int = declare(
        MISSING, "--device-tokens", "KV pool of one instance, in tokens", metavar="N", low=1,
        required=True, shown_default="",
    )  # fmt: skip
    instances: int = declare(1, "--instances", "number of servers", metavar="N", low=1)
    routing: str = declare(
        ROUTINGS[0], "--routing", "how requests are spread over instances", choices=ROUTINGS
    )
    device_policy: str = declare(
        CANOPYS_LRU,
        "--policy",
        "eviction policy of every tier; lru is SGLang's own",
        metavar="NAME",
    )
    device_policy_config: Mapping[str, Any] = field(default_factory=dict)
    host: TierSpec | None = None
    """Host tier of each instance."""
    disk: TierSpec | None = None
    """One for all instances, unless ``disk_per_instance``. Needs a host tier, as in SGLang."""
    disk_per_instance: bool = False
    max_running: int = declare(
        256, "--max-running", "requests that decode at the same time", metavar="N", low=1
    )
    chunked_prefill_tokens: int = declare_key(8192, "most tokens of one prefill step", low=1)
    max_prefill_tokens: int = declare_key(
        16384, "tokens of a prefill step, which a single long request may exceed", low=1
    )
    page_tokens: int = declare_key(1, "SGLang's page size", low=1)
    fixed_outputs: bool = False
    """True if clients fix the output length (``ignore_eos``), as replays do. SGLang then reserves
    all of it instead of a share of ``new_token_ratio``."""
    schedule_conservativeness: float = declare_key(
        1.0, "larger values run fewer requests at the same time", low=1e-9
    )
    write_policy: str = declare_key(
        "write_through", "SGLang's --hicache-write-policy", choices=tuple(USES_BEFORE_COPY)
    )
    schedule_policy: str = declare(
        "fcfs", "--schedule-policy", "SGLang's --schedule-policy", choices=QUEUE_ORDERS
    )
    schedule_policy_config: Mapping[str, Any] = field(default_factory=dict)
    session_gate: str = declare(
        "none", "--session-gate", "which sessions may join the queue", choices=SESSION_GATES
    )
    session_gate_config: Mapping[str, Any] = field(default_factory=dict)
    touches_waiting: bool = False
    """Protect prefixes of waiting requests as SGLang's ``lru`` does (``waiting.py``)."""
    prefetch_policy: str = declare_key(
        PREFETCH_POLICIES[0],
        "SGLang's --hicache-storage-prefetch-policy",
        choices=PREFETCH_POLICIES,
    )
    prefetch_threshold_tokens: int = declare_key(256, "fewer are not read from the disk", low=0)
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_ki_token_s: float = 0.25
    load_back_threshold_tokens: int = declare_key(
        10, "minimum tokens on the host for a load; fewer are recomputed", low=0
    )
    whole_nodes: bool = False
    """Evict whole nodes, as SGLang's policies do, instead of only the tokens needed."""
    quantum_tokens: int = declare_key(QUANTUM_TOKENS, "minimum tokens per eviction by need", low=1)

    def __post_init__(self) -> None:
        declared.check(self)
        _check_arguments(
            f"schedule_policy {self.schedule_policy!r}",
            lambda: make_queue_order(self.schedule_policy, self.schedule_policy_config),
        )
        _check_arguments(
            f"session_gate {self.session_gate!r}",
            lambda: make_session_gate(
                self.session_gate, self.device_tokens, 0, self.session_gate_config
            ),
        )
        if self.disk is not None and self.host is None:
            raise CanopyError(
                "a disk tier needs a host tier: SGLang reads from storage into host memory; "
                "give host as well"
            )
        make_policy(self.device_policy, self.device_policy_config)


def _check_arguments(name: str, make: Callable[[], object]) -> None:
    try:
        make()
    except TypeError as error:
        raise CanopyError(f"{name} does not take the arguments given: {error}") from None
