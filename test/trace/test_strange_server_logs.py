"""Other entries in real servers' logs than plain requests: none ends a run, none is invented."""

import json
from pathlib import Path
from typing import Any

import pytest
from server_events import event, finished

from canopy_lab.trace import open_trace
from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.sglang_log import pool_tokens, read_as_server
from sglang_canopy.errors import CanopyError

PROMPT = list(range(200))


def read(path: Path, *rows: str) -> list[TraceRequest]:
    path.write_text("\n".join(rows) + "\n")
    return list(open_trace(path, "sglang"))


def test_health_checks_are_no_traffic(tmp_path: Path) -> None:
    """SGLang's ``/health`` generates a token for the prompt ``[0]``; a busy server never ends it."""
    rows = []
    for at in range(3):
        probe = f"HEALTH_CHECK_{at}"
        rows += [event("received", probe, 1 + at, obj={}), finished(probe, 1.5 + at, [0])]
    rows += [event("received", "HEALTH_CHECK_9", 5, obj={}), finished("a", 6, PROMPT)]
    (request,) = read(tmp_path / "log", *rows)
    assert request.input_tokens == 200


def test_embeddings_have_no_tokens_in_their_answers(tmp_path: Path) -> None:
    meta = {"e2e_latency": 0.1, "prompt_tokens": 200, "finish_reason": {"type": "length"}}
    row = event("finished", "e", 1, obj={"input_ids": PROMPT}, out={"embedding": [], "meta_info": meta})  # fmt: skip
    (request,) = read(tmp_path / "log", row)
    assert (request.input_tokens, request.output_tokens) == (200, 0)


@pytest.mark.parametrize(
    ("reason", "completion_tokens", "kept"),
    [
        ({"type": "abort", "message": "Abort in waiting queue"}, 0, False),
        ({"type": "abort", "status_code": 503, "message": "The request queue is full."}, 0, False),
        ({"type": "abort", "status_code": 400, "message": "too long"}, 1, False),
        ({"type": "abort", "message": "Abort by client"}, 7, True),
    ],
)
def test_refused_requests_are_skipped(
    tmp_path: Path, reason: dict[str, Any], completion_tokens: int, kept: bool
) -> None:
    """A client that retries at a full server must not look like a repeating prompt."""
    meta = {"completion_tokens": completion_tokens, "e2e_latency": 0.1, "finish_reason": reason}
    row = event("finished", "a", 1, obj={"input_ids": PROMPT}, out={"meta_info": meta})
    found = read(tmp_path / "log", row, finished("b", 2, PROMPT))
    assert len(found) == 1 + kept


def test_a_request_that_never_ends_holds_back_no_others(tmp_path: Path, monkeypatch: Any) -> None:
    """Otherwise the log stays in memory behind the first client that disconnected."""
    monkeypatch.setattr("canopy_lab.trace.sglang_log.ORDER_WINDOW", 4)
    log = tmp_path / "log"
    rows = [event("received", "never", 1, obj={})]
    for at in range(8):
        rows += [event("received", str(at), 2 + at, obj={}), finished(str(at), 2.5 + at, PROMPT)]
    log.write_text("\n".join([*rows, "[x] {broken"]) + "\n")
    trace = open_trace(log, "sglang")
    first = next(trace)
    assert (first.time_s, first.line) == (1.0, 3)
    assert [r.time_s for r in trace] == [2, 3, 4, 5, 6, 7, 8]


def test_several_answers_to_one_prompt_are_as_many_requests(tmp_path: Path, caplog: Any) -> None:
    """With ``n`` SGLang computes the prompt once, then each answer under a new name."""
    obj = {"sampling_params": {"n": 2}}
    rows = [event("received", ["r"], 1.0, obj=obj)]
    rows += [finished(name, 3.0, PROMPT) for name in ("prefix", "one", "two")]
    assert [r.input_tokens for r in read(tmp_path / "log", *rows)] == [200] * 3
    assert "never finished" not in caplog.text


def test_a_batch_is_received_as_a_list_and_ends_one_by_one(tmp_path: Path) -> None:
    obj = {"input_ids": [PROMPT, [7]], "sampling_params": [{"n": 1}, {"n": 1}]}
    rows = [event("received", ["a", "b"], 1.0, obj=obj)]
    rows += [finished("b", 2.0, [7]), finished("a", 5.0, PROMPT)]
    assert [(r.time_s, r.input_tokens) for r in read(tmp_path / "log", *rows)] == [(0, 200), (0, 1)]


def test_a_text_shortened_by_level_2_is_no_prompt(tmp_path: Path) -> None:
    text = "a" * 1024 + "..." + "b" * 1024
    with pytest.raises(CanopyError, match=r"line 1: .*shortened.*--log-requests-level 3"):
        read(tmp_path / "log", finished("a", 1, None, text=text))


SEEN = "system <|vision_start|><|image_pad|><|vision_end|> what is it? " * 3


@pytest.mark.parametrize("prompt", [{"ids": None, "text": "rules " * 40 + SEEN}, {"ids": PROMPT}])
def test_prompts_with_different_images_share_only_the_preceding_text(
    tmp_path: Path, prompt: dict[str, Any]
) -> None:
    rows = [
        finished(str(at), 1 + at, **prompt, image_data=image and [{"url": f"data:{image}"}])
        for at, image in enumerate(["cat", "cat", "dog"])
    ]
    one, same, other = read(tmp_path / "log", *rows)
    assert one.blocks == same.blocks
    shared = [a == b for a, b in zip(one.blocks, other.blocks)]
    before = 4 if prompt["ids"] is None else 0
    assert shared == [True] * before + [False] * (len(shared) - before)


def test_more_images_later_leave_the_turns_before_as_they_were(tmp_path: Path) -> None:
    first, second = "see <image> " + "and " * 60, "see <image> " + "and " * 60 + "now <image> " * 9
    rows = [
        finished("a", 1, None, text=first, image_data=["cat"]),
        finished("b", 2, None, text=second, image_data=["cat", "dog"]),
    ]
    one, two = read(tmp_path / "log", *rows)
    assert one.blocks[:-1] == two.blocks[: len(one.blocks) - 1]


def test_texts_are_measured_by_the_servers_own_counts(tmp_path: Path) -> None:
    """Two characters a token here, as for Chinese: four would make every capacity twice too large."""
    rows = []
    for at, text in enumerate(["缓存" * 100, "缓存" * 150]):
        meta = {"completion_tokens": 4, "prompt_tokens": len(text) // 2}
        rows.append(event("finished", str(at), 1 + at, obj={"text": text, "input_ids": None}, out={"meta_info": meta}))  # fmt: skip
    first, second = read(tmp_path / "log", *rows)
    assert (first.input_tokens, second.input_tokens) == (100, 150)
    assert first.blocks[:6] == second.blocks[:6]
    assert len(first.blocks) == 7
    assert [len(r.blocks) for r in read_as_server(tmp_path / "log")] == [1, 2]


def test_a_clock_that_is_set_back_continues(tmp_path: Path, caplog: Any) -> None:
    """Daylight saving, or hourly files in the wrong order."""
    rows = [
        '[x] {"timestamp": "2026-10-25T02:59:00", "event": "request.finished", "rid": "a",',
        '[x] {"timestamp": "2026-10-25T02:00:00", "event": "request.finished", "rid": "b",',
        '[x] {"timestamp": "2026-10-25T02:01:00", "event": "request.finished", "rid": "c",',
    ]
    end = {"obj": {"input_ids": PROMPT}, "out": {"meta_info": {"completion_tokens": 1}}}
    found = read(tmp_path / "log", *(row + json.dumps(end)[1:] for row in rows))
    assert [r.time_s for r in found] == [0, 0, 60]
    assert "line 2" in caplog.text
    assert "goes back" in caplog.text


def test_stamps_with_and_without_a_zone_are_compared(tmp_path: Path) -> None:
    rows = [finished("a", 1, PROMPT), finished("b", 3, PROMPT).replace(":03.000000", ":03.000000Z")]
    assert [r.time_s for r in read(tmp_path / "log", *rows)] == [0, 1]


def test_a_log_that_was_shipped_elsewhere_may_be_compact(tmp_path: Path) -> None:
    """Log shippers rewrite JSON, without blanks and with another order of keys."""
    given = json.loads(finished("a", 1, PROMPT).partition("] ")[2])
    row = json.dumps(given, separators=(",", ":"), sort_keys=True)
    (request,) = read(tmp_path / "log", row)
    assert request.input_tokens == 200
    assert guess_format(tmp_path / "log") == "sglang"


def test_the_pools_of_dp_ranks_are_added_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    start = "[2026-01-02 03:00:01] server_args=ServerArgs(model_path='m')\n"
    ranks = [
        f"[2026-01-02 03:00:05 DP{r} TP{2 * r}] max_total_num_tokens=5000, c\n" for r in (0, 1)
    ]
    log.write_text(start + "[2026-01-02 03:00:05 TP0] max_total_num_tokens=900, c\n" + start + "".join(ranks))  # fmt: skip
    assert pool_tokens(log) == (10_000, 2)
    log.write_text("".join(ranks) + start + "[x TP0] max_total_num_tokens=900, c\n")
    assert pool_tokens(log) == (900, 1)


def test_a_name_of_a_client_is_no_inferred_one(tmp_path: Path) -> None:
    rows = [finished("a", 1, PROMPT), finished("b", 2, [9] * 99, session_id="0")]
    one, two = read(tmp_path / "log", *rows)
    assert one.conversation != two.conversation


@pytest.mark.parametrize(
    "strange", [{"cache_salt": 5}, {"extra_key": ["a"]}, {"lora_path": {"a": 1}}]
)
def test_salts_of_any_kind_keep_prompts_apart(tmp_path: Path, strange: dict[str, Any]) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join([finished("a", 1, PROMPT), finished("b", 2, PROMPT, **strange)]))
    for found in (open_trace(log, "sglang"), read_as_server(log)):
        one, two = found
        assert not {*one.blocks} & {*two.blocks}


def test_a_number_that_is_no_token_is_a_broken_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(finished("a", 1, [1, 2**70]) + "\n")
    for read_it in (lambda: open_trace(log, "sglang"), lambda: read_as_server(log)):
        with pytest.raises(CanopyError, match="line 1: the prompt's token ids"):
            list(read_it())


def test_a_session_of_increments_is_reported(tmp_path: Path, caplog: Any) -> None:
    """With ``session_params`` SGLang builds the prompt from earlier turns."""
    read(tmp_path / "log", finished("a", 1, PROMPT, session_params={"id": "s", "rid": "r"}))
    assert "1 continue a session that is not in the log" in caplog.text


def test_a_name_that_a_client_uses_again_is_another_request(tmp_path: Path) -> None:
    rows = [event("received", "slow", 1, obj={})]
    for at in (2, 4):
        rows += [event("received", "mine", at, obj={}), finished("mine", at + 1, PROMPT)]
    rows.append(finished("slow", 9, PROMPT))
    assert [r.time_s for r in read(tmp_path / "log", *rows)] == [0, 1, 3]
