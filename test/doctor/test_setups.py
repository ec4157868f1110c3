"""Set-ups: the parts that each refuses at start, and the level at which its other parts are tested."""

from types import SimpleNamespace

import pytest

from sglang_canopy.config.refusals import unsupported_reason
from sglang_canopy.config.setups import FLAGS, PARTS, REFUSED, SETUPS, Setup
from sglang_canopy.doctor.command_line import refusal_findings, untested_findings

NAMES = [setup.name for setup in SETUPS]


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("setup", SETUPS, ids=NAMES)
def test_a_refused_part_is_not_tested(setup: Setup) -> None:
    levels = {part: setup.level(part) for part in PARTS}
    assert not [part for part in (*setup.served, *setup.cache) if levels[part] == REFUSED]
    assert set(setup.served).isdisjoint(setup.cache)


@pytest.mark.parametrize("setup", SETUPS, ids=NAMES)
def test_no_refused_set_up_applies_by_default(setup: Setup) -> None:
    refuses = any(setup.reason(feature) for feature in FLAGS)
    assert not (refuses and setup.applies(None))


def test_a_reason_names_the_value_and_the_ways_out() -> None:
    reason = unsupported_reason("gate", SimpleNamespace(pp_size=4), environment={})
    assert reason == "--pp-size 4 is not supported yet; use 1, or leave out --canopy-session-gate"


def test_the_doctor_lists_refusals_of_every_feature_and_what_is_untested() -> None:
    flags = {"device": "cuda", "pp_size": 2, "tp_size": 1}
    args = SimpleNamespace(radix_eviction_policy="wa", canopy_documents="on", **flags)
    assert [f.text.partition(":")[0] for f in refusal_findings(args)] == ["--canopy-documents"]
    assert [f.text for f in untested_findings(args)] == ["CUDA: device, documents"]
