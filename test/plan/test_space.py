"""The decision space: no configuration twice, none that SGLang could not run."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_lab.plan.planner import make_space
from canopy_lab.plan.prices import load_prices
from canopy_lab.plan.request import PlanRequest
from canopy_lab.plan.sizes import halved_sizes, middle_size, round_size
from canopy_lab.plan.space import Configuration, Space


def space_with(**fields):
    defaults = {"dram_gib": (0.0, 1.0, 2.0), "disk_gib": (0.0, 4.0), "disks": ("a", "b")}
    return Space(**{**defaults, **fields})


def test_the_grid_has_every_configuration_once():
    grid = space_with(choices={"ttl": (None, 600.0)}).grid()
    assert len(grid) == len(set(grid))
    # 3 sizes of DRAM without a disk; 2 of DRAM x 2 classes x 1 size x 2 TTLs with one.
    assert len(grid) == 3 + 2 * 2 * 2


def test_the_count_equals_the_grids_length():
    large = space_with(
        instances=(1, 4), choices={"ttl": (None, 600.0), "page_size": (1, 64), "write_policy": ("write_through", "write_back")},
        bandwidths_mib_s={"a": (125.0, 1000.0)},
    )  # fmt: skip
    for space in (space_with(), large, space_with(disks=(), disk_gib=(0.0,)), large.finer(5, 3)):
        assert space.count() == len(space.grid())


def test_options_of_an_absent_tier_make_no_difference():
    configuration = Configuration(dram_gib=1, disk="a", disk_gib=0, ttl=60.0)
    assert configuration.normalised() == Configuration(dram_gib=1)
    assert Configuration(write_policy="write_back").normalised() == Configuration()


def test_alternatives_differ_in_one_choice():
    space = space_with(instances=(1, 4), choices={"ttl": (None, "group"), "page_size": (1, 64)})
    configuration = Configuration(dram_gib=1, disk="a", disk_gib=4)
    alternatives = space.alternatives(configuration)
    assert replace(configuration, disk="b") in alternatives
    assert replace(configuration, ttl="group") in alternatives
    assert replace(configuration, instances=4) in alternatives
    assert replace(configuration, page_size=64) in alternatives
    assert len(alternatives) == 4
    from_no_disk = space.alternatives(Configuration(dram_gib=1))
    assert Configuration(dram_gib=1, disk="b", disk_gib=4) in from_no_disk


def test_a_tier_that_is_added_gets_the_ttl_of_the_space():
    space = space_with(policy="wa", choices={"ttl": (600.0,)})
    grid = set(space.grid())
    for configuration in grid:
        assert set(space.alternatives(configuration)) <= grid


def test_bandwidth_that_is_sold_separately_is_in_the_grid():
    grid = space_with(bandwidths_mib_s={"a": (125.0, 1000.0)}).grid()
    assert {each.disk_mib_s for each in grid if each.disk == "a"} == {125.0, 1000.0}
    assert {each.disk_mib_s for each in grid if each.disk != "a"} == {0.0}


def test_a_finer_grid_has_equal_steps_around_the_first_sizes():
    finer_space = space_with().finer(4, 1)
    assert finer_space.dram_gib == (0, 0.5, 1, 1.5, 2)
    assert set(space_with().grid()) <= set(finer_space.grid())


def test_sizes_reach_the_largest_and_none_is_below_the_least():
    assert halved_sizes(700, 4) == (0, 88, 176, 352, 704)
    assert halved_sizes(1024, 3) == (0, 256, 512, 1024)
    assert halved_sizes(700, 30, min_size=2.0)[1] >= 2.0
    assert halved_sizes(0.1, 3, min_size=2.0) == (0, round_size(0.1))


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_midpoints_differ_from_both_sizes(size, other_size):
    low, high = sorted((round_size(size), round_size(other_size)))
    middle = middle_size(low, high)
    if middle is None:
        assert high <= low * 1.13
    else:
        assert low < middle < high
        assert round_size(middle) == middle


def test_halving_reaches_sizes_that_are_no_power_of_two():
    assert middle_size(256, 512) == 384
    assert middle_size(256, 384) == 320
    assert middle_size(0, 8, min_size=4.5) is None


@pytest.mark.parametrize("requested_gib", [0.0, 200.0])
@pytest.mark.parametrize("instances", [(1,), (4,), (1, 2, 4)])
@pytest.mark.parametrize("reusable_gib", [0.25, 0.1, 0.0])
def test_host_memory_never_exceeds_the_traces_reusable_kv(requested_gib, instances, reusable_gib):
    request = PlanRequest(dram_gib=requested_gib, instances=instances, disks=())
    space = make_space(request, 0.25, load_prices("local-nvme"), reusable_gib=reusable_gib)
    host_gib = [configuration.instances * configuration.dram_gib for configuration in space.grid()]
    assert max(host_gib) == pytest.approx(reusable_gib)
    assert len(host_gib) == space.count()
    for configuration in space.grid():
        assert all(space.fits(alternative) for alternative in space.alternatives(configuration))
