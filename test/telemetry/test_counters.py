"""Counts of the live tree: every token once, with the reason of its eviction."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from sglang_canopy.radix.counters import MAX_CATEGORIES, MAX_TENANT_ROWS, OTHER, Counters
from sglang_canopy.telemetry.metrics import Metrics
from sglang_canopy.telemetry.reporter import Reporter
from sglang_canopy.telemetry.status import StatusCollector
from sglang_canopy.telemetry.window import POINT_S, Window
from sglang_canopy.ttl.table import Group, TTLTable
from sglang_canopy.wire import status_file
from support.disk_tree import DiskTree
from support.live_tree import LiveTree, fake_req


def row_of(tree: LiveTree, category: str = "chat"):
    return tree.core.live.counters.category_counts(category)


def test_a_refined_label_counts_for_its_category() -> None:
    counters = Counters()
    counters.record_request("chat|end|turn1", 10, (4, 0, 0))
    counters.record_request("chat|tool", 10, (0, 5, 1))
    (row,) = counters.all_counts()
    assert row.category == "chat"
    assert (row.requests, row.prompt_tokens, row.missed_tokens) == (2, 20, 10)
    assert [tier.hit_tokens for tier in row.tiers] == [4, 5, 1]


def count_request(counters: Counters, name: str, tenant: str | None) -> str:
    counters.record_request(name, 10, (4, 0, 0), tenant)
    return counters.category_of(name)


def test_many_new_names_take_no_row_that_another_tenant_needs() -> None:
    counters = Counters()
    for number in range(10_000):
        count_request(counters, f"new-{number}", "inventive")
    for number in range(MAX_TENANT_ROWS - 1):
        assert count_request(counters, f"chat-{number}|end", "regular") == f"chat-{number}"
    assert counters.category_of("new-0|end") == "new-0"
    assert counters.category_of("new-9999") == OTHER
    assert sum(row.requests for row in counters.all_counts()) == 10_000 + MAX_TENANT_ROWS - 1


def test_rows_and_labels_are_bounded_for_any_names_and_tenants() -> None:
    counters = Counters()
    for number in range(10_000):
        count_request(counters, f"new-{number}", f"t{number}")
    rows = {row.category: row.requests for row in counters.all_counts()}
    assert len(rows) == MAX_CATEGORIES + 1
    assert rows[OTHER] == 10_000 - MAX_CATEGORIES
    assert len(counters._counts_by_label) == MAX_CATEGORIES


def test_a_finished_request_is_counted_once_by_tier() -> None:
    tree = LiveTree(256, "canopy-lru")
    req = fake_req(
        list(range(100)),
        [7, 8],
        {"category": "rag", "time": 3.0},
        cached_tokens=70,
        cached_tokens_device=40,
        cached_tokens_host=20,
        cached_tokens_storage=10,
    )
    tree.core.requests.register(req)
    tree.core.requests.report_end(req)
    tree.core.requests.report_end(req)
    row = row_of(tree, "rag")
    assert (row.requests, row.prompt_tokens, row.missed_tokens) == (1, 100, 30)
    assert [tier.hit_tokens for tier in row.tiers] == [40, 20, 10]


def test_history_has_a_point_every_five_seconds_and_a_last_minute() -> None:
    history = Window(POINT_S)
    for second in range(131):
        history.add(second, 0.0, {"prompts": 10 * second, "hits": {"device": 4 * second}})
    assert history.over_last(60.0) == {"time_unix_s": 0.0, "prompts": 600, "hits": {"device": 240}}
    assert len(history.points()) == 130 // POINT_S
    for point in history.points():
        assert (point["prompts"], point["hits"]) == (50, {"device": 20})
    for second in range(131, 200):
        history.add(second, 0.0, {"prompts": 1300, "hits": {"device": 520, "host": 0}})
    assert history.over_last(60.0)["prompts"] == history.points()[-1]["prompts"] == 0


def test_the_status_counts_held_tokens_by_category() -> None:
    tree = LiveTree(200, "canopy-lru", host_tokens=400)
    tree.serve([1, *range(50)], 1.0, category="chat")
    tree.serve([2, *range(60)], 2.0, category="agent")
    tree.core.groups.disk_table = TTLTable((Group(5, 30.0, "head"),))
    status = StatusCollector(tree.cache, 0).collect(0.0)
    held_tokens = {row["category"]: row["held_tokens"] for row in status["categories"]}
    assert held_tokens == {"chat": {"device": 51, "host": 51}, "agent": {"device": 61, "host": 61}}
    device = status["tiers"]["device"]
    assert device["used_bytes"] == 112 * status["kv_bytes_per_token"] == 112 * 32
    assert device["capacity_bytes"] == 200 * 32
    assert set(status["tiers"]) == {"device", "host"}
    assert status["policies"] == {"device": "canopy-lru", "host": "canopy-lru"}
    assert [(group["tier"], group["group"], group["ttl_s"]) for group in status["groups"]] == [
        ("disk", "0", 30.0),
        ("disk", "residual", None),
    ]


def test_every_key_of_a_replicas_status_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/http-routes.md").read_text("utf-8")
    status = StatusCollector(LiveTree(200, "canopy-lru").cache, 0).collect(0.0)
    assert [key for key in status if f"`{key}`" not in page] == []


def test_pages_on_disk_are_counted_by_category_tenant_and_group(tmp_path) -> None:
    tree = DiskTree(tmp_path / "disk", tokens=400, host_tokens=400)
    tree.serve([1, *range(49)], 1.0, category="chat", tenant="a")
    tree.serve([2, *range(29)], 2.0, category="agent", tenant="b")
    tree.settle()
    tree.core.groups.disk_table = TTLTable((Group(5, 30.0, "head"),))
    tree.core.groups.host_table = TTLTable((Group(5, 30.0, "head"),))
    status = StatusCollector(tree.cache, 0).collect(0.0)
    held_tokens = {row["category"]: row["held_tokens"] for row in status["categories"]}
    assert held_tokens["chat"] == {"device": 50, "host": 50, "disk": 50}
    assert held_tokens["agent"] == {"device": 30, "host": 30, "disk": 30}
    assert [row["disk"] for row in status["tenants"]] == [50, 30]
    tokens_of_group = {(row["tier"], row["group"]): row["held_tokens"] for row in status["groups"]}
    assert tokens_of_group["disk", "residual"] == {"device": 80, "host": 80, "disk": 80}
    assert tokens_of_group["disk", "0"] == {"device": 0, "host": 0, "disk": 0}
    assert tokens_of_group["host", "residual"] == {"device": 80, "host": 80}
    tree.store.clear()
    assert tree.store.count_pages() == {"categories": {}, "tenants": {}, "groups": {}}
    tree.close()


def test_a_killed_servers_status_folder_is_removed_by_the_next(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(status_file.FOLDER_VARIABLE, "")
    killed_server = subprocess.Popen([sys.executable, "-c", ""])
    killed_server.wait()
    names = [f"canopy-status-{killed_server.pid}-old", f"canopy-status-{os.getpid()}-old"]
    names += [f"canopy-status-{killed_server.pid}-fresh", "canopy-status-other"]
    for name in names:
        (tmp_path / name).mkdir()
        if not name.endswith("fresh"):
            os.utime(tmp_path / name, (1.0, 1.0))
    folder = status_file.make_folder()
    status_file.write_status(0, {"rank": 0})
    status_file.write_status(0, {"victims": 3}, "tp1")
    assert status_file.read_all() == [{"rank": 0, "peers": [{"peer": "tp1", "victims": 3}]}]
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:], Path(folder.name).name}
    folder.cleanup()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def series_values(registry):
    """Return a function: the metrics for Prometheus as (name, labels) -> value."""
    return lambda: {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


def test_series_follow_the_counters_and_never_count_twice(series_values, registry) -> None:
    tree = LiveTree(100, "canopy-lru", {"quantum_tokens": 1})
    reporter = Reporter(tree.cache, 0, Metrics(0, registry=registry))
    tree.serve([1, *range(70)], 1.0, category="chat")
    tree.serve([2, *range(70)], 5.0, category="agent")
    tree.core.live.counters.record_request("chat", 71, (0, 0, 0))
    for _ in range(3):
        reporter.report()
    rank = ("dp_rank", "0")
    series = series_values()
    chat, device = ("category", "chat"), ("tier", "device")
    assert series["canopy:requests_total", frozenset({rank, chat})] == 1
    assert series["canopy:miss_tokens_total", frozenset({rank, chat})] == 71
    evicted_labels = frozenset({rank, device, chat, ("reason", "capacity")})
    assert series["canopy:evicted_tokens_total", evicted_labels] == 42
    tree.core.live.counters.record_request("chat", 71, (70, 0, 0))
    reporter.report()
    assert series_values()["canopy:requests_total", frozenset({rank, chat})] == 2
    assert series_values()["canopy:hit_tokens_total", frozenset({rank, device, chat})] == 70


def test_a_removed_group_shows_no_old_ttl(series_values, registry) -> None:
    tree = LiveTree(50, "canopy-lru")
    reporter = Reporter(tree.cache, 0, Metrics(0, registry=registry))
    tree.core.groups.disk_table = TTLTable((Group(5, 30.0), Group(6, 60.0)))
    reporter.report()
    tree.core.groups.disk_table = TTLTable((Group(5, 40.0),), residual_ttl_s=9.0)
    reporter.report()
    ttl_of_group = {
        dict(labels)["group"]: value
        for (name, labels), value in series_values().items()
        if name == "canopy:group_ttl_seconds"
    }
    assert ttl_of_group["0"] == 40.0
    assert ttl_of_group["1"] != ttl_of_group["1"]  # NaN
    assert ttl_of_group["residual"] == 9.0
