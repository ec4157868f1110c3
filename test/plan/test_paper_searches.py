"""The measures of a search for Figure 13 of Kareto's paper (benchmark/papers/kareto/search.py)."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")


@pytest.fixture
def search(monkeypatch):
    benchmark = Path(__file__).parents[2] / "benchmark"
    for folder in ("papers", "traces"):
        monkeypatch.syspath_prepend(str(benchmark / folder))
    import kareto.search

    yield kareto.search
    for name in [name for name in sys.modules if name.split(".")[0] == "kareto"]:
        del sys.modules[name]


def grid_row(ttft_s: float, cost: float) -> dict[str, float]:
    return {"mean_ttft_s": ttft_s, "throughput_tokens_per_s": 1 / ttft_s, "cost": cost}


def test_cost_regret_shows_a_loss_that_the_dominated_volume_hides(search):
    """Cost falls by a tenth as TTFT grows tenfold: one good point has nearly all of the volume."""
    grid = [grid_row(1.0 + 0.25 * i, 110.0 - 10 * i / 36) for i in range(37)]
    grid += [grid_row(40.0, 200.0)]  # much worse in every objective
    judge = search.Judge.from_rows(grid, grid)
    of_grid, of_first_row = judge.measure(grid), judge.measure(grid[:1])
    assert (of_grid["of_grid"], of_grid["regret"], of_grid["unmet"]) == (1.0, 0.0, 0.0)
    assert of_first_row["of_grid"] > 0.85
    assert of_first_row["unmet"] == 0.0
    assert of_first_row["regret"] == pytest.approx(0.07, abs=0.03)
    assert judge.measure(grid[36:37])["unmet"] > 0.5
