"""The weight of the hint "this conversation is over", by tenant and by past accuracy."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_lab.sim.driver import simulate
from canopy_lab.sim.requests import SimulatedHints
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import CLIENT, GATEWAY, LateHint, Request
from sglang_canopy.reuse.categories import ROOT
from sglang_canopy.reuse.hint_trust import MAX_RECORDS, HintRecords, return_slack_s, sender_of
from sglang_canopy.reuse.learner import ReuseModel
from sglang_canopy.reuse.shadow import Tip
from support.tiny_traces import request_of
from support.trace_samples import mooncake


def count_tips(records, tenant, tip_count, accuracy, seed=0):
    """Record ``tip_count`` requests of ``tenant``, whose hints are right with probability ``accuracy``."""
    rng = random.Random(seed)
    category = ReuseModel().categories.get(ROOT)
    for time_s in range(tip_count):
        tip = Tip(float(time_s), category, tenant)
        continues = rng.random() < 0.4
        is_right = rng.random() < accuracy
        records.count_tip(tip, over=continues != is_right)
        if continues:
            records.judge_hints(tip, time_s + 1.0)


@pytest.fixture
def records():
    return HintRecords()


def test_the_weight_is_how_much_rarer_a_return_is_after_the_hint(records):
    count_tips(records, "a", 3000, 0.75)
    # P(continues | over) = 0.4 x 0.25 / (0.4 x 0.25 + 0.6 x 0.75), by P(continues) = 0.4.
    assert records.over_weight("a") == pytest.approx(0.1 / 0.55 / 0.4, rel=0.1)
    assert not records.is_over_trusted("a")


@pytest.mark.parametrize("accuracy", [0.5, 0.25, 0.0])
def test_uninformative_or_opposite_hints_have_no_weight(records, accuracy):
    count_tips(records, "a", 2000, accuracy)
    assert records.over_weight("a") == 1.0
    assert records.over_weight("unknown") == 1.0


def test_a_tenants_wrong_hints_cost_another_tenant_nothing():
    alone, together = HintRecords(), HintRecords()
    count_tips(together, "wrong", 500, 0.0, seed=1)
    for records in (alone, together):
        count_tips(records, "right", 1000, 0.8)
    count_tips(together, "wrong", 500, 0.0, seed=2)
    assert together.over_weight("right") == alone.over_weight("right") < 0.6
    assert together.over_weight("wrong") == 1.0


def test_a_tenant_whose_hints_become_right_is_trusted_again(records):
    count_tips(records, "a", 3000, 0.5)
    assert records.over_weight("a") == 1.0
    count_tips(records, "a", 20_000, 0.8, seed=1)
    assert records.over_weight("a") < 0.6


def test_tenants_that_give_no_hints_take_no_record_from_those_that_do(records):
    count_tips(records, "a", 500, 0.8)
    weight = records.over_weight("a")
    category = ReuseModel().categories.get(ROOT)
    for number in range(2 * MAX_RECORDS):
        records.count_tip(Tip(0.0, category, f"t{number}"), over=False)
    assert records.over_weight("a") == weight < 1.0
    assert records._records.keys() == {"a"}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=300))
def test_weights_are_between_0_and_1_for_any_hints(tips):
    records = HintRecords()
    category = ReuseModel().categories.get(ROOT)
    for tenant, over, continues in tips:
        tip = Tip(0.0, category, tenant)
        records.count_tip(tip, over)
        records.count_tip(tip, over)  # sent twice, counted once
        if continues:
            records.judge_hints(tip, 1.0)
    for tenant in "abc":
        assert 0.0 < records.over_weight(tenant) <= 1.0
        record = records.record(tenant)
        assert record.continued_over_tips <= min(record.continued_tips, record.over_tips)
        assert max(record.continued_tips, record.over_tips) <= record.tips <= len(tips)


@pytest.fixture(scope="module")
def trace():
    return mooncake(limit=2500)


def record_first_end(records, tenant, continues):
    tip = Tip(0.0, ReuseModel().categories.get(ROOT), tenant)
    records.count_tip(tip, over=True)
    if continues:
        records.judge_hints(tip, 1.0)


def test_ends_that_newcomers_announce_are_acted_on_until_those_of_several_were_wrong(records):
    record_first_end(records, "a", continues=True)
    assert records.is_over_trusted("unknown")
    for tenant in ("b", "c", "d"):
        record_first_end(records, tenant, continues=True)
    assert not records.is_over_trusted("unknown")
    assert not records.is_over_trusted("a")
    for number in range(40):
        record_first_end(records, f"right {number}", continues=False)
    assert records.is_over_trusted("unknown")


def test_one_tenants_wrong_ends_cost_newcomers_nothing(records):
    count_tips(records, "wrong", 500, 0.0)
    assert not records.is_over_trusted("wrong")
    assert records.is_over_trusted("unknown")


def test_a_tenants_true_ends_are_trusted_among_newcomers_with_wrong_ones(records):
    for number in range(20):
        record_first_end(records, f"new {number}", continues=True)
    count_tips(records, "right", 1000, 1.0)
    assert not records.is_over_trusted("unknown")
    assert records.is_over_trusted("right")


def agent_requests(tenant_count, turns):
    """Return requests of agents that are a tenant each: one begins every 20 s; a turn follows after
    30 s on average."""
    rng = random.Random(0)
    requests = []
    for agent in range(tenant_count):
        now, names = 20.0 * agent, {"conversation": f"c{agent}", "user": f"u{agent}"}
        for turn in range(1, turns + 1):
            blocks = [100 * agent + i for i in range(2 * turn)]
            requests.append(request_of(now, blocks, turn=turn, **names))
            now += rng.expovariate(1 / 30.0)
    return sorted(requests, key=lambda request: request.time_s)


def test_agents_that_are_a_tenant_each_lose_nothing_by_wrong_hints():
    """A new tenant is judged by the hints of other new tenants, and hits more if those were true."""
    trace = agent_requests(tenant_count=200, turns=8)

    def hit_ratio(hints):
        return simulate(trace, make_policy("wa"), 60, hints=hints).block_hit_ratio

    without_hints = hit_ratio(None)
    assert hit_ratio(SimulatedHints(accuracy=0.0, seed=1)) >= without_hints - 0.01
    assert hit_ratio(SimulatedHints(accuracy=0.75, seed=1)) > without_hints + 0.01


def record_returns(records, sender, tip_count, accuracy, seed=0):
    """Record ``tip_count`` requests with hints of their return, which are true with ``accuracy``."""
    rng = random.Random(seed)
    category = ReuseModel().categories.get(ROOT)
    for _ in range(tip_count):
        tip = Tip(0.0, category, "t")
        tip.sender = sender
        gap_s, wrong_gap_s = (2.0 ** rng.uniform(4, 10) for _ in range(2))
        records.add_return_hint(tip, gap_s if rng.random() < accuracy else wrong_gap_s)
        records.judge_hints(tip, gap_s)


def test_a_return_is_overdue_once_its_slack_has_passed():
    records, tip = HintRecords(), Tip(0.0, ReuseModel().categories.get(ROOT), "t")
    tip.sender = "t"
    records.add_return_hint(tip, 100.0)
    deadline_s = 100.0 + return_slack_s(100.0)
    records.count_overdue(deadline_s)
    assert tip.return_at == 100.0
    records.count_overdue(deadline_s + 1.0)
    assert tip.return_at is None
    assert records.record("t").return_hints == 1.0


@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.6, 1.0])
def test_the_skill_is_the_share_of_true_hints(records, accuracy):
    record_returns(records, "t", 4000, accuracy)
    assert records.return_skill("t") == pytest.approx(accuracy, abs=0.05)


def test_a_gateway_and_the_clients_of_a_tenant_are_judged_separately(records):
    gateway = sender_of("t", GATEWAY)
    record_returns(records, sender_of("t", CLIENT), 500, 0.1)
    record_returns(records, gateway, 500, 0.9, seed=1)
    assert records.return_skill("t") < 0.25 < 0.8 < records.return_skill(gateway)
    assert records.trust_key(gateway) == gateway


def test_old_returns_fade_and_a_sender_with_true_ones_is_trusted(records):
    record_returns(records, "t", 6000, 0.0)
    assert records.return_skill("t") < 0.1
    record_returns(records, "t", 16_000, 1.0, seed=1)
    assert records.return_skill("t") > 0.7


def test_a_gateways_ends_are_compared_with_all_requests_of_its_tenant(records):
    """The gateway gives hints only for ended conversations; the clients give none."""
    category = ReuseModel().categories.get(ROOT)
    gateway = sender_of("t", GATEWAY)
    for number in range(1000):
        tip = Tip(float(number), category, "t")
        records.count_tip(tip, over=False)
        if number % 2:
            records.judge_hints(tip, number + 1.0)
        else:
            tip.sender = gateway
            records.count_tip(tip, over=True)
    assert records.over_weight(gateway) < 0.1
    assert records.is_over_trusted(gateway)
    assert records.over_weight("t") == 1.0


def test_a_hint_without_a_request_is_checked_later():
    model = ReuseModel()
    for time_s, path in ((0.0, [1]), (100.0, [1, 2])):
        request = Request(time=time_s, path=path, prompt_tokens=len(path), conversation="c")
        model.arrive(request)
        model.finish(request)
        model.record_hint(LateHint(None, "c", time_s + 10.0, GATEWAY, return_in_s=90.0))
        model.record_hint(LateHint(None, "unknown", time_s + 10.0, GATEWAY, over=True))
    record = model.hints.record(sender_of(None, GATEWAY))
    assert (record.return_hints, record.true_return_hints) == (1, 1)


@pytest.mark.parametrize("accuracy", [0.5, pytest.param(0.6, marks=pytest.mark.long)])
def test_hints_that_are_right_half_of_the_time_cost_nothing(accuracy, trace):
    def hit_ratio(hints):
        return simulate(trace, make_policy("wa"), 2000, hints=hints).block_hit_ratio

    without_hints = hit_ratio(None)
    return_hints = SimulatedHints(accuracy=accuracy, over=False, seed=1)
    end_hints = SimulatedHints(accuracy=accuracy, returns=False, seed=1)
    assert hit_ratio(return_hints) >= without_hints
    assert hit_ratio(end_hints) >= without_hints - 0.001
