"""One traffic, written in every format: each is recognised, and gives the same requests."""

from pathlib import Path

import pytest
from formats import FORMATS
from traffic import TALKS, TURNS, calls

from canopy_lab.advise.sample import Sample, read_sample
from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.open import format_names, open_trace
from canopy_lab.trace.record import TraceRequest

CALLS = calls()
NO_TIMES = ("batch",)


def written(name: str, folder: Path) -> tuple[Path, str]:
    format, write = FORMATS[name]
    path = folder / ("log.csv" if name.endswith("csv") else "log")
    path.write_bytes(write(CALLS))
    return path, format


def reuse(requests: list[TraceRequest]) -> float:
    """Share of the prompt tokens that an endless cache hits."""
    seen: set[int] = set()
    hit = total = 0
    for r in requests:
        known = next((at for at, block in enumerate(r.blocks) if block not in seen), len(r.blocks))
        seen.update(r.blocks)
        hit, total = hit + min(known * r.block_tokens, r.input_tokens), total + r.input_tokens
    return hit / total


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_recognised_and_every_call_is_read(name: str, tmp_path: Path) -> None:
    path, format = written(name, tmp_path)
    assert guess_format(path) == format
    found = list(open_trace(path, format))
    assert len(found) == len(CALLS)
    if name not in NO_TIMES:
        expected = [c.at_s - CALLS[0].at_s for c in CALLS]
        assert [r.time_s - found[0].time_s for r in found] == pytest.approx(expected, abs=1.0)


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_are_whole_and_share_their_blocks(name: str, tmp_path: Path) -> None:
    """Tokens within a tenth of the sent tokens, and the reuse of the traffic within 3 points."""
    path, format = written(name, tmp_path)
    found = list(open_trace(path, format))
    sent = sum(c.tokens for c in CALLS)
    assert sum(r.input_tokens for r in found) == pytest.approx(sent, rel=0.1)
    if name != "mooncake":  # of 512-token blocks
        assert reuse(found) == pytest.approx(0.81, abs=0.03)


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "mooncake"])
def test_turns_and_conversations_are_those_of_the_traffic(name: str, tmp_path: Path) -> None:
    path, format = written(name, tmp_path)
    found = list(open_trace(path, format))
    assert len({r.conversation for r in found}) == TALKS
    assert sorted(r.turn for r in found) == sorted(c.turn for c in CALLS)
    assert max(r.turn for r in found) == TURNS


@pytest.mark.parametrize("name", [n for n, (f, _) in FORMATS.items() if f in ("openai", "otel")])
def test_logged_token_counts_include_cached_tokens(name: str, tmp_path: Path) -> None:
    """Anthropic's ``input_tokens`` and Langfuse's ``input`` leave them out."""
    assert sample(name, tmp_path).token_scale == pytest.approx(1.0, abs=0.1)


def sample(name: str, folder: Path) -> Sample:
    path, format = written(name, folder)
    return read_sample(path, format)


def test_every_format_that_is_read_has_a_sample() -> None:
    assert {format for format, _ in FORMATS.values()} | {"agentic"} == set(format_names())
