"""Run the light live tests on a release of SGLang, in a copy of the checkout.

    python scripts/live_tests.py pinned
    python scripts/live_tests.py newest --into /tmp/newest
    python scripts/live_tests.py 0.5.24

The copy has its own environment with the other release in place of the pinned one, and a table of
digests made from that release. The failures show the work of an update. Exit status 0: all tests
passed; 2: the release is not available or cannot be installed; else pytest's.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIGHT = (
    "test/server/start/test_plugin.py",
    "test/radix/test_sglang_kit.py",
    "test/radix/test_parity.py",
    "test/radix/test_offset_walk.py",
    "test/cpu",
    "test/e2e/test_cpu_server.py",
    "test/e2e/test_canopy_server.py",
)
"""Tests with the most use of SGLang for their time: the caches' own suites, and two servers."""
NAMED_IN = ("python/sglang_canopy/__init__.py", "requirements/cpu-nodeps.txt")
"""Files that name the pinned release for programs."""


def newest() -> str:
    """The newest release on pip's package index. Raises ``follow_sglang.NoRelease``."""
    import follow_sglang

    with tempfile.TemporaryDirectory() as folder:
        return follow_sglang.download(None, Path(folder)).name.split("-")[1]


def copy_with(release: str | None, into: Path, root: Path = ROOT) -> None:
    """Copy the files that git does not ignore, with ``release`` in place of the pinned release."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, target = root / name, into / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    if release is not None:
        pinned = _pinned(into)
        for name in NAMED_IN:
            file = into / name
            file.write_text(file.read_text("utf-8").replace(pinned, release), "utf-8")


def _pinned(root: Path) -> str:
    text = (root / NAMED_IN[0]).read_text("utf-8")
    found = re.search(r'^SGLANG_VERSION = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{root / NAMED_IN[0]} names no SGLANG_VERSION")
    return found[1]


def run_here(release: str | None) -> int:
    """Install, regenerate the table of digests for another release, and run the tests."""
    import environment
    import run_tests

    kind = environment.device()
    environment.enter(kind)
    environment.install(kind, tests=True)
    run_tests.prepare_model()
    if release is not None:
        digests = [sys.executable, "scripts/sglang_digests.py"]
        if subprocess.run(digests, cwd=ROOT, check=False).returncode:
            return 2
    tests = [sys.executable, "-m", "pytest", "-q", *LIGHT]
    return subprocess.run(tests, cwd=ROOT, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", help="pinned, newest, or a version such as 0.5.24")
    parser.add_argument("--into", type=Path, metavar="DIR", help="keep the copy here")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in the copy
    arguments = parser.parse_args(argv)
    if arguments.here:
        return run_here(None if arguments.release == "pinned" else arguments.release)
    try:
        release = {"pinned": None}.get(arguments.release, arguments.release)
        if release == "newest":
            release = newest()
            if release == _pinned(ROOT):
                print(f"sglang {release} is the pinned one")
                release = None
    except Exception as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        into = arguments.into or Path(folder) / "canopy"
        copy_with(release, into)
        command = [sys.executable, "scripts/live_tests.py", release or "pinned", "--here"]
        return subprocess.run(command, cwd=into, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
