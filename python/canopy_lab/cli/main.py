"""The ``canopy`` command: one module per subcommand, imported on demand."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from canopy_lab.compiled.finder import use as use_compiled
from sglang_canopy import __version__
from sglang_canopy.errors import CanopyError

COMMANDS = {
    "advise": "from a log to a page: what policies, hints and memory would win on it",
    "doctor": "what of a server's flags is refused or untested, and what this machine lacks",
    "simulate": "hit ratios of policies at several capacities on a trace, without a server",
    "simulate-system": "TTFT, throughput and hits of instances with memory and disk, on a trace",
    "compile": "make plan, simulate-system and validate about twice as fast",
    "profile": "measure a live server's costs, for the simulator and the planner",
    "characterize": "how a trace reuses KV",
    "plan": "how much DRAM and disk a workload should get, at what price",
    "validate": "what a plan predicted beside what its server's log says, and the error",
    "ttl": "a plan file with a TTL for each prefix group, within a disk budget",
    "overlay": "make a multi-tenant trace from single conversations",
    "synth": "make a synthetic trace with published statistics",
    "hint": "tell every worker behind a gateway when a conversation ends or goes on",
    "explain": "where a conversation's KV is, when it would go, and why the last of it went",
    "top": "a running server's tiers, hits and evictions, live",
    "ui": "a running server's page in this machine's browser",
    "calibrate": "measure which share of a document a server should recompute",
    "chunk-eval": "quality lost and time saved by reusing document KV, on a model",
}


SIMULATES = ("plan", "simulate-system", "validate")
"""Commands that take the compiled simulator where there is one."""
TAKES_THE_REST = ("doctor",)
"""Commands whose arguments are another program's, options too."""


def _whole(argv: list[str]) -> list[str]:
    """``argv`` with ``--`` before the first argument that is none of the command's own options."""
    own = next(i for i, a in enumerate(argv) if a in TAKES_THE_REST) + 1
    while own < len(argv) and argv[own] in ("-h", "--help", "--json", "--"):
        own += 1
    return argv if "--" in argv[:own] else [*argv[:own], "--", *argv[own:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status: 0, or 2 for a user's mistake."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="canopy", description="Canopy's tools for KV caching.")
    parser.add_argument("--version", action="version", version=f"canopy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((a for a in argv if not a.startswith("-")), None)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            if name in SIMULATES:
                use_compiled()
            module = importlib.import_module(f"canopy_lab.cli.{name.replace('-', '_')}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    args = parser.parse_args(_whole(argv) if chosen in TAKES_THE_REST else argv)
    try:
        return args.run(args) or 0
    except CanopyError as error:
        print(f"canopy {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
