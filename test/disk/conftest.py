"""A small file system for tests of a full volume."""

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB, if the machine allows it."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
