"""Options that Canopy adds to ``sglang.bench_serving``, and the jobs they describe."""

from __future__ import annotations

import argparse
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from canopy_lab.latency.report import WARM_UP_SHARE
from canopy_lab.latency.slo import parse_slo
from canopy_lab.live.replay.schedule import ReplayRequest
from canopy_lab.trace import TraceRequest, open_trace
from canopy_lab.trace.materialise import Materialiser, Planned
from canopy_lab.trace.sessions import SessionLinks, session_links
from sglang_canopy.errors import CanopyError

DATASETS = {
    "bailian": "bailian",
    "mooncake": "mooncake",
    "agentic": "agentic",
    "azure": "azure",
    "sglang-log": "sglang",
}
"""Dataset name on the command line -> trace format."""

_UNNAMED = re.compile(r"[^\w.:/@+-]", re.ASCII)
_LONGEST_NAME = 128
_LONGEST_RETURN_S = 7 * 24 * 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare Canopy's options on the benchmark's own parser."""
    group = parser.add_argument_group(
        "canopy", f"Replay of traces (--dataset-name {', '.join(DATASETS)})."
    )
    group.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="Multiply the trace's arrival times: 0.1 is ten times as fast, 0 is as fast as the "
        "order of turns allows. --request-rate replaces the trace's times by random ones.",
    )
    group.add_argument(
        "--scale-lengths",
        type=_fraction,
        default=Fraction(1),
        metavar="F",
        help="Multiply lengths, for a small model: 1/16 or 0.0625. Blocks shrink and stay shared.",
    )
    group.add_argument(
        "--max-request-tokens",
        type=int,
        default=None,
        metavar="N",
        help="Leave out requests whose prompt and output are longer (after scaling). "
        "Default: the limit that the SGLang server reports.",
    )
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=None,
        metavar="N",
        help="Ask for N tokens and end the answer with the trace's last token, instead of fixing its "
        "length (needs --canopy-enable-forced-output there): as in production, the server does not "
        "know the length of an answer.",
    )
    group.add_argument(
        "--trace-clock",
        action="store_true",
        help="Send the server the trace's time of each request, so that policies see the trace's "
        "pauses at any --time-scale (needs --canopy-enable-forced-output there).",
    )
    group.add_argument(
        "--shuffle-labels",
        action="store_true",
        help="Send every request with the category, turn and stop reason of another one (--seed). Not "
        "a placebo of a policy: the server counts turns and lengths from the prompts.",
    )
    group.add_argument(
        "--hints",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="Share of the requests (0 to 1) that also hint when the conversation continues, or that "
        "it is over, by the replayed trace.",
    )
    group.add_argument(
        "--no-labels",
        action="store_true",
        help="Send no category, turn, conversation or stop reason.",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        default=None,
        metavar="N",
        help="Take token ids below N; needs no tokenizer.",
    )
    group.add_argument(
        "--closed-loop",
        action="store_true",
        help="Agents: send a turn after the answer to the one before it and the time to think, "
        "which the trace says or is the gap between the two, times --time-scale.",
    )
    group.add_argument(
        "--think-cap-s",
        type=float,
        default=120.0,
        metavar="S",
        help="Of a closed loop: longest time to think, before scaling.",
    )
    group.add_argument(
        "--rates",
        metavar="R,...",
        help="Replay at several rates, one after the other, with an empty cache each: requests a "
        "second, the trace's times stretched to them, or in a closed loop sessions an hour.",
    )
    group.add_argument(
        "--slo",
        metavar="TARGET",
        help="A target such as p99_ttft<2s, from when a request was due: says whether it is met, "
        "and with --rates the highest rate that meets it.",
    )
    group.add_argument(
        "--warm-up-share",
        type=float,
        default=WARM_UP_SHARE,
        metavar="S",
        help="Leave this share of the requests, the first, out of the report of latencies from "
        "when they were due.",
    )
    group.add_argument(
        "--skip-bad", type=int, default=0, metavar="N", help="Skip up to N broken lines."
    )


def _fraction(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a factor above 0 and at most 1, got {text!r}")
    return value


def check(args: argparse.Namespace) -> None:
    """Refuse values that argparse accepts. Raises ``CanopyError``."""
    if not 0 <= args.time_scale < float("inf"):
        raise CanopyError(f"--time-scale must be 0 or more, got {args.time_scale}")
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise CanopyError(f"--max-new-tokens must be 1 or more, got {args.max_new_tokens}")
    if args.num_prompts < 1:
        raise CanopyError(f"--num-prompts must be 1 or more, got {args.num_prompts}")
    if not 0 <= args.warm_up_share < 1:
        raise CanopyError(f"--warm-up-share must be from 0 to below 1, got {args.warm_up_share}")
    if not args.think_cap_s >= 0:
        raise CanopyError(f"--think-cap-s must be 0 or more, got {args.think_cap_s}")
    if args.slo is not None:
        parse_slo(args.slo)
    if args.rates is not None:
        rates(args.rates)
        if args.request_rate != float("inf"):
            raise CanopyError("--rates and --request-rate both set the rate: drop one of them")
    if not args.dataset_path:
        raise CanopyError(
            "--dataset-path is missing: give the trace's file; docs/reference/traces.md says where traces are"
        )
    if not 0 <= args.hints <= 1:
        raise CanopyError(f"--hints must be a share from 0 to 1, got {args.hints}")
    if args.no_labels and args.hints:
        raise CanopyError("--hints needs labels: drop --no-labels")
    if args.shuffle_labels and args.no_labels:
        raise CanopyError(
            "--shuffle-labels sends labels and --no-labels sends none: drop one of them"
        )


def build_jobs(
    args: argparse.Namespace, vocabulary: np.ndarray, most_tokens: int | None
) -> tuple[list[ReplayRequest], Materialiser, int]:
    """Return the trace's jobs, their token materialiser, and the number of longer requests."""
    trace = open_trace(args.dataset_path, DATASETS[args.canopy_dataset], skip_bad=args.skip_bad)
    fitting: list[TraceRequest] = []
    left_out = 0
    sizes = Materialiser((), vocabulary, args.scale_lengths)
    for request in trace:
        if most_tokens is not None:
            whole = request.input_tokens + request.output_tokens
            # Scaling may round prompt and output up by one token each.
            if sizes.length(whole, request.block_tokens) + 2 > most_tokens:
                left_out += 1
                continue
        fitting.append(request)
        if len(fitting) == args.num_prompts:
            break
    if not fitting:
        raise CanopyError(
            f"{args.dataset_path!r} gives no request"
            + (f" of at most {most_tokens} tokens ({left_out} are longer)" if left_out else "")
            + "; see --scale-lengths and --max-request-tokens"
        )
    made = Materialiser(fitting, vocabulary, args.scale_lengths, seed=args.seed)
    hints = labels(made.planned, args.shuffle_labels, args.seed)
    if args.hints:
        pace = 1.0 if args.trace_clock else args.time_scale
        add_hints(made.planned, hints, args.hints, args.seed, pace)
    if args.no_labels:
        hints = [{} for _ in hints]
    return [ReplayRequest(p, s) for p, s in zip(made.planned, hints, strict=True)], made, left_out


def labels(planned: Sequence[Planned], shuffle: bool, seed: int) -> list[dict[str, Any]]:
    """Return each request's labels for ``custom_params``.

    With ``shuffle``, category, turn and stop reason move together to another request: their
    frequencies are kept and their meaning is lost. The conversation is kept.
    """
    requests = [p.request for p in planned]
    if shuffle:
        others = list(requests)
        random.Random(seed).shuffle(others)
        requests = [
            replace(r, category=o.category, turn=o.turn, stop=o.stop)
            for r, o in zip(requests, others, strict=True)
        ]
    return [_label(r) for r in requests]


def add_hints(
    planned: Sequence[Planned], hints: list[dict[str, Any]], share: float, seed: int, pace: float
) -> None:
    """Give ``share`` of the requests hints about the future of their conversation.

    ``canopy_return_in_s`` is the time to the next request, times ``pace``. ``canopy_over`` marks
    the last request.
    """
    following = {p.previous: p for p in planned if p.previous is not None}
    draw = random.Random(seed)
    for one, labelled in zip(planned, hints, strict=True):
        if draw.random() >= share or one.request.conversation is None:
            continue
        after = following.get(one.ordinal)
        if after is None:
            labelled["canopy_over"] = True
        else:
            gap_s = (after.request.time_s - one.request.time_s) * pace
            labelled["canopy_return_in_s"] = min(round(gap_s, 3), _LONGEST_RETURN_S)


def _label(request: TraceRequest) -> dict[str, Any]:
    hints: dict[str, Any] = {
        "canopy_category": _UNNAMED.sub("_", request.category)[:_LONGEST_NAME] or "default",
        "canopy_turn": request.turn,
    }
    if request.conversation is not None:
        hints["canopy_conversation"] = request.conversation[:_LONGEST_NAME]
    if request.stop is not None:
        hints["canopy_stop"] = request.stop
    return hints


def rates(text: str) -> list[float]:
    """Parse ``0.5,1,2`` to ascending rates. Raises ``CanopyError``."""
    try:
        made = sorted({float(part) for part in text.split(",")})
    except ValueError:
        made = []
    if not made or not 0 < made[0] <= made[-1] < float("inf"):
        raise CanopyError(f"--rates takes numbers above 0, like 0.5,1,2; got {text!r}")
    return made


def closed_loop(
    jobs: Sequence[ReplayRequest], time_scale: float, think_cap_s: float
) -> SessionLinks:
    """Return each job's predecessor and think time. Think times are scaled."""
    links = session_links([job.planned.request for job in jobs], think_cap_s)
    links.think_s[:] = [think * time_scale for think in links.think_s]
    return links


def session_offsets_s(links: SessionLinks, sessions_per_hour: float, seed: int) -> list[float]:
    """Return random start times of sessions at a rate; 0 for jobs that follow another."""
    draw, now, made = random.Random(seed), 0.0, []
    for before in links.before:
        now += draw.expovariate(sessions_per_hour / 3600) if before < 0 else 0.0
        made.append(now if before < 0 else 0.0)
    return made


def offsets_s(
    jobs: Sequence[ReplayRequest],
    time_scale: float,
    request_rate: float,
    seed: int,
    mean_rate: float | None = None,
) -> list[float]:
    """Return each job's due time, in seconds from the start of the replay.

    With ``mean_rate`` the trace's times are stretched to that mean rate, in requests per second.
    """
    if mean_rate is not None:
        span = jobs[-1].planned.request.time_s - jobs[0].planned.request.time_s
        time_scale = len(jobs) / max(span, 1e-9) / mean_rate
    if request_rate != float("inf"):
        draw = random.Random(seed)
        gaps = [draw.expovariate(request_rate) for _ in jobs]
        return list(itertools.accumulate(gaps))
    first = jobs[0].planned.request.time_s
    return [(job.planned.request.time_s - first) * time_scale for job in jobs]
