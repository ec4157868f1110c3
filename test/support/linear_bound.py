"""A bound on what any allocation of TTLs to groups can win, for tests and benchmark/tiers."""

import numpy as np
from scipy.optimize import linprog

from canopy_lab.group_ttl.histogram import Curves


def linear_bound(curves: Curves, budget: float) -> float:
    """Hits when each group may mix its TTLs: no allocation of ``budget`` tokens wins more."""
    groups, steps = curves.hits.shape
    mixed = linprog(
        -curves.hits.ravel(),
        A_ub=curves.mean_tokens.reshape(1, -1),
        b_ub=[budget],
        A_eq=np.kron(np.eye(groups), np.ones(steps)),
        b_eq=np.ones(groups),
        method="highs",
    )
    assert mixed.success, mixed.message
    return float(-mixed.fun)
