"""Golden rows: results of the cache, the simulators, the planner and a server at a commit.

    python benchmark/golden/run.py                      # compute them all and write rows.json
    python benchmark/golden/run.py --check              # compute them again; 1 if a digit differs
    python benchmark/golden/run.py --check hits parity  # some parts only

Parts, each a module of this folder with ``tasks()`` and ``rows(task)``:

    hits            hits of every policy on three real traces at four sizes of the cache
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

from paths import HERE, use_checkout

PARTS = ("hits", "parity", "capacity_plan", "loaded_systems", "served")
SERIAL_PARTS = ("served",)
"""Parts whose tasks start servers: never two at a time."""
ROWS = HERE / "rows.json"
Rows = Mapping[str, Mapping[str, Any]]
"""Row -> its figures."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--check", action="store_true", help="compare with rows.json, write nothing"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default 2)")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    use_checkout()
    stored = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    has_failed = False
    for part in args.parts or PARTS:
        start = time.perf_counter()
        rows = compute_rows(part, 1 if part in SERIAL_PARTS else args.jobs)
        print(f"{part}: {len(rows)} rows in {time.perf_counter() - start:.0f} s", flush=True)
        if args.check:
            lines = differences(stored.get(part, {}), rows)
            print("\n".join(lines) or f"{part}: as in {ROWS.name}", flush=True)
            has_failed |= bool(lines)
        else:
            stored[part] = rows
            write_rows(stored)
    return int(has_failed)


def compute_rows(part: str, jobs: int) -> dict[str, Any]:
    """The rows of a part. Values are written to JSON and read back, as the stored rows were."""
    # Spawned: a fork would copy SGLang's threads. Each process lives for one part.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        tasks = pool.submit(tasks_of, part).result()
        results = list(pool.map(rows_of, [part] * len(tasks), tasks))
    return json.loads(json.dumps({name: row for rows in results for name, row in rows.items()}))


def tasks_of(part: str) -> list[Any]:
    use_checkout()
    return importlib.import_module(part).tasks()


def rows_of(part: str, task: Any) -> dict[str, Any]:
    use_checkout()
    return importlib.import_module(part).rows(task)


def write_rows(stored: dict[str, Any]) -> None:
    """One row a line."""
    lines = []
    for part in PARTS:
        if part in stored:
            rows = ",\n".join(
                f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in stored[part].items()
            )
            lines.append(f' "{part}": {{\n{rows}\n }}')
    ROWS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def differences(stored: Rows, fresh: Rows) -> list[str]:
    """A line for each figure that differs in any digit, and for each row that only one side has."""
    lines = []
    for name in [*stored, *(name for name in fresh if name not in stored)]:
        if name not in fresh:
            lines.append(f"- {name}: gone")
        elif name not in stored:
            lines.append(f"+ {name}: new")
        else:
            lines += _row_differences(name, stored[name], fresh[name])
    return lines


def _row_differences(name: str, stored: Mapping[str, Any], fresh: Mapping[str, Any]) -> list[str]:
    lines = []
    for figure in [*stored, *(f for f in fresh if f not in stored)]:
        old, new = stored.get(figure, "nothing"), fresh.get(figure, "nothing")
        if old != new:
            lines.append(f"! {name}: {figure} was {old!r}, is {new!r}{_relative_change(old, new)}")
    return lines


def _relative_change(old: Any, new: Any) -> str:
    """Return the difference of two numbers as text."""
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (old, new))
    if not numbers or not old:
        return ""
    return f" ({(new - old) / old:+.3%})"


if __name__ == "__main__":
    sys.exit(main())
