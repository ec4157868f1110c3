"""Slices of agents' sessions in a closed loop, and the figures of their replays."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from paired import ratio

from canopy_lab.live.replay.options import closed_loop
from canopy_lab.live.replay.schedule import ReplayRequest
from canopy_lab.trace.materialise import Materialiser, Planned, middle_tokens
from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.sessions import SessionLinks

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from overlays import overlay

ARCHIVE = "agentic_coding/traces_500.tar.xz"
CONVERSATIONS = 400
MIN_TURNS = 3
"""Smallest number of turns of a session."""
FIGURES = ("all answered, s", "mean TTFT, s", "P99 TTFT, s", "mean session, s", "hits")


def sessions(args: argparse.Namespace) -> list[list[TraceRequest]]:
    """Return the sessions to replay, slice after slice; the first slice is the warm-up."""
    found: dict[str, list[TraceRequest]] = {}
    for request in overlay(args.data / ARCHIVE, CONVERSATIONS, 7200.0, args.seed):
        if request.user is not None:
            found.setdefault(request.user, []).append(request)
    longest = args.context / args.scale_lengths
    taken = []
    for turns in found.values():
        fit = [r.input_tokens + r.output_tokens <= longest for r in turns[: args.turns]]
        count = fit.index(False) if False in fit else len(fit)
        if count >= MIN_TURNS:
            taken.append(turns[:count])
    wanted = args.sessions * (args.slices + 1)
    if len(taken) < wanted:
        raise SystemExit(f"{wanted} sessions are wanted, {len(taken)} fit: take fewer slices")
    return taken[:wanted]


def plan(args: argparse.Namespace) -> tuple[Materialiser, list[list[Planned]]]:
    """Return the prompts, and the requests of each slice in the order of the trace's times."""
    chosen = sessions(args)
    made = Materialiser(
        sorted((r for turns in chosen for r in turns), key=lambda r: r.time_s),
        middle_tokens(args.vocab_size),
        args.scale_lengths,
    )
    slice_of = {turns[0].user: number // args.sessions for number, turns in enumerate(chosen)}
    parts: list[list[Planned]] = [[] for _ in range(args.slices + 1)]
    for planned in made.planned:
        parts[slice_of[planned.request.user]].append(planned)
    return made, parts


def links_of(args: argparse.Namespace, part: Sequence[Planned]) -> SessionLinks:
    """Links between the turns of a slice, with the times to think."""
    jobs = [ReplayRequest(p, {}) for p in part]
    return closed_loop(jobs, args.think_scale, args.think_cap)


def figures(slices: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return ``FIGURES`` of slices."""
    ttft = np.concatenate([one["ttft_s"] for one in slices])
    lasted = []
    for one in slices:
        ends: dict[int, float] = {}
        for first, done in zip(one["first"], one["done_s"], strict=True):
            ends[first] = max(ends.get(first, 0.0), done)
        lasted += [end - one["due_s"][first] for first, end in ends.items()]
    prompts = sum(sum(one["prompt_tokens"]) for one in slices)
    return [
        sum(one["seconds"] for one in slices),
        float(ttft.mean()),
        float(np.percentile(ttft, 99)),
        statistics.fmean(lasted),
        sum(sum(one["cached_tokens"]) for one in slices) / prompts,
    ]


def table(made: Mapping[str, Any]) -> Iterator[str]:
    """A result as Markdown; changes are against the first arm, in %, hits in points."""
    slices: Mapping[str, Sequence[Mapping[str, Any]]] = made["slices"]
    base = next(iter(slices.values()))
    count = min(map(len, slices.values()))
    if not count:
        return
    requests = sum(len(one["ttft_s"]) for one in base[:count])
    yield f"{count} slices, {requests} requests an arm\n"
    yield "| arm | " + " | ".join(FIGURES) + " |\n|---|" + "---:|" * len(FIGURES)
    for name, rows in slices.items():
        cells = [f"{value:.2f}" for value in figures(rows[:count])]
        if rows is not base:
            cells = [f"{c} ({_change(base, rows, i, count)})" for i, c in enumerate(cells)]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _change(base: Sequence[Any], rows: Sequence[Any], figure: int, count: int) -> str:
    """Change of one figure, with its interval: ``paired.ratio`` drawn over slices."""
    if figure in (0, 1, 3):  # sums: as many requests and sessions in both
        weight = [len(one["ttft_s"]) if figure == 1 else 1 for one in base[:count]]
        one, two = (
            [figures([part])[figure] * w for part, w in zip(arm[:count], weight, strict=True)]
            for arm in (base, rows)
        )
        found = ratio(one, two, 1)
        return f"{100 * found[0]:+.0f} [{100 * found[1]:+.0f}, {100 * found[2]:+.0f}]"
    one, two = figures(base[:count])[figure], figures(rows[:count])[figure]
    return f"{100 * (two - one):+.0f}" if figure == 4 else f"{100 * (two / one - 1):+.0f}"
