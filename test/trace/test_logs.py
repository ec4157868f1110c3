"""Logs as files: each gives the outcome in the JSON file beside it, and no damage makes up a request.

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
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canopy_lab.advise.sample import read_sample
from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.lines import Tolerance
from canopy_lab.trace.open import format_names, read_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "logs"
LOGS = {path.stem: path for path in sorted(FOLDER.iterdir()) if path.suffix != ".json"}
TRAFFIC = [name for name in LOGS if name.startswith("traffic-")]
DOCUMENTS = ("traffic-langfuse-page", "traffic-litellm-spendlogs-csv")
NO_ORDER = ("traffic-bailian", "traffic-batch")
"""Formats whose lines mean nothing, or another thing, in another order."""
NAMED = {f"traffic-{name}" for name in ("litellm-payload", "litellm-spendlogs", "langfuse", "helicone", "otel-otlp", "otel-flat", "sglang")}  # fmt: skip
"""Formats whose lines name their call."""


def lines_of_several(name: str) -> bool:
    """Whether one call takes several lines."""
    return any(word in name for word in ("docker", "containerd", "debug"))


def outcome(path: Path) -> dict[str, Any]:
    """Return what a reader makes of a log: format, requests, and its messages.

    A request is time, input and output tokens, blocks, leading blocks that were seen before, turn,
    conversation, category and stop reason. A broken line gives its error, and is skipped then.
    """
    result: dict[str, Any] = {}
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage().replace(str(path), "LOG"))  # type: ignore[method-assign]
    try:
        result["format"] = guess_format(path)
    except CanopyError as error:
        return {"error": str(error).replace(str(path), "LOG")}
    broken: list[str] = []
    logger = logging.getLogger("canopy_lab")
    logger.addHandler(handler)
    try:
        while True:
            messages.clear()
            try:
                requests = list(read_trace(path, result["format"], Tolerance(path, len(broken))))
                break
            except CanopyError as error:
                text = str(error).replace(str(path), "LOG")
                text = re.sub(r"; (--skip-bad N|that is one more).*", "", text)
                if ", line " not in text or text in broken:  # of the whole log
                    return {**result, "broken": broken, "error": text}
                broken.append(re.sub(r"(?<=not JSON) .*|(?<=cannot be read) .*", "", text))
    finally:
        logger.removeHandler(handler)
    seen: set[int] = set()
    result["requests"] = []
    for r in requests:
        shared = next((at for at, block in enumerate(r.blocks) if block not in seen), len(r.blocks))
        seen.update(r.blocks)
        result["requests"].append(
            [round(r.time_s, 3), r.input_tokens, r.output_tokens, len(r.blocks), shared, r.turn,
             r.conversation, r.category, r.stop]
        )  # fmt: skip
    result |= {"broken": broken} if broken else {}
    messages = [text for text in messages if "broken lines, first" not in text]
    result |= {"told": messages} if messages else {}
    try:
        sample = read_sample(path, result["format"], skip_bad=len(broken))
        result["scale"] = round(sample.token_scale, 3)
    except CanopyError as error:
        result["sample"] = str(error).replace(str(path), "LOG")
    return result


@pytest.mark.parametrize("name", LOGS)
def test_a_log_gives_the_outcome_beside_it(name: str) -> None:
    expected = json.loads((FOLDER / f"{name}.json").read_text())
    assert outcome(LOGS[name]) == expected


def test_every_format_has_a_log_of_the_same_traffic() -> None:
    outcomes = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in TRAFFIC}
    logged = {one["format"] for one in outcomes.values()} | {"agentic"}
    assert logged == set(format_names()), "add fixtures/logs/traffic-NAME.jsonl (CONTRIBUTING.md)"
    calls = outcomes["traffic-own"]["requests"]
    sent = sum(row[1] for row in calls)
    for name, log in outcomes.items():
        assert len(log["requests"]) == len(calls), name
        assert sum(row[1] for row in log["requests"]) == pytest.approx(sent, rel=0.25), name
        if name != "traffic-mooncake":  # of 512-token blocks
            assert sorted(row[5] for row in log["requests"]) == sorted(row[5] for row in calls), (
                name
            )
            assert len({row[6] for row in log["requests"]}) == len({row[6] for row in calls}), name
        if name != "traffic-batch":  # without times
            at, expected = (
                [row[0] - rows[0][0] for row in rows] for rows in (log["requests"], calls)
            )
            assert at == pytest.approx(expected, abs=1.0), name


# ---- damage ----


def read(name: str, raw: bytes, suffix: str = "") -> tuple[list[TraceRequest], int] | None:
    """Return the requests and the number of ignored or changed entries; ``None`` if it is refused."""
    format = json.loads((FOLDER / f"{name}.json").read_text())["format"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"log{suffix}"
        path.write_bytes(raw)
        tolerance = Tolerance(path, 10**6)
        try:
            requests = list(read_trace(path, format, tolerance))
        except CanopyError:
            return None
        seen = tolerance.understood
        return requests, seen.left_out.total() + seen.changed.total() + tolerance.skipped


@cache
def whole(name: str) -> tuple[bytes, list[TraceRequest]]:
    raw = LOGS[name].read_bytes()
    found = read(name, raw)
    assert found is not None
    return raw, found[0]


def prompts(requests: list[TraceRequest]) -> list[tuple[int, ...]]:
    return [r.blocks for r in requests]


def made_up(requests: list[TraceRequest], name: str) -> int:
    return (Counter(prompts(requests)) - Counter(prompts(whole(name)[1]))).total()


few = settings(max_examples=settings.default.max_examples // 10)
seeds = st.integers(0, 10**6)


@pytest.mark.parametrize("name", TRAFFIC)
def test_another_encoding_of_the_same_lines_changes_nothing(name: str) -> None:
    raw, expected = whole(name)
    for changed, suffix in (
        (raw.replace(b"\n", b"\r\n"), ""),
        (b"\xef\xbb\xbf" + raw, ""),
        (gzip.compress(raw), ".gz"),
        (raw.replace(b"\n", b"\n\n"), ""),
        (raw.rstrip(b"\n"), ""),
    ):
        found = read(name, changed, suffix)
        assert found is not None
        assert prompts(found[0]) == prompts(expected)
    assert read(name, raw.decode().encode("utf-16")) is None


@pytest.mark.parametrize("name", TRAFFIC)
@given(seed=seeds)
@few
def test_a_truncated_file_yields_no_false_request(name: str, seed: int) -> None:
    raw = whole(name)[0]
    found = read(name, raw[: random.Random(seed).randrange(1, len(raw))])
    assert found is None or not made_up(found[0], name)


@pytest.mark.parametrize("name", [n for n in TRAFFIC if n not in (*DOCUMENTS, *NO_ORDER) and not lines_of_several(n)])  # fmt: skip
@given(seed=seeds, newest_first=st.booleans())
@few
def test_lines_in_another_order_are_put_in_order(name: str, seed: int, newest_first: bool) -> None:
    draw, (raw, expected) = random.Random(seed), whole(name)
    lines = raw.splitlines(keepends=True)
    if newest_first:
        lines.reverse()
    else:  # answers that end out of order
        lines = [line for _, line in sorted((n + draw.uniform(0, 6), line) for n, line in enumerate(lines))]  # fmt: skip
    result = read(name, b"".join(lines))
    if result is None or result[1]:
        return
    if (
        name == "traffic-sglang"
    ):  # an answer before its question is a request that the log's beginning cut
        assert sorted(prompts(result[0])) == sorted(prompts(expected))
    else:
        first, begin = result[0][0].time_s, expected[0].time_s
        assert sorted((round(r.time_s - first, 6), r.blocks) for r in result[0]) == sorted(
            (round(r.time_s - begin, 6), r.blocks) for r in expected
        )


@pytest.mark.parametrize("name", [n for n in TRAFFIC if n not in DOCUMENTS])
@given(seed=seeds)
@few
def test_lines_that_are_broken_are_counted(name: str, seed: int) -> None:
    """Bytes in the middle of some lines are lost or overwritten."""
    draw, (raw, expected) = random.Random(seed), whole(name)
    lines = raw.splitlines(keepends=True)
    for at in draw.sample(range(len(lines)), 2):
        line, middle = lines[at], len(lines[at]) // 2
        lines[at] = draw.choice([line[:middle] + b"\n", line[middle:], line[:middle] + b"\x00\xff" + line[middle:], b"{\n"])  # fmt: skip
    result = read(name, b"".join(lines))
    if result is None:
        return
    lost = len(expected) - len(result[0])
    if lines_of_several(name) or "sglang" in name or "vllm" in name:
        assert lost <= 2 + result[1]  # it may be a line of another process
    else:
        assert made_up(result[0], name) <= 2
        assert lost <= result[1]


@pytest.mark.parametrize("name", [n for n in TRAFFIC if n not in DOCUMENTS and not lines_of_several(n)])  # fmt: skip
@given(seed=seeds)
@few
def test_a_line_that_is_logged_twice_counts_once_if_it_names_its_call(name: str, seed: int) -> None:
    raw, expected = whole(name)
    lines = raw.splitlines(keepends=True)
    again = random.Random(seed).randrange(len(lines))
    result = read(name, b"".join([*lines[: again + 1], lines[again], *lines[again + 1 :]]))
    assert result is not None
    assert 0 <= len(result[0]) - len(expected) <= (name not in NAMED)


@pytest.mark.parametrize("name", ["traffic-own", "traffic-otel-otlp", "traffic-sglang", "traffic-vllm", "traffic-mooncake", "traffic-bailian"])  # fmt: skip
@given(extra=st.binary(max_size=400), seed=seeds)
@few
def test_any_bytes_are_refused_in_words(name: str, extra: bytes, seed: int) -> None:
    raw = whole(name)[0]
    at = random.Random(seed).randrange(len(raw))
    read(name, extra)
    read(name, raw[:at] + extra + raw[at:])


NUMBER = re.compile(rb"(?<![\w.-])\d+(?![\w.-])")


@pytest.mark.parametrize("name", [n for n in TRAFFIC if NUMBER.search(LOGS[n].read_bytes())])
@given(seed=seeds)
@few
def test_a_number_of_any_size_is_read_or_refused_in_words(name: str, seed: int) -> None:
    draw, raw = random.Random(seed), whole(name)[0]
    at = draw.choice(list(NUMBER.finditer(raw)))
    huge = draw.choice([b"9" * 18, b"9" * 400, b"9" * 5000, b"1e308"])
    result = read(name, raw[: at.start()] + huge + raw[at.end() :])
    for request in () if result is None else result[0]:
        assert max(request.input_tokens, request.output_tokens) < 1 << 63
        assert math.isfinite(request.time_s)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        written = outcome(LOGS[name])
        rows = [json.dumps(row, ensure_ascii=False) for row in written.get("requests", ())]
        text = json.dumps(
            {**written, "requests": "ROWS"} if rows else written, ensure_ascii=False, indent=1
        )
        (FOLDER / f"{name}.json").write_text(text.replace('"ROWS"', "[\n  " + ",\n  ".join(rows) + "\n ]") + "\n")  # fmt: skip
