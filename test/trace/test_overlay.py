"""Overlays of single conversations."""

import json
import tarfile
from pathlib import Path

import pytest
from make_overlay import main
from overlays import choose, overlay

from canopy_lab.trace import open_trace
from sglang_canopy.errors import CanopyError


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "c.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        for name in "abcde":
            turns = range(1, 5)
            document = {
                "id": name,
                "block_size": 64,
                "requests": [
                    {"t": 7.0 * k, "in": 64 * k + 3, "out": 5, "stop": "tool_use",
                     "hash_ids": list(range(1, k + 1))}
                    for k in turns
                ],
            }  # fmt: skip
            document["requests"].append(  # type: ignore[attr-defined]
                {"t": 15.0, "type": "subagent", "agent_id": "s", "requests": [
                    {"t": 1.0, "in": 70, "out": 1, "hash_ids": [9], "stop": "end_turn"}]}
            )  # fmt: skip
            file = tmp_path / f"{name}.json"
            file.write_text(json.dumps(document))
            tar.add(file, arcname=f"x/{name}.json")
    return path


def test_equal_seeds_give_equal_bytes_and_others_do_not(archive: Path, tmp_path: Path) -> None:
    def make(seed: int, name: str) -> bytes:
        out = tmp_path / name
        arguments = ["--archive", archive, "--conversations", 4, "--window-s", 100, "--seed", seed]
        assert main([*map(str, arguments), "-o", str(out)]) == 0
        return out.read_bytes()

    assert make(1, "1.jsonl") == make(1, "2.jsonl")
    assert make(1, "1.jsonl.gz") == make(1, "1.jsonl.gz")
    assert make(1, "1.jsonl") != make(2, "3.jsonl")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".partial")]


def test_the_file_reads_back_equal(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl.xz"
    arguments = ["--archive", archive, "--conversations", 3, "--window-s", 50, "--seed", 4]
    assert main([*map(str, arguments), "-o", str(out)]) == 0
    made = list(overlay(archive, 3, 50, 4))
    read = list(open_trace(out, "agentic"))
    assert len(made) == len(read) == 15
    for a, b in zip(made, read, strict=True):
        assert (a.time_s, a.blocks, a.conversation, a.user, a.turn, a.stop, a.category) == (
            b.time_s, b.blocks, b.conversation, b.user, b.turn, b.stop, b.category
        )  # fmt: skip
        assert (a.input_tokens, a.output_tokens) == (b.input_tokens, b.output_tokens)


def test_blocks_are_unique_to_their_conversation_and_times_sorted(archive: Path) -> None:
    requests = list(overlay(archive, 12, 1000, seed=7))
    assert len(requests) == 12 * 5
    owner: dict[int, str] = {}
    for request in requests:
        for block in request.blocks:
            assert owner.setdefault(block, request.user or "") == request.user
    times = [r.time_s for r in requests]
    assert times == sorted(times)
    assert len({r.user for r in requests}) == 12
    assert {r.category for r in requests} == {"agent", "subagent"}


def test_nothing_is_drawn_twice_before_all_were_drawn_once() -> None:
    starts = choose(10, 25, 60.0, seed=3)
    taken = [sum(s.document == d for s in starts) for d in range(10)]
    assert sorted(set(taken)) == [2, 3]
    assert all(0 <= s.time_s <= 60 for s in starts)


@pytest.mark.parametrize(
    ("conversations", "window_s", "why"),
    [(0, 10, "conversations must be 1 or more"), (1, 0, "positive number of seconds")],
)
def test_bad_options_are_refused(
    archive: Path, conversations: int, window_s: float, why: str
) -> None:
    with pytest.raises(CanopyError, match=why):
        list(overlay(archive, conversations, window_s, 1))


def test_an_archive_without_conversations_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "e.tar", "w"):
        pass
    with pytest.raises(CanopyError, match="holds no conversation"):
        list(overlay(tmp_path / "e.tar", 1, 10, 1))


def test_a_failed_run_leaves_no_file(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    arguments = ["--archive", archive, "--conversations", 0, "--window-s", 5]
    assert main([*map(str, arguments), "-o", str(out)]) == 2
    assert not out.exists()


def test_real_conversations(data_dir: Path) -> None:
    archive = data_dir / "agentic_coding/traces_500.tar.xz"
    requests = list(overlay(archive, 3, 600, seed=1))
    assert len({r.user for r in requests}) == 3
    assert all(len(r.blocks) == r.input_tokens // 64 for r in requests)
