"""Replays against a real server: exact lengths, turns that hit generated tokens, labels, the server's log."""

import json
import operator
from pathlib import Path
from typing import Any

import pytest

from canopy_lab.trace import open_trace
from sglang_canopy.bench_serving import main, replay
from sglang_canopy.errors import CanopyError

pytestmark = pytest.mark.xdist_group("canopy")
FIRST_PROMPT_TOKENS, ANSWER_TOKENS, USER_TOKENS = 100, 16, 36
"""Tokens of a first prompt, of an answer, and of what a user adds to it."""
TURN_TOKENS = ANSWER_TOKENS + USER_TOKENS


@pytest.fixture(scope="module")
def chat_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three conversations of three turns in the Bailian format."""
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    lines = []
    for turn in range(1, 4):
        for number in range(3):
            tokens = FIRST_PROMPT_TOKENS + TURN_TOKENS * (turn - 1)
            blocks = [1000 * number + i for i in range(-(-tokens // 16))]
            if tokens % 16:  # a partial block's id is its own
                blocks[-1] = 1000 * number + 500 + turn
            lines.append(
                {
                    "chat_id": 10 * turn + number,
                    "parent_chat_id": 10 * (turn - 1) + number if turn > 1 else -1,
                    "timestamp": turn + number / 10,
                    "input_length": tokens,
                    "output_length": ANSWER_TOKENS,
                    "type": ("text", "search", "file")[number],
                    "turn": turn,
                    "hash_ids": blocks,
                }
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_turn_hits_the_previous_answer(client, tiny_model, chat_trace, tmp_path):
    result_path = tmp_path / "out.json"
    result = replay(
        "bailian", str(chat_trace), client.url, "tiny", tokenizer=str(tiny_model), time_scale=0,
        max_concurrency=2, output_file=str(result_path), output_details=True,
    )  # fmt: skip
    assert json.loads(result_path.read_text()) == result
    assert result["outputs_forced"]
    assert (result["completed"], result["errors"]["count"]) == (9, 0)
    for request in result["details"]:
        turn = request["turn"]
        assert request["prompt_tokens"] == FIRST_PROMPT_TOKENS + TURN_TOKENS * (turn - 1)
        assert request["output_tokens"] == ANSWER_TOKENS
        # The last generated token's KV is computed only when another follows it.
        previous_tokens = FIRST_PROMPT_TOKENS + TURN_TOKENS * (turn - 2) + ANSWER_TOKENS - 1
        assert request["cached_tokens"] >= (previous_tokens if turn > 1 else 0)
        assert request["cached_tokens"] < request["prompt_tokens"]
    assert set(result["by_category"]) == {"text", "search", "file"}
    assert result["by_turn"]["1"]["hit_rate"] < 0.1 < result["by_turn"]["2"]["hit_rate"]
    assert result["overall"]["hit_rate_by_tier"]["device"] == result["overall"]["hit_rate"]
    for name in ("ttft_ms", "queued_ttft_ms"):
        assert 0 < result["overall"][name]["p50"] <= result["overall"][name]["p99"]


def test_without_forced_outputs_a_turn_hits_the_prompt_before(client, tiny_model, chat_trace):
    result = replay(
        "bailian", str(chat_trace), client.url, "tiny", tokenizer=str(tiny_model),
        backend="openai", time_scale=0, output_details=True,
    )  # fmt: skip
    assert not result["outputs_forced"]
    assert result["completed"] == 9
    for request in result["details"]:
        previous_tokens = FIRST_PROMPT_TOKENS + TURN_TOKENS * (request["turn"] - 2)
        if request["turn"] > 1:
            assert previous_tokens <= request["cached_tokens"] < previous_tokens + 16


def test_the_completions_endpoint_forces_and_reports_tiers_too(client, tiny_model, chat_trace):
    result = replay(
        "bailian", str(chat_trace), client.url, "tiny", tokenizer=str(tiny_model),
        backend="sglang-oai", time_scale=0, num_prompts=6,
    )  # fmt: skip
    assert result["outputs_forced"]
    assert result["completed"] == 6
    by_tier = result["by_turn"]["2"]["cached_tokens_by_tier"]
    assert by_tier["device"] >= 3 * (FIRST_PROMPT_TOKENS + ANSWER_TOKENS - 1)


def test_lengths_scale_and_blocks_stay_shared(client: Any, chat_trace: Path) -> None:
    result = replay(
        "bailian", str(chat_trace), client.url, "tiny", vocab_size=40_000,
        time_scale=0, scale_lengths="1/4", output_details=True,
    )  # fmt: skip
    assert {request["prompt_tokens"] for request in result["details"]} == {25, 38, 51}
    assert {request["output_tokens"] for request in result["details"]} == {4}
    second_turns = [request for request in result["details"] if request["turn"] == 2]
    assert min(request["cached_tokens"] for request in second_turns) >= 25 + 4 - 1


def test_agents_are_replayed_at_every_rate(client: Any, tmp_path: Path) -> None:
    """A closed loop: three agents of three turns, each of which thinks for 0.2 s."""
    trace, result_path, think_s = tmp_path / "agents.jsonl", tmp_path / "out.json", 0.2
    rows = [
        {"t": turn * 1.0 + agent / 10, "in": 40 + 10 * turn, "out": 2, "block_size": 10,
         "hash_ids": [100 * agent + i for i in range(4 + turn)], "turn": turn + 1,
         "conversation": f"c{agent}", "think_time": think_s}
        for turn in range(3) for agent in range(3)
    ]  # fmt: skip
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def count_posts(path: str) -> int:
        return client.server.log_text().count(f"POST {path}")

    flushes, prompts = count_posts("/flush_cache"), count_posts("/generate")
    result = replay(
        "agentic", str(trace), client.url, "tiny", vocab_size=40_000, closed_loop=True,
        rates="36000,360000", slo="max_ttft<1h", warm_up_share=0, output_file=str(result_path),
        output_details=True,
    )  # fmt: skip
    assert json.loads(result_path.read_text()) == result
    assert [row["rate"] for row in result["rates"]] == [36000, 360000]
    assert result["goodput_rate"] == 360000
    assert count_posts("/flush_cache") == flushes + 2
    assert count_posts("/generate") == prompts + 2 * (9 + 1)  # and a probe each
    for row in result["rates"]:
        assert row["latency"]["sessions"] == 3
        assert row["latency"]["session_s"]["p50"] >= 2 * think_s
    last_answer_s: dict[str, float] = {}
    for request in result["details"]:
        previous_s = last_answer_s.get(request["conversation"])
        if previous_s is not None:
            assert request["due_s"] >= previous_s + think_s - 0.002  # times are rounded to 1 ms
        last_answer_s[request["conversation"]] = request["done_s"]


def test_a_servers_own_log_reads_back_as_the_replayed_trace(client, chat_trace, request_log):
    replay(
        "bailian", str(chat_trace), client.url, "tiny", vocab_size=40_000,
        time_scale=0, max_concurrency=1,
    )  # fmt: skip
    (log,) = request_log.iterdir()
    logged = list(open_trace(log, "sglang"))[-9:]
    labels_of = operator.attrgetter("category", "turn", "conversation")
    for logged_request, request in zip(logged, open_trace(chat_trace, "bailian"), strict=True):
        logged_lengths = logged_request.input_tokens, logged_request.output_tokens
        assert logged_lengths == (request.input_tokens, request.output_tokens)
        assert labels_of(logged_request) == labels_of(request)
    logged_by_turn = {(request.conversation, request.turn): request for request in logged}
    for (conversation, turn), request in logged_by_turn.items():
        if turn > 1:
            previous = logged_by_turn[conversation, turn - 1]
            full_blocks = previous.input_tokens // 16
            assert request.blocks[:full_blocks] == previous.blocks[:full_blocks]


def test_an_impossible_run_ends_with_one_line(client, chat_trace, capsys):
    common_flags = ["--dataset-path", str(chat_trace), "--base-url", client.url, "--model", "tiny"]
    common_flags += ["--vocab-size", "40000"]
    bad_file = chat_trace.with_name("bad.jsonl")
    requests = [  # no block size fits both
        {"timestamp": 0, "input_length": 100, "output_length": 4, "hash_ids": list(range(9))},
        {"timestamp": 1, "input_length": 4000, "output_length": 4, "hash_ids": [1, 2]},
    ]
    bad_file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    bad_trace = ["--dataset-path", str(bad_file), *common_flags[2:]]
    assert main([*bad_trace, "--dataset-name", "mooncake"]) == 2
    assert "line 1: 'hash_ids' has 9 blocks of 512 tokens" in capsys.readouterr().err
    assert main([*common_flags, "--dataset-name", "bailian", "--max-request-tokens", "20"]) == 2
    assert "gives no request of at most 20 tokens" in capsys.readouterr().err
    with pytest.raises(CanopyError, match="cannot replay a trace"):
        replay("bailian", str(chat_trace), client.url, "tiny", backend="sglang-oai-chat")


def test_datasets_of_the_original_still_run(client: Any, tiny_model: Path, tmp_path: Path) -> None:
    result_path = tmp_path / "random.jsonl"
    arguments = ["--dataset-name", "random-ids", "--tokenize-prompt", "--base-url", client.url]
    arguments += ["--model", "tiny", "--tokenizer", str(tiny_model), "--num-prompts", "3"]
    arguments += ["--random-input-len", "20", "--random-output-len", "4"]
    arguments += ["--output-file", str(result_path)]
    assert main(arguments) == 0
    assert json.loads(result_path.read_text())["completed"] == 3
