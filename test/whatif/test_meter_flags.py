"""Flags of the meter."""

import argparse

import pytest

from sglang_canopy import declared
from sglang_canopy.config.whatif import MeterOptions, WhatifFlags, meter_options
from sglang_canopy.errors import CanopyError


def options_of(*command_line: str, is_canopy: bool) -> MeterOptions | None:
    parser = argparse.ArgumentParser()
    declared.add_flags(parser.add_argument_group(), WhatifFlags)
    return meter_options(declared.read(WhatifFlags, parser.parse_args(command_line)), is_canopy)


def test_the_error_of_a_flag_names_its_requirement():
    with pytest.raises(CanopyError, match="--canopy-observe to watch"):
        options_of("--canopy-whatif", "wa", is_canopy=False)
    with pytest.raises(CanopyError, match="SGLang's own policies"):
        options_of("--canopy-observe", is_canopy=True)
    with pytest.raises(CanopyError, match="must name policies of"):
        options_of("--canopy-whatif", "magic", is_canopy=True)
    with pytest.raises(CanopyError, match=r"--canopy-whatif wa,capacity=0: .*be 1 to 4 numbers"):
        options_of("--canopy-whatif", "wa,capacity=0", is_canopy=True)
    with pytest.raises(CanopyError, match="'floor' must be one of on, off"):
        options_of("--canopy-whatif", "auto,floor=never", is_canopy=True)
    assert options_of(is_canopy=True) is None
    assert options_of("--canopy-observe", is_canopy=False) == MeterOptions(observe=True)
    options = options_of("--canopy-whatif", "wa,canopy-tlru,capacity=1:4", is_canopy=True)
    assert options == MeterOptions(("wa", "canopy-tlru"), (1.0, 4.0))
