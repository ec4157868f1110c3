"""The sentence on top of a server's page: what to do, and nothing before it is known."""

import re
from typing import Any

import pytest

from sglang_canopy.whatif.total import next_step


def arm(policy: str, hits: float, error: float = 0.0, capacity: str = "now", running: bool = False):
    return {
        "policy": policy,
        "capacity": capacity,
        "hit_ratio": hits,
        "standard_error": error,
        "running": running,
    }


def meter(*arms: dict[str, Any], undecided: str | None = None, running: str = "canopy-lru"):
    base = arm(running, 0.41, running=True)
    return {"running": running, "hit_ratio": 0.41, "arms": [base, *arms], "undecided": undecided}


AUTO = ("wa", "canopy-lru")
GAIN = arm("wa", 0.535, 0.015)
LARGER = arm("canopy-lru", 0.52, 0.004, capacity="host x2")
KEEP = "^Keep canopy-lru: no policy tried would save more.$"
SAVES = "wa would save 12.5 ± 3.0 points more of your prompt tokens"


@pytest.mark.parametrize(
    ("measured", "policy", "options", "pattern"),
    [
        (meter(GAIN, undecided="too few requests"), "wa", {}, "^Nothing to decide yet: too few requests.$"),
        (None, "lru", {}, "--canopy-whatif auto"),
        (None, "lru", {"is_canopy": False}, "--canopy-observe"),
        (meter(GAIN), "canopy-lru", {}, f"^{SAVES} than canopy-lru: restart with --radix-eviction wa$"),
        (meter(GAIN, running="lru"), "lru", {"is_canopy": False}, " than lru: restart with --radix-eviction wa$"),
        (meter(arm("wa", 0.414)), "canopy-lru", {}, KEEP),
        (meter(arm("wa", 0.46, 0.03)), "canopy-lru", {}, KEEP),
        (meter(arm("wa", 0.3)), "canopy-lru", {}, KEEP),
        (meter(GAIN), "canopy-lru", {"auto": AUTO}, f"^Nothing to do: {SAVES}"),
        (meter(GAIN), "canopy-lru", {"auto": ()}, f"^{SAVES} than canopy-lru: restart with "),
        (meter(arm("etlru", 0.535, 0.015)), "wa", {"auto": AUTO}, " than wa: restart with .* etlru$"),
        (meter(), "wa", {"auto": AUTO}, "^Keep auto: "),
        (meter(arm("wa", 0.41), LARGER), "canopy-lru", {}, "More memory would: host x2 saves 11.0 ± 0.8 points more.$"),
    ],
)  # fmt: skip
def test_the_next_step_follows_from_the_meter(measured, policy, options, pattern) -> None:
    assert re.search(pattern, next_step(measured, policy, **{"is_canopy": True, **options}))
