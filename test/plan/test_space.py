"""The decision space: no configuration twice, none that SGLang could not run."""

import pytest

from sglang_canopy.errors import CanopyError
from sglang_canopy.plan.space import Configuration, Space, gib_text, sizes


def space(**fields):
    given = {"dram_gib": (0.0, 1.0, 2.0), "disk_gib": (0.0, 4.0), "disks": ("a", "b")}
    return Space(**{**given, **fields})


def test_the_grid_has_every_configuration_once():
    grid = space(ttls=(None, 600.0)).grid()
    assert len(grid) == len(set(grid))
    # 3 sizes of DRAM without a disk; 2 of DRAM x 2 classes x 1 size x 2 TTLs with one.
    assert len(grid) == 3 + 2 * 2 * 2


def test_no_disk_without_dram():
    assert all(c.dram_gib > 0 for c in space().grid() if c.disk)


def test_what_an_absent_tier_would_do_makes_no_difference():
    one = Configuration(dram_gib=1, disk="a", disk_gib=0, ttl=60.0, disk_policy="wa")
    assert one.normal() == Configuration(dram_gib=1)
    assert Configuration(host_policy="wa").normal() == Configuration()


def test_neighbours_differ_in_one_thing():
    s = space(ttls=(None, "group"), instances=(1, 4))
    around = s.neighbours(Configuration(dram_gib=1, disk="a", disk_gib=4))
    assert Configuration(dram_gib=2, disk="a", disk_gib=4) in around
    assert Configuration(dram_gib=1) in around
    assert Configuration(dram_gib=1, disk="b", disk_gib=4) in around
    assert Configuration(dram_gib=1, disk="a", disk_gib=4, ttl="group") in around
    assert Configuration(instances=4, dram_gib=1, disk="a", disk_gib=4) in around
    assert len(around) == 5  # a disk without DRAM is none
    beside_none = s.neighbours(Configuration(dram_gib=1))
    assert Configuration(dram_gib=1, disk="b", disk_gib=4) in beside_none


def test_a_tier_that_is_added_gets_a_policy_and_ttl_of_the_space():
    s = space(host_policies=("wa",), disk_policies=("s3fifo",), ttls=(600.0,))
    grid = set(s.grid())
    for configuration in grid:
        assert set(s.neighbours(configuration)) <= grid


def test_sizes_are_round_and_reach_the_largest():
    assert sizes(700, 4) == (0, 128, 256, 512, 1024)
    assert sizes(1024, 3) == (0, 256, 512, 1024)
    assert sizes(0.3, 2) == (0, 0.25, 0.5)
    assert sizes(700, 4, 1.5) == (0, 256, 384, 512, 768)


def test_a_row_gives_its_configuration_back():
    c = Configuration(2, 1.5, "a", 4.0, "group", "wa", "lru", "s3fifo")
    assert Configuration.from_json({**c.to_json(), "cost": 1.0}) == c
    assert c.label() == "2 x 1.5 GiB DRAM, 4 GiB a, group TTL, device wa, disk s3fifo"


def test_sizes_as_text():
    assert [gib_text(g) for g in (0.5, 64, 1536)] == ["512 MiB", "64 GiB", "1.5 TiB"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dram_gib": (1.0, 2.0)}, "dram_gib must be ascending sizes that begin with 0"),
        ({"instances": (0,)}, "instances must be whole numbers from 1"),
        ({"ttls": ()}, "ttls must have at least one"),
        ({"device_policies": ("lru", "no-such")}, "no-such"),
    ],
)
def test_a_wrong_space_is_refused(fields, message):
    with pytest.raises(CanopyError, match=message):
        space(**fields)
