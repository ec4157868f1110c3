"""The options of ``canopy plan``, as the command line takes them."""

from __future__ import annotations

import argparse
import os
from typing import Any

from canopy_lab.cli.overlay_arguments import add_overlay_arguments
from canopy_lab.plan.backend import NAMES as BACKENDS
from canopy_lab.plan.objective import DEFAULT_OBJECTIVES
from canopy_lab.plan.planner import DISK_LEVELS, DRAM_LEVELS, SAMPLE_REQUESTS, PlanRequest
from canopy_lab.plan.search import SearchOptions
from canopy_lab.sim.system.config import ROUTINGS
from canopy_lab.trace.open import format_names
from sglang_canopy.config.server_settings import (
    PREFETCH_POLICIES,
    SCHEDULE_POLICIES,
    SGLANG_DEFAULTS,
    WRITE_POLICIES,
)

ADVISED = "advised"
PROFILE, PRICES = "llama-3.1-8b-h100", "aws-us-east-1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``canopy plan``."""
    add = parser.add_argument
    add("path", nargs="?", metavar="TRACE", help="the trace, or --trace PATH")
    add("--trace", metavar="PATH", help="trace file, or archive of conversations")
    add(
        "--format",
        help=f"trace format: {', '.join(format_names())} (default: what fits the first line)",
    )
    add("--profile", default=PROFILE, help="engine profile: a name or a file (default %(default)s)")
    add("--model", metavar="NAME", help="the model you serve; stop if the profile is of another")
    add(
        "--validation",
        metavar="FILE",
        help="errors that canopy validate found on your traffic, to be printed with the plan",
    )
    add("--prices", default=PRICES, help="price list: a name or a file (default %(default)s)")
    add(
        "--slo",
        action="append",
        default=[],
        metavar="C",
        help='limits, e.g. "p99_ttft<2s"; several with commas',
    )
    add(
        "--confidence",
        type=float,
        metavar="P",
        help="choose what meets the limits with at least this probability, over resampled traces "
        f"(default {PlanRequest().confidence}; none with --no-checks)",
    )
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "--minimise",
        "--minimize",
        default="cost",
        metavar="METRIC",
        help="choose the least of this",
    )
    wanted.add_argument(
        "--maximise", "--maximize", metavar="METRIC", help="choose the most of this instead"
    )
    add(
        "--objectives",
        default=",".join(DEFAULT_OBJECTIVES),
        metavar="A,B",
        help="what the front is of, two or more",
    )
    add("--json", metavar="OUT", help="write everything as JSON")
    add("--html", metavar="OUT", help="write the report with figures")
    add("--figures", metavar="FOLDER", help="write the report's figures as PNG")
    add("--output", metavar="PLAN", help="write the plan file for --canopy-plan")
    add("--disk-path", metavar="FOLDER", help="the disk store's folder, for the plan file")
    size = parser.add_argument_group("what may be chosen")
    add = size.add_argument
    add(
        "--disks",
        metavar="A,B",
        help="disk classes of the price list (default: all); 'none' for no disk",
    )
    add(
        "--ttl",
        default="none,group",
        metavar="A,B",
        help="TTLs of the disk to try: none, a number of seconds, or group (one per prefix subtree)",
    )
    add("--instances", default="1", metavar="N,N", help="numbers of servers to try")
    add(
        "--policy",
        default=ADVISED,
        metavar="NAME",
        help="eviction policy of every tier: a name, NAME=JSON with its options, or what canopy "
        "advise finds for this trace and --device-tokens (default %(default)s)",
    )
    add(
        "--dram-max-gib",
        type=float,
        default=0,
        metavar="G",
        help="most DRAM, all instances together (default: the trace's distinct KV, at most 2 TiB)",
    )
    add(
        "--disk-max-gib",
        type=float,
        default=0,
        metavar="G",
        help="largest disk of an instance, or of a shared store (default: the distinct KV)",
    )
    add(
        "--dram-levels",
        type=int,
        default=DRAM_LEVELS,
        metavar="N",
        help="sizes of DRAM that the search begins with, each twice the one before (default "
        "%(default)s); it refines between them",
    )
    add(
        "--disk-levels",
        type=int,
        default=DISK_LEVELS,
        metavar="N",
        help="the same for disks (default %(default)s)",
    )
    add(
        "--baseline-gib",
        type=float,
        default=0,
        metavar="G",
        help="DRAM of the fixed baseline (default: a quarter of the distinct KV)",
    )
    engine = parser.add_argument_group("the simulated engine")
    add = engine.add_argument
    add(
        "--device-tokens",
        type=int,
        metavar="N",
        help="KV pool of one device, in tokens (default: the profile's, or 40 GiB of KV)",
    )
    add(
        "--gpus-per-instance",
        type=int,
        metavar="N",
        help="GPUs that are paid for one instance (default: the profile's, else the price list's)",
    )
    add("--routing", default="prefix-aware", help=f"how requests are spread: {', '.join(ROUTINGS)}")
    _add_settings(add)
    how = parser.add_argument_group("how it is searched")
    add = how.add_argument
    add("--grid", action="store_true", help="evaluate a full grid in equal steps instead")
    add(
        "--evaluations",
        type=int,
        default=SearchOptions().evaluations,
        metavar="N",
        help="most configurations to evaluate (default %(default)s)",
    )
    add(
        "--tolerance",
        type=float,
        default=SearchOptions().tolerance,
        metavar="SHARE",
        help="stop when further sizes could add no more than this to the dominated volume "
        "(default %(default)s)",
    )
    add(
        "--sample-requests",
        type=int,
        default=SAMPLE_REQUESTS,
        metavar="N",
        help="of a trace with more than twice as many, search on the N busiest and simulate what "
        "could be the choice on all (default %(default)s; 0: search on all)",
    )
    add(
        "--scale-traffic",
        metavar="X,Y",
        help="what the choice does at X times the traffic too (beside 0.8 and 1.2 times)",
    )
    add(
        "--compare",
        metavar="PROFILE=USD,...",
        help="plan for each of these engine profiles (another GPU, another tensor parallelism), at "
        "USD a GPU-hour (=USD left out: the price list's), and say which meets the limits best",
    )
    add(
        "--no-checks",
        action="store_true",
        help="do not evaluate the choice's neighbours and other loads",
    )
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    add("--backend", default="local", help=f"where simulations run: {' or '.join(BACKENDS)}")
    add(
        "--cache",
        metavar="FOLDER",
        help="where simulations are kept (default: ~/.cache/canopy/plan)",
    )
    add("--no-cache", action="store_true", help="keep no simulations")
    reading = parser.add_argument_group("what is read")
    add = reading.add_argument
    add("--skip-bad", type=int, default=0, metavar="N", help="pass over N broken lines")
    add("--load", type=float, default=1.0, metavar="X", help="the same requests X times as fast")
    add(
        "--block-tokens",
        type=int,
        default=64,
        metavar="N",
        help="the server's block_tokens, for group TTLs from its log",
    )
    add("--requests", type=int, default=0, metavar="N", help="read only the first N requests")
    add_overlay_arguments(add)
    add("--seed", type=int, default=0, metavar="K", help="seed of the overlay")
    add("--last-hours", type=float, metavar="H", help="plan from the last H hours of the log")


def _add_settings(add: Any) -> None:
    """SGLang's own settings: choices of a plan, and those that it only takes over."""
    given = SGLANG_DEFAULTS.to_json()
    for option, default, allowed in (
        ("--page-size", "1,64", "tokens"),
        ("--prefetch-policy", "timeout,wait_complete", ", ".join(PREFETCH_POLICIES)),
        ("--write-policy", given["hicache_write_policy"], ", ".join(WRITE_POLICIES)),
        ("--schedule-policy", given["schedule_policy"], ", ".join(SCHEDULE_POLICIES)),
    ):
        add(
            option,
            default=default,
            metavar="A,B",
            help=f"SGLang's, the values to try: {allowed} (default %(default)s)",
        )
    add(
        "--chunked-prefill-size",
        metavar="A,B",
        help="SGLang's, the values to try (default: SGLang's for --gpu-memory-gib)",
    )
    add("--gpu-memory-gib", type=float, default=80.0, metavar="G", help="of one GPU")
    for option, kind, what in (
        ("--max-running", int, "max_running_requests"),
        ("--max-prefill-tokens", int, "max_prefill_tokens"),
        ("--schedule-conservativeness", float, "schedule_conservativeness"),
        ("--mem-fraction-static", float, "mem_fraction_static"),
        ("--prefetch-threshold", int, "prefetch_threshold"),
        ("--prefetch-timeout-base", float, "prefetch_timeout_base"),
        ("--prefetch-timeout-per-ki-token", float, "prefetch_timeout_per_ki_token"),
    ):
        shown = f"default {given[what]}" if what in given else "default: SGLang's"
        add(
            option, dest=what, type=kind, metavar="N" if kind is int else "X",
            help=f"SGLang's, for the simulation and the plan file ({shown})",
        )  # fmt: skip
