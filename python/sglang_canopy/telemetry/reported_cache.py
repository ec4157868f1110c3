"""What a report needs of a cache: the radix cache has it, and nothing of it is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sglang_canopy.config.tiers import TierOptions
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.keep import Keeps, TokenBudget
from sglang_canopy.radix.adapter_counts import AdapterCounts
from sglang_canopy.radix.counters import Counters
from sglang_canopy.ttl.table import TTLTable
from sglang_canopy.whatif.meter import Meter


class ReportedProfile(Protocol):
    """The file that keeps what a policy learns."""

    @property
    def path(self) -> Path: ...

    @property
    def saves(self) -> bool:
        """Whether this server is the one that writes it."""


class ReportedGate(Protocol):
    """The session gate."""

    def stats(self) -> dict[str, Any]: ...

    def agreement(self) -> dict[str, Any]:
        """What must be equal on all ranks."""


class ReportedPolicies(Protocol):
    """The policy of each tier in memory."""

    @property
    def gate(self) -> ReportedGate | None: ...

    @property
    def running(self) -> str:
        """The device policy's name, as ``--radix-eviction`` takes it."""

    @property
    def tiers(self) -> TierOptions: ...

    @property
    def meter(self) -> Meter | None: ...

    @property
    def device_policy(self) -> Policy: ...

    @property
    def host_policy(self) -> Policy: ...

    @property
    def profile(self) -> ReportedProfile | None: ...


class ReportedGroups(Protocol):
    """The TTLs of each tier that has any."""

    @property
    def host(self) -> TTLTable | None: ...

    @property
    def disk(self) -> TTLTable | None: ...


class ReportedWaiting(Protocol):
    """What is protected for requests that wait."""

    @property
    def budget(self) -> TokenBudget: ...


class ReportedExchange(Protocol):
    """What was exchanged while the server ran."""

    @property
    def changes(self) -> Sequence[Any]: ...


class ReportedTree(Protocol):
    """The tree core: its nodes, its policies, and what it counts."""

    @property
    def counters(self) -> Counters: ...

    @property
    def adapters(self) -> AdapterCounts: ...

    @property
    def page_size(self) -> int: ...

    @property
    def live(self) -> ReportedPolicies: ...

    @property
    def exchange(self) -> ReportedExchange: ...

    @property
    def groups(self) -> ReportedGroups: ...

    @property
    def keeps(self) -> Keeps: ...

    @property
    def waiting(self) -> ReportedWaiting: ...

    @property
    def _node_arena(self) -> Mapping[int, Any]:
        """SGLang's: every node by its id, with our ``canopy`` on it."""


class ReportedCache(Protocol):
    """A rank's cache. What is ``Any`` is SGLang's own."""

    @property
    def tree_core(self) -> ReportedTree: ...

    @property
    def token_to_kv_pool_allocator(self) -> Any: ...

    @property
    def cache_controller(self) -> Any:
        """``None`` without tiers below the device."""
