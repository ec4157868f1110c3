"""Laws that predict reuse, on hand-made traces with a known law."""

import math
import random

import pytest

from canopy_lab.characterize.observe import observe
from canopy_lab.trace.record import TraceRequest
from support.laws import laws
from support.tiny_traces import ask


def reused(ages: list[float], never: int) -> list[TraceRequest]:
    """Blocks used twice, the second time after ``ages``; and ``never`` ones used once."""
    events = [(float(i), i) for i in range(len(ages) + never)]
    events += [(i + age, i) for i, age in enumerate(ages)]
    return [ask(time_s, [block]) for time_s, block in sorted(events)]


def test_the_right_law_wins() -> None:
    rng = random.Random(2)
    memoryless = [rng.expovariate(1 / 60) for _ in range(4000)]
    assert laws(observe(reused(memoryless, 0)))[0].exponential.ks < 0.03
    heavy = [rng.choice((1.0, 900.0)) * rng.uniform(0.9, 1.1) for _ in range(4000)]
    both = laws(observe(reused(heavy, 0)))[0]
    assert both.survival.log_likelihood > both.exponential.log_likelihood
    assert both.survival.ks < 0.05 < 0.3 < both.exponential.ks


def test_a_law_is_tested_on_later_reuse_than_it_was_fitted_on() -> None:
    """Half a trace of quick returns, then half a trace of slow ones, in equal shares of the requests
    whatever their parity."""
    rng = random.Random(3)
    quick = [(i, rng.expovariate(1 / 5)) for i in range(2000)]
    slow = [(2500 + i, rng.expovariate(1 / 100)) for i in range(2000)]
    events = [(float(t), n) for n, (t, _) in enumerate(quick + slow)]
    events += [(t + age, n) for n, (t, age) in enumerate(quick + slow)]
    row = laws(observe([ask(t, [n]) for t, n in sorted(events)]))[0]
    # exp(-t / 100) - exp(-t / 5) is largest at 15.8 s: 0.81.
    assert row.exponential.ks > 0.7
    assert row.survival.ks > 0.7


def test_reuse_after_the_first_half_is_not_fitted() -> None:
    """Every block returns once, after 10 s or after the middle: the fit sees only the 10 s."""
    soon = [(float(i), float(i) + 10.0) for i in range(0, 400)]
    late = [(float(i), 1200.0 + i) for i in range(500, 900)]
    again = [(1500.0 + i, 1510.0 + i) for i in range(500)]
    events = [(t, n) for n, pair in enumerate(soon + late + again) for t in pair]
    row = laws(observe([ask(t, [n]) for t, n in sorted(events)]))[0]
    # All uses of the second half returned after 10 s. An exponential of mean 10 has returned
    # 1 - 1/e by then.
    assert row.exponential.ks == pytest.approx(1.0 - math.exp(-1.0), abs=0.12)


def test_too_few_reuses_are_not_fitted() -> None:
    assert laws(observe(reused([5.0] * 20, 5))) == []
