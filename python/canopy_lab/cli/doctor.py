"""``canopy doctor``: what of a server's flags is refused or untested, and what the machine lacks."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the report as JSON, for scripts")
    parser.add_argument(
        "server",
        nargs="*",
        metavar="SERVER",
        help="the server's command line, with or without 'sglang serve' (default: none, only the "
        "machine)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 if nothing stands in the way of a start, else 1. Raises ``CanopyError`` for flags
    that SGLang does not know."""
    from sglang_canopy.doctor.examine import examine

    report = examine(args.server)
    print(json.dumps(report.to_json(), indent=1) if args.json else report.text())
    return report.status
