"""Eviction order of simple policies, and the options that every policy refuses."""

import pytest

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy
from support.radix_cases import serve_paths

SHORT_THRESHOLD = {"threshold_tokens": 25}


def paths_of(text):
    """Return the paths in ``text``: "12 3" is (1, 2) and (3,); "A" is 10, "B" 11."""
    return [tuple(int(digit, 16) for digit in word) for word in text.split()]


@pytest.mark.parametrize(
    ("policy", "options", "capacity_blocks", "requests", "evicted"),
    [
        # Least recent first; a parent is evicted after its children, at its own age; deepest blocks first.
        ("lru", {}, 3, "1 2 3 1 4", "2"),
        ("lru", {}, 4, "12 9 13 5 6 7 8", "2 9 3 1"),
        ("lru", {}, 3, "123 4 5", "3 2"),
        # Use does not matter; 1 is oldest but has 3 below it; what returns is new.
        ("fifo", {}, 3, "1 2 3 1 1 4 5", "1 2"),
        ("fifo", {}, 3, "1 2 13 4 5 6", "2 3 1"),
        ("fifo", {}, 2, "1 2 3 1 4", "1 2 3"),
        # Fewest uses; equal uses by recency; a new leaf before an old favourite; 1 is used thrice.
        ("lfu", {}, 3, "1 1 2 3 3 4", "2"),
        ("lfu", {}, 2, "1 2 1 2 3", "1"),
        ("lfu", {}, 2, "1 1 2 3 4", "2 3"),
        ("lfu", {}, 5, "12 13 14 5 5 6 7 8", "2 3 4"),
        # Short conversations first; then LRU; 1 counts as the head of 123; the output counts.
        ("threshold-lru", SHORT_THRESHOLD, 5, "123 4 5 6", "4"),
        ("threshold-lru", SHORT_THRESHOLD, 6, "123 456 7", "3"),
        ("threshold-lru", SHORT_THRESHOLD, 5, "123 1 9 456 8 7", "9 3 2 8"),
        ("threshold-lru", {**SHORT_THRESHOLD, "output_tokens": 5}, 3, "12 4 5", "4"),
        ("wa", {}, 3, "1 2 3 1 4", "2"),  # without samples it is LRU
        ("wa", {}, 4, "12 9 13 5 6 7 8", "2 9 3 1"),
        ("wa", {"model": "exponential"}, 4, "12 9 13 5 6 7 8", "2 9 3 1"),
    ],
)
def test_blocks_are_evicted_in_order(policy, options, capacity_blocks, requests, evicted):
    assert serve_paths(policy, capacity_blocks, paths_of(requests), **options) == paths_of(evicted)


@pytest.mark.parametrize(
    ("policy", "options", "message"),
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
def test_bad_options_are_refused_by_name(policy, options, message):
    with pytest.raises(CanopyError, match=message):
        make_policy(policy, options)
