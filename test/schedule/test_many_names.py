"""A client with many tenant names, against tenants that a gateway vouches for."""

import pytest

from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.cost import Prefill, PrefillCost
from sglang_canopy.schedule.fair_shares import SEPARATE_SHARES, VOUCHED_REST, FairShares
from sglang_canopy.tenant import ChargedTenants, Vouched

STEP_COUNT, WARM_UP_STEPS = 3000, 500


def work_shares(owner_by_party: dict[str | Vouched | None, str]) -> dict[str, float]:
    """Return each owner's share of the work. Every party, a tenant's name, always has four waiting requests.

    ``owner_by_party``: the client behind each name.
    """
    order, charged_tenants = BoundedShortest(PrefillCost(8192)), ChargedTenants()
    work_by_owner = dict.fromkeys(owner_by_party.values(), 0.0)

    def send(party: str | Vouched | None) -> None:
        is_vouched = isinstance(party, Vouched)
        tenant = charged_tenants.choose(party.tenant if is_vouched else party, is_vouched, now=1.0)
        order.add(Prefill(1000), tenant, request=party)

    for party in [*owner_by_party] * 4:
        send(party)
    for step in range(STEP_COUNT):
        waiting = order.in_order(1)[0]
        order.admit([waiting])
        if step > WARM_UP_STEPS:
            work_by_owner[owner_by_party[waiting.request]] += waiting.cost_s
        send(waiting.request)
    return {owner: work / sum(work_by_owner.values()) for owner, work in work_by_owner.items()}


@pytest.mark.parametrize("name_count", [1, 60, 200])
def test_names_that_no_gateway_vouches_for_share_one_turn(name_count: int) -> None:
    unvouched = {f"x{i}": "other" for i in range(name_count)}
    shares = work_shares({Vouched("a"): "a", **unvouched, None: "other"})
    assert shares["a"] == pytest.approx(0.5, abs=0.01)


def test_a_vouched_tenants_name_has_no_effect_without_the_gateways_secret() -> None:
    assert work_shares({Vouched("a"): "a", "a": "other"})["a"] == pytest.approx(0.5, abs=0.01)


def test_vouched_tenants_get_equal_turns_next_to_all_others() -> None:
    vouched = {Vouched(name): name for name in ("a", "b", "c")}
    shares = work_shares({**vouched, **{f"x{i}": "other" for i in range(60)}})
    assert list(shares.values()) == pytest.approx([0.25] * 4, abs=0.01)


def test_a_new_vouched_tenant_is_among_the_next_two_in_a_queue_of_names() -> None:
    order = BoundedShortest(PrefillCost(8192))
    for number in range(500):
        order.add(Prefill(1000), f"x{number % 60}")
    for _ in range(100):
        order.admit(order.in_order(1))
    order.add(Prefill(1000), Vouched("new"))
    assert Vouched("new") in [waiting.tenant for waiting in order.in_order(2)]


def test_more_vouched_tenants_than_shares_stay_bounded() -> None:
    order = BoundedShortest(PrefillCost(8192))
    for number in range(3 * SEPARATE_SHARES):
        order.add(Prefill(1000), Vouched(f"v{number}"))
        order.admit(order.in_order(1))
    assert len(order.shares._separate) <= SEPARATE_SHARES


def test_vouched_tenants_have_one_share_if_none_is_free() -> None:
    shares, newcomer = FairShares(), Vouched("new")
    for number in range(SEPARATE_SHARES - 1):
        shares.charge(Vouched(f"v{number}"), Vouched(f"v{number}"), 1.0)
    assert shares.share_of(newcomer) == newcomer
    shares.charge(Vouched("last"), Vouched("last"), 1.0)
    assert shares.share_of(newcomer) is VOUCHED_REST


def test_a_vouched_name_never_counts_as_all_other_requests() -> None:
    """A gateway's tenant of the name "unvouched" shares no turn with the unvouched ones."""
    tenants = ChargedTenants()
    assert tenants.choose("unvouched", True, 0.0) != tenants.choose("other", False, 0.0)


def test_names_served_before_a_gateways_first_request_take_no_share_of_its_tenants() -> None:
    """This holds even after more names than there are separate shares."""
    shares, newcomer = FairShares(), Vouched("new")
    for number in range(2 * SEPARATE_SHARES):
        shares.charge(f"x{number}", shares.share_of(f"x{number}"), 1.0)
    assert shares.share_of(newcomer) == newcomer
    for number in range(SEPARATE_SHARES):
        shares.charge(Vouched(f"v{number}"), Vouched(f"v{number}"), 1.0)
    assert shares.share_of(newcomer) != shares.share_of("name")
