"""Pages of the planner and of the simulator: commands parse, metrics and keys are named, prices are a list."""

import json
import re
import shlex
from pathlib import Path

import pytest

from canopy_lab.cli import plan, simulate
from canopy_lab.cli.main import main, parser_of
from canopy_lab.plan.objective import METRICS
from canopy_lab.plan.prices import parse_prices, price_list_names
from sglang_canopy import declared

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE_TEXT = (DOCS / "guide" / "planner.md").read_text()
PRICES_TEXT = (DOCS / "reference" / "price-list.md").read_text()


def test_every_metric_and_shipped_price_list_is_on_a_page():
    for name in (*METRICS, *price_list_names()):
        assert f"`{name}`" in PRICES_TEXT, name


def test_the_example_of_a_price_list_is_valid():
    (example,) = re.findall(r"^```json\n(.*?)^```", PRICES_TEXT, re.M | re.S)
    prices = parse_prices(json.loads(example))
    assert prices.disk("io2-16000").read_bytes_per_s(100) == 4000 * 2**20


COMMAND_BY_PAGE = {
    "planner": ("plan", r"canopy plan ", plan.OPTIONS[1:4]),
    "simulate": ("simulate", r"canopy simulate (?!system)", [simulate.Options]),
}


@pytest.mark.parametrize("page", COMMAND_BY_PAGE)
def test_the_commands_on_the_page_can_be_parsed(page):
    command, prefix, option_classes = COMMAND_BY_PAGE[page]
    text = (DOCS / "guide" / f"{page}.md").read_text()
    commands = re.findall(rf"^    ({prefix}.*?[^\\])$", text, re.M | re.S)
    assert commands
    for line in commands:
        argv = shlex.split(line.replace("\\\n", " "))[2:]
        args = parser_of(command)[0].parse_args(argv)
        for option_class in option_classes:
            declared.read(option_class, args)


def test_every_key_of_a_row_is_on_the_page(tmp_path):
    trace = tmp_path / "t.jsonl"
    request = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(request) + "\n")
    out = tmp_path / "rows.json"
    command = ["simulate", str(trace), "--format", "mooncake", "--policy", "lru"]
    assert main([*command, "--capacity", "1", "--json-out", str(out), "--jobs", "1"]) == 0
    keys = set(json.loads(out.read_text())[0])
    section = (DOCS / "reference" / "simulators.md").read_text().split("### Rows")[1].split("##")[0]
    documented = set(re.findall(r"`(\w+)`", section))
    documented |= {f"uncached_tokens{end}" for end in documented if re.fullmatch(r"_p\d+", end)}
    assert keys <= documented


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_example_prints_the_pages_output(data_dir, capsys) -> None:
    example = PAGE_TEXT[PAGE_TEXT.index("## An example") : PAGE_TEXT.index("**The choice is")]
    (command,) = re.findall(r"^    canopy (plan .*?[^\\])$", example, re.M | re.S)
    argv = shlex.split(command.replace("\\\n", " "))
    argv[1] = str(data_dir / "mooncake" / argv[1])
    assert main(argv) == 0
    printed = " ".join(capsys.readouterr().out.split())
    (evaluated,) = re.findall(r"It evaluates (\d+ configurations)", example)
    (output,) = re.findall(r"^```\n(.*?)^```", example, re.M | re.S)
    for line in (evaluated, *filter(None, map(str.strip, output.splitlines()))):
        assert " ".join(line.split()) in printed, line
