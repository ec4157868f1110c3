"""The sentence on top of a server's page: what to do, and nothing before it is known."""

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
    own = arm(running, 0.41, running=True)
    return {"running": running, "hit_ratio": 0.41, "arms": [own, *arms], "undecided": undecided}


def test_no_figure_is_reported_before_it_is_known() -> None:
    advice = next_step(
        meter(arm("wa", 0.9), undecided="too few requests: 5 of 200"), "wa", ours=True
    )
    assert advice == "Nothing to decide yet: too few requests: 5 of 200."


@pytest.mark.parametrize(("ours", "flag"), [(True, "--canopy-whatif"), (False, "--canopy-observe")])
def test_a_server_that_measures_nothing_names_the_flag_that_does(ours, flag) -> None:
    assert flag in next_step(None, "lru", ours=ours)


def test_a_sure_gain_names_the_flag_of_the_policy() -> None:
    advice = next_step(meter(arm("wa", 0.535, 0.015)), "canopy-lru", ours=True)
    assert advice == (
        "wa would save 12.5 ± 3.0 points more of your prompt tokens than canopy-lru: restart "
        "with --radix-eviction wa"
    )


def test_sglangs_own_policy_is_left_by_a_restart() -> None:
    advice = next_step(meter(arm("wa", 0.535, 0.015), running="lru"), "lru", ours=False)
    assert advice.endswith("than lru: restart with --radix-eviction wa")


@pytest.mark.parametrize(("hits", "error"), [(0.414, 0.0), (0.46, 0.03), (0.3, 0.0)])
def test_small_or_uncertain_gains_change_nothing(hits: float, error: float) -> None:
    advice = next_step(meter(arm("wa", hits, error)), "canopy-lru", ours=True)
    assert advice == "Keep canopy-lru: no policy tried would save more."


def test_auto_needs_no_change() -> None:
    gain = next_step(meter(arm("wa", 0.6, 0.01)), "canopy-lru", ours=True, auto=True)
    assert gain.startswith("Nothing to do: wa would save 19.0 ± 2.0 points more")
    assert next_step(meter(), "wa", ours=True, auto=True).startswith("Keep auto: ")


def test_more_memory_is_advised_if_no_policy_helps() -> None:
    larger = arm("canopy-lru", 0.52, 0.004, capacity="host x2")
    advice = next_step(meter(arm("wa", 0.41), larger), "canopy-lru", ours=True)
    assert advice.endswith("More memory would: host x2 saves 11.0 ± 0.8 points more.")
