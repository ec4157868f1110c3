"""Kill a busy disk store with -9 at random instants and check every page of its folder.

    python benchmark/tiers/crash.py --kills 200

A child writes from two threads while it reads, uses and sweeps, in a store so small that pages
are evicted all along; the content of a page is a function of its key. After each kill the store
is opened again, every page read, and its bytes compared with that function; the next child
continues on the same folder. Prints JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from support.crash import CrashCounts, kill_once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to put the store (default: temporary)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="canopy-crash-"))
    counts, begin = CrashCounts(), time.monotonic()
    for i in range(options.kills):
        kill_once(folder / "store", options.seed + 1000 * i, counts)
        if sys.stderr.isatty():
            print(f"\r{counts.kills} kills, {counts.wrong} wrong", end="", file=sys.stderr)
    found = dataclasses.asdict(counts)
    found["survived_share"] = round(counts.survived / max(1, counts.acknowledged), 4)
    found["seconds"] = round(time.monotonic() - begin, 1)
    print(json.dumps(found, indent=1))
    shutil.rmtree(folder / "store")
    sys.exit(bool(counts.wrong or counts.start_failures))


if __name__ == "__main__":
    main()
