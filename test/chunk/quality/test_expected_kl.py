"""The ratio by the number of documents keeps the expected KL below the operator's bound."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from canopy_chunks.quality.expected_kl import MAX_RATIO, ExpectedKL  # noqa: E402

scales = st.floats(0.01, 20)
bounds = st.floats(0.001, 1)


@given(scales, st.integers(1, 200), bounds)
def test_the_ratio_is_the_smallest_in_hundredths_that_keeps_the_bound(scale, documents, bound):
    expected = ExpectedKL(scale)
    ratio = expected.ratio_for(documents, bound)
    assert ratio <= MAX_RATIO or ratio == 1
    assert expected.at(documents, ratio) <= bound * (1 + 1e-6)
    if 0 < ratio < 1:
        assert expected.at(documents, ratio - 0.011) > bound
    if ratio == 1:
        assert expected.at(documents, MAX_RATIO) > bound


@given(scales, bounds)
def test_more_documents_never_get_a_smaller_ratio(scale, bound):
    ratios = [ExpectedKL(scale).ratio_for(n, bound) for n in range(1, 40)]
    assert ratios[0] == 0  # a first document is exact
    assert all(a <= b for a, b in itertools.pairwise(ratios))


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_an_unmeasured_scale_disables_reuse(scale):
    assert ExpectedKL(scale).ratio_for(2, 0.05) == 1
