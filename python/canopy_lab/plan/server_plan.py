"""The server's configuration that a plan makes, in the form of SGLang's ``--config``: YAML with flags as keys.

SGLang turns each key into the flag of that name, and a nested value into JSON. Flags on the command
line replace those of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from canopy_lab.plan.disk_class import GIB
from canopy_lab.plan.objective import PlanRow
from canopy_lab.plan.space import GROUP, Configuration
from canopy_lab.plan.worker import PlanInputs
from sglang_canopy.config.server_settings import ServerSettings
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import AUTO, live_name
from sglang_canopy.private_file import replace_file
from sglang_canopy.ttl.table import SERVER_HASH, TRACE_HASH, TTLTable

CONFIG_SUFFIXES = (".yaml", ".yml")
"""SGLang reads no other file."""

ServerFlags = Mapping[str, Any]
"""Value by flag without its dashes: ``{"page-size": 64}``."""


def write_config(path: Path, config: ServerFlags, origin: Mapping[str, Any]) -> None:
    """Write ``config`` atomically below ``origin`` as comments, mode 0600. Raises ``CanopyError``."""
    notes = [f"# {name}: {' '.join(str(value).split())}" for name, value in origin.items()]
    text = "\n".join([*notes, yaml.safe_dump(dict(config), sort_keys=False, width=100)])
    try:
        replace_file(path, text, durable=True)
    except OSError as error:
        raise CanopyError(f"cannot write {str(path)!r}: {error}") from None


def read_config(path: Path | str) -> dict[str, Any]:
    """Return a server's configuration, its keys spelt with dashes. Raises ``CanopyError``."""
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CanopyError(f"cannot read the configuration {str(path)!r}: {error}") from None
    if not isinstance(config, dict):
        raise CanopyError(f"{str(path)!r} is no configuration: it must have flags as keys")
    return {str(name).replace("_", "-"): value for name, value in config.items()}


_PEAK_MARGIN = 1.1
"""Size of a disk billed by use, relative to its simulated peak."""


def server_plan(
    row: PlanRow, inputs: PlanInputs, origin: Mapping[str, Any], disk_path: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration of one server, with all SGLang settings of its simulation, and notes.

    Group TTLs are written only if their roots are ids that a server makes, which needs the server's
    own log. Otherwise the table keeps its categories and its residual TTL, and a note says so.
    """
    point = row.configuration
    configs = inputs.policy_configs
    notes = {key: value for key, value in origin.items() if isinstance(value, (str, int, float))}
    notes["instances"] = point.instances
    notes["routing"] = inputs.engine.routing
    if not inputs.engine.is_pool_known:
        notes["device_tokens"] = (
            f"{inputs.engine.device_tokens} assumed, and not set: what the server finds may differ"
        )
    ttl_table = _ttl_table(point, inputs)
    if ttl_table is not None and ttl_table.groups and ttl_table.hash == TRACE_HASH:
        notes["group_ttls"] = (
            f"{len(ttl_table.groups)} groups of this trace left out: only a plan from the server's "
            "own log (--format sglang) has roots that a server knows"
        )
        ttl_table = replace(ttl_table, groups=())
    if ttl_table is not None:
        ttl_table = replace(ttl_table, hash=SERVER_HASH)
    is_shared = point.disk is not None and inputs.prices.disk(point.disk).shared
    if point.disk is not None:
        notes["disk_class"] = point.disk
        notes["disk"] = "one store for all" if is_shared else "a disk of each server"
        if point.disk_mib_s:
            notes["disk_mib_s"] = point.disk_mib_s
    has_host = point.dram_gib > 0
    has_private_disk = point.disk is not None and not is_shared
    policy, options = live_name(point.policy), dict(configs.get(point.policy, {}))
    policy_setting = {"policy": policy, **options} if options else policy
    settings = _settings_of(point, inputs, is_shared)
    storage_config = settings.extra_config()
    if has_private_disk:
        storage_config["capacity_bytes"] = _disk_bytes(point, row, inputs)
        storage_config |= {"path": disk_path} if disk_path else {}
    elif point.disk is not None:
        storage_config["global_segment_size"] = _disk_bytes(point, row, inputs)
    config = {
        "radix-eviction": AUTO if inputs.engine.is_auto else policy,
        "radix-eviction-policy-config": options,
        **settings.flags(),
        "canopy-host-gb": round(point.dram_gib * GIB) / 1e9 if has_host else None,
        "canopy-host-eviction": policy_setting if has_host else None,
        # A shared store does its own eviction.
        "canopy-disk-eviction": policy_setting if has_private_disk else None,
        "canopy-ttl": None if ttl_table is None else ttl_table.to_json(),
        "hicache-storage-backend-extra-config": storage_config if point.disk is not None else None,
    }
    return {name: value for name, value in config.items() if value not in (None, {})}, notes


def _ttl_table(point: Configuration, inputs: PlanInputs) -> TTLTable | None:
    """Return the TTLs of the configuration's disk; ``None`` without a disk or an expiry."""
    if point.disk is None or point.ttl is None:
        return None
    if point.ttl == GROUP:
        return inputs.table_of(point)
    return TTLTable(residual_ttl_s=float(point.ttl))


def _disk_bytes(point: Configuration, row: PlanRow, inputs: PlanInputs) -> int:
    """Return the bytes of one server: its disk, or its share of the common store."""
    assert point.disk is not None
    disk_class = inputs.prices.disk(point.disk)
    size_bytes = point.disk_gib * GIB
    if disk_class.billing == "used" and point.ttl == GROUP:
        peak_bytes = row["peak_bytes_by_tier"].get("disk", 0.0)
        disk_count = inputs.prices.disk_count(point.disk, point.instances)
        size_bytes = max(size_bytes, _PEAK_MARGIN * peak_bytes / disk_count)
    return round(math.ceil(size_bytes / point.instances) if disk_class.shared else size_bytes)


def _settings_of(point: Configuration, inputs: PlanInputs, is_shared: bool) -> ServerSettings:
    """Return the settings, without settings of absent tiers."""
    settings = inputs.engine.settings_of(point)
    if point.dram_gib <= 0:
        return replace(
            settings, hicache_write_policy=None, hicache_storage_prefetch_policy=None,
            prefetch_threshold=None, prefetch_timeout_base=None,
            prefetch_timeout_per_ki_token=None,
        )  # fmt: skip
    settings = replace(settings, enable_hierarchical_cache=True)
    if point.disk is None:
        return replace(
            settings, hicache_storage_prefetch_policy=None, prefetch_threshold=None,
            prefetch_timeout_base=None, prefetch_timeout_per_ki_token=None,
        )  # fmt: skip
    return replace(settings, hicache_storage_backend="mooncake" if is_shared else "canopy")
