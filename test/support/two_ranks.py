"""Two ranks, each a process that imports SGLang once and forks for each scenario.

They have a hash seed and an address space of their own, as SGLang's schedulers have. A worker is a
module whose ``main`` is ``answer``.
"""

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]

Run = Callable[[str, Path], tuple[Any, Any]]


@contextlib.contextmanager
def two_ranks(log: Path, worker: str = "support.rank_worker") -> Iterator[Run]:
    """Yield ``run(scenario, folder)``, which returns the results of two ranks of ``worker``."""
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            errors = stack.enter_context((log / f"rank-{rank}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", worker, str(rank)],
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
                line = "\n"  # the test's time limit ends a blocked rank
                while line and not line.startswith(("{", "failed")):  # others write here as well
                    line = rank.stdout.readline()
                assert line.startswith("{"), (log / f"rank-{number}.log").read_text()[-3000:]
                found.append(json.loads(line)["found"])
            return found[0], found[1]

        yield run


def answer(run: Callable[[str, int, Path], Any]) -> None:
    """Run a worker: each line of its input runs in a child process, which prints its result."""
    rank = int(sys.argv[1])
    for line in sys.stdin:
        scenario, folder = json.loads(line)
        child = os.fork()  # only imports have happened, so no thread is lost
        if child == 0:
            try:
                found = run(scenario, rank, Path(folder))
                print(json.dumps({"found": found}), flush=True)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(child, 0)[1] != 0:
            print("failed", flush=True)
