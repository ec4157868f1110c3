"""The floor and the meter judge by the cost of a miss."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.policy import registry, threshold_lru
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.records import Request
from sglang_canopy.reuse.depth_price import (
    MAX_SCALE,
    MIN_SCALE,
    MOVED,
    MeanPrice,
    moved,
    price,
)
from sglang_canopy.whatif.account import Account
from sglang_canopy.whatif.meter import LRU, Memory, Meter, MeterSetup
from sglang_canopy.whatif.sampled_caches import Sample

BLOCK = 1024
LONG = {"threshold_tokens": 5 * BLOCK}


class KeepShort(threshold_lru.ThresholdLRU):
    """The opposite of ``threshold-lru``: long conversations are evicted first."""

    def rank(self, leaf):
        return not super().rank(leaf)


def long_and_short(requests, shorts, between, longs, first):
    """Yield requests for ``shorts`` prompts of 2 blocks, in turn, and after every ``between`` of them
    one for the next of ``longs`` prompts of 10. All prompts of the kind ``first`` come before."""
    short = long = 0
    for step in range(-(longs if first == "long" else shorts), requests):
        if step % (between + 1) == between if step >= 0 else first == "long":
            long = (long + 1) % longs
            path = tuple(range(1000 * (long + 1), 1000 * (long + 1) + 10))
        else:
            short = (short + 1) % shorts
            path = (10**6 + 10 * short, 10**6 + 10 * short + 1)
        yield Request(
            time=float(step + shorts),
            path=path,
            block_tokens=BLOCK,
            prompt_tokens=BLOCK * len(path),
        )


def judged(name, requests, scale):
    """A meter that has seen all of ``requests``."""
    setup = MeterSetup((LRU,), (1.0,), configs={name: LONG}, memory_s=math.inf)
    meter = Meter(setup, Memory(100 * BLOCK), name)
    if scale is not None:
        meter.set_depth_scale(scale)
    tree = RadixTree(registry.make_policy(name, LONG), 100, BLOCK)
    for request in requests:
        meter.ended(request, tree.access(request.copy()) * BLOCK)
    return meter


def tokens_won(meter, name):
    return meter.shadow_tokens[name] - meter.shadow_tokens[LRU]


def test_a_policy_that_wins_tokens_and_loses_seconds_falls(monkeypatch):
    """One overlay of agents: +.15 points of tokens, +1.9 % of seconds, and the floor never fell."""
    monkeypatch.setattr(threshold_lru, "POLICY", KeepShort)
    meter = judged(
        "threshold-lru",
        long_and_short(4000, shorts=40, between=6, longs=3, first="short"),
        scale=1000.0,
    )
    assert tokens_won(meter, "threshold-lru") > 0
    assert meter.keeper == LRU
    assert meter.stats()["floor"]["falls"] >= 1


def test_a_policy_that_loses_tokens_and_wins_seconds_stays():
    requests = list(long_and_short(4000, shorts=30, between=8, longs=6, first="long"))
    meter = judged("threshold-lru", requests, scale=1000.0)
    assert tokens_won(meter, "threshold-lru") < 0
    assert meter.keeper == "threshold-lru"
    assert meter.stats()["floor"]["falls"] == 0
    assert judged("threshold-lru", requests, scale=None).keeper == LRU  # tokens alone


def test_hits_are_shown_next_to_the_seconds():
    meter = judged(
        "threshold-lru",
        long_and_short(4000, shorts=30, between=8, longs=6, first="long"),
        scale=1000.0,
    )
    assert meter.stats()["depth_scale_tokens"] == 1000
    rows = {row["policy"]: row for row in meter.rows()}
    lead = {
        key: rows["threshold-lru"][key] - rows[LRU][key] for key in ("hit_ratio", "saved_share")
    }
    assert lead["hit_ratio"] < 0 < lead["saved_share"]


@pytest.mark.parametrize("scale", [1000.0, 19_400.0, 200_000.0])
def test_a_share_of_seconds_equals_the_sum_over_tokens(scale):
    """c1 + c2 d for every token at depth d, against the sums of the account."""
    draw, account, paid, hit_paid, arm_paid = random.Random(1), Account(math.inf), 0.0, 0.0, 0.0

    def seconds(tokens):
        return sum(1.0 + (d + 0.5) / scale for d in range(tokens))

    for number in range(60):
        prompt = 16 * draw.randint(1, 200)
        hit, arm = (16 * draw.randint(0, prompt // 16) for _ in range(2))
        account.serve(float(number), prompt, hit, prompt - hit)
        sample = Sample(tuple(range(prompt // 16)), prompt, {"arm": arm // 16}, {"arm": arm})
        account.sample(sample, hit // 16, hit // 16, 16, 1)
        paid, hit_paid, arm_paid = (
            paid + seconds(prompt),
            hit_paid + seconds(hit),
            arm_paid + seconds(arm),
        )
    assert account.served_ratio(scale) == pytest.approx(hit_paid / paid)
    assert account.lead("arm", scale) == pytest.approx((arm_paid - hit_paid) / paid)
    assert account.error("arm", scale) > 0.0


@given(st.floats(1.0, 1e7), st.floats(1.0, 1e7))
def test_a_depth_scale_stays_in_its_range_and_moves_in_leaps(scale, measured):
    before = moved(math.inf, scale)
    after = moved(before, measured)
    assert MIN_SCALE <= after <= MAX_SCALE
    assert after == before or max(after / before, before / after) >= MOVED * (1 - 1e-9)
    assert moved(before, 0.0) == moved(before, math.nan) == before


def test_prices_of_whole_prompts_are_on_average_their_tokens():
    mean, prompts = MeanPrice(), [1000, 20_000, 100_000]
    for tokens in prompts:
        mean.add(tokens)
    for scale in (1000.0, math.inf):
        total = sum(price(tokens, scale) for tokens in prompts)
        assert total / mean.at(scale) == pytest.approx(sum(prompts))
    assert MeanPrice().at(1000.0) == 1.0


def test_the_mean_price_follows_the_traffic():
    mean = MeanPrice()
    for _ in range(50_000):
        mean.add(1000)
    for _ in range(50_000):
        mean.add(100_000)
    assert mean.at(1000.0) == pytest.approx(price(100_000, 1000.0) / 100_000, rel=0.1)
