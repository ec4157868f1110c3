"""A plan simulates a server with its settings, its own disk and its TTLs."""

from dataclasses import replace

import pytest

from canopy_lab.group_ttl.paths import paths_of
from canopy_lab.plan.choice import label_of
from canopy_lab.plan.disk_class import GIB, DiskClass, PriceSteps
from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.prices import load_prices
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.system import Engine, row_of, system_of
from canopy_lab.plan.worker import PlanInputs
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system import simulate_system
from canopy_lab.sim.system.config import SystemConfig, TierSpec
from canopy_lab.sim.system.engine_profile import load_profile
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.config.server_settings import ServerSettings
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import TRACE_HASH, TTLTable

BLOCK_TOKENS = 256
PROFILE = load_profile("llama-3.1-8b-a100")
BLOCK_BYTES = BLOCK_TOKENS * PROFILE.kv_bytes_per_token


def disk_class(**fields):
    flat_price = PriceSteps(((float("inf"), 0.1),))
    return DiskClass(**{"name": "d", "per_gib_month": flat_price, "base_mib_s": 1000.0, **fields})


def plan_inputs(trace, *classes, **engine):
    prices = replace(load_prices("local-nvme"), disks={each.name: each for each in classes})
    return PlanInputs(CompactTrace(trace), Engine(PROFILE, 40 * BLOCK_TOKENS, **engine), prices)


def prompt(prompt_number, time_s, blocks=16, category="default", first_id=0):
    ids = tuple(1000 * (first_id or prompt_number) + block for block in range(blocks))
    return TraceRequest(time_s, blocks * BLOCK_TOKENS, 4, ids, BLOCK_TOKENS, category=category)


def test_settings_are_sglangs_defaults_unless_planned():
    inputs = plan_inputs([prompt(1, 0.0)], disk_class())
    planned = Configuration(dram_gib=1.0, disk="d", disk_gib=4.0)
    system = system_of(planned, inputs.engine, inputs.prices, {})
    assert (system.prefetch_policy, system.page_tokens) == ("timeout", 1)
    assert (system.max_running, system.max_prefill_tokens) == (2048, 16384)
    engine = replace(inputs.engine, settings=ServerSettings(prefetch_threshold=16))
    changed = replace(planned, page_size=64, prefetch_policy="wait_complete", schedule_policy="lpm")
    system = system_of(changed, engine, inputs.prices, {})
    assert (system.prefetch_policy, system.page_tokens) == ("wait_complete", 64)
    assert (system.prefetch_threshold_tokens, system.schedule_policy) == (64, "lpm")
    with pytest.raises(CanopyError, match="must be a multiple of page_size 48"):
        system_of(replace(planned, page_size=48), engine, inputs.prices, {})


def test_a_prefetch_policy_changes_a_plans_disk_hits():
    """Long prompts that return after the device and the host evicted them."""
    requests = [prompt(i % 12, 3.0 * i, blocks=32) for i in range(48)]
    inputs = plan_inputs(requests, disk_class(base_mib_s=700.0))
    sizes = {"dram_gib": 48 * BLOCK_BYTES / GIB, "disk": "d", "disk_gib": 600 * BLOCK_BYTES / GIB}
    policies = ("best_effort", "timeout", "wait_complete")
    with Evaluator(inputs) as evaluate:
        rows = evaluate([Configuration(**sizes, prefetch_policy=policy) for policy in policies])
        (as_planned,) = evaluate([Configuration(**sizes)])
    hits = {policy: row["token_hit_ratio_by_tier"]["disk"] for policy, row in zip(policies, rows)}
    assert hits["best_effort"] < hits["timeout"] <= hits["wait_complete"]
    assert as_planned["token_hit_ratio_by_tier"]["disk"] == hits["timeout"]


def test_instances_share_no_disk_unless_it_is_sold_as_one():
    """Two instances in turn; each conversation returns to the other instance."""
    requests = [prompt(i // 2, 8.0 * i, blocks=32) for i in range(16)]
    separate, shared = disk_class(), disk_class(name="s", shared=True)
    inputs = plan_inputs(requests, separate, shared, routing="round-robin")
    dram_gib, disk_gib = 48 * BLOCK_BYTES / GIB, 600 * BLOCK_BYTES / GIB
    configuration = Configuration(2, dram_gib, "d", disk_gib, prefetch_policy="wait_complete")
    with Evaluator(inputs) as evaluate:
        separate_row, shared_row = evaluate([configuration, replace(configuration, disk="s")])
    assert separate_row["token_hit_ratio_by_tier"]["disk"] == 0
    assert shared_row["token_hit_ratio_by_tier"]["disk"] > 0.1
    disk_price = separate.price_per_hour(configuration.disk_gib)
    assert separate_row["cost_per_hour"] - shared_row["cost_per_hour"] == pytest.approx(disk_price)


def test_billing_by_use_counts_stored_and_transferred_bytes():
    by_use = disk_class(billing="used", read_per_gib=1.0, write_per_gib=2.0)
    prices = replace(load_prices("local-nvme"), disks={"d": by_use})
    chosen = Configuration(1, 1.0, "d", 100.0)
    metrics = {
        "mean_bytes_by_tier": {"disk": 10 * GIB}, "disk_read_bytes": 3 * GIB,
        "disk_written_bytes": 5 * GIB, "makespan_s": 7200.0,
    }  # fmt: skip
    base_cost = row_of(Configuration(1, 1.0), metrics, prices)["cost"]
    stored_usd = 2 * 10 * 0.1 / 730
    assert row_of(chosen, metrics, prices)["cost"] - base_cost == pytest.approx(stored_usd + 3 + 10)


def test_a_categorys_ttl_expires_its_pages():
    """Four categories return after 20 s; one has a shorter TTL."""
    requests = [
        prompt(10 * round_ + kind, 40.0 * round_ + 20.0 * visit + 2 * kind, 8, f"k{kind}")
        for round_ in range(6)
        for visit in range(2)
        for kind in range(4)
    ]
    host = TierSpec(8 * BLOCK_BYTES, 20e9, 20e9)
    table = TTLTable((), 3600.0, BLOCK_TOKENS, TRACE_HASH, {"k0": 5.0})
    hits = {}
    for name, ttl in (("none", None), ("k0 short", table)):
        disk = TierSpec(600 * BLOCK_BYTES, 5e9, 5e9, ttl=ttl)
        tiers = {"host": host, "disk": disk, "prefetch_policy": "wait_complete"}
        config = SystemConfig(device_tokens=12 * BLOCK_TOKENS, **tiers)
        cached = simulate_system(requests, config, PROFILE).cached_tokens
        hits[name] = [cached[kind::4].sum() for kind in range(4)]
    assert hits["none"][0] > 0
    assert hits["k0 short"][0] == 0
    assert hits["k0 short"][1:] == hits["none"][1:]


def test_group_ttls_are_learnt_from_every_request_of_a_long_trace():
    requests = [prompt(i, float(i), blocks=600) for i in range(2000)]  # 1.2 million blocks
    assert len(paths_of(requests)) == len(requests)


def test_a_row_has_the_outcome_of_its_group_ttls():
    requests = [prompt(i % 40, 2.0 * i, 4) for i in range(400)]
    inputs = plan_inputs(requests, disk_class())
    planned = Configuration(1, 8 * BLOCK_BYTES / GIB, "d", 1000 * BLOCK_BYTES / GIB, ttl="group")
    with Evaluator(inputs) as evaluate:
        (row,) = evaluate([planned])
    table = inputs.table_of(planned)
    assert row["ttl_table"]["groups"] == len(table.groups)

    def row_with(**changed):
        return replace(row, metrics={**row.metrics, "ttl_table": {**row["ttl_table"], **changed}})

    with_one_ttl = row_with(groups=0, categories=0, residual_ttl_s=812.0)
    assert label_of(with_one_ttl).endswith("one TTL of 812 s, which no groups beat")
    label = label_of(row_with(groups=3, categories=2, requests=100))
    assert "TTLs of 3 groups and 2 categories, learnt from the last 100 requests" in label


def test_a_disk_billed_by_use_with_group_ttls_has_capacity_for_peaks():
    by_use = disk_class(billing="used")
    inputs = plan_inputs([prompt(1, 0.0)], by_use, disk_class(name="fixed"))
    chosen = Configuration(1, 1.0, "d", 10.0, ttl="group")
    table = TTLTable()
    assert system_of(chosen, inputs.engine, inputs.prices, {}, table).disk.capacity_bytes > 10 * GIB
    for without_peaks in (replace(chosen, disk="fixed"), replace(chosen, ttl=60.0)):
        system = system_of(without_peaks, inputs.engine, inputs.prices, {}, table)
        assert system.disk.capacity_bytes == 10 * GIB
