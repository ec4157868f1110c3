"""``canopy doctor``: what of a server's flags is refused or untested, and what the machine lacks."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sglang_canopy.declared import declare


@dataclass(frozen=True, slots=True)
class Options:
    json: bool = declare(False, "--json", "the report as JSON, for scripts")
    server: tuple[str, ...] = declare(
        (), "SERVER", "the server's command line, with or without 'sglang serve'", repeated=True,
        shown_default="none, only the machine",
    )  # fmt: skip


OPTIONS = (Options,)


def run(args: Options) -> int:
    """Returns 0 if nothing stands in the way of a start, else 1. Raises ``CanopyError`` for flags
    that SGLang does not know."""
    from sglang_canopy.doctor.examine import examine

    report = examine(list(args.server))
    print(json.dumps(report.to_json(), indent=1) if args.json else report.text())
    return report.status
