"""``canopy advise``: from a log to what a policy, hints and memory would win on it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tqdm import tqdm

from canopy_lab.advise.advice import LOST_POINTS, Below, advise
from canopy_lab.advise.answers import Advice
from canopy_lab.advise.sample import MOST_REQUESTS, Sample, read_sample
from canopy_lab.cli.log_arguments import add_log_arguments
from canopy_lab.sim.system.engine_profile import EngineProfile, load_profile, profile_names
from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.sglang_log import pool_tokens
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import replace_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``canopy advise``."""
    add = parser.add_argument
    add_log_arguments(parser)
    add(
        "--capacity-tokens",
        type=float,
        metavar="N",
        help="KV pool of the server, in tokens (default: max_total_num_tokens in SGLang's log, else "
        f"the largest at which LRU has lost {LOST_POINTS:.0f} points)",
    )
    add(
        "--profile",
        default="llama-3.1-8b-h100",
        metavar="NAME",
        help=f"costs of the engine: a file, or one of: {', '.join(profile_names())} (default %(default)s)",
    )
    add(
        "--host-gb",
        default="200",
        metavar="G,G",
        help="sizes of host memory to ask about, in GB; none for no host tier (default %(default)s)",
    )
    add(
        "--disk-gb",
        default="1000",
        metavar="G,G",
        help="sizes of a disk to ask about, in GB; none for no disk (default %(default)s)",
    )
    add(
        "--servers",
        type=int,
        metavar="N",
        help="servers that share the requests, for the wait in the queue (default: as many as keep "
        "prefill under LRU below 70 %% of their time)",
    )
    add("--out", default="advice.html", metavar="FILE", help="the page (default %(default)s)")
    add("--json", metavar="FILE", help="write every number as JSON")
    add(
        "--sample-requests",
        type=int,
        default=MOST_REQUESTS,
        metavar="N",
        help="most requests to simulate; of a longer log whole conversations are sampled by hash "
        "(default %(default)s)",
    )
    add("--jobs", type=int, metavar="N", help="processes for the simulator (default: one a core)")
    add("--seed", type=int, default=1, metavar="K", help="seed of placebo, hints and intervals")
    add("--skip-bad", type=int, default=0, metavar="N", help="pass over N broken lines")


def run(args: argparse.Namespace) -> int:
    """Read, simulate, write the page, print the summary."""
    from canopy_lab.report.advise_html import write_page
    from canopy_lab.report.advise_text import summary

    if args.jobs is not None and args.jobs < 1:
        raise CanopyError(f"--jobs must be 1 or more, got {args.jobs}")
    if args.capacity_tokens is not None and not 0 < args.capacity_tokens < float("inf"):
        raise CanopyError(f"--capacity-tokens must be above 0, got {args.capacity_tokens}")
    if args.servers is not None and args.servers < 1:
        raise CanopyError(f"--servers must be 1 or more, got {args.servers}")
    for out in (args.out, args.json):
        if out and not Path(out).resolve().parent.is_dir():
            raise CanopyError(f"cannot write {out!r}: its folder does not exist; make it first")
    profile = load_profile(args.profile)
    below = [
        *(Below(f"{g:g} GB of host memory", g) for g in _sizes("--host-gb", args.host_gb)),
        *(Below(f"and a disk of {g:g} GB", g, disk=True) for g in _sizes("--disk-gb", args.disk_gb)),
    ]  # fmt: skip
    format = args.format or guess_format(args.log)
    logged = pool_tokens(args.log) if format == "sglang" else None
    sample = _read(args, format)
    made = _advise(args, sample, profile, below, logged)
    write_page(args.out, made, Path(args.log).name)
    if args.json:
        try:
            replace_file(args.json, json.dumps(made.as_json(), indent=1) + "\n")
        except OSError as error:
            raise CanopyError(f"cannot write {args.json!r}: {error}") from None
    print(summary(made))
    print(f"\nThe page: {args.out}")
    return 0


def _read(args: argparse.Namespace, format: str) -> Sample:
    with tqdm(desc=f"reading {Path(args.log).name} ({format})", unit="req", disable=None) as bar:
        return read_sample(
            args.log,
            format,
            tokenizer=args.tokenizer,
            most_requests=args.sample_requests,
            skip_bad=args.skip_bad,
            progress=bar.update,
        )


def _advise(
    args: argparse.Namespace,
    sample: Sample,
    profile: EngineProfile,
    below: list[Below],
    logged: int | None,
) -> Advice:
    given = args.capacity_tokens
    with tqdm(desc="simulating", unit="run", disable=None) as bar:

        def resize(total: int) -> None:
            bar.total = total
            bar.refresh()

        return advise(
            sample,
            profile,
            capacity_tokens=logged if given is None else given,
            capacity_from="log" if given is None else "given",
            below=below,
            servers=args.servers,
            jobs=args.jobs,
            seed=args.seed,
            resize=resize,
            progress=bar.update,
        )


def _sizes(option: str, text: str) -> list[float]:
    if text == "none":
        return []
    try:
        sizes = sorted(float(part) for part in text.split(","))
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < float("inf") for size in sizes):
        raise CanopyError(f"{option} must be sizes in GB above 0, or none, got {text!r}")
    return sizes
