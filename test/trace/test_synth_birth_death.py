"""The stochastic model of arXiv 2510.15152 against its closed forms."""

from collections import defaultdict
from dataclasses import replace
from math import exp, sqrt

import pytest
from synthetic.presets import Lengths
from synthetic.trace import synthesise
from tail.birth_death import BirthDeathLoad, birth_death, still_under_way

from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

RATES = [(0.5, 1 / 180, 1 / 60), (2.0, 1 / 30, 1 / 10), (1.0, 1 / 100, 1 / 400)]
SHORT = Lengths(8, 0.1)
SECONDS = 6000.0


def load(conversations: float, ends: float, turns: float) -> BirthDeathLoad:
    return BirthDeathLoad(conversations, ends, turns, SHORT, SHORT)


def drawn(rates: tuple[float, float, float], seed: int = 1) -> list[TraceRequest]:
    preset = replace(birth_death(), load=load(*rates))
    return [r.request for r in synthesise(preset, SECONDS, seed)]


def talks(trace: list[TraceRequest]) -> list[list[float]]:
    times = defaultdict(list)
    for r in trace:
        times[r.conversation].append(r.time_s)
    return list(times.values())


@pytest.mark.parametrize("rates", RATES)
def test_requests_arrive_at_the_closed_forms_rate(rates: tuple[float, float, float]) -> None:
    conversations, ends, turns = rates
    mean = SECONDS * turns * conversations / ends
    # A cluster process: its variance is above Poisson's by 1 + 2 turns / (ends + turns) at most,
    # times the turns that a conversation has.
    spread = sqrt(mean * (1 + 2 * turns / ends))
    assert abs(len(drawn(rates)) - mean) < 4 * spread


@pytest.mark.parametrize("rates", RATES)
def test_turns_continue_as_the_closed_forms_predict(
    rates: tuple[float, float, float],
) -> None:
    _, ends, turns = rates
    horizon = SECONDS - 10 / (turns + ends)
    followed, gaps = [], []
    for times in talks(drawn(rates)):
        for at, time_s in enumerate(times):
            if time_s < horizon:
                followed.append(at + 1 < len(times))
                if at + 1 < len(times):
                    gaps.append(times[at + 1] - time_s)
    share = turns / (turns + ends)
    assert abs(sum(followed) / len(followed) - share) < 4 * sqrt(
        share * (1 - share) / len(followed)
    )
    mean = 1 / (turns + ends)
    assert abs(sum(gaps) / len(gaps) - mean) < 4 * mean / sqrt(len(gaps))


@pytest.mark.parametrize("rates", RATES)
def test_it_starts_in_the_steady_state(rates: tuple[float, float, float]) -> None:
    times = [r.time_s for r in drawn(rates)]
    first = sum(time_s < SECONDS / 4 for time_s in times)
    last = sum(time_s >= 3 * SECONDS / 4 for time_s in times)
    _, ends, turns = rates
    assert abs(first - last) < 4 * sqrt((first + last) * (1 + 2 * turns / ends))


@pytest.mark.parametrize("rates", RATES[:2])
def test_silence_implies_an_end_by_bayes_rule_more_than_the_papers_belief(
    rates: tuple[float, float, float],
) -> None:
    _, ends, turns = rates
    silent_s = 1.5 / (turns + ends)
    silent = returned = 0
    for times in talks(drawn(rates)):
        for time_s, following in zip(times, [*times[1:], float("inf")]):
            if time_s > SECONDS - 12 / (turns + ends) or following - time_s <= silent_s:
                continue
            silent += 1
            returned += following < float("inf")
    # An active conversation returns before its end with probability turns / (turns + ends).
    share = returned / silent * (turns + ends) / turns
    truth = still_under_way(load(*rates), silent_s)
    assert abs(share - truth) < 4 * sqrt(truth / silent) * (turns + ends) / turns
    assert truth < 0.8 * exp(-ends * silent_s)


def test_the_belief_begins_at_one_and_falls() -> None:
    one = load(*RATES[0])
    beliefs = [still_under_way(one, t) for t in (0.0, 1.0, 30.0, 300.0)]
    assert beliefs[0] == 1.0
    assert beliefs == sorted(beliefs, reverse=True)


def test_rates_are_checked() -> None:
    with pytest.raises(CanopyError, match="ends_per_s must lie above 0"):
        birth_death(ends_per_s=0.0)
