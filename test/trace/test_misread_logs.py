"""Logs that were once misread silently: the answer is correct, or its first line names the missing part."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from formats import (
    FORMATS,
    in_containerd,
    in_docker,
    lines,
    own,
    own_unnamed,
    sglang_rows,
    vllm_line,
)
from traffic import START_S, calls, when

from canopy_lab.advise.sample import read_sample
from canopy_lab.trace import open_trace
from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

CALLS = calls()
OWN = [own(c, n) for n, c in enumerate(CALLS)]


def put(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(lines(rows))
    return path


def read(path: Path) -> list[TraceRequest]:
    return list(open_trace(path, guess_format(path)))


def alarms(path: Path) -> str:
    return " ".join(read_sample(path, guess_format(path)).understood.alarms())


@pytest.fixture
def whole(tmp_path: Path) -> list[TraceRequest]:
    return read(put(tmp_path / "whole.jsonl", OWN))


# Order.


def long_log(count: int) -> list[dict[str, Any]]:
    return [
        {"time": START_S + at, "session_id": f"s{at % 7}", "prompt": f"{at % 7} " * 40 + f"{at}"}
        for at in range(count)
    ]


def timeless(requests: list[TraceRequest]) -> list[tuple[Any, ...]]:
    return [(r.time_s, r.blocks, r.turn, r.conversation) for r in requests]


@pytest.mark.parametrize("rows", [9000, 300])
def test_a_log_that_is_newest_first_is_read_from_its_end(tmp_path: Path, rows: int) -> None:
    log = long_log(rows)
    forward, back = put(tmp_path / "a", log), put(tmp_path / "b", log[::-1])
    assert timeless(read(back)) == timeless(read(forward))
    sample = read_sample(back, "openai")
    assert sample.span_s == rows - 1
    assert "newest first" in " ".join(sample.understood.details())


def test_a_json_list_that_is_newest_first_is_turned_round(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(long_log(5000)[::-1], indent=1))
    assert read(path)[-1].time_s == 4999


def test_a_compressed_newest_first_log_is_refused_with_the_reason(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(long_log(300)[::-1])))
    with pytest.raises(CanopyError, match="newest first and compressed"):
        read(path)


def test_a_log_in_no_order_is_not_given_times_of_its_own(tmp_path: Path) -> None:
    log = long_log(12_000)
    path = put(tmp_path / "a", [*log[6000:], *log[:6000]])
    with pytest.raises(CanopyError, match="sort the trace by time"):
        read_sample(path, "openai")


def test_a_servers_log_that_is_newest_first_is_refused(tmp_path: Path) -> None:
    rows = [row for n, c in enumerate(CALLS) for row in sglang_rows(c, n)]
    rows.sort(key=lambda row: row["timestamp"], reverse=True)
    with pytest.raises(CanopyError, match="newest first; reverse its lines"):
        read(put(tmp_path / "a", rows))


def test_requests_of_one_time_keep_the_logs_order(tmp_path: Path) -> None:
    rows = [{"time": 5.0, "session_id": f"s{n % 9}", "prompt": f"{n} " * 50} for n in range(60)]
    sample = read_sample(put(tmp_path / "a", rows), "openai")
    assert [r.line for r in sample.requests] == list(range(1, 61))


# Calls that reached the server, counted once.


def test_calls_that_no_server_computed_are_counted_and_left_out(tmp_path: Path, whole: Any) -> None:
    rows = []
    for n, row in enumerate(OWN):
        rows.append(row)
        if n % 4 == 0:
            rows.append({**row, "response_status": 429})
        if n % 4 == 1:
            rows.append({**row, "cache_hit": "True"})
        if n % 4 == 2:
            rows.append({**row, "call_type": "aembedding"})
    path = put(tmp_path / "a", rows)
    assert [r.blocks for r in read(path)] == [r.blocks for r in whole]
    assert "30 of 70 entries (42.9%) are left out: 10 failed calls, 10 answered from the gateway's" in alarms(path)  # fmt: skip


def test_a_call_that_is_logged_twice_counts_once(tmp_path: Path, whole: Any) -> None:
    """A gateway's record of the stream next to that of the answer."""
    rows = []
    for n, row in enumerate(OWN):
        rows += [{**row, "id": f"c{n}", "stream": True}, {**row, "id": f"c{n}"}]
    path = put(tmp_path / "a", rows)
    assert [r.blocks for r in read(path)] == [r.blocks for r in whole]
    assert "40 logged twice" in alarms(path)


def test_names_that_are_no_calls_names_join_nothing(tmp_path: Path, whole: Any) -> None:
    """Every call has the id of its trace, and the server computed a retry after minutes."""
    path = put(tmp_path / "a", [{**row, "id": row["session_id"]} for row in OWN])
    assert len(read(path)) == len(whole)
    rows = [{"time": START_S + at, "id": "one", "prompt": "the same"} for at in (0, 300)]
    assert len(read(put(tmp_path / "b", rows))) == 2


def test_two_handlers_of_one_servers_log_count_once(tmp_path: Path) -> None:
    rows = [row for n, c in enumerate(CALLS) for row in sglang_rows(c, n)]
    rows.sort(key=lambda row: row["timestamp"])
    path = put(tmp_path / "a", [row for row in rows for _ in range(2)])
    assert len(read(path)) == len(CALLS)
    assert "40 logged twice" in alarms(path)


def test_a_gateways_span_around_its_clients_span_counts_once(tmp_path: Path) -> None:
    from formats import otel_flat

    rows = []
    for n, c in enumerate(CALLS):
        inner = otel_flat(c, n)
        inner["parent_id"] = "outer"
        inner["context"] = {"trace_id": f"{n}", "span_id": "inner"}
        rows += [inner, {**inner, "parent_id": None, "context": {"trace_id": f"{n}", "span_id": "outer"}}]  # fmt: skip
    path = put(tmp_path / "a", rows)
    assert len(read(path)) == len(CALLS)
    assert "40 logged twice" in alarms(path)


# Counts of tokens.


def test_counts_without_cached_tokens_are_questioned(tmp_path: Path) -> None:
    """The log has no cached tokens, so the scale would be far too low."""
    rows = [{**row, "usage": {"input_tokens": 60, "output_tokens": 9}} for row in OWN]
    path = put(tmp_path / "a", rows)
    with pytest.raises(CanopyError, match=r"may leave out cached tokens.*give --tokenizer"):
        read_sample(path, "openai")


def test_inconsistent_counts_are_questioned(tmp_path: Path) -> None:
    rows = [
        {**row, "usage": {"input_tokens": c.tokens if c.turn == 1 else 90}}
        for row, c in zip(OWN, CALLS, strict=True)
    ]
    with pytest.raises(CanopyError, match=r"differ by a factor of \d+ between prompts"):
        read_sample(put(tmp_path / "a", rows), "openai")


def test_with_a_tokenizer_such_counts_are_not_used(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    rows = [{**row, "usage": {"input_tokens": 3}} for row in OWN]
    sample = read_sample(put(tmp_path / "a", rows), "openai", tokenizer=str(tmp_path))
    assert sample.token_scale == 1.0
    assert "token counts that are not used" in sample.understood.alarms()[0]


def test_litellms_cached_counts_are_not_added(tmp_path: Path) -> None:
    """Its ``prompt_tokens`` hold them already."""
    rows = [{**row, "usage": {**row["usage"], "cache_read_input_tokens": 400}} for row in OWN]
    assert read_sample(put(tmp_path / "a", rows), "openai").token_scale == pytest.approx(
        1.0, abs=0.1
    )


# Prompts in part.


def test_a_tools_answers_and_calls_are_part_of_a_prompt(tmp_path: Path) -> None:
    text = "a long answer of a tool " * 100
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": text},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": text}]},
    ]  # fmt: skip
    blocks = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": text},
                                     {"type": "tool_result", "tool_use_id": "d", "content": [{"type": "text", "text": text}]}]},
    ]  # fmt: skip
    rows = [{"time": 1, "body": {"input": items}}, {"time": 2, "messages": blocks}]
    for request in read(put(tmp_path / "a", rows)):
        assert request.input_tokens > 2 * len(text) // 4
        assert request.category == "chat-after-tool"
        assert request.turn == 2


def test_a_marker_that_moves_with_the_last_message_breaks_no_prefix(tmp_path: Path) -> None:
    """Anthropic's ``cache_control`` is no part of a prompt."""
    path = tmp_path / "a"
    path.write_bytes(FORMATS["anthropic"][1](CALLS))
    one, *rest = [r for r in read(path) if r.conversation == CALLS[0].talk]
    assert rest[0].blocks[: len(one.blocks) - 1] == one.blocks[:-1]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"previous_response_id": "resp_1"}, "continue a stored response"),
        ({"documents": ["a long document " * 200]}, "not read as part of the prompt: documents"),
    ],
)
def test_unread_parts_of_a_prompt_are_named(
    tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    rows = [{"time": n, "body": {"messages": row["messages"], **more}} for n, row in enumerate(OWN)]
    assert says in alarms(put(tmp_path / "a", rows))


def test_texts_that_a_gateway_shortened_are_pointed_out(tmp_path: Path) -> None:
    def cut(c: Any) -> list[dict[str, str]]:
        return [{**m, "content": m["content"][:400] + "... (litellm_truncated skipped 600 chars)"} for m in c.messages]  # fmt: skip

    rows = [{"time": when(c.at_s), "messages": cut(c)} for c in CALLS]
    assert "40 have texts that the gateway shortened" in alarms(put(tmp_path / "a", rows))


def test_a_batchs_output_and_increments_are_refused(tmp_path: Path) -> None:
    output = [
        {"id": "b", "custom_id": "r", "response": {"status_code": 200, "body": {"created": 1}}}
    ]
    with pytest.raises(CanopyError, match="give the batch's input file"):
        guess_format(put(tmp_path / "a", output))
    rows = [{"time": 1, "message_mode": "delta", "messages": OWN[0]["messages"]}]
    with pytest.raises(CanopyError, match="only what a turn adds"):
        read(put(tmp_path / "b", rows))


def test_pictures_are_counted_as_pictures(tmp_path: Path) -> None:
    picture = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "data:" + "x" * 9999}}],
    }
    rows = [{"time": n, "messages": [*row["messages"], picture]} for n, row in enumerate(OWN)]
    assert "40 have pictures" in alarms(put(tmp_path / "a", rows))


# Containers.


@pytest.mark.parametrize("wrap", [in_docker, in_containerd])
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_container_changes_no_request(tmp_path: Path, name: str, wrap: Any) -> None:
    bare, wrapped = tmp_path / "a", tmp_path / "b"
    bare.write_bytes(FORMATS[name][1](CALLS))
    wrapped.write_bytes(wrap(bare.read_bytes()))
    assert timeless(read(bare)) == timeless(read(wrapped))


def test_a_containers_log_reports_its_number_of_lost_lines(tmp_path: Path) -> None:
    """A rotated file begins and ends within a line, and a collector drops parts."""
    rows = in_containerd(FORMATS["vllm"][1](CALLS), at=1500).splitlines(keepends=True)
    kept = [row for n, row in enumerate(rows) if b" stdout F" not in row or n % 3]
    path = tmp_path / "a"
    path.write_bytes(b"".join(kept))
    sample = read_sample(path, "vllm")
    assert sample.requests_in_log < len(CALLS)
    assert "left out" in sample.understood.alarms()[0]


def test_prompts_that_max_log_len_cut_are_pointed_out(tmp_path: Path) -> None:
    import re

    rows = [
        re.sub(r"prompt: '(.{900}).*?', params", r"prompt: '\1', params", vllm_line(c, n))
        for n, c in enumerate(CALLS)
    ]
    assert "start vLLM without --max-log-len" in alarms(put(tmp_path / "a", rows))


# Times and sizes.


def test_aiperfs_times_are_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(FORMATS["aiperf-messages"][1](CALLS))
    sample = read_sample(path, "openai")
    assert sample.span_s == pytest.approx(CALLS[-1].at_s - CALLS[0].at_s, abs=0.1)


@pytest.mark.parametrize("block_tokens", [16, 64, 512, 1024])
def test_the_block_size_of_a_trace_is_found(tmp_path: Path, block_tokens: int) -> None:
    from formats import Ids

    ids, rows = Ids(), []
    for c in CALLS:
        tokens, blocks = ids(c, block_tokens)
        rows.append({"timestamp": c.at_s * 1000, "input_length": tokens, "output_length": 1, "hash_ids": blocks})  # fmt: skip
    assert {r.block_tokens for r in read(put(tmp_path / "a", rows))} == {block_tokens}


def test_a_row_that_names_its_block_size_is_believed(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1, 2], "block_size": 96}  # fmt: skip
    (request,) = read(put(tmp_path / "a", [row]))
    assert request.block_tokens == 96
    with pytest.raises(CanopyError, match="one block size"):
        read(put(tmp_path / "b", [row, {**row, "block_size": 64}]))


def test_ids_that_cover_a_part_of_their_prompts_are_pointed_out(tmp_path: Path) -> None:
    rows = [{"timestamp": n, "input_length": 50_000, "output_length": 1, "hash_ids": [n]} for n in range(9)]  # fmt: skip
    assert "fewer ids than their tokens fill" in alarms(put(tmp_path / "a", rows))


@pytest.mark.parametrize("first", [1 << 63, -(1 << 63), 1 << 70])
def test_hashes_of_any_size_are_block_ids(tmp_path: Path, first: int) -> None:
    rows = [{"timestamp": n, "input_length": 1024, "output_length": 1, "hash_ids": [first + n % 6, first + 100 + n]} for n in range(60)]  # fmt: skip
    small = [{**r, "hash_ids": [n % 6, 100 + n]} for n, r in enumerate(rows)]
    found, expected = (read(put(tmp_path / "a", r)) for r in (rows, small))
    assert all(0 <= block < 1 << 63 for r in found for block in r.blocks)
    names = {b: e for r, q in zip(found, expected, strict=True) for b, e in zip(r.blocks, q.blocks, strict=True)}  # fmt: skip
    assert len(names) == len(set(names.values())) == 66


# Chats with a common beginning.


def test_chats_with_equal_openings_are_separate_chats(tmp_path: Path) -> None:
    rows = []
    for n, c in enumerate(CALLS):
        first = [{"role": "user", "content": "Hi"}]
        rows.append({"time": START_S + n * 10, "messages": first})
        then = [*first, {"role": "assistant", "content": c.answer}, {"role": "user", "content": c.system}]  # fmt: skip
        rows.append({"time": START_S + n * 10 + 5, "messages": then})
    path = put(tmp_path / "a", rows)
    sample = read_sample(path, "openai")
    assert len({r.conversation for r in sample.requests}) >= len(CALLS)
    assert len(read_sample(path, "openai", most_requests=20).requests) <= 20


def test_an_unnamed_log_is_thinned_out_by_whole_chats(tmp_path: Path) -> None:
    rows = [own_unnamed(c, n) for n, c in enumerate(calls(60))]
    sample = read_sample(put(tmp_path / "a", rows), "openai", most_requests=100)
    assert len(sample.requests) == 4 * len({r.conversation for r in sample.requests})
    assert sample.one_in > 1
    assert sample.conversations == pytest.approx(60, rel=0.5)


def test_the_first_line_of_advice_reports_skipped_lines(tmp_path: Path, caplog: Any) -> None:
    rows = [{**row, "status": "failure"} if n % 2 else row for n, row in enumerate(OWN)]
    with caplog.at_level(logging.WARNING):
        list(open_trace(put(tmp_path / "a", rows), "openai"))
    assert "20 of 40 entries (50.0%) are left out: 20 failed calls" in caplog.text
