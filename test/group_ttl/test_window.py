"""Groups and TTLs learnt from a window, and windows that are too small."""

import math
import random
import threading

import pytest

from canopy_lab.group_ttl.groups import GroupSelection, choose_groups
from canopy_lab.group_ttl.learn import FIXED, GROUPS, LearningOptions, learn
from canopy_lab.group_ttl.paths import MAX_CATEGORIES, Paths, segments_of
from canopy_lab.group_ttl.replay import fixed_ttls, simulate_ttl
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import RESIDUAL, SERVER_HASH
from support.ttl_cases import PathUse, paths_from_uses

QUICK_TENANT, SLOW_TENANT, SHARED_BLOCK = 100, 200, 1


def two_tenants(span_s: float, *, start_s: int = 0) -> list[PathUse]:
    """Requests of two tenants below a shared prompt: one returns every 2 s, one with more tokens every 45 s.
    Both have payloads that never repeat."""
    new_blocks = iter(range(10_000 + start_s, 10**9))
    times = [(time_s, QUICK_TENANT) for time_s in range(0, int(span_s), 2)]
    requests: list[PathUse] = []
    times += [(time_s + 0.5, SLOW_TENANT) for time_s in range(0, int(span_s), 45)]
    for time_s, tenant in sorted(times):
        prefix = range(tenant, tenant + (2 if tenant == QUICK_TENANT else 40))
        payload = [next(new_blocks) for _ in range(10 if tenant == QUICK_TENANT else 1)]
        path = (SHARED_BLOCK, *prefix, *payload)
        requests.append(PathUse(start_s + time_s, path, str(tenant)))
    return requests


def window_of(span_s: float = 3600.0) -> Paths:
    return paths_from_uses(two_tenants(span_s), 64)


def test_a_prefix_of_all_requests_is_no_group_and_tenants_are() -> None:
    log = window_of()
    budget_tokens = fixed_ttls(segments_of(log), [30.0])[0].mean_tokens
    groups = choose_groups(segments_of(log), budget_tokens, GroupSelection(8))
    assert SHARED_BLOCK not in groups.roots
    assert SLOW_TENANT in groups.roots


def test_a_table_of_one_hour_gains_in_the_next() -> None:
    learnt = learn(window_of(), None, LearningOptions(kinds=(GROUPS,), reference_ttl_s=30.0))
    assert learnt.kind == GROUPS
    assert learnt.gains[GROUPS] > 0
    group = learnt.table.group_of((SHARED_BLOCK, *range(SLOW_TENANT, SLOW_TENANT + 40)))
    quick_group = learnt.table.group_of((SHARED_BLOCK, QUICK_TENANT, QUICK_TENANT + 1))
    assert learnt.table.ttl_s(group) >= 45.0 > 30.0 > learnt.table.ttl_s(quick_group)
    log = paths_from_uses(two_tenants(3600.0, start_s=3600), 64)
    (fixed,) = fixed_ttls(segments_of(log), [30.0])
    result = simulate_ttl(log, [(0.0, learnt.table)])
    assert result.hit_ratio > fixed.hit_ratio + 0.05
    assert result.mean_tokens < fixed.mean_tokens * 1.1


def test_a_table_uses_server_ids_by_default() -> None:
    table = learn(paths_from_uses(two_tenants(600.0)), 1e6).table
    assert (table.hash, table.block_tokens) == (SERVER_HASH, 16)


def test_random_requests_teach_no_groups() -> None:
    rng = random.Random(0)
    log = paths_from_uses([(float(i), (rng.randrange(1, 200),), "a") for i in range(4000)], 64)
    learnt = learn(log, None, LearningOptions(kinds=(GROUPS,), reference_ttl_s=100.0))
    assert learnt.kind == FIXED
    assert learnt.table.groups == ()
    assert learnt.table.residual_ttl_s == 100.0


def test_without_a_span_of_time_everything_is_kept_and_an_empty_trace_is_refused() -> None:
    table = learn(paths_from_uses([(5.0, (1, 2), "a")]), 1e9).table
    assert table.group_of((1, 2)) == RESIDUAL
    assert table.residual_ttl_s == math.inf
    with pytest.raises(CanopyError, match="no requests"):
        paths_from_uses([])


def test_equal_windows_give_equal_tables_in_any_thread() -> None:
    snapshots = [window_of(1200.0), window_of(1200.0)]
    learning = LearningOptions(kinds=(GROUPS,))
    tables = [learn(snapshots[0], 1e4, learning)]
    worker = threading.Thread(target=lambda: tables.append(learn(snapshots[1], 1e4, learning)))
    worker.start()
    worker.join()
    assert tables[0] == tables[1]


def test_invented_categories_are_bounded() -> None:
    log = paths_from_uses([(float(i), (1,), f"name{i}") for i in range(1000)])
    assert len(log.categories) == MAX_CATEGORIES


def test_a_clock_that_runs_backwards_counts_as_now() -> None:
    log = paths_from_uses([(time_s, (1, 2), "a") for time_s in (50.0, 10.0, 60.0)])
    assert log.times_s.tolist() == [50.0, 50.0, 60.0]
