"""Lint, format, types, tests: ./scripts/test.sh [--all] [--sglang X.Y.Z] [pytest flags]

With --sglang: the caches' suites, the checks at start and two servers on that release.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from tempfile import TemporaryDirectory

import environment
import overlay
from environment import ROOT, SetupError, say

CHECKS = (
    ("ruff", ["ruff", "check"]),
    ("format", ["ruff", "format", "--check", "-q"]),
    ("types", ["mypy"]),
)


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{__doc__}\nTests that need data look for $CANOPY_DATA, then ../shared/data.")
        return 0
    try:
        device = environment.detect_device()
        environment.enter_venv(device)
        environment.install(device, tests=True)
        from prepare import prepare_smollm2

        prepare_smollm2()
    except SetupError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    flags = sys.argv[1:]
    return test_on_release(flags) if "--sglang" in flags else check_and_test(flags, device)


def test_on_release(flags: list[str]) -> int:
    """Run the tests, or those that ``flags`` name, on the release after ``--sglang``."""
    index = flags.index("--sglang")
    release, test_flags = (flags[index + 1 : index + 2], [*flags[:index], *flags[index + 2 :]])
    try:
        folder = overlay.unpack(*release)
    except (TypeError, overlay.NoRelease) as error:
        say(f"--sglang: {error}")
        return 2
    has_tests = any(not flag.startswith("-") for flag in test_flags)
    tests = test_flags if has_tests else [*overlay.RELEASE_TESTS, *test_flags]
    return overlay.run_tests(folder, tests)


def check_and_test(flags: list[str], device: str) -> int:
    """Run every check, then, if all of them pass, pytest."""
    failed_checks = []
    for name, command in CHECKS:
        say(name)
        if subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode:
            failed_checks.append(name)
    if failed_checks:
        # Run no tests: their output would hide the failure.
        say(f"failed, so no test was run: {', '.join(failed_checks)}")
        return 1
    # One process imports SGLang; workers and servers are forked from it, which CUDA forbids.
    python = shlex.quote(sys.executable) + " -m support.forked" * (device == "cpu")
    worker_count = min(2, os.cpu_count() or 1) + 1  # at their start, servers and ranks wait idly
    # A group of files stays with one worker, in test/conftest.py's order; `-n 0` is one process.
    workers = ["--tx", f"{worker_count}*popen//python={python}", "--dist", "loadgroup"]
    tests = [sys.executable, "-m", "pytest", *workers, "--no-loadscope-reorder", *flags]
    with TemporaryDirectory() as folder:
        # SWIG types warn when the interpreter ends.
        variables = {"PYTHONWARNINGS": "ignore:builtin type swigvarlink:DeprecationWarning"}
        variables = {**os.environ, **variables, "TEST_FORKER": f"{folder}/forker"}
        return subprocess.run(tests, cwd=ROOT, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
