"""The planner's pages name every metric, their commands parse, and their price file is one."""

import argparse
import json
import re
import shlex
from pathlib import Path

from canopy_lab.cli import plan
from canopy_lab.plan.objective import METRICS
from canopy_lab.plan.prices import parse_prices, price_list_names

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "guide" / "planner.md").read_text()
PRICES = (DOCS / "reference" / "price-list.md").read_text()


def parser():
    made = argparse.ArgumentParser()
    plan.add_arguments(made)
    return made


def test_every_metric_and_shipped_price_list_is_on_the_page():
    for name in (*METRICS, *price_list_names()):
        assert f"`{name}`" in PAGE, name


def test_the_example_prices_are_a_price_list():
    (example,) = re.findall(r"^```json\n(.*?)^```", PRICES, re.M | re.S)
    prices = parse_prices(json.loads(example))
    assert prices.disk("io2-16000").read_bytes_per_s(100) == 4000 * 2**20


def test_the_commands_on_the_page_can_be_parsed():
    commands = re.findall(r"^    (canopy plan .*?[^\\])$", PAGE, re.M | re.S)
    assert len(commands) >= 3
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))[2:]
        parser().parse_args(words)
