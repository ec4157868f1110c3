"""The prior, the search with a warm start, and the saved values."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_documents.calibration.saved import Calibration, Calibrations, Setting, calibrated_ratios
from canopy_documents.calibration.search import CostProfile, golden_section
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import SET_ASIDE_COUNTS


def test_the_prior_balances_compute_and_transfer_and_is_clipped():
    assert CostProfile(3.0, 1.0).prior_ratio(0.0, 1.0) == 0.25
    assert CostProfile(3.0, 1.0).prior_ratio(0.4, 1.0) == 0.4
    assert CostProfile(1.0, 9.0).prior_ratio(0.1, 0.5) == 0.5
    with pytest.raises(CanopyError, match="measure it again"):
        CostProfile(0.0, 1.0).prior_ratio(0.0, 1.0)


def equation_10_ttft_s(profile, ratio):
    """Equation 10: recompute and transfer overlap, other times do not depend on the ratio."""
    path_times_s = ratio * 1000 * profile.compute_s, (1 - ratio) * 1000 * profile.transfer_s
    return max(path_times_s) + profile.other_s


@given(st.floats(0.01, 10.0), st.floats(0.0, 10.0), st.floats(0.0, 10.0), st.floats(0.0, 1.0))
def test_no_ratio_is_faster_than_the_prior_in_equation_10(compute_s, transfer_s, other_s, ratio):
    profile = CostProfile(compute_s, transfer_s, other_s)
    prior_ttft_s = equation_10_ttft_s(profile, profile.prior_ratio(0.0, 1.0))
    assert prior_ttft_s <= equation_10_ttft_s(profile, ratio) * (1 + 1e-9)
    assert prior_ttft_s >= other_s


@given(
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.45),
    st.floats(0.55, 1.0),
    st.floats(0.1, 5.0),
)
def test_any_warm_start_finds_the_minimum_of_a_valley(best_ratio, start_ratio, low, high, slope):
    def valley(ratio):
        return abs(ratio - best_ratio) * (slope if ratio < best_ratio else 1.0)

    minimum = golden_section(valley, start_ratio, low, high, ratio_tolerance=0.01)
    assert abs(minimum.ratio - min(high, max(low, best_ratio))) <= 0.011
    assert all(low <= ratio <= high for ratio, _ in minimum.probes)
    assert minimum.probes[0][0] == min(high, max(low, start_ratio))


def test_each_probe_is_measured_once():
    probes = []
    golden_section(lambda r: probes.append(r) or (r - 0.3) ** 2, 0.2, 0.0, ratio_tolerance=0.01)
    assert len(probes) == len(set(probes))
    assert len(probes) <= 14


def test_rising_ttft_gives_the_lowest_ratio_and_equal_bounds_give_one_probe():
    rising = golden_section(lambda ratio: 1 + ratio, 0.5, 0.1, 1.0, ratio_tolerance=0.01)
    assert rising.ratio < 0.12
    assert golden_section(lambda ratio: ratio, 0.9, 0.3, 0.3).probes == ((0.3, 0.3),)


@pytest.mark.parametrize("bounds", [(0.5, 0.1), (-0.1, 1.0), (0.0, 1.1)])
def test_bounds_out_of_order_or_out_of_range_are_refused(bounds):
    with pytest.raises(CanopyError, match="0 <= min <= max <= 1"):
        golden_section(lambda ratio: ratio, 0.5, *bounds)


SETTING = Setting("m", "cpu-2", "float32", 1, "triton")
CALIBRATION = Calibration(0.2, 0.15, CostProfile(1e-4, 1e-5))


@pytest.fixture
def saved_path(tmp_path):
    return tmp_path / "ratio.json"


def test_calibrations_are_saved_by_tier_and_used_by_the_stores_tiers(saved_path):
    assert calibrated_ratios(None, SETTING) == {}
    Calibrations(saved_path).put(SETTING, "disk", CALIBRATION)
    Calibrations(saved_path).put(SETTING, "memory", dataclasses.replace(CALIBRATION, ratio=0.1))
    assert Calibrations(saved_path).get(SETTING, "disk") == CALIBRATION
    assert calibrated_ratios(str(saved_path), SETTING) == {"host": 0.1, "disk": 0.2}


@pytest.mark.parametrize(
    "changed_field",
    [
        {"model": "n"},
        {"device": "cpu-4"},
        {"dtype": "bfloat16"},
        {"tp_size": 2},
        {"backend": "fa3"},
    ],
)
def test_a_calibration_for_another_server_is_refused(saved_path, changed_field):
    Calibrations(saved_path).put(SETTING, "disk", CALIBRATION)
    other = dataclasses.replace(SETTING, **changed_field)
    flags = f"{other.dtype}, --tp-size {other.tp_size} and --attention-backend {other.backend}"
    with pytest.raises(CanopyError, match=f"nothing for this model with {flags} on {other.device}"):
        calibrated_ratios(str(saved_path), other)


@pytest.mark.parametrize("content", ["[]", "{", '{"a": 3}', '{"a": {"model": "m"}}'])
def test_a_file_that_is_no_calibration_is_set_aside(saved_path, content):
    saved_path.write_text(content)
    with pytest.raises(CanopyError, match="has nothing for this model"):
        calibrated_ratios(str(saved_path), SETTING)
    assert saved_path.with_name("ratio.json.bad").read_text() == content


@pytest.mark.parametrize(
    ("field", "bad_value"),
    [
        ("ratio", "half"),
        ("ratio", 1.5),
        ("ratio", True),
        ("r_min", None),
        ("r_min", float("nan")),
        ("tier", 3),
        ("tp_size", "2"),
        ("tp_size", True),
        ("model", None),
        ("profile", []),
        ("profile", {"compute_s": 1.0}),
        ("profile", {"compute_s": 1.0, "transfer_s": 1.0, "x": 1.0}),
        ("profile", {"compute_s": "1", "transfer_s": 1.0}),
        ("profile", {"compute_s": 1.0, "transfer_s": -1.0, "other_s": 0.0}),
    ],
)
def test_a_file_with_an_impossible_entry_is_set_aside(saved_path, field, bad_value):
    calibrations = Calibrations(saved_path)
    calibrations.put(SETTING, "memory", CALIBRATION)
    entries = json.loads(saved_path.read_text())
    entries[Calibrations.key(SETTING, "memory")][field] = bad_value
    saved_path.write_text(json.dumps(entries))
    SET_ASIDE_COUNTS.clear()
    assert calibrations.get(SETTING, "memory") is None
    assert not saved_path.exists()
    assert json.loads(saved_path.with_name("ratio.json.bad").read_text()).keys() == entries.keys()
    assert SET_ASIDE_COUNTS == {"ratio.json": 1}
    calibrations.put(SETTING, "memory", dataclasses.replace(CALIBRATION, ratio=0.3))
    assert calibrated_ratios(str(saved_path), SETTING) == {"host": 0.3}
