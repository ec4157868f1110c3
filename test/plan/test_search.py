"""The search for the best plans, on models of which the full grid gives the front."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from canopy_lab.plan.objective import Objectives, Scale
from canopy_lab.plan.search import PROBE_COUNT, SearchOptions, SearchResult, search
from canopy_lab.plan.sizes import halved_sizes
from canopy_lab.plan.space import Space

OBJECTIVES = Objectives.from_names(["mean_ttft", "throughput", "cost"])
SPACE = Space(
    halved_sizes(1024, 5),
    halved_sizes(4096, 3),
    ("slow", "fast"),
    min_gib=4.0,
    choices={"ttl": (None, 600.0, "group")},
)
GRID = SPACE.finer(32, 16)
"""A space that is finer than the search's first one, with other sizes than those it refines to."""


class CacheModel:
    """A cache whose hits have exponentially diminishing returns; its disk is slower and cheaper than DRAM."""

    def __init__(self, working_set_gib=300.0, hot_gib=100.0, group_gain=0.2, best_hit=0.6):
        self.working_set_gib, self.hot_gib = working_set_gib, hot_gib
        self.group_gain, self.best_hit = group_gain, best_hit
        self.batches = []

    def row(self, config):
        gain = {None: 1.0, 600.0: 0.9, "group": 1 + self.group_gain}[config.ttl]
        effective_gib = config.dram_gib + 0.8 * config.disk_gib * gain
        hit_ratio = self.best_hit * (1 - math.exp(-effective_gib / self.working_set_gib))
        delays_s = {None: 0.0, "slow": 0.15, "fast": 0.05}
        disk_delay_s = delays_s[config.disk] * math.exp(-config.dram_gib / self.hot_gib)
        return {
            **config.to_json(),
            "mean_ttft_s": 2 * (1 - hit_ratio) + disk_delay_s,
            "throughput_tokens_per_s": 1000 * (1 + 0.3 * hit_ratio - 0.05 * disk_delay_s),
            "cost": self.cost(config),
        }

    def cost(self, config):
        disk_cost = {None: 0.0, "slow": 0.0004, "fast": 0.001}[config.disk] * config.disk_gib
        return 4 + 0.01 * config.dram_gib + disk_cost + (0.3 if config.disk == "fast" else 0)

    def __call__(self, configurations):
        self.batches.append(list(configurations))
        return [self.row(config) for config in configurations]

    def bounds_of(self, configuration, rows):
        return {"cost": self.cost(configuration)}


class GridShare(NamedTuple):
    """A search's hypervolume and number of evaluations, over those of the whole grid."""

    volume: float
    evaluations: float
    outcome: SearchResult


def share_of_grid(model, space=SPACE, finer=GRID, **options) -> GridShare:
    grid = dict(zip(finer.grid(), model(finer.grid())))
    search_options = SearchOptions(**options)
    outcome = search(space, OBJECTIVES, model, bounds_of=model.bounds_of, options=search_options)
    objective_matrix = OBJECTIVES.matrix([*grid.values(), *outcome.rows.values()])
    scale = Scale.around(objective_matrix)
    volume, grid_volume = (
        scale.hypervolume(OBJECTIVES.matrix(rows.values())) for rows in (outcome.rows, grid)
    )
    return GridShare(volume / grid_volume, len(outcome.rows) / len(grid), outcome)


CACHE_PARAMETERS = [(set_gib, h, g, b) for set_gib in (40.0, 300.0, 2000.0) for h in (20.0, 300.0) for g, b in ((0.0, 0.3), (0.2, 0.8))]  # fmt: skip
"""Working set and hot set in GiB, gain of a group TTL, and best hit ratio, as ``CacheModel`` takes them."""


def test_a_fortieth_of_a_finer_grid_finds_99_percent_of_its_volume_on_average():
    shares = [share_of_grid(CacheModel(*model)) for model in CACHE_PARAMETERS]
    assert np.mean([share.evaluations for share in shares]) <= 1 / 40
    assert np.mean([share.volume for share in shares]) >= 0.99
    assert min(share.volume for share in shares) >= 0.98


def test_the_search_ends_at_the_tolerance_and_reports_the_remaining_gain():
    for model in CACHE_PARAMETERS[::3]:
        coarse = share_of_grid(CacheModel(*model), tolerance=0.05).outcome
        fine = share_of_grid(CacheModel(*model), tolerance=0.01).outcome
        assert (coarse.is_out_of_budget, fine.is_out_of_budget) == (False, False)
        assert coarse.remaining_gain <= 0.05
        assert fine.remaining_gain <= 0.01
        assert len(fine.rows) > len(coarse.rows)
        # The finer search gains no more than twice the reported remaining gain.
        objective_matrix = OBJECTIVES.matrix([*coarse.rows.values(), *fine.rows.values()])
        scale = Scale.around(objective_matrix)
        after, before = (
            scale.hypervolume(OBJECTIVES.matrix(result.rows.values())) for result in (fine, coarse)
        )
        assert after / before - 1 <= 2 * coarse.remaining_gain


def test_the_search_follows_a_gain_beyond_the_sizes_of_the_coarse_grid():
    """A slow disk whose gain grows with the DRAM: the coarse grid has one point of
    it, and its best is beyond the sizes that were tried with it."""

    class Filter(CacheModel):
        def row(self, config):
            row = super().row(replace(config, dram_gib=0.0, disk=None, disk_gib=0.0))
            gain = 0.8 * config.dram_gib / 1024 if config.disk and config.disk_mib_s < 200 else 0.0
            return {**row, **config.to_json(), "mean_ttft_s": 2 - gain, "cost": self.cost(config)}

    space = replace(SPACE, disks=("slow",), bandwidths_mib_s={"slow": (125.0, 1000.0)}, choices={})
    volume, _, outcome = share_of_grid(Filter(), space, space.finer(16, 8))
    assert max(c.dram_gib for c in outcome.rows if c.disk and c.disk_mib_s == 125.0) == 1024.0
    assert volume >= 0.97


def test_bandwidth_is_searched_if_a_class_sells_it():
    class SoldBandwidth(CacheModel):
        def row(self, config):
            slow_s = 100 / config.disk_mib_s if config.disk else 0.0
            row = super().row(config)
            return {**row, "mean_ttft_s": row["mean_ttft_s"] + slow_s}

        def cost(self, config):
            return super().cost(config) + 0.002 * config.disk_mib_s

    space = replace(SPACE, disks=("slow",), bandwidths_mib_s={"slow": (125.0, 1000.0)}, choices={})
    outcome = share_of_grid(SoldBandwidth(working_set_gib=2000.0), space, space).outcome
    front = [list(outcome.rows)[i] for i in OBJECTIVES.front(list(outcome.rows.values()))]
    assert {config.disk_mib_s for config in front if config.disk} - {125.0, 1000.0}


def test_useful_group_ttls_are_found_and_useless_ones_dropped_early():
    useful = share_of_grid(CacheModel(2000.0, group_gain=0.5)).outcome
    front = OBJECTIVES.front(list(useful.rows.values()))
    assert any(list(useful.rows)[i].ttl == "group" for i in front)
    useless = share_of_grid(CacheModel(2000.0, group_gain=0.0)).outcome
    # Tried on points of the front and two corners of each class, and left.
    group_rows = sum(configuration.ttl == "group" for configuration in useless.rows)
    assert 0 < group_rows <= PROBE_COUNT + 2 * 2
    assert sum(configuration.ttl == "group" for configuration in useful.rows) > group_rows


def test_dram_is_not_expanded_after_a_step_without_gain():
    # The working set is far smaller than the middle of the axis.
    outcome = share_of_grid(CacheModel(working_set_gib=2.0, hot_gib=1.0)).outcome
    assert outcome.stages.get("expansion", 0) == 0
    expanded = share_of_grid(CacheModel(working_set_gib=2000.0)).outcome
    assert max(configuration.dram_gib for configuration in expanded.rows) == SPACE.dram_gib[-1]


def test_a_step_at_the_end_of_dram_is_found():
    class Cliff(CacheModel):
        def row(self, configuration):
            is_large = configuration.dram_gib >= SPACE.dram_gib[-2]
            return {**super().row(configuration), "mean_ttft_s": 0.1 if is_large else 2.0}

    _, _, outcome = share_of_grid(Cliff(working_set_gib=1e9))
    assert min(row["mean_ttft_s"] for row in outcome.rows.values()) == 0.1
    at_cliff = [c for c in outcome.rows if c.dram_gib == SPACE.dram_gib[-2] and c.disk is None]
    assert at_cliff


def test_the_search_stops_at_its_budget_of_evaluations_and_reports_it():
    _, _, outcome = share_of_grid(CacheModel(), evaluations=20)
    assert len(outcome.rows) == 20
    assert outcome.is_out_of_budget
    assert outcome.remaining_gain > SearchOptions().tolerance
    assert not share_of_grid(CacheModel(group_gain=0.0)).outcome.is_out_of_budget


def test_equal_searches_evaluate_the_same_in_the_same_order():
    outcome, repeated = (share_of_grid(CacheModel()).outcome for _ in range(2))
    assert list(outcome.rows) == list(repeated.rows)


def test_without_certain_costs_the_search_still_ends_within_its_budget():
    model = CacheModel()
    outcome = search(SPACE, OBJECTIVES, model)
    assert 0 < len(outcome.rows) <= outcome.budget


def test_a_space_without_disks_is_searched_along_its_dram_sizes():
    space = Space(halved_sizes(1024, 9), (0.0,), ())
    volume, _, outcome = share_of_grid(CacheModel(), space, space.finer(64, 1))
    assert volume > 0.98
    assert all(configuration.disk is None for configuration in outcome.rows)


def test_negligible_differences_add_no_volume():
    objectives = Objectives.from_names(["mean_ttft", "throughput"])
    rows = [
        {"mean_ttft_s": 1.0, "throughput_tokens_per_s": 1000.0},
        {"mean_ttft_s": 2.0, "throughput_tokens_per_s": 1000.1},
    ]
    scale = Scale.around(objectives.matrix(rows))
    both_volume, first_volume = (scale.hypervolume(objectives.matrix(r)) for r in (rows, rows[:1]))
    assert first_volume > 0.98 * both_volume


def test_front_and_volume_of_three_points_by_hand():
    rows = [
        {"mean_ttft_s": 1.0, "throughput_tokens_per_s": 10.0, "cost": 3.0},
        {"mean_ttft_s": 2.0, "throughput_tokens_per_s": 10.0, "cost": 1.0},
        {"mean_ttft_s": 2.0, "throughput_tokens_per_s": 9.0, "cost": 2.0},
    ]
    assert OBJECTIVES.front(rows) == [0, 1]
    objectives = Objectives.from_names(["mean_ttft", "cost"])
    scale = Scale(np.array([0.0, 0.0]), np.array([4.0, 4.0]))
    # (1, 3) and (2, 1) below (4, 4): 3 x 1 + 2 x 2, of 16.
    assert scale.hypervolume(objectives.matrix(rows)) == pytest.approx(7 / 16)
