"""Agents' sessions whose block ids are valid across the sessions of a user."""

import json
from pathlib import Path
from typing import Any

import pytest
from overlays import overlay

from canopy_lab.trace import open_trace
from sglang_canopy.errors import CanopyError


def session(folder: Path, name: str, ids: list[int], **more: Any) -> None:
    document = {
        "id": name, "block_size": 64, **more,
        "requests": [{"t": 0.0, "in": 64 * len(ids), "out": 5, "stop": "end_turn", "hash_ids": ids}],
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(document))


def blocks(folder: Path) -> dict[str | None, tuple[int, ...]]:
    return {r.conversation: r.blocks for r in open_trace(folder, "agentic")}


def user(name: str) -> dict[str, str]:
    return {"hash_id_scope": "global", "source": name}


def test_sessions_of_one_user_share_their_blocks_and_no_others(tmp_path: Path) -> None:
    session(tmp_path, "a", [1, 2, 3], **user("ann"))
    session(tmp_path, "b", [1, 2, 9], **user("ann"))
    session(tmp_path, "c", [1, 2, 3], **user("bob"))
    session(tmp_path, "d", [1, 2, 3])
    session(tmp_path, "e", [1, 2, 3], hash_id_scope="local", source="ann")
    found = blocks(tmp_path)
    assert found["a"][:2] == found["b"][:2]
    assert found["a"][2] != found["b"][2]
    apart = [set(found[name]) for name in ("a", "c", "d", "e")]
    assert sum(map(len, apart)) == len(set.union(*apart)) == 12


def test_lines_of_sessions_share_them_too(tmp_path: Path) -> None:
    for name in "ab":
        session(tmp_path, name, [1, 2], **user("ann"))
    lines = tmp_path / "all.jsonl"
    lines.write_text("\n".join((tmp_path / f"{name}.json").read_text() for name in "ab"))
    one, two = open_trace(lines, "agentic")
    assert one.blocks == two.blocks


def test_an_overlay_keeps_shared_blocks_and_copies_share_none(tmp_path: Path) -> None:
    session(tmp_path, "a", [1, 2, 3], **user("ann"))
    session(tmp_path, "b", [1, 2, 9], **user("ann"))
    found = {r.conversation: r.blocks for r in overlay(tmp_path, 4, 100.0, 1)}
    assert found["a"][:2] == found["b"][:2]
    assert found["a#2"][:2] == found["b#2"][:2]
    assert not {*found["a"]} & {*found["a#2"]}


@pytest.mark.parametrize(
    ("block", "more", "says"),
    [
        (2, {"hash_id_scope": "global"}, "no 'source' says in which files"),
        (2, {"hash_id_scope": "team"}, "must be local or global"),
        (1 << 41, user("ann"), "must be below"),
    ],
)
def test_ids_of_unknown_files_or_of_no_range_are_refused(
    tmp_path: Path, block: int, more: dict[str, str], says: str
) -> None:
    session(tmp_path, "a", [1, block], **more)
    with pytest.raises(CanopyError, match=says):
        blocks(tmp_path)
