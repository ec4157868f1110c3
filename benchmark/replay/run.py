"""Real servers, real traces: the hits of each eviction policy's cache, policy after policy.

    python benchmark/replay/run.py --data DIR --trace conversation --capacity 0.05 --out OUT

One server a policy with a KV pool of the same size; the same requests with the same tokens are
replayed against each, then a table is printed. See README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from canopy_lab.live.replay import report
from canopy_lab.trace import open_trace
from canopy_lab.trace.materialise import Materialiser, middle_tokens
from sglang_canopy.bench_serving import replay
from sglang_canopy.errors import CanopyError

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from make_overlay import main as make_overlay

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import cpu_arguments, free_port, serving

CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


@dataclass(frozen=True, slots=True)
class Arm:
    """One column of the comparison."""

    name: str
    policy: str
    own: bool
    """Whether the policy is Canopy's, and takes Canopy's settings."""
    options: tuple[tuple[str, Any], ...] = ()
    core: str = "python"
    """SGLang's tree core: ``python``, or ``rust``, its default unless a policy needs ``python``."""


ARMS = {
    arm.name: arm
    for arm in (
        Arm("lru", "lru", own=False),
        Arm("lru-rust", "lru", own=False, core="rust"),
        Arm("canopy-lru", "canopy-lru", own=True),
        Arm("wa", "wa", own=True),
        Arm("wa-shuffled", "wa", own=True, options=(("shuffle_labels", True),)),
        Arm("wa-no-labels", "wa", own=True, options=(("no_labels", True),)),
        Arm("etlru", "etlru", own=True),
    )
}


def traces(args: argparse.Namespace) -> list[tuple[str, str, Path]]:
    """``(name, dataset, path)``; missing agentic overlays are made."""
    if args.trace != "agentic":
        file = {"conversation": "conversation_first60", "synthetic": "synthetic_trace"}[args.trace]
        return [(args.trace, "mooncake", args.data / f"mooncake/{file}.jsonl")]
    made = []
    for seed in args.seeds:
        path = args.out / f"overlay-{args.conversations}-{args.window_s:g}-{seed}.jsonl.gz"
        if not path.exists():
            archive = args.data / "agentic_coding/traces_500.tar.xz"
            given = ["--archive", archive, "--conversations", args.conversations]
            given += ["--window-s", args.window_s, "--seed", seed, "-o", path]
            if make_overlay([*map(str, given)]) != 0:
                raise SystemExit(2)
        made.append((f"agentic-seed{seed}", "agentic", path))
    return made


def working_set(dataset: str, path: Path, requests: int, scale: Fraction) -> tuple[int, int]:
    """Distinct prompt tokens of the requests replayed, and the longest request, both scaled."""
    taken = itertools.islice(open_trace(path, dataset), requests)
    made = Materialiser(taken, middle_tokens(1 << 15), scale)
    tokens: dict[int, int] = {}
    for planned in made.planned:
        small = made.block_tokens(planned.request.block_tokens)
        for i, block in enumerate(planned.request.blocks):
            tokens[block] = min(small, planned.prompt_tokens - i * small)
    longest = max(p.prompt_tokens + p.output_tokens for p in made.planned)
    return sum(tokens.values()), longest


def serve_and_replay(
    arm: Arm, dataset: str, path: Path, kv_tokens: int, block: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One server, one replay."""
    arguments = cpu_arguments(args.model, kv_tokens=kv_tokens, dtype=args.dtype)
    if not (args.model / "model.safetensors").exists():
        arguments += ["--load-format", "dummy"]
    arguments += ["--radix-eviction-policy", arm.policy, "--canopy-enable-forced-output"]
    if arm.own:
        config = {"block_tokens": block, "quantum_tokens": block, **args.policy_config}
        arguments += ["--radix-eviction-policy-config", json.dumps(config)]
    log = args.out / f"server-{arm.name}.log"
    environment = {CORE: arm.core}
    with serving(
        arguments, log=log, port=free_port(), environment=environment, describe=f"server {arm.name}"
    ) as server:
        return replay(
            dataset,
            str(path),
            server.url,
            "replay",
            tokenizer=str(args.model),
            num_prompts=args.num_prompts,
            time_scale=args.time_scale,
            trace_clock=True,
            scale_lengths=args.scale_lengths,
            max_concurrency=args.max_concurrency,
            tag=arm.name,
            **dict(arm.options),
        )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every trace under every arm. Results are written, and a finished run is not repeated."""
    args.out.mkdir(parents=True, exist_ok=True)
    everything: list[dict[str, Any]] = []
    for name, dataset, path in traces(args):
        distinct, longest = working_set(dataset, path, args.num_prompts, args.scale_lengths)
        kv_tokens = round(distinct * args.capacity)
        # Running requests are locked; below this size, requests wait for room, not for eviction.
        if kv_tokens < longest:
            raise CanopyError(
                f"{name}: a pool of {kv_tokens} tokens ({args.capacity:g} of {distinct}) does not "
                f"hold the longest request ({longest}); raise --capacity or lower --scale-lengths"
            )
        block = {"mooncake": 512, "agentic": 64}[dataset]
        block = max(1, round(block * args.scale_lengths))
        results = []
        for arm in args.policies:
            file = args.out / f"{name}-{args.capacity:g}-{arm.name}.json"
            if file.exists() and not args.again:
                results.append(json.loads(file.read_text()))
                continue
            result = serve_and_replay(arm, dataset, path, kv_tokens, block, args)
            result |= {"trace": name, "capacity": args.capacity, "working_set_tokens": distinct}
            file.write_text(json.dumps(result, indent=1) + "\n")
            results.append(result)
        print(f"\n## {name}, pool {kv_tokens} of {distinct} distinct tokens\n")
        print(report.results_table(results))
        everything += results
    return everything


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Mean hit rate by policy over the traces, and the difference to the first policy."""
    labels = list(dict.fromkeys(r["label"] for r in results))
    rates = {
        label: np.array([r["overall"]["hit_rate"] for r in results if r["label"] == label])
        for label in labels
    }
    base = rates[labels[0]]
    lines = [
        "| policy | hit rate | minus " + labels[0] + ", points | by trace |",
        "|---|---:|---:|---|",
    ]
    for label in labels:
        gain = (rates[label] - base) * 100
        each = ", ".join(f"{g:+.1f}" for g in gain)
        lines.append(f"| {label} | {rates[label].mean():.1%} | {gain.mean():+.1f} | {each} |")
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with mooncake/, ...")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument(
        "--model", type=Path, required=True, help="model directory (no weights: dummy)"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--trace", choices=["conversation", "synthetic", "agentic"], required=True)
    parser.add_argument("--policies", type=_arms, default="lru,canopy-lru,wa,wa-shuffled")
    parser.add_argument("--policy-config", type=json.loads, default={}, help="JSON, Canopy's arms")
    parser.add_argument("--capacity", type=float, default=0.05, help="pool, of distinct tokens")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--scale-lengths", type=Fraction, default=Fraction(1, 64))
    parser.add_argument("--time-scale", type=float, default=0.0)
    parser.add_argument("--max-concurrency", type=int, default=4)
    parser.add_argument("--seeds", type=_numbers, default="1", help="of the overlays: 1,2,3")
    parser.add_argument("--conversations", type=int, default=40, help="of an overlay")
    parser.add_argument("--window-s", type=float, default=1440, help="of an overlay")
    parser.add_argument("--again", action="store_true", help="run what has a result already")
    try:
        results = run(parser.parse_args())
    except CanopyError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    print("\n" + summary(results))
    return 0


def _arms(text: str) -> list[Arm]:
    unknown = [name for name in text.split(",") if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {unknown}; of: {', '.join(ARMS)}")
    return [ARMS[name] for name in text.split(",")]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
