"""Price lists: steps, bandwidth tied to size, and messages for wrong lists."""

import json
import re

import pytest

from canopy_lab.plan.disk_class import MIB
from canopy_lab.plan.prices import load_prices, parse_prices, price_list_names
from sglang_canopy.errors import CanopyError

SMALL_PRICES = {
    "name": "small",
    "gpu_per_hour": 2.0,
    "dram_per_gib_hour": 0.01,
    "disks": {"ssd": {"per_gib_month": 0.073, "bandwidth": {"base_mib_s": 100}}},
}


def variant(**fields):
    return {**SMALL_PRICES, **fields}


def disk_with(**fields):
    disk_class = {"per_gib_month": 0.1, "bandwidth": {"base_mib_s": 100}, **fields}
    return parse_prices(variant(disks={"d": disk_class})).disk("d")


def test_cost_of_an_hour_is_gpus_dram_and_a_disk_of_each_instance():
    prices = parse_prices(variant(gpus_per_instance=2))
    # 3 x (2 x 2 + 50 x 0.01 + 1000 x 0.073 / 730)
    sizes = {"instances": 3, "dram_gib": 50, "disk": "ssd", "disk_gib": 1000}
    assert prices.price_per_hour(**sizes) == pytest.approx(13.8)
    assert prices.price_per_hour(instances=1, dram_gib=0) == pytest.approx(4.0)


def test_a_shared_store_is_paid_once():
    store = {**SMALL_PRICES["disks"]["ssd"], "shared": True}
    prices = parse_prices(variant(disks={"ssd": SMALL_PRICES["disks"]["ssd"], "store": store}))
    bought = {"instances": 3, "dram_gib": 0, "disk_gib": 1000}
    without_disk = prices.price_per_hour(instances=3, dram_gib=0)
    assert prices.price_per_hour(**bought, disk="store") - without_disk == pytest.approx(0.1)
    assert prices.price_per_hour(**bought, disk="ssd") - without_disk == pytest.approx(0.3)
    assert (prices.disk_count("ssd", 3), prices.disk_count("store", 3)) == (3, 1)


def test_bandwidth_is_sold_between_a_minimum_and_a_maximum():
    disk = disk_with(
        bandwidth={"per_iops_mib_s": 0.25, "io_kib": 256},
        iops={"amount": 3000, "most": 16_000, "included": 3000, "per_month": 0.005},
        throughput={"amount": 125, "most": 1000, "included": 125, "per_month": 0.04},
    )
    assert disk.bandwidths() == (125, 1000)
    assert disk.read_bytes_per_s(10) == 125 * MIB
    assert disk.read_bytes_per_s(10, 600.0) == 600 * MIB
    # 1,000 MiB/s need 4,000 IOPS (3,000 are free), and 875 MiB/s more than is included.
    monthly_price = 10 * 0.1 + 1000 * 0.005 + 875 * 0.04
    assert disk.price_per_hour(10, mib_s=1000.0) * 730 == pytest.approx(monthly_price)
    assert disk_with().bandwidths() is None


def test_small_pages_are_many_operations():
    disk = disk_with(
        bandwidth={"io_kib": 256},
        iops={"amount": 3000, "most": 16_000, "included": 3000, "per_month": 0.005},
        throughput={"amount": 125, "most": 1000, "included": 125, "per_month": 0.04},
    )
    # Pages of 16 KiB: 1,000 MiB/s would be 64,000 operations a second; 16,000 are sold.
    assert disk.iops_for(1000.0, 16 * 1024) == 16_000
    assert disk.read_bytes_per_s(10, 1000.0, 16 * 1024) == 250 * MIB
    assert disk.read_bytes_per_s(10, 1000.0, 1 << 20) == 1000 * MIB
    price_with_small_pages = disk.price_per_hour(10, mib_s=1000.0, page_bytes=1 << 14)
    assert price_with_small_pages > disk.price_per_hour(10, mib_s=1000.0)


def test_iops_beyond_the_included_cost_each_step_at_its_price():
    disk = disk_with(
        per_gib_month=0,
        iops={"amount": 70_000, "included": 2_000, "per_month": [[32e3, 0.5], [64e3, 0.2], [None, 0.1]]},
    )  # fmt: skip
    monthly_price = 30_000 * 0.5 + 32_000 * 0.2 + 6_000 * 0.1
    assert disk.price_per_hour(10) * 730 == pytest.approx(monthly_price)


def test_bandwidth_grows_with_the_size_up_to_its_limit():
    disk = disk_with(bandwidth={"base_mib_s": 120, "per_gib_mib_s": 0.5, "most_mib_s": 350})
    assert disk.read_bytes_per_s(100) == 170 * MIB
    assert disk.read_bytes_per_s(460) == 350 * MIB
    assert disk.read_bytes_per_s(9000) == 350 * MIB


def test_sizes_are_sold_in_steps_from_the_smallest():
    disk = disk_with(smallest_gib=375, step_gib=375)
    assert [disk.bought_gib(gib) for gib in (1, 375, 376, 1500)] == [375, 375, 750, 1500]
    assert disk.price_per_hour(1) == disk.price_per_hour(375) < disk.price_per_hour(376)


def test_the_error_of_a_too_large_size_has_the_maximum():
    with pytest.raises(CanopyError, match=r"up to 100 GiB, 101 GiB were asked for"):
        disk_with(largest_gib=100).bought_gib(101)


@pytest.mark.parametrize("name", price_list_names())
def test_every_shipped_list_is_an_example_and_names_missing_sources_once(name):
    prices = load_prices(name)
    assert prices.is_example
    *sourced, unsourced = prices.sources
    assert sourced
    assert all(re.search(r", https?://\S+, 20\d\d[-\d]*$", source) for source in sourced)
    assert unsourced.startswith("check before use: ")
    for disk in prices.disks.values():
        assert disk.price_per_hour(disk.smallest_gib) > 0
        assert disk.read_bytes_per_s(2000) >= disk.read_bytes_per_s(disk.smallest_gib) > 0


def test_essd_follows_the_published_formulas():
    prices = load_prices("alibaba-essd")
    assert prices.disk("essd-pl1").read_bytes_per_s(300) == (120 + 150) * MIB
    assert prices.disk("essd-pl0").read_bytes_per_s(100) == (100 + 25) * MIB
    assert prices.disk("essd-pl3").read_bytes_per_s(9000) == 4000 * MIB
    # The fastest class is sold from 1,261 GiB on.
    assert prices.disk("essd-pl3").bought_gib(10) == 1261


def test_io2_pays_for_its_throughput_in_iops():
    io2 = load_prices("aws-us-east-1").disk("io2")
    assert io2.bandwidths() == (256, 4000)
    assert io2.read_bytes_per_s(100, 4000.0) == 4000 * MIB
    monthly_price = 100 * 0.125 + 16_000 * 0.065  # operations of 256 KiB
    assert io2.price_per_hour(100, mib_s=4000.0) * 730 == pytest.approx(monthly_price)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "must be a JSON object"),
        (variant(gpu_per_hour=-1), "gpu_per_hour must be a number of 0 or more"),
        (variant(gpu_per_hours=1), "unknown field 'gpu_per_hours'; did you mean 'gpu_per_hour'"),
        (variant(disks={"d": {"per_gib_month": 1}}), "has no bandwidth"),
        (variant(disks={"d": {"per_gib_month": [[10, 1]]}}), r"\[\[up_to, price\]"),
        (
            variant(disks={"d": {"per_gib_month": [[10, 1], [5, 1], [None, 1]]}}),
            "steps of per_gib_month must rise",
        ),
        (variant(disks={"d": {"per_gib_month": 1, "billing": "weekly"}}), "billing must be one of"),
        (variant(format="other"), "canopy-prices"),
        (
            variant(disks={"d": {"per_gib_month": 1, "throughput": {"amount": 9, "most": 1}}}),
            "most \\(1\\) lies below amount \\(9\\)",
        ),
        (variant(gpus_per_instance=1.5), "gpus_per_instance must be a whole number"),
        (variant(dram_per_gib_hour=True), "dram_per_gib_hour must be a number"),
    ],
)
def test_a_wrong_list_is_refused_with_the_field(document, message):
    with pytest.raises(CanopyError, match=message):
        parse_prices(document)


def test_an_unknown_name_is_refused_with_the_nearest_and_a_price_file_is_read(tmp_path):
    with pytest.raises(CanopyError, match=r"unknown disk class 'gp33'.*gp3, io2.*'gp3'\?"):
        load_prices("aws-us-east-1").disk("gp33")
    with pytest.raises(CanopyError, match=r"no price list 'aws-us-east'.*did you mean 'aws-us-eas"):
        load_prices("aws-us-east")
    price_file = tmp_path / "prices.json"
    price_file.write_text("{")
    with pytest.raises(CanopyError, match="is not JSON"):
        load_prices(price_file)
    price_file.write_text(json.dumps(SMALL_PRICES))
    assert load_prices(price_file).name == "small"
