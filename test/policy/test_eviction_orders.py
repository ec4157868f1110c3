"""Eviction order of simple policies, and the options that every policy refuses."""

import pytest

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy
from support.radix_cases import play

LINEAR = {"cost": "linear"}
SHORT, GHOSTS, NONE = {"threshold_tokens": 25}, {"ghost_share": 9.0}, {"ghost_share": 0.0}


def paths(text):
    """Return the paths in ``text``: "12 3" is (1, 2) and (3,); "A" is 10, "B" 11."""
    return [tuple(int(c, 16) for c in word) for word in text.split()]


@pytest.mark.parametrize(
    ("policy", "options", "capacity", "served", "evicted"),
    [
        # Least recent first; a parent is evicted after its children, at its own age; deepest blocks first.
        ("lru", {}, 3, "1 2 3 1 4", "2"),
        ("lru", {}, 4, "12 9 13 5 6 7 8", "2 9 3 1"),
        ("lru", {}, 3, "123 4 5", "3 2"),
        # Use does not matter; 1 is oldest but has 3 below it; what comes back is new.
        ("fifo", {}, 3, "1 2 3 1 1 4 5", "1 2"),
        ("fifo", {}, 3, "1 2 13 4 5 6", "2 3 1"),
        ("fifo", {}, 2, "1 2 3 1 4", "1 2 3"),
        # Fewest uses; equal uses by recency; a new leaf before an old favourite; 1 is used thrice.
        ("lfu", {}, 3, "1 1 2 3 3 4", "2"),
        ("lfu", {}, 2, "1 2 1 2 3", "1"),
        ("lfu", {}, 2, "1 1 2 3 4", "2 3"),
        ("lfu", {}, 5, "12 13 14 5 5 6 7 8", "2 3 4"),
        # Used once before used twice; then by recency; 1 is demoted and stands behind 3; 1 again.
        # Frequency decides; each eviction lifts the clock, so 4 has 1's value but 1 is older.
        ("gdfs", LINEAR, 3, "1 1 2 3 4", "2"),
        ("gdfs", LINEAR, 2, "1 1 1 2 3 4 5 6 7", "2 3 1 4 5"),
        # A deep token has a higher value; 1 surfaces with the clock of its last use.
        ("gdfs", {"attention_tokens": 10.0}, 3, "12 9 3", "9"),
        ("gdfs", LINEAR, 3, "12 9 3", "2"),
        ("gdfs", LINEAR, 4, "12 13 9 9 9 5 6 7 8", "2 3 1 5"),
        # Two further uses move 1 to the main queue, and so does a return from the ghosts.
        ("s3fifo", {}, 2, "1 1 2 3", "1"),
        ("s3fifo", {}, 2, "1 1 1 2 3 4", "2 3"),
        ("s3fifo", {"ghost_share": 2.0}, 2, "1 2 3 1 4 5", "1 2 3 4"),
        ("s3fifo", NONE, 2, "1 2 3 1 4 5", "1 2 3 1"),
        # 4 joins 2 in the main queue; 2 is the oldest there and is evicted unless it was used again.
        ("s3fifo", {"small_share": 0.5}, 3, "1 1 1 2 2 2 3 4 4 4 5 6", "1 3 2"),
        ("s3fifo", {"small_share": 0.5}, 3, "1 1 1 2 2 2 3 4 4 4 5 2 6", "1 3 4"),
        # 123 is cut to 1; when it returns, 2 is a ghost, so 23 enters the main queue.
        ("s3fifo", GHOSTS, 4, "123 7 8 9 123 A B", "3 2 7 8 9 A"),
        ("s3fifo", NONE, 4, "123 7 8 9 123 A B", "3 2 7 8 9 3"),
        # Short conversations first; then LRU; 1 counts as the head of 123; the output counts.
        ("threshold-lru", SHORT, 5, "123 4 5 6", "4"),
        ("threshold-lru", SHORT, 6, "123 456 7", "3"),
        ("threshold-lru", SHORT, 5, "123 1 9 456 8 7", "9 3 2 8"),
        ("threshold-lru", {**SHORT, "output_tokens": 5}, 3, "12 4 5", "4"),
        ("wa", {}, 3, "1 2 3 1 4", "2"),  # without samples it is LRU
        ("wa", {}, 4, "12 9 13 5 6 7 8", "2 9 3 1"),
        ("wa", {"model": "exponential"}, 4, "12 9 13 5 6 7 8", "2 9 3 1"),
    ],
)
def test_evicts_in_order(policy, options, capacity, served, evicted):
    assert play(policy, capacity, paths(served), **options) == paths(evicted)


@pytest.mark.parametrize(
    ("policy", "options", "names"),
    [
        ("canopy-tlru", {"caching": "never"}, "caching"),
        ("canopy-tlru", {"next_prompt_tokens": -1.0}, "must be at least 0, got -1.0"),
        ("canopy-tlru", {"threshold_tokens": 5.0, "ttft_ms": 5.0}, "only one"),
        ("canopy-tlru", {"ttft_ms": -1.0}, "ttft_ms"),
        ("canopy-tlru", {"ttft_percentile": 100.0}, "ttft_percentile"),
        ("etlru", {"floor": 2.0}, "floor"),
        ("etlru", {"ttft_ms": 0.0}, "ttft_ms"),
        ("etlru", {"ttft_ms": 5.0, "ttft_percentile": 5.0}, "only one"),
        ("etlru", {"window_s": -1.0}, "window_s"),
        ("gdfs", {"attention_tokens": 0}, "attention_tokens"),
        ("gdfs", {"cost": "cubic"}, "linear, quadratic"),
        ("s3fifo", {"promote_uses": 4}, "promote_uses"),
        ("s3fifo", {"small_share": -0.1}, "small_share"),
        ("sglang-tlru", {"next_prompt_tokens": -1}, "next_prompt_tokens' must be at least 0"),
        ("sglang-tlru", {"threshold_tokens": -1}, "threshold_tokens' must be at least 0, got -1"),
        ("threshold-lru", {"threshold_tokens": -1}, "threshold_tokens"),
        ("wa", {"categories": "tenth"}, "refined, type-turn"),
        ("wa", {"max_categories": 3}, "max_categories"),
        ("wa", {"min_samples": 0}, "min_samples"),
        ("wa", {"model": "exponential", "reading": "hazard"}, "reading"),
        ("wa", {"model": "magic"}, "survival, exponential"),
        ("wa", {"own_gaps": 3}, "own_gaps"),
        ("wa", {"window_s": 0.0}, "window_s"),
        ("wa", {"window_s": float("nan")}, "window_s"),
        ("wa", {"windows": 3}, "windows"),
    ],
)
def test_refuses_bad_options_by_name(policy, options, names):
    with pytest.raises(CanopyError, match=names):
        make_policy(policy, options)
