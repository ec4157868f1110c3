"""Copies ahead of eviction, simulated: no wait where the link keeps up, and exclusive tiers."""

from __future__ import annotations

import pytest

from canopy_lab.sim.system import SystemConfig, TierSpec, simulate_system
from sglang_canopy.policy.copy_window import CopyWindow, lowest_ranked
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf
from support.systems import KV, profile, request


def run(trace, **config):
    given = {"device_tokens": 400, "quantum_tokens": 1, **config}
    return simulate_system(trace, SystemConfig(**given), profile())


def host(tokens: int, write_bytes_per_s: float) -> TierSpec:
    return TierSpec(tokens * KV, 1e9, write_bytes_per_s)


def in_turn(names: int, rounds: int):
    """Prompts of 100 tokens in turn, 10 s apart."""
    return [
        request(10.0 * (names * turn + one), range(100 * one + 1, 100 * one + 11))
        for turn in range(rounds)
        for one in range(names)
    ]


def test_copies_are_made_while_nobody_waits_for_them() -> None:
    trace = in_turn(6, 3)
    tier = host(400, 1e5)  # 100 tokens take a second
    free = run(trace, host=host(400, 1e15), write_policy="write_back")
    back = run(trace, host=tier, write_policy="write_back")
    config = {"write_policy": "copy_ahead", "write_policy_config": {"tokens": 150}}
    ahead = run(trace, host=tier, **config)
    assert back.mean_ttft_s > free.mean_ttft_s + 0.5
    assert ahead.mean_ttft_s == pytest.approx(free.mean_ttft_s, abs=0.02)


def test_the_tiers_hold_different_tokens() -> None:
    """Six prompts in turn fit on both tiers together, and on neither alone."""
    trace = in_turn(6, 4)
    tier = host(400, 1e9)
    config = {"write_policy": "copy_ahead", "write_policy_config": {"tokens": 100}}
    assert run(trace, host=tier).token_hit_ratio == 0
    assert run(trace, host=tier, **config).token_hit_ratio > 0.7


def test_a_copy_in_flight_is_waited_for() -> None:
    trace = [request(0.0, range(1, 31)), request(0.31, range(101, 131))]
    slow = host(400, 1e5)
    config = {"write_policy": "copy_ahead", "write_policy_config": {"tokens": 200}}
    ahead = run(trace, device_tokens=330, host=slow, **config)
    through = run(trace, device_tokens=330, host=slow)
    assert ahead.ttft_s[1] > through.ttft_s[1] + 0.5


def test_the_window_follows_what_enters_within_bounds() -> None:
    window = CopyWindow(None, 64_000)
    assert window.tokens == 1000
    free = 20_000
    for _ in range(5):  # nothing is evicted yet
        window.step(free)
        free -= 2000
    steady = window.tokens
    assert 4000 <= steady <= 16_000
    window.evicted(2000)
    window.waited()
    window.step(free)
    assert window.tokens > steady
    for _ in range(50):
        window.evicted(50_000)
        window.waited()
        window.step(free)
    assert window.tokens == 16_000
    for _ in range(90_000):
        window.evicted(10)
        window.step(free)
    assert window.tokens == 1000


def test_a_large_step_is_forgotten_by_what_enters_and_not_by_steps() -> None:
    """A prompt of 2,000 tokens, then 200 of decoding."""
    window = CopyWindow(None, 64_000)
    window.step(10_000)
    window.step(8000)
    before = window.tokens
    for token in range(1, 201):
        window.step(8000 - token)
    assert window.tokens > 0.8 * before


def test_the_window_covers_what_is_known_to_enter() -> None:
    window = CopyWindow(None, 64_000)
    window.step(9000)
    assert not window.lacks(free=9000, covered=0)
    window.step(9000, due=12_000)
    assert window.tokens == 12_000
    assert window.lacks(free=9000, covered=2900)
    assert not window.lacks(free=9000, covered=3000)
    assert window.batch == 12_000
    window.step(9000, due=90_000)
    assert window.tokens == 16_000


def test_a_fixed_window_stays_within_half_of_the_smaller_tier() -> None:
    assert CopyWindow(500, 10_000).tokens == 500
    assert CopyWindow(50_000, 10_000).tokens == 5000


def test_looking_ahead_leaves_the_policy_as_it_was() -> None:
    policy = make_policy("lru", {})
    parent, leaves = Leaf(0, 40), [Leaf(40, 10), Leaf(40, 10)]
    for time, leaf in enumerate((*leaves, parent)):
        leaf.last_access = float(time)
    for leaf in leaves:
        policy.admit(leaf, 9.0)

    def exposed(leaf, gone):
        return parent if leaf in leaves and set(leaves) <= gone else None

    found = lowest_ranked(policy, 1000, 9.0, exposed)
    assert [victim.leaf for victim in found] == [*leaves, parent]
    assert set(policy.leaves()) == set(leaves)
    assert [victim.leaf for victim in lowest_ranked(policy, 5, 9.0, exposed)] == leaves[:1]
    assert set(policy.leaves()) == set(leaves)
