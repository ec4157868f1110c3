"""The tests of a group, which share servers, run in one worker of pytest-xdist."""

import os
import subprocess
import sys

import pytest


def test_a_file_is_a_group(request: pytest.FixtureRequest) -> None:
    """Under pytest 9.2, pytest-xdist 3.8 ignores groups, and each worker starts every server."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("the tests run in one process")
    assert request.node.nodeid.endswith("@test/scripts/test_groups.py")


def test_the_tests_run_without_pytest_xdist() -> None:
    """The laboratory's do, under other Pythons."""
    here = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run([*here, "--collect-only", __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:]
    assert "test_a_file_is_a_group" in done.stdout
