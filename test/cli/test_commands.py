"""Every command of ``canopy``: its options, its mistyped names, and the vocabulary all share."""

import argparse
import json
import shlex

import pytest

from canopy_lab.cli import simulate_system
from canopy_lab.cli.main import COMMANDS, EXAMPLES, PASS_THROUGH_COMMANDS, main, parser_of
from canopy_lab.sim.system.engine_profile import load_profile
from sglang_canopy import declared
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import check_served
from sglang_canopy.storage.settings import StorageSettings


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give a command"),
        (["documents"], "did you mean documents calibrate?"),
        (["serve-me"], "unknown command 'serve-me'"),
    ],
)
def test_an_unknown_command_is_answered_with_the_known_ones(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


EVERY_COMMAND = pytest.mark.parametrize("name", COMMANDS)
FILE_COMMANDS = ("advise", "characterize", "simulate", "simulate system", "plan", "plan ttl")


def actions_of(command: str) -> list[argparse.Action]:
    return [action for action in parser_of(command)[0]._actions if action.dest != "help"]


def flags_of(command: str) -> dict[str, argparse.Action]:
    return {flag: action for action in actions_of(command) for flag in action.option_strings}


@pytest.mark.parametrize("name", FILE_COMMANDS)
def test_the_input_is_the_first_positional_and_its_format_is_found(name) -> None:
    positionals = [action for action in actions_of(name) if not action.option_strings]
    assert [action.metavar for action in positionals] in (["TRACE"], ["LOG"])
    format_option = flags_of(name)["--format"]
    assert not format_option.required
    assert format_option.choices[0] == "auto"
    assert "auto" in format_option.help


@EVERY_COMMAND
def test_shared_flags_have_one_meaning(name) -> None:
    flags = flags_of(name)
    for flag, metavars in {
        "--url": ("URL",),
        "--jobs": ("N",),
        "--out": ("FILE", "FOLDER", "PLAN.yaml"),
        "--json-out": ("FILE", "OUT"),
        "--seed": ("K", "K,K"),
    }.items():
        if flag in flags:
            assert flags[flag].metavar in metavars, (name, flag)
    if "--json" in flags:
        assert flags["--json"].nargs == 0, "it prints JSON; --json-out FILE writes it"


@EVERY_COMMAND
def test_each_help_has_one_example_that_its_parser_accepts(name, capsys) -> None:
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert f"example: canopy {name}" in help_text
    argv = shlex.split(EXAMPLES[name])
    assert " ".join(argv).startswith(name)
    arguments = argv[len(name.split()) :]
    argv = ["--", *arguments] if name in PASS_THROUGH_COMMANDS else arguments
    parser_of(name)[0].parse_args(argv)


def test_lru_is_sglangs_and_canopy_lru_is_canopys_in_every_simulation(tmp_path, capsys) -> None:
    requests, new_ids = [], 0
    for i in range(60):  # long nodes of which one block is needed
        shared = [1000 + i % 7 * 10 + block for block in range(6)]
        requests.append({"timestamp": i, "input_length": 9 * 512, "output_length": 1,
                     "hash_ids": [*shared, *range(5000 + new_ids, 5003 + new_ids)]})  # fmt: skip
        new_ids += 3
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in requests))

    def count_evictions(policy, *options):
        out = tmp_path / "rows.json"
        argv = [str(trace), "--policy", policy, "--capacity", "40", "--jobs", "1", *options]
        assert main(["simulate", *argv, "--json-out", str(out)]) == 0
        return [(row["evictions"], row["evicted_blocks"]) for row in json.loads(out.read_text())]

    sglang_rows, canopy_rows = count_evictions("lru,canopy-lru")
    assert sglang_rows != canopy_rows
    assert count_evictions("lru") == [sglang_rows]
    for policy, whole_nodes in (("lru", True), ("canopy-lru", False)):
        argv = [str(trace), "--profile", "llama-3.1-8b-h100", "--device-tokens", "20000"]
        parsed = parser_of("simulate system")[0].parse_args([*argv, "--policy", policy])
        options = (declared.read(cls, parsed) for cls in simulate_system.OPTIONS[:2])
        system = simulate_system._with_tiers(*options, load_profile("llama-3.1-8b-h100"))
        assert system.whole_nodes is system.touches_waiting is whole_nodes
    capsys.readouterr()


def test_tiers_of_a_server_take_canopy_lru_and_not_lru() -> None:
    for check in (check_served, lambda name: StorageSettings(capacity_bytes=10**8, policy=name)):
        check("canopy-lru")
        with pytest.raises(CanopyError, match="canopy-lru"):
            check("lru")
