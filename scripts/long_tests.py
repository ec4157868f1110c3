"""Run the long tests whose last green run is oldest: ``./scripts/test.sh --due MINUTES``.

``--due`` without minutes prints the overdue files and exits with 1 if there are any. Paths behind
``--due`` restrict it to files below them. A file is overdue if it never had a green run, if it changed since, or if its
last green run is more than ``MAX_DAYS`` days ago. Green runs are recorded in ``test/long_tests.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from environment import SetupError, say

RECORD = "test/long_tests.json"
MARK = "pytest.mark.long"
MAX_DAYS = 14
TIME = "%Y-%m-%dT%H:%MZ"


@dataclass(frozen=True)
class Green:
    """The last run of a file's long tests in which none failed and at least one passed."""

    commit: str
    date: str
    """UTC, in the format ``TIME``."""
    seconds: int
    passed: int
    skipped: int


@dataclass(frozen=True)
class Due:
    """A file of long tests with its last green run. ``reason`` is empty unless it is overdue."""

    file: str
    green: Green | None
    reason: str


def due(root: Path, paths: Sequence[str] = ()) -> list[Due]:
    """Return every file of long tests below ``paths``: overdue ones first, the oldest run first."""
    record = read_record(root)
    now = datetime.now(timezone.utc)
    all_due = []
    for path in sorted((root / "test").rglob("test_*.py")):
        file = path.relative_to(root).as_posix()
        below = not paths or any(file == p or file.startswith(p.rstrip("/") + "/") for p in paths)
        if below and MARK in path.read_text(encoding="utf-8"):
            green = record.get(file)
            all_due.append(Due(file, green, _overdue(root, file, green, now)))
    return sorted(all_due, key=lambda d: (not d.reason, d.green.date if d.green else "", d.file))


def _overdue(root: Path, file: str, green: Green | None, now: datetime) -> str:
    if green is None:
        return "no green run yet"
    code = _git(root, "diff", "--quiet", green.commit, "--", file).returncode
    if code == 1:
        return f"changed since {green.commit}"
    if code:
        return f"{green.commit} is not a commit here"
    last = datetime.strptime(green.date, TIME).replace(tzinfo=timezone.utc)
    return f"older than {MAX_DAYS} days" if now - last > timedelta(days=MAX_DAYS) else ""


def run(root: Path, minutes: float, paths: Sequence[str] = ()) -> list[str]:
    """Run files of long tests for about ``minutes``, record the green ones, return the failed ones.

    A file whose last run took longer than the time left is left for another day. Raise
    ``SetupError`` if uncommitted changes would make the recorded commit wrong.
    """
    commit = clean_commit(root)
    ends = time.monotonic() + 60 * minutes
    failed = []
    for item in due(root, paths):
        left = ends - time.monotonic()
        if left <= 0:
            break
        if item.green and item.green.seconds > left:
            continue
        say(f"{item.file}: {item.reason or 'not overdue'}")
        started = time.monotonic()
        passed, skipped, red = _pytest(root, item.file)
        seconds = round(time.monotonic() - started)
        if red:
            failed.append(item.file)
        elif passed:
            now = datetime.now(timezone.utc).strftime(TIME)
            write_record(root, item.file, Green(commit, now, seconds, passed, skipped))
    return failed


def clean_commit(root: Path) -> str:
    changed = _git(root, "status", "--porcelain", "--", ".", f":!{RECORD}").stdout.strip()
    if changed:
        raise SetupError(
            f"a run is recorded with its commit: commit or remove {changed.split()[1]}"
        )
    return _git(root, "rev-parse", "--short=10", "HEAD").stdout.strip()


def _pytest(root: Path, file: str) -> tuple[int, int, bool]:
    """Return the passed and skipped long tests of ``file``, and whether the run failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "long", "-p", "no:cacheprovider"]
        command += ["--all", "-rs", f"--junitxml={report}", file]
        code = subprocess.run(command, cwd=root, env=quiet_environment(), check=False).returncode
        if not report.exists():
            return 0, 0, True
        suite = next(ElementTree.parse(report).iter("testsuite"))
    count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    return passed, count["skipped"], code != 0


def quiet_environment() -> dict[str, str]:
    """Return the environment of a pytest run: SWIG types warn when the interpreter ends."""
    quiet = "ignore:builtin type swigvarlink:DeprecationWarning"
    return {**os.environ, "PYTHONWARNINGS": quiet}


def read_record(root: Path) -> dict[str, Green]:
    path = root / RECORD
    if not path.exists():
        return {}
    return {k: Green(**v) for k, v in json.loads(path.read_text(encoding="utf-8")).items()}


def write_record(root: Path, file: str, green: Green) -> None:
    """Record one green run. Files that no longer exist leave the record."""
    record = {k: v for k, v in read_record(root).items() if (root / k).exists()} | {file: green}
    lines = [f"{json.dumps(k)}: {json.dumps(asdict(v))}" for k, v in sorted(record.items())]
    (root / RECORD).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def listing(items: Iterable[Due]) -> str:
    overdue = [item for item in items if item.reason]
    return "\n".join(f"{item.file}: {item.reason}" for item in overdue) or "no long test is overdue"


def main(arguments: Sequence[str], root: Path) -> int:
    """Parse the arguments of ``--due``: minutes, paths, both or neither."""
    minutes = None
    if arguments and not (root / arguments[0]).exists():
        try:
            minutes = float(arguments[0])
        except ValueError:
            raise SetupError(
                f"--due takes minutes and paths of tests, not {arguments[0]!r}: --due 30 test/e2e"
            ) from None
        arguments = arguments[1:]
    if minutes is None:
        items = due(root, arguments)
        print(listing(items))
        return int(any(item.reason for item in items))
    failed = run(root, minutes, arguments)
    for file in failed:
        say(f"failed: {file}")
    say(f"{sum(1 for item in due(root, arguments) if item.reason)} files of long tests are overdue")
    return int(bool(failed))
