"""Sums of a sample against the sums over all, fading, and the stated error of the sample."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.whatif.account import Account
from sglang_canopy.whatif.sampled_caches import Sample, SampledCaches

BLOCK = 16


def fill(account, one_in, seed, requests=400, memory_between_s=0.0):
    """Requests of 20 blocks: the server and the control have the first 5, an arm 5 to 20."""
    draw, sampler, more = random.Random(seed), SampledCaches(one_in), 0
    for number in range(requests):
        path = [draw.randrange(1 << 62) for _ in range(20)]
        reach = draw.choice((5, 10, 20))
        more += reach - 5
        account.serve(number * memory_between_s, 20 * BLOCK, 5 * BLOCK, 15 * BLOCK)
        blocks = sampler.sampled(path)
        if blocks:
            had = len(sampler.sampled(path[:5]))
            arm = len(sampler.sampled(path[:reach]))
            stands_for = BLOCK * one_in
            sample = Sample(
                tuple(blocks), len(blocks) * stands_for, {"arm": arm}, {"arm": arm * stands_for}
            )
            account.sample(sample, had, had, BLOCK, one_in)
    return more / (20 * requests)


def test_all_example_blocks_are_true():
    account = Account(math.inf)
    truth = fill(account, 1, seed=1)
    assert account.served_ratio() == pytest.approx(0.25)
    assert account.lead("arm") == pytest.approx(truth)
    assert account.sampling_error("arm") == 0.0
    assert account.error("arm") > 0.0
    assert account.lead("nobody") == pytest.approx(-0.25)


@pytest.mark.parametrize("one_in", [2, 8, 32])
def test_a_sample_is_unbiased_with_the_stated_error(one_in):
    off, said = [], []
    for seed in range(20):
        account = Account(math.inf)
        truth = fill(account, one_in, seed)
        off.append(account.lead("arm") - truth)
        said.append(account.sampling_error("arm"))
    spread = math.sqrt(sum(one**2 for one in off) / 20)
    assert abs(sum(off) / 20) < spread
    assert spread < math.sqrt(sum(one**2 for one in said) / 20) < 3 * spread


def test_a_prefix_hit_by_every_cache_changes_no_estimate():
    said = []
    for hot in range(2):
        account = Account(math.inf)
        for _ in range(200):
            account.serve(0.0, 40 * BLOCK, 30 * BLOCK, 10 * BLOCK)
            blocks = (7, *(random.Random(1).randrange(1 << 62) for _ in range(5)))[1 - hot :]
            had, asked = hot, len(blocks) * 2 * BLOCK
            sample = Sample(blocks, asked, {"arm": had + 2}, {"arm": (had + 2) * 2 * BLOCK})
            account.sample(sample, had, had, BLOCK, 2)
        said.append(account.lead("arm"))
    assert said[0] == pytest.approx(said[1]) == pytest.approx(0.1)


@given(st.integers(0, 1000), st.sampled_from([1, 4]))
def test_old_requests_fade_at_any_weight(seed, one_in):
    """After a thousand memories nothing has overflowed, and only recent requests count."""
    account = Account(10.0)
    fill(account, one_in, seed, requests=50)
    old = account.served_ratio()
    assert old == pytest.approx(0.25)
    account.serve(10_000.0, 100, 80, 0)
    assert account.served_ratio() == pytest.approx(0.8)
    account.serve(10_010.0, 100, 0, 0)
    assert account.served_ratio() == pytest.approx(0.8 * math.exp(-1) / (1 + math.exp(-1)))


def test_a_block_that_is_won_and_then_lost_again_adds_no_sampling_error():
    """Won and lost tokens of one block cancel; the missed tokens are of other blocks."""
    account, (first, *others) = Account(math.inf), [3 << 40, 5 << 40, 7 << 40, 11 << 40]

    def one(blocks, served, control, arm):
        account.serve(0.0, 2 * BLOCK, served * 2 * BLOCK, (1 - served) * 2 * BLOCK)
        sample = Sample(blocks, 2 * BLOCK, {"arm": arm}, {"arm": arm * 2 * BLOCK})
        account.sample(sample, control, served, BLOCK, 2)

    one((first,), 1, 0, 1)
    for block in others:
        one((block,), 0, 0, 0)
    assert account.sampling_error("arm") > 0.0
    one((first,), 1, 1, 0)
    assert account.sampling_error("arm") == 0.0
    assert account.lead("arm") == 0.0


def test_a_rescaled_account_states_the_same_error():
    """Weights are rescaled after 25 memories; the error of earlier requests fades with their tokens."""
    stated = []
    for between_s in (0.0, 26.0):  # in one run the weights are rescaled, in the other they are not
        account = Account(1.0)
        fill(account, 4, seed=1, requests=60)
        account.serve(between_s, 0, 0, 0)
        errors = account.sampling_error("arm"), account.error("arm")
        stated.append((*errors, account.lead("arm"), account.sampled_ratio("arm")))
    assert min(stated[0]) > 0.0
    assert stated[1] == pytest.approx(stated[0])
