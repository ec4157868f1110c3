"""Files that other versions wrote open or start over; none stops a server.

``fixtures/state``: v1 was written at commit aedaf50, v2 at ecee2f4, v3 by the commit that added it, as
``put`` below does it.
"""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from sglang_canopy.disk.journal import FILE
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.radix.saved_profile import read_or_set_aside
from support.disk_pages import chain, get, put, store_at

STATE = Path(__file__).parents[1] / "fixtures" / "state"
NOW_OPEN = {"v1": False, "v2": False, "v3": True}
"""Whether this version reads the pages of that one, or starts over."""


@pytest.mark.parametrize("version", sorted(p.name for p in STATE.glob("v*")))
def test_a_store_of_an_older_version_opens_or_starts_over(tmp_path, version) -> None:
    folder = tmp_path / "disk"
    shutil.copytree(STATE / version / "disk", folder)
    store = store_at(folder)
    assert store.unavailable is None
    assert store.leading(chain("a", 3)) == (3 if NOW_OPEN[version] else 0)
    assert (store.path / f"{FILE}.bad").exists() != NOW_OPEN[version]
    assert store.counters.faults["index"] == (not NOW_OPEN[version])
    put(store, chain("a", 3))
    store.close()
    again = store_at(folder)
    assert get(again, chain("a", 3)) == [True] * 3
    assert again.verify(pages=True) == 0


def test_a_store_of_a_newer_version_starts_over(tmp_path) -> None:
    store = store_at(tmp_path)
    put(store, chain("a", 3))
    store.close()
    with closing(sqlite3.connect(store.path / FILE)) as index:
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
