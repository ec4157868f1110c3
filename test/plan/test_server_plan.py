"""The configuration that a server starts with, from the chosen one."""

import random
from dataclasses import replace

import pytest

from canopy_lab.plan.disk_class import GIB
from canopy_lab.plan.objective import PlanRow
from canopy_lab.plan.prices import load_prices
from canopy_lab.plan.server_plan import read_config, server_plan, write_config
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.system import Engine, system_of
from canopy_lab.plan.validation import system_config
from canopy_lab.plan.worker import PlanInputs
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system.engine_profile import load_profile
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.config.server_settings import SGLANG_DEFAULTS, ServerSettings
from sglang_canopy.config.tiers import PolicyChoice, TierFlags, tier_options
from sglang_canopy.declared import typed_values
from sglang_canopy.ttl.table import SERVER_HASH, TRACE_HASH, Group, TTLTable

PROFILE = load_profile("llama-3.1-8b-a100")


def plan_inputs(id_hash=TRACE_HASH):
    """Return inputs with two kinds of prompts: one repeats within seconds, the other after minutes."""
    rng, requests = random.Random(0), []
    for i in range(600):
        kind = 1 + i % 2
        path = (kind * 10**6, kind * 10**6 + 1 + rng.randrange(4 if kind == 1 else 40))
        requests.append(TraceRequest(i * 1.0, 128, 4, path, 64, category=f"k{kind}"))
    prices = load_prices("aws-us-east-1")
    return PlanInputs(CompactTrace(requests), Engine(PROFILE, 4096), prices, {}, id_hash)


WITH_DISK = Configuration(instances=2, dram_gib=1.5, disk="gp3", disk_gib=2.0, policy="wa")


def plan_row(configuration):
    return PlanRow(configuration, {})


def plan_of(configuration, inputs=None, **notes):
    return server_plan(plan_row(configuration), inputs or plan_inputs(), notes, "/kv")


def test_sizes_policies_and_a_fixed_ttl_reach_the_file(tmp_path):
    config, notes = plan_of(replace(WITH_DISK, ttl=600.0), trace="t")
    write_config(tmp_path / "plan.yaml", config, {"made by": "a test", **notes})
    assert read_config(tmp_path / "plan.yaml") == config
    assert "# instances: 2\n" in (tmp_path / "plan.yaml").read_text()
    assert config["canopy-host-gb"] == round(1.5 * GIB) / 1e9
    disk_config = config["hicache-storage-backend-extra-config"]
    assert (disk_config["capacity_bytes"], disk_config["path"]) == (2 * 2**30, "/kv")
    for flag in ("radix-eviction", "canopy-host-eviction", "canopy-disk-eviction"):
        assert config[flag] == "wa"
    assert TTLTable.from_json(config["canopy-ttl"]).residual_ttl_s == 600


def test_sglang_reads_the_file_with_canopys_flags(tmp_path):
    """Its own merger makes arguments that its parser accepts."""
    pytest.importorskip("sglang")
    from sglang_canopy.doctor import command_line

    inputs = group_inputs(SERVER_HASH)
    inputs.policy_configs = {"wa": {"min_samples": 9}}
    config, notes = plan_of(replace(WITH_DISK, ttl="group", disk_gib=8.0), inputs)
    path = tmp_path / "plan.yaml"
    write_config(path, config, notes)
    args = command_line.parse_options(["--model-path", "/none", "--config", str(path)])
    assert args.page_size == config["page-size"]
    assert args.radix_eviction_policy == "wa"
    tiers = tier_options(TierFlags(**typed_values(TierFlags, args)))
    assert tiers.host == PolicyChoice("wa", {"min_samples": 9})
    assert tiers.ttl == inputs.group_table(16.0)
    assert tiers.host_bytes == round(1.5 * GIB)
    assert not command_line.refusal_findings(args)


def test_without_a_disk_no_disk_is_mentioned():
    config, _ = plan_of(Configuration(dram_gib=1.0))
    assert config["enable-hierarchical-cache"]
    assert not [name for name in config if "storage" in name or "disk" in name or "ttl" in name]
    bare, _ = plan_of(Configuration())
    assert not [name for name in bare if "hicache" in name or "hier" in name or "host" in name]


def test_every_setting_that_was_simulated_is_in_the_file():
    policies = {"prefetch_policy": "wait_complete", "write_policy": "write_back"}
    planned = replace(WITH_DISK, page_size=64, **policies)
    inputs = plan_inputs()
    config = ServerSettings(max_running_requests=32, mem_fraction_static=0.8)
    inputs.engine = replace(inputs.engine, settings=config)
    config = ServerSettings.from_flags(plan_of(planned, inputs)[0])
    assert config.fill_from(SGLANG_DEFAULTS) == config, "nothing is left to a default"
    simulated = system_of(planned, inputs.engine, inputs.prices, {})
    assert (config.page_size, config.hicache_storage_prefetch_policy) == (64, "wait_complete")
    assert config.hicache_write_policy == simulated.write_policy == "write_back"
    assert config.max_running_requests == simulated.max_running == 32
    assert config.max_total_tokens == simulated.device_tokens == 4096
    assert config.chunked_prefill_size == simulated.chunked_prefill_tokens
    assert config.max_prefill_tokens == simulated.max_prefill_tokens
    assert config.prefetch_threshold == simulated.prefetch_threshold_tokens
    assert config.mem_fraction_static == 0.8
    assert (config.enable_hierarchical_cache, config.hicache_storage_backend) == (True, "canopy")


def test_an_assumed_pool_size_is_not_set():
    inputs = plan_inputs()
    inputs.engine = replace(inputs.engine, is_pool_known=False)
    config, notes = plan_of(WITH_DISK, inputs)
    assert "max-total-tokens" not in config
    assert notes["device_tokens"].startswith("4096 assumed")


def test_instances_get_equal_parts_of_a_shared_store():
    inputs = plan_inputs()
    shared_disk = replace(inputs.prices.disk("efs"), shared=True, billing="provisioned")
    inputs.prices = replace(inputs.prices, disks={"store": shared_disk})
    config, _ = plan_of(replace(WITH_DISK, disk="store", disk_gib=8.0), inputs)
    assert config["hicache-storage-backend-extra-config"]["global_segment_size"] == 4 * 2**30
    assert config["hicache-storage-backend"] == "mooncake"
    assert "canopy-disk-eviction" not in config


def group_inputs(id_hash):
    """Return inputs with a table whose groups do not depend on a window's confidence."""
    inputs = plan_inputs(id_hash)
    # The key is the GiB that the TTLs may use, here two disks of 8 GiB, and the load.
    groups = (Group(17, 60.0), Group(99, 5.0))
    inputs._tables[16.0, 1.0] = TTLTable(groups, 300.0, 64, id_hash, {"k1": 45.0})
    return inputs


def test_groups_of_another_trace_are_omitted_with_a_note():
    config, notes = plan_of(replace(WITH_DISK, ttl="group", disk_gib=8.0), group_inputs(TRACE_HASH))
    # Categories carry over from any trace.
    assert TTLTable.from_json(config["canopy-ttl"]) == TTLTable((), 300.0, categories={"k1": 45.0})
    assert "2 groups of this trace left out" in notes["group_ttls"]


def test_a_group_present_from_the_beginning_gets_its_own_ttl_in_the_traces_ids():
    table = plan_inputs().group_table(24 * 64 * PROFILE.kv_bytes_per_token / GIB)
    assert (table.hash, table.block_tokens) == (TRACE_HASH, 64)
    ttls = {group.root: group.ttl_s for group in table.groups}
    assert 0 < ttls[1_000_000] < 120  # the kind that repeats within seconds


def test_auto_is_planned_as_it_is_served():
    inputs = plan_inputs()
    inputs.engine = replace(inputs.engine, is_auto=True)
    configuration = Configuration(policy="wa")
    plan, _ = server_plan(plan_row(configuration), inputs, {})
    assert plan["radix-eviction"] == "auto"
    assert plan["schedule-policy"] == "fcfs"  # so that auto orders the queue
    simulated = system_of(configuration, inputs.engine, inputs.prices, {})
    from_plan = system_config(plan, PROFILE, device_tokens=4096)
    for system in (simulated, from_plan):
        assert (system.device_policy, system.schedule_policy) == ("wa", "bounded-shortest")
    with_lpm = replace(configuration, schedule_policy="lpm")
    assert system_of(with_lpm, inputs.engine, inputs.prices, {}).schedule_policy == "lpm"
