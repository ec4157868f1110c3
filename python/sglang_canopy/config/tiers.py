"""Settings of the live tree and of the tiers below the device, and their validation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_canopy import declared
from sglang_canopy.declared import declare, declare_key, json_object, keyed, option_of, split_keys
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.keep import KEPT_SHARE, TENANT_KEPT_SHARE
from sglang_canopy.policy.registry import check_served, make_policy, parse_config
from sglang_canopy.ttl.table import SERVER_HASH, TTLTable

MAX_QUOTA_TENANTS = 4096
DISK_FLAG = "--canopy-disk"
DRAIN_S = 25.0
"""Default of ``--canopy-drain-s``: Kubernetes kills a container 30 s after SIGTERM."""
OTHER_TENANTS = "*"
"""Quota key for all tenants without an entry."""


@dataclass(frozen=True, slots=True)
class TreeSettings(declared.Checked):
    """Keys of ``--radix-eviction-policy-config`` that every Canopy policy accepts."""

    quantum_tokens: int = declare_key(
        64,
        "An eviction cuts at least this many tokens from a leaf's tail. More means fewer, larger "
        "cuts (less work per token); with one page, no more is evicted than needed.",
        low=1,
    )
    whole_nodes: bool = declare_key(
        False,
        "Evict whole nodes, as SGLang's own policies do, instead of only as much as is needed.",
    )
    block_tokens: int = declare_key(64, "Granularity, in tokens, at which reuse is learnt.", low=1)
    keep_tenant_share: float = declare_key(
        TENANT_KEPT_SHARE,
        "Share of the device's KV that requests of one tenant may keep with ``canopy_keep_s``.",
        low=0,
        high=1,
    )
    keep_total_share: float = declare_key(
        KEPT_SHARE, "Share of the device's KV that all tenants together may keep.", low=0, high=1
    )


TREE_KEYS = tuple(field.name for field in dataclasses.fields(TreeSettings))


def split_config(
    policy: str, config: Mapping[str, Any] | None
) -> tuple[TreeSettings, dict[str, Any]]:
    """Split a user's JSON object into the tree's settings and the policy's options. Raises ``CanopyError``
    for a tree key of the wrong type. The policy's own keys are checked when the policy is created."""
    values = config or {}
    if not isinstance(values, Mapping):
        raise CanopyError(
            f"--radix-eviction-policy-config must be a JSON object, got {values!r}; "
            "for example: '{\"quantum_tokens\": 64}'"
        )
    policy_options = dict(values)
    tree_options = {key: policy_options.pop(key) for key in TREE_KEYS if key in values}
    return parse_config(policy, TreeSettings, tree_options), policy_options


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy for one tier: name and options."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Options of the tiers below the device, made by ``tier_options``. Every rank receives the same
    object, so that all ranks agree."""

    host: PolicyChoice | None = None
    """``None``: the device's policy, with its learnt state."""
    disk: PolicyChoice | None = None
    """``None``: a new policy with the device's name and options."""
    ttl: TTLTable | None = None
    host_ttl: TTLTable | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Bytes on disk per tenant (name or hash); ``"*"`` for all other tenants."""
    host_bytes: int | None = None
    drain_s: float = DRAIN_S
    """Seconds from SIGTERM to the end of the drain to disk; 0: no drain."""


def _parse_policy(text: str) -> PolicyChoice:
    """Parse a policy's name with its options: ``wa``, ``wa,min_samples=30``, or a JSON object."""
    if text.lstrip().startswith("{"):
        values = json_object(text)
    else:
        words, keys = split_keys(text)
        values = {"policy": ",".join(words), **keys}
    name = values.pop("policy", "")
    if not isinstance(name, str) or not name:
        raise CanopyError(f"must name a policy, such as wa or wa,min_samples=30; got {text:.60}")
    return PolicyChoice(name, values)


def _parse_ttl_table(text: str) -> TTLTable:
    """Parse a TTL table. Raises ``CanopyError`` for roots that no server computes."""
    table = TTLTable.from_json(json_object(text))
    if table.groups and table.hash != SERVER_HASH:
        raise CanopyError(
            f"has roots that are block ids of a trace (hash {table.hash!r}), which a server does not "
            "know; make the plan from the server's own request log (--format sglang), or drop 'groups' "
            "and give 'categories'"
        )
    return table


def _parse_quotas(text: str) -> Mapping[str, float]:
    """Parse GB by tenant, from a number or a JSON object."""
    try:
        return {OTHER_TENANTS: float(text)}
    except ValueError:
        return json_object(text)


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Keys of ``--canopy-disk``."""

    tenant_quota_gb: Mapping[str, float] | None = declare_key(
        None,
        "GB on disk that one tenant may hold: a number for every tenant, or an object such as "
        '{"tenant-a": 20, "*": 5}, in which * stands for all other tenants.',
        parse=_parse_quotas,
        shown_default="none",
    )

    def __post_init__(self) -> None:
        declared.check(self)
        quotas = self.tenant_quota_gb or {}
        if len(quotas) > MAX_QUOTA_TENANTS:
            raise CanopyError(
                f"tenant_quota_gb must name at most {MAX_QUOTA_TENANTS} tenants, got {len(quotas)}"
            )
        for tenant, quota_gb in quotas.items():
            is_number = isinstance(quota_gb, (int, float)) and not isinstance(quota_gb, bool)
            if not is_number or not math.isfinite(quota_gb) or not 0 <= quota_gb <= 1e9:
                raise CanopyError(
                    f"tenant_quota_gb: tenant {tenant!r:.60} must have a number of GB, 0 or more, "
                    f"got {quota_gb!r:.60}"
                )

    @property
    def quota_bytes(self) -> dict[str, int]:
        quotas_gb = self.tenant_quota_gb or {}
        return {tenant: int(quota_gb * 1e9) for tenant, quota_gb in quotas_gb.items()}


@dataclass(frozen=True, slots=True)
class TierFlags(declared.Checked):
    """Flags of the tiers below the device; ``None`` if not typed."""

    host_eviction: PolicyChoice | None = declare(
        None,
        "--canopy-host-eviction",
        "Eviction policy in host memory, with its options.",
        metavar="NAME[,KEY=VALUE...]",
        parse=_parse_policy,
        shown_default="the device's policy, with its learnt state",
    )
    disk_eviction: PolicyChoice | None = declare(
        None,
        "--canopy-disk-eviction",
        "Eviction policy on disk, with --hicache-storage-backend canopy.",
        metavar="NAME[,KEY=VALUE...]",
        parse=_parse_policy,
        shown_default="the device's policy and its options",
    )
    ttl: TTLTable | None = declare(
        None,
        "--canopy-ttl",
        "TTLs on disk, by category and by prefix group, as 'canopy plan' writes them.",
        metavar="JSON",
        parse=_parse_ttl_table,
    )
    host_ttl: TTLTable | None = declare(
        None,
        "--canopy-host-ttl",
        "The same in host memory.",
        metavar="JSON",
        parse=_parse_ttl_table,
    )
    host_gb: float | None = declare(
        None,
        "--canopy-host-gb",
        "Size of the host pool, where --hicache-size takes whole gigabytes only.",
        low=0,
        hidden=True,
    )
    disk: DiskOptions | None = declare(
        None,
        DISK_FLAG,
        "Options of the disk tier, with --hicache-storage-backend canopy.",
        metavar="KEY=VALUE,...",
        parse=keyed(DiskOptions, head="tenant_quota_gb"),
        hidden=True,
    )
    drain_s: float | None = declare(
        None,
        "--canopy-drain-s",
        "After SIGTERM, write KV that only memory holds to the disk tier, until this many seconds "
        "after the signal; 0 writes nothing.",
        low=0,
        high=3600,
        shown_default=f"{DRAIN_S:g}",
        hidden=True,
    )


def tier_options(flags: TierFlags, block_tokens: int = 64) -> TierOptions:
    """Check the options of the tiers. ``block_tokens``: the server's. Raises ``CanopyError`` naming the
    option."""
    for name in ("ttl", "host_ttl"):
        table = getattr(flags, name)
        if table is not None and table.groups and table.block_tokens != block_tokens:
            raise CanopyError(
                f"{option_of(TierFlags, name).flag}: the groups are of blocks of {table.block_tokens} "
                f"tokens, this server's have {block_tokens}; give "
                f"--radix-eviction-policy-config '{{\"block_tokens\": {table.block_tokens}}}', or "
                "make the plan again"
            )
    disk = flags.disk or DiskOptions()
    return TierOptions(
        host=_checked_choice("host", flags),
        disk=_checked_choice("disk", flags),
        ttl=flags.ttl,
        host_ttl=flags.host_ttl,
        quotas=disk.quota_bytes,
        host_bytes=None if flags.host_gb is None else round(flags.host_gb * 1e9),
        drain_s=DRAIN_S if flags.drain_s is None else flags.drain_s,
    )


def _checked_choice(tier: str, flags: TierFlags) -> PolicyChoice | None:
    flag = option_of(TierFlags, f"{tier}_eviction").flag
    typed_choice: PolicyChoice | None = getattr(flags, f"{tier}_eviction")
    return None if typed_choice is None else _check_choice(str(flag), typed_choice)


def _check_choice(flag: str, choice: PolicyChoice) -> PolicyChoice:
    try:
        check_served(choice.name)
        policy = make_policy(choice.name, choice.config)
    except CanopyError as error:
        raise CanopyError(f"{flag}: {error}") from None
    if getattr(policy.config, "caching", None) == "optional":
        raise CanopyError(f"{flag}: key 'caching' must be 'forced' on a server")
    return choice
