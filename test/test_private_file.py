"""A file for its owner alone, whole or not at all."""

from pathlib import Path

import pytest

from sglang_canopy.private_file import replace_file


def test_a_file_is_replaced_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    replace_file(path, "new", durable=True)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "a lone surrogate: \ud800")
    assert path.read_text() == "old"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "folder", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
