"""Answers that differ, the limits's decisions after faults and after chance, and its tenants."""

import random

import pytest
import torch

from canopy_documents.quality.checker import differ
from canopy_documents.quality.tenant_limits import (
    MAX_TENANTS,
    RAISED,
    SERVED,
    STOPPED,
    TIE_NATS,
    QualityLimits,
    raised,
)

EVERY, ALLOWED = 100, 0.4
TO_RAISED, TO_STOPPED = 160, 300
"""Prompts of a tenant that was served well after which a fault in every answer is acted on."""


def serve(limits: QualityLimits, prompts: int, differs, tenant: str | None = None) -> list[int]:
    """Fused prompts, whose checks are done at once; the tenant's level after each."""
    levels = []
    for _ in range(prompts):
        at = limits.take(tenant)
        if at is not None:
            limits.checked_one(tenant, at, differs(at))
        levels.append(limits.quality_level(tenant))
    return levels


def served_well() -> QualityLimits:
    limits = QualityLimits(EVERY, ALLOWED)
    assert set(serve(limits, 2000, lambda at: False)) == {SERVED}
    return limits


def test_a_fault_raises_the_ratio_and_then_stops_reuse_in_time() -> None:
    levels = serve(served_well(), TO_STOPPED, lambda at: True)
    assert RAISED in levels[:TO_RAISED]
    assert STOPPED in levels
    assert levels == sorted(levels)


@pytest.mark.parametrize(("allowed", "prompts"), [(ALLOWED, 320), (0.0, 1500)])
def test_reuse_resumes_after_the_fault_is_fixed(allowed, prompts) -> None:
    limits = QualityLimits(EVERY, allowed)
    serve(limits, 2000, lambda at: False)
    assert serve(limits, TO_STOPPED, lambda at: True)[-1] == STOPPED
    levels = serve(limits, prompts, lambda at: False)
    assert RAISED in levels
    assert levels[-1] == SERVED


def test_a_ratio_that_is_too_low_is_raised_for_good() -> None:
    levels = serve(served_well(), 3000, lambda at: at == SERVED)
    assert STOPPED not in levels
    assert set(levels[TO_RAISED:]) == {RAISED}


def test_answers_that_differ_as_seldom_as_is_allowed_change_nothing() -> None:
    draw = random.Random(1)
    assert set(serve(served_well(), 50_000, lambda at: draw.random() < 0.2)) == {SERVED}


def test_few_prompts_are_checked_of_a_tenant_that_is_served_well() -> None:
    limits = served_well()
    before = limits.checked
    serve(limits, 10_000, lambda at: False)
    assert limits.checked - before == 100


def test_a_new_tenant_is_checked_more_often() -> None:
    limits = QualityLimits(EVERY, ALLOWED)
    assert RAISED in serve(limits, 70, lambda at: True)


def test_a_tenant_cannot_stop_anothers_reuse() -> None:
    limits = served_well()
    for i in range(3 * MAX_TENANTS):
        serve(limits, 20, lambda at: True, f"tenant {i}")
        serve(limits, 1, lambda at: False)
    serve(limits, TO_STOPPED, lambda at: True, "another")
    assert limits.quality_level("another") == STOPPED
    assert limits.quality_level(None) == SERVED
    assert len(limits.tenants) == MAX_TENANTS


def test_a_stopped_tenant_is_not_forgotten_for_new_ones() -> None:
    limits = QualityLimits(EVERY, ALLOWED)
    serve(limits, TO_STOPPED, lambda at: True, "faulty")
    for i in range(2 * MAX_TENANTS):
        limits.take(f"tenant {i}")
    assert limits.quality_level("faulty") == STOPPED


@pytest.mark.parametrize(("ratio", "up"), [(0.0, 0.3), (0.1, 0.3), (0.2, 0.4), (0.6, 1.0), (1, 1)])
def test_a_raised_ratio_is_twice_the_servers_or_three_tenths(ratio, up) -> None:
    assert raised(ratio) == up


@pytest.mark.parametrize(
    ("other", "second", "differs"),
    [
        ([0, 1], [0, 0, 0], False),
        ([0, 2], [0, 5, 5 - 0.9 * TIE_NATS], False),  # nearly as likely
        ([0, 2], [0, 5, 5 - 1.1 * TIE_NATS], True),
        ([1, 2], [0, 5, 0], False),  # only the first difference counts, and it is a tie
    ],
)
def test_a_token_that_is_nearly_as_likely_is_no_other_answer(other, second, differs) -> None:
    rows = [torch.tensor([5, 4.9, 0]), torch.tensor([float(x) for x in second])]
    assert differ([0, 1], other, rows) == differs
