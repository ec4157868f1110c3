"""The cut rule, on cases checked by hand; all numbers are tokens."""

import pytest

from sglang_canopy.config.tiers import TreeSettings
from sglang_canopy.policy.base import QUANTUM_TOKENS, tokens_kept


@pytest.mark.parametrize(
    ("length", "keep", "need", "page", "quantum", "kept_tokens"),
    [
        (100, 0, 30, 1, 1, 70),  # only the needed tokens
        (100, 0, 30, 1, 64, 36),  # at least a quantum
        (200, 0, 65, 1, 64, 135),  # more than a quantum is not rounded up to two
        (96, 0, 30, 16, 1, 64),  # down to whole pages
        (96, 50, 96, 16, 1, 64),  # the kept part, rounded up to a page
        (96, 96, 96, 16, 1, 80),  # evicts at least one page
        (90, 90, 1, 16, 1, 80),  # a partial last page is evicted whole
        (40, 0, 100, 16, 64, 0),  # all of a short leaf
    ],
)
def test_only_the_needed_tail_is_evicted(length, keep, need, page, quantum, kept_tokens) -> None:
    options = {"page_tokens": page, "quantum_tokens": quantum, "whole_nodes": False}
    assert tokens_kept(length, keep, need, **options) == kept_tokens


def test_whole_nodes_are_evicted_but_for_the_kept_head() -> None:
    assert tokens_kept(96, 0, 1, page_tokens=16, quantum_tokens=1, whole_nodes=True) == 0
    assert tokens_kept(96, 20, 1, page_tokens=16, quantum_tokens=1, whole_nodes=True) == 32


def test_the_default_quantum_is_that_of_a_server() -> None:
    assert TreeSettings().quantum_tokens == QUANTUM_TOKENS
