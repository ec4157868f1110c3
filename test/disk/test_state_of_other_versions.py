"""Files that other versions wrote are left alone or set aside; none stops a server.

``fixtures/state/v3`` was written by the store at commit 0fab77a0, with ``put`` as below.
"""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from sglang_canopy.disk.journal import FILE
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.radix.saved_profile import read_or_set_aside
from support.disk_pages import chain, put, store_at

STATE = Path(__file__).parents[1] / "fixtures" / "state"


def test_a_store_of_an_older_version_is_named_once_and_goes_for_room(tmp_path, caplog) -> None:
    folder = tmp_path / "disk"
    shutil.copytree(STATE / "v3" / "disk", folder)
    with caplog.at_level("INFO"):
        store = store_at(folder)
    assert (store.unavailable, len(store)) == (None, 0)
    assert [r.getMessage().split(" ")[1] for r in caplog.records] == ["holds"]
    assert put(store, chain("a", 3)) == [True] * 3
    assert [path.name for path in folder.glob("*/")] == [store.path.name]


def test_a_store_of_a_newer_version_starts_over(tmp_path) -> None:
    store = store_at(tmp_path)
    put(store, chain("a", 3))
    store.close()
    with closing(sqlite3.connect(store.state.journal.folder / FILE)) as index:
        index.execute("PRAGMA user_version=99")
    again = store_at(tmp_path)
    assert (again.unavailable, len(again)) == (None, 0)
    assert put(again, chain("a", 3)) == [True] * 3


def test_a_profile_of_an_older_version_is_read_or_set_aside(tmp_path) -> None:
    path = tmp_path / "profile.json"
    shutil.copy(STATE / "profile-1.json", path)
    saved = read_or_set_aside(str(path))
    assert path.exists() == (saved is not None)
    assert (tmp_path / "profile.json.bad").exists() == (saved is None)
    if saved is not None:
        make_policy("wa").restore(saved)
