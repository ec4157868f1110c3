"""The options of ``canopy plan``, as the command line takes them."""

from __future__ import annotations

import argparse
import os

from sglang_canopy.cli.overlay_arguments import add_overlay_arguments
from sglang_canopy.plan.backend import NAMES as BACKENDS
from sglang_canopy.plan.objective import DEFAULT_OBJECTIVES
from sglang_canopy.plan.search import SearchOptions
from sglang_canopy.sim.system.config import ROUTINGS
from sglang_canopy.trace.open import format_names

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
    add("--prices", default=PRICES, help="price list: a name or a file (default %(default)s)")
    add(
        "--slo",
        action="append",
        default=[],
        metavar="C",
        help='limits, e.g. "p99_ttft<2s"; several with commas',
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
    for tier in ("device", "host", "disk"):
        add(
            f"--{tier}-policy",
            default="lru",
            metavar="A,B",
            help=f"eviction policies to try on the {tier}",
        )
    add(
        "--policy-config",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="options of a policy",
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
        help="largest disk (default: the trace's distinct KV)",
    )
    add(
        "--dram-levels",
        type=int,
        default=9,
        metavar="N",
        help="sizes of DRAM to try, each twice the one before",
    )
    add("--disk-levels", type=int, default=6, metavar="N", help="sizes of disk to try")
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
    add("--routing", default="prefix-aware", help=f"how requests are spread: {', '.join(ROUTINGS)}")
    add(
        "--max-running",
        type=int,
        default=256,
        metavar="N",
        help="requests that decode at the same time",
    )
    how = parser.add_argument_group("how it is searched")
    add = how.add_argument
    add("--grid", action="store_true", help="evaluate the full grid instead")
    add(
        "--budget",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="most configurations to evaluate, as a share of the grid",
    )
    add(
        "--tolerance",
        type=float,
        default=SearchOptions().tolerance,
        metavar="SHARE",
        help="skip points that could add less than this to the dominated volume",
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
    watching = parser.add_argument_group("planning again and again, from the server's own log")
    add = watching.add_argument
    add("--watch", action="store_true", help="plan again every --every seconds")
    add(
        "--last-hours",
        type=float,
        metavar="H",
        help="with --watch: plan from the last H hours of the log",
    )
    add(
        "--same-slot-last-week",
        type=float,
        metavar="H",
        help="with --watch: plan from the same H hours a week ago",
    )
    add(
        "--every",
        type=float,
        default=3600.0,
        metavar="S",
        help="with --watch: seconds between two plans",
    )
    add(
        "--rounds",
        type=int,
        default=0,
        metavar="N",
        help="with --watch: stop after N plans (0: never)",
    )
    add(
        "--gain",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="with --watch: write the plan again only if cost or mean TTFT changes by more than this",
    )
