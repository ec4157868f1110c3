"""The commands of docs/guide/simulate.md parse, and the reference has every key of a row."""

import json
import re
import shlex
from pathlib import Path

from canopy_lab.cli import simulate
from canopy_lab.cli.main import main, parser_of
from sglang_canopy import declared

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "guide" / "simulate.md").read_text()
ROWS = (DOCS / "reference" / "simulators.md").read_text()


def test_the_pages_commands_parse():
    commands = re.findall(r"^    (canopy simulate (?!system).*?[^\\])$", PAGE, re.M | re.S)
    assert commands
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))[2:]
        declared.read(simulate.Options, parser_of("simulate")[0].parse_args(words))


def test_every_key_of_a_row_is_on_the_page(tmp_path):
    trace = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(line) + "\n")
    out = tmp_path / "rows.json"
    command = ["simulate", str(trace), "--format", "mooncake", "--policy", "lru"]
    assert main([*command, "--capacity", "1", "--json-out", str(out), "--jobs", "1"]) == 0
    keys = set(json.loads(out.read_text())[0])
    section = ROWS.split("### Rows")[1].split("##")[0]
    named = set(re.findall(r"`(\w+)`", section))
    named |= {f"uncached_tokens{end}" for end in named if re.fullmatch(r"_p\d+", end)}
    assert keys <= named
