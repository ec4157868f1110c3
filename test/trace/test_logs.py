"""Logs as files: each gives the outcome in the JSON file beside it, and no damage invents a request.

A new case is two files: ``fixtures/logs/NAME.jsonl`` and its outcome, which ``python test/trace/test_logs.py
NAME`` writes, to be read before it is committed. Logs of ``traffic-`` hold the same calls in every format.
"""

import gzip
import json
import logging
import math
import random
import re
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from canopy_lab.advise.sample import read_sample
from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.lines import Tolerance
from canopy_lab.trace.open import format_names, read_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "logs"
LOGS = {path.stem: path for path in sorted(FOLDER.iterdir()) if path.suffix != ".json"}
TRAFFIC_LOGS = [name for name in LOGS if name.startswith("traffic-")]
ONE_DOCUMENT_LOGS = ("traffic-langfuse-page", "traffic-litellm-spendlogs-csv")
UNORDERED_LOGS = ("traffic-bailian", "traffic-batch")
"""Formats whose lines mean nothing, or another thing, in another order."""
REPORTED_LOGS = ("traffic-dynamo-64", "traffic-mooncake", "traffic-mooncake-16", "traffic-sglang")
"""Formats whose reader reports another order, by an error or by a count of changed entries."""
TIME_S, INPUT_TOKENS, TURN, CONVERSATION = 0, 1, 5, 6
"""Positions in a request's row of an outcome."""
LOGS_WITH_IDS = {f"traffic-{name}" for name in ("litellm-payload", "litellm-spendlogs", "langfuse", "helicone", "otel-otlp", "otel-flat", "sglang")}  # fmt: skip
"""Formats whose lines name their call."""


def has_several_lines_a_call(name: str) -> bool:
    return any(word in name for word in ("docker", "containerd", "debug"))


def outcome(path: Path) -> dict[str, Any]:
    """Return a reader's outcome of a log: format, requests, and messages. A request is a row of its time in
    seconds, input and output tokens, blocks, leading blocks of earlier requests, turn, conversation, category
    and stop reason. A broken line's error is in ``broken``, and the line is skipped."""
    result: dict[str, Any] = {}
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage().replace(str(path), "LOG"))  # type: ignore[method-assign]
    try:
        result["format"] = guess_format(path)
    except CanopyError as error:
        return {"error": str(error).replace(str(path), "LOG")}
    broken_lines: list[str] = []
    logger = logging.getLogger("canopy_lab")
    logger.addHandler(handler)
    try:
        while True:
            messages.clear()
            try:
                tolerance = Tolerance(path, len(broken_lines))
                requests = list(read_trace(path, result["format"], tolerance))
                break
            except CanopyError as error:
                message = str(error).replace(str(path), "LOG")
                message = re.sub(r"; (--skip-bad N|that is one more).*", "", message)
                if ", line " not in message or message in broken_lines:  # of the whole log
                    return {**result, "broken": broken_lines, "error": message}
                broken_lines.append(re.sub(r"(?<=not JSON) .*|(?<=cannot be read) .*", "", message))
    finally:
        logger.removeHandler(handler)
    earlier_blocks: set[int] = set()
    result["requests"] = []
    for request in requests:
        is_new = [block not in earlier_blocks for block in request.blocks]
        shared_blocks = [*is_new, True].index(True)
        earlier_blocks.update(request.blocks)
        result["requests"].append(
            [round(request.time_s, 3), request.input_tokens, request.output_tokens, len(request.blocks), shared_blocks, request.turn,
             request.conversation, request.category, request.stop]
        )  # fmt: skip
    result |= {"broken": broken_lines} if broken_lines else {}
    messages = [message for message in messages if "broken lines, first" not in message]
    result |= {"told": messages} if messages else {}
    try:
        sample = read_sample(path, result["format"], skip_bad=len(broken_lines))
        result["scale"] = round(sample.token_scale, 3)
    except CanopyError as error:
        result["sample"] = str(error).replace(str(path), "LOG")
    return result


@pytest.mark.parametrize("name", LOGS)
def test_a_log_gives_the_outcome_beside_it(name: str) -> None:
    expected = json.loads((FOLDER / f"{name}.json").read_text())
    assert outcome(LOGS[name]) == expected


def test_every_format_has_a_log_of_the_same_traffic() -> None:
    outcomes = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in TRAFFIC_LOGS}
    formats = {log["format"] for log in outcomes.values()} | {"agentic"}
    assert formats == set(format_names()), "add fixtures/logs/traffic-NAME.jsonl (CONTRIBUTING.md)"
    calls = outcomes["traffic-own"]["requests"]
    input_tokens = sum(row[INPUT_TOKENS] for row in calls)
    for name, log in outcomes.items():
        requests = log["requests"]
        both = (requests, calls)
        assert len(requests) == len(calls), name
        log_tokens = sum(row[INPUT_TOKENS] for row in requests)
        assert log_tokens == pytest.approx(input_tokens, rel=0.25), name
        if name != "traffic-mooncake":  # of 512-token blocks
            assert sorted(row[TURN] for row in requests) == sorted(row[TURN] for row in calls), name
            names, own_names = ({row[CONVERSATION] for row in rows} for rows in both)
            assert len(names) == len(own_names), name
        if name != "traffic-batch":  # without times
            times_s, expected = ([row[TIME_S] - rows[0][TIME_S] for row in rows] for rows in both)
            assert times_s == pytest.approx(expected, abs=1.0), name


class ReadLog(NamedTuple):
    requests: list[TraceRequest]
    changed_entries: int
    """Entries that were ignored or changed."""


def read_log(name: str, log_bytes: bytes, suffix: str = "") -> ReadLog | None:
    """Read a log in the format of ``name``; ``None`` if it is refused."""
    format_name = json.loads((FOLDER / f"{name}.json").read_text())["format"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"log{suffix}"
        path.write_bytes(log_bytes)
        tolerance = Tolerance(path, 10**6)
        try:
            requests = list(read_trace(path, format_name, tolerance))
        except CanopyError:
            return None
        notes = tolerance.understood
        changed_entries = notes.left_out.total() + notes.changed.total() + tolerance.skipped
        return ReadLog(requests, changed_entries)


class TrafficLog(NamedTuple):
    log_bytes: bytes
    requests: list[TraceRequest]


@cache
def traffic_log(name: str) -> TrafficLog:
    log_bytes = LOGS[name].read_bytes()
    result = read_log(name, log_bytes)
    assert result is not None
    return TrafficLog(log_bytes, result.requests)


def prompts(requests: list[TraceRequest]) -> list[tuple[int, ...]]:
    return [request.blocks for request in requests]


def count_invented(requests: list[TraceRequest], name: str) -> int:
    return (Counter(prompts(requests)) - Counter(prompts(traffic_log(name).requests))).total()


few_examples = settings(max_examples=settings.default.max_examples // 10)
seeds = st.integers(0, 10**6)


@pytest.mark.parametrize("name", TRAFFIC_LOGS)
def test_another_encoding_of_the_same_lines_changes_nothing(name: str) -> None:
    log_bytes, expected = traffic_log(name)
    for encoded, suffix in (
        (log_bytes.replace(b"\n", b"\r\n"), ""),
        (b"\xef\xbb\xbf" + log_bytes, ""),
        (gzip.compress(log_bytes), ".gz"),
        (log_bytes.replace(b"\n", b"\n\n"), ""),
        (log_bytes.rstrip(b"\n"), ""),
    ):
        reread = read_log(name, encoded, suffix)
        assert reread is not None
        assert prompts(reread.requests) == prompts(expected)
    assert read_log(name, log_bytes.decode().encode("utf-16")) is None


@pytest.mark.parametrize("name", TRAFFIC_LOGS)
@given(seed=seeds)
@few_examples
def test_a_truncated_file_yields_no_false_request(name: str, seed: int) -> None:
    log_bytes = traffic_log(name).log_bytes
    result = read_log(name, log_bytes[: random.Random(seed).randrange(1, len(log_bytes))])
    assert result is None or not count_invented(result.requests, name)


@pytest.mark.parametrize("name", [each for each in TRAFFIC_LOGS if each not in (*ONE_DOCUMENT_LOGS, *UNORDERED_LOGS) and not has_several_lines_a_call(each)])  # fmt: skip
@given(seed=seeds, newest_first=st.booleans())
@few_examples
def test_reordered_lines_are_ordered_or_reported(name: str, seed: int, newest_first: bool) -> None:
    rng, (log_bytes, expected) = random.Random(seed), traffic_log(name)
    lines = log_bytes.splitlines(keepends=True)
    if newest_first:
        lines.reverse()
    else:  # answers that end out of order
        lines = [line for _, line in sorted((each + rng.uniform(0, 6), line) for each, line in enumerate(lines))]  # fmt: skip
    result = read_log(name, b"".join(lines))
    if name in REPORTED_LOGS:
        assert result is None or result.changed_entries
        return
    assume(result is not None and not result.changed_entries)
    start_s, expected_start_s = result.requests[0].time_s, expected[0].time_s
    assert sorted((round(r.time_s - start_s, 6), r.blocks) for r in result.requests) == sorted(
        (round(r.time_s - expected_start_s, 6), r.blocks) for r in expected
    )


@pytest.mark.parametrize("name", [each for each in TRAFFIC_LOGS if each not in ONE_DOCUMENT_LOGS])
@given(seed=seeds)
@few_examples
def test_lines_that_are_broken_are_counted(name: str, seed: int) -> None:
    """Bytes in the middle of some lines are lost or overwritten."""
    rng, (log_bytes, expected) = random.Random(seed), traffic_log(name)
    lines = log_bytes.splitlines(keepends=True)
    for index in rng.sample(range(len(lines)), 2):
        line, middle = lines[index], len(lines[index]) // 2
        lines[index] = rng.choice([line[:middle] + b"\n", line[middle:], line[:middle] + b"\x00\xff" + line[middle:], b"{\n"])  # fmt: skip
    result = read_log(name, b"".join(lines))
    assume(result is not None)
    lost_requests = len(expected) - len(result.requests)
    if has_several_lines_a_call(name) or "sglang" in name or "vllm" in name:
        assert lost_requests <= 2 + result.changed_entries  # it may be a line of another process
    else:
        assert count_invented(result.requests, name) <= 2
        assert lost_requests <= result.changed_entries


@pytest.mark.parametrize("name", [each for each in TRAFFIC_LOGS if each not in ONE_DOCUMENT_LOGS and not has_several_lines_a_call(each)])  # fmt: skip
@given(seed=seeds)
@few_examples
def test_a_line_that_is_logged_twice_counts_once_if_it_names_its_call(name: str, seed: int) -> None:
    log_bytes, expected = traffic_log(name)
    lines = log_bytes.splitlines(keepends=True)
    repeated_line = random.Random(seed).randrange(len(lines))
    lines.insert(repeated_line, lines[repeated_line])
    result = read_log(name, b"".join(lines))
    assert result is not None
    assert 0 <= len(result.requests) - len(expected) <= (name not in LOGS_WITH_IDS)


@pytest.mark.parametrize("name", ["traffic-own", "traffic-otel-otlp", "traffic-sglang", "traffic-vllm", "traffic-mooncake", "traffic-bailian"])  # fmt: skip
@given(inserted=st.binary(max_size=400), seed=seeds)
@few_examples
def test_any_bytes_raise_only_canopy_errors(name: str, inserted: bytes, seed: int) -> None:
    log_bytes = traffic_log(name).log_bytes
    position = random.Random(seed).randrange(len(log_bytes))
    read_log(name, inserted)
    read_log(name, log_bytes[:position] + inserted + log_bytes[position:])


NUMBER = re.compile(rb"(?<![\w.-])\d+(?![\w.-])")


@pytest.mark.parametrize("name", [i for i in TRAFFIC_LOGS if NUMBER.search(LOGS[i].read_bytes())])
@given(seed=seeds)
@few_examples
def test_a_number_of_any_size_is_read_or_refused_in_words(name: str, seed: int) -> None:
    rng, log_bytes = random.Random(seed), traffic_log(name).log_bytes
    match = rng.choice(list(NUMBER.finditer(log_bytes)))
    huge_number = rng.choice([b"9" * 18, b"9" * 400, b"9" * 5000, b"1e308"])
    result = read_log(name, log_bytes[: match.start()] + huge_number + log_bytes[match.end() :])
    for request in () if result is None else result.requests:
        assert max(request.input_tokens, request.output_tokens) < 1 << 63
        assert math.isfinite(request.time_s)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        log_outcome = outcome(LOGS[name])
        rows = [json.dumps(row, ensure_ascii=False) for row in log_outcome.get("requests", ())]
        if rows:
            log_outcome["requests"] = "ROWS"
        text = json.dumps(log_outcome, ensure_ascii=False, indent=1)
        (FOLDER / f"{name}.json").write_text(text.replace('"ROWS"', "[\n  " + ",\n  ".join(rows) + "\n ]") + "\n")  # fmt: skip
