"""The cheapest member that may be served next, and each member's allowance, against plain lists."""

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.schedule.age_order import AgeOrder


def find_cheapest(costs: list[float], allowances: list[float]) -> int:
    """Return the position of the cheapest member that the members before it allow, or -1."""
    candidates = [
        position
        for position, cost in enumerate(costs)
        if cost < math.inf and all(allowance >= cost for allowance in allowances[:position])
    ]
    return min(candidates, key=lambda position: (costs[position], position), default=-1)


@settings(max_examples=2 * settings.default.max_examples)
@given(st.integers(0, 70), st.randoms(use_true_random=False))
def test_any_sequence_of_calls_equals_plain_lists(member_count: int, rng: random.Random) -> None:
    costs = [float(rng.randrange(1, 20)) for _ in range(member_count)]
    allowances = [float(rng.randrange(0, 60)) for _ in range(member_count)]
    age_order = AgeOrder(list(costs), list(allowances))
    for _ in range(40):
        call_number = rng.randrange(4)
        if call_number == 0 and not age_order.is_full:
            costs.append(float(rng.randrange(1, 20)))
            allowances.append(float(rng.randrange(0, 60)))
            assert age_order.append(costs[-1], allowances[-1]) == len(costs) - 1
        elif call_number == 1 and costs:
            position, seconds = rng.randrange(len(costs)), float(rng.randrange(1, 9))
            age_order.charge_older(position, seconds)
            allowances[:position] = [allowance - seconds for allowance in allowances[:position]]
        elif call_number == 2 and costs:
            position = rng.randrange(len(costs))
            costs[position] = rng.choice([math.inf, float(rng.randrange(1, 20))])
            age_order.set_cost(position, costs[position])
        elif costs:
            position = rng.randrange(len(costs))
            allowances[position] = rng.choice([math.inf, float(rng.randrange(0, 60))])
            age_order.set_allowance(position, allowances[position])
        assert age_order.cheapest() == find_cheapest(costs, allowances)
        assert age_order.least_allowance() == min(allowances, default=math.inf)
        assert [age_order.allowance(position) for position in range(len(costs))] == allowances
