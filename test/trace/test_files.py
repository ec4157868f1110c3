"""Log files of each kind, whole and broken, in any order."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from canopy_lab.advise.sample import read_sample
from canopy_lab.cli.shared import one_log
from canopy_lab.trace import TraceRequest, open_trace
from canopy_lab.trace.guess import guess_format
from sglang_canopy.errors import CanopyError


def rows(count: int) -> list[bytes]:
    return [json.dumps({"time": at, "prompt": f"p{at} " * 40}).encode() + b"\n" for at in range(count)]  # fmt: skip


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("how", ["none of it", "broken inside", "cut off"])
def test_a_broken_archive_is_one_sentence(tmp_path: Path, suffix: str, how: str) -> None:
    raw = b"".join(rows(500))
    if suffix == ".zst":
        packed = pytest.importorskip("zstandard").ZstdCompressor().compress(raw)
    else:
        packed = gzip.compress(raw) if suffix == ".gz" else __import__("lzma").compress(raw)
    half = len(packed) // 2
    bad = {
        "none of it": b"no archive at all, but text",
        "broken inside": packed[:half] + bytes(64) + packed[half + 64 :],
        "cut off": packed[:half],
    }[how]
    path = tmp_path / f"log.jsonl{suffix}"
    path.write_bytes(bad)
    with pytest.raises(CanopyError, match=r"cannot read trace|not JSON"):
        list(open_trace(path, "openai"))


@pytest.mark.parametrize("format", ["openai", "sglang"])
def test_a_last_line_that_is_still_being_written_is_left_out(tmp_path, format, caplog):
    end = {"obj": {"input_ids": [1] * 40}, "out": {"meta_info": {"completion_tokens": 1}}}
    stamp = {"timestamp": "2026-01-02T03:04:05", "event": "request.finished", "rid": "a"}
    line = rows(1)[0] if format == "openai" else json.dumps({**stamp, **end}).encode() + b"\n"
    path = tmp_path / "log"
    path.write_bytes(line + line[: len(line) - 20])
    assert len(list(open_trace(path, format))) == 1
    assert "line 2: it is truncated" in caplog.text
    path.write_bytes(line + line[: len(line) - 20] + b"\n")
    with pytest.raises(CanopyError, match="line 2: not JSON"):
        list(open_trace(path, format))


@pytest.mark.parametrize("format", [None, "openai", "sglang", "vllm"])
def test_utf_16_is_named(tmp_path: Path, format: str | None) -> None:
    """``>`` writes UTF-16 in an older PowerShell."""
    path = tmp_path / "log.jsonl"
    path.write_text(rows(1)[0].decode(), encoding="utf-16")
    with pytest.raises(CanopyError, match=r"UTF-16.*iconv -f UTF-16 -t UTF-8"):
        list(open_trace(path, format or guess_format(path)))


@pytest.mark.parametrize("format", ["openai", "sglang", "vllm", "mooncake", "bailian"])
def test_an_empty_file_holds_no_requests(tmp_path: Path, format: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    with pytest.raises(CanopyError, match="empty"):
        guess_format(path)
    if format in ("sglang", "vllm"):
        with pytest.raises(CanopyError, match="holds no"):
            list(open_trace(path, format))
    else:
        assert list(open_trace(path, format)) == []


def test_an_endlessly_nested_line_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"time": 1, "prompt": ' + b"[" * 200_000 + b"\n" + rows(1)[0])
    with pytest.raises(CanopyError, match="line 1: not JSON"):
        list(open_trace(path, "openai"))
    assert len(list(open_trace(path, "openai", skip_bad=1))) == 1


def test_a_folder_of_rotated_logs_is_one_log_in_order_of_time(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    times = [1_700_000_000 + at for at in range(9)]
    whole = [json.dumps({"time": at, "prompt": f"p{at} " * 40}).encode() + b"\n" for at in times]
    for name, part in (("a.log", whole[6:]), ("a.log.1", whole[3:6]), ("a.log.2.gz", whole[:3])):
        raw = b"".join(part)
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    (folder / "b.log").write_bytes(b"")
    together = tmp_path / "together"
    together.write_bytes(b"".join(whole))
    expected = [replace(r, line=0) for r in open_trace(together, "openai")]
    assert guess_format(folder) == "openai"
    assert [replace(r, line=0) for r in open_trace(folder, "openai")] == expected
    several = one_log([str(folder / name) for name in ("a.log", "a.log.1", "a.log.2.gz")])
    assert Path(several).name == "a.log and 2 more"
    assert [replace(r, line=0) for r in open_trace(several, guess_format(several))] == expected


def test_logs_of_several_formats_are_no_log(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"".join(rows(3)))
    (tmp_path / "b.log").write_text('{"timestamp": 1, "input_length": 5, "hash_ids": [1]}\n')
    with pytest.raises(CanopyError, match=r"a\.log of format openai, b\.log of format mooncake"):
        guess_format(tmp_path)


# ---- order ----


def put(path: Path, log: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in log))
    return path


def read(path: Path, format: str) -> list[TraceRequest]:
    return list(open_trace(path, format))


def long_log(count: int) -> list[dict[str, Any]]:
    return [
        {
            "time": 1_764_000_000.0 + at,
            "session_id": f"s{at % 7}",
            "prompt": f"{at % 7} " * 40 + f"{at}",
        }
        for at in range(count)
    ]


def timeless(requests: list[TraceRequest]) -> list[tuple[Any, ...]]:
    return [(r.time_s, r.blocks, r.turn, r.conversation) for r in requests]


def test_a_log_that_is_newest_first_is_read_from_its_end(tmp_path: Path) -> None:
    log = long_log(9000)
    forward, back = put(tmp_path / "a", log), put(tmp_path / "b", log[::-1])
    assert timeless(read(back, "openai")) == timeless(read(forward, "openai"))
    sample = read_sample(back, "openai")
    assert sample.span_s == 8999
    assert "newest first" in " ".join(sample.understood.details())


def test_a_json_list_that_is_newest_first_is_turned_round(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(long_log(5000)[::-1], indent=1))
    assert read(path, "openai")[-1].time_s == 4999


def test_a_compressed_newest_first_log_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(put(path, long_log(300)[::-1]).read_bytes()))
    with pytest.raises(CanopyError, match="newest first and compressed"):
        read(path, "openai")


def test_a_log_in_no_order_is_not_given_times_of_its_own(tmp_path: Path) -> None:
    log = long_log(12_000)
    path = put(tmp_path / "a", [*log[6000:], *log[:6000]])
    with pytest.raises(CanopyError, match="sort the trace by time"):
        read_sample(path, "openai")
