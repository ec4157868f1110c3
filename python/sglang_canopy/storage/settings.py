"""The options of ``--hicache-storage-backend canopy``, validated by name."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_canopy import declared
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import check_served, make_policy
from sglang_canopy.ttl.table import TTLTable

BACKEND = "canopy"
"""Value of ``--hicache-storage-backend`` for Canopy's disk tier."""

DYNAMIC_BACKEND = {
    "backend_name": BACKEND,
    "module_path": "sglang_canopy.storage.backend",
    "class_name": "CanopyStorage",
    "interface_v1": 1,
}
"""SGLang's dynamic backend entry: module and class to load."""

EXTRA_CONFIG_FLAG = "--hicache-storage-backend-extra-config"
DEFAULT_CAPACITY_GB = 10.0
_REMOVED_VARIABLES = {"CANOPY_DISK_PATH": "path", "CANOPY_DISK_CAPACITY_GB": "capacity_gb"}
"""Variables of earlier releases. A server that ignored them would leave its store unused."""

_SGLANG_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "file_storage_path",
        "tp_lcm_size",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
    }
)
"""Keys of the same object that belong to SGLang."""


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """Keys of the extra configuration. Raises ``CanopyError`` naming an invalid key."""

    path: str = ""
    """Folder reserved for the store. Default: ``~/.cache/sglang-canopy/disk``."""
    capacity_bytes: int = 0
    """Bytes on disk per rank; ``capacity_gb`` is the same limit in 10^9 bytes. Default: 10 GB."""
    policy: str = "canopy-lru"
    """Eviction policy: a Canopy name of ``--radix-eviction``. Not given: the device's, if Canopy's."""
    policy_config: Mapping[str, Any] = field(default_factory=dict)
    """Its options."""
    ttl: TTLTable = field(default_factory=TTLTable)
    """Seconds for every page, or a table (docs/reference/plan-file.md), as an object."""
    quota_bytes: Mapping[str, int] = field(default_factory=dict)
    """Byte limits by tenant (name or hash); ``"*"`` is any other tenant."""
    sweep_s: float = 1.0
    """Seconds between two rounds of the sweeper."""

    def __post_init__(self) -> None:
        _check("\0" not in self.path, "path", self.path, "a path")
        _check(_is_bytes(self.capacity_bytes, 1), "capacity_bytes", self.capacity_bytes, _BYTES)
        quotas = self.quota_bytes.items()
        are_quotas = all(isinstance(name, str) and _is_bytes(limit, 0) for name, limit in quotas)
        _check(are_quotas, "quota_bytes", self.quota_bytes, "an object of tenant: bytes")
        _check(0.01 <= self.sweep_s <= 3600, "sweep_s", self.sweep_s, "seconds from 0.01 to 3600")
        self.make_policy()

    def make_policy(self) -> Policy:
        """Return a new policy for the disk tier, which learns on the storage threads."""
        check_served(self.policy)
        return make_policy(self.policy, self.policy_config)

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any] | None) -> StorageSettings:
        """Return the settings of a server's extra configuration."""
        for variable, key in _REMOVED_VARIABLES.items():
            if variable in os.environ:
                raise CanopyError(
                    f"{variable} is no longer read: unset it, and give {key} in {EXTRA_CONFIG_FLAG}"
                )
        values = {k: v for k, v in (extra or {}).items() if k not in _SGLANG_KEYS}
        gigabytes = values.pop("capacity_gb", None)
        if gigabytes is not None and "capacity_bytes" in values:
            raise CanopyError(f"{EXTRA_CONFIG_FLAG}: give capacity_gb or capacity_bytes, not both")
        if "capacity_bytes" not in values:
            gigabytes = DEFAULT_CAPACITY_GB if gigabytes is None else gigabytes
            if not (_is_number(gigabytes) and 0 < gigabytes < 1e9):
                raise CanopyError(
                    f"{EXTRA_CONFIG_FLAG}: key 'capacity_gb' must be a number of gigabytes above 0 and below 1e9, "
                    f"got {gigabytes!r:.80}"
                )
            values["capacity_bytes"] = int(gigabytes * 1e9)
        values["path"] = values.get("path") or str(
            Path.home() / ".cache" / "sglang-canopy" / "disk"
        )
        values["ttl"] = _parse_ttl(values.get("ttl"))
        try:
            return declared.make(cls, values)  # type: ignore[no-any-return]
        except CanopyError as error:
            raise CanopyError(f"{EXTRA_CONFIG_FLAG}: {error}, capacity_gb (float)") from None


_BYTES = "a whole number of bytes"


def _parse_ttl(ttl: Any) -> TTLTable:
    if ttl is None:
        return TTLTable()
    if isinstance(ttl, TTLTable):
        return ttl
    try:
        if _is_number(ttl):
            return TTLTable(residual_ttl_s=float(ttl))
        return TTLTable.from_json(ttl)
    except CanopyError as error:
        raise CanopyError(f"{EXTRA_CONFIG_FLAG}: key 'ttl': {error}") from None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isnan(value)


def _is_bytes(value: Any, low: int) -> bool:
    return type(value) is int and low <= value < 1 << 60


def _check(is_valid: bool, key: str, value: Any, allowed: str) -> None:
    if not is_valid:
        raise CanopyError(f"key {key!r} must be {allowed}, got {value!r:.80}")
