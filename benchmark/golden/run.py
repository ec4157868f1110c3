"""Golden rows: results of the cache, the simulators, the planner and a server at a commit.

    python benchmark/golden/run.py                      # compute all rows and write rows.json
    python benchmark/golden/run.py --check              # compute them again; exit status 1 if a digit differs
    python benchmark/golden/run.py --check hits parity  # some parts only

Parts, each a module of this folder with ``tasks()`` and ``rows(task)``:

    hits            hits of every policy on three real traces at four cache sizes
    parity          every hit and victim of the parity suites' streams, simulated and served
    capacity_plan   a plan: each configuration that was tried
    loaded_systems  TTFT of simulated servers: queue orders, the gate, tiers, write policies
    served          a replay against real servers on the CPU

Set CANOPY_DATA to the folder of the real traces. Tasks run on ``--jobs`` processes, servers one
after the other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from paths import GOLDEN_FOLDER, use_checkout

PARTS = ("hits", "parity", "capacity_plan", "loaded_systems", "served")
SERIAL_PARTS = ("served",)
"""Parts whose tasks start servers: never two at a time."""
ROWS_FILE = GOLDEN_FOLDER / "rows.json"
Rows = Mapping[str, Mapping[str, Any]]
"""Label of a row -> its figures by name."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--check", action="store_true", help="compare with rows.json")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default 2)")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    use_checkout()
    stored_parts = json.loads(ROWS_FILE.read_text()) if ROWS_FILE.exists() else {}
    differs = False
    for part in args.parts or PARTS:
        start_s = time.perf_counter()
        rows = compute_rows(part, 1 if part in SERIAL_PARTS else args.jobs)
        print(f"{part}: {len(rows)} rows in {time.perf_counter() - start_s:.0f} s", flush=True)
        if args.check:
            lines = differences(stored_parts.get(part, {}), rows)
            print("\n".join(lines) or f"{part}: as in {ROWS_FILE.name}", flush=True)
            differs |= bool(lines)
        else:
            stored_parts[part] = rows
            write_rows(stored_parts)
    return int(differs)


def compute_rows(part: str, jobs: int) -> dict[str, Any]:
    """Return the rows of a part, as JSON reads them back: the stored rows were written and read too."""
    # Spawned: a fork would copy SGLang's threads. Each process lives for one part.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        tasks = pool.submit(tasks_of, part).result()
        rows_of_tasks = list(pool.map(rows_of, [part] * len(tasks), tasks))
    part_rows = {label: row for rows in rows_of_tasks for label, row in rows.items()}
    return json.loads(json.dumps(part_rows))


def tasks_of(part: str) -> list[Any]:
    use_checkout()
    return importlib.import_module(part).tasks()


def rows_of(part: str, task: Any) -> dict[str, Any]:
    use_checkout()
    return importlib.import_module(part).rows(task)


def write_rows(stored_parts: dict[str, Any]) -> None:
    """Write rows.json, with one row a line."""
    lines = []
    for part in PARTS:
        if part in stored_parts:
            rows = ",\n".join(
                f"  {json.dumps(label)}: {json.dumps(row)}"
                for label, row in stored_parts[part].items()
            )
            lines.append(f' "{part}": {{\n{rows}\n }}')
    ROWS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def differences(stored: Rows, fresh: Rows) -> list[str]:
    """Return a line for each figure that differs in any digit, and for each row that only one side has."""
    lines = []
    for label in [*stored, *(label for label in fresh if label not in stored)]:
        if label not in fresh:
            lines.append(f"- {label}: gone")
        elif label not in stored:
            lines.append(f"+ {label}: new")
        else:
            lines += _row_differences(label, stored[label], fresh[label])
    return lines


def _row_differences(label: str, stored: Mapping[str, Any], fresh: Mapping[str, Any]) -> list[str]:
    lines = []
    for figure in [*stored, *(f for f in fresh if f not in stored)]:
        was, now = stored.get(figure, "nothing"), fresh.get(figure, "nothing")
        if was != now:
            lines.append(f"! {label}: {figure} was {was!r}, is {now!r}{_relative_change(was, now)}")
    return lines


def _relative_change(was: Any, now: Any) -> str:
    """Return the change of a number in percent, as text; ``""`` without two numbers."""
    are_numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (was, now))
    if not are_numbers or not was:
        return ""
    return f" ({(now - was) / was:+.3%})"


if __name__ == "__main__":
    sys.exit(main())
