"""Groups and TTLs learnt from a window, and windows that are too small."""

import math
import random
import threading

import pytest

from canopy_lab.group_ttl.groups import GroupSelection, choose_groups
from canopy_lab.group_ttl.learn import FIXED, GROUPS, Learning, in_hindsight, learn
from canopy_lab.group_ttl.path_log import MAX_CATEGORIES, PathLog, PathSnapshot
from canopy_lab.group_ttl.path_segments import segments_of
from canopy_lab.group_ttl.replay import fixed_ttls, simulate_ttl
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import RESIDUAL, SERVER_HASH

QUICK, SLOW, UNIVERSAL = 100, 200, 1


def two_tenants(window: PathLog, seconds: float, *, start: int = 0) -> None:
    """Two tenants below a shared prompt: one returns every 2 s, one with more tokens every 45 s. Both have payloads that never repeat."""
    fresh = iter(range(10_000 + start, 10**9))
    times = [(t, QUICK) for t in range(0, int(seconds), 2)]
    times += [(t + 0.5, SLOW) for t in range(0, int(seconds), 45)]
    for time_s, tenant in sorted(times):
        kept = range(tenant, tenant + (2 if tenant == QUICK else 40))
        new = [next(fresh) for _ in range(10 if tenant == QUICK else 1)]
        window.observe((UNIVERSAL, *kept, *new), start + time_s, category=str(tenant))


def seen(seconds: float = 3600.0) -> PathSnapshot:
    log = PathLog(block_tokens=64)
    two_tenants(log, seconds)
    return log.snapshot()


def test_a_prefix_of_all_requests_is_no_group_and_tenants_are() -> None:
    log = seen()
    budget = fixed_ttls(segments_of(log), [30.0])[0].mean_tokens
    found = choose_groups(segments_of(log), budget, GroupSelection(8))
    assert UNIVERSAL not in found.roots
    assert SLOW in found.roots


def test_the_slow_tenant_gets_the_long_ttl_and_the_disk_no_more_bytes() -> None:
    log = seen()
    fixed = fixed_ttls(segments_of(log), [30.0])[0]
    found = in_hindsight(log, fixed.mean_tokens, 8)
    group = found.table.group_of((UNIVERSAL, *range(SLOW, SLOW + 40)))
    quick = found.table.group_of((UNIVERSAL, QUICK, QUICK + 1))
    assert found.table.ttl_s(group) >= 45.0 > 30.0 > found.table.ttl_s(quick)
    won = simulate_ttl(log, [(0.0, found.table)])
    assert won.hits > fixed.hits
    assert won.mean_tokens <= fixed.mean_tokens * 1.01


def test_a_window_learns_the_same_for_the_next_hour() -> None:
    window = PathLog(window_s=3600.0)
    two_tenants(window, 3600.0)
    learnt = learn(window.snapshot(), None, Learning(kinds=(GROUPS,), like_ttl_s=30.0))
    assert learnt.kind == GROUPS
    assert learnt.gains[GROUPS] > 0
    after = PathLog(block_tokens=64)
    two_tenants(after, 3600.0, start=3600)
    log = after.snapshot()
    (fixed,) = fixed_ttls(segments_of(log), [30.0])
    won = simulate_ttl(log, [(0.0, learnt.table)])
    assert won.hit_ratio > fixed.hit_ratio + 0.05
    assert won.mean_tokens < fixed.mean_tokens * 1.1


def test_a_table_uses_server_ids_by_default() -> None:
    window = PathLog(block_tokens=16)
    two_tenants(window, 600.0)
    table = learn(window.snapshot(), 1e6).table
    assert (table.hash, table.block_tokens) == (SERVER_HASH, 16)


def test_noise_is_not_believed() -> None:
    draw = random.Random(0)
    log = PathLog(block_tokens=64)
    for i in range(4000):
        log.observe((draw.randrange(1, 200),), float(i))
    learnt = learn(log.snapshot(), None, Learning(kinds=(GROUPS,), like_ttl_s=100.0))
    assert learnt.kind == FIXED
    assert learnt.table.groups == ()
    assert learnt.table.residual_ttl_s == 100.0


def test_without_requests_everything_is_kept() -> None:
    empty = learn(PathLog().snapshot(), 1e9).table
    assert empty.group_of((1, 2)) == RESIDUAL
    assert empty.residual_ttl_s == math.inf
    once = PathLog()
    once.observe((1, 2), 5.0)
    assert learn(once.snapshot(), 1e9).table.residual_ttl_s == math.inf


@pytest.mark.parametrize("budget", [0.0, -1.0, math.nan])
def test_a_budget_that_is_not_positive_is_refused(budget: float) -> None:
    with pytest.raises(CanopyError, match="budget must be positive"):
        learn(PathLog().snapshot(), budget)


def test_a_bad_setting_is_refused_by_name() -> None:
    with pytest.raises(CanopyError, match="held_out"):
        Learning(held_out=1.5)
    with pytest.raises(CanopyError, match="groups, categories or both"):
        Learning(kinds=("group",))
    with pytest.raises(CanopyError, match="from 0 to 4096"):
        GroupSelection(groups=-1)
    with pytest.raises(CanopyError, match="window must be"):
        PathLog(window_s=0.0)
    with pytest.raises(CanopyError, match="max_blocks"):
        PathLog(max_blocks=0)


def test_equal_windows_give_equal_tables_in_any_thread() -> None:
    snapshots = []
    for _ in range(2):
        window = PathLog()
        two_tenants(window, 1200.0)
        snapshots.append(window.snapshot())
    learning = Learning(kinds=(GROUPS,))
    tables = [learn(snapshots[0], 1e4, learning)]
    worker = threading.Thread(target=lambda: tables.append(learn(snapshots[1], 1e4, learning)))
    worker.start()
    worker.join()
    assert tables[0] == tables[1]


def test_invented_categories_are_bounded() -> None:
    log = PathLog()
    for i in range(1000):
        log.observe((1,), float(i), category=f"name{i}")
    assert len(log.snapshot().categories) == MAX_CATEGORIES


def test_a_clock_that_runs_backwards_counts_as_now() -> None:
    log = PathLog(window_s=100.0)
    for time_s in (50.0, 10.0, 60.0):
        log.observe((1, 2), time_s)
    log.check()
    assert log.snapshot().times_s.tolist() == [50.0, 50.0, 60.0]
