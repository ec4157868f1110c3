"""docs/simulate.md names every option of the command and every key of its rows."""

import argparse
import json
import re
import shlex
from pathlib import Path

from sglang_canopy.cli import simulate
from sglang_canopy.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulate.md").read_text()


def parser():
    made = argparse.ArgumentParser()
    simulate.add_arguments(made)
    return made


def test_every_option_is_on_the_page_and_no_other():
    options = {o for a in parser()._actions for o in a.option_strings} - {"-h", "--help"}
    assert options == set(re.findall(r"--[a-z][\w-]*", PAGE)) - {"--data"}


def test_the_pages_commands_parse():
    commands = re.findall(r"^    (canopy simulate .*?[^\\])$", PAGE, re.M | re.S)
    assert commands
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))[2:]
        simulate.make_plan(parser().parse_args(words))


def test_every_key_of_a_row_is_on_the_page(tmp_path):
    trace = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(line) + "\n")
    out = tmp_path / "rows.json"
    command = ["simulate", "--trace", str(trace), "--format", "mooncake", "--policy", "lru"]
    assert main([*command, "--capacity", "1", "--json", str(out), "--jobs", "1"]) == 0
    keys = set(json.loads(out.read_text())[0])
    section = PAGE.split("## Rows")[1].split("##")[0]
    named = set(re.findall(r"`(\w+)`", section))
    named |= {f"uncached_tokens{end}" for end in named if re.fullmatch(r"_p\d+", end)}
    assert keys <= named
