"""Log files: compressed, broken, truncated, rotated, and in another order than time."""

import gzip
import json
import lzma
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from canopy_lab.advise.sample import read_sample
from canopy_lab.cli.shared import join_logs
from canopy_lab.trace import TraceRequest, open_trace
from canopy_lab.trace.guess import guess_format
from sglang_canopy.errors import CanopyError


def prompt_lines(times_s: Sequence[int]) -> list[bytes]:
    return [json.dumps({"time": i, "prompt": f"p{i} " * 40}).encode() + b"\n" for i in times_s]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["no archive", "broken inside", "cut off"])
def test_a_broken_archive_raises_one_sentence(tmp_path: Path, suffix: str, damage: str) -> None:
    log_bytes = b"".join(prompt_lines(range(500)))
    if suffix == ".zst":
        archive = pytest.importorskip("zstandard").ZstdCompressor().compress(log_bytes)
    else:
        archive = gzip.compress(log_bytes) if suffix == ".gz" else lzma.compress(log_bytes)
    middle = len(archive) // 2
    damaged_bytes = {
        "no archive": b"no archive at all, but text",
        "broken inside": archive[:middle] + bytes(64) + archive[middle + 64 :],
        "cut off": archive[:middle],
    }[damage]
    path = tmp_path / f"log.jsonl{suffix}"
    path.write_bytes(damaged_bytes)
    with pytest.raises(CanopyError, match=r"cannot read trace|not JSON"):
        list(open_trace(path, "openai"))


@pytest.mark.parametrize("format_name", ["openai", "sglang"])
def test_a_truncated_last_line_is_skipped_if_it_has_no_newline(tmp_path, format_name, caplog):
    finished = {"obj": {"input_ids": [1] * 40}, "out": {"meta_info": {"completion_tokens": 1}}}
    stamp = {"timestamp": "2026-01-02T03:04:05", "event": "request.finished", "rid": "a"}
    line = json.dumps({**stamp, **finished}).encode() + b"\n"
    if format_name == "openai":
        (line,) = prompt_lines([0])
    path = tmp_path / "log"
    path.write_bytes(line + line[: len(line) - 20])
    assert len(list(open_trace(path, format_name))) == 1
    assert "line 2: it is truncated" in caplog.text
    path.write_bytes(line + line[: len(line) - 20] + b"\n")
    with pytest.raises(CanopyError, match="line 2: not JSON"):
        list(open_trace(path, format_name))


@pytest.mark.parametrize("format_name", [None, "openai", "sglang", "vllm"])
def test_utf_16_is_refused_with_the_remedy(tmp_path: Path, format_name: str | None) -> None:
    """Older PowerShells write UTF-16 if the output of a command is redirected into a file."""
    path = tmp_path / "log.jsonl"
    path.write_text(prompt_lines([0])[0].decode(), encoding="utf-16")
    with pytest.raises(CanopyError, match=r"UTF-16.*iconv -f UTF-16 -t UTF-8"):
        list(open_trace(path, format_name or guess_format(path)))


@pytest.mark.parametrize("format_name", ["openai", "sglang", "vllm", "mooncake", "bailian"])
def test_an_empty_file_holds_no_requests(tmp_path: Path, format_name: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    with pytest.raises(CanopyError, match="empty"):
        guess_format(path)
    if format_name in ("sglang", "vllm"):
        with pytest.raises(CanopyError, match="holds no"):
            list(open_trace(path, format_name))
    else:
        assert list(open_trace(path, format_name)) == []


def test_an_endlessly_nested_line_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"time": 1, "prompt": ' + b"[" * 200_000 + b"\n" + prompt_lines([0])[0])
    with pytest.raises(CanopyError, match="line 1: not JSON"):
        list(open_trace(path, "openai"))
    assert len(list(open_trace(path, "openai", skip_bad=1))) == 1


def test_a_folder_of_rotated_logs_is_one_log_in_order_of_time(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    lines = prompt_lines([1_700_000_000 + i for i in range(9)])
    for name, part in (("a.log", lines[6:]), ("a.log.1", lines[3:6]), ("a.log.2.gz", lines[:3])):
        log_bytes = b"".join(part)
        (folder / name).write_bytes(gzip.compress(log_bytes) if name.endswith(".gz") else log_bytes)
    (folder / "b.log").write_bytes(b"")
    single_file = tmp_path / "together"
    single_file.write_bytes(b"".join(lines))
    expected = [replace(r, line=0) for r in open_trace(single_file, "openai")]
    assert guess_format(folder) == "openai"
    assert [replace(r, line=0) for r in open_trace(folder, "openai")] == expected
    joined = join_logs([str(folder / name) for name in ("a.log", "a.log.1", "a.log.2.gz")])
    assert Path(joined).name == "a.log and 2 more"
    assert [replace(r, line=0) for r in open_trace(joined, guess_format(joined))] == expected


def test_logs_of_several_formats_are_no_log(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"".join(prompt_lines(range(3))))
    (tmp_path / "b.log").write_text('{"timestamp": 1, "input_length": 5, "hash_ids": [1]}\n')
    with pytest.raises(CanopyError, match=r"a\.log of format openai, b\.log of format mooncake"):
        guess_format(tmp_path)


def write_log(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def read_requests(path: Path, format_name: str) -> list[TraceRequest]:
    return list(open_trace(path, format_name))


def session_entries(count: int) -> list[dict[str, Any]]:
    return [
        {"time": 1_764_000_000 + i, "session_id": f"s{i % 7}", "prompt": f"{i % 7} " * 40 + f"{i}"}
        for i in range(count)
    ]


def without_lines(requests: list[TraceRequest]) -> list[tuple[Any, ...]]:
    return [(r.time_s, r.blocks, r.turn, r.conversation) for r in requests]


def test_a_log_that_is_newest_first_is_read_from_its_end(tmp_path: Path) -> None:
    entries = session_entries(9000)
    oldest_first = read_requests(write_log(tmp_path / "a", entries), "openai")
    newest_first = write_log(tmp_path / "b", entries[::-1])
    assert without_lines(read_requests(newest_first, "openai")) == without_lines(oldest_first)
    sample = read_sample(newest_first, "openai")
    assert sample.span_s == 8999
    assert "newest first" in " ".join(sample.understood.details())


def test_a_json_list_that_is_newest_first_is_reversed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(session_entries(5000)[::-1], indent=1))
    assert read_requests(path, "openai")[-1].time_s == 4999


def test_a_compressed_newest_first_log_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(write_log(path, session_entries(300)[::-1]).read_bytes()))
    with pytest.raises(CanopyError, match="newest first and compressed"):
        read_requests(path, "openai")


def test_a_log_in_no_order_is_refused(tmp_path: Path) -> None:
    entries = session_entries(12_000)
    path = write_log(tmp_path / "a", [*entries[6000:], *entries[:6000]])
    with pytest.raises(CanopyError, match="sort the trace by time"):
        read_sample(path, "openai")
