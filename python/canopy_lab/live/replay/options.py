"""Options that Canopy adds to ``sglang.bench_serving``, and the requests they describe."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from canopy_lab.latency.latency_report import WARM_UP_SHARE
from canopy_lab.latency.slo import SLO, parse_slo
from canopy_lab.live.replay.schedule import ReplayRequest
from canopy_lab.trace import TraceRequest, open_trace
from canopy_lab.trace.materialise import Materialiser
from canopy_lab.trace.sessions import TurnLinks, turn_links
from sglang_canopy import declared
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError
from sglang_canopy.wire import stamp

DATASETS = {
    "bailian": "bailian",
    "mooncake": "mooncake",
    "agentic": "agentic",
    "sglang-log": "sglang",
}
"""Dataset name on the command line -> trace format."""

_UNSAFE_CHARACTERS = re.compile(r"[^\w.:/@+-]", re.ASCII)
"""Characters that ``stamp`` refuses in a category."""


def _parse_fraction(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value <= 1:
        raise CanopyError(f"must be above 0 and at most 1, such as 1/16, got {text!r}")
    return value


def _parse_rates(text: str) -> tuple[float, ...]:
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        rates = []
    if not rates or not 0 < rates[0] <= rates[-1] < float("inf"):
        raise CanopyError(f"must be numbers above 0, such as 0.5,1,2; got {text!r}")
    return tuple(rates)


# fmt: off
@dataclasses.dataclass(frozen=True, slots=True)
class ReplayOptions(declared.Checked):
    """Canopy's options for a replay."""

    time_scale: float = declare(1.0, "--time-scale", "Multiply the trace's arrival times: 0.1 is ten times as fast, 0 is as fast as the order of turns allows. --request-rate replaces the trace's times by random ones.", metavar="X", low=0)
    scale_lengths: Fraction = declare(Fraction(1), "--scale-lengths", "Multiply lengths, for a small model: 1/16 or 0.0625. Blocks shrink and stay shared.", metavar="F", parse=_parse_fraction, shown_default="1")
    max_request_tokens: int | None = declare(None, "--max-request-tokens", "Leave out requests whose prompt and output are longer (after scaling).", metavar="N", low=1, shown_default="the limit that the SGLang server reports")
    no_labels: bool = declare(False, "--no-labels", "Send no category, turn, conversation or stop reason.")
    vocab_size: int | None = declare(None, "--vocab-size", "Take token ids below N; needs no tokenizer.", metavar="N", low=1)
    closed_loop: bool = declare(False, "--closed-loop", "Agents: send a turn after the answer to the one before it and the time to think, which the trace says or is the gap between the two, times --time-scale.")
    think_cap_s: float = declare(120.0, "--think-cap-s", "Longest time to think in a closed loop, before scaling.", metavar="S", low=0)
    rates: tuple[float, ...] = declare((), "--rates", "Replay at several rates, one after the other, with an empty cache each: requests a second, the trace's times stretched to them, or in a closed loop sessions an hour.", metavar="R,...", parse=_parse_rates, shown_default="")
    slo: SLO | None = declare(None, "--slo", "A target such as p99_ttft<2s, from when a request was due: says whether it is met, and with --rates the highest rate that meets it.", metavar="TARGET", parse=parse_slo)
    warm_up_share: float = declare(WARM_UP_SHARE, "--warm-up-share", "Leave this share of the requests, the first, out of the report of latencies from when they were due.", metavar="S", low=0, high=0.99)
    skip_bad: int = declare(0, "--skip-bad", "Skip up to N broken lines.", metavar="N", low=0)
# fmt: on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare Canopy's options on the benchmark's own parser."""
    title = f"Replay of traces (--dataset-name {', '.join(DATASETS)})."
    declared.add_flags(parser.add_argument_group("canopy", title), ReplayOptions)


def parse(args: argparse.Namespace) -> argparse.Namespace:
    """Return ``args`` with the values of ``ReplayOptions``. Raises ``CanopyError``."""
    options = declared.read(ReplayOptions, args)
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return argparse.Namespace(**{**vars(args), **values})


def check(args: argparse.Namespace) -> None:
    """Check Canopy's options against the benchmark's own. Raises ``CanopyError``."""
    if args.num_prompts < 1:
        raise CanopyError(f"--num-prompts must be 1 or more, got {args.num_prompts}")
    if args.rates and args.request_rate != float("inf"):
        raise CanopyError("--rates and --request-rate both set the rate: drop one of them")
    if not args.dataset_path:
        raise CanopyError(
            "--dataset-path is missing: give the trace's file; docs/reference/traces.md says where traces are"
        )


def build_jobs(
    args: argparse.Namespace, vocabulary: np.ndarray, max_request_tokens: int | None
) -> tuple[list[ReplayRequest], Materialiser, int]:
    """Return the trace's requests, their token materialiser, and the number of longer ones, left out."""
    trace = open_trace(args.dataset_path, DATASETS[args.canopy_dataset], skip_bad=args.skip_bad)
    fitting: list[TraceRequest] = []
    longer = 0
    scaler = Materialiser((), vocabulary, args.scale_lengths)
    for request in trace:
        if max_request_tokens is not None:
            total_tokens = request.input_tokens + request.output_tokens
            # Scaling may round prompt and output up by one token each.
            if scaler.length(total_tokens, request.block_tokens) + 2 > max_request_tokens:
                longer += 1
                continue
        fitting.append(request)
        if len(fitting) == args.num_prompts:
            break
    if not fitting:
        raise CanopyError(
            f"{args.dataset_path!r} gives no request"
            + (f" of at most {max_request_tokens} tokens ({longer} are longer)" if longer else "")
            + "; see --scale-lengths and --max-request-tokens"
        )
    materialiser = Materialiser(fitting, vocabulary, args.scale_lengths, seed=args.seed)
    jobs = [
        ReplayRequest(planned, {} if args.no_labels else labels_of(planned.request))
        for planned in materialiser.planned
    ]
    return jobs, materialiser, longer


def labels_of(request: TraceRequest) -> dict[str, Any]:
    """Return a request's labels for ``custom_params``."""
    category = _UNSAFE_CHARACTERS.sub("_", request.category)
    labels: dict[str, Any] = {
        "canopy_category": category[: stamp.MAX_NAME_CHARS] or "default",
        "canopy_turn": request.turn,
    }
    if request.conversation is not None:
        labels["canopy_conversation"] = request.conversation  # the server hashes a long name
    if request.stop is not None:
        labels["canopy_stop"] = request.stop
    return labels


def link_turns(jobs: Sequence[ReplayRequest], time_scale: float, think_cap_s: float) -> TurnLinks:
    links = turn_links([job.planned.request for job in jobs], think_cap_s)
    links.think_s[:] = [think_s * time_scale for think_s in links.think_s]
    return links


def session_offsets_s(links: TurnLinks, sessions_per_hour: float, seed: int) -> list[float]:
    """Return random start times of sessions at a rate; 0 for requests that follow another."""
    rng, now_s, offsets_s = random.Random(seed), 0.0, []
    for previous in links.previous:
        now_s += rng.expovariate(sessions_per_hour / 3600) if previous < 0 else 0.0
        offsets_s.append(now_s if previous < 0 else 0.0)
    return offsets_s


def due_offsets_s(
    jobs: Sequence[ReplayRequest],
    time_scale: float,
    requests_per_s: float,
    seed: int,
    mean_requests_per_s: float | None = None,
) -> list[float]:
    """Return each request's due time, in seconds from the start of the replay.

    With ``mean_requests_per_s`` the trace's times are stretched to that mean rate.
    """
    if mean_requests_per_s is not None:
        span_s = jobs[-1].planned.request.time_s - jobs[0].planned.request.time_s
        time_scale = len(jobs) / max(span_s, 1e-9) / mean_requests_per_s
    if requests_per_s != float("inf"):
        rng = random.Random(seed)
        gaps_s = [rng.expovariate(requests_per_s) for _ in jobs]
        return list(itertools.accumulate(gaps_s))
    first_s = jobs[0].planned.request.time_s
    return [(job.planned.request.time_s - first_s) * time_scale for job in jobs]
