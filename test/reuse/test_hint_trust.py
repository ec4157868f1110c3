"""What "this conversation is over" is worth, by tenant and by how often it came true."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.policy.registry import make_policy
from sglang_canopy.reuse.categories import ROOT
from sglang_canopy.reuse.hint_trust import MAX_TENANTS, HintRecords
from sglang_canopy.reuse.learner import ReuseModel
from sglang_canopy.reuse.shadow import Tip
from sglang_canopy.sim.driver import simulate
from sglang_canopy.sim.requests import Hints
from support.trace_samples import mooncake


def told(records, tenant, tips, accuracy, continues=0.4, seed=0):
    """``tips`` finished requests of ``tenant``, whose hints are right with that probability."""
    draw = random.Random(seed)
    category = ReuseModel().categories.get(ROOT)
    for at in range(tips):
        tip = Tip(float(at), category, tenant)
        goes_on = draw.random() < continues
        right = draw.random() < accuracy
        records.note_tip(tip, over=goes_on != right)
        if goes_on:
            records.continued(tip, at + 1.0)


def test_the_weight_is_how_much_rarer_a_return_is_after_the_hint():
    records = HintRecords()
    told(records, "a", 3000, 0.75)
    # P(continues | over) = 0.4 x 0.25 / (0.4 x 0.25 + 0.6 x 0.75), by P(continues) = 0.4.
    assert records.over_weight("a") == pytest.approx(0.1 / 0.55 / 0.4, rel=0.1)
    assert not records.over_trusted("a")


@pytest.mark.parametrize("accuracy", [0.5, 0.25, 0.0])
def test_hints_that_tell_nothing_or_the_opposite_weigh_as_none(accuracy):
    records = HintRecords()
    told(records, "a", 2000, accuracy)
    assert records.over_weight("a") == 1.0
    assert records.over_weight("never heard of") == 1.0


def test_a_liar_costs_an_honest_tenant_nothing():
    alone, beside = HintRecords(), HintRecords()
    told(beside, "liar", 500, 0.0, seed=1)
    for records in (alone, beside):
        told(records, "honest", 1000, 0.8)
    told(beside, "liar", 500, 0.0, seed=2)
    assert beside.over_weight("honest") == alone.over_weight("honest") < 0.6
    assert beside.over_weight("liar") == 1.0


def test_a_tenant_that_turned_honest_is_heard_again():
    records = HintRecords()
    told(records, "a", 3000, 0.5)
    assert records.over_weight("a") == 1.0
    told(records, "a", 20_000, 0.8, seed=1)
    assert records.over_weight("a") < 0.6


def test_tenants_that_give_no_hints_take_no_record_from_those_that_do():
    records = HintRecords()
    told(records, "a", 500, 0.8)
    weight = records.over_weight("a")
    category = ReuseModel().categories.get(ROOT)
    for other in range(2 * MAX_TENANTS):
        records.note_tip(Tip(0.0, category, f"t{other}"), over=False)
    assert records.over_weight("a") == weight < 1.0
    assert records.stats()["tenants"] == 1


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=300),
)
def test_weights_are_shares_whatever_is_said(said):
    records = HintRecords()
    category = ReuseModel().categories.get(ROOT)
    for tenant, over, goes_on in said:
        tip = Tip(0.0, category, tenant)
        records.note_tip(tip, over)
        records.note_tip(tip, over)  # said twice, counted once
        if goes_on:
            records.continued(tip, 1.0)
    for tenant in "abc":
        assert 0.0 < records.over_weight(tenant) <= 1.0
        record = records.record(tenant)
        assert record.tips_over_continued <= min(record.tips_continued, record.tips_over)
        assert max(record.tips_continued, record.tips_over) <= record.tips <= len(said)


def test_hints_right_three_times_of_four_still_win_and_useless_ones_cost_little():
    trace = mooncake(limit=2500)

    def hits(accuracy):
        hints = None if accuracy is None else Hints(accuracy=accuracy, returns=False, seed=1)
        policy = make_policy("etlru", {"threshold_tokens": 21504.0})
        return simulate(trace, policy, 2000, hints=hints).block_hit_ratio

    none = hits(None)
    assert hits(0.75) > none * 1.2
    assert hits(0.5) > none - 0.004
