"""SGLang's own settings that a simulation depends on, by the names of its ``ServerArgs``.

A plan is simulated with all of them and writes all of them, so that the started server equals the simulated
one. ``SGLANG_DEFAULTS`` records the defaults of SGLang 0.5.23 (``test/config/test_server_settings.py``
compares it with ``ServerArgs``): planning needs neither SGLang nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sglang_canopy.errors import CanopyError

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("timeout", "wait_complete", "best_effort")
SCHEDULE_POLICIES = ("fcfs", "lpm", "hrrn", "shortest-prefill-first")
"""SGLang's orders that the simulator implements."""
STORAGE_BACKENDS = ("canopy", "mooncake")

_STORAGE_KEYS = ("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token")
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "hicache_write_policy": WRITE_POLICIES,
    "hicache_storage_prefetch_policy": PREFETCH_POLICIES,
    "schedule_policy": SCHEDULE_POLICIES,
    "hicache_storage_backend": STORAGE_BACKENDS,
}
_CHUNK_TOKENS_BY_GIB = ((20, 2048), (60, 4096), (160, 8192), (math.inf, 16384))
"""``--chunked-prefill-size`` of a GPU with fewer GiB than this (``memory_hook.py``)."""
MIN_RUNNING_REQUESTS = 2048
"""SGLang's default ``--max-running-requests``, unless the pool is tiny. A pool of many contexts has
more, up to 4,096 (``kv_cache_configurator.py``, ``resolve_max_num_reqs``)."""


def _check_setting(name: str, type_name: str, value: Any) -> None:
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise CanopyError(
                f"server: {name} must be one of {', '.join(_CHOICES[name])}, got {value!r:.60}"
            )
    elif type_name.startswith("bool"):
        if not isinstance(value, bool):
            raise CanopyError(f"server: {name} must be true or false, got {value!r:.60}")
    elif type_name.startswith("int"):
        if type(value) is not int or not 1 <= value < 1 << 40:
            raise CanopyError(f"server: {name} must be a whole number above 0, got {value!r:.60}")
    else:
        is_number = type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1e6
        if not is_number or (name == "mem_fraction_static" and not 0 < value < 1):
            limits = "between 0 and 1" if name == "mem_fraction_static" else "0 or more"
            raise CanopyError(f"server: {name} must be a number {limits}, got {value!r:.60}")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """SGLang settings; ``None`` if not set. Raises ``CanopyError`` naming the invalid setting."""

    page_size: int | None = None
    """Tokens per page."""
    max_total_tokens: int | None = None
    """KV pool of the device, in tokens."""
    mem_fraction_static: float | None = None
    """Share of the GPU's memory for weights and KV."""
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    schedule_policy: str | None = None
    schedule_conservativeness: float | None = None
    enable_hierarchical_cache: bool | None = None
    hicache_write_policy: str | None = None
    hicache_storage_backend: str | None = None
    """``canopy``, a disk per server, or ``mooncake``, one shared store."""
    hicache_storage_prefetch_policy: str | None = None
    prefetch_threshold: int | None = None
    """Fewer stored tokens than this are not prefetched."""
    prefetch_timeout_base: float | None = None
    """Seconds, plus ``prefetch_timeout_per_ki_token`` per 1,024 tokens."""
    prefetch_timeout_per_ki_token: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                _check_setting(field.name, str(field.type), value)

    def fill_from(self, fallback: ServerSettings) -> ServerSettings:
        """Return these settings, with values of ``fallback`` for unset fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        unset = [name for name, value in values.items() if value is None]
        return ServerSettings(**values | {name: getattr(fallback, name) for name in unset})

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def flags(self) -> dict[str, Any]:
        """Return SGLang's arguments by flag without its dashes, but the storage's own."""
        values = self.to_json().items()
        return {
            name.replace("_", "-"): value for name, value in values if name not in _STORAGE_KEYS
        }

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> ServerSettings:
        """Return the settings among flags and the storage's own. Raises ``CanopyError``."""
        values = {**flags, **flags.get("hicache-storage-backend-extra-config", {})}
        by_name = {name.replace("-", "_"): value for name, value in values.items()}
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in by_name.items() if name in known})

    def extra_config(self) -> dict[str, Any]:
        """Return the settings in ``--hicache-storage-backend-extra-config``."""
        return {name: value for name, value in self.to_json().items() if name in _STORAGE_KEYS}


SGLANG_DEFAULTS = ServerSettings(
    page_size=1,
    chunked_prefill_size=8192,
    max_prefill_tokens=16384,
    max_running_requests=MIN_RUNNING_REQUESTS,
    schedule_policy="fcfs",
    schedule_conservativeness=1.0,
    hicache_write_policy="write_through",
    hicache_storage_prefetch_policy="timeout",
    prefetch_threshold=256,
    prefetch_timeout_base=1.0,
    prefetch_timeout_per_ki_token=0.25,
)
"""Defaults of SGLang 0.5.23 on a GPU of 60 to 160 GiB. The pool's size and the share of memory
depend on the model; some attention backends raise the page size."""


def default_chunk_tokens(gpu_memory_gib: float) -> int:
    """Return SGLang's default ``--chunked-prefill-size``, in tokens."""
    return next(tokens for limit_gib, tokens in _CHUNK_TOKENS_BY_GIB if gpu_memory_gib < limit_gib)
