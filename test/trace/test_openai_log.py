"""Logs of an OpenAI API, in the formats of their exporters."""

import json
from pathlib import Path
from typing import Any

import pytest

from canopy_lab.advise.sample import conversation_key
from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.lines import Tolerance
from canopy_lab.trace.open import open_prompts, open_trace
from canopy_lab.trace.openai_log import parse
from canopy_lab.trace.prompts import Cutter, to_trace
from sglang_canopy.errors import CanopyError

SYSTEM = {"role": "system", "content": "You answer questions about caches. " * 10}
QUESTION = {"role": "user", "content": "Which leaf goes first? " * 8}
ANSWER = {"role": "assistant", "content": "The one that was used longest ago. " * 8}
FIRST, SECOND = [SYSTEM, QUESTION], [SYSTEM, QUESTION, ANSWER, QUESTION]


def plain(time: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"time": time, "messages": messages, "usage": {"completion_tokens": 7}}


def litellm(time: float, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """LiteLLM's StandardLoggingPayload."""
    return {
        "id": "1", "trace_id": "t", "call_type": "acompletion", "status": "success",
        "startTime": time, "endTime": time + 1, "prompt_tokens": 300, "completion_tokens": 7,
        "messages": messages, "end_user": "ann", "metadata": {"user_api_key_alias": None},
        "response": {"choices": [{"finish_reason": "tool_calls"}]}, "model_parameters": {},
    }  # fmt: skip


def langfuse(time: float, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A generation of Langfuse's export to blob storage: the input is JSON in a string."""
    return {
        "id": "1", "trace_id": "t", "type": "GENERATION", "session_id": "s1", "user_id": "ann",
        "start_time": f"2024-05-29 13:46:{19 + time:09.6f}", "input": json.dumps(messages),
        "output": "{}", "usage_details": {"input": 300, "output": 7},
    }  # fmt: skip


def batch(time: float, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's batch form with a time, as vLLM's run-batch takes it."""
    return {
        "custom_id": "1", "method": "POST", "created": time, "body": {"messages": messages},
        "response": {"body": {"usage": {"prompt_tokens": 300, "completion_tokens": 7}}},
    }  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("dialect", [plain, litellm, langfuse, batch])
def test_a_second_turn_shares_the_first_ones_blocks_in_every_dialect(
    dialect: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "log.jsonl", [dialect(0.0, FIRST), dialect(5.0, SECOND)])
    assert guess_format(path) == "openai"
    one, two = open_trace(path, "openai")
    assert (one.time_s, two.time_s) == (0.0, pytest.approx(5.0))
    assert (one.output_tokens, two.output_tokens) == (7, 7)
    assert (one.turn, two.turn) == (1, 2)
    assert one.conversation == two.conversation
    shared = sum(a == b for a, b in zip(one.blocks, two.blocks))
    # All but the last block, which is partial in the first turn.
    assert shared >= len(one.blocks) - 1 > 3
    assert two.input_tokens > one.input_tokens


def test_lists_of_langfuses_pages_are_read_as_lines_are(tmp_path: Path) -> None:
    rows = [langfuse(0.0, FIRST), {"type": "SPAN"}, langfuse(5.0, SECOND)]
    path = tmp_path / "export.json"
    path.write_text(json.dumps(rows))
    assert guess_format(path) == "openai"
    assert [r.conversation for r in open_trace(path, "openai")] == ["s1", "s1"]


def test_four_bytes_count_as_a_token_and_the_report_states_it(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [{"time": 1, "prompt": "é" * 100}])
    (request,) = open_trace(path, "openai")
    assert request.input_tokens == 50
    assert "4 bytes" in Cutter().method


def test_a_local_tokenizer_is_used(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(50)} | {"?": 50}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    path = write(
        tmp_path / "log.jsonl", [{"time": 1, "prompt": " ".join(f"w{i}" for i in range(40))}]
    )
    tolerance = Tolerance(path)
    prompts = open_prompts(path, "openai", tolerance)
    (request,) = to_trace(prompts, tolerance, Cutter(tmp_path))
    assert request.input_tokens == 40
    assert len(request.blocks) == 3
    with pytest.raises(CanopyError, match=r"give a tokenizer\.json"):
        Cutter(tmp_path / "none.json")


def test_answers_that_end_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    rows = [plain(t, FIRST) for t in (5, 1, 3, 2, 4)]
    path = write(tmp_path / "log.jsonl", rows)
    assert [r.time_s for r in open_trace(path, "openai")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (1_700_000_000, 1.7e9),
        (1_700_000_000_000, 1.7e9),
        (1_700_000_000_000_000, 1.7e9),
        (1_700_000_000_000_000_000, 1.7e9),
        ("1700000000.5", 1_700_000_000.5),
        ("2023-11-14T22:13:20Z", 1.7e9),
        ("2023-11-14 22:13:20.250000", 1_700_000_000.25),
        (12.5, 12.5),
    ],
)
def test_times_are_seconds_milliseconds_or_dates(given: Any, seconds: float) -> None:
    (prompt,) = parse(plain(given, FIRST))
    assert prompt.time_s == pytest.approx(seconds)


def test_categories_are_those_that_a_server_infers() -> None:
    tools = plain(0, [*SECOND, {"role": "tool", "content": "12"}]) | {"tools": [{"a": 1}]}
    image = plain(0, [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]}])  # fmt: skip
    found = [parse(entry) for entry in (plain(0, FIRST), tools, image)]
    assert [p.category for (p,) in found] == ["chat", "chat-tools-after-tool", "chat-image"]


def test_failed_calls_are_no_traffic() -> None:
    assert parse({**litellm(0, FIRST), "status": "failure"}) == []
    assert parse({**langfuse(0, FIRST), "type": "EVENT"}) == []
    assert parse({**langfuse(0, FIRST), "type": "CHAIN"}) == []
    assert parse({**plain(0, FIRST), "type": "agent"})  # a gateway's own word


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": FIRST}, "no time"),
        ({"time": "yesterday", "messages": FIRST}, "must be a number or a date"),
        ({"time": 1, "model": "m"}, "no prompt"),
        ({"time": 1, "messages": []}, "no prompt"),
    ],
)
def test_the_error_of_a_broken_line_has_the_reason(
    row: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "log.jsonl", [row])
    with pytest.raises(CanopyError, match=f"line 1: .*{says}"):
        list(open_trace(path, "openai"))
    assert list(open_trace(path, "openai", skip_bad=1)) == []


def test_an_image_is_no_text_of_its_bytes(tmp_path: Path) -> None:
    """A picture in a data URL has a million characters; a model has some hundred tokens for it."""

    def asked(picture: str) -> dict[str, Any]:
        url = {"url": f"data:image/png;base64,{picture * 50_000}"}
        parts = [
            {"type": "text", "text": "What is it? " * 20},
            {"type": "image_url", "image_url": url},
        ]
        return plain(0, [{"role": "user", "content": parts}])

    path = write(tmp_path / "log.jsonl", [asked("cat"), asked("cat"), asked("dog")])
    one, same, other = open_trace(path, "openai")
    assert one.input_tokens < 200
    assert one.blocks == same.blocks
    assert one.blocks[:3] == other.blocks[:3]
    assert one.blocks[-1] != other.blocks[-1]


def test_several_prompts_of_one_call_are_several_requests(tmp_path: Path) -> None:
    """``/v1/completions`` and ``/v1/embeddings`` take lists."""
    rows = [
        {"time": 1, "prompt": ["first " * 40, "second " * 40]},
        {"time": 2, "input": [[1] * 40, [2] * 30]},
        {"time": 3, "prompt": "third " * 40},
    ]
    found = list(open_trace(write(tmp_path / "log.jsonl", rows), "openai"))
    assert [r.time_s for r in found] == [0, 0, 1, 1, 2]
    assert [r.input_tokens for r in found[2:4]] == [40, 30]


@pytest.mark.parametrize("field", ["model", "cache_salt", "lora_path"])
def test_requests_that_no_server_shares_share_no_block(tmp_path: Path, field: str) -> None:
    """A gateway logs the calls of all its models: their KV is not the same."""
    rows = [plain(at, FIRST) | {field: name} for at, name in enumerate(["a", "a", "b"])]
    one, same, other = open_trace(write(tmp_path / "log.jsonl", rows), "openai")
    assert one.blocks == same.blocks
    assert not {*one.blocks} & {*other.blocks}


def test_several_models_are_named(tmp_path: Path, caplog: Any) -> None:
    rows = [plain(at, FIRST) | {"model": name} for at, name in enumerate(["a", "a", "b"])]
    path = write(tmp_path / "log.jsonl", rows)
    list(open_trace(path, "openai"))
    assert "2 models (a, b)" in caplog.text


def test_names_with_slashes_are_conversations_of_their_own(tmp_path: Path) -> None:
    """Clients name sessions as paths; only in agents' traces is the first part a parent."""
    rows = [plain(at, FIRST) | {"session_id": f"team/{at}"} for at in range(3)]
    found = list(open_trace(write(tmp_path / "log.jsonl", rows), "openai"))
    assert len({conversation_key(r) for r in found}) == 3


@pytest.mark.parametrize(
    "call_type", ["aembedding", "embedding", "image_generation", "atranscription", "arerank"]
)
def test_calls_of_other_models_are_skipped(call_type: str) -> None:
    assert parse(litellm(0, FIRST) | {"call_type": call_type}) == []


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [{"role": "user", "content": None}]},
        {
            "messages": [
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
            ]
        },
        {"messages": [{"role": "user", "content": [None, 5, "text"]}]},
        {"messages": [{"role": "user", "content": {"text": "x"}}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": 5}]},
        {
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "x"}],
                }
            ]
        },
        {"messages": "a plain text"},
        {"messages": FIRST, "usage": "much", "response": [1], "metadata": []},
        {"messages": FIRST, "session_id": {"a": 1}, "user": ["x"]},
        {"prompt": ""},
        {"prompt": []},
        {"input": [2**70]},
        {"time": -5, "prompt": "x"},
        {"time": True, "prompt": "x"},
        {"time": {"a": 1}, "prompt": "x"},
        {"time": "1e999", "prompt": "x"},
        {"time": "nan", "prompt": "x"},
        {"time": "9999-99-99", "prompt": "x"},
    ],
)
def test_any_line_is_read_or_reported_as_broken(given: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [{"time": 1, **given}, plain(2, FIRST)])
    assert 1 <= len(list(open_trace(path, "openai", skip_bad=1))) <= 2
