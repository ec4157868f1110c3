"""The system simulator against a real server: TTFT, throughput, hit rate.

    python benchmark/plan/fidelity.py --model DIR --out OUT

Three set-ups (device; device and host; device, host and disk), each a real server on this machine.
On each, first the costs are measured (``canopy profile``, random prompts), then a synthetic trace
is replayed at two loads, several times. The simulator gets the measured costs and the same
requests; the table has both. ``--setup NAME`` runs one set-up only; finished set-ups are not repeated;
``--table`` prints the existing results.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from canopy_lab.cli.profile import measure
from canopy_lab.live.profile.client import ProfiledServer
from canopy_lab.sim.system import (
    EngineProfile,
    SystemConfig,
    SystemResult,
    Workload,
    simulate_system,
)
from canopy_lab.trace.materialise import Materialiser, usable_tokens
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.bench_serving import replay
from sglang_canopy.errors import CanopyError

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from make_synthetic import main as make_synthetic

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import cpu_arguments, free_port, serving

PAGE = 16
THRESHOLD = 64
"""Fewest tokens for a read from disk; SGLang's 256 is for longer prompts."""
LIMITS = {"mean TTFT": 0.192, "throughput": 0.065, "token hit rate": 0.02}
AIMS = {"mean TTFT": 0.10, "throughput": 0.05, "token hit rate": 0.005}
SETUPS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class Row:
    """A set-up at a load: each served run, and the simulation."""

    setup: str
    load: str
    served: list[dict[str, float]]
    simulated: dict[str, float]

    def deviation(self, metric: str) -> float:
        """Return the deviation of the simulated figure from the mean of the served runs, as a share."""
        mean = float(np.mean([run[metric] for run in self.served]))
        return abs(self.simulated[metric] - mean) / mean if mean else 0.0

    def spread(self, metric: str) -> float:
        """Return the range of the equal runs as a share of their mean: the best possible accuracy."""
        runs = [run[metric] for run in self.served]
        mean = float(np.mean(runs))
        return (max(runs) - min(runs)) / mean if mean else 0.0


def run_setup(setup: str, args: argparse.Namespace) -> None:
    """One server: its costs, then every load, every run. What is done already is kept."""
    trace = make_trace(args)
    done = args.out / f"{setup}.json"
    if done.exists() and not args.again:
        return
    with server(setup, args) as url:
        keep = ("max_total_num_tokens", "chunked_prefill_size", "max_running_requests", "page_size")
        facts = {key: ProfiledServer(url).facts.get(key) for key in keep}
        profile = measure(profile_arguments(url, args))
        made: dict[str, Any] = {"setup": setup, "facts": facts, "profile": profile.to_json()}
        scales = {load: time_scale(setup, busy, made, args) for load, busy in args.loads}
        served: dict[str, list[dict[str, Any]]] = {}
        for number in range(args.runs):
            for which, (load, scale) in enumerate(scales.items()):
                print(f"{setup}, {load} load, run {number + 1}: time x {scale:.3g}", flush=True)
                ProfiledServer(url).flush()
                # Other tokens in every run: pages on disk from earlier runs are never hit.
                result = replay(
                    "bailian", str(trace), url, "replay",
                    tokenizer=str(args.model), num_prompts=args.num_prompts,
                    time_scale=scale, scale_lengths=args.scale_lengths, trace_clock=True,
                    max_new_tokens=args.max_new_tokens,
                    seed=number * len(scales) + which + 1, tag=f"{setup}-{load}-{number}", output_details=True,
                )  # fmt: skip
                served.setdefault(load, []).append(result)
    made |= {"scales": scales, "served": served}
    done.write_text(json.dumps(made) + "\n", encoding="utf-8")


def time_scale(setup: str, busy: float, made: dict[str, Any], args: argparse.Namespace) -> float:
    """Return the factor on the trace's time scale that keeps the server ``busy``.

    It uses the measured costs, so that every machine is equally far from overload.
    """
    low, high = 0.01, 100.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        if simulate(setup, middle, made, args).busy_share > busy:
            low = middle
        else:
            high = middle
    return high


def make_trace(args: argparse.Namespace) -> Path:
    """The synthetic trace that is served and simulated."""
    path, drawn = args.out / "trace.jsonl", args.out / "drawn.jsonl"
    if not path.exists():
        seconds = str(max(120, args.num_prompts))  # two a second: twice as many as are served
        given = ["--preset", "small", "--seconds", seconds, "--rate", "2", "--seed", "1"]
        if make_synthetic([*given, "-o", str(drawn)]) != 0:
            raise SystemExit(2)
        with drawn.open(encoding="utf-8") as lines, path.open("w", encoding="utf-8") as short:
            for line in lines:
                request = json.loads(line)
                # A CPU decodes slowly: whole outputs would leave no room for anything else.
                request["output_length"] = -(-request["output_length"] // args.shorter_outputs)
                short.write(json.dumps(request) + "\n")
    return path


@contextmanager
def server(setup: str, args: argparse.Namespace) -> Iterator[str]:
    """A real server of this set-up; yields its address."""
    given = cpu_arguments(args.model, kv_tokens=args.kv_tokens, dtype="float32")
    if not (args.model / "model.safetensors").exists():
        given += ["--load-format", "dummy"]
    # One message for each token and request would load the other core more than the model.
    given += ["--page-size", str(PAGE), "--stream-interval", "16"]
    given += ["--canopy-enable-forced-output", "--radix-eviction-policy", "canopy-lru"]
    config = {"block_tokens": PAGE, "quantum_tokens": PAGE}
    given += ["--radix-eviction-policy-config", json.dumps(config)]
    environment = {"OMP_NUM_THREADS": "1"}
    if setup != "device":
        given += ["--enable-hierarchical-cache", "--hicache-ratio", str(args.host_ratio)]
    if setup == "disk":
        pages = args.out / "pages"
        pages.mkdir(mode=0o700, exist_ok=True)
        environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(pages)
        given += ["--hicache-storage-backend", "file"]
        given += ["--hicache-storage-prefetch-policy", "wait_complete"]
        extra = {"prefetch_threshold": THRESHOLD}
        given += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
    log = args.out / f"server-{setup}.log"
    with serving(
        given, log=log, port=free_port(), environment=environment, describe=setup
    ) as running:
        yield running.url


def profile_arguments(url: str, args: argparse.Namespace) -> Any:
    """Return the arguments of ``canopy profile``."""
    return SimpleNamespace(
        url=url, name=None, device=None, seed=99, kv_bytes_per_token=None,
        max_prompt=min(1024, args.kv_tokens // 4), max_context=args.kv_tokens // 2,
        max_batch=args.max_batch, repeats=args.repeats,
    )  # fmt: skip


def simulate(
    setup: str, scale: float, made: dict[str, Any], args: argparse.Namespace
) -> SystemResult:
    """The same requests on the same set-up, simulated."""
    profile, facts = EngineProfile.from_json(made["profile"]), made["facts"]
    kv = profile.kv_bytes_per_token
    host = disk = None
    if setup != "device":
        tokens = int(facts["max_total_num_tokens"] * args.host_ratio)
        host = profile.host_tier(tokens * kv)
    if setup == "disk":
        # SGLang's file backend has no limit.
        disk = profile.disk_tier(1e12, shared_channel=True)
    config = SystemConfig(
        device_tokens=int(facts["max_total_num_tokens"]),
        host=host,
        disk=disk,
        page_tokens=PAGE,
        quantum_tokens=PAGE,
        chunked_prefill_tokens=int(facts["chunked_prefill_size"] or 8192),
        max_running=int(facts["max_running_requests"] or 256),
        prefetch_policy="wait_complete",
        prefetch_threshold_tokens=THRESHOLD,
        max_new_tokens=args.max_new_tokens,
        fixed_outputs=args.max_new_tokens is None,
    )
    return simulate_system(workload(scale, args), config, profile, turns_wait=True)


def workload(scale: float, args: argparse.Namespace) -> Workload:
    """The requests as the server sees them, ``scale`` times as slow as the trace's."""
    served, outputs = paged(make_trace(args), args.model, args.num_prompts, args.scale_lengths)
    return Workload([replace(r, time_s=r.time_s * scale) for r in served], outputs)


@functools.cache
def paged(
    trace: Path, model: Path, num_prompts: int, scale_lengths: Fraction
) -> tuple[list[TraceRequest], dict[int, tuple[int, ...]]]:
    """The trace with pages of the very tokens that are sent, and the pages of its outputs."""
    from transformers import AutoTokenizer

    records = list(islice(open_trace(trace, "bailian"), num_prompts))
    vocabulary = usable_tokens(AutoTokenizer.from_pretrained(str(model)))
    made = Materialiser(records, vocabulary, scale_lengths, 1)
    ids: dict[tuple[int, tuple[int, ...]], int] = {}

    def pages(tokens: list[int]) -> tuple[int, ...]:
        chain, path = 0, []
        for start in range(0, len(tokens), PAGE):
            chain = ids.setdefault((chain, tuple(tokens[start : start + PAGE])), len(ids) + 1)
            path.append(chain)
        return tuple(path)

    served, outputs = [], {}
    for planned in made.planned:
        prompt = made.prompt(planned)
        whole = pages(prompt + made.output(planned))
        outputs[planned.ordinal] = whole[len(prompt) // PAGE :]
        served.append(
            replace(
                planned.request,
                input_tokens=planned.prompt_tokens,
                output_tokens=planned.output_tokens,
                blocks=pages(prompt),
                block_tokens=PAGE,
            )
        )
    return served, outputs


def rows(args: argparse.Namespace) -> list[Row]:
    """Every set-up that has been run, at every load."""
    found = []
    for setup in SETUPS:
        file = args.out / f"{setup}.json"
        if not file.exists():
            continue
        made = json.loads(file.read_text(encoding="utf-8"))
        for load, scale in made["scales"].items():
            runs = [_served(result) for result in made["served"][load]]
            found.append(Row(setup, load, runs, _simulated(simulate(setup, scale, made, args))))
    return found


def table(found: Sequence[Row]) -> str:
    """Return the comparison in Markdown, with the goals."""
    lines = [
        "| set-up | load | | served (each run) | spread | simulated | deviation | limit | aim |",
        "|---|---|---|---|---:|---:|---:|---|---|",
    ]
    for row in found:
        for metric, limit in LIMITS.items():
            off = row.deviation(metric)
            served = ", ".join(_figure(metric, run[metric]) for run in row.served)
            met = f"{limit:.1%} {'met' if off <= limit else 'NOT met'}"
            aim = f"{AIMS[metric]:.1%} {'met' if off <= AIMS[metric] else 'not met'}"
            lines.append(
                f"| {row.setup} | {row.load} | {metric} | {served} | {row.spread(metric):.1%} | "
                f"{_figure(metric, row.simulated[metric])} | {off:.1%} | {met} | {aim} |"
            )
    return "\n".join(lines)


def _served(result: dict[str, Any]) -> dict[str, float]:
    if result["errors"]["count"]:
        raise CanopyError(f"a replay had errors: {result['errors']['kinds']}")
    rate = result["throughput"]
    return {
        "mean TTFT": result["overall"]["ttft_ms"]["mean"] / 1000,
        "throughput": rate["input_tokens_per_s"] + rate["output_tokens_per_s"],
        "token hit rate": result["overall"]["hit_rate"],
    }


def _simulated(result: SystemResult) -> dict[str, float]:
    return {
        "mean TTFT": result.mean_ttft_s,
        "throughput": result.throughput_tokens_per_s,
        "token hit rate": result.token_hit_ratio,
    }


def _figure(metric: str, value: float) -> str:
    if metric == "mean TTFT":
        return f"{value * 1000:.1f} ms"
    return f"{value:.0f} tok/s" if metric == "throughput" else f"{value:.2%}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model directory (no weights: dummy)")
    add("--out", type=Path, required=True, help="folder for results and logs")
    add("--setup", choices=SETUPS, help="run this one only")
    add("--table", action="store_true", help="serve nothing; print what is there")
    add("--again", action="store_true", help="run what has a result already")
    add("--num-prompts", type=int, default=100)
    add("--scale-lengths", type=Fraction, default=Fraction(1))
    add("--shorter-outputs", type=int, default=8, metavar="N", help="an Nth of the trace's")
    add(
        "--max-new-tokens",
        type=int,
        default=1024,
        help="that every request asks for; its answer ends sooner, when the server cannot know "
        "(default %(default)s)",
    )
    add("--loads", type=_loads, default="low=0.4,high=0.7", help="name=busy share, ...")
    add("--runs", type=int, default=3)
    add("--kv-tokens", type=int, default=8192)
    add("--host-ratio", type=float, default=2.0)
    add("--max-batch", type=int, default=16)
    add("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        if not args.table:
            for setup in SETUPS if args.setup is None else (args.setup,):
                run_setup(setup, args)
        print(table(rows(args)))
    except CanopyError as error:
        print(f"fidelity.py: {error}", file=sys.stderr)
        return 2
    return 0


def _loads(text: str) -> list[tuple[str, float]]:
    try:
        return [(name, float(scale)) for name, scale in (p.split("=") for p in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected name=share,..., got {text!r}") from None


if __name__ == "__main__":
    # A stopped run stops its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
