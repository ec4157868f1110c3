"""Profiles of engines: shipped profiles, and refused ones."""

import json

import pytest

from canopy_lab.sim.sweep import prefill_s
from canopy_lab.sim.system import EngineProfile, load_profile, profile_names
from canopy_lab.sim.system.engine_profile import PUBLISHED
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from support.systems import profile


def test_every_shipped_profile_is_valid_and_names_its_source():
    assert profile_names()
    for name in profile_names():
        shipped = load_profile(name)
        assert shipped.sources
        assert shipped.prefill_s(1024) > shipped.prefill_s(64) > 0
        assert shipped.decode_s(8, 1024) > 0
        assert EngineProfile.from_json(json.loads(json.dumps(shipped.to_json()))) == shipped
        if "H100" in shipped.device or "A100" in shipped.device:
            assert shipped.source == PUBLISHED


def test_costs_are_interpolated_between_points_and_continued_beyond_them():
    costs = profile(
        decode_batch=(1, 3), decode_context_tokens=(0, 100),
        decode_step_s=((1.0, 2.0), (3.0, 4.0)),
    )  # fmt: skip
    assert costs.decode_s(2, 50) == pytest.approx(2.5)
    assert costs.decode_s(1, 200) == pytest.approx(3.0)
    assert costs.prefill_s(2000) == pytest.approx(2.0)


def test_attention_grows_with_pairs_of_tokens():
    costs = profile(attention_s=((1.0, 1001.0), (500500.0, 1500500.0)))  # 1 s a pair
    assert costs.attend_s(100, 0) == pytest.approx(5050)
    assert costs.attend_s(100, 500) == pytest.approx(55050)
    assert costs.attend_s(4000, 3000) == pytest.approx(4000 * 3000 + 4000 * 4001 / 2)


@pytest.mark.parametrize(
    ("changed_field", "message"),
    [
        ({"version": 7}, "version 1"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"prefill_linear_s": [1.0]}, "one time for each of prefill_tokens"),
        ({"decode_step_s": [[1.0]]}, "2 rows of 2 times"),
        ({"prefill_tokens": [5, 5]}, "ascending"),
        ({"source": "other"}, "source must be"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token"),
        ({"arrival_s": -1.0}, "arrival_s"),
        ({"host": {"read_bytes_per_s": 0.0, "write_bytes_per_s": 1.0}}, "host"),
    ],
)
def test_a_broken_profile_is_refused_by_name(changed_field, message, tmp_path):
    profile_json = {**profile().to_json(), **changed_field}
    profile_file = tmp_path / "profile.json"
    profile_file.write_text(json.dumps(profile_json))
    with pytest.raises(CanopyError, match=message):
        load_profile(profile_file)


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    profile_file = tmp_path / "profile.json"
    profile_file.write_text(json.dumps(profile().to_json()))
    assert load_profile(profile_file).name == "by hand"
    with pytest.raises(CanopyError, match="neither one of"):
        load_profile("no-such-profile")
    profile_file.write_text("{")
    with pytest.raises(CanopyError, match="not JSON"):
        load_profile(profile_file)


def test_seconds_of_a_trace_are_the_sum_over_its_requests():
    published = load_profile("llama-3.1-8b-h100")
    trace = [TraceRequest(0.0, 1000, 1, (1, 2), 512), TraceRequest(1.0, 900, 1, (1, 3), 512)]
    total_s = prefill_s(published, trace, [1000, 0])
    assert total_s == pytest.approx(published.prefill_s(1000) + published.prefill_s(1, 899))
