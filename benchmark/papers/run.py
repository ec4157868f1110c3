"""Regenerate the papers' figures and tables on the traces and data sets that can be had here.

    python benchmark/papers/run.py --all
    python benchmark/papers/run.py --paper wa
    python benchmark/papers/run.py --paper kareto --only figure-13 table-1
    python benchmark/papers/run.py --list

Every artefact runs in a process of its own, two at a time, and writes
benchmark/papers/results/PAPER/KEY.json, KEY.md and, where it has one, its picture in docs/figures/papers.
docs/research/papers has the result of every figure, table, equation, algorithm and theorem of the four papers.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from artefact import RESULTS, ROOT, Artefact, Context, data_folder
from tqdm import tqdm

sys.path.append(str(ROOT / "benchmark"))
import result_file

PAPERS = ("wa", "tail", "cachetune", "kareto")


def artefacts(paper: str) -> tuple[Artefact, ...]:
    """The artefacts that the folder PAPER lists in its artefacts.py."""
    if not (Path(__file__).parent / paper / "artefacts.py").exists():
        return ()
    listed: tuple[Artefact, ...] = importlib.import_module(f"{paper}.artefacts").ARTEFACTS
    return listed


def run_one(paper: str, key: str, data: Path) -> None:
    """Run one artefact here and write its JSON."""
    artefact = next(a for a in artefacts(paper) if a.key == key)
    start = time.perf_counter()
    result = artefact.run(Context(data, paper, key))
    cpu = sum(os.times()[:4])
    row = {
        "shows": artefact.shows,
        "command": f"python benchmark/papers/run.py --paper {paper} --only {key}",
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(cpu, 1),
        "result": result,
    }
    path = RESULTS / paper / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result_file.write(path, row)


def _spawn(paper: str, key: str, data: Path) -> tuple[str, str, float, str]:
    start = time.perf_counter()
    command = [sys.executable, __file__, "--paper", paper, "--only", key, "--here"]
    done = subprocess.run(
        [*command, "--data", str(data)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    error = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]
    return paper, key, time.perf_counter() - start, error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="every paper")
    what.add_argument("--paper", choices=PAPERS, help="one paper")
    what.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--only", nargs="+", metavar="KEY", help="of that paper, these alone")
    parser.add_argument("--data", type=Path, help="default: $CANOPY_DATA, else ../shared/data")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    if options.only and not options.paper:
        parser.error("--only needs --paper")
    data = data_folder(options.data)
    papers = (options.paper,) if options.paper else PAPERS
    chosen = [(paper, a) for paper in papers for a in artefacts(paper)]
    if options.only:
        known = {a.key for _, a in chosen}
        if unknown := [key for key in options.only if key not in known]:
            parser.error(f"{options.paper} has no {unknown[0]}: it has {', '.join(sorted(known))}")
        chosen = [(paper, a) for paper, a in chosen if a.key in options.only]
    if options.list:
        for paper, artefact in chosen:
            print(f"{paper:10} {artefact.key:24} {artefact.shows}")
        return 0
    if not data.is_dir():
        parser.error(f"no folder {data}: give --data DIR or set CANOPY_DATA")
    if options.here:
        for paper, artefact in chosen:
            try:
                run_one(paper, artefact.key, data)
            except Exception:
                traceback.print_exc()
                return 1
        return 0
    chosen.sort(key=lambda pair: -pair[1].minutes)
    start, failed = time.perf_counter(), 0
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(_spawn, paper, a.key, data) for paper, a in chosen]
        for future in tqdm(running, unit="artefact", disable=None):
            paper, key, seconds, error = future.result()
            failed += bool(error)
            print(f"{paper:10} {key:24} {seconds:7.1f} s  {'FAILED: ' + error if error else 'ok'}")
    minutes = (time.perf_counter() - start) / 60
    print(f"{len(chosen) - failed} of {len(chosen)} regenerated in {minutes:.1f} min")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
