"""Flags of the what-if meter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sglang_canopy import declared
from sglang_canopy.declared import declare, declare_key, keyed
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import live_names, make_policy

WHATIF_FLAG, OBSERVE_FLAG = "--canopy-whatif", "--canopy-observe"
DEFAULT_POLICIES = ("canopy-lru", "wa")
MAX_POLICIES, MAX_FACTORS, MAX_FACTOR = 4, 4, 64.0
"""Bounds: every policy at every capacity is one shadow cache."""


def _parse_policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if names == ("auto",):
        return DEFAULT_POLICIES
    if not 1 <= len(names) <= MAX_POLICIES:
        raise CanopyError(f"must name 1 to {MAX_POLICIES} policies, or auto; got {text:.80}")
    for name in names:
        if name not in live_names():
            raise CanopyError(
                f"must name policies of {', '.join(live_names())}, or be auto; got {name:.60}"
            )
        make_policy(name)  # policies with required options are not allowed
    return names


def _parse_factors(text: str) -> tuple[float, ...]:
    try:
        factors = tuple(dict.fromkeys(float(number) for number in text.split(":")))
    except ValueError:
        factors = ()
    are_in_range = all(1 / 64 <= factor <= MAX_FACTOR for factor in factors)
    if not 1 <= len(factors) <= MAX_FACTORS or not are_in_range:
        raise CanopyError(
            f"must be 1 to {MAX_FACTORS} numbers from {1 / 64:g} to {MAX_FACTOR:g} with colons "
            f"between them, such as 1:2; got {text:.60}"
        )
    return factors


@dataclass(frozen=True, slots=True)
class MeterOptions(declared.Checked):
    """Keys of ``--canopy-whatif``."""

    policies: tuple[str, ...] = declare_key(
        DEFAULT_POLICIES,
        "Policies to measure.",
        parse=_parse_policies,
        shown_default="auto: canopy-lru,wa",
    )
    capacity: tuple[float, ...] = declare_key(
        (1.0, 2.0),
        "Capacities to measure, as multiples of the host tier (without one, of the device).",
        parse=_parse_factors,
        shown_default="1:2",
    )
    floor: str = declare_key(
        "on",
        "Use canopy-lru while the policy is measurably behind it. Not for policies that aim at the "
        "tail.",
        choices=("on", "off"),
    )
    observe: bool = False
    """Whether the meter observes SGLang's own cache."""


@dataclass(frozen=True, slots=True)
class WhatifFlags(declared.Checked):
    """Flags of the meter, as typed."""

    whatif: MeterOptions | None = declare(
        None,
        WHATIF_FLAG,
        "Measure what other policies and capacities would hit on this server's requests.",
        metavar="NAMES[,KEY=VALUE...]",
        parse=keyed(MeterOptions, head="policies"),
        hidden=True,
    )
    observe: bool = declare(
        False,
        OBSERVE_FLAG,
        "Only measure what Canopy's policies would hit on this server's requests; change nothing. "
        "For SGLang's own eviction policies.",
    )


def meter_options(flags: WhatifFlags, is_canopy: bool) -> MeterOptions | None:
    """Return the meter's options; ``None`` without a meter. ``is_canopy``: whether the device's policy
    is one of Canopy's. Raises ``CanopyError`` naming the flag."""
    if flags.observe and is_canopy:
        raise CanopyError(
            f"{OBSERVE_FLAG} watches SGLang's own policies; with one of Canopy's, give {WHATIF_FLAG} auto"
        )
    if flags.whatif is None:
        return MeterOptions(observe=True) if flags.observe else None
    if not (is_canopy or flags.observe):
        raise CanopyError(
            f"{WHATIF_FLAG} needs --radix-eviction with a Canopy policy, or {OBSERVE_FLAG} to watch "
            "one of SGLang's"
        )
    return dataclasses.replace(flags.whatif, observe=flags.observe)
