"""Results of a characterisation in sentences, for the page and for the terminal."""

from __future__ import annotations

import math
from pathlib import Path

from canopy_lab.characterize.capacity import Capacity
from canopy_lab.characterize.hits import IdealHits
from canopy_lab.characterize.skew import Skew
from canopy_lab.characterize.trace_report import Overview, TraceReport
from canopy_lab.characterize.turns import Turns
from canopy_lab.report.units import bytes_text, count_text, percent, seconds

STEADY_DRIFT = 0.1
"""Mean change of a probability between windows, below which it is called steady."""


def findings(report: TraceReport) -> dict[str, str]:
    """Return one to three sentences for each question that the trace answers."""
    answers = {"overview": _describe_overview(report.overview)}
    if report.hits:
        answers["hits"] = _describe_hits(report.hits)
    if report.skew:
        answers["skew"] = _describe_skew(report.skew)
    if report.turns:
        answers |= _describe_turns(report.turns)
    if report.reuse:
        reuses = report.reuse.all
        answers["reuse"] = (
            f"Of the reuses, half come within {seconds(reuses.p50_s)} of the last use, 80 % within "
            f"{seconds(reuses.p80_s)}, 90 % within {seconds(reuses.p90_s)}."
        )
    if report.capacity:
        answers["capacity"] = _describe_capacity(report.capacity)
    return answers


def _describe_overview(overview: Overview) -> str:
    return (
        f"{count_text(overview.requests)} requests in {seconds(overview.span_s)}, "
        f"{overview.requests_per_s:.2f} a second ({overview.busiest_minute_per_s:.2f} in the busiest "
        f"minute). Prompts of {count_text(overview.input_mean)} tokens on average, half of them below "
        f"{count_text(overview.input_p50)}; outputs of {count_text(overview.output_mean)}."
    )


def _describe_hits(hits: IdealHits) -> str:
    text = (
        f"A cache that never forgot would hit {percent(hits.block_hit_ratio, 1)} of the blocks "
        f"({percent(hits.token_hit_ratio, 1)} of the prompt tokens); "
        f"{percent(hits.requests_with_a_hit)} of the requests would hit something."
    )
    if hits.turns:
        first, later = hits.turns
        text += (
            f" Later turns are {percent(later.requests)} of the requests and bring "
            f"{percent(later.hits)} of the hits; first turns bring {percent(first.hits)}."
        )
    if hits.stranded >= 0.001:
        text += (
            f" Another {percent(hits.stranded, 1)} of the blocks were seen before but behind a "
            "miss, where a prefix cache cannot use them."
        )
    return text


def _describe_skew(skew: Skew) -> str:
    text = (
        f"The busiest tenth of the blocks has {percent(skew.block_reuses.top_tenth)} of the reuses."
    )
    if skew.user_hits is not None and skew.cross_user_hits is not None:
        text += (
            f" {percent(skew.user_hits.owners_of_90)} of the users have 90 % of the hits; "
            f"{percent(skew.cross_user_hits, 1)} of the hits are on another user's blocks."
        )
    if skew.conversation_hits is not None and skew.cross_conversation_hits is not None:
        text += (
            f" {percent(skew.cross_conversation_hits)} of the hits are on blocks that another "
            "conversation used last (shared prompts)."
        )
    return text


def _describe_turns(turns: Turns) -> dict[str, str]:
    lengths = (
        f"{percent(turns.first_turn_share)} of the requests are first turns; the turn number is "
        f"{turns.p50:.0f} in the middle, {turns.p90:.0f} at the 90th percentile, {turns.longest} at most. "
        f"Between two turns lie {seconds(turns.pause_p50_s)} (half) to {seconds(turns.pause_p90_s)} "
        "(nine tenths)."
    )
    next_turn = (
        f"After a first turn another one comes with probability {turns.first_next:.2f}, after a "
        f"later one with {turns.later_next:.2f}."
    )
    if not math.isnan(turns.drift):
        is_steady = turns.drift < STEADY_DRIFT
        next_turn += (
            f" From one window to the next a category's probability moves by {turns.drift:.2f} on average: "
            f"{'steady enough to learn from the recent past' if is_steady else 'it has to be learnt again and again'}."
        )
    return {"turns": lengths, "next_turn": next_turn}


def _describe_capacity(capacity: Capacity) -> str:
    lru_blocks = dict(capacity.lru_for_share)[0.9]
    return (
        f"All distinct blocks take {bytes_text(capacity.distinct_blocks * capacity.block_bytes)}. LRU has 90 % of "
        f"the ideal hits with {bytes_text(lru_blocks * capacity.block_bytes)} "
        f"({percent(lru_blocks / capacity.distinct_blocks, 1)} of them); a cache that knew the future "
        f"would need {bytes_text(capacity.live_peak * capacity.block_bytes)} at its fullest."
    )


def summary(report: TraceReport, out: Path) -> str:
    """Return the terminal output after the report is written."""
    answers = findings(report)
    lines = [
        f"{report.overview.path}",
        *(f"  {name.replace('_', ' ')}: {sentence}" for name, sentence in answers.items()),
        *(f"  note: {note}" for note in report.notes),
        *(f"  not answered, {name}: {why}" for name, why in report.absent.items()),
    ]
    lines.append(f"report: {out / 'report.html'}")
    return "\n".join(lines)
