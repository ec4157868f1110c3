"""Break lines of a package one at a time and count the broken versions that no test notices.

    python benchmark/mutation/run.py policy schedule --sample 60

A mutant differs in one operator, constant, condition or statement. Mutants are drawn with ``--seed``;
each runs in a fork that has the third-party packages loaded already, first with the package's own
tests, then, if it survives, with further tests (``TESTS``). Too much CPU time counts as noticed.
Writes ``benchmark/mutation/results.json``: the packages of earlier runs stay in it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))
from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "python"
RESULTS = Path(__file__).parent / "results.json"
OURS = ("sglang_canopy", "canopy_lab", "canopy_chunks", "support", "conftest", "test_")
TESTS: dict[str, tuple[list[str], list[str]]] = {
    "policy": (["test/policy"], ["test/sim/test_tree.py", "test/radix"]),
    "schedule": (["test/schedule"], ["test/server/scheduler/test_live_queue.py"]),
    "admission": (["test/admission"], ["test/server/scheduler/test_session_gate_in_scheduler.py"]),
    "whatif": (["test/whatif"], ["test/radix/test_exchange.py", "test/telemetry"]),
    "disk": (["test/disk"], ["test/storage"]),
    "radix": (["test/radix"], ["test/storage", "test/telemetry"]),
    "reuse": (["test/reuse"], ["test/policy"]),
}
"""Tests of each package: its own, and those that its survivors meet too."""
CPU_FACTOR, CPU_LEAST_S = 4.0, 30.0
WALL_FACTOR = 20.0


class Ran(NamedTuple):
    passed: bool
    cpu_s: float


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


def run(tests: list[str], mutant: Mutant | None, cpu_s: float | None) -> Ran:
    """Run ``tests`` in a fork; they fail if they use more than ``cpu_s`` seconds of CPU time."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silence, stream)
        if cpu_s is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 5))
        if mutant is not None:
            sys.meta_path.insert(0, Finder(mutant))  # type: ignore[arg-type]
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
        code = 1
        with suppress(BaseException):
            code = int(pytest.main([*options, *tests]))
        os._exit(code)
    end = time.monotonic() + WALL_FACTOR * (cpu_s or 600.0)
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # processes that the tests left
    return Ran(status == 0, usage.ru_utime + usage.ru_stime)


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


def judge(package: str, sample: int, seed: int) -> dict[str, Any]:
    """Draw mutants of ``package``, run its tests on each and return counts and survivors."""
    own, more = TESTS[package]
    preload([*own, *more])
    every = [
        m for path in sorted((PYTHON / "sglang_canopy" / package).rglob("*.py")) for m in made(path)
    ]
    chosen = random.Random(seed).sample(every, min(sample, len(every)))
    stages = []
    for tests in (own, more):
        plain = run(tests, None, None)
        if not plain.passed:
            raise SystemExit(f"{' '.join(tests)} fails without a mutant: mend it first")
        stages.append((tests, CPU_FACTOR * plain.cpu_s + CPU_LEAST_S))
    survivors = []
    for mutant in tqdm(chosen, desc=package, mininterval=10):
        if all(run(tests, mutant, limit_s).passed for tests, limit_s in stages):
            survivors.append(mutant.text)
            tqdm.write(mutant.text)
    return {
        "sites": len(every),
        "mutants": len(chosen),
        "survived": len(survivors),
        "seed": seed,
        "survivors": sorted(survivors),
    }


def made(path: Path) -> Iterator[Mutant]:
    return mutants(path, ".".join(path.relative_to(PYTHON).with_suffix("").parts), PYTHON)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="+", choices=list(TESTS), metavar="PACKAGE")
    parser.add_argument("--sample", type=int, default=60, help="mutants per package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.chdir(ROOT)
    for package in args.packages:
        found = judge(package, args.sample, args.seed)
        known = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json.dumps({**known, package: found}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
