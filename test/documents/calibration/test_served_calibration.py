"""Calibration through a server: the result if compute, transfer or neither dominates."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from canopy_documents.calibration.served import ServedPrompts, calibrate_server
from sglang_canopy.errors import CanopyError

DOCUMENTS, DOCUMENT_TOKENS = 6, 100
TOTAL_TOKENS = DOCUMENTS * DOCUMENT_TOKENS


def make_send_prompt(ttft_s, tier: str = "disk"):
    """Return ``send_prompt`` for a server with a TTFT of ``ttft_s(tokens in documents, ratio)`` seconds."""
    encoded_documents: set[tuple[int, ...]] = set()

    def send_prompt(ids, bounds, ratio):
        documents = [tuple(ids[start:end]) for start, end in zip(bounds[::2], bounds[1::2])]
        if ratio is None:
            encoded_documents.update(documents)
            return 1.0, {"fused": False, "why": "too few of its documents are stored"}
        assert encoded_documents >= set(documents), "a document that was never sent"
        tokens = sum(map(len, documents))
        return ttft_s(tokens, ratio), {"fused": True, f"reused_{tier}": int((1 - ratio) * tokens)}

    return send_prompt


def calibrate(ttft_s, tier: str = "disk"):
    prompt_sizes = ((10, 200), 2, DOCUMENTS, DOCUMENT_TOKENS)
    prompts = ServedPrompts(make_send_prompt(ttft_s, tier), lambda: None, *prompt_sizes, repeats=1)
    prompts.learn()
    calibration, _ = calibrate_server(prompts, 0.15, ratio_tolerance=0.02)
    return calibration, prompts


def overlapped(compute_s: float, transfer_s: float, other_s: float):
    """Equation 10 for n tokens and ratio r: transfer overlaps compute."""
    return lambda n, r: max(r * n * compute_s, (1 - r) * n * transfer_s) + other_s


def sequential(compute_s: float, transfer_s: float, other_s: float):
    """The TTFT for n tokens and ratio r if compute begins after all transfers."""
    return lambda n, r: r * n * compute_s + (1 - r) * n * transfer_s + other_s


token_times_s = st.floats(1e-5, 1e-2)


@given(token_times_s, token_times_s, st.floats(0.0, 5.0))
def test_with_overlap_the_best_ratio_balances_both_times(compute_s, transfer_s, other_s) -> None:
    balance = transfer_s / (compute_s + transfer_s)
    # Otherwise rounding hides the difference between ratios.
    assume(TOTAL_TOKENS * max(compute_s, transfer_s) > 1e-3 * other_s)
    calibration, _ = calibrate(overlapped(compute_s, transfer_s, other_s))
    assert calibration.ratio == pytest.approx(max(0.15, balance), abs=0.021)
    assert calibration.profile.other_s >= 0.0


@pytest.mark.parametrize(("compute_s", "move_s", "ratio"), [(1e-3, 1e-4, 0.15), (1e-4, 1e-3, 1.0)])
def test_without_overlap_the_best_ratio_is_a_bound(compute_s, move_s, ratio) -> None:
    calibration, _ = calibrate(sequential(compute_s, move_s, 0.3))
    assert calibration.ratio == pytest.approx(ratio, abs=0.021)


def test_the_profile_separates_fixed_costs_from_the_transfer() -> None:
    calibration, _ = calibrate(overlapped(2e-3, 5e-4, 3.0))
    assert calibration.profile.compute_s == pytest.approx(2e-3, rel=1e-6)
    assert calibration.profile.transfer_s == pytest.approx(5e-4, rel=1e-6)
    assert calibration.profile.other_s == pytest.approx(3.0, rel=1e-6)


def test_the_tier_is_the_source_of_the_reused_kv() -> None:
    assert calibrate(overlapped(1e-3, 1e-4, 0.1), tier="host")[1].tier == "memory"
    assert calibrate(overlapped(1e-3, 1e-4, 0.1), tier="disk")[1].tier == "disk"


def test_a_prompt_that_is_not_fused_ends_the_calibration_with_the_reason() -> None:
    report = {"fused": False, "why": "planning failed"}
    prompts = ServedPrompts(lambda *_: (1.0, report), lambda: None, (0, 9), 1, 2, 5)
    with pytest.raises(CanopyError, match="planning failed"):
        calibrate_server(prompts, 0.15)
