"""Flags of the meter."""

import argparse

import pytest

from sglang_canopy import declared
from sglang_canopy.config.whatif import MeterOptions, WhatifFlags, meter_options
from sglang_canopy.errors import CanopyError


def meter(*typed: str, ours: bool) -> MeterOptions | None:
    parser = argparse.ArgumentParser()
    declared.add_flags(parser.add_argument_group(), WhatifFlags)
    return meter_options(declared.read(WhatifFlags, parser.parse_args(typed)), ours)


def test_the_error_of_a_flag_names_its_requirement():
    with pytest.raises(CanopyError, match="--canopy-observe to watch"):
        meter("--canopy-whatif", "wa", ours=False)
    with pytest.raises(CanopyError, match="SGLang's own policies"):
        meter("--canopy-observe", ours=True)
    with pytest.raises(CanopyError, match="must name policies of"):
        meter("--canopy-whatif", "magic", ours=True)
    with pytest.raises(
        CanopyError, match=r"--canopy-whatif wa,capacity=0: .*must be 1 to 4 numbers"
    ):
        meter("--canopy-whatif", "wa,capacity=0", ours=True)
    with pytest.raises(CanopyError, match="'floor' must be one of on, off"):
        meter("--canopy-whatif", "auto,floor=never", ours=True)
    assert meter(ours=True) is None
    assert meter("--canopy-observe", ours=False) == MeterOptions(observe=True)
    several = meter("--canopy-whatif", "wa,canopy-tlru,capacity=1:4", ours=True)
    assert several == MeterOptions(("wa", "canopy-tlru"), (1.0, 4.0))
