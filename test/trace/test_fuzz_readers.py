"""Damage to a log of any format: the answer is equal, or the reader reports the missing part.

Only ``CanopyError`` is raised, and no request is made up. ``CANOPY_FUZZ_COUNTS`` names a file for the
number of damaged files by outcome.
"""

import gzip
import json
import math
import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from formats import FORMATS
from hypothesis import given, settings
from hypothesis import strategies as st
from traffic import calls

from canopy_lab.trace.lines import Tolerance
from canopy_lab.trace.open import read_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

CALLS = calls(4)
counts: Counter[str] = Counter()
NAMES = sorted(FORMATS)
DOCUMENTS = ("langfuse-page", "litellm-spendlogs-csv")
NO_ORDER = ("bailian", "batch")
"""Formats whose lines mean nothing, or another thing, in another order."""


def read(name: str, raw: bytes, suffix: str = "") -> tuple[list[TraceRequest], Tolerance] | None:
    """Return the requests, or ``None`` if the reader raises ``CanopyError``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"log{suffix}"
        path.write_bytes(raw)
        tolerance = Tolerance(path, 10**6)
        try:
            return list(read_trace(path, FORMATS[name][0], tolerance)), tolerance
        except CanopyError:
            counts["refused"] += 1
            return None


@pytest.fixture(scope="module", autouse=True)
def written() -> Iterator[None]:
    """Write the number of damaged files by outcome."""
    yield
    if path := os.environ.get("CANOPY_FUZZ_COUNTS"):
        found = {"formats": len(NAMES), "files": dict(sorted(counts.items()))}
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


WHOLE = {name: FORMATS[name][1](CALLS) for name in NAMES}


@cache
def reference(name: str) -> list[TraceRequest]:
    found = read(name, WHOLE[name])
    assert found is not None
    return found[0]


def prompts(found: list[TraceRequest]) -> list[tuple[int, ...]]:
    return [r.blocks for r in found]


def in_time(found: list[TraceRequest]) -> list[tuple[float, tuple[int, ...]]]:
    return [(round(r.time_s - found[0].time_s, 6), r.blocks) for r in found]


def said(tolerance: Tolerance) -> int:
    """Return the number of entries that the reader ignored or changed."""
    seen = tolerance.understood
    return seen.left_out.total() + seen.changed.total() + tolerance.skipped


@pytest.mark.parametrize("name", NAMES)
def test_another_encoding_of_the_same_lines_changes_nothing(name: str) -> None:
    raw, expected = WHOLE[name], prompts(reference(name))
    variants = {
        "crlf": (raw.replace(b"\n", b"\r\n"), ""),
        "mark": (b"\xef\xbb\xbf" + raw, ""),
        "gzip": (gzip.compress(raw), ".gz"),
        "blank lines": (raw.replace(b"\n", b"\n\n"), ""),
        "no last line feed": (raw.rstrip(b"\n"), ""),
    }
    for changed, suffix in variants.values():
        found = read(name, changed, suffix)
        assert found is not None
        assert prompts(found[0]) == expected
        counts["equal"] += 1
    assert read(name, raw.decode().encode("utf-16")) is None


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=settings.default.max_examples // 10)
def test_a_truncated_file_yields_no_false_request(name: str, seed: int) -> None:
    raw = WHOLE[name]
    at = random.Random(seed).randrange(1, len(raw))
    found = read(name, raw[:at])
    if found is None:
        return
    assert not Counter(prompts(found[0])) - Counter(prompts(reference(name)))
    counts["part"] += 1


@pytest.mark.parametrize("name", [n for n in NAMES if n not in DOCUMENTS])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=settings.default.max_examples // 10)
def test_lines_in_another_order_are_put_in_order(name: str, seed: int) -> None:
    draw, lines = random.Random(seed), WHOLE[name].splitlines(keepends=True)
    if name in NO_ORDER or "docker" in name or "containerd" in name or "debug" in name:
        return
    if draw.random() < 0.3:
        lines.reverse()
    else:  # answers that end out of order
        lines = [line for _, line in sorted((n + draw.uniform(0, 6), line) for n, line in enumerate(lines))]  # fmt: skip
    found = read(name, b"".join(lines))
    if found is None or said(found[1]):
        counts["said"] += 1
        return
    if name == "sglang":
        # An answer before its question is a request that the log's beginning cut.
        assert sorted(prompts(found[0])) == sorted(prompts(reference(name)))
    else:
        assert sorted(in_time(found[0])) == sorted(in_time(reference(name)))
    counts["equal"] += 1


@pytest.mark.parametrize("name", [n for n in NAMES if n not in DOCUMENTS])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=settings.default.max_examples // 10)
def test_lines_that_are_broken_are_counted(name: str, seed: int) -> None:
    """Bytes in the middle of some lines are lost or overwritten."""
    draw, lines = random.Random(seed), WHOLE[name].splitlines(keepends=True)
    for at in draw.sample(range(len(lines)), 2):
        line, middle = lines[at], len(lines[at]) // 2
        lines[at] = draw.choice([line[:middle] + b"\n", line[middle:], line[:middle] + b"\x00\xff" + line[middle:], b"{\n"])  # fmt: skip
    found = read(name, b"".join(lines))
    if found is None:
        return
    # A container's log and a server's may lose a line of another process.
    lost = len(reference(name)) - len(found[0])
    assert lost <= 2 + said(found[1])
    if (
        "docker" not in name
        and "containerd" not in name
        and not name.startswith(("sglang", "vllm"))
    ):
        made_up = Counter(prompts(found[0])) - Counter(prompts(reference(name)))
        assert made_up.total() <= 2
        assert lost <= said(found[1])
    counts["said"] += 1


@pytest.mark.parametrize(
    "name", [n for n in NAMES if FORMATS[n][0] in ("openai", "otel", "sglang")]
)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=settings.default.max_examples // 10)
def test_duplicate_lines_count_once_or_are_reported(name: str, seed: int) -> None:
    """A line with the name of its call is known again; without one it is another request."""
    if name in DOCUMENTS or "docker" in name or "containerd" in name:
        return
    draw, lines = random.Random(seed), WHOLE[name].splitlines(keepends=True)
    again = draw.randrange(len(lines))
    found = read(name, b"".join([*lines[: again + 1], lines[again], *lines[again + 1 :]]))
    assert found is not None
    more = len(found[0]) - len(reference(name))
    named = name in ("litellm-payload", "litellm-spendlogs", "langfuse", "helicone", "otel-otlp", "otel-flat", "sglang")  # fmt: skip
    assert more == 0 if named else more <= 1
    counts["equal" if more == 0 else "said"] += 1


@pytest.mark.parametrize("format", sorted({format for format, _ in FORMATS.values()}))
@given(raw=st.binary(max_size=400), seed=st.integers(0, 10**6))
@settings(max_examples=settings.default.max_examples // 4)
def test_any_bytes_are_refused_in_words(format: str, raw: bytes, seed: int) -> None:
    name = next(n for n in NAMES if FORMATS[n][0] == format)
    whole, draw = WHOLE[name], random.Random(seed)
    at = draw.randrange(len(whole))
    read(name, raw)
    read(name, whole[:at] + raw + whole[at:])


NUMBER = re.compile(rb"(?<![\w.-])\d+(?![\w.-])")


@pytest.mark.parametrize("name", [n for n in NAMES if NUMBER.search(WHOLE[n])])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=settings.default.max_examples // 8)
def test_a_number_of_any_size_is_read_or_refused_in_words(name: str, seed: int) -> None:
    draw, whole = random.Random(seed), WHOLE[name]
    at = draw.choice(list(NUMBER.finditer(whole)))
    huge = draw.choice([b"9" * 18, b"9" * 400, b"9" * 5000, b"1e308"])
    found = read(name, whole[: at.start()] + huge + whole[at.end() :])
    for request in () if found is None else found[0]:
        assert max(request.input_tokens, request.output_tokens) < 1 << 63
        assert math.isfinite(request.time_s)
    counts["read"] += found is not None


def test_an_entry_of_docker_that_is_cut_is_no_prompt() -> None:
    """Its text is escaped: read as it is, it would be another prompt."""
    lines = WHOLE["vllm-debug-docker"].splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if b"details: prompt" in line)
    cut = b"".join([*lines[:at], lines[at][:-40]])
    found = read("vllm-debug-docker", cut + b"\n" + b"".join(lines[at + 1 :]))
    assert found is not None
    assert said(found[1]) >= 1
    assert not Counter(prompts(found[0])) - Counter(prompts(reference("vllm-debug-docker")))


def test_a_span_with_a_count_of_many_digits_is_broken() -> None:
    whole = WHOLE["otel-otlp"]
    at = re.search(rb'"intValue": ?"(\d+)"', whole)
    assert at is not None
    found = read("otel-otlp", whole[: at.start(1)] + b"9" * 5000 + whole[at.end(1) :])
    assert found is not None
    assert len(found[0]) == len(reference("otel-otlp")) - 1
    assert said(found[1]) >= 1


def test_digits_are_text_where_a_table_has_text() -> None:
    """A prompt, an answer or a name of digits is no number."""
    rows = [("42", "007", "12"), ("7" * 5000, "7", "13")]
    head = "timestamp,model,prompt,session_id,output,completion_tokens\n"
    raw = head + "".join(f"17000{at},m,{p},{s},{a},5\n" for at, (p, s, a) in enumerate(rows))
    found = read_table(raw)
    assert [(r.conversation, r.output_tokens) for r in found] == [("007", 5), ("7", 5)]
    assert found[1].input_tokens > 1000


def read_table(raw: str) -> list[TraceRequest]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.csv"
        path.write_text(raw)
        return list(read_trace(path, "openai", Tolerance(path)))
