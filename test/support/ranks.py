"""Two ranks, each a process that imports SGLang once and forks for each scenario.

    cd test && python -m support.ranks RANK

Each has its own hash seed and address space, as SGLang's schedulers have. They communicate through a real
process group. A scenario is ``MODULE:FUNCTION`` of ``support``; it takes the rank and a folder.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]

RankRun = Callable[[str, Path], tuple[Any, Any]]


@contextlib.contextmanager
def two_ranks(log_folder: Path) -> Iterator[RankRun]:
    """Yield ``run(scenario, folder)``, which returns the results of the two ranks."""
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(2):
            error_log = stack.enter_context((log_folder / f"rank-{rank}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "support.ranks", str(rank)],
                cwd=TESTS,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=error_log,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)

        def run(scenario: str, folder: Path) -> tuple[Any, Any]:
            for process in processes:
                assert process.stdin is not None
                print(json.dumps([scenario, str(folder)]), file=process.stdin, flush=True)
            results = []
            for rank, process in enumerate(processes):
                assert process.stdout is not None
                line = "\n"  # the test's time limit ends a blocked rank
                while line and not line.startswith(("{", "failed")):  # libraries print, too
                    line = process.stdout.readline()
                assert line.startswith("{"), (log_folder / f"rank-{rank}.log").read_text()[-3000:]
                results.append(json.loads(line)["result"])
            return results[0], results[1]

        yield run


def run_scenarios(rank: int) -> None:
    """Run each line of the input, ``[SCENARIO, FOLDER]``, in a child process, which prints its result."""
    import torch

    import support.rank_scenarios  # SGLang, once

    assert support.rank_scenarios
    for line in sys.stdin:
        scenario, folder = json.loads(line)
        child_pid = os.fork()  # only imports have happened, so no thread is lost
        if child_pid == 0:
            try:
                torch.distributed.init_process_group(
                    "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
                )
                module_name, _, function_name = scenario.partition(":")
                module = importlib.import_module(f"support.{module_name}")
                result = getattr(module, function_name)(rank, Path(folder))
                torch.distributed.barrier()  # neither rank ends while the other sends to it
                print(json.dumps({"result": result}), flush=True)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(child_pid, 0)[1] != 0:
            print("failed", flush=True)


if __name__ == "__main__":
    run_scenarios(int(sys.argv[1]))
