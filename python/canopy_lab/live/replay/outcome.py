"""Summarise a replay as one JSON object."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from canopy_lab.latency.latency_report import WARM_UP_SHARE, LatencyReport, latency_report
from canopy_lab.latency.slo import SLO
from canopy_lab.live.replay.endpoint import TIERS
from canopy_lab.live.replay.schedule import ReplayRequest
from canopy_lab.trace.sessions import turn_links

PERCENTILES = (50, 90, 95, 99)
FIRST_GROUPED_TURN = 5
"""Turns from here on are one group."""


def summarise(
    jobs: Sequence[ReplayRequest],
    duration_s: float,
    *,
    warm_up_share: float = WARM_UP_SHARE,
    slo: SLO | None = None,
) -> dict[str, Any]:
    """Return hit rates, latencies, throughput and errors.

    ``hit_rate`` is cached prompt tokens over prompt tokens of the successful requests. ``ttft_ms``
    is from sending to the first token. ``queued_ttft_ms`` is from the due time (trace time, and
    previous turn answered), so it includes the wait for a free connection under
    ``--max-concurrency``. ``latency`` counts from due times, without the warm-up:
    ``latency/latency_report.py``. ``meets_slo`` is ``None`` without an SLO, and false if a request failed.
    """
    succeeded = [job for job in jobs if job.reply is not None and job.reply.is_complete]
    failed = [job for job in jobs if job.reply is None or not job.reply.is_complete]
    output_tokens = sum(job.reply.output_tokens for job in succeeded)
    latency = _latency(jobs, succeeded, warm_up_share)
    meets_slo = None
    if slo is not None:
        meets_slo = latency is not None and not failed and slo.is_met(latency)
    return {
        "requests": len(jobs),
        "completed": len(succeeded),
        "errors": {
            "count": len(failed),
            "kinds": dict(Counter(_failure_text(job) for job in failed).most_common(10)),
        },
        "duration_s": duration_s,
        "throughput": {
            "requests_per_s": len(succeeded) / duration_s,
            "input_tokens_per_s": sum(map(_prompt_tokens, succeeded)) / duration_s,
            "output_tokens_per_s": output_tokens / duration_s,
        },
        "latency": None if latency is None else asdict(latency),
        "slo": None if slo is None else slo.text,
        "meets_slo": meets_slo,
        "overall": group_figures(succeeded),
        "by_category": _by_group(succeeded, lambda j: j.planned.request.category),
        "by_turn": _by_group(succeeded, _turn_group),
        "by_stop": _by_group(succeeded, lambda j: j.planned.request.stop or "not said"),
    }


def _latency(
    jobs: Sequence[ReplayRequest], succeeded: Sequence[ReplayRequest], warm_up_share: float
) -> LatencyReport | None:
    if not succeeded:
        return None
    session_starts = turn_links([job.planned.request for job in jobs]).session_start
    session_of = {id(job): number for job, number in zip(jobs, session_starts, strict=True)}
    return latency_report(
        [job.due_s for job in succeeded],
        [job.reply.first_s - job.due_s for job in succeeded],
        [job.reply.done_s for job in succeeded],
        [_prompt_tokens(job) for job in succeeded],
        [session_of[id(job)] for job in succeeded],
        warm_up_share=warm_up_share,
    )


def group_figures(jobs: Iterable[ReplayRequest]) -> dict[str, Any]:
    """Return hits and latencies of some jobs, which must all have succeeded."""
    jobs = list(jobs)
    prompt_tokens = sum(map(_prompt_tokens, jobs))
    reporting = [job for job in jobs if job.reply.cached_tokens is not None]
    cached_tokens = sum(job.reply.cached_tokens for job in reporting)
    tiers = {tier: sum(job.reply.by_tier.get(tier, 0) for job in reporting) for tier in TIERS}
    queues_s = [j.reply.server_queue_s for j in jobs if j.reply.server_queue_s is not None]
    figures: dict[str, Any] = {
        "requests": len(jobs),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens if reporting else None,
        "hit_rate": cached_tokens / prompt_tokens if reporting and prompt_tokens else None,
        "cached_tokens_by_tier": tiers if reporting else None,
        "hit_rate_by_tier": {tier: n / prompt_tokens for tier, n in tiers.items()}
        if reporting and prompt_tokens
        else None,
        "output_tokens": sum(job.reply.output_tokens for job in jobs),
        "ttft_ms": _percentiles_ms(j.reply.first_s - j.reply.sent_s for j in jobs),
        "queued_ttft_ms": _percentiles_ms(j.reply.first_s - j.due_s for j in jobs),
        "e2e_ms": _percentiles_ms(j.reply.done_s - j.reply.sent_s for j in jobs),
        "uncached_tokens": _percentiles(
            [_prompt_tokens(j) - j.reply.cached_tokens for j in reporting] if reporting else []
        ),
    }
    if queues_s:
        figures["server_queue_ms"] = _percentiles_ms(queues_s)
    return figures


def _by_group(jobs: Iterable[ReplayRequest], key: Callable[[ReplayRequest], str]) -> dict[str, Any]:
    groups: dict[str, list[ReplayRequest]] = defaultdict(list)
    for job in jobs:
        groups[key(job)].append(job)
    return {name: group_figures(groups[name]) for name in sorted(groups)}


def _turn_group(job: ReplayRequest) -> str:
    turn = job.planned.request.turn
    return str(turn) if turn < FIRST_GROUPED_TURN else f"{FIRST_GROUPED_TURN}+"


def _prompt_tokens(job: ReplayRequest) -> int:
    return job.reply.prompt_tokens or job.planned.prompt_tokens


def _failure_text(job: ReplayRequest) -> str:
    return "not sent" if job.reply is None else job.reply.error[:200]


def _percentiles_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    return _percentiles([s * 1000 for s in seconds])


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    spread = {"mean": float(np.mean(values))}
    for p in PERCENTILES:
        spread[f"p{p}"] = float(np.percentile(values, p))
    return spread
