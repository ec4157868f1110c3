"""A policy falls behind LRU by no more than its floor allows, and ranks again when it would win."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.whatif.floor import CREDIT, SHARE, SLACK, Floor

CAPACITY = 10_000
ASKED = 100
HITS = st.lists(st.tuples(st.integers(0, ASKED), st.integers(0, ASKED)), max_size=400)


@given(HITS)
def test_the_loss_before_lru_ranks_is_bounded(hits):
    floor, lost, asked = Floor(CAPACITY), 0, 0
    for policy, lru in hits:
        if floor.behind:
            break
        lost, asked = lost + lru - policy, asked + ASKED
        floor.compare(policy, lru, ASKED)
        if not floor.behind:
            assert lost <= SLACK * CAPACITY + SHARE * asked
    assert lost <= SLACK * CAPACITY + SHARE * asked + ASKED  # the request that showed it


@given(st.lists(st.tuples(st.integers(0, ASKED), st.integers(0, ASKED)), max_size=400))
def test_a_policy_that_is_never_worse_is_never_replaced(hits):
    floor = Floor(CAPACITY)
    for one, other in hits:
        floor.compare(max(one, other), min(one, other), ASKED)
        assert not floor.behind


@pytest.mark.parametrize("doubt", [0.0, 0.02])
def test_requests_without_a_difference_do_not_raise_the_allowed_loss(doubt):
    def lost_before_lru_ranks(equal):
        floor, lost = Floor(CAPACITY), 0
        for _ in range(equal):
            floor.compare(ASKED // 2, ASKED // 2, ASKED, doubt)
        while not floor.behind:
            floor.compare(ASKED // 2 - 10, ASKED // 2, ASKED, doubt)
            lost += 10
        return lost

    assert lost_before_lru_ranks(200_000) <= 2.1 * lost_before_lru_ranks(0)


def test_requests_without_a_difference_do_not_raise_the_required_gain():
    def gained_before_the_policy_ranks(equal):
        floor, gained = Floor(CAPACITY), 0
        while not floor.behind:
            floor.compare(0, ASKED, ASKED)
        for _ in range(equal):
            floor.compare(ASKED // 2, ASKED // 2, ASKED)
        while floor.behind:
            floor.compare(ASKED // 2 + 10, ASKED // 2, ASKED)
            gained += 10
        return gained

    at_once = gained_before_the_policy_ranks(0)
    assert gained_before_the_policy_ranks(200_000) <= at_once + 2 * SLACK * CAPACITY


def test_a_loss_within_the_share_is_tolerated_for_ever():
    floor = Floor(CAPACITY)
    for request in range(200_000):
        floor.compare(ASKED // 2, ASKED // 2 + (request % 21 == 0), ASKED)  # 0.048 points
    assert not floor.behind


def test_it_ranks_again_once_its_shadow_is_ahead():
    floor, requests = Floor(CAPACITY), 0
    for _ in range(10_000):
        floor.compare(0, ASKED, ASKED)
    assert floor.behind
    while floor.behind:
        floor.compare(ASKED, 0, ASKED)
        requests += 1
    assert requests < (CREDIT + 5 * SLACK) * CAPACITY / ASKED


def test_gains_are_credit_and_the_credit_is_bounded():
    floor, requests = Floor(CAPACITY), 0
    for _ in range(10_000):
        floor.compare(ASKED, 0, ASKED)
    while not floor.behind:
        floor.compare(0, ASKED, ASKED)
        requests += 1
    least, most = CREDIT * CAPACITY / ASKED, (CREDIT + 2 * SLACK) * CAPACITY / ASKED
    assert least < requests < most


def test_orders_that_differ_by_chance_take_fewer_and_fewer_turns():
    draw, floor, falls = random.Random(1), Floor(CAPACITY), []
    for step in range(100_000):
        one, other = draw.choice(((0, ASKED), (ASKED, 0)))
        before = floor.falls
        floor.compare(one, other, ASKED)
        if floor.falls > before:
            falls.append(step)
    assert 1 <= len(falls) <= 8


def test_a_sample_that_may_differ_by_chance_needs_more():
    sure, unsure = Floor(CAPACITY), Floor(CAPACITY)
    for _ in range(40):
        sure.compare(90, ASKED, ASKED)
        unsure.compare(90, ASKED, ASKED, doubt=0.1)
    assert sure.behind
    assert not unsure.behind


def test_losses_and_gains_do_not_count_after_a_change():
    def requests_until(behind, floor, policy, lru):
        requests = 0
        while floor.behind != behind:
            floor.compare(policy, lru, ASKED)
            requests += 1
        return requests

    needed = []
    for more in (0, CAPACITY):
        floor = Floor(CAPACITY)
        floor.compare(0, int(SLACK * CAPACITY) + ASKED + more, ASKED)
        back = requests_until(False, floor, ASKED, 0)
        needed.append((back, requests_until(True, floor, 0, ASKED)))
    assert needed[0] == needed[1]
    # Back after 4 times the slack, behind again after one.
    assert needed[0] == (4 * SLACK * CAPACITY // ASKED + 1, SLACK * CAPACITY // ASKED + 1)
