"""A mistake on a server's command line refuses the start with a sentence that names it."""

import argparse
import shlex
from pathlib import Path

import pytest
import yaml
from sglang.srt.arg_groups.choices import add_radix_eviction_policy_choices
from sglang.srt.server_args import ServerArgs

from canopy_documents.plugin import entry
from sglang_canopy.doctor.command_line import refusal_findings
from sglang_canopy.policy.registry import AUTO, live_names
from sglang_canopy.server.start import arguments

TABLE_FILE = Path(__file__).parents[2] / "fixtures" / "refusals.yaml"
REFUSED_LINES = [
    (f"{base_flags} {options}", sentence)
    for base_flags, rows in yaml.safe_load(TABLE_FILE.read_text(encoding="utf-8")).items()
    for options, _, sentence in (row.partition(" -> ") for row in rows.splitlines())
]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    add_radix_eviction_policy_choices([AUTO, *live_names()])  # as the plugin does
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    arguments.add_flags(None, parser)
    entry.ADDON.add_flags(None, parser)
    return parser


@pytest.mark.parametrize(("flags", "sentence"), REFUSED_LINES)
def test_a_mistake_refuses_the_start_with_the_remedy(parser, flags: str, sentence: str) -> None:
    sentences = []
    try:
        args = parser.parse_args(["--model-path", "/none", "--device", "cpu", *shlex.split(flags)])
        sentences += [finding.text for finding in refusal_findings(args)]
        arguments.check_arguments(args, args)
        entry.parse_options(args, args)
    except (SystemExit, argparse.ArgumentError) as refusal:
        sentences.append(str(refusal))
    assert any(sentence in text for text in sentences), sentences
