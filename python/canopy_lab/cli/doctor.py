"""``canopy doctor``: report refused or untested flags of a server, and gaps of the machine."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sglang_canopy.declared import declare


@dataclass(frozen=True, slots=True)
class Options:
    json: bool = declare(False, "--json", "the report as JSON, for scripts")
    server: tuple[str, ...] = declare(
        (), "SERVER", "the server's command line (sglang serve MODEL ...)", repeated=True,
        shown_default="none, only the machine",
    )  # fmt: skip


OPTIONS = (Options,)


def run(args: Options) -> int:
    """Return 0 if nothing prevents a start, else 1. Raises ``CanopyError`` for unknown flags."""
    from sglang_canopy.doctor.examine import examine

    report = examine(list(args.server))
    print(json.dumps(report.to_json(), indent=1) if args.json else report.text())
    return report.status
