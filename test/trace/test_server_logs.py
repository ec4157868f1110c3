"""Cases that no log file covers: prompts as a server's block ids, tokenizers, samples, and SGLang's own logger."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from canopy_lab.advise.sample import hash_conversation, read_sample
from canopy_lab.trace import open_trace
from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.lines import Tolerance
from canopy_lab.trace.open import open_prompts
from canopy_lab.trace.prompts import Cutter, to_trace
from canopy_lab.trace.sglang_log import pool_tokens, read_as_server
from sglang_canopy.errors import CanopyError

LOGS = Path(__file__).resolve().parents[1] / "fixtures" / "logs"


def event(event_name: str, rid: str, second: float, **fields: Any) -> str:
    """Return a line of SGLang's request log."""
    stamp = f"2026-01-02T03:04:{second:09.6f}"
    row = {"timestamp": stamp, "event": f"request.{event_name}", "rid": rid, **fields}
    return f"[x] {json.dumps(row)}"


def end_event(rid: str, second: float, ids: list[int]) -> str:
    request = {"input_ids": ids, "text": None, "sampling_params": {}}
    return event("finished", rid, second, obj=request, out={"meta_info": {"completion_tokens": 4}})


@pytest.mark.parametrize(
    ("name", "block_counts"),
    [
        ("sglangs-own-warm-up", [3]),
        ("texts-are-measured-by-the-servers-own-counts", [1, 2]),
        ("servers-log-may-mix-token-ids-with-text-and-adapters", [3, 4, 4, 3, 3]),
        ("servers-namespaces-share-nothing", [0] * 9 + [1] * 9),
    ],
)
def test_a_servers_requests_have_the_logs_token_counts(name: str, block_counts: list[int]) -> None:
    requests = list(read_as_server(LOGS / f"{name}.jsonl"))
    assert [len(r.blocks) for r in requests] == block_counts
    log_requests = open_trace(LOGS / f"{name}.jsonl", "sglang")
    assert [r.input_tokens for r in requests] == [r.input_tokens for r in log_requests]


def test_a_servers_namespaces_share_no_blocks() -> None:
    requests = list(read_as_server(LOGS / "servers-namespaces-share-nothing.jsonl"))
    for i, request in enumerate(requests):
        earlier_blocks = {block for earlier in requests[:i] for block in earlier.blocks}
        if request.blocks:
            assert (request.blocks[0] in earlier_blocks) == (i in (10, 17))


def test_a_request_that_never_ends_delays_no_others(tmp_path: Path, monkeypatch: Any) -> None:
    """Otherwise the log stays in memory behind the first client that disconnected."""
    monkeypatch.setattr("canopy_lab.trace.sglang_log.ORDER_WINDOW", 4)
    log = tmp_path / "log"
    lines = [event("received", "never", 1, obj={})]
    for i in range(8):
        lines += [event("received", str(i), 2 + i, obj={}), end_event(str(i), 2.5 + i, [1] * 99)]
    log.write_text("\n".join([*lines, "[x] {broken"]) + "\n")
    trace = open_trace(log, "sglang")
    first_request = next(trace)
    assert (first_request.time_s, first_request.line) == (1.0, 3)
    assert [request.time_s for request in trace] == [2, 3, 4, 5, 6, 7, 8]


def test_the_pools_of_dp_ranks_are_added_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    start_line = "[2026-01-02 03:00:01] server_args=ServerArgs(model_path='m')\n"
    rank_line = "[2026-01-02 03:00:05 DP{} TP{}] max_total_num_tokens=5000, c\n"
    rank_lines = "".join(rank_line.format(rank, 2 * rank) for rank in (0, 1))
    single_rank_line = "[2026-01-02 03:00:05 TP0] max_total_num_tokens=900, c\n"
    log.write_text(start_line + single_rank_line + start_line + rank_lines)
    assert pool_tokens(log) == (10_000, 2)
    log.write_text(rank_lines + start_line + single_rank_line)
    assert pool_tokens(log) == (900, 1)


def test_a_servers_log_is_recognised_after_900_other_lines(tmp_path: Path) -> None:
    health_line = '[2026-01-02 03:00:10] INFO:     10.0.0.1:1 - "GET /health HTTP/1.1" 200 OK\n'
    log = tmp_path / "server.log"
    log.write_text(health_line * 900 + end_event("a", 1, [1] * 40) + "\n")
    assert guess_format(log) == "sglang"


def test_sglangs_own_logger_is_understood(tmp_path: Path) -> None:
    request_logger = pytest.importorskip("sglang.srt.utils.request_logger")
    from sglang.srt.managers.io_struct import GenerateReqInput

    logger = request_logger.RequestLogger(True, 3, "json", [str(tmp_path / "logs")])
    params = {"custom_params": {"canopy_turn": 2}}
    obj = GenerateReqInput(input_ids=list(range(3000)), sampling_params=params, rid="r1")
    logger.log_received_request(obj)
    reason = {"type": "length", "length": 7}
    meta_info = {"completion_tokens": 7, "e2e_latency": 0.5, "finish_reason": reason}
    logger.log_finished_request(obj, {"text": "x", "meta_info": meta_info})
    logging.shutdown()
    (log,) = (tmp_path / "logs").iterdir()
    (request,) = open_trace(log, "sglang")
    assert (request.input_tokens, request.output_tokens, request.turn) == (3000, 7, 2)
    assert (request.stop, len(request.blocks)) == ("length", 188)


def write_tokenizer(folder: Path, token_ids: dict[str, int]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(token_ids, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(folder / "tokenizer.json"))


def test_a_local_tokenizer_is_used_in_place_of_four_bytes_a_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {f"w{i}": i for i in range(50)} | {"?": 50})
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"time": 1, "prompt": " ".join(f"w{i}" for i in range(40))}))
    tolerance = Tolerance(path)
    (request,) = to_trace(open_prompts(path, "openai", tolerance), tolerance, Cutter(tmp_path))
    assert (request.input_tokens, len(request.blocks)) == (40, 3)
    assert "4 bytes" in Cutter().method
    with pytest.raises(CanopyError, match=r"give a tokenizer\.json"):
        Cutter(tmp_path / "none.json")


def test_with_a_tokenizer_counts_that_leave_out_cached_tokens_are_not_used(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"?": 0})
    log = LOGS / "counts-without-cached-tokens.jsonl"
    sample = read_sample(log, "openai", tokenizer=str(tmp_path))
    assert sample.token_scale == 1.0
    assert "token counts that are not used" in sample.understood.alarms()[0]


def test_an_image_counts_as_an_image_and_not_as_its_bytes(tmp_path: Path) -> None:
    """A picture in a data URL has a million characters; a model has some hundred tokens for it."""
    path = tmp_path / "log.jsonl"
    with path.open("w") as log_file:
        for i, picture in enumerate(("cat", "cat", "dog")):
            url = {"url": f"data:image/png;base64,{picture * 50_000}"}
            parts = [{"type": "text", "text": "What is it? " * 20}, {"type": "image_url", "image_url": url}]  # fmt: skip
            log_file.write(json.dumps({"time": i, "messages": [{"role": "user", "content": parts}]}) + "\n")  # fmt: skip
    original, repeated, other_image = open_trace(path, "openai")
    assert original.input_tokens < 200
    assert original.blocks == repeated.blocks
    assert original.blocks[:3] == other_image.blocks[:3]
    assert original.blocks[-1] != other_image.blocks[-1]


def test_names_with_slashes_are_conversations_of_their_own() -> None:
    """Clients name sessions as paths; only in agents' traces is the first part a parent."""
    trace = open_trace(LOGS / "names-with-slashes-are-conversations-of-their-own.jsonl", "openai")
    assert len({hash_conversation(request) for request in trace}) == 3
