"""The options of the tiers: flags, and the message for each mistake."""

import argparse
import json
from types import SimpleNamespace

import pytest

from sglang_canopy.config import tiers as tiers_module
from sglang_canopy.config.tiers import TierFlags, TierOptions
from sglang_canopy.declared import typed_values
from sglang_canopy.errors import CanopyError
from sglang_canopy.radix.live import make_policies
from sglang_canopy.server.start import flags as start_flags
from sglang_canopy.tenant import tenant_digest
from sglang_canopy.ttl.table import Group, TTLTable


def args_of(**fields):
    """Return the fields of ``ServerArgs`` that are read."""
    defaults = {
        "radix_eviction_policy": "wa",
        "radix_eviction_policy_config": None,
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "canopy",
        "hicache_storage_backend_extra_config": None,
        "hicache_size": 0,
        "hicache_ratio": None,
    }
    return SimpleNamespace(**{**defaults, **fields})


def flags_of(**flags):
    return SimpleNamespace(**flags)


def tier_options(flags: dict, **others) -> TierOptions:
    """Return the options for these parsed flags."""
    typed_flags = TierFlags(**typed_values(TierFlags, flags_of(**flags)))
    return tiers_module.tier_options(typed_flags, **others)


def test_without_options_the_host_shares_the_devices_model_and_the_disk_has_its_policy() -> None:
    server_args = args_of(radix_eviction_policy_config={"min_samples": 9, "quantum_tokens": 16})
    tiers = start_flags.resolve_tiers(server_args, flags_of(), is_canopy=True)
    policies = make_policies("wa", server_args.radix_eviction_policy_config, tiers)
    assert policies.host_policy.model is policies.device_policy.model  # type: ignore[attr-defined]
    disk_config = json.loads(server_args.hicache_storage_backend_extra_config)
    assert (disk_config["policy"], disk_config["policy_config"]) == ("wa", {"min_samples": 9})
    assert server_args.hicache_storage_backend == "dynamic"
    assert (disk_config["class_name"], disk_config["interface_v1"]) == ("CanopyStorage", 1)


def test_each_tier_takes_its_own_policy() -> None:
    server_args = args_of(radix_eviction_policy="canopy-lru")
    flags = flags_of(canopy_host_eviction="wa,min_samples=5", canopy_disk_eviction="etlru")
    tiers = start_flags.resolve_tiers(server_args, flags, is_canopy=True)
    policies = make_policies("canopy-lru", None, tiers)
    assert (policies.device_policy.name, policies.host_policy.name) == ("lru", "wa")
    assert policies.host_policy.config.min_samples == 5
    assert json.loads(server_args.hicache_storage_backend_extra_config)["policy"] == "etlru"


def test_a_quota_names_no_tenant_in_the_arguments_that_a_server_shows() -> None:
    server_args = args_of()
    flags = flags_of(canopy_disk='{"tenant_quota_gb": {"salt-of-acme": 2, "#ab12": 1, "*": 0.5}}')
    start_flags.resolve_tiers(server_args, flags, is_canopy=True)
    shown_config = server_args.hicache_storage_backend_extra_config
    assert "salt-of-acme" not in shown_config
    assert json.loads(shown_config)["quota_bytes"] == {
        tenant_digest("salt-of-acme"): 2 * 10**9,
        "#ab12": 10**9,
        "*": 5 * 10**8,
    }


def test_nodes_have_the_labels_of_the_policy_that_learns() -> None:
    policies = make_policies("canopy-lru", None, tier_options({"canopy_host_eviction": "wa"}))
    assert policies.learners[0] is policies.host_policy
    policies = make_policies("wa", None, tier_options({"canopy_host_eviction": "etlru"}))
    assert policies.learners[0] is policies.device_policy
    policies = make_policies("canopy-lru", None, tier_options({"canopy_disk_eviction": "wa"}))
    assert policies.learners[0].name == "wa"
    assert policies.does_disk_learn


def test_a_quota_is_for_every_tenant_or_for_named_ones() -> None:
    assert tier_options({"canopy_disk": "tenant_quota_gb=1.5"}).quotas == {"*": 1_500_000_000}
    quotas = tier_options({"canopy_disk": '{"tenant_quota_gb": {"a": 2, "*": 0.5}}'}).quotas
    assert quotas == {"a": 2_000_000_000, "*": 500_000_000}


def test_ttls_and_the_host_pools_size_reach_their_tiers() -> None:
    table = TTLTable((Group(0x1F, 60.0, "system prompt"),), residual_ttl_s=30.0)
    server_args = args_of()
    flags = flags_of(
        canopy_ttl=json.dumps(table.to_json()),
        canopy_host_ttl='{"residual_ttl_s": 10}',
        canopy_host_gb=1.5,
    )
    tiers = start_flags.resolve_tiers(server_args, flags, is_canopy=True)
    disk_config = json.loads(server_args.hicache_storage_backend_extra_config)
    assert TTLTable.from_json(disk_config["ttl"]) == table
    assert server_args.hicache_size == 1.5
    assert tiers.host_ttl == TTLTable(residual_ttl_s=10.0)
    server_args = args_of(hicache_size=3)
    start_flags.resolve_tiers(server_args, flags, is_canopy=True)
    assert server_args.hicache_size == 3


@pytest.mark.parametrize(("backend", "warned"), [("canopy", False), ("file", True), (None, True)])
def test_a_ttl_that_applies_to_no_tier_is_logged(caplog, backend, warned) -> None:
    flags = flags_of(canopy_ttl='{"residual_ttl_s": 10}')
    start_flags.resolve_tiers(args_of(hicache_storage_backend=backend), flags, is_canopy=True)
    assert ("--canopy-ttl acts on a tier that this server lacks" in caplog.text) == warned


def test_groups_of_other_blocks_than_the_servers_are_refused() -> None:
    table = TTLTable((Group(1, 60.0),), block_tokens=16)
    flags = {"canopy_ttl": json.dumps(table.to_json())}
    with pytest.raises(CanopyError, match="blocks of 16 tokens, this server's have 64"):
        tier_options(flags)
    assert tier_options(flags, block_tokens=16).ttl == table


def test_the_backend_is_one_of_the_choices() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hicache-storage-backend", choices=["file"])
    names = {name: action for action in parser._actions for name in action.option_strings}
    start_flags.add_flags(parser.add_argument_group("canopy"), names)
    flags = ["--hicache-storage-backend", "canopy", "--canopy-disk-eviction", "wa"]
    parsed = parser.parse_args(flags)
    assert (parsed.hicache_storage_backend, parsed.canopy_disk_eviction) == ("canopy", "wa")
