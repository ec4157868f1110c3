"""Each tenant's budget per second."""

from sglang_canopy.wire.hints import MAX_BUCKETS, TenantRate


def count_taken(rate: TenantRate, tenant: str | None, now: float, attempts: int) -> int:
    return sum(rate.take(tenant, now) for _ in range(attempts))


def test_a_tenant_gets_its_burst_and_then_its_rate() -> None:
    rate = TenantRate(10.0, 5)
    assert count_taken(rate, "a", 0.0, 100) == 5
    assert count_taken(rate, "a", 0.1, 100) == 1
    assert count_taken(rate, "a", 0.15, 100) == 0
    assert count_taken(rate, "a", 60.0, 100) == 5


def test_a_clock_that_goes_back_adds_no_credit() -> None:
    rate = TenantRate(1.0, 2)
    assert count_taken(rate, "a", 100.0, 5) == 2
    assert count_taken(rate, "a", 50.0, 5) == 0
    assert count_taken(rate, "a", 100.5, 5) == 0


def test_invented_tenants_are_forgotten() -> None:
    rate = TenantRate(1.0, 2)
    for i in range(MAX_BUCKETS + 100):
        rate.take(f"t{i}", 0.0)
    assert len(rate) == MAX_BUCKETS
