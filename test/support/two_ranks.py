"""Two ranks, each a process that imports SGLang once and forks for each scenario.

They have a hash seed and an address space of their own, as SGLang's schedulers have.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]

Run = Callable[[str, Path], tuple[Any, Any]]


@contextlib.contextmanager
def two_ranks(log: Path) -> Iterator[Run]:
    """``run(scenario, folder)``: what the two ranks of ``rank_worker.py`` found."""
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            errors = stack.enter_context((log / f"rank-{rank}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "support.rank_worker", str(rank)],
                cwd=TESTS,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)

        def run(scenario: str, folder: Path) -> tuple[Any, Any]:
            for rank in ranks:
                assert rank.stdin is not None
                print(json.dumps([scenario, str(folder)]), file=rank.stdin, flush=True)
            found = []
            for number, rank in enumerate(ranks):
                assert rank.stdout is not None
                line = rank.stdout.readline()  # the test's own time limit ends a rank that hangs
                assert line.startswith("{"), (log / f"rank-{number}.log").read_text()[-3000:]
                found.append(json.loads(line)["found"])
            return found[0], found[1]

        yield run
