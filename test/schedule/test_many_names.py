"""A client with many tenant names, against tenants that a gateway vouches for."""

import itertools

import pytest

from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.cost import Prefill, PrefillCost
from sglang_canopy.schedule.fair_shares import REMEMBERED, SEPARATE_SHARES, VOUCHED_REST, FairShares
from sglang_canopy.tenant import ClaimedTenant, Vouched

STEPS, WARM_UP = 3000, 500


def share(parties: dict[ClaimedTenant, str]) -> dict[str, float]:
    """Every party has four requests waiting at any time; the work of each name's owner."""
    order, served = BoundedShortest(PrefillCost(8192)), dict.fromkeys(parties.values(), 0.0)
    for party in [*parties] * 4:
        order.add(Prefill(1000), party)
    for step in range(STEPS):
        one = order.in_order(1)[0]
        order.admit([one])
        if step > WARM_UP:
            served[parties[one.tenant]] += one.cost
        order.add(Prefill(1000), one.tenant)
    return {owner: work / sum(served.values()) for owner, work in served.items()}


@pytest.mark.parametrize("names", [1, 60, 200])
def test_names_that_no_gateway_vouches_for_have_one_turn_together(names: int) -> None:
    liar = {f"x{i}": "liar" for i in range(names)}
    found = share({Vouched("honest"): "honest", **liar, None: "liar"})
    assert found["honest"] == pytest.approx(0.5, abs=0.01)


def test_a_vouched_tenants_name_has_no_effect_without_the_gateways_secret() -> None:
    found = share({Vouched("honest"): "honest", "honest": "liar"})
    assert found["honest"] == pytest.approx(0.5, abs=0.01)


def test_vouched_tenants_get_equal_turns_next_to_all_others() -> None:
    honest = {Vouched(name): name for name in ("a", "b", "c")}
    found = share({**honest, **{f"x{i}": "liar" for i in range(60)}})
    assert list(found.values()) == pytest.approx([0.25] * 4, abs=0.01)


def test_a_vouched_tenant_that_was_not_served_yet_waits_for_no_queue_of_names() -> None:
    order = BoundedShortest(PrefillCost(8192))
    for number in range(500):
        order.add(Prefill(1000), f"x{number % 60}")
    for _ in range(100):
        order.admit(order.in_order(1))
    order.add(Prefill(1000), Vouched("new"))
    assert Vouched("new") in [one.tenant for one in order.in_order(2)]


def test_more_vouched_tenants_than_turns_stay_bounded() -> None:
    order = BoundedShortest(PrefillCost(8192))
    for number in range(3 * REMEMBERED):
        order.add(Prefill(1000), Vouched(f"v{number}"))
        order.admit(order.in_order(1))
    assert len(order.shares._separate_shares) <= SEPARATE_SHARES
    assert len(order.shares._served_s) <= REMEMBERED


def test_vouched_tenants_share_a_turn_if_none_is_free() -> None:
    shares, new = FairShares(), Vouched("new")
    for number in range(SEPARATE_SHARES - 1):
        shares.charge(Vouched(f"v{number}"), Vouched(f"v{number}"), 1.0)
    assert shares.share_of(new) == new
    shares.charge(Vouched("last"), Vouched("last"), 1.0)
    assert shares.share_of(new) is VOUCHED_REST


def test_without_vouched_requests_names_have_their_own_turns_again() -> None:
    order = BoundedShortest(PrefillCost(8192))
    order.add(Prefill(1000), Vouched("gone"))
    order.admit(order.in_order(1))
    for number in itertools.count():
        one = order.add(Prefill(100_000), f"t{number % 3}")
        order.admit(order.in_order(1))
        if one.share == one.tenant:
            break
        assert number < 10_000
