"""Break lines of a package one at a time and count the broken versions that no test notices.

    python benchmark/mutation/run.py policy schedule --sample 60

A mutant differs in one operator, constant, condition or statement. Mutants are drawn with ``--seed``;
each runs in a fork that has the third-party packages loaded already, first with the package's own
tests, then, if it survives, with further tests (``TESTS``). Too much CPU time counts as noticed.
Writes ``benchmark/mutation/results.json`` after each mutant; the packages of earlier runs stay in it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NoReturn

# A fork loses the threads that a library has started: none may start any.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import pytest
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))
from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "python"
RESULTS = Path(__file__).parent / "results.json"
OURS = (
    "sglang_canopy",
    "canopy_kernel",
    "canopy_lab",
    "canopy_chunks",
    "support",
    "conftest",
    "test_",
)
TESTS: dict[str, tuple[list[str], list[str]]] = {
    "policy": (
        ["test/policy"],
        ["test/sim/test_tree.py", "test/sim/test_hybrid.py", "test/radix/test_parity.py"],
    ),
    "schedule": (["test/schedule"], []),
    "admission": (["test/admission"], ["test/server/scheduler/test_session_gate_in_scheduler.py"]),
    "whatif": (["test/whatif"], ["test/radix/test_exchange.py", "test/telemetry"]),
    "disk": (["test/disk"], ["test/storage/test_storage.py"]),
    "radix": (["test/radix"], ["test/storage/test_tiers_disk.py"]),
    "reuse": (["test/reuse"], ["test/policy"]),
}
"""Tests of each package: its own, and others that cover its survivors."""
CPU_FACTOR, CPU_LEAST_S = 4.0, 5.0
IDLE_S = 90.0


class Finder:
    """Import hook that gives ``module`` the code of a mutant."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(name, self.mutant.path, loader=self)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(compile(self.mutant.tree(), str(self.mutant.path), "exec"), module.__dict__)


class Quickest:
    """Pytest plugin that runs the tests with the least CPU ``seconds`` first, and ends the process if
    a test uses many times as much. If ``seconds`` is empty, it measures them instead.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self.known, self.seconds = dict(seconds), seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.known.get(item.nodeid, 0.0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begin = time.process_time()
        if self.known:
            limit_s = CPU_FACTOR * self.known.get(item.nodeid, 0.0) + CPU_LEAST_S
            signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends the process
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if not self.known:
            self.seconds[item.nodeid] = time.process_time() - begin
        return result


class Suite:
    """Tests that pass without a mutant, the quickest first, and the CPU time that they may take."""

    def __init__(self, tests: list[str]) -> None:
        self.tests = tests
        self.seconds: dict[str, float] = {}
        if not self.run(None):
            raise SystemExit(f"{' '.join(tests)} fails without a mutant: fix it first")

    def run(self, mutant: Mutant | None) -> bool:
        """Run the tests in a fork; return whether they pass, without too much CPU time or idling."""
        # A file: a pipe holds 64 KiB, less than the names of a large package's tests.
        with tempfile.TemporaryFile() as measured:
            pid = os.fork()
            if pid == 0:
                self._in_fork(mutant, measured)
            status = _wait(pid)
            measured.seek(0)
            self.seconds = json.loads(measured.read() or b"{}") or self.seconds
        return status == 0

    def _in_fork(self, mutant: Mutant | None, measured: IO[bytes]) -> NoReturn:
        os.setsid()
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silence, stream)
        for name in [name for name in sys.modules if name.startswith(OURS)]:
            del sys.modules[name]
        if mutant is not None:
            sys.meta_path.insert(0, Finder(mutant))  # type: ignore[arg-type]
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
        code, order = 1, Quickest(self.seconds)
        with suppress(BaseException):
            code = int(pytest.main([*options, *self.tests], plugins=[order]))
        if mutant is None:
            measured.write(json.dumps(order.seconds).encode())
            measured.flush()
        os._exit(code)


def _wait(pid: int) -> int:
    """Return the exit status of a fork; end it if it is idle for ``IDLE_S``."""
    last_cpu, since = -1.0, time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        cpu = _cpu_s(pid)
        if cpu > last_cpu:
            last_cpu, since = cpu, time.monotonic()
        elif time.monotonic() - since > IDLE_S:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # processes that the tests left
    return status


def _cpu_s(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def preload(tests: list[str]) -> None:
    """Import the third-party modules that ``tests`` import, so that every fork has them."""
    probe = (
        "import pytest, sys; pytest.main(['--collect-only', '-q', '-n', '0', *sys.argv[1:]]);"
        "print('\\nMODULES', *sys.modules)"
    )
    command = [sys.executable, "-c", probe, *tests]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in out.partition("\nMODULES ")[2].split():
        if not name.startswith((*OURS, "_pytest", "pytest")):
            with suppress(BaseException):
                importlib.import_module(name)


def judge(
    package: str, sample: int, seed: int, again: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Draw mutants of ``package`` and run its tests on each. Yield counts and survivors so far.

    ``again``: texts of an earlier run's survivors, which run instead.
    """
    own, more = TESTS[package]
    preload(own)
    paths = sorted((PYTHON / "sglang_canopy" / package).rglob("*.py"))
    every = [mutant for path in paths for mutant in made(path)]
    if again is None:
        chosen = random.Random(seed).sample(every, min(sample, len(every)))
    else:
        chosen = [found for text in again if (found := _nearest(text, every))]
    first = Suite(own)
    further: Suite | None = None
    survivors: list[str] = []
    for number, mutant in enumerate(tqdm(chosen, desc=package, mininterval=10), 1):
        if first.run(mutant):
            further = further or (Suite(more) if more else first)
            if further is first or further.run(mutant):
                survivors.append(mutant.text)
                tqdm.write(mutant.text)
        yield {
            "sites": len(every),
            "mutants": number,
            "survived": len(survivors),
            "seed": seed,
            "survivors": sorted(survivors),
        }


def _nearest(text: str, every: list[Mutant]) -> Mutant | None:
    """Return the mutant of a text, at the nearest line if other changes have moved its line."""
    file, line, change = text.split(":", 2)
    alike = [
        (abs(int(one[1]) - int(line)), mutant)
        for mutant in every
        if (one := mutant.text.split(":", 2))[0] == file and one[2] == change
    ]
    return min(alike, key=itemgetter(0))[1] if alike else None


def made(path: Path) -> Iterator[Mutant]:
    return mutants(path, ".".join(path.relative_to(PYTHON).with_suffix("").parts), PYTHON)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="+", choices=list(TESTS), metavar="PACKAGE")
    parser.add_argument("--sample", type=int, default=60, help="mutants per package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="only the survivors of the last run")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.chdir(ROOT)
    for package in args.packages:
        if args.again:
            run_again(package, args.json)
            continue
        for found in judge(package, args.sample, args.seed):
            write(args.json, package, found)


def run_again(package: str, results: Path) -> None:
    """Run the survivors of an earlier run. Written at the end: a part of them is no result."""
    earlier = json.loads(results.read_text())[package]
    without = {**earlier, "survived": 0, "survivors": []}
    last = [without, *judge(package, 0, 0, earlier["survivors"])][-1]
    write(results, package, {**last, "mutants": earlier["mutants"], "seed": earlier["seed"]})


def write(results: Path, package: str, found: dict[str, Any]) -> None:
    known = json.loads(results.read_text()) if results.exists() else {}
    new = json.dumps({**known, package: found}, indent=1, sort_keys=True)
    results.write_text(new + "\n")


if __name__ == "__main__":
    main()
