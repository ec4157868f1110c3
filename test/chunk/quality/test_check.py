"""Answers that differ for the quality meter."""

import pytest

torch = pytest.importorskip("torch")

from canopy_chunks.quality.checker import differ  # noqa: E402
from canopy_chunks.quality.tenant_meter import TIE_NATS  # noqa: E402


def row(*logits: float) -> torch.Tensor:
    return torch.tensor(logits)


def test_a_token_that_is_nearly_as_likely_is_no_other_answer() -> None:
    rows = [row(9, 0, 0), row(0, 5, 5 - 0.9 * TIE_NATS)]
    assert not differ([0, 1], [0, 2], rows)


def test_a_token_that_is_much_less_likely_is_another_answer() -> None:
    rows = [row(9, 0, 0), row(0, 5, 5 - 1.1 * TIE_NATS)]
    assert differ([0, 1], [0, 2], rows)


def test_only_the_first_difference_counts() -> None:
    rows = [row(5, 4.9, 0), row(9, 0, 0)]
    assert not differ([0, 0], [1, 2], rows)


def test_equal_answers_do_not_differ() -> None:
    assert not differ([0, 1], [0, 1], [row(1, 0), row(0, 1)])
