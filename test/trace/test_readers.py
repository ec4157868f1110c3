"""Readers of traces with block ids: archives, compressed and long files, and an agent's fields."""

import gzip
import json
import lzma
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from overlays import flat_line

from canopy_lab.trace import TraceRequest, format_names, open_trace
from canopy_lab.trace.bailian import Roots
from canopy_lab.trace.fields import BODY_FIELDS, bodies_of, objects_in
from sglang_canopy.errors import CanopyError

MOONCAKE = {"timestamp": 1500, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
BAILIAN = {
    "chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 20,
    "output_length": 3, "type": "text", "turn": 1, "hash_ids": [7, 8],
}  # fmt: skip


def write(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def read(path: Path, name: str, **options: int) -> list[TraceRequest]:
    return list(open_trace(path, name, **options))


def test_a_bounded_number_of_objects_is_searched_in_an_entry() -> None:
    entry = {name: {inner: {"model": "m"} for inner in BODY_FIELDS} for name in BODY_FIELDS}
    for objects in (bodies_of(entry), objects_in(entry)):
        assert objects[: 1 + len(BODY_FIELDS)] == [entry, *entry.values()]
        assert len(objects) == 16


def test_bailian_remembers_a_bounded_number_of_chats() -> None:
    roots = Roots(max_chats=100)
    for chat in range(10_000):
        assert roots.add(chat, chat - 1) == 0
    assert len(roots._root_by_chat) == 100


def conversation(name: str, first_block: int = 1) -> dict[str, object]:
    child = {"t": 0.5, "type": "n", "in": 70, "out": 2, "stop": "end_turn"}
    child["hash_ids"] = [first_block + 9]
    return {
        "id": name, "block_size": 64,
        "requests": [
            {"t": 0.0, "type": "n", "in": 130, "out": 4, "hash_ids": [first_block, first_block + 1], "stop": "tool_use"},
            {"t": 2.0, "type": "subagent", "agent_id": "agent_001", "requests": [child, {**child, "t": 9.0}]},
            {"t": 5.0, "type": "s", "in": 200, "out": 4, "hash_ids": [first_block, first_block + 1, first_block + 2], "stop": ""},
        ],
    }  # fmt: skip


def test_conversations_of_an_archive_are_merged_by_time_and_share_no_blocks(tmp_path: Path) -> None:
    import tarfile

    for name in ("a", "b"):
        write(tmp_path / f"{name}.json", conversation(name))
    for archive, mode in (("x.tar", "w"), ("x.tar.gz", "w:gz"), ("x.tar.xz", "w:xz")):
        with tarfile.open(tmp_path / archive, mode) as tar:
            for name in ("a", "b"):
                tar.add(tmp_path / f"{name}.json", arcname=f"folder/{name}.json")
        requests = read(tmp_path / archive, "agentic")
        assert [r.time_s for r in requests] == sorted(r.time_s for r in requests)
        blocks = {n: {b for r in requests if r.user == n for b in r.blocks} for n in ("a", "b")}
        assert not blocks["a"] & blocks["b"]
        assert len(blocks["a"]) == len(blocks["b"]) == 4


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_every_part_of_a_compressed_file_is_read(tmp_path: Path, suffix: str) -> None:
    """Rotated logs are joined by appending."""
    line = (json.dumps(MOONCAKE) + "\n").encode()
    path = tmp_path / f"t.jsonl{suffix}"
    if suffix == ".zst":
        compress = pytest.importorskip("zstandard").ZstdCompressor().compress
    else:
        compress = {".gz": gzip, ".xz": lzma}[suffix].compress
    path.write_bytes(compress(line) * 3)
    assert read(path, "mooncake") == read(write(tmp_path / "plain", *[MOONCAKE] * 3), "mooncake")


def test_skip_bad_ignores_up_to_its_number_of_lines_and_logs_it(tmp_path, caplog):
    path = write(tmp_path / "t", MOONCAKE, "{", {**MOONCAKE, "timestamp": 2000}, "oops")
    assert [request.line for request in read(path, "mooncake", skip_bad=2)] == [1, 3]
    assert "ignored 2 broken lines" in caplog.text
    with pytest.raises(CanopyError, match=r"line 4: .*one more than the 1 --skip-bad allows"):
        read(path, "mooncake", skip_bad=1)


def test_the_page_of_traces_has_every_format() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/traces.md").read_text(encoding="utf-8")
    first_table = page.split("## Formats")[1].split("## Which")[0]
    formats = set(re.findall(r"^\| `([\w-]+)` \|", first_table, re.M))
    assert formats == set(format_names()), "give each format a row in docs/reference/traces.md"


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("w") as trace_file:
        for i in range(5_000):
            ids = [*range(i * 100, i * 100 + 100)]
            fields = {"timestamp": i, "input_length": 1600, "hash_ids": ids}
            trace_file.write(json.dumps({**BAILIAN, **fields}) + "\n")
    tracemalloc.start()
    try:
        requests = sum(1 for _ in open_trace(path, "bailian"))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert requests == 5_000
    # The file has over 3 MB; the reader needs memory for a line and the chat ids.
    assert peak_bytes < 1_500_000


def test_agents_and_turns_of_an_agentic_archive_are_read(tmp_path: Path) -> None:
    content = {**conversation("c"), "tool_tokens": 100, "system_tokens": 28}
    first_call, child, *_ = content["requests"]  # type: ignore[misc]
    first_call |= {"model": "big", "api_time": 1.5, "think_time": 0.0}
    child |= {"tool_tokens": 50, "system_tokens": 10}
    requests = read(write(tmp_path / "c.json", content), "agentic")
    assert (requests[0].model, requests[0].answer_s, requests[0].think_s) == ("big", 1.5, 0.0)
    assert [(r.tool_tokens, r.system_tokens) for r in requests] == [(100, 28), (50, 10)] * 2
    assert (requests[1].model, requests[1].answer_s) == (None, None)
    lines = [flat_line(r) for r in requests]
    assert [replace(r, line=0) for r in requests] == [
        replace(r, line=0) for r in read(write(tmp_path / "o.jsonl", *lines), "agentic")
    ]
