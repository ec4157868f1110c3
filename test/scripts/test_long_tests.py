"""`./scripts/test.sh --due`: long tests in the order of their last green run, in a real checkout."""

import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

import long_tests
from environment import SetupError
from long_tests import Green

MARK = "@pytest.mark" + ".long\n"  # in two parts: this file has no long test
HEADER = "import pytest\n\n\n" + MARK
OPTION = "def pytest_addoption(parser):\n    parser.addoption('--all', action='store_true')\n"


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def commit(root: Path) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "change")
    return git(root, "rev-parse", "--short=10", "HEAD").strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "test"
    folder.mkdir()
    (folder / "conftest.py").write_text(OPTION)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long: minutes\n")
    (folder / "test_green.py").write_text(HEADER + "def test_one():\n    pass\n")
    (folder / "test_red.py").write_text(HEADER + "def test_one():\n    assert False\n")
    skips = HEADER + "def test_one():\n    pytest.skip('needs a GPU')\n"
    (folder / "test_skips.py").write_text(skips)
    (folder / "test_short.py").write_text("def test_one():\n    assert False\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def dated(days: float, commit: str, seconds: int = 1) -> Green:
    date = datetime.now(timezone.utc) - timedelta(days=days)
    return Green(commit, date.strftime(long_tests.TIME), seconds, 1, 0)


def test_a_green_run_is_recorded_with_its_commit_and_a_red_or_skipped_one_stays_due(
    checkout,
) -> None:
    head = git(checkout, "rev-parse", "--short=10", "HEAD").strip()
    assert long_tests.run(checkout, minutes=5) == ["test/test_red.py"]
    record = long_tests.read_record(checkout)
    assert list(record) == ["test/test_green.py"]
    assert (record["test/test_green.py"].commit, record["test/test_green.py"].passed) == (head, 1)
    reasons = {d.file: d.reason for d in long_tests.due(checkout)}
    assert reasons == {
        "test/test_red.py": "no green run yet",
        "test/test_skips.py": "no green run yet",
        "test/test_green.py": "",
    }


def test_files_run_in_the_order_of_their_last_green_run(checkout) -> None:
    head = git(checkout, "rev-parse", "HEAD").strip()
    long_tests.write_record(checkout, "test/test_red.py", dated(30, head))
    long_tests.write_record(checkout, "test/test_green.py", dated(20, head))
    long_tests.write_record(checkout, "test/test_skips.py", dated(1, head))
    assert [d.file for d in long_tests.due(checkout)] == [
        "test/test_red.py",
        "test/test_green.py",
        "test/test_skips.py",
    ]
    assert [bool(d.reason) for d in long_tests.due(checkout)] == [True, True, False]
    assert [d.file for d in long_tests.due(checkout, ["test/test_skips.py"])] == [
        "test/test_skips.py"
    ]


def test_a_changed_file_is_overdue_however_young_its_run(checkout) -> None:
    head = git(checkout, "rev-parse", "--short=10", "HEAD").strip()
    for name in ("green", "red", "skips"):
        long_tests.write_record(checkout, f"test/test_{name}.py", dated(0, head))
    assert long_tests.main([], checkout) == 0
    path = checkout / "test" / "test_green.py"
    path.write_text(path.read_text() + "\n\n" + MARK + "def test_two():\n    pass\n")
    commit(checkout)
    first = long_tests.due(checkout)[0]
    assert (first.file, first.reason) == ("test/test_green.py", f"changed since {head}")
    assert long_tests.main([], checkout) == 1


def test_a_run_of_an_unknown_commit_does_not_count(checkout) -> None:
    long_tests.write_record(checkout, "test/test_green.py", dated(0, "0123456789"))
    (one,) = long_tests.due(checkout, ["test/test_green.py"])
    assert one.reason == "0123456789 is not a commit here"


def test_a_file_that_would_outlast_the_minutes_is_not_started(checkout) -> None:
    head = git(checkout, "rev-parse", "HEAD").strip()
    long_tests.write_record(checkout, "test/test_red.py", dated(30, head, seconds=600))
    assert long_tests.run(checkout, minutes=3) == []


def test_uncommitted_changes_are_refused(checkout) -> None:
    (checkout / "test" / "test_green.py").write_text(HEADER + "def test_one():\n    pass  # new\n")
    with pytest.raises(SetupError, match=r"commit or remove test/test_green\.py"):
        long_tests.run(checkout, minutes=1)


def test_arguments_other_than_minutes_and_paths_are_refused(checkout) -> None:
    with pytest.raises(SetupError, match="--due 30 test/e2e"):
        long_tests.main(["soon"], checkout)
