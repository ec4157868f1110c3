"""Another release of SGLang over the installed one: its wheel alone, with the installed packages."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE_TESTS = (
    *("test/radix", "test/storage", "test/schedule", "test/admission", "test/server/start"),
    *("test/served/test_server.py", "test/served/test_routes.py"),
)
"""The caches' suites, the checks at start and two servers: what another release can break."""


class NoRelease(Exception):
    """A release is not available. The message is the reason."""


def download(release: str | None, folder: Path) -> Path:
    """Return the wheel of ``release``, or of the newest one, from pip's package index."""
    requirement = "sglang" if release is None else f"sglang=={release}"
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps"]
    command += ["--only-binary", ":all:", "--quiet", "--dest", str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("sglang-*.whl"))
    if process.returncode or not wheels:
        output = process.stderr.strip().splitlines() or ["pip downloaded no wheel"]
        raise NoRelease(f"{requirement}: {output[-1]}")
    return wheels[0]


def unpack(release: str) -> Path:
    """Return the folder with a release, which is downloaded once."""
    folder = ROOT / ".canopy" / "sglang" / release
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            with zipfile.ZipFile(download(release, Path(scratch))) as archive:
                archive.extractall(Path(scratch) / "release")
            (Path(scratch) / "release").rename(folder)
    return folder


def run_tests(release: Path, tests: Sequence[str] = RELEASE_TESTS) -> int:
    """Run ``tests`` on an unpacked release. Returns pytest's status."""
    path = os.pathsep.join(filter(None, (str(release), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode
