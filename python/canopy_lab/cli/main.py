"""The ``canopy`` command: one module per subcommand, imported on demand."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from sglang_canopy import __version__, declared
from sglang_canopy.errors import CanopyError

COMMANDS = {
    "advise": "a page from a log: the gain of policies, hints and memory on it",
    "characterize": "how a trace reuses KV",
    "simulate": "hit ratios of policies at several capacities on a trace, without a server",
    "simulate system": "TTFT, throughput and hits of instances with memory and disk, on a trace",
    "plan": "the DRAM and disk that a workload should get, and their price",
    "plan ttl": "a TTL for each prefix group, within a disk budget",
    "validate": "a plan's predictions beside its server's log, and the error",
    "profile": "measure a live server's costs, for the simulator and the planner",
    "doctor": "refused or untested flags of a server, and faults of this machine",
    "page": "a running server's page in this machine's browser",
    "documents calibrate": "measure the share of a document that a server should recompute",
}
"""Names of one or two words; the second word is a subcommand."""
EXAMPLES = {
    "advise": "advise requests.jsonl --host-gb 200,400",
    "characterize": "characterize requests.jsonl --out report",
    "simulate": "simulate requests.jsonl --policy canopy-lru,wa --capacity 0.05,0.2",
    "simulate system": "simulate system requests.jsonl --profile llama-3.1-8b-h100 "
    "--device-tokens 300000 --policy wa",
    "plan": "plan requests.jsonl --slo 'p99_ttft<2s' --out plan.yaml",
    "plan ttl": "plan ttl server.log --budget-gb 500 --out plan.yaml",
    "validate": "validate server.log --plan plan.yaml --profile mine.json",
    "profile": "profile --url http://127.0.0.1:30000 --out mine.json",
    "doctor": "doctor sglang serve MODEL --radix-eviction auto",
    "page": "page --url http://10.0.0.1:30000",
    "documents calibrate": "documents calibrate --url http://127.0.0.1:30000 --out ratios.json",
}
"""An example command line for each help text."""
PASS_THROUGH_COMMANDS = ("doctor",)
"""Commands whose arguments, options included, belong to another program."""


def module_of(name: str) -> str:
    """Return the module of one of ``COMMANDS``."""
    return f"canopy_lab.cli.{name.replace(' ', '_')}"


def _pass_through(argv: list[str]) -> list[str]:
    """Insert ``--`` before the first argument of ``argv`` that is not the command's own option."""
    count = 0
    while count < len(argv) and argv[count] in ("-h", "--help", "--json", "--"):
        count += 1
    return argv if "--" in argv[:count] else [*argv[:count], "--", *argv[count:]]


def parser_of(name: str) -> tuple[argparse.ArgumentParser, Any]:
    """Return a command's parser and its module. Several groups of options have headings."""
    module = importlib.import_module(module_of(name))
    example = f"example: canopy {EXAMPLES[name]}"
    parser = argparse.ArgumentParser(
        prog=f"canopy {name}", description=COMMANDS[name], epilog=example
    )
    for group in module.OPTIONS:
        heading = (group.__doc__ or "").rstrip(".").lower()
        has_headings = len(module.OPTIONS) > 1
        declared.add_flags(parser.add_argument_group(heading) if has_headings else parser, group)
    return parser, module


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns its exit status, 2 for a user's mistake, 130 if interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = next((n for n in (" ".join(argv[:2]), *argv[:1]) if n in COMMANDS), None)
    if name is None:
        return _overview(argv)
    own_argv = argv[len(name.split()) :]
    parser, module = parser_of(name)
    args = parser.parse_args(_pass_through(own_argv) if name in PASS_THROUGH_COMMANDS else own_argv)
    try:
        return module.run(*(declared.read(group, args) for group in module.OPTIONS)) or 0
    except CanopyError as error:
        print(f"canopy {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _overview(argv: Sequence[str]) -> int:
    """Print ``--help``, ``--version`` or the error for an unknown command. Ends the program."""
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="canopy",
        usage="canopy COMMAND [--help] ...",
        description="Canopy's tools for KV caching.",
        epilog="commands:\n" + "\n".join(f"  {n:{width}}  {s}" for n, s in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"canopy {__version__}")
    if not argv or argv[0].startswith("-"):
        parser.parse_args(argv)
        parser.error("give a command; canopy --help lists them")
    subcommands = [n for n in COMMANDS if n.startswith(f"{argv[0]} ")]
    matches = subcommands or get_close_matches(argv[0], COMMANDS, n=3)
    hint = f"; did you mean {' or '.join(matches)}?" if matches else "; canopy --help lists them"
    parser.error(f"unknown command {argv[0]!r:.60}{hint}")


if __name__ == "__main__":
    sys.exit(main())
