"""A policy falls behind LRU by no more than its floor allows, and ranks again when it would win."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.whatif.floor import MAX_CREDIT, SLACK_SHARE, TOLERATED_SHARE, Floor

CAPACITY_TOKENS = 10_000
REQUEST_TOKENS = 100
HIT_TOKENS = st.lists(st.tuples(*[st.integers(0, REQUEST_TOKENS)] * 2), max_size=400)


@given(HIT_TOKENS)
def test_the_loss_before_lru_ranks_is_bounded(hits):
    floor, lost_tokens, prompt_tokens = Floor(CAPACITY_TOKENS), 0, 0
    for policy_hit, lru_hit in hits:
        if floor.is_behind:
            break
        lost_tokens += lru_hit - policy_hit
        prompt_tokens += REQUEST_TOKENS
        floor.compare(policy_hit, lru_hit, REQUEST_TOKENS)
        if not floor.is_behind:
            assert lost_tokens <= SLACK_SHARE * CAPACITY_TOKENS + TOLERATED_SHARE * prompt_tokens
    # The last request is the one that showed it.
    bound_tokens = SLACK_SHARE * CAPACITY_TOKENS + TOLERATED_SHARE * prompt_tokens
    assert lost_tokens <= bound_tokens + REQUEST_TOKENS


@given(HIT_TOKENS)
def test_a_policy_that_is_never_worse_is_never_replaced(hits):
    floor = Floor(CAPACITY_TOKENS)
    for first_hit, second_hit in hits:
        floor.compare(max(first_hit, second_hit), min(first_hit, second_hit), REQUEST_TOKENS)
        assert not floor.is_behind


@pytest.mark.parametrize("tolerance", [0.0, 0.02])
def test_requests_without_a_difference_do_not_raise_the_allowed_loss(tolerance):
    def lost_before_lru_ranks(equal_requests):
        floor, lost_tokens = Floor(CAPACITY_TOKENS), 0
        for _ in range(equal_requests):
            floor.compare(REQUEST_TOKENS // 2, REQUEST_TOKENS // 2, REQUEST_TOKENS, tolerance)
        while not floor.is_behind:
            floor.compare(REQUEST_TOKENS // 2 - 10, REQUEST_TOKENS // 2, REQUEST_TOKENS, tolerance)
            lost_tokens += 10
        return lost_tokens

    assert lost_before_lru_ranks(200_000) <= 2.1 * lost_before_lru_ranks(0)


def test_requests_without_a_difference_do_not_raise_the_required_gain():
    def gained_before_the_policy_ranks(equal_requests):
        floor, gained_tokens = Floor(CAPACITY_TOKENS), 0
        while not floor.is_behind:
            floor.compare(0, REQUEST_TOKENS, REQUEST_TOKENS)
        for _ in range(equal_requests):
            floor.compare(REQUEST_TOKENS // 2, REQUEST_TOKENS // 2, REQUEST_TOKENS)
        while floor.is_behind:
            floor.compare(REQUEST_TOKENS // 2 + 10, REQUEST_TOKENS // 2, REQUEST_TOKENS)
            gained_tokens += 10
        return gained_tokens

    gained_at_once = gained_before_the_policy_ranks(0)
    slack_tokens = SLACK_SHARE * CAPACITY_TOKENS
    assert gained_before_the_policy_ranks(200_000) <= gained_at_once + 2 * slack_tokens


def test_a_loss_within_the_share_is_tolerated_for_ever():
    floor = Floor(CAPACITY_TOKENS)
    for number in range(200_000):
        lru_hit = REQUEST_TOKENS // 2 + (number % 21 == 0)  # 0.048 points
        floor.compare(REQUEST_TOKENS // 2, lru_hit, REQUEST_TOKENS)
    assert not floor.is_behind


def test_a_policy_ranks_again_once_its_shadow_cache_is_ahead():
    floor, request_count = Floor(CAPACITY_TOKENS), 0
    for _ in range(10_000):
        floor.compare(0, REQUEST_TOKENS, REQUEST_TOKENS)
    assert floor.is_behind
    while floor.is_behind:
        floor.compare(REQUEST_TOKENS, 0, REQUEST_TOKENS)
        request_count += 1
    assert request_count < (MAX_CREDIT + 5 * SLACK_SHARE) * CAPACITY_TOKENS / REQUEST_TOKENS


def test_gains_are_credit_and_the_credit_is_bounded():
    floor, request_count = Floor(CAPACITY_TOKENS), 0
    for _ in range(10_000):
        floor.compare(REQUEST_TOKENS, 0, REQUEST_TOKENS)
    while not floor.is_behind:
        floor.compare(0, REQUEST_TOKENS, REQUEST_TOKENS)
        request_count += 1
    capacities = request_count * REQUEST_TOKENS / CAPACITY_TOKENS
    assert MAX_CREDIT < capacities < MAX_CREDIT + 2 * SLACK_SHARE


def test_orders_that_differ_by_chance_change_ever_more_rarely():
    rng, floor, fall_steps = random.Random(1), Floor(CAPACITY_TOKENS), []
    for step in range(100_000):
        policy_hit, lru_hit = rng.choice(((0, REQUEST_TOKENS), (REQUEST_TOKENS, 0)))
        falls_before = floor.falls
        floor.compare(policy_hit, lru_hit, REQUEST_TOKENS)
        if floor.falls > falls_before:
            fall_steps.append(step)
    assert 1 <= len(fall_steps) <= 8


def test_an_uncertain_sample_needs_a_larger_loss():
    certain, uncertain = Floor(CAPACITY_TOKENS), Floor(CAPACITY_TOKENS)
    for _ in range(40):
        certain.compare(90, REQUEST_TOKENS, REQUEST_TOKENS)
        uncertain.compare(90, REQUEST_TOKENS, REQUEST_TOKENS, error_share=0.1)
    assert certain.is_behind
    assert not uncertain.is_behind


def test_losses_and_gains_do_not_count_after_a_change():
    def requests_until(is_behind, floor, policy_hit, lru_hit):
        requests = 0
        while floor.is_behind != is_behind:
            floor.compare(policy_hit, lru_hit, REQUEST_TOKENS)
            requests += 1
        return requests

    request_counts = []
    for extra_lost_tokens in (0, CAPACITY_TOKENS):
        floor = Floor(CAPACITY_TOKENS)
        slack_tokens = int(SLACK_SHARE * CAPACITY_TOKENS)
        floor.compare(0, slack_tokens + REQUEST_TOKENS + extra_lost_tokens, REQUEST_TOKENS)
        until_ahead = requests_until(False, floor, REQUEST_TOKENS, 0)
        request_counts.append((until_ahead, requests_until(True, floor, 0, REQUEST_TOKENS)))
    assert request_counts[0] == request_counts[1]
    # Back after 4 times the slack, behind again after one.
    slack_requests = SLACK_SHARE * CAPACITY_TOKENS // REQUEST_TOKENS
    assert request_counts[0] == (4 * slack_requests + 1, slack_requests + 1)
