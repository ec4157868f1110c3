"""Series of tenants at a limit, and of hints that are not acted on: counted by hand."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from sglang_canopy.disk.store_counters import FAULTS
from sglang_canopy.records import GATEWAY
from sglang_canopy.reuse.hint_trust import HintRecords, sender_of
from sglang_canopy.reuse.learner import ReuseModel
from sglang_canopy.reuse.shadow import Tip
from sglang_canopy.telemetry.metrics import Metrics
from sglang_canopy.telemetry.reporter import Reporter
from support.disk_tree import DiskTree
from support.live_tree import LiveTree


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def sample_value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"canopy:{name}", {"dp_rank": "0", **labels})


def record_over_hints(
    records: HintRecords, tenant: str, true_ends: int, false_ends: int, sender: object = None
) -> None:
    """Hint that conversations end, of which ``false_ends`` continue, as do as many without hints."""
    hint_count = true_ends + false_ends
    root = ReuseModel().categories.get("*")
    for number in range(2 * hint_count):
        tip = Tip(float(number), root, tenant)
        tip.sender = tenant if sender is None else sender
        records.count_tip(tip, over=number < hint_count)
        if number >= true_ends:
            records.judge_hints(tip, number + 1.0)


def test_tenants_with_true_and_with_false_hints_are_counted_apart() -> None:
    records = HintRecords()
    record_over_hints(records, "right", 400, 2)
    record_over_hints(records, "wrong", 0, 400)
    record_over_hints(records, "behind a gateway", 400, 2, sender_of("behind a gateway", GATEWAY))
    assert records.applied_hints() == {
        ("over", "client", True): 1,
        ("over", "client", False): 1,
        ("over", "gateway", True): 1,
    }


def test_hints_that_are_not_acted_on_have_a_series(registry) -> None:
    tree = LiveTree(200, "wa")
    reporter = Reporter(tree.cache, 0, Metrics(0, registry=registry))
    hints = tree.core.live.device_policy.model.hints
    reporter.report()
    over_by_client = {"hint": "over", "source": "client"}
    assert sample_value(registry, "hint_tenants", **over_by_client, applied="no") == 0
    record_over_hints(hints, "wrong", 0, 40)
    reporter.report()
    assert sample_value(registry, "hint_tenants", **over_by_client, applied="no") == 1
    hints._records.clear()
    reporter.report()
    assert sample_value(registry, "hint_tenants", **over_by_client, applied="no") == 0


def test_a_policy_that_learns_nothing_has_no_series_of_hints(registry) -> None:
    tree = LiveTree(200, "canopy-lru")
    Reporter(tree.cache, 0, Metrics(0, registry=registry)).report()
    labels = {"hint": "over", "source": "client", "applied": "no"}
    assert sample_value(registry, "hint_tenants", **labels) is None


def test_a_tenant_with_a_full_keep_budget_is_at_its_limit(registry) -> None:
    tree = LiveTree(200, "wa")
    reporter = Reporter(tree.cache, 0, Metrics(0, registry=registry))
    limit_tokens = tree.core.protected.keeps.budget.tenant_limit_tokens
    tree.serve(list(range(limit_tokens)), 1.0, tenant="a", keep_until=60.0)
    reporter.report()
    assert sample_value(registry, "tenants_at_limit", limit="keep") == 1
    assert sample_value(registry, "limit_refusals_total", limit="keep") == 0
    tree.serve(list(range(100, 105)), 2.0, tenant="a", keep_until=60.0)
    reporter.report()
    assert sample_value(registry, "limit_refusals_total", limit="keep") == 1
    tree.serve(list(range(150, 155)), 70.0, tenant="b", keep_until=80.0)
    reporter.report()
    assert sample_value(registry, "tenants_at_limit", limit="keep") == 0


def test_a_tenant_at_its_quota_on_disk_is_counted_and_not_named(registry, tmp_path: Path) -> None:
    quota_pages = 5
    probe = DiskTree(tmp_path / "probe")
    probe.serve([1, 2], 1.0)
    probe.settle()
    page_bytes = probe.store.state.units.used_units * probe.store.content.page_bytes
    probe.close()
    quotas = {"quota_bytes": {"a": quota_pages * page_bytes}}
    tree = DiskTree(tmp_path / "disk", tokens=64, disk=quotas)
    reporter = Reporter(tree.cache, 0, Metrics(0, registry=registry))
    tree.serve(list(range(4)), 1.0, tenant="a")
    tree.settle()
    reporter.report()
    assert sample_value(registry, "tenants_at_limit", limit="quota") == 0
    tree.serve(list(range(100, 100 + 2 * quota_pages)), 2.0, tenant="a")
    tree.serve(list(range(200, 200 + 4 * quota_pages)), 3.0, tenant="b")
    tree.settle()
    reporter.report()
    assert sample_value(registry, "tenants_at_limit", limit="quota") == 1
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert not any("tenant" in sample.labels for sample in samples)
    tree.close()


def test_counters_of_the_alerts_are_exported_before_they_count(registry, tmp_path) -> None:
    tree = DiskTree(tmp_path / "disk")
    Reporter(tree.cache, 0, Metrics(0, registry=registry)).report()
    for kind in FAULTS:
        assert sample_value(registry, "disk_faults_total", kind=kind) == 0
    assert sample_value(registry, "rank_disagreements_total") == 0
    tree.close()
