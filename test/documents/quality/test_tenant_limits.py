"""Answers that differ, and each tenant's level of reuse after faults and after chance differences."""

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
    raised_ratio,
)

CHECK_INTERVAL_PROMPTS, ALLOWED_SHARE = 100, 0.4
RAISED_WITHIN_PROMPTS, STOPPED_WITHIN_PROMPTS = 160, 300
"""Most prompts until a fault in every answer changes the level of a tenant with right answers so far."""


def serve(limits: QualityLimits, prompts: int, differs, tenant: str | None = None) -> list[int]:
    """Serve and check fused prompts, of which ``differs(level)`` differ; return the level after each."""
    levels = []
    for _ in range(prompts):
        level = limits.select_check_level(tenant)
        if level is not None:
            limits.record_check(tenant, level, differs(level))
        levels.append(limits.quality_level(tenant))
    return levels


def settled_limits() -> QualityLimits:
    limits = QualityLimits(CHECK_INTERVAL_PROMPTS, ALLOWED_SHARE)
    assert set(serve(limits, 2000, lambda level: False)) == {SERVED}
    return limits


def test_a_fault_raises_the_ratio_and_then_stops_reuse_in_time() -> None:
    levels = serve(settled_limits(), STOPPED_WITHIN_PROMPTS, lambda level: True)
    assert RAISED in levels[:RAISED_WITHIN_PROMPTS]
    assert STOPPED in levels
    assert levels == sorted(levels)


@pytest.mark.parametrize(("allowed_share", "prompts"), [(ALLOWED_SHARE, 320), (0.0, 1500)])
def test_reuse_resumes_after_the_fault_is_fixed(allowed_share, prompts) -> None:
    limits = QualityLimits(CHECK_INTERVAL_PROMPTS, allowed_share)
    serve(limits, 2000, lambda level: False)
    assert serve(limits, STOPPED_WITHIN_PROMPTS, lambda level: True)[-1] == STOPPED
    levels = serve(limits, prompts, lambda level: False)
    assert RAISED in levels
    assert levels[-1] == SERVED


def test_a_ratio_that_is_too_low_is_raised_for_good() -> None:
    levels = serve(settled_limits(), 3000, lambda level: level == SERVED)
    assert STOPPED not in levels
    assert set(levels[RAISED_WITHIN_PROMPTS:]) == {RAISED}


def test_answers_that_differ_as_seldom_as_is_allowed_change_nothing() -> None:
    rng = random.Random(1)
    assert set(serve(settled_limits(), 50_000, lambda level: rng.random() < 0.2)) == {SERVED}


def test_few_prompts_are_checked_of_a_tenant_that_is_served_well() -> None:
    limits = settled_limits()
    checked_before = limits.checked
    serve(limits, 10_000, lambda level: False)
    assert limits.checked - checked_before == 100


def test_a_new_tenant_is_checked_more_often() -> None:
    limits = QualityLimits(CHECK_INTERVAL_PROMPTS, ALLOWED_SHARE)
    assert RAISED in serve(limits, 70, lambda level: True)


def test_a_tenant_cannot_stop_anothers_reuse() -> None:
    limits = settled_limits()
    for i in range(3 * MAX_TENANTS):
        serve(limits, 20, lambda level: True, f"tenant {i}")
        serve(limits, 1, lambda level: False)
    serve(limits, STOPPED_WITHIN_PROMPTS, lambda level: True, "another")
    assert limits.quality_level("another") == STOPPED
    assert limits.quality_level(None) == SERVED
    assert len(limits.tenants) == MAX_TENANTS


def test_a_stopped_tenant_is_not_forgotten_for_new_ones() -> None:
    limits = QualityLimits(CHECK_INTERVAL_PROMPTS, ALLOWED_SHARE)
    serve(limits, STOPPED_WITHIN_PROMPTS, lambda level: True, "faulty")
    for i in range(2 * MAX_TENANTS):
        limits.select_check_level(f"tenant {i}")
    assert limits.quality_level("faulty") == STOPPED


@pytest.mark.parametrize(
    ("ratio", "raised"), [(0.0, 0.3), (0.1, 0.3), (0.2, 0.4), (0.6, 1.0), (1, 1)]
)
def test_a_raised_ratio_is_twice_the_servers_or_three_tenths(ratio, raised) -> None:
    assert raised_ratio(ratio) == raised


@pytest.mark.parametrize(
    ("tokens", "last_logits", "differs"),
    [
        ([0, 1], [0, 0, 0], False),
        ([0, 2], [0, 5, 5 - 0.9 * TIE_NATS], False),  # nearly as likely
        ([0, 2], [0, 5, 5 - 1.1 * TIE_NATS], True),
        ([1, 2], [0, 5, 0], False),  # only the first difference counts, and it is a tie
    ],
)
def test_a_token_that_is_nearly_as_likely_is_no_other_answer(tokens, last_logits, differs) -> None:
    logit_rows = [torch.tensor([5, 4.9, 0]), torch.tensor([float(logit) for logit in last_logits])]
    assert differ([0, 1], tokens, logit_rows) == differs
