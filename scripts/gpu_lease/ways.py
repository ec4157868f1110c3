"""Write the table that selects attention kernels (canopy_kernel/ways.json) from measured times."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from result import result

from canopy_kernel import ways


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="as gpu_check.py --json writes it")
    parser.add_argument("out", type=Path)
    return parser.parse_args(words)


def main() -> None:
    given = arguments()
    rows = [dataclasses.asdict(m) for m in ways.of_report(json.loads(given.report.read_text()))]
    given.out.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        result("attention", best=min(row["ms"], key=row["ms"].get), **row)


if __name__ == "__main__":
    main()
