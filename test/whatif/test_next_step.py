"""The sentence on top of a server's page: what to do, and nothing before it is known."""

import re
from typing import Any

import pytest

from sglang_canopy.whatif.total import next_step


def arm(policy: str, hit_ratio: float, error: float = 0.0, capacity: str = "now", is_running=False):
    return {
        "policy": policy,
        "capacity": capacity,
        "hit_ratio": hit_ratio,
        "standard_error": error,
        "running": is_running,
    }


def meter(*arms: dict[str, Any], undecided: str | None = None, running: str = "canopy-lru"):
    running_arm = arm(running, 0.41, is_running=True)
    stats = {"running": running, "hit_ratio": 0.41, "undecided": undecided}
    return {**stats, "arms": [running_arm, *arms]}


AUTO_POLICIES = ("wa", "canopy-lru")
WA_IS_BETTER = arm("wa", 0.535, 0.015)
LARGER_HOST_IS_BETTER = arm("canopy-lru", 0.52, 0.004, capacity="host x2")
KEEP_SENTENCE = "^Keep canopy-lru: no policy tried would save more.$"
SAVES_TEXT = "wa would save 12.5 ± 3.0 points more of your prompt tokens"


@pytest.mark.parametrize(
    ("meter_stats", "policy", "options", "pattern"),
    [
        (meter(WA_IS_BETTER, undecided="too few requests"), "wa", {}, "^Nothing to decide yet: too few requests.$"),
        (None, "lru", {}, "--canopy-whatif auto"),
        (None, "lru", {"is_canopy": False}, "--canopy-observe"),
        (meter(WA_IS_BETTER), "canopy-lru", {}, f"^{SAVES_TEXT} than canopy-lru: restart with --radix-eviction wa$"),
        (meter(WA_IS_BETTER, running="lru"), "lru", {"is_canopy": False}, " than lru: restart with --radix-eviction wa$"),
        (meter(arm("wa", 0.414)), "canopy-lru", {}, KEEP_SENTENCE),
        (meter(arm("wa", 0.46, 0.03)), "canopy-lru", {}, KEEP_SENTENCE),
        (meter(arm("wa", 0.3)), "canopy-lru", {}, KEEP_SENTENCE),
        (meter(WA_IS_BETTER), "canopy-lru", {"auto_policies": AUTO_POLICIES}, f"^Nothing to do: {SAVES_TEXT}"),
        (meter(WA_IS_BETTER), "canopy-lru", {"auto_policies": ()}, f"^{SAVES_TEXT} than canopy-lru: restart with "),
        (meter(arm("etlru", 0.535, 0.015)), "wa", {"auto_policies": AUTO_POLICIES}, " than wa: restart with .* etlru$"),
        (meter(), "wa", {"auto_policies": AUTO_POLICIES}, "^Keep auto: "),
        (meter(arm("wa", 0.41), LARGER_HOST_IS_BETTER), "canopy-lru", {}, "More memory would: host x2 saves 11.0 ± 0.8 points more.$"),
    ],
)  # fmt: skip
def test_the_next_step_follows_from_the_meter(meter_stats, policy, options, pattern) -> None:
    assert re.search(pattern, next_step(meter_stats, policy, **{"is_canopy": True, **options}))
