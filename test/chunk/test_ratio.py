"""The prior, the search with a warm start, the quality floor, and what is saved."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_chunks.ratio import (
    Calibration,
    Calibrations,
    CostProfile,
    Setting,
    golden_section,
    quality_floor,
)
from sglang_canopy.errors import CanopyError


def test_the_prior_balances_compute_and_transfer_and_is_clipped():
    assert CostProfile(3.0, 1.0).prior(0.0, 1.0) == 0.25
    assert CostProfile(3.0, 1.0).prior(0.4, 1.0) == 0.4
    assert CostProfile(1.0, 9.0).prior(0.1, 0.5) == 0.5
    with pytest.raises(CanopyError, match="measure it again"):
        CostProfile(0.0, 1.0).prior(0.0, 1.0)


def test_a_prompts_time_is_the_slower_path_and_what_no_ratio_changes():
    profile = CostProfile(compute_s=3.0, transfer_s=1.0, other_s=7.0)
    assert profile.ttft(100, 0.0) == 107.0
    assert profile.ttft(100, 0.25) == 82.0
    assert profile.ttft(100, 0.5) == 157.0
    assert profile.ttft(0, 0.5) == 7.0


@given(st.floats(0.01, 10.0), st.floats(0.0, 10.0), st.floats(0.0, 10.0), st.floats(0.0, 1.0))
def test_no_ratio_is_faster_than_the_prior_in_equation_10(compute, transfer, other, ratio):
    profile = CostProfile(compute, transfer, other)
    best = profile.ttft(1000, profile.prior(0.0, 1.0))
    assert best <= profile.ttft(1000, ratio) * (1 + 1e-9)
    assert best >= other


@given(
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.45),
    st.floats(0.55, 1.0),
    st.floats(0.1, 5.0),
)
def test_any_warm_start_finds_the_minimum_of_a_valley(best, start, low, high, steep):
    def valley(r):
        return abs(r - best) * (steep if r < best else 1.0)

    found = golden_section(valley, start, low, high, tolerance=0.01)
    assert abs(found.ratio - min(high, max(low, best))) <= 0.011
    assert all(low <= r <= high for r, _ in found.probes)
    assert found.probes[0][0] == min(high, max(low, start))


def test_a_probe_costs_one_measurement_a_step():
    calls = []
    golden_section(lambda r: calls.append(r) or (r - 0.3) ** 2, 0.2, 0.0, 1.0, tolerance=0.01)
    assert len(calls) == len(set(calls))
    assert len(calls) <= 14


def test_rising_ttft_gives_the_floor_and_equal_bounds_one_probe():
    rising = golden_section(lambda r: 1 + r, 0.5, 0.1, 1.0, tolerance=0.01)
    assert rising.ratio < 0.12
    assert golden_section(lambda r: r, 0.9, 0.3, 0.3).probes == ((0.3, 0.3),)


@pytest.mark.parametrize("bounds", [(0.5, 0.1), (-0.1, 1.0), (0.0, 1.1)])
def test_bounds_out_of_order_are_refused(bounds):
    with pytest.raises(CanopyError, match="0 <= min <= max <= 1"):
        golden_section(lambda r: r, 0.5, *bounds)


def test_the_floor_is_where_enough_of_the_error_is_gone():
    measured = [(0.3, 0.01), (0.0, 0.2), (0.1, 0.1)]
    assert quality_floor(measured, keep=0.5) == pytest.approx(0.1)
    assert quality_floor(measured, keep=0.95) == pytest.approx(0.3)
    assert quality_floor(measured, keep=0.725) == pytest.approx(0.2)
    assert quality_floor(measured, keep=0.99) == 1.0
    assert quality_floor(measured, target=0.5) == 0.0
    with pytest.raises(CanopyError, match="ratio 0"):
        quality_floor([(0.1, 0.1)])


def test_calibrations_are_kept_by_model_device_and_tier(tmp_path):
    path = tmp_path / "ratio.json"
    one = Calibration(0.2, 0.15, CostProfile(1e-4, 1e-5))
    fast, slow = Setting("m", "cpu-2", "float32"), Setting("m", "cpu-4", "float32")
    Calibrations(path).put(fast, "disk", one)
    Calibrations(path).put(fast, "memory", Calibration(0.1, 0.1, CostProfile(1.0, 1.0)))
    assert Calibrations(path).get(fast, "disk") == one
    assert Calibrations(path).get(slow, "disk") is None
    path.write_text("[]")
    assert Calibrations(path).get(fast, "disk") is None
    assert (tmp_path / "ratio.json.bad").read_text() == "[]"


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"tp_size": 2}])
def test_a_calibration_of_another_dtype_or_split_is_another_one(tmp_path, change):
    saved = Calibrations(tmp_path / "ratio.json")
    made = Setting("m", "cpu-2", "float32")
    saved.put(made, "disk", Calibration(0.2, 0.15, CostProfile(1e-4, 1e-5)))
    assert saved.get(dataclasses.replace(made, **change), "disk") is None
    assert saved.settings("m", "cpu-2") == [made]


def test_calibrations_of_a_version_that_did_not_say_are_not_used(tmp_path):
    path = tmp_path / "ratio.json"
    entry = {"model": "m", "device": "cpu-2", "tier": "disk", "ratio": 0.2, "r_min": 0.1}
    entry["profile"] = {"compute_s": 1e-4, "transfer_s": 1e-5}
    path.write_text(json.dumps({"0123456789abcdef": entry, "other": "junk"}))
    assert Calibrations(path).get(Setting("m", "cpu-2", "float32"), "disk") is None
    assert Calibrations(path).settings("m", "cpu-2") == [None]


def test_a_model_is_calibrated_on_each_tier(tmp_path):
    torch = pytest.importorskip("torch")
    from canopy_chunks.calibrate import calibrate, on_tier
    from canopy_chunks.chunk import FusedPrompt, Placed
    from canopy_chunks.encode import encode
    from canopy_chunks.model import Shape, random_model

    model = random_model(Shape(2, 2, 1, 16, 32, 50, 1e-5), 64)
    ids = torch.arange(45) % 50
    chunks = tuple(Placed(encode(model, ids[a : a + 20].tolist()), a) for a in (0, 20))
    for tier in ("memory", "disk"):
        prompt = on_tier(FusedPrompt(ids, chunks), tier, tmp_path)
        found, search = calibrate(model, [prompt], 0.1, 1.0, "first-k", 0.3)
        assert 0.1 <= found.ratio <= 1.0
        assert found.profile.compute_s > 0
        assert found.profile.transfer_s > 0
        assert found.profile.other_s > 0  # the question at the least is computed at every ratio
        assert search.ttft_s == min(t for _, t in search.probes)
    with pytest.raises(CanopyError, match="allowed are memory, disk"):
        on_tier(prompt, "tape", tmp_path)
