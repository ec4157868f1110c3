"""A file for its owner alone, whole or not at all."""

import os
from pathlib import Path

import pytest

from canopy_documents.calibration.saved import Calibrations, Setting
from sglang_canopy.disk import folder
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import read_regular, replace_file
from sglang_canopy.reuse import saved_curves
from sglang_canopy.wire import status_file


def test_a_file_is_replaced_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    replace_file(path, "new", durable=True)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_failed_write_leaves_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "a lone surrogate: \ud800")
    assert path.read_text() == "old"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "folder", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_reader_returns_a_regular_file_and_does_not_wait_for_a_named_pipe(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    assert read_regular(tmp_path / "file", 3) == b"1234", "one byte more than the bound"
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / "none"):
        with pytest.raises(OSError):
            read_regular(path, 5)


def test_named_pipes_instead_of_rebuildable_files_never_block_a_start(tmp_path, monkeypatch):
    for name in ("learnt.json", "calibration.json", "loads-0.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(CanopyError, match="not a regular file"):
        saved_curves.read_profile(str(tmp_path / "learnt.json"))
    with pytest.raises(OSError, match="not a regular file"):
        folder._make_file(tmp_path / "learnt.json", "namespace")
    setting = Setting("model", "cpu", "float32", 1, "torch_native")
    assert Calibrations(tmp_path / "calibration.json").get(setting, "memory") is None
    assert (tmp_path / "calibration.json.bad").is_fifo()
    monkeypatch.setenv(status_file.FOLDER_VARIABLE, str(tmp_path))
    assert status_file.read_all("loads") == []
