"""``canopy advise``: predict the gain of a policy, of hints and of memory from a log."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from canopy_lab.advise.advice import LOST_POINTS, LowerTier, advise
from canopy_lab.advise.answers import Advice
from canopy_lab.advise.breaks.cures import as_json, sentences
from canopy_lab.advise.breaks.finder import Breaks
from canopy_lab.advise.breaks.memory import MAX_PROMPTS
from canopy_lab.advise.breaks.read import read_breaks
from canopy_lab.advise.decide import first_start
from canopy_lab.advise.sample import MAX_REQUESTS, LogSample, read_sample
from canopy_lab.cli.shared import PROFILE_HELP, Bar, TraceOptions
from canopy_lab.cli.values import above_zero, list_parser, out_file, positive, write_json
from canopy_lab.sim.system.engine_profile import EngineProfile, load_profile
from canopy_lab.trace.sglang_log import pool_tokens
from sglang_canopy.declared import declare


def _parse_sizes(text: str) -> tuple[float, ...]:
    return (
        ()
        if text == "none"
        else tuple(sorted(list_parser(positive, "sizes in GB above 0, or none")(text)))
    )


@dataclass(frozen=True, slots=True)
class Options(TraceOptions):
    tokenizer: str | None = declare(
        None, "--tokenizer", "tokenizer.json or its folder, for logs of text and logs of token ids", metavar="PATH",
        shown_default="4 bytes count as a token",
    )  # fmt: skip
    capacity_tokens: float | None = declare(
        None, "--capacity-tokens", "KV pool of the server, in tokens", metavar="N", parse=above_zero,
        shown_default="max_total_num_tokens in SGLang's log, else the largest at which LRU has lost "
        f"{LOST_POINTS:.0f} points",
    )  # fmt: skip
    profile: str = declare("llama-3.1-8b-h100", "--profile", PROFILE_HELP, metavar="NAME")
    host_gb: tuple[float, ...] = declare(
        (200.0,), "--host-gb", "host memory sizes to evaluate, in GB, or none",
        metavar="G,G", parse=_parse_sizes, shown_default="200",
    )  # fmt: skip
    disk_gb: tuple[float, ...] = declare(
        (1000.0,), "--disk-gb", "disk sizes to evaluate, in GB, or none",
        metavar="G,G", parse=_parse_sizes, shown_default="1000",
    )  # fmt: skip
    out: Path = declare(Path("advice.html"), "--out", "the page", metavar="FILE", parse=out_file)
    json: Path | None = declare(
        None, "--json-out", "write every number as JSON", metavar="FILE", parse=out_file
    )
    sample_requests: int = declare(
        MAX_REQUESTS, "--sample-requests",
        "most requests to simulate; a longer log is sampled by conversation",
        metavar="N", low=1,
    )  # fmt: skip
    show_values: bool = declare(
        False, "--show-values", "show the texts of the log that break prefixes: times, ids, names",
    )  # fmt: skip
    jobs: int | None = declare(
        None, "--jobs", "processes", metavar="N", low=1, shown_default="one per core"
    )
    seed: int = declare(1, "--seed", "seed of placebo, hints and intervals", metavar="K")


OPTIONS = (Options,)


def run(args: Options) -> int:
    from canopy_lab.advise.advice_page import make_page
    from canopy_lab.advise.advice_text import summary

    profile = load_profile(args.profile)
    lower_tiers = [
        *(LowerTier(f"{g:g} GB of host memory", g) for g in args.host_gb),
        *(LowerTier(f"a disk of {g:g} GB", g, is_disk=True) for g in args.disk_gb),
    ]  # fmt: skip
    format = args.detected_format
    logged_pool = pool_tokens(args.trace) if format == "sglang" else None
    sample = _read_sample(args, format)
    breaks = _find_breaks(args, format)
    break_sentences = sentences(breaks, show_values=args.show_values)
    advice = _advise(args, sample, profile, lower_tiers, logged_pool)
    make_page(advice, Path(args.trace).name, break_sentences).write(args.out)
    if args.json:
        findings = as_json(breaks, show_values=args.show_values)
        write_json(args.json, {**advice.as_json(), "breaks": findings})
    start = first_start(advice.decision)
    print(summary(advice))
    print("", *break_sentences, sep="\n")
    print(f"\nThe page: {args.out}")
    print(f"Start: {shlex.join(['sglang', 'serve', 'MODEL', *start.flags])}")
    print(f"Then: {start.next_step}")
    return 0


def _read_sample(args: Options, format: str) -> LogSample:
    with Bar(desc=f"reading {Path(args.trace).name} ({format})", unit="req", disable=None) as bar:
        return read_sample(
            args.trace,
            format,
            tokenizer=args.tokenizer,
            max_requests=args.sample_requests,
            skip_bad=args.skip_bad,
            progress=bar.update,
        )


def _find_breaks(args: Options, format: str) -> Breaks:
    log = Path(args.trace)
    with Bar(desc="comparing prompts", unit="req", total=MAX_PROMPTS, disable=None) as bar:
        return read_breaks(
            log, format, tokenizer=args.tokenizer, skip_bad=args.skip_bad, progress=bar.update
        )


def _advise(
    args: Options,
    sample: LogSample,
    profile: EngineProfile,
    lower_tiers: list[LowerTier],
    logged_pool: tuple[int, int] | None,
) -> Advice:
    capacity, origin = args.capacity_tokens, "given"
    if capacity is None and logged_pool is not None:
        capacity, origin = logged_pool[0], "log" if logged_pool[1] == 1 else "ranks"
    with Bar(desc="simulating", unit="run", disable=None) as bar:
        return advise(
            sample,
            profile,
            capacity_tokens=capacity,
            capacity_from=origin,
            tiers=lower_tiers,
            jobs=args.jobs,
            seed=args.seed,
            set_total=bar.reset,
            progress=bar.update,
        )
