"""A policy falls behind LRU by no more than its floor allows, and ranks again when it would win."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.whatif.floor import MAX_CREDIT, SLACK_SHARE, TOLERATED_SHARE, Floor

CAPACITY = 10_000
TOKENS = 100  # of a request
HITS = st.lists(st.tuples(st.integers(0, TOKENS), st.integers(0, TOKENS)), max_size=400)


@given(HITS)
def test_the_loss_before_lru_ranks_is_bounded(hits):
    floor, lost_tokens, tokens = Floor(CAPACITY), 0, 0
    for policy, lru in hits:
        if floor.is_behind:
            break
        lost_tokens, tokens = lost_tokens + lru - policy, tokens + TOKENS
        floor.compare(policy, lru, TOKENS)
        if not floor.is_behind:
            assert lost_tokens <= SLACK_SHARE * CAPACITY + TOLERATED_SHARE * tokens
    assert (
        lost_tokens <= SLACK_SHARE * CAPACITY + TOLERATED_SHARE * tokens + TOKENS
    )  # the request that showed it


@given(st.lists(st.tuples(st.integers(0, TOKENS), st.integers(0, TOKENS)), max_size=400))
def test_a_policy_that_is_never_worse_is_never_replaced(hits):
    floor = Floor(CAPACITY)
    for hit_a, hit_b in hits:
        floor.compare(max(hit_a, hit_b), min(hit_a, hit_b), TOKENS)
        assert not floor.is_behind


@pytest.mark.parametrize("doubt", [0.0, 0.02])
def test_requests_without_a_difference_do_not_raise_the_allowed_loss(doubt):
    def lost_before_lru_ranks(equal):
        floor, lost = Floor(CAPACITY), 0
        for _ in range(equal):
            floor.compare(TOKENS // 2, TOKENS // 2, TOKENS, doubt)
        while not floor.is_behind:
            floor.compare(TOKENS // 2 - 10, TOKENS // 2, TOKENS, doubt)
            lost += 10
        return lost

    assert lost_before_lru_ranks(200_000) <= 2.1 * lost_before_lru_ranks(0)


def test_requests_without_a_difference_do_not_raise_the_required_gain():
    def gained_before_the_policy_ranks(equal):
        floor, gained = Floor(CAPACITY), 0
        while not floor.is_behind:
            floor.compare(0, TOKENS, TOKENS)
        for _ in range(equal):
            floor.compare(TOKENS // 2, TOKENS // 2, TOKENS)
        while floor.is_behind:
            floor.compare(TOKENS // 2 + 10, TOKENS // 2, TOKENS)
            gained += 10
        return gained

    gained_without = gained_before_the_policy_ranks(0)
    assert gained_before_the_policy_ranks(200_000) <= gained_without + 2 * SLACK_SHARE * CAPACITY


def test_a_loss_within_the_share_is_tolerated_for_ever():
    floor = Floor(CAPACITY)
    for request in range(200_000):
        floor.compare(TOKENS // 2, TOKENS // 2 + (request % 21 == 0), TOKENS)  # 0.048 points
    assert not floor.is_behind


def test_a_policy_ranks_again_once_its_shadow_cache_is_ahead():
    floor, requests = Floor(CAPACITY), 0
    for _ in range(10_000):
        floor.compare(0, TOKENS, TOKENS)
    assert floor.is_behind
    while floor.is_behind:
        floor.compare(TOKENS, 0, TOKENS)
        requests += 1
    assert requests < (MAX_CREDIT + 5 * SLACK_SHARE) * CAPACITY / TOKENS


def test_gains_are_credit_and_the_credit_is_bounded():
    floor, requests = Floor(CAPACITY), 0
    for _ in range(10_000):
        floor.compare(TOKENS, 0, TOKENS)
    while not floor.is_behind:
        floor.compare(0, TOKENS, TOKENS)
        requests += 1
    fewest, most = (
        MAX_CREDIT * CAPACITY / TOKENS,
        (MAX_CREDIT + 2 * SLACK_SHARE) * CAPACITY / TOKENS,
    )
    assert fewest < requests < most


def test_orders_that_differ_by_chance_change_ever_more_rarely():
    draw, floor, fall_steps = random.Random(1), Floor(CAPACITY), []
    for step in range(100_000):
        policy_hit, lru_hit = draw.choice(((0, TOKENS), (TOKENS, 0)))
        old_falls = floor.falls
        floor.compare(policy_hit, lru_hit, TOKENS)
        if floor.falls > old_falls:
            fall_steps.append(step)
    assert 1 <= len(fall_steps) <= 8


def test_an_uncertain_sample_needs_a_larger_loss():
    sure, unsure = Floor(CAPACITY), Floor(CAPACITY)
    for _ in range(40):
        sure.compare(90, TOKENS, TOKENS)
        unsure.compare(90, TOKENS, TOKENS, tolerance=0.1)
    assert sure.is_behind
    assert not unsure.is_behind


def test_losses_and_gains_do_not_count_after_a_change():
    def requests_until(is_behind, floor, policy, lru):
        requests = 0
        while floor.is_behind != is_behind:
            floor.compare(policy, lru, TOKENS)
            requests += 1
        return requests

    request_counts = []
    for extra_loss in (0, CAPACITY):
        floor = Floor(CAPACITY)
        floor.compare(0, int(SLACK_SHARE * CAPACITY) + TOKENS + extra_loss, TOKENS)
        until_ahead = requests_until(False, floor, TOKENS, 0)
        request_counts.append((until_ahead, requests_until(True, floor, 0, TOKENS)))
    assert request_counts[0] == request_counts[1]
    # Back after 4 times the slack, behind again after one.
    assert request_counts[0] == (
        4 * SLACK_SHARE * CAPACITY // TOKENS + 1,
        SLACK_SHARE * CAPACITY // TOKENS + 1,
    )
